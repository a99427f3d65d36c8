"""The result of `specgen draft find`: drafts ranked by expected speed-up, also as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.measure.selection.candidates import Refused
from specgen.measure.selection.trial import is_tie

if TYPE_CHECKING:
    from specgen.measure.selection.trial import Baseline, DraftFigures
    from specgen.options import DraftSource

#: The order of drafts whose speed-ups are shown as equal: those without a second model come first, so
#: that a model is chosen only if it gains something.
_TIES = ("mtp", "ngram", "none")


@dataclass(frozen=True, slots=True)
class Tried:
    """A draft, and its expected figures."""

    draft: DraftSource
    figures: DraftFigures


@dataclass(frozen=True, slots=True)
class Search:
    """The result of `specgen draft find`: the drafts, the best first, and files that cannot draft.
    `saved` is the draft that was saved for the target, if any."""

    target: Path
    baseline: Baseline
    tried: tuple[Tried, ...]
    refused: tuple[Refused, ...]
    saved: DraftSource | None = None
    is_interrupted: bool = False
    #: The share of all cores' time that other programs took meanwhile; None if it is unknown.
    others_share: float | None = None

    @property
    def ties(self) -> tuple[Tried, ...]:
        """The drafts that are as fast as the best one within the noise; empty if it is clearly the best."""
        best = self.tried[0].figures
        found = tuple(one for one in self.tried if is_tie(best, one.figures))
        return found if len(found) > 1 else ()


def by_speedup(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """Return drafts by their speed-ups, the best first."""

    def order(one: Tried) -> tuple[float, int]:
        tie = len(_TIES) if isinstance(one.draft, Path) else _TIES.index(one.draft)
        return (-round(one.figures.speedup, 2), tie)

    return tuple(sorted(tried, key=order))


def to_json_object(search: Search) -> dict[str, object]:
    """Return the result as JSON values, with times in seconds."""
    baseline = search.baseline
    return {
        "target": str(search.target),
        "plain_tokens_per_s": 1.0 / baseline.token_s,
        "batch_s": {str(size): seconds for size, seconds in sorted(baseline.batch_s.items())},
        "n_prompts": len(baseline.answers),
        "n_tokens": sum(len(answer.tokens) for answer in baseline.answers),
        "skipped_prompts": list(baseline.skipped),
        "drafts": [
            {"draft": str(one.draft), **dataclasses.asdict(one.figures)} for one in search.tried
        ],
        "refused": [
            {"file": str(refused.file), "reason": refused.reason} for refused in search.refused
        ],
        "ties": [str(one.draft) for one in search.ties],
        "others_share": search.others_share,
        "saved": None if search.saved is None else str(search.saved),
        "is_interrupted": search.is_interrupted,
    }
