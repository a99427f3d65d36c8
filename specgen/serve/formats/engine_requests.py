"""From a body in the format of an API to requests of an engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from specgen.options import SamplerOptions
from specgen.serve.formats.fields import Json
from specgen.serve.formats.model_adaptation import for_model
from specgen.serve.formats.parsed_request import Defaults, ParsedRequest, ParsedRequests
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.prompts.infill import infill_prompt
from specgen.session.request import Request
from specgen.session.session import Session

#: Reads a body in the format of an API; raises `BodyError` if a field cannot be honoured.
Reader: TypeAlias = Callable[[Json, Defaults], ParsedRequests]
#: Inserts an answer into an engine.
Insert: TypeAlias = Callable[[Engine], Request]


def parse_requests(
    read: Reader,
    session: Session,
    body: Json,
) -> ParsedRequests:
    """Return the requests in a body, one for each of its prompts.

    Raises:
        BodyError: If a field cannot be honoured.
    """
    requests = read(body, defaults_of(session))
    return tuple(for_model(request, session.target) for request in requests)


def defaults_of(session: Session) -> Defaults:
    """Return the values of the fields that a body leaves out, which the session's options set."""
    options = session.options
    return Defaults(options.sampler, options.generation)


def prompt_of(
    request: ParsedRequest,
    session: Session,
    n_ctx: int,
    *,
    must_fit: bool = True,
) -> Prompt:
    """Render the prompt of a request.

    Args:
        request: The request.
        session: The model that the prompt is for.
        n_ctx: The context size of its engine.
        must_fit: Whether a text that is certainly too long is refused without being tokenized.

    Raises:
        UsageError: If the model lacks a chat template or tokens that the request needs.
        PromptError: If the prompt is empty, too long, or not valid.
    """
    if request.gap is None:
        prompts = replace(session.prompts, n_ctx=n_ctx if must_fit else None)
        return request.prompt(prompts, datetime.datetime.now().astimezone())
    # The parts of a text that are far from the gap matter little, so they are cut to leave room for
    # the answer. The answer gets at most three quarters of the context.
    n_answer_tokens = request.generation.max_tokens
    if n_answer_tokens < 0:
        n_answer_tokens = n_ctx // 4
    max_tokens = max(n_ctx // 4, n_ctx - n_answer_tokens)
    prompt, _ = infill_prompt(session.target, session.translated_draft, request.gap, max_tokens)
    return prompt


def inserts_of(request: ParsedRequest, prompt: Prompt) -> list[Insert]:
    """Return a function for each answer to a prompt, which inserts it into an engine."""
    settings = request.speculative
    return [
        partial(
            Engine.insert,
            prompt=prompt,
            sampling=_sampling(request.sampling, number),
            generation=request.generation,
            draft=settings.draft,
            n_drafted_max=settings.max,
            verifier=settings.verifier,
        )
        for number in range(request.n)
    ]


def _sampling(sampling: SamplerOptions, number: int) -> SamplerOptions:
    """Return the sampler options of one of several answers, which differ in their seeds."""
    if sampling.seed < 0:  # each answer gets a random seed
        return sampling
    return replace(sampling, seed=sampling.seed + number)
