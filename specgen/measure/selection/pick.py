"""Pick the first candidate draft that loads and is expected to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, PairError

if TYPE_CHECKING:
    from specgen.measure.selection.default_draft import DraftChoice
    from specgen.options import DraftSource
    from specgen.session.calibration.gain import Costs, Gain
    from specgen.session.loaded_models import Models


@dataclass(frozen=True, slots=True)
class Taken:
    """The draft that was picked, a note with the reasons (also why those before it were not), and
    the `measured` costs of each draft model that was checked."""

    draft: DraftSource
    note: str
    measured: tuple[str, ...]


def take_first(loaded: Models, choices: Sequence[DraftChoice]) -> Taken:
    """Use the first draft that fits the target. A draft model whose gain was not measured
    must also be expected to make the target faster."""
    from specgen.session.calibration.gain import expected_gain
    from specgen.session.measurements import known_costs, measure_costs

    said: list[str] = []
    measured: list[str] = []
    target = loaded.options.target.name
    may_check, may_pay = loaded.n_rows_max > 1, True
    for choice in choices:
        checks = may_check and isinstance(choice.draft, Path) and not choice.is_measured
        if checks and not may_pay:
            continue
        try:
            path = Path(choice.draft)
            costs = known_costs(loaded, path) if checks else None
            # A model that cannot pay by the known costs is not loaded.
            if costs is None or expected_gain(costs).is_worth_it:
                loaded.change_draft(choice.draft)
                costs = measure_costs(loaded, path) if checks else None
        except (BackendError, MemoryLimitError, ModelFileError, PairError) as error:
            said.append(error.message)
            continue
        why = choice.why
        if costs is not None:
            draft, expected = Path(choice.draft).name, expected_gain(costs)
            measured.append(measured_text(target, draft, costs))
            if not expected.is_worth_it:
                said.append(refusal(draft, expected))
                may_pay = not expected.rules_out_all
                continue
            if not loaded.costs.was_busy:  # its times say little
                why += f" (about x{expected.speedup:.1f} expected)"
        return Taken(
            choice.draft, "; ".join(filter(None, (*said, why, choice.advice))), tuple(measured)
        )
    loaded.change_draft("none")
    return Taken("none", "; ".join([*said, "not drafting"]), tuple(measured))


def refusal(draft: str, expected: Gain) -> str:
    """Return a message with figures that says why a draft model is not used."""
    batch = f"a batch of {expected.n_drafted + 1} costs {expected.batch_tokens:.1f} tokens"
    start = f"not drafting with {draft}: on this machine {batch}"
    figure = f"about x{expected.speedup:.2f}"
    if expected.rules_out_all:
        return f"{start}, too much for any draft model to save time (this one: {figure})"
    doubt = ", too little to rely on" if expected.speedup >= 1.0 else ""
    return (
        f"{start} and a drafted token {expected.token_tokens:.2f}, so it would be {figure}{doubt}"
    )


def measured_text(target: str, draft: str, costs: Costs) -> str:
    """Return a message with the measured costs, in milliseconds."""
    sizes = sorted(costs.batch_s)
    rows = ", ".join(str(size) for size in sizes)
    times = ", ".join(f"{1000 * costs.batch_s[size]:.1f}" for size in sizes)
    return (
        f"{target} decodes {rows} rows in {times} ms, "
        f"{draft} a token in {1000 * costs.draft_token_s:.1f} ms"
    )
