"""``specgen serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from typer import Option

from specgen.cli import flags
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Output
from specgen.cli.process import Interrupt
from specgen.errors import UsageError
from specgen.serving.server.options import Limits, ServerOptions

#: The default number of answers at once, if the memory has room for as many.
_N_PARALLEL = 4


@flags.takes_options(
    flags.panel(
        "Server",
        parallel=Option(
            "--parallel",
            "-np",
            min=1,
            metavar="N",
            help="How many answers to generate at once; each has a context of its own.",
            show_default=f"{_N_PARALLEL}, or fewer if they do not fit into memory",
        ),
        learn_across=Option(
            "--learn-across-requests",
            help="Use what is learnt about drafts in one request for later ones. The time of a request "
            "then depends a little on what other users wrote.",
        ),
    ),
    server=flags.server,
    limits=flags.limits,
    setup=flags.setup.without("answer_logprobs"),
    output=flags.loudness,
)
def serve(
    *,
    setup: Setup,
    parallel: int | None = None,
    learn_across: bool = False,
    server: ServerOptions,
    limits: Limits,
    output: Output,
) -> int:
    """Serve OpenAI's API and llama.cpp's over HTTP, several answers at once.

    Standard output shows the address; a browser finds a small chat there. The options of
    answers, sampling and drafting apply to requests that leave them out. SIGTERM ends the server as
    soon as the current answers are finished.
    """
    _check_installed()
    if setup.learn and not learn_across:
        raise UsageError(
            "--learn uses one user's texts to draft for the others",
            hint="if that is acceptable, add --learn-across-requests",
        )
    server = replace(server, limits=limits)
    sources, options = setup.find(output)
    with contextlib.ExitStack() as stack:
        from specgen.engine.engine import Engine
        from specgen.serving.server.addresses import bound_socket, url_of
        from specgen.serving.server.run import serve as answer_requests
        from specgen.training.learner import Learner

        bound = stack.enter_context(bound_socket(server.host, server.port, limits.client_s))
        loaded = stack.enter_context(opened(options, setup.machine.kernels, output, sources.drafts))
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
        output.note(
            f"{engine.n_parallel} answers at once, contexts of {engine.n_ctx} tokens; "
            f"draft: {loaded.drafts.name}"
        )
        for notice in engine.take_notices():
            output.note(notice)
        learner = stack.enter_context(Learner(loaded, engine, output.note))
        answer_requests(
            loaded,
            engine,
            server,
            bound,
            is_verbose=output.verbose,
            ready=lambda: print(f"listening on {url_of(bound)}", flush=True),
            note=output.note,
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
            hint="pip install 'specgen-gguf[server]'",
        ) from error
