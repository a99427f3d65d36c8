"""Leaves out the oldest turns of a request's conversation that do not fit into the context."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from specgen.serve.formats.engine_requests import prompt_of
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.session.prompts import Prompt
from specgen.session.prompts.context_window import room_for_prompt, turns_to_leave_out
from specgen.session.prompts.template import Message
from specgen.session.session import Session
from specgen.system.quantities import counted


def fitting_prompt(
    request: ParsedRequest,
    session: Session,
    n_ctx: int,
    max_tokens: int,
) -> tuple[ParsedRequest, Prompt]:
    """Render a request's prompt, without the turns that do not fit if they may be left out.

    System messages and the last turn are always kept.

    Args:
        request: The request.
        session: The model that answers it.
        n_ctx: The context size of its engine.
        max_tokens: The number of tokens that the prompt may have at most. If turns cannot be left
            out, it may have more.

    Returns:
        The request without these turns, and its prompt.

    Raises:
        UsageError: If the model lacks a chat template or tokens that the request needs.
        PromptError: If the prompt is empty, not valid, or too long although no turns can be left
            out.
    """
    turns = _turns(request.messages)
    if not request.leaves_out_turns or len(turns) < 2:
        return request, prompt_of(request, session, n_ctx)

    def shortened(n_left_out: int) -> ParsedRequest:
        left_out = [message for turn in turns[:n_left_out] for message in turn]
        kept = [message for turn in turns[n_left_out:] for message in turn]
        system = [message for message in left_out if message.role == "system"]
        return replace(request, messages=(*system, *kept))

    @functools.cache
    def prompt(n_left_out: int) -> Prompt:
        return prompt_of(shortened(n_left_out), session, n_ctx, must_fit=False)

    n_room = min(max_tokens, room_for_prompt(n_ctx, request.generation.max_tokens))
    n_left_out = turns_to_leave_out(
        len(turns), n_ctx, n_room, lambda number: len(prompt(number).tokens)
    )
    fitted = shortened(n_left_out)
    if n_left_out > 0:
        count = counted(n_left_out, "old turn")
        warning = f"messages: {count} left out, because the context is full"
        fitted = replace(fitted, warnings=(*request.warnings, warning))
    return fitted, prompt(n_left_out)


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Cut a conversation into turns, each of which begins with messages of the user.

    What comes before the first of them belongs to the first turn.
    """
    turns: list[list[Message]] = [[]]
    role_before = "user"
    for message in messages:
        if message.role == "user" and role_before != "user":
            turns.append([])
        turns[-1].append(message)
        if message.role != "system":
            role_before = message.role
    return turns
