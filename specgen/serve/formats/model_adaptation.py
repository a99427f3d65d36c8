"""Adapt a request to the model that answers it: the form of its calls, its template, its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.errors import PromptError, UsageError
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.serve.formats.request_errors import BodyError
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.formats.tool_calls.grammar import calls_grammar
from specgen.session.prompts import template_of
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS

if TYPE_CHECKING:
    from specgen.llama.model import LlamaModel
    from specgen.llama.vocabulary import LlamaVocabulary

#: Variables of chat templates that control how much is thought; few templates read both.
_THINKING_VARIABLES = frozenset(["enable_thinking", "reasoning_effort"])
_DESCRIBES_TOOLS = re.compile(r"\b(?:tools|functions)\b")


def for_model(request: ParsedRequest, model: LlamaModel) -> ParsedRequest:
    """Return the request as this model answers it. Raise `BodyError`."""
    template = template_of(model, has_tools=True)
    request = with_call_form(request, template, model.vocabulary.has_control)
    return _with_token_biases(request, model.vocabulary)


def with_call_form(
    request: ParsedRequest,
    template: str | None,
    has_token: Callable[[str], bool] = lambda _name: False,
) -> ParsedRequest:
    """Return the request for a model with this chat template.

    It gets the variables that the template reads, and the form of the model's calls, with a grammar
    for them. Calls that cannot be read stay text, with a warning.

    Args:
        request: The request of any API.
        template: The model's chat template.
        has_token: Whether the model has a control token of this name.

    Raises:
        BodyError: A call is required and cannot be read, or other fields exclude calls.
    """
    template = template or ""
    request = _with_read_variables(request, template)
    if request.splits_reasoning:
        generation = replace(request.generation, shown_controls=THOUGHT_CONTROLS)
        request = replace(request, generation=generation)
    if request.tools is None:
        return request

    form = form_of(template, has_token)
    if form is None:
        what = "the model's chat template takes no tools, or writes calls in an unknown form"
        if request.tools.must_call:
            raise BodyError("tool_choice", what)
        return replace(request, warnings=(*request.warnings, f"tools: {what}; calls stay text"))
    request = replace(request, call_form=form)
    request, warnings = _with_calls_grammar(request)
    if not _DESCRIBES_TOOLS.search(template):
        warnings.append("the model's chat template does not describe them to the model")
    shown = dict.fromkeys((*request.generation.shown_controls, *form.control_tokens))
    return replace(
        request,
        generation=replace(request.generation, shown_controls=tuple(shown)),
        warnings=(*request.warnings, *(f"tools: {each}" for each in warnings)),
    )


def _with_calls_grammar(request: ParsedRequest) -> tuple[ParsedRequest, list[str]]:
    """Return the request with a grammar of its calls, and what that cannot enforce."""
    form = request.call_form
    tools = request.tools
    generation = request.generation
    assert form is not None
    assert tools is not None
    if generation.grammar is not None and generation.grammar.form == "gbnf":
        raise BodyError("grammar", "it excludes tools; use a JSON schema instead")
    if tools.must_call and generation.ignore_eos:
        raise BodyError("ignore_eos", "a text that follows a grammar must be able to end")
    other = generation.grammar
    if tools.must_call:
        other = None
    # Otherwise the grammar only keeps calls in form, which a request does not ask for.
    is_asked_for = tools.must_call or other is not None
    try:
        grammar, warnings = calls_grammar(
            form,
            tools.callable,
            is_parallel=tools.is_parallel,
            must_call=tools.must_call,
            other=other,
        )
    except UsageError as error:
        if is_asked_for:
            raise BodyError("tools", error.message) from None
        return request, []
    if not is_asked_for:
        warnings = []
    return replace(request, generation=replace(generation, grammar=grammar)), warnings


def _with_read_variables(request: ParsedRequest, template: str) -> ParsedRequest:
    """Return the request with the variables that the template reads; warn about others."""
    words = set(re.findall(r"\w+", template))
    read = {}
    unread = []
    for name, value in request.variables.items():
        if name in words:
            read[name] = value
        else:
            unread.append(name)
    warnings = [
        f"{name}: ignored, since the chat template does not read it"
        for name in unread
        if name not in _THINKING_VARIABLES or not _THINKING_VARIABLES & read.keys()
    ]
    return replace(request, variables=read, warnings=(*request.warnings, *sorted(warnings)))


def _with_token_biases(request: ParsedRequest, vocabulary: LlamaVocabulary) -> ParsedRequest:
    """Return the request with its biases as those of tokens.

    Raises:
        BodyError: The model does not have one of the tokens.
    """
    if request.biases is None:
        return request
    found: list[tuple[int, float]] = []
    for key, bias in request.biases:
        tokens = [key] if isinstance(key, int) else vocabulary.tokenize_inside(key)
        try:
            vocabulary.check(tokens)
        except PromptError as error:
            raise BodyError("logit_bias", error.message) from None
        found += ((token, bias) for token in tokens)
    return replace(request, sampling=replace(request.sampling, logit_bias=tuple(found)))
