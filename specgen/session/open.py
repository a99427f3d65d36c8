"""Open a session: load a target, and the first of its drafts that is expected to pay.

The command line, the Python interface, the server and the adapters all open sessions like this::

    sources = find_models(choice)               # choose_models.py: names become files
    wanted = WantedSession.of(sources, ...)     # what to load, and how it answers
    start_kernels(kernel_options)               # once per process, before the first model
    session = open_session(wanted, reporter, clock=time.perf_counter)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError
from specgen.llama import build
from specgen.llama.file_check import remember_checks
from specgen.llama.kernels.admission import KernelStatus, choose_kernels, note_about
from specgen.llama.kernels.attached import computing
from specgen.llama.kernels.packed_weights import is_packed_first, keep_packed_weights
from specgen.models.stored_models import shown_name
from specgen.options import (
    Contexts,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    KernelOptions,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.calibration import (
    MIN_SPEEDUP,
    PairCosts,
    Status,
    expected_speedup,
    known_costs,
    measure_costs,
    no_status,
)
from specgen.session.choose_models import DraftChoice, Sources
from specgen.session.measurement_store import MeasurementStore
from specgen.session.opening_notes import notes_about, notes_after_closing
from specgen.session.session import Session
from specgen.session.weights_memory import WeightsBudget, weights_budget
from specgen.system.control_groups import group_limits
from specgen.system.folders import cache_folder, measurements_file, packed_folder
from specgen.system.machine import allowed_processors, describe_machine

#: Checks a session with a loaded target: raises a `SpecgenError` if it does not suit the caller.
SessionCheck: TypeAlias = Callable[[Session], object]
#: Errors while loading a draft after which the target can still be used without it.
DRAFT_ERRORS = (BackendError, MemoryLimitError, ModelFileError, PairError)


@dataclass(frozen=True, slots=True)
class WantedSession:
    """The target and the drafts to open, with all options."""

    #: The target, and everything that decides how it answers.
    options: SessionOptions
    #: The drafts to try, best first. `open_session` uses the first that loads and is expected to
    #: pay. If empty, the draft in `options` is used, whatever it costs.
    drafts: tuple[DraftChoice, ...] = ()
    #: The number of answers at once, for whose contexts streamed weights leave room.
    n_slots: int = 1
    #: Drafts that will be loaded later, one at a time, for which they leave room, too.
    later_drafts: tuple[DraftSource, ...] = ()

    @classmethod
    def of(
        cls,
        sources: Sources,
        *,
        sampling: SamplerOptions,
        drafting: DraftOptions,
        generation: GenerationOptions,
        contexts: Contexts,
    ) -> WantedSession:
        """Combine the files that `find_models` found with the options of models and answers."""
        options = SessionOptions(
            target=sources.target,
            draft=sources.draft,
            sampler=sampling,
            drafting=drafting,
            generation=generation,
            target_context=contexts.target,
            draft_context=contexts.draft,
            further_drafts=sources.further_drafts,
            cache=cache_folder(),
        )
        return cls(options, sources.drafts)


def _no_note(_text: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where to report the progress of loading, and notes; by default, nowhere."""

    #: Gets one sentence at a time, for example why a draft was chosen.
    note: Callable[[str], None] = _no_note
    #: Shows what is being done while its context is open.
    status: Status = no_status
    #: Shows how far the packing of streamed weights is: the bytes that are packed, and all of them.
    packing: Callable[[int, int], None] | None = None
    #: Whether llama.cpp's log is shown. If so, the models are loaded one after the other, to keep
    #: their log lines apart.
    shows_log: bool = False

    def prefixed(self, prefix: str) -> Reporter:
        """Return a reporter that puts a prefix before each note."""

        def note(text: str) -> None:
            self.note(f"{prefix}{text}")

        return replace(self, note=note)


SILENT = Reporter()


def start_kernels(wanted: KernelOptions) -> tuple[KernelStatus, str | None]:
    """Choose the CPU kernels of this process. Call this before the first model is loaded.

    Returns:
        The chosen kernels, and a note for the user if they are not the expected ones, else None.

    Raises:
        UsageError: If specgen's kernels were asked for and cannot be used.
    """
    remember_checks(cache_folder())
    status = choose_kernels(wanted.choice, cache_folder())
    keep_packed_weights(None if wanted.packed_cache == "off" else packed_folder())
    return status, note_about(status, wanted.choice, cache_folder())


def open_session(
    wanted: WantedSession,
    reporter: Reporter = SILENT,
    *,
    clock: Callable[[], float],
    measurements: MeasurementStore | None = None,
    check: SessionCheck | None = None,
    vocabulary_only: bool = False,
    budget: WeightsBudget | None = None,
) -> Session:
    """Load a target, and the first of its drafts that loads and is expected to pay.

    A draft that the user named is used whatever it costs, and if it cannot be loaded, its error is
    raised. If a draft that was chosen automatically cannot be loaded, or would not pay, the next
    one is tried, and a note tells why.

    Args:
        wanted: The target, its drafts, and all other options.
        reporter: Receives the progress and the notes.
        clock: Returns the current time in seconds.
        measurements: What was measured on this machine before; None reads the user's file.
        check: Called with the loaded target before drafts are tried. It may raise an error.
        vocabulary_only: Whether to load only the target's vocabulary, because it decodes elsewhere.
        budget: The memory for the target's weights; None decides it, as `budget_of` does.

    Raises:
        SpecgenError: If the target, or a draft that the user named, cannot be used.
    """
    # 1. Decide what is loaded at once, and what is read ahead.
    options = wanted.options
    if wanted.drafts:
        options = replace(options, draft=wanted.drafts[0].draft)
    # Only choices that the user did not make have a reason. They are loaded after the target, so
    # that an error of the target is not taken for one of the draft.
    is_draft_automatic = bool(wanted.drafts) and wanted.drafts[0].why != ""
    first_options = options
    if is_draft_automatic:
        first_options = replace(options, draft="none")
    draft_ahead = options.draft
    if reporter.shows_log:
        draft_ahead = "none"
    if measurements is None:
        measurements = open_measurements()
    if budget is None and not vocabulary_only:
        budget = budget_of(wanted)

    # 2. Load the target, then its draft.
    started_s = clock()
    draft_note = ""
    with contextlib.ExitStack() as on_error, reporter.status(_loading_message(options.target)):
        session = Session(
            first_options,
            clock,
            measurements,
            draft_ahead=draft_ahead,
            vocabulary_only=vocabulary_only,
            budget=budget,
            on_packing=reporter.packing,
        )
        on_error.callback(session.close)
        if check is not None:
            check(session)
        if is_draft_automatic:
            draft_note = use_first(session, wanted.drafts)
        session.count_rest(started_s)
        on_error.pop_all()

    # 3. Tell the user what there is to know about them.
    if draft_note:
        reporter.note(draft_note)
    never_drafts = bool(wanted.drafts) and options.draft == "none"
    for note in notes_about(session, options, never_drafts=never_drafts):
        reporter.note(note)
    session.call_after_close(partial(_note_written_files, session, reporter))
    return session


def _note_written_files(session: Session, reporter: Reporter) -> None:
    """Write notes about the files that a session wrote when it was closed."""
    for note in notes_after_closing(session):
        reporter.note(note)


def _loading_message(target: Path) -> str:
    message = f"loading {shown_name(target)}"
    if is_packed_first(target):
        message += ", whose weights are packed for this machine"
    return message


def budget_of(
    wanted: WantedSession,
    max_bytes: float = math.inf,
) -> WeightsBudget:
    """Decide how much memory the weights of a session's target may use, before anything is loaded.

    Args:
        wanted: The target, the drafts, and the number of answers at once.
        max_bytes: The memory for everything that the session loads, if less is available.

    Raises:
        MemoryLimitError: If they do not fit, and `weights_memory` is ``all``.
        UsageError: If `weights_memory` does not suit the other options.
    """
    drafts = [choice.draft for choice in wanted.drafts] or [wanted.options.draft]
    return weights_budget(
        wanted.options,
        (*drafts, *wanted.later_drafts),
        wanted.n_slots,
        max_bytes,
    )


def open_measurements() -> MeasurementStore:
    """Open the user's file of measurements.

    Measurements of another machine, or with another build of llama.cpp, are not used.
    """
    built = build()
    machine = describe_machine()
    processors = allowed_processors()
    about: dict[str, Any] = {
        "llama_cpp_python": built.version,
        "features": built.system_info,
        "devices": [device.description for device in built.devices],
        "cores": [
            machine.n_physical_cores,
            machine.n_logical_cores,
            None if processors is None else len(processors),
        ],
        "cpu": machine.cpu,
        "kernels": computing(),
    }
    quota = group_limits().cpu_quota
    if quota is not None:  # without a quota, the keys are those of earlier versions
        about["cpu_quota"] = quota
    return MeasurementStore(measurements_file(), about)


# --- the choice of a draft ------------------------------------------------------------------------


def use_first(session: Session, choices: Sequence[DraftChoice]) -> str:
    """Use the first draft that loads and, if it is a model, is expected to pay.

    Returns:
        A note that names the draft in use, and why others are not used.
    """
    reasons: list[str] = []
    #: False once it is known that even a draft model without any cost would not pay.
    batches_are_quick = True
    for choice in choices:
        model = _model_to_judge(session, choice)
        if model is not None and not batches_are_quick:
            continue
        try:
            costs = _load_draft(session, choice.draft, model)
        except DRAFT_ERRORS as error:
            reasons.append(error.message)
            continue
        if model is None or costs is None or expected_speedup(costs) >= MIN_SPEEDUP:
            return "; ".join(filter(None, (*reasons, choice.why, choice.advice)))
        # Would a model pay that costs nothing? If not, the target's batches are the reason.
        batches_are_quick = expected_speedup(replace(costs, draft_token_s=0.0)) >= MIN_SPEEDUP
        why = "batches of the target take too long here for any draft model"
        if batches_are_quick:
            speedup = f"{expected_speedup(costs):.1f}"
            why = f"answers would be only about {speedup} times as fast as without drafts"
        reasons.append(f"not drafting with {shown_name(model)}: {why}")
    session.change_draft("none")
    return "; ".join([*reasons, "not drafting"])


def _model_to_judge(session: Session, choice: DraftChoice) -> Path | None:
    """Return the model of a choice if its speed-up has to be estimated, else None.

    Nothing has to be estimated for n-grams, for a draft whose speed-up was measured, or if the
    options allow no drafted tokens.
    """
    never_drafts = session.n_rows_max == 1
    if never_drafts or choice.is_measured or not isinstance(choice.draft, Path):
        return None
    return choice.draft


def _load_draft(
    session: Session,
    draft: DraftSource,
    model: Path | None,
) -> PairCosts | None:
    """Load a draft, unless its costs are known and it cannot pay.

    Args:
        session: Loads the draft.
        draft: The draft.
        model: The same draft if its speed-up has to be estimated, else None (`_model_to_judge`).

    Returns:
        The costs of the pair, measured if necessary; None if `model` is None.
    """
    if model is None:
        session.change_draft(draft)
        return None
    costs = known_costs(session, model)
    if costs is not None and expected_speedup(costs) < MIN_SPEEDUP:
        return costs
    session.change_draft(draft)
    measure_costs(session)
    session.measurements.save()  # not every command saves what its session measures
    return known_costs(session, model)
