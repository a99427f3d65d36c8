"""Open a session: load a target, and the first of its drafts that is expected to pay.

The command line, the Python interface, the server and the adapters all come through here::

    sources = find_models(choice)               # choose_models.py: names become files
    wanted = WantedSession.of(sources, ...)     # what to load, and how it answers
    start_kernels(kernel_options)               # once per process, before the first model
    session = open_session(wanted, reporter, clock=time.perf_counter)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError
from specgen.llama import build
from specgen.llama.file_check import remember_checks
from specgen.llama.kernels.admission import KernelStatus, choose_kernels, note_about
from specgen.llama.kernels.attached import computing
from specgen.llama.kernels.packed_weights import is_packed_first, keep_packed_weights
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
    expected_gain,
    known_costs,
    measure_costs,
    no_status,
)
from specgen.session.choose_models import DraftChoice, Sources
from specgen.session.measurement_store import MeasurementStore
from specgen.session.opening_notes import notes_about
from specgen.session.session import Session
from specgen.system.folders import cache_folder, measurements_file, packed_folder
from specgen.system.machine import look_at_machine, usable_cores

#: Raises a `SpecgenError` if the loaded target cannot do what it is needed for.
Check = Callable[[Session], object]
#: Errors of a draft after which the target can still be used.
DRAFT_ERRORS = (BackendError, MemoryLimitError, ModelFileError, PairError)


@dataclass(frozen=True, slots=True)
class WantedSession:
    """What to open."""

    options: SessionOptions
    #: The drafts to try, best first; `open_session` takes the first that loads and should pay.
    #: Empty: the draft in `options`, whatever it costs.
    drafts: tuple[DraftChoice, ...] = ()

    @classmethod
    def of(
        cls,
        sources: Sources,
        *,
        sampling: SamplerOptions,
        drafting: DraftOptions,
        answer: GenerationOptions,
        contexts: Contexts,
    ) -> WantedSession:
        """Combine the files that `find_models` found with the options of models and answers."""
        options = SessionOptions(
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
        return cls(options, sources.drafts)


def _no_note(_text: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where the progress and the notes of loading go; by default, nowhere."""

    #: Gets one sentence at a time, for example why a draft was chosen.
    note: Callable[[str], None] = _no_note
    #: Shows what is being done while its context is open.
    status: Status = no_status
    #: Whether llama.cpp's log is shown. Then one model is loaded at a time, because the lines of
    #: two would be mixed.
    shows_log: bool = False

    def prefixed(self, prefix: str) -> Reporter:
        """Return a reporter whose notes begin with a prefix."""

        def note(text: str) -> None:
            self.note(f"{prefix}{text}")

        return replace(self, note=note)


SILENT = Reporter()


def start_kernels(wanted: KernelOptions) -> tuple[KernelStatus, str | None]:
    """Choose what computes on the CPU in this process, before the first model is loaded.

    Returns:
        The choice, and a note for the user if it is not the expected one.

    Raises:
        UsageError: specgen's kernels were asked for and cannot be used.
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
    check: Check | None = None,
    vocabulary_only: bool = False,
) -> Session:
    """Load a target, and the first of its drafts that loads and is expected to pay.

    A draft that the user named is used whatever it costs, and its errors are raised. A draft that
    was chosen for the user never raises an error: the next one is tried, and the reporter gets the
    reason.

    Args:
        wanted: The target, its drafts, and all other options.
        reporter: Gets the progress and the notes.
        clock: Returns seconds.
        measurements: What was measured on this machine before; None reads the user's file.
        check: Called with the loaded target, before drafts are tried; raises if it does not fit.
        vocabulary_only: The target decodes elsewhere, so only its vocabulary is loaded.

    Raises:
        SpecgenError: The target, or a draft that the user named, cannot be used.
    """
    options = wanted.options
    if wanted.drafts:
        options = replace(options, draft=wanted.drafts[0].draft)
    # Drafts that the user did not name are loaded after the target: errors can be told apart.
    is_draft_automatic = bool(wanted.drafts) and wanted.drafts[0].why != ""
    message = f"loading {options.target.name}"
    if is_packed_first(options.target):
        message += ", whose weights are packed for this machine"

    if measurements is None:
        measurements = open_measurements()

    draft_note = ""
    with contextlib.ExitStack() as on_error, reporter.status(message):
        session = Session(
            replace(options, draft="none") if is_draft_automatic else options,
            clock,
            measurements,
            draft_ahead="none" if reporter.shows_log else options.draft,
            vocabulary_only=vocabulary_only,
        )
        on_error.callback(session.close)
        if check is not None:
            check(session)
        if is_draft_automatic:
            draft_note = use_first(session, wanted.drafts)
        on_error.pop_all()

    if draft_note:
        reporter.note(draft_note)
    never_drafts = bool(wanted.drafts) and options.draft == "none"
    for note in notes_about(session, options, never_drafts=never_drafts):
        reporter.note(note)
    return session


def open_measurements() -> MeasurementStore:
    """Open the user's file of measurements. Those of another machine or build are ignored."""
    built = build()
    machine = look_at_machine()
    about = {
        "llama_cpp_python": built.version,
        "features": built.system_info,
        "devices": [device.description for device in built.devices],
        "cores": [machine.n_physical_cores, machine.n_logical_cores, usable_cores()],
        "cpu": machine.cpu,
        "kernels": computing(),
    }
    return MeasurementStore(measurements_file(), about)


# --- the choice of a draft ------------------------------------------------------------------------


def use_first(session: Session, choices: Sequence[DraftChoice]) -> str:
    """Use the first draft that loads and, if it is a model, is expected to pay.

    Returns:
        A note with the reasons.
    """
    reasons: list[str] = []
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
        if model is None or costs is None or expected_gain(costs) >= MIN_SPEEDUP:
            return "; ".join(filter(None, (*reasons, choice.why, choice.advice)))
        # The model costs more than it gains, or any model would, even one that costs nothing.
        batches_are_quick = expected_gain(replace(costs, draft_token_s=0.0)) >= MIN_SPEEDUP
        why = "batches of the target take too long here for any draft model"
        if batches_are_quick:
            gain = expected_gain(costs)
            why = f"by its costs answers would be about {gain:.1f} times as fast as without drafts"
        reasons.append(f"not drafting with {model.name}: {why}")
    session.change_draft("none")
    return "; ".join([*reasons, "not drafting"])


def _model_to_judge(session: Session, choice: DraftChoice) -> Path | None:
    """Return the draft if it is a model and its gain has to be estimated."""
    never_drafts = session.n_rows_max == 1
    if never_drafts or choice.is_measured or not isinstance(choice.draft, Path):
        return None
    return choice.draft


def _load_draft(
    session: Session,
    draft: DraftSource,
    model: Path | None,
) -> PairCosts | None:
    """Load a draft, and return the costs of a `model`; one that cannot pay is not loaded."""
    if model is None:
        session.change_draft(draft)
        return None
    costs = known_costs(session, model)
    if costs is not None and expected_gain(costs) < MIN_SPEEDUP:
        return costs
    session.change_draft(draft)
    measure_costs(session)
    session.measurements.save()  # not every command saves what its session measures
    return known_costs(session, model)
