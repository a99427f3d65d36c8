"""The models of `specgen serve`: the one of the command line, those of a file, or those in a
folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from specgen.cli.flags.server import N_PARALLEL, ModelSetup, options_in
from specgen.cli.model_loading import load
from specgen.cli.output import Output
from specgen.drafters.kinds import refuse_draft
from specgen.errors import MemoryLimitError, ModelFileError, SpecgenError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.embeddings import Embedder, EmbeddingModel, pooling_of
from specgen.llama.file_check import check_file
from specgen.llama.gguf_file import GgufMetadata
from specgen.llama.kernels.attached import kernel_problem
from specgen.llama.model import CACHE_TYPES
from specgen.llama.native_context import CONTEXT_OVERHEAD_BYTES
from specgen.options import ContextOptions, DraftSource, SessionOptions
from specgen.serve.server.jobs import OpenedModel, Turns
from specgen.serve.server.model_pool import ModelEntry
from specgen.session.calibration import calibrate
from specgen.session.choose_models import Sources
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.open import open_measurements
from specgen.session.session import usual_n_ctx
from specgen.system.files import SHARD, correct, parts_of, read_toml
from specgen.system.progress import counted, human_bytes
from specgen.train.online_learning import Learner

#: Options of the machine that all models share.
_OF_ALL = {"kernels", "packed-cache"}


@dataclass(frozen=True)
class ModelLoader:
    """Loads models for a server; several share `memory_bytes`. `stop` tells that a signal came."""

    output: Output
    learns_across: bool
    stop: Callable[[], bool]
    memory_bytes: float | None = None

    @cached_property
    def _measurements(self) -> MeasurementStore:
        """What was learnt on this machine, for all models: what is not kept in the file, a second
        load still uses.
        """
        return open_measurements()

    def entry(self, name: str, wanted: ModelSetup) -> ModelEntry:
        """Return a model of the pool, fetched if missing. It must fit into the memory, if necessary
        with fewer answers at once. Raise `UsageError`, `ModelFileError`, `MemoryLimitError` or
        `FetchError`.
        """
        if wanted.setup.learn and not self.learns_across:
            hint = "if that is acceptable, add --learn-across-requests"
            raise UsageError("--learn uses one user's texts to draft for the others", hint)
        sources, options = wanted.setup.find(self.output)
        name = name or sources.target.name.removesuffix(".gguf")
        if pooling_of(sources.target) is not None:
            return self._embedder(name, wanted, options)
        n_parallel, is_fixed = wanted.parallel or N_PARALLEL, wanted.parallel is not None
        n_bytes = 0
        if self.memory_bytes is not None:
            check_file(sources.target)
            drafts = [choice.draft for choice in sources.drafts]
            n_bytes = _needed_bytes(options, drafts, n_parallel)
            while n_bytes > self.memory_bytes and n_parallel > 1 and not is_fixed:
                n_parallel //= 2
                n_bytes = _needed_bytes(options, drafts, n_parallel)
            self._check_memory(name, n_bytes)
        output = self.output
        if self.memory_bytes is not None:
            output = replace(output, prefix=f"{name}: ")
        opened = partial(self._open, sources, options, n_parallel, is_fixed, output)
        return ModelEntry(name, opened, n_bytes)

    def _embedder(self, name: str, wanted: ModelSetup, options: SessionOptions) -> ModelEntry:
        if wanted.setup.models.draft is not None:
            raise UsageError(f"{name} is an embedding model: leave out --draft")
        file, context = options.target, options.target_context
        check_file(file)
        n_ctx, n_bytes = _embedder_needs(file, context)
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
        def stops() -> bool:
            return self.stop() or interrupted()

        def save() -> None:
            with turns:  # nothing learns meanwhile
                self._measurements.save()

        with contextlib.ExitStack() as stack:
            with _weights(options), turns:
                loaded = stack.enter_context(
                    load(options, output, sources.drafts, measurements=self._measurements)
                )
                stack.callback(save)
                news = calibrate(loaded, stops, output.status)
                engine = (Engine if is_fixed else Engine.largest)(
                    loaded,
                    n_parallel=n_parallel,
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

            return OpenedModel(
                loaded,
                engine,
                stack.pop_all(),
                lambda begins: learner.between_answers(begins=begins),
            )

    def _check_memory(self, name: str, n_bytes: int) -> None:
        if self.memory_bytes is not None and n_bytes > self.memory_bytes:
            allowed = human_bytes(int(self.memory_bytes))
            raise MemoryLimitError(
                f"{name} needs about {human_bytes(n_bytes)}, but --memory allows {allowed}",
                hint="give more --memory, or the model a smaller --ctx-size",
            )


@contextlib.contextmanager
def _weights(options: SessionOptions) -> Iterator[None]:
    """Load the weights of a target, which takes longest, while other models decode. (If kernels
    cannot compute it, they are switched while it loads, so that it is loaded later, when nothing
    decodes.)
    """
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


# --- several models -------------------------------------------------------------------------------


def read_models(
    path: Path, setup: Callable[..., ModelSetup], loader: ModelLoader
) -> list[ModelEntry]:
    """Return the models of a file, or those in a folder that can be served. `setup` makes the
    options of one from those that differ from the command line. Raise `UsageError`,
    `ModelFileError`, `MemoryLimitError` or `FetchError`.
    """
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
            table = {key: _in_its_folder(value, path.parent) for key, value in values.items()}
            wanted = setup(**options_in(table, without=_OF_ALL))
            if wanted.setup.models.target is None and wanted.setup.models.pair is None:
                raise UsageError('target is missing: give a file or a name, or pair = "NAME"')
            entries.append(loader.entry(name, wanted))
        except SpecgenError as error:
            raise type(error)(f"{where}: {error.message}", error.hint or correct(path)) from error
    if not entries:
        hint = "give each a table: a line [NAME], then target = ..."
        raise UsageError(f"{path} has no models", hint)
    return entries


def _in_its_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_in_its_folder(each, folder) for each in value]
    file = folder / str(value)
    return str(file) if os.path.isfile(file) else value  # noqa: PTH113


def _in_folder(
    folder: Path, setup: Callable[..., ModelSetup], loader: ModelLoader
) -> list[ModelEntry]:
    entries: dict[str, ModelEntry] = {}
    for path in sorted(folder.rglob("*.gguf"), key=lambda each: (len(each.parts), each)):
        shard = SHARD.fullmatch(path.name)
        if shard is not None and int(shard["number"]) > 1:
            continue
        name = shard["stem"] if shard is not None else path.name.removesuffix(".gguf")
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


# --- the memory of models, from the metadata of their files


def _needed_bytes(options: SessionOptions, drafts: Iterable[DraftSource], n_parallel: int) -> int:
    """Estimate the memory of a target with its largest draft, their helpers and `n_parallel`
    contexts.
    """
    target, context = options.target, options.target_context
    n_ctx = usual_n_ctx(context.n_ctx, _trained_context(target)) * n_parallel

    def sizes(sources: Iterable[DraftSource]) -> list[int]:
        files = (source for source in sources if isinstance(source, Path))
        return [_model_bytes(file, options.draft_context, n_ctx) for file in files]

    helpers = sum(sizes(options.helpers))
    return _model_bytes(target, context, n_ctx) + max(sizes(drafts), default=0) + helpers


def _embedder_needs(target: Path, context: ContextOptions) -> tuple[int, int]:
    n_train = _trained_context(target)
    n_ctx = usual_n_ctx(context.n_ctx, n_train)
    n_ctx = min(n_ctx, n_train) if n_train else n_ctx
    with GgufMetadata(target) as about:
        n_vocab = about.length("tokenizer.ggml.tokens") or 0
    # llama.cpp has room for logits too.
    return n_ctx, _model_bytes(target, context, n_ctx) + 4 * n_ctx * n_vocab


def _model_bytes(file: Path, context: ContextOptions, n_tokens: int) -> int:
    """Estimate the size of weights and context, as if all layers had the most heads of any."""
    with GgufMetadata(file) as about:
        name = about.text("general.architecture")
        n_layers = about.number(f"{name}.block_count")
        n_heads = about.number(f"{name}.attention.head_count") or 1
        n_heads_kv = about.number(f"{name}.attention.head_count_kv") or n_heads
        size = about.number(f"{name}.embedding_length") // n_heads
        size_k = about.number(f"{name}.attention.key_length") or size
        size_v = about.number(f"{name}.attention.value_length") or size
    a_token = size_k * CACHE_TYPES[context.cache_type_k][1]
    a_token += size_v * CACHE_TYPES[context.cache_type_v][1]
    cache_bytes = int(n_tokens * n_layers * n_heads_kv * a_token)
    try:
        weight_bytes = sum(part.stat().st_size for part in parts_of(file))
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}") from error
    return weight_bytes + cache_bytes + CONTEXT_OVERHEAD_BYTES


def _trained_context(file: Path) -> int:
    with GgufMetadata(file) as about:
        return about.number(f"{about.text('general.architecture')}.context_length")
