"""``specgen serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from specgen.cli import flags
from specgen.cli.flags.subset import without
from specgen.cli.interrupt import Interrupt
from specgen.cli.one_answer import with_grammar
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.errors import UsageError
from specgen.options import Contexts, DraftOptions, GenerationOptions, Grammar, SamplerOptions
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options
from specgen.server.options import ServerOptions

_SERVER = "Server"
#: The default number of answers at once, if the memory has room for as many.
_N_PARALLEL = 4


@flags.takes_options(
    models=flags.models,
    server=flags.server,
    answer=without(flags.answer, "logprobs"),
    grammar=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
)
def serve(
    *,
    models: ModelChoice,
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            "-np",
            min=1,
            metavar="N",
            help="How many answers to generate at once; each has a context of its own.",
            show_default=f"{_N_PARALLEL}, or fewer if they do not fit into memory",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    learn_across: Annotated[
        bool,
        typer.Option(
            "--learn-across-requests",
            help="Use what is learnt about drafts in one request for later ones. The time of a request "
            "then depends a little on what other users wrote.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    server: ServerOptions,
    answer: GenerationOptions,
    grammar: Grammar | None,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    learn: flags.Learn = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Serve OpenAI's API and llama.cpp's over HTTP, several answers at once.

    Standard output shows the address; a browser finds a small chat there. The options of
    answers, sampling and drafting apply to requests that leave them out. SIGTERM ends the server as
    soon as the current answers are finished.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    _check_installed()
    if learn and not learn_across:
        raise UsageError(
            "--learn uses one user's texts to draft for the others",
            hint="if that is acceptable, add --learn-across-requests",
        )
    generation = with_grammar(answer, grammar, json=True)
    sources = find_models(models, quiet=quiet)
    options = session_options(sources, sampling, drafting, generation, machine, learn=learn)
    with contextlib.ExitStack() as stack:
        from specgen.engine.engine import Engine
        from specgen.server.addresses import bound_socket, url_of
        from specgen.server.run import serve as answer_requests
        from specgen.workshop.online.learner import Learner

        bound = stack.enter_context(bound_socket(server.host, server.port, server.limits.client_s))
        use_kernels(machine.kernels, quiet=quiet)
        stack.enter_context(log_shown(verbose))
        loaded = stack.enter_context(
            open_session(options, quiet=quiet, verbose=verbose, drafts=sources.drafts)
        )
        stack.callback(loaded.memory.save)
        with Interrupt() as stop:
            engine = Engine.largest(
                loaded,
                parallel or _N_PARALLEL,
                None,
                is_fixed=parallel is not None,
                interrupted=stop,
                learn_alone=not learn_across,
            )
        stack.enter_context(engine)
        if stop():
            return stop.exit_code

        def note(text: str) -> None:
            if not quiet:
                print(f"note: {text}", file=sys.stderr)

        note(
            f"{engine.n_parallel} answers at once, contexts of {engine.n_ctx} tokens; "
            f"draft: {loaded.drafts.name}"
        )
        for notice in engine.take_notices():
            note(notice)
        learner = stack.enter_context(Learner(loaded, engine, note))
        answer_requests(
            loaded,
            engine,
            server,
            bound,
            is_verbose=verbose,
            ready=lambda: print(f"listening on {url_of(bound)}", flush=True),
            note=note,
            between_answers=lambda begins: learner.between_answers(begins=begins),
        )
    return 0


def _check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"specgen serve needs {error.name}, which is not installed",
            hint="pip install 'specgen[server]'",
        ) from error
