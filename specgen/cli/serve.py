"""``specgen serve``: an HTTP server with OpenAI's API."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer
from typer import Option

from specgen.cli import flags
from specgen.cli.flags.server import limits, server
from specgen.cli.model_loading import log_shown, use_kernels
from specgen.cli.output import Output
from specgen.cli.process import Interrupt
from specgen.cli.served_models import (
    MEMORY_SHARE,
    ModelLoader,
    ModelSetup,
    model_setup,
    read_models,
)
from specgen.errors import UsageError
from specgen.serve.server.options import Limits, ServerOptions

_UNITS = {"": 2**20, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def _memory_size(text: str) -> int:
    """Parse a size, in bytes: 24GB, 24GiB, or a number of MiB."""
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    try:
        n_bytes = float(number.removesuffix(unit)) * {**_UNITS, **_BINARY_UNITS}[unit.strip()]
    except (ValueError, KeyError):
        n_bytes = 0.0
    if not 1 <= n_bytes < 2**63:
        raise typer.BadParameter(f"{text!r} is no size like 24GB, 24GiB or 24000 (MiB)")
    return int(n_bytes)


@flags.takes_options(
    flags.panel(
        "Server",
        models=Option(
            "--models",
            metavar="FILE|FOLDER",
            help="Serve several models, each loaded when a request names it: those of a TOML file, with a "
            "table of long options for each, or all models in a folder.",
            show_default="one model",
        ),
        memory=Option(
            "--memory",
            metavar="SIZE",
            parser=_memory_size,
            help="With --models: how much memory loaded models may take, for example 24GB or 24GiB. Idle ones "
            "that were not used for longest are unloaded.",
            show_default=f"{MEMORY_SHARE:.0%} of the machine's memory",
        ),
        learn_across=Option(
            "--learn-across-requests",
            help="Use what is learnt about drafts in one request for later ones. The time of a request "
            "then depends a little on what other users wrote.",
        ),
    ),
    server=server,
    limits=limits,
    model=model_setup.later(),
    output=flags.loudness,
)
def serve(
    *,
    model: Callable[..., ModelSetup],
    models: Path | None = None,
    memory: int | None = None,
    learn_across: bool = False,
    server: ServerOptions,
    limits: Limits,
    output: Output,
) -> int:
    """Serve OpenAI's, Anthropic's and llama.cpp's APIs over HTTP, several answers at once.

    Standard output shows the address; a browser finds a small chat there. The options of
    answers, sampling and drafting apply to requests that leave them out. SIGTERM ends the server as
    soon as the current answers are finished.
    """
    _check_installed()
    server, stop = replace(server, limits=limits), Interrupt()
    if memory is not None and models is None:
        raise UsageError("--memory needs --models: a single model stays loaded")
    if server.alias is not None and models is not None:
        raise UsageError("--alias names a single model; with --models, each has a name")
    wanted = model()
    with contextlib.ExitStack() as stack:
        from specgen.serve.server.app import serve as answer_requests
        from specgen.serve.server.model_pool import ModelPool
        from specgen.serve.server.options import bound_socket, url_of
        from specgen.system.machine import look_at_machine

        bound = stack.enter_context(bound_socket(server.host, server.port, limits.client_s))
        stack.enter_context(log_shown(output))
        memory_bytes = None
        if models is not None:
            memory_bytes = memory or MEMORY_SHARE * look_at_machine().memory_bytes
        loader = ModelLoader(output, learn_across, stop, memory_bytes)
        if models is not None:
            use_kernels(wanted.setup.machine.kernels, output)
            entries = read_models(models, model, loader)
        else:
            entries = [loader.entry(server.alias or "", wanted)]
            use_kernels(wanted.setup.machine.kernels, output)
        pool = stack.enter_context(
            ModelPool(entries, limits, memory_bytes or math.inf, output.note)
        )
        if models is None:
            with stop:
                pool.load(entries[0].name)
            if stop():
                return stop.exit_code
        else:
            names = ", ".join(entry.name for entry in entries)
            output.note(f"serving {names}")
        answer_requests(
            pool,
            server,
            bound,
            is_verbose=output.verbose > 0,
            ready=lambda: print(f"listening on {url_of(bound)}", flush=True),
            note=output.note,
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
