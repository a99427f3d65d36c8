"""The models that a server offers: one model, the models of a TOML file, or those in a folder."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specgen.drafters.kinds import refuse_draft
from specgen.errors import BackendError, MemoryLimitError, ModelFileError, SpecgenError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.embeddings import Embedder, EmbeddingModel, pooling_of
from specgen.llama.file_check import check_file, remember_checks
from specgen.llama.kernels.attached import kernel_problem
from specgen.llama.model_description import describe_model
from specgen.models.files import SHARD
from specgen.models.stored_models import shown_name
from specgen.options import ContextOptions, SessionOptions
from specgen.serve.server.jobs import FairLock, OpenedModel
from specgen.serve.server.model_pool import ModelEntry
from specgen.serve.server.options import N_PARALLEL, ServedOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.measurement_store import MeasurementStore
from specgen.session.model_use import why_not_loadable
from specgen.session.open import (
    Reporter,
    WantedSession,
    budget_of,
    open_measurements,
    open_session,
)
from specgen.session.prompts.chat import missing_template_notice
from specgen.session.prompts.sandbox import check_syntax
from specgen.session.weights_memory import (
    MemoryNeeds,
    WeightsBudget,
    can_stream,
    context_bytes,
    context_size,
    logits_bytes,
    memory_needs,
    weights_bytes,
)
from specgen.system.files import correction_hint, files_below, named_file, read_toml
from specgen.system.folders import cache_folder
from specgen.system.quantities import counted, human_bytes
from specgen.train.online_learning import Learner

#: Makes the options of a model from its table in a TOML file; options that the table lacks are as
#: on the command line. Raises `UsageError` if an option is not valid.
OptionsOf = Callable[[Mapping[str, Any]], ServedOptions]


@dataclass(frozen=True)
class ModelLoader:
    """Loads models for a server."""

    #: Tells the user about progress.
    reporter: Reporter
    #: Whether later requests may use what drafts have learnt from earlier ones.
    learns_across: bool
    #: Returns whether a signal has asked the server to end.
    stop: Callable[[], bool]
    #: The memory that several models share; None for a single model.
    memory_bytes: float | None = None

    @cached_property
    def _measurements(self) -> MeasurementStore:
        """The measurements of this machine, shared by all models and kept between their loads."""
        return open_measurements()

    def entry(self, name: str, model: ServedOptions) -> ModelEntry:
        """Return an entry of the pool for a model, after fetching its files if necessary.

        Args:
            name: The model's name in requests; empty for the name of its file, or Ollama's name.
            model: The options of the model.

        Raises:
            UsageError: If the options cannot be used together.
            MemoryLimitError: If it needs too much memory, even with one answer at a time.
            ModelFileError: If a file cannot be used.
            FetchError: If a file cannot be fetched.
        """
        if model.learns and not self.learns_across:
            hint = "if that is acceptable, add --learn-across-requests"
            raise UsageError("--learn uses one user's texts to draft for the others", hint)
        wanted = model.find(model.models)
        target = wanted.options.target
        if not name:
            # Ollama's clients name models without a prefix.
            name = shown_name(target).removeprefix("ollama:").removesuffix(".gguf")
        self._note_invalid_template(name, wanted.options)
        if pooling_of(target) is None:
            return self._text_model_entry(name, wanted, model.n_parallel)
        if model.models.draft is not None:
            raise UsageError(f"{name} is an embedding model: leave out --draft")
        return self._embedder_entry(name, wanted.options)

    def _text_model_entry(
        self,
        name: str,
        wanted: WantedSession,
        n_wanted: int | None,
    ) -> ModelEntry:
        """Return an entry of the pool for a model that generates text.

        Args:
            name: The model's name.
            wanted: The files and options of the model.
            n_wanted: The number of answers at once that the user gave, if any.
        """
        n_parallel = n_wanted or N_PARALLEL
        n_bytes = 0
        reporter = self.reporter
        if self.memory_bytes is not None:
            check_file(wanted.options.target)
            n_parallel, n_bytes = self._parallel_and_bytes(name, wanted, n_wanted)
            reporter = reporter.prefixed(f"{name}: ")
        wanted = replace(wanted, n_slots=n_parallel)
        # Without a number from the user, there are as many answers at once as the contexts find
        # room for, which may be fewer than estimated.
        make_engine: Callable[..., Engine] = Engine
        if n_wanted is None:
            make_engine = Engine.largest

        def open_model(turns: FairLock, interrupted: Callable[[], bool]) -> OpenedModel:
            def stops() -> bool:
                return self.stop() or interrupted()

            return self._open(wanted, make_engine, reporter, turns, stops)

        return ModelEntry(name, open_model, n_bytes, options=wanted.options)

    def _parallel_and_bytes(
        self,
        name: str,
        wanted: WantedSession,
        n_wanted: int | None,
    ) -> tuple[int, int]:
        """Return the number of answers at once, and the memory that a model then needs.

        If its weights do not even fit with one answer at a time, they are streamed if possible, and
        use the memory that the contexts leave.

        Args:
            name: The model's name.
            wanted: The files and options of the model.
            n_wanted: The number of answers at once that the user gave, if any.

        Raises:
            MemoryLimitError: If it needs too much memory.
        """
        memory_bytes = self.memory_bytes or math.inf
        n_parallel, needs = _fitting_parallel(
            wanted, n_wanted, lambda needs: needs.total_bytes <= memory_bytes
        )
        fits = needs.total_bytes <= memory_bytes
        may_stream = can_stream(wanted.options.target_context)
        if fits or not may_stream or needs.other_bytes > memory_bytes:
            self._check_memory(name, needs.total_bytes)
            return n_parallel, needs.total_bytes

        # The weights are streamed. All answers share what a pass reads from disk, so their number
        # may be larger than above: their contexts may take up to half of the memory.
        n_parallel, _ = _fitting_parallel(
            wanted, n_wanted, lambda needs: needs.other_bytes <= memory_bytes / 2
        )
        return n_parallel, int(memory_bytes)

    def _embedder_entry(
        self,
        name: str,
        options: SessionOptions,
    ) -> ModelEntry:
        """Return an entry of the pool for an embedding model."""
        file = options.target
        context = options.target_context
        check_file(file)
        n_ctx, n_bytes = _embedder_needs(file, context)
        self._check_memory(name, n_bytes)

        def open_embedder(turns: FairLock, _interrupted: Callable[[], bool]) -> Embedder:
            with turns:
                embedder = Embedder(file, context, n_ctx)
            self.reporter.note(
                f"{name}: embeddings of {embedder.n_embd} values, for texts of up to {n_ctx} tokens"
            )
            if context.n_ctx is not None and context.n_ctx > n_ctx:
                self.reporter.note(
                    f"{name} was trained with {n_ctx} tokens of context, so a text may have "
                    f"at most {n_ctx} tokens, not {context.n_ctx}"
                )
            return embedder

        return ModelEntry(name, open_embedder, n_bytes, embeds=True, options=options)

    def _open(
        self,
        wanted: WantedSession,
        make_engine: Callable[..., Engine],
        reporter: Reporter,
        turns: FairLock,
        stops: Callable[[], bool],
    ) -> OpenedModel:
        """Load a model and open its engine, while `turns` keeps the other models from decoding.

        Args:
            wanted: The files and options of the model, and the number of answers at once.
            make_engine: Makes the engine.
            reporter: Tells the user about progress.
            turns: The turns of all models.
            stops: Returns whether to give up.
        """

        def save_measurements() -> None:
            with turns:  # so that no model changes them meanwhile
                self._measurements.save()

        budget = budget_of(wanted, self.memory_bytes or math.inf)
        with contextlib.ExitStack() as stack:
            with _weights(wanted.options, budget, reporter), turns:
                session = open_session(
                    wanted,
                    reporter,
                    clock=time.perf_counter,
                    measurements=self._measurements,
                    budget=budget,
                )
                stack.enter_context(session)
                stack.callback(save_measurements)
                notices = calibrate(session, stops, reporter.status)
                engine = make_engine(
                    session,
                    n_parallel=wanted.n_slots,
                    interrupted=stops,
                    learn_alone=not self.learns_across,
                )
            stack.callback(engine.close)
            engine.notify(notices)
            reporter.note(
                f"{counted(engine.n_parallel, 'answer')} at once, "
                f"contexts of {engine.n_ctx} tokens; draft: {session.draft_name}"
            )
            for notice in engine.take_notices():
                reporter.note(notice)
            notice = missing_template_notice(session.target)
            if notice:
                reporter.note(notice)
            learner = stack.enter_context(Learner(session, engine, reporter.note))
            return OpenedModel(
                session,
                engine,
                stack.pop_all(),
                before_answers=learner.before_answers,
                after_answers=learner.after_answers,
            )

    def _note_invalid_template(
        self,
        name: str,
        options: SessionOptions,
    ) -> None:
        """Write a note if the chat template in a model's file has a syntax error."""
        if options.target_context.chat_template is not None:  # it is checked already
            return
        metadata: Mapping[str, Any] = {}
        with contextlib.suppress(BackendError, OSError):
            metadata = describe_model(options.target).metadata
        for key, value in metadata.items():
            is_template = key.startswith("tokenizer.chat_template")
            problem = check_syntax(str(value)) if is_template else ""
            if problem:
                self.reporter.note(
                    f"{name}: its chat template is not valid, so chat requests will fail: "
                    f"{problem}; choose another with --chat-template"
                )
                return

    def _check_memory(self, name: str, n_bytes: int) -> None:
        """Raise `MemoryLimitError` if a model needs more than `memory_bytes`."""
        if self.memory_bytes is not None and n_bytes > self.memory_bytes:
            allowed = human_bytes(int(self.memory_bytes))
            raise MemoryLimitError(
                f"{name} needs about {human_bytes(n_bytes)}, but --memory allows {allowed}",
                hint="give more --memory, or the model a smaller --ctx-size",
            )


@contextlib.contextmanager
def _weights(
    options: SessionOptions,
    budget: WeightsBudget,
    reporter: Reporter,
) -> Iterator[None]:
    """Keep the weights of a target loaded for the duration of a context.

    Loading them takes longest, and needs no turn: other models decode meanwhile. A session that is
    opened within the context shares these weights.

    If the kernels cannot compute the target, nothing is loaded here: the session then switches the
    kernels while it loads, when no other model decodes.
    """
    refuse_draft(options.target)
    if kernel_problem(options.target):
        yield
        return
    context = options.target_context
    model = LlamaModel(
        options.target,
        n_gpu_layers=context.n_gpu_layers,
        workers=context.workers,
        mtp=True,
        weights_bytes=budget.max_bytes,
        on_packing=reporter.packing,
    )
    try:
        yield
    finally:
        model.close()


# --- several models -------------------------------------------------------------------------------


def read_models(
    path: Path,
    options_of: OptionsOf,
    loader: ModelLoader,
) -> list[ModelEntry]:
    """Return the models of a TOML file, or those in a folder that can be served.

    Args:
        path: The file or the folder.
        options_of: Makes the options of a model.
        loader: Makes the entries of the pool.

    Raises:
        UsageError: If the file or the folder has no models, or an option is not valid.
        ModelFileError: If a model's file cannot be used.
        MemoryLimitError: If a model needs more memory than all models may use.
        FetchError: If a file cannot be fetched.
    """
    models = options_of({}).models
    if models.target or models.draft or models.pair:
        raise UsageError(
            "--models already names the models: leave out --target, --draft and --pair"
        )
    if path.is_dir():
        return _entries_in_folder(path, options_of, loader)
    entries = [
        _entry_of_table(path, name, table, options_of, loader)
        for name, table in read_toml(path).items()
    ]
    if not entries:
        hint = "give each a table: a line [NAME], then target = ..."
        raise UsageError(f"{path} has no models", hint)
    return entries


def _entry_of_table(
    path: Path,
    name: str,
    table: Any,
    options_of: OptionsOf,
    loader: ModelLoader,
) -> ModelEntry:
    """Return the model of a table in a TOML file; errors say which table it is."""
    if not isinstance(table, dict):
        raise UsageError(
            f"{path}: {name!r} is not in the table of a model",
            "begin each model with a line [NAME], and put its settings below that line; settings "
            "for all models belong on the command line",
        )
    try:
        values = {key: _path_if_file(value, path.parent) for key, value in table.items()}
        model = options_of(values)
        if model.models.target is None and model.models.pair is None:
            raise UsageError('target is missing: give a file or a name, or pair = "NAME"')
        return loader.entry(name, model)
    except SpecgenError as error:
        message = f"{path}: [{name}]: {error.message}"
        raise type(error)(message, error.hint or correction_hint(path)) from error


def _path_if_file(value: Any, folder: Path) -> Any:
    """Return an option's value; the name of a file in the folder becomes the file's path."""
    if isinstance(value, list):
        return [_path_if_file(item, folder) for item in value]
    file = named_file(folder / str(value))
    return value if file is None else str(file)


def _entries_in_folder(
    folder: Path,
    options_of: OptionsOf,
    loader: ModelLoader,
) -> list[ModelEntry]:
    """Return the models in a folder and its subfolders, without files that cannot be served."""
    entries: dict[str, ModelEntry] = {}
    common = options_of({})
    # If files have the same name, the one in the upper folder gets the short name.
    paths = [path for path in files_below(folder) if path.suffix == ".gguf"]
    for path in sorted(paths, key=lambda file: (len(file.parts), file)):
        shard = SHARD.fullmatch(path.name)
        name = path.name.removesuffix(".gguf")
        if shard is not None:
            if int(shard["number"]) > 1:  # the first shard stands for the model
                continue
            name = shard["stem"]
        if name in entries:
            name = path.relative_to(folder).with_name(name).as_posix()
        model = replace(common, models=replace(common.models, target=str(path)))
        try:
            _check_loads(path)
            entries[name] = loader.entry(name, model)
        except (ModelFileError, MemoryLimitError) as error:
            loader.reporter.note(f"not served: {error.message}")
    if not entries:
        raise UsageError(f"{folder}: no file in this folder can be served")
    return list(entries.values())


def read_stored(
    models: Mapping[str, Path],
    options_of: OptionsOf,
    loader: ModelLoader,
) -> list[ModelEntry]:
    """Return those of the models on this disk that can be served.

    Args:
        models: The models' first files, by the names in requests.
        options_of: Makes the options of a model.
        loader: Makes the entries of the pool.
    """
    remember_checks(cache_folder())
    common = options_of({})
    entries = []
    for name, path in models.items():
        model = replace(common, models=replace(common.models, target=str(path)))
        # Loading the vocabulary too, as for a folder, would take a second for each model.
        problem = why_not_loadable(path)
        if not problem:
            try:
                entries.append(loader.entry(name, model))
            except (ModelFileError, MemoryLimitError) as error:
                problem = error.message
        if problem:
            loader.reporter.note(f"not served: {name}: {problem}")
    return entries


def _check_loads(path: Path) -> None:
    """Raise `ModelFileError` if a file is not a model that can be served.

    Its metadata, its vocabulary and its size are checked; its weights are not loaded.
    """
    check_file(path)
    refuse_draft(path)
    model_class = LlamaModel if pooling_of(path) is None else EmbeddingModel
    model_class(path, vocabulary_only=True).close()


# --- the memory of models, from the metadata of their files --------------------------------------


def _fitting_parallel(
    wanted: WantedSession,
    n_wanted: int | None,
    fits: Callable[[MemoryNeeds], bool],
) -> tuple[int, MemoryNeeds]:
    """Return a number of answers at once, and the estimated memory that a session then needs.

    Without a number from the user, `N_PARALLEL` is halved until the memory suffices, or until a
    single answer is left, even if that does not fit either.

    Args:
        wanted: The files and options of the model.
        n_wanted: The number that the user gave, which is kept; None if there is none.
        fits: Returns whether the memory suffices.
    """
    drafts = [choice.draft for choice in wanted.drafts]
    n_parallel = n_wanted or N_PARALLEL
    needs = memory_needs(wanted.options, drafts, n_parallel)
    while n_wanted is None and n_parallel > 1 and not fits(needs):
        n_parallel //= 2
        needs = memory_needs(wanted.options, drafts, n_parallel)
    return n_parallel, needs


def _embedder_needs(target: Path, context: ContextOptions) -> tuple[int, int]:
    """Return the size of an embedding model's context in tokens, and its estimated memory."""
    n_ctx = context_size(target, context)
    n_train = describe_model(target).n_ctx_train
    if n_train:
        n_ctx = min(n_ctx, n_train)
    n_bytes = weights_bytes(target) + context_bytes(target, context, n_ctx)
    return n_ctx, n_bytes + logits_bytes(target, n_ctx)  # llama.cpp reserves a row per token
