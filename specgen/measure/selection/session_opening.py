"""Open a session: its files, its options, and the draft that is picked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen import __version__
from specgen.measure.selection.default_draft import DraftChoice
from specgen.measure.selection.model_choice import ModelChoice
from specgen.measure.selection.pick import Taken, take_first
from specgen.measure.selection.resolve import Disk, Sources, find_model, resolve
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelOptions,
    SamplerOptions,
    SessionOptions,
)

if TYPE_CHECKING:
    from specgen.llama.kernels.admission import KernelStatus
    from specgen.measure.selection.resolve import Fetch
    from specgen.models import Registry
    from specgen.options import DraftSource
    from specgen.session.calibration.memory import Memory
    from specgen.session.loaded_models import Models

#: Shows that the model with this name is loading, within a `with` block.
Loading = Callable[[str], AbstractContextManager[object]]
#: Raises that a target cannot do what is asked for.
Check = Callable[["Models"], object]


def find_models(choice: ModelChoice, *, quiet: bool) -> Sources:
    """Return the files of the run. Missing ones are fetched, with progress on standard error."""
    from specgen.llama.mtp_layers import mtp_of
    from specgen.models import cache_folder, identify, load_registry, locate, saved_draft
    from specgen.train.draft_files import heads_file

    registry = load_registry()
    made_heads = partial(heads_file, cache_folder())
    disk = Disk(locate, identify, saved_draft, made_heads, mtp_of)
    get = _fetch(registry, quiet=quiet)
    sources = resolve(choice.target, choice.draft, choice.pair, registry, get, disk)
    helpers: list[DraftSource] = [
        "ngram" if name == "ngram" else find_model(name, registry, get) for name in choice.helpers
    ]
    return replace(sources, helpers=tuple(helpers))


def find_target(name: str, *, quiet: bool) -> Path:
    """Return the file of a target. If it is missing, it is fetched, with progress on standard error."""
    from specgen.models import load_registry

    registry = load_registry()
    return find_model(name, registry, _fetch(registry, quiet=quiet))


def _fetch(registry: Registry, *, quiet: bool) -> Fetch:
    from specgen.models import fetch, is_reference, parse_reference, stderr_progress

    def get(name: str) -> Path:
        progress = stderr_progress(quiet=quiet)
        if is_reference(name):
            from specgen.models.hub import fetch_reference

            return fetch_reference(parse_reference(name), progress=progress)
        return fetch(registry.model(name), progress=progress)

    return get


def start_kernels(wanted: KernelOptions) -> tuple[KernelStatus, str | None]:
    """Choose what computes on the CPU, and whether packed weights are kept, before the first model is loaded.
    Return what was chosen, and a note if kernels are missing or cannot be used. Raise `UsageError` if kernels
    that were asked for cannot be used."""
    from specgen.llama.file_check import remember_checks
    from specgen.llama.kernels.admission import choose_kernels, note_about
    from specgen.llama.packed_weights import keep_packed_weights
    from specgen.models import cache_folder, packed_folder

    remember_checks(cache_folder())
    status = choose_kernels(wanted.choice, cache_folder())
    keep_packed_weights(None if wanted.packed_cache == "off" else packed_folder())
    return status, note_about(status, wanted.choice, cache_folder())


def session_options(
    sources: Sources,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    answer: GenerationOptions,
    contexts: Contexts,
    *,
    learn: bool = False,
    prompt_cache: Path | None = None,
) -> SessionOptions:
    """Return the options of a session. With `learn`, answers are kept: drafts learn from them, and n-grams
    are looked up in them."""
    from specgen.models import cache_folder, data_folder, identify
    from specgen.train.draft_files import learning_folder

    learning = None
    if learn and (identity := identify(sources.target)) is not None:
        learning = learning_folder(data_folder(), identity)
        drafting = replace(drafting, lookup_store=True)
    return SessionOptions(
        target=sources.target,
        draft=sources.draft,
        sampler=sampling,
        drafting=drafting,
        generation=answer,
        target_context=contexts.target,
        draft_context=contexts.draft,
        helpers=sources.helpers,
        cache=cache_folder(),
        learning=learning,
        prompt_cache=prompt_cache,
    )


class SessionOpener:
    """Loads the models of one session after the other.

    The first of `drafts` that fits the target and is expected to be faster on this machine replaces the
    draft of the options. `note` is called with the reason and, with `details`, with the measured costs. Only
    a draft that the user named can raise an error: in place of a draft that specgen chose, the next one is
    used. Later sessions use the draft of the first one, without a note. With `drafts_later`, the caller loads
    drafts itself. `check` is called with the target, before a draft is chosen, and may raise that the target
    cannot do what is asked for. `clock` returns seconds; `loading` shows the progress. `memory` is what was learnt about
    this machine, by default `open_memory`.
    """

    def __init__(
        self,
        drafts: Sequence[DraftChoice] = (),
        *,
        clock: Callable[[], float],
        note: Callable[[str], None] = lambda _text: None,
        details: bool = False,
        drafts_later: bool = False,
        check: Check = lambda _loaded: None,
        loading: Loading = lambda _name: contextlib.nullcontext(),
        memory: Memory | None = None,
    ) -> None:
        self._drafts = list(drafts)
        self._clock = clock
        self._note = note
        self._details = details
        self._drafts_later = drafts_later
        self._check = check
        self._loading = loading
        self._memory = memory if memory is not None else open_memory()
        self._noted: set[Path] = set()

    @property
    def draft(self) -> DraftSource | None:
        """The draft in use, once a session is open; None if it is that of the options."""
        return self._drafts[0].draft if self._drafts else None

    def open(self, options: SessionOptions) -> Models:
        """Load the models. Raise `ModelFileError`, `MemoryLimitError` or `PairError`."""
        from specgen.llama import build
        from specgen.models import human_bytes
        from specgen.session.loaded_models import Models

        if self._drafts:
            options = replace(options, draft=self._drafts[0].draft)
        # Drafts that specgen chose are loaded after the target. So errors of the two can be told
        # apart, and the target is loaded only once if several drafts are tried.
        is_chosen = bool(self._drafts and self._drafts[0].why)
        taken: Taken | None = None
        with contextlib.ExitStack() as on_error:
            with self._loading(options.target.name):
                own = replace(options, draft="none") if is_chosen else options
                # Lines of the log of two models at once would be mixed.
                ahead = "none" if self._details else options.draft
                loaded = on_error.enter_context(
                    Models(own, self._clock, self._memory, draft_ahead=ahead)
                )
                self._check(loaded)
                if is_chosen:
                    taken = take_first(loaded, self._drafts)
                    self._drafts = [DraftChoice(taken.draft)]
                    if taken.measured:  # not every command saves what its session learns
                        self._memory.save()
            on_error.pop_all()
        if taken is not None:
            for note in (*(taken.measured if self._details else ()), taken.note):
                self._note(note)
        self._note_kernels(loaded)
        self._note_disk(loaded)
        if options.target not in self._noted:
            self._noted.add(options.target)
            drafts = self._drafts_later or options.draft != "none"
            for note in without_effect(options, drafts=drafts, has_gpu=build().gpu_offload):
                self._note(note)
            target = loaded.target
            for draft in loaded.draft.models[:1] if loaded.draft is not None else ():
                if draft.size_bytes <= target.size_bytes:
                    continue
                self._note(
                    f"the draft {draft.name} ({human_bytes(draft.size_bytes)}) is larger than the target "
                    f"{target.name} ({human_bytes(target.size_bytes)}): are the two swapped?"
                )
        return loaded

    def _note_kernels(self, loaded: Models) -> None:
        """Say once of each model that specgen's kernels cannot compute it."""
        for model in loaded.models:
            if not model.kernel_problem or model.path in self._noted:
                continue
            self._noted.add(model.path)
            self._note(
                f"{model.name}: llama.cpp's own code computes this model, since specgen's kernels failed in a "
                f"trial ({model.kernel_problem}); please report this (`specgen doctor -m` tries again)"
            )

    def _note_disk(self, loaded: Models) -> None:
        """Say once that the disk has too little room to keep packed weights, which the cache folder remembers."""
        from specgen.llama.kernels.admission import is_first_time
        from specgen.models import cache_folder

        for model in loaded.models:
            if not model.lacks_disk_room:
                continue
            if is_first_time(cache_folder() / f"no-room-for-packed-weights-{__version__}"):
                self._note(
                    f"{model.name}: its packed weights are not kept, so every start packs them anew: the disk has "
                    "too little room (a tenth of it stays free; `specgen doctor` shows the room; this note is "
                    "shown once)"
                )
            return


#: What only a drafter reads, by the name of its option.
_OF_DRAFTERS = {
    "max_tokens": "--draft-max",
    "min_tokens": "--draft-min",
    "p_min": "--draft-p-min",
    "tree": "--tree",
    "tree_depth": "--tree-depth",
    "temperature": "--draft-temp",
    "top_k": "--draft-top-k",
    "ngrams": "--ngrams",
    "lookup_files": "--lookup-file",
}


def without_effect(options: SessionOptions, *, drafts: bool, has_gpu: bool) -> Iterator[str]:
    """Yield a line about each option that changes nothing, or makes everything slower; `drafts` says whether
    anything will draft."""
    if not drafts:
        plain = DraftOptions()
        for field, name in _OF_DRAFTERS.items():
            if getattr(options.drafting, field) != getattr(plain, field):
                yield f"{name} has no effect: with `--draft none` nothing drafts"
    yield from layers_without_gpu(options.target_context, options.draft_context, has_gpu=has_gpu)
    n_threads, n_cores = options.target_context.n_threads or 0, os.cpu_count()
    if n_cores is not None and n_threads > n_cores:
        yield f"-t {n_threads} is slower than -t {n_cores}: this machine runs {n_cores} threads at once"


def layers_without_gpu(
    target: ContextOptions, draft: ContextOptions, *, has_gpu: bool
) -> Iterator[str]:
    """Yield a line about each number of layers for a GPU that changes nothing, since there is none."""
    for context, name in ((target, "-ngl"), (draft, "-ngld")):
        if context.n_gpu_layers > 0 and not has_gpu:
            layers = context.n_gpu_layers
            yield f"{name} {layers} has no effect: this build of llama.cpp finds no GPU (`specgen doctor`)"


def open_memory() -> Memory:
    """Return the memory of this machine with this build of llama.cpp and the kernels in use."""
    from specgen.llama import build
    from specgen.llama.kernels.attached import computing
    from specgen.models import memory_file
    from specgen.session.calibration.memory import Memory
    from specgen.system.machine import look_at_machine

    built, machine = build(), look_at_machine()
    about = {
        "llama_cpp_python": built.version,
        "features": built.system_info,
        "devices": [device.description for device in built.devices],
        "cores": [machine.n_physical_cores, machine.n_logical_cores, _n_usable_cores()],
        "cpu": machine.cpu,
        "kernels": computing(),
    }
    return Memory(memory_file(), about)


def _n_usable_cores() -> int | None:
    """Return the number of cores that this process may use; None if the system does not say."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else None
