"""The forms of tool calls, recognised by a model's chat template.

A model is trained on the calls that its template writes. The families here write JSON objects with a name and
arguments; they differ in the text around them, and in whether they write a list of objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a family's calls: `opening`, an object or a list of objects, `closing`."""

    opening: str
    closing: str = ""
    #: The object's key for the arguments.
    arguments: str = "arguments"
    is_list: bool = False
    #: Whether the model may write a call without `opening`.
    is_bare: bool = False

    @property
    def controls(self) -> tuple[str, ...]:
        """Texts that may be control tokens; they are found only if the text shows control tokens."""
        return tuple(text for text in (self.opening, self.closing) if text)


HERMES = CallForm("<tool_call>", "</tool_call>")
LLAMA = CallForm("<|python_tag|>", arguments="parameters", is_bare=True)
MISTRAL = CallForm("[TOOL_CALLS]", is_list=True)
GRANITE = CallForm("<|tool_call|>", is_list=True)


def form_of(template: str) -> CallForm | None:
    """Return the form of a template's calls; None if the template takes no tools, or writes calls in a form
    that specgen cannot read."""
    if not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        # Since Mistral Small 3.2 the name stands before the object.
        return None if "[ARGS]" in template else MISTRAL
    if "<|tool_call|>" in template:
        return GRANITE
    if "<tool_call>" in template:
        # Qwen3-Coder's and GLM's calls have the same marks, with XML between them.
        is_xml = "<function=" in template or "<arg_key>" in template
        return None if is_xml else HERMES
    if "ipython" in template and '"parameters": ' in template:
        return LLAMA
    return None
