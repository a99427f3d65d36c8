"""Generates one answer and shows it; shared by the commands that do so."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.cli.interrupt import Interrupt
from specgen.errors import UsageError
from specgen.options import GenerationOptions, Grammar, Show

if TYPE_CHECKING:
    from specgen.engine.models import Models
    from specgen.engine.prompts import Prompt
    from specgen.events import FinishedEvent


def with_grammar(
    answer: GenerationOptions, grammar: Grammar | None, *, json: bool
) -> GenerationOptions:
    """Return an answer's options with a grammar, if there is one. Raises `UsageError` if they exclude each
    other."""
    if answer.logprobs is not None and not json:
        raise UsageError("--logprobs needs --json: only events have log-probabilities")
    if grammar is not None and answer.ignore_eos:
        raise UsageError(
            "--ignore-eos and a grammar exclude each other: text that follows a grammar has an end"
        )
    return replace(answer, grammar=grammar)


def show_answer(
    loaded: Models,
    prompt: Prompt,
    *,
    show: Show,
    stats: bool,
    json: bool,
    quiet: bool,
    verbose: bool,
    on_finished: Callable[[FinishedEvent], None] = lambda _finished: None,
) -> int:
    """Generate an answer and show it; return the exit code. `on_finished` gets its last event."""
    from specgen.engine.engine import generate
    from specgen.events import FinishedEvent
    from specgen.render import make_renderer

    renderer = make_renderer(
        stdout=sys.stdout,
        stderr=sys.stderr,
        environ=os.environ,
        json=json,
        show=show,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
    )
    interrupt = Interrupt()
    finish_reason = ""
    with interrupt, renderer:
        for event in generate(
            loaded,
            prompt,
            interrupted=interrupt,
            estimate_gain=stats or json,
        ):
            renderer.handle(event)
            if isinstance(event, FinishedEvent):
                finish_reason = event.finish_reason
                on_finished(event)
    loaded.memory.save()
    return interrupt.exit_code if finish_reason == "interrupted" else 0
