"""``specgen serve``: an HTTP server with OpenAI's, Anthropic's and llama.cpp's APIs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli import flags
from specgen.cli.flags import option
from specgen.cli.flags.server import ModelSetup, later, limits, model_setup, options_in, server
from specgen.cli.model_loading import log_shown, use_kernels
from specgen.cli.output import Interrupt, Output
from specgen.errors import UsageError
from specgen.options import parse_size
from specgen.serve.server.options import Limits, ServedOptions, ServerOptions, bound_socket, url_of
from specgen.system.machine import usable_memory
from specgen.system.quantities import human_bytes

if TYPE_CHECKING:
    from specgen.serve.server.model_pool import ModelEntry
    from specgen.serve.server.served_models import ModelLoader

#: The default of --memory, as a share of the memory that this process may use.
_MEMORY_SHARE = 0.8
#: Options of the whole server, which the table of a model cannot set.
_SERVER_WIDE_OPTIONS = {"kernels", "packed-cache"}


def _memory_size(text: str) -> int:
    """Return a size in bytes, given with a unit (24GB, 24GiB) or as a number of MiB."""
    return parse_size(f"{text}MiB" if text.isdigit() else text)


_server = partial(option, panel="Server")


@flags.takes_options
def serve(
    *,
    models: Path | None = _server(
        None,
        "--models",
        "Serve several models, each loaded when a request names it: those of a TOML file, with a "
        "table of options for each, or of a folder.",
        metavar="FILE|FOLDER",
        show_default="the models on this disk, if no model is named",
    ),
    memory: int | None = _server(
        None,
        "--memory",
        "With several models: how much memory loaded models may use, for example 24GB or 24GiB.",
        metavar="SIZE",
        parse=_memory_size,
        show_default=f"{_MEMORY_SHARE:.0%} of the memory of the machine or the container",
    ),
    learn_across: bool = _server(
        False,
        "--learn-across-requests",
        "Let later requests benefit from what earlier ones taught about drafts. Response times "
        "then reveal a little of what other users wrote.",
    ),
    server: ServerOptions = server,
    limits: Limits = limits,
    model: Callable[..., ModelSetup] = later(model_setup),
    output: Output = flags.loudness,
) -> int:
    """Serve OpenAI's, Anthropic's and llama.cpp's APIs over HTTP, several answers at once.

    Without a model, all models on this disk are served by name, including those of Ollama, LM
    Studio and other programs (`specgen models list`). Each is loaded when a request names it.

    Standard output shows the address, which opens a small chat in a browser. Options apply to
    requests that leave them out. SIGTERM ends the server as soon as the current answers are
    finished.
    """
    try:
        from specgen.serve.server.app import serve as answer_requests
        from specgen.serve.server.model_pool import ModelPool
        from specgen.serve.server.served_models import ModelLoader
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        hint = "pip install 'specgen-gguf[server]'"
        raise UsageError(f"specgen serve needs {name}, which is not installed", hint) from error
    default_setup = model()
    stored = {} if models is not None else _models_to_serve(default_setup, server)
    if memory is not None and models is None and not stored:
        raise UsageError("--memory needs --models: a single model stays loaded")
    if server.alias is not None and models is not None:
        raise UsageError("--alias names a single model; with --models, each has its own name")
    server = replace(server, limits=limits)
    stop = Interrupt()

    def options_of(table: Mapping[str, Any]) -> ServedOptions:
        """Return the options of a model in the file of --models."""
        changes = options_in(table, without=_SERVER_WIDE_OPTIONS)
        return model(**changes).served(quiet=output.quiet)

    def announce() -> None:
        """Print the addresses, once requests are accepted."""
        url = url_of(bound)
        apis = f"OpenAI's API: {url}/v1; Anthropic's and llama.cpp's: {url}"
        output.note(f"a chat for the browser: {url}; {apis}")
        print(f"listening on {url}", flush=True)

    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(bound_socket(server.host, server.port, limits.client_s))
        stack.enter_context(log_shown(output))
        kernels = default_setup.setup.machine.kernels
        entries: list[ModelEntry] = []
        max_bytes = math.inf
        has_several = models is not None or bool(stored)
        if has_several:
            use_kernels(kernels, output)  # before reading models: kernels decide which files work
            max_bytes = _memory_for_models(memory, output)
            loader = ModelLoader(output.reporter, learn_across, stop, max_bytes)
            entries = _read_several(
                models,
                stored,
                options_of,
                loader,
                output,
            )
        is_single = not entries  # also if none of the models on this disk can be served
        if is_single:
            max_bytes = math.inf
            loader = ModelLoader(output.reporter, learn_across, stop)
            entries = [loader.entry(server.alias or "", default_setup.served(quiet=output.quiet))]
            if not has_several:
                use_kernels(kernels, output)  # after finding the model, as other commands do
        pool = stack.enter_context(ModelPool(entries, limits, max_bytes, output.note))
        if is_single:
            with stop:  # a single model is loaded before the first request
                pool.load(entries[0].name)
            if stop():
                return stop.exit_code
        answer_requests(
            pool,
            server,
            bound,
            is_verbose=output.verbose > 0,
            ready=announce,
            note=output.note,
        )
    return 0


def _models_to_serve(setup: ModelSetup, server: ServerOptions) -> dict[str, Path]:
    """Return the models on this disk, by their names in requests, if the user named no model."""
    from specgen.models.registry import load_registry
    from specgen.models.stored_models import servable_models

    models = setup.setup.models
    if models.target or models.draft or models.pair or server.alias is not None:
        return {}
    return servable_models(load_registry())


def _memory_for_models(given: int | None, output: Output) -> float:
    """Return how many bytes loaded models may use; say so if it is more than there are."""
    usable = usable_memory()
    max_bytes = given or _MEMORY_SHARE * usable.amount
    if max_bytes > usable.amount:
        why = usable.limit or f"this machine has {human_bytes(usable.amount)}"
        output.note(f"--memory {human_bytes(int(max_bytes))} is too much: {why}")
    return max_bytes


def _read_several(
    models: Path | None,
    stored: Mapping[str, Path],
    options_of: Callable[[Mapping[str, Any]], ServedOptions],
    loader: ModelLoader,
    output: Output,
) -> list[ModelEntry]:
    """Return the models of --models, or else those on this disk, and print a note that names them.

    Args:
        models: The value of --models.
        stored: The models on this disk, by their names in requests.
        options_of: Makes the options of a model.
        loader: Makes the entries of the pool.
        output: Where the note is printed.

    Returns:
        The models; none if no model on this disk can be served.
    """
    from specgen.serve.server.served_models import read_models, read_stored

    if models is not None:
        entries = read_models(models, options_of, loader)
        output.note(f"serving {_names_of(entries)}")
        return entries
    entries = read_stored(stored, options_of, loader)
    if entries:
        names = _names_of(entries)
        output.note(
            f"serving the models on this disk, each loaded when a request names it: {names}"
        )
    else:
        output.note("no model on this disk can be served: serving the default pair")
    return entries


def _names_of(entries: Sequence[ModelEntry]) -> str:
    return ", ".join(entry.name for entry in entries)
