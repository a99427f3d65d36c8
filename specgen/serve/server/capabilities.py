"""What a model can do, for clients that ask before they use a feature."""

from __future__ import annotations

from specgen.llama import LlamaModel
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.session.prompts import template_of
from specgen.session.prompts.chat import template_problem
from specgen.session.prompts.infill import InfillTokens
from specgen.session.prompts.thoughts import writes_thoughts


def capabilities_of(model: LlamaModel) -> list[str]:
    """Return what a model can do, in Ollama's words, and ``chat`` if it has a valid template.

    Only its metadata and its vocabulary are used.
    """
    if model.pooling is not None:
        return ["embedding"]
    template = template_of(model, has_tools=True) or ""
    if template_problem(model):
        template = ""
    abilities = {
        "completion": True,
        "chat": bool(template),
        "tools": form_of(template, model.vocabulary.has_control) is not None,
        "thinking": writes_thoughts(template),
        "insert": InfillTokens.of(model.vocabulary) is not None,
    }
    return [name for name, is_able in abilities.items() if is_able]
