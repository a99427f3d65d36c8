"""Open a session: choose what computes, load the target, and use the first draft that is expected
to be faster.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from specgen import __version__
from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError
from specgen.llama import build
from specgen.llama.file_check import remember_checks
from specgen.llama.kernels.admission import KernelStatus, choose_kernels, is_first_time, note_about
from specgen.llama.kernels.attached import computing
from specgen.llama.kernels.packed_weights import is_packed_first, keep_packed_weights
from specgen.models.files import cache_folder, measurements_file, packed_folder
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelOptions,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.calibration import (
    WORTH,
    Status,
    expected_gain,
    known_costs,
    measure_costs,
    no_status,
)
from specgen.session.choose_models import DraftChoice, Sources
from specgen.session.measurement_store import MeasurementStore
from specgen.session.prompts import template_of
from specgen.session.session import Session
from specgen.system.machine import look_at_machine
from specgen.system.progress import human_bytes

#: Raises that a target cannot do what is asked for.
Check = Callable[[Session], object]
#: Errors of a draft that leave the target as it is.
DRAFT_ERRORS = (BackendError, MemoryLimitError, ModelFileError, PairError)


def start_kernels(wanted: KernelOptions) -> tuple[KernelStatus, str | None]:
    """Choose what computes on the CPU, before the first model; return it, and a note. Raise
    `UsageError`.
    """
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
) -> SessionOptions:
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
    )


def open_session(
    options: SessionOptions,
    drafts: Sequence[DraftChoice] = (),
    *,
    clock: Callable[[], float],
    measurements: MeasurementStore | None = None,
    note: Callable[[str], None] = lambda _text: None,
    check: Check = lambda _session: None,
    status: Status = no_status,
    load_ahead: bool = True,
) -> Session:
    """Load a target, and the first of `drafts` (or the options' one) that fits and is expected to
    be faster. Only a draft that the user named can raise an error; else the next is used, and
    `note` gets the reason. `check` is called before. With `load_ahead`, the likely draft's weights
    are read beside the target's. Raise `SpecgenError`.
    """
    if drafts:
        options = replace(options, draft=drafts[0].draft)
    # Chosen drafts are loaded after the target, once for all: errors of the two can be told apart.
    is_chosen = bool(drafts and drafts[0].why)
    packs = ", whose weights are packed for this machine" * is_packed_first(options.target)
    with contextlib.ExitStack() as on_error, status(f"loading {options.target.name}{packs}"):
        session = on_error.enter_context(
            Session(
                replace(options, draft="none") if is_chosen else options,
                clock,
                measurements if measurements is not None else open_measurements(),
                draft_ahead=options.draft if load_ahead else "none",
            )
        )
        check(session)
        chosen = [use_first(session, drafts)] if is_chosen else []
        on_error.pop_all()
    is_plain = bool(drafts) and options.draft == "none"
    for text in (*chosen, *_notes(session, options, is_plain=is_plain)):
        note(text)
    return session


def use_first(session: Session, choices: Sequence[DraftChoice]) -> str:
    """Use the first draft that loads, if a model also one expected to gain; return a note with the
    reasons.
    """
    said: list[str] = []
    may_pay = True
    for choice in choices:
        path = choice.draft if isinstance(choice.draft, Path) else None
        if session.n_rows_max == 1 or choice.is_measured:
            path = None
        if path is not None and not may_pay:
            continue
        try:
            costs = known_costs(session, path) if path is not None else None
            # A model that cannot pay by the known costs is not loaded.
            if costs is None or expected_gain(costs) >= WORTH:
                session.change_draft(choice.draft)
                if path is not None:
                    measure_costs(session)
                    costs = known_costs(session, path)
                    session.measurements.save()  # not every command saves what its session learns
        except DRAFT_ERRORS as error:
            said.append(error.message)
            continue
        if path is None or costs is None or (gain := expected_gain(costs)) >= WORTH:
            return "; ".join(filter(None, (*said, choice.why, choice.advice)))
        may_pay = expected_gain(replace(costs, draft_token_s=0.0)) >= WORTH
        why = f"by its costs answers would be about {gain:.1f} times as fast as without drafts"
        why = why if may_pay else "batches of the target take too long here for any draft model"
        said.append(f"not drafting with {path.name}: {why}")
    session.change_draft("none")
    return "; ".join([*said, "not drafting"])


# --- notes ----------------------------------------------------------------------------------------


def _notes(session: Session, options: SessionOptions, *, is_plain: bool) -> Iterator[str]:
    models = session.models
    for model in models:
        if model.loaded.kernel_problem:
            yield (
                f"{model.name}: llama.cpp's own code computes this model, since specgen's kernels failed in a "
                f"trial ({model.loaded.kernel_problem}); please report this (`specgen doctor -m` tries again)"
            )
        elif (packed := model.loaded.packed) and packed.n_new_bytes and not packed.lacks_room:
            yield (
                f"{model.name}: its weights were packed for this machine, and {human_bytes(packed.n_new_bytes)} are "
                f"written to {packed_folder()}: the next start is quick (--packed-cache off keeps none)"
            )
    lacking = (each.name for each in models if each.loaded.packed and each.loaded.packed.lacks_room)
    no_room = next(lacking, None)
    marker = cache_folder() / f"no-room-for-packed-weights-{__version__}"
    if no_room is not None and is_first_time(marker):
        yield (
            f"{no_room}: its packed weights are not kept, so every start packs them anew: the disk has "
            "too little room (a tenth of it stays free; this note is shown once)"
        )
    plain = DraftOptions()
    for field in fields(plain) if is_plain else ():
        # What a variable of the environment sets holds for all commands; a store gets texts all the
        # same.
        says_more = "envvar" in field.metadata or field.name == "lookup_store"
        is_set = getattr(options.drafting, field.name) != getattr(plain, field.name)
        if is_set and field.metadata and not says_more:
            name = field.metadata["spellings"][0].partition("/")[0]
            yield f"{name} has no effect: with `--draft none` nothing drafts"
    yield from layers_without_gpu(options.target_context, options.draft_context)
    template = template_of(session.target, has_tools=True) or ""
    for name in options.target_context.template_variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield f"--chat-template-kwargs: the chat template does not read {name}"
    n_threads, n_cores = options.target_context.n_threads or 0, os.cpu_count() or 1
    if n_threads > n_cores:
        yield f"-t {n_threads} is slower than -t {n_cores}: this machine runs {n_cores} threads at once"
    for draft in models[1:]:
        if draft.size_bytes > session.target.size_bytes:
            yield (
                f"the draft {draft.name} ({human_bytes(draft.size_bytes)}) is larger than the target "
                f"{session.target.name} ({human_bytes(session.target.size_bytes)}): are the two swapped?"
            )


def layers_without_gpu(target: ContextOptions, draft: ContextOptions) -> Iterator[str]:
    for context, name in ((target, "-ngl"), (draft, "-ngld")):
        if context.n_gpu_layers > 0 and not build().gpu_offload:
            layers = context.n_gpu_layers
            yield f"{name} {layers} has no effect: this build of llama.cpp finds no GPU (`specgen doctor`)"


def open_measurements() -> MeasurementStore:
    built, machine = build(), look_at_machine()
    affinity = getattr(os, "sched_getaffinity", None)
    n_usable = len(affinity(0)) if affinity is not None else None
    about = {
        "llama_cpp_python": built.version,
        "features": built.system_info,
        "devices": [device.description for device in built.devices],
        "cores": [machine.n_physical_cores, machine.n_logical_cores, n_usable],
        "cpu": machine.cpu,
        "kernels": computing(),
    }
    return MeasurementStore(measurements_file(), about)
