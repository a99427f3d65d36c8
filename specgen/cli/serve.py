"""``specgen serve``: an HTTP server with OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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

#: The default of --memory, as a share of the memory that this process may use.
_MEMORY_SHARE = 0.8
#: Options of the whole server, which the table of a model cannot set.
_SERVER_WIDE_OPTIONS = {"kernels", "packed-cache"}

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
        parse=parse_size,
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
    make_setup: Callable[..., ModelSetup] = later(model_setup),
    output: Output = flags.loudness,
) -> int:
    """Serve OpenAI's, Anthropic's, Ollama's and llama.cpp's APIs over HTTP.

    Without a model, all models on this disk are served by name, including those of Ollama, LM
    Studio and other programs (`specgen models list`). Each is loaded when a request names it.

    Standard output shows the address, which opens a small chat in a browser. Options apply to
    requests that leave them out. SIGTERM ends the server as soon as the current answers are
    finished.
    """
    _check_packages()
    from specgen.serve.server.app import serve as answer_requests
    from specgen.serve.server.model_pool import ModelPool

    # 1. Decide which models the command line names.
    stop = Interrupt()
    default_setup = make_setup()
    stored = {} if models is not None else _models_on_disk(default_setup, server)
    _check_model_options(models, stored, memory, server)
    selection = _ModelSelection(
        source=models,
        stored=stored,
        default_setup=default_setup,
        make_setup=make_setup,
        alias=server.alias or "",
        memory=memory,
        learns_across=learn_across,
        output=output,
        stop=stop,
    )

    def announce() -> None:
        """Print the addresses, once requests are accepted."""
        url = url_of(bound)
        apis = f"OpenAI's API: {url}/v1; Anthropic's, Ollama's and llama.cpp's: {url}"
        output.note(f"a chat for the browser: {url}; {apis}")
        print(f"listening on {url}", flush=True)

    with contextlib.ExitStack() as stack:
        # 2. Reserve the address before anything slow: it may be in use.
        bound = stack.enter_context(bound_socket(server.host, server.port, limits.client_s))

        # 3. Find the models. A single one is loaded before the first request.
        stack.enter_context(log_shown(output))
        found = selection.find()
        pool = stack.enter_context(
            ModelPool(found.entries, limits, found.memory_bytes, output.note)
        )
        if found.is_single:
            with stop:
                pool.load(found.entries[0].name)
            if stop():
                return stop.exit_code

        # 4. Answer requests until a signal ends the server.
        answer_requests(
            pool,
            replace(server, limits=limits),
            bound,
            is_verbose=output.verbose > 0,
            ready=announce,
            note=output.note,
        )
    return 0


def _check_packages() -> None:
    """Raise `UsageError` if a package that only the server needs is not installed."""
    try:
        import specgen.serve.server.app
        import specgen.serve.server.served_models  # noqa: F401
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        hint = "pip install 'specgen-gguf[server]'"
        raise UsageError(f"specgen serve needs {name}, which is not installed", hint) from error


def _models_on_disk(setup: ModelSetup, server: ServerOptions) -> dict[str, Path]:
    """Return the models on this disk, by their names in requests, if the user named no model."""
    from specgen.models.registry import load_registry
    from specgen.models.stored_models import servable_models

    models = setup.setup.models
    if models.target or models.draft or models.pair or server.alias is not None:
        return {}
    return servable_models(load_registry())


def _check_model_options(
    models: Path | None,
    stored: Mapping[str, Path],
    memory: int | None,
    server: ServerOptions,
) -> None:
    """Raise `UsageError` if an option does not fit the number of models.

    Args:
        models: The value of --models.
        stored: The models on this disk that are served if the user names none.
        memory: The value of --memory.
        server: The options of the server, with --alias.
    """
    if memory is not None and models is None and not stored:
        raise UsageError("--memory needs --models: a single model stays loaded")
    if server.alias is not None and models is not None:
        raise UsageError("--alias names a single model; with --models, each has its own name")


@dataclass(frozen=True, slots=True)
class _FoundModels:
    """The models that are served."""

    #: The models of the pool.
    entries: list[ModelEntry]
    #: Whether only the model of the command line is served. It is loaded before the first request.
    is_single: bool
    #: How many bytes several models may use together.
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelSelection:
    """Which models the command line names, and how they are opened."""

    #: The value of --models: a TOML file or a folder; None without it.
    source: Path | None
    #: The models on this disk, by their names in requests; empty if the user named a model.
    stored: Mapping[str, Path]
    #: The options of the command line.
    default_setup: ModelSetup
    #: Returns the options of the command line; keywords replace some of them.
    make_setup: Callable[..., ModelSetup]
    #: The name of a single model in requests; empty for the name of its file.
    alias: str
    #: The value of --memory in bytes; None for the default.
    memory: int | None
    #: Whether later requests may use what drafts have learnt from earlier ones.
    learns_across: bool
    #: Where notes and progress are shown.
    output: Output
    #: Returns whether a signal has asked the server to end.
    stop: Interrupt

    def find(self) -> _FoundModels:
        """Choose the kernels, and find the models: several, or else a single one.

        Raises:
            SpecgenError: If a model cannot be served.
        """
        kernels = self.default_setup.setup.machine.kernels
        if self.source is None and not self.stored:
            single = self._single()
            use_kernels(kernels, self.output)
            return _FoundModels([single], is_single=True)

        # The kernels are chosen before files are read, because they decide which files work.
        use_kernels(kernels, self.output)
        memory_bytes = _memory_for_models(self.memory, self.output)
        entries = self._several(memory_bytes)
        if entries:
            return _FoundModels(entries, is_single=False, memory_bytes=memory_bytes)
        self.output.note("no model on this disk can be served: serving the default pair")
        return _FoundModels([self._single()], is_single=True)

    def _single(self) -> ModelEntry:
        """Return the model of the command line, or the default one; download it if necessary."""
        from specgen.serve.server.served_models import ModelLoader

        loader = ModelLoader(self.output.reporter, self.learns_across, self.stop)
        return loader.entry(self.alias, self.default_setup.served(quiet=self.output.quiet))

    def _several(self, memory_bytes: float) -> list[ModelEntry]:
        """Return the models of --models, or else those on this disk, and print their names.

        Args:
            memory_bytes: How many bytes they may use together.

        Returns:
            The models; none if no model on this disk can be served.
        """
        from specgen.serve.server.served_models import ModelLoader, read_models, read_stored

        loader = ModelLoader(self.output.reporter, self.learns_across, self.stop, memory_bytes)
        if self.source is not None:
            entries = read_models(self.source, self._options_of, loader)
            self.output.note(f"serving {_names_of(entries)}")
            return entries
        entries = read_stored(self.stored, self._options_of, loader)
        if entries:
            self.output.note(
                "serving the models on this disk, each loaded when a request names it: "
                f"{_names_of(entries)}"
            )
        return entries

    def _options_of(self, table: Mapping[str, Any]) -> ServedOptions:
        """Return the options of a model in the file of --models."""
        changes = options_in(table, without=_SERVER_WIDE_OPTIONS)
        return self.make_setup(**changes).served(quiet=self.output.quiet)


def _memory_for_models(given: int | None, output: Output) -> float:
    """Return how many bytes loaded models may use; say so if it is more than there are."""
    usable = usable_memory()
    max_bytes = given or _MEMORY_SHARE * usable.amount
    if max_bytes > usable.amount:
        why = usable.limit or f"this machine has {human_bytes(usable.amount)}"
        output.note(f"--memory {human_bytes(int(max_bytes))} is too much: {why}")
    return max_bytes


def _names_of(entries: Sequence[ModelEntry]) -> str:
    return ", ".join(entry.name for entry in entries)
