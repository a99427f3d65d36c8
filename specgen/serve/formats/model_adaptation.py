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
from specgen.session.prompts.chat import missing_template_notice, template_problem
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS

if TYPE_CHECKING:
    from specgen.llama.model import LlamaModel
    from specgen.llama.vocabulary import LlamaVocabulary

#: The variables of chat templates for thinking. Few templates read both, so one of them is enough.
_THINKING_VARIABLES = frozenset(["enable_thinking", "reasoning_effort"])
_DESCRIBES_TOOLS = re.compile(r"\b(?:tools|functions)\b")


def for_model(request: ParsedRequest, model: LlamaModel) -> ParsedRequest:
    """Return the request with everything that depends on the model.

    Raises:
        UsageError: If its chat template is not valid.
        BodyError: If the model cannot honour a field.
    """
    if request.kind == "chat":
        request = _with_checked_template(request, model)
    template = template_of(model, has_tools=True)
    request = with_call_form(request, template, model.vocabulary.has_control)
    return _with_token_biases(request, model.vocabulary)


def _with_checked_template(request: ParsedRequest, model: LlamaModel) -> ParsedRequest:
    """Return a chat with a warning if the model has no chat template for it.

    Raises:
        UsageError: If a template has a syntax error.
    """
    problem = template_problem(model)
    if problem:
        raise UsageError(f"{problem}; choose another with the server's option --chat-template")
    has_template = template_of(model, has_tools=request.tools is not None) is not None
    if has_template or not request.needs_template:
        return request
    warning = f"messages: {missing_template_notice(model)}"
    return replace(request, warnings=(*request.warnings, warning))


def with_call_form(
    request: ParsedRequest,
    template: str | None,
    has_token: Callable[[str], bool] = lambda _name: False,
) -> ParsedRequest:
    """Return the request for a model with this chat template.

    The request keeps the variables that the template reads. If it has tools, it gets the form of
    the model's calls and a grammar for them. Calls in an unknown form stay text, with a warning.

    Args:
        request: The request of any API.
        template: The model's chat template.
        has_token: Tells whether the model has a control token of this name.

    Raises:
        BodyError: If a call is required but its form unknown, or if other fields exclude calls.
    """
    template = template or ""
    request = _without_unread_variables(request, template)
    if request.splits_reasoning:
        generation = replace(request.generation, shown_controls=THOUGHT_CONTROLS)
        request = replace(request, generation=generation)
    if request.tools is None:
        return request

    form = form_of(template, has_token)
    if form is None:
        reason = "the model's chat template takes no tools, or writes calls in an unknown form"
        if request.tools.must_call:
            raise BodyError("tool_choice", reason)
        return replace(request, warnings=(*request.warnings, f"tools: {reason}; calls stay text"))
    request = replace(request, call_form=form)
    request, warnings = _with_calls_grammar(request)
    if not _DESCRIBES_TOOLS.search(template):
        warnings.append("the model's chat template does not describe them to the model")
    # The parser of calls has to see their control tokens.
    shown_controls = dict.fromkeys((*request.generation.shown_controls, *form.control_tokens))
    return replace(
        request,
        generation=replace(request.generation, shown_controls=tuple(shown_controls)),
        warnings=(*request.warnings, *(f"tools: {warning}" for warning in warnings)),
    )


def _with_calls_grammar(request: ParsedRequest) -> tuple[ParsedRequest, list[str]]:
    """Return the request with a grammar for its calls, and warnings about what that cannot enforce.

    Raises:
        BodyError: If another field excludes calls, or no call conforms to a function's schema.
    """
    form = request.call_form
    tools = request.tools
    generation = request.generation
    assert form is not None
    assert tools is not None
    if generation.grammar is not None and generation.grammar.form != "json_schema":
        raise BodyError("grammar", "it cannot be combined with tools; use a JSON schema instead")
    if tools.must_call and generation.ignore_eos:
        raise BodyError("ignore_eos", "a text that follows a grammar must be able to end")
    other = generation.grammar
    if tools.must_call:
        other = None
    # If the answer may be free text, the grammar is only a help to write valid calls. The request
    # did not ask for it, so problems with it are not worth an error or a warning.
    is_requested = tools.must_call or other is not None
    try:
        grammar, warnings = calls_grammar(
            form,
            tools.callable,
            is_parallel=tools.is_parallel,
            must_call=tools.must_call,
            other=other,
        )
    except UsageError as error:
        if is_requested:
            raise BodyError("tools", error.message) from None
        return request, []
    if not is_requested:
        warnings = []
    return replace(request, generation=replace(generation, grammar=grammar)), warnings


def _without_unread_variables(request: ParsedRequest, template: str) -> ParsedRequest:
    """Drop the variables that the template does not read, with a warning."""
    template_words = set(re.findall(r"\w+", template))
    read_variables = {}
    unread_names = []
    for name, value in request.variables.items():
        if name in template_words:
            read_variables[name] = value
        else:
            unread_names.append(name)
    reads_thinking = bool(_THINKING_VARIABLES & read_variables.keys())
    warnings = [
        f"{name}: ignored, since the chat template does not read it"
        for name in unread_names
        if name not in _THINKING_VARIABLES or not reads_thinking
    ]
    return replace(
        request,
        variables=read_variables,
        warnings=(*request.warnings, *sorted(warnings)),
    )


def _with_token_biases(request: ParsedRequest, vocabulary: LlamaVocabulary) -> ParsedRequest:
    """Turn the biases of a request into an option of the sampler, with token ids for texts.

    Raises:
        BodyError: If the model does not have one of the tokens.
    """
    if request.biases is None:
        return request
    token_biases: list[tuple[int, float]] = []
    for key, bias in request.biases:
        tokens = [key] if isinstance(key, int) else vocabulary.tokenize_inside(key)
        try:
            vocabulary.check(tokens)
        except PromptError as error:
            raise BodyError("logit_bias", error.message) from None
        token_biases += ((token, bias) for token in tokens)
    return replace(request, sampling=replace(request.sampling, logit_bias=tuple(token_biases)))
