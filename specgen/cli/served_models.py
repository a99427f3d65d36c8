"""The models of `specgen serve`: the one of the command line, those of a file, or those in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from specgen.cli import flags
from specgen.cli.command import COMMAND_LINE_ERROR
from specgen.cli.model_loading import Setup, load
from specgen.cli.output import Output
from specgen.errors import MemoryLimitError, ModelFileError, SpecgenError, UsageError
from specgen.render.text import counted
from specgen.system.files import correct, read_toml
from specgen.system.units import human_bytes

if TYPE_CHECKING:
    from specgen.llama.embeddings import Embedder
    from specgen.options import SessionOptions
    from specgen.serve.server.jobs import OpenedModel, Turns
    from specgen.serve.server.model_pool import ModelEntry
    from specgen.session.files import Sources
    from specgen.session.memory import Memory

#: The default number of answers at once, if the memory has room for as many.
_N_PARALLEL = 4
#: Options of the machine that all models share.
_OF_ALL = {"kernels", "packed-cache"}
#: Options that name a file, or something else.
_OF_FILES = ("target", "model", "draft", "model-draft")
#: The default of --memory, as a share of the machine's memory.
MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """The options of one of a server's models."""

    setup: Setup
    parallel: int | None = None


#: The options that an entry of a file may have, and that the command line sets for all.
model_setup = flags.group(
    ModelSetup,
    {"setup": flags.setup.without("answer_logprobs", "prompt_cache")},
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
    ),
)(ModelSetup)


@dataclass(frozen=True)
class ModelLoader:
    """Loads models for a server. `stop` tells that a signal came. Several models share `memory_bytes`; None is
    for a model that is alone."""

    output: Output
    learns_across: bool
    stop: Callable[[], bool]
    memory_bytes: float | None = None

    @cached_property
    def _memory(self) -> Memory:
        """What was learnt about this machine. All models share it: costs that were measured while other
        programs slowed the machine down are not kept in the file, but a second load uses them."""
        from specgen.session.open import open_memory

        return open_memory()

    def entry(self, name: str, wanted: ModelSetup) -> ModelEntry:
        """Return a model of the server's pool. Files that are missing are fetched. It must fit into the memory, if
        necessary with fewer answers at once. Raise `UsageError`, `ModelFileError`, `MemoryLimitError` or
        `FetchError`."""
        from specgen.llama.gguf_file import check_file
        from specgen.llama.model import pooling_of
        from specgen.serve.server.model_pool import ModelEntry
        from specgen.session.open import needed_bytes

        if wanted.setup.learn and not self.learns_across:
            raise UsageError(
                "--learn uses one user's texts to draft for the others",
                hint="if that is acceptable, add --learn-across-requests",
            )
        sources, options = wanted.setup.find(self.output)
        name = name or sources.target.name.removesuffix(".gguf")
        if pooling_of(sources.target) is not None:
            return self._embedder(name, wanted, options)
        n_parallel, is_fixed = wanted.parallel or _N_PARALLEL, wanted.parallel is not None
        n_bytes = 0
        if self.memory_bytes is not None:
            check_file(sources.target)
            drafts = [choice.draft for choice in sources.drafts]
            n_bytes = needed_bytes(options, drafts, n_parallel)
            while n_bytes > self.memory_bytes and n_parallel > 1 and not is_fixed:
                n_parallel //= 2
                n_bytes = needed_bytes(options, drafts, n_parallel)
            self._check_memory(name, n_bytes)
        output = self.output
        if self.memory_bytes is not None:
            output = _Named(**asdict(output), name=name)
        opened = partial(self._open, sources, options, n_parallel, is_fixed, output)
        return ModelEntry(name, opened, n_bytes)

    def _embedder(self, name: str, wanted: ModelSetup, options: SessionOptions) -> ModelEntry:
        from specgen.llama.embeddings import Embedder
        from specgen.llama.gguf_file import check_file
        from specgen.serve.server.model_pool import ModelEntry
        from specgen.session.open import embedder_bytes, embedder_context

        if wanted.setup.models.draft is not None:
            raise UsageError(f"{name} is an embedding model: leave out --draft")
        file, context = options.target, options.target_context
        check_file(file)
        n_ctx, n_bytes = embedder_context(file, context), embedder_bytes(file, context)
        self._check_memory(name, n_bytes)

        def opened(turns: Turns, _interrupted: Callable[[], bool]) -> Embedder:
            with turns:
                embedder = Embedder(file, context, n_ctx)
            self.output.note(
                f"{name}: embeddings of {embedder.n_embd} values; {n_ctx} tokens a text"
            )
            return embedder

        return ModelEntry(name, opened, n_bytes, embeds=True)

    def _open(
        self,
        sources: Sources,
        options: SessionOptions,
        n_parallel: int,
        is_fixed: bool,
        output: Output,
        turns: Turns,
        interrupted: Callable[[], bool],
    ) -> OpenedModel:
        from specgen.serve.server.jobs import OpenedModel
        from specgen.session.calibration import calibrate
        from specgen.session.engine import Engine
        from specgen.train.online_learning import Learner

        def stops() -> bool:
            return self.stop() or interrupted()

        with contextlib.ExitStack() as stack:
            with _weights(options), turns:
                loaded = stack.enter_context(
                    load(options, output, sources.drafts, memory=self._memory)
                )
                stack.callback(self._save, turns)
                news = calibrate(loaded, stops)
                engine = Engine.largest(
                    loaded,
                    n_parallel,
                    None,
                    is_fixed=is_fixed,
                    interrupted=stops,
                    learn_alone=not self.learns_across,
                )
            stack.callback(engine.close)
            engine.notify(news)
            output.note(
                f"{counted(engine.n_parallel, 'answer')} at once, contexts of {engine.n_ctx} tokens; "
                f"draft: {loaded.draft_name}"
            )
            for notice in engine.take_notices():
                output.note(notice)
            learner = stack.enter_context(Learner(loaded, engine, output.note))

            def between(begins: bool) -> None:
                learner.between_answers(begins=begins)

            return OpenedModel(loaded, engine, stack.pop_all(), between)

    def _check_memory(self, name: str, n_bytes: int) -> None:
        if self.memory_bytes is not None and n_bytes > self.memory_bytes:
            allowed = human_bytes(int(self.memory_bytes))
            raise MemoryLimitError(
                f"{name} needs about {human_bytes(n_bytes)}, but --memory allows {allowed}",
                hint="give more --memory, or the model a smaller --ctx-size",
            )

    def _save(self, turns: Turns) -> None:
        """Save what was learnt, while nothing learns."""
        with turns:
            self._memory.save()


@contextlib.contextmanager
def _weights(options: SessionOptions) -> Iterator[None]:
    """Load the weights of a target, which takes longest, while other models decode. (If kernels cannot
    compute it, they are switched while it loads, so that it is loaded later, when nothing decodes.)"""
    from specgen.drafters.kinds import refuse_draft
    from specgen.llama import LlamaModel
    from specgen.llama.kernels.attached import kernel_problem

    refuse_draft(options.target)
    if kernel_problem(options.target):
        yield
        return
    context = options.target_context
    model = LlamaModel(
        options.target, n_gpu_layers=context.n_gpu_layers, workers=context.workers, mtp=True
    )
    try:
        yield
    finally:
        model.close()


@dataclass(frozen=True, slots=True)
class _Named(Output):
    """An output whose notes begin with the name of a model."""

    name: str = ""

    def note(self, text: str) -> None:
        Output.note(self, f"{self.name}: {text}")


# --- several models -------------------------------------------------------------------------------


def read_models(
    path: Path, setup: Callable[..., ModelSetup], loader: ModelLoader
) -> list[ModelEntry]:
    """Return the models of a file, or those in a folder. `setup` makes the options of one from those that
    differ from the command line. Raise `UsageError`, `ModelFileError`, `MemoryLimitError` or `FetchError`;
    files of a folder that cannot be served are left out, with a note."""
    models = setup().setup.models
    if models.target or models.draft or models.pair:
        raise UsageError(
            "--models names the models, so --target, --draft and --pair do not go with it"
        )
    if path.is_dir():
        return _in_folder(path, setup, loader)
    entries: list[ModelEntry] = []
    for name, values in read_toml(path).items():
        where = f"{path}: [{name}]"
        try:
            if not isinstance(values, dict):
                raise UsageError(f'it is no table: begin each model with a line ["{name}"]')
            wanted = setup(**_given(values, path.parent))
            if wanted.setup.models.target is None and wanted.setup.models.pair is None:
                raise UsageError('target is missing: give a file or a name, or pair = "NAME"')
            entries.append(loader.entry(name, wanted))
        except COMMAND_LINE_ERROR as error:
            message: str = error.format_message()  # type: ignore[attr-defined]
            raise UsageError(f"{where}: {' '.join(message.split())}", correct(path)) from error
        except SpecgenError as error:
            raise type(error)(f"{where}: {error.message}", error.hint or correct(path)) from error
    if not entries:
        hint = "give each a table: a line [NAME], then target = ..."
        raise UsageError(f"{path} has no models", hint)
    return entries


def _given(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options in a table of a file. Its keys are the long names of options; paths are relative to
    the file's folder. Raise `UsageError`, `COMMAND_LINE_ERROR`."""
    known = {name[2:] for name in model_setup.spellings() if name.startswith("--")} - _OF_ALL
    arguments: list[str] = []
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"{key}: a model has no such option")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                if not each and f"no-{key}" not in known:
                    raise UsageError(f"{key}: leave it out instead of false")
                arguments.append(f"--{key}" if each else f"--no-{key}")
            elif isinstance(each, str | int | float):
                is_file = key in _OF_FILES and _is_file(folder, each)
                arguments.append(f"--{key}={folder / str(each) if is_file else each}")
            else:
                raise UsageError(f"{key}: {each!r} is no text, number, true or false")
    given = model_setup.parse(arguments)
    for name, value in given.items():
        if isinstance(value, Path):
            given[name] = folder / value
        elif isinstance(value, list):
            given[name] = [folder / each if isinstance(each, Path) else each for each in value]
    return given


def _is_file(folder: Path, value: object) -> bool:
    try:
        return (folder / str(value)).is_file()
    except OSError:  # for example if the name is too long
        return False


def _in_folder(
    folder: Path, setup: Callable[..., ModelSetup], loader: ModelLoader
) -> list[ModelEntry]:
    from specgen.llama import LlamaModel
    from specgen.llama.embeddings import EmbeddingModel
    from specgen.llama.model import pooling_of
    from specgen.models.files import model_stem, shard_number

    entries: dict[str, ModelEntry] = {}
    for path in sorted(folder.rglob("*.gguf"), key=lambda each: (len(each.parts), each)):
        if shard_number(path) not in (None, 1):
            continue
        name = model_stem(path)
        if name in entries:  # a file of this name is in a folder above
            name = path.relative_to(folder).with_name(name).as_posix()
        wanted = setup()
        models = replace(wanted.setup.models, target=str(path))
        wanted = replace(wanted, setup=replace(wanted.setup, models=models))
        try:
            kind = LlamaModel if pooling_of(path) is None else EmbeddingModel
            kind(path, vocabulary_only=True).close()
            entries[name] = loader.entry(name, wanted)
        except (ModelFileError, MemoryLimitError) as error:
            loader.output.note(f"not served: {error.message}")
    if not entries:
        raise UsageError(f"{folder}: no file in this folder can be served")
    return list(entries.values())
