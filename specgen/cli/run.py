"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.interrupt import Interrupt
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.cli.prompt import read_prompt
from specgen.errors import UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, SamplerOptions, Show
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options

if TYPE_CHECKING:
    from specgen.engine.session import Prompt, Session


@flags.takes_options(
    models=flags.models,
    answer=flags.answer,
    grammar=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
)
def run(
    *,
    models: ModelChoice,
    prompt_argument: flags.PromptArgument = None,
    prompt_option: flags.PromptOption = None,
    prompt_file: flags.PromptFile = None,
    chat: flags.Chat = None,
    system: flags.System = None,
    answer: GenerationOptions,
    grammar: flags.Constraint,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    show: flags.ShowOption = "accepted",
    stats: flags.Stats = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal,
    colours show which tokens were drafted and accepted, and which the target chose itself.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    if system is not None and chat is False:
        raise UsageError("--system needs the chat template, --raw does without")
    if answer.logprobs is not None and not json:
        raise UsageError("--logprobs needs --json, in whose events they are")
    if grammar.grammar is not None and answer.ignore_eos:
        raise UsageError("--ignore-eos and a grammar exclude each other: its text has an end")
    if grammar.note is not None and not quiet:
        print(f"note: {grammar.note}", file=sys.stderr)
    prompt = read_prompt(prompt_argument, prompt_option, prompt_file)

    sources = find_models(models, quiet=quiet)
    options = session_options(
        sources,
        sampling,
        drafting,
        replace(answer, grammar=grammar.grammar),
        machine,
    )
    use_kernels(machine.kernels, quiet=quiet)
    with (
        log_shown(verbose),
        open_session(options, quiet=quiet, verbose=verbose, drafts=sources.drafts) as session,
    ):
        return _answer(
            session,
            session.prompt(prompt, chat=chat, system=system),
            show=show,
            stats=stats if stats is not None else not (json or quiet),
            json=json,
            quiet=quiet,
            verbose=verbose,
        )


def _answer(
    session: Session,
    prompt: Prompt,
    *,
    show: Show,
    stats: bool,
    json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Generate and show the answer; returns the exit code."""
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
        for event in session.generate(
            prompt,
            interrupted=interrupt,
            estimate_gain=stats or json,
        ):
            renderer.handle(event)
            if isinstance(event, FinishedEvent):
                finish_reason = event.finish_reason
    session.memory.save()
    return interrupt.exit_code if finish_reason == "interrupted" else 0
