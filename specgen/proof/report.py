"""What `specgen verify` found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from specgen.options import SamplerOptions
from specgen.proof.greedy import GreedyResult
from specgen.proof.sampled import SampledResult


@dataclass(frozen=True, slots=True)
class Report:
    """The settings, and a result for each prompt and place."""

    target: str
    draft: str
    verifier: str
    draft_max: int
    #: As used for the sampled check; the greedy one has temperature 0.
    sampler: SamplerOptions
    seeded_bug: str | None
    greedy: tuple[GreedyResult, ...]
    sampled: tuple[SampledResult, ...]

    @property
    def differences(self) -> list[GreedyResult]:
        """The prompts whose answers part."""
        return [result for result in self.greedy if result.difference is not None]

    @property
    def is_defect(self) -> bool:
        greedy = any(r.difference.is_defect for r in self.greedy if r.difference is not None)
        return greedy or any(result.is_defect for result in self.sampled)

    @property
    def n_drafted(self) -> int:
        """Drafted tokens that were judged: without any, nothing was shown."""
        greedy = sum(result.n_drafted for result in self.greedy)
        return greedy + sum(result.n_drafted for result in self.sampled)

    @property
    def verdict(self) -> Literal["lossless", "defect", "nothing drafted"]:
        if self.is_defect:
            return "defect"
        return "lossless" if self.n_drafted else "nothing drafted"


def to_json_object(report: Report) -> dict[str, Any]:
    """The report as a JSON-ready dict; what is infinite or no number is null."""
    whole = {"verdict": report.verdict, **dataclasses.asdict(report)}
    for record, result in zip(whole["greedy"], report.greedy, strict=True):
        if result.difference is not None:
            record["difference"]["is_defect"] = result.difference.is_defect
    for record, sampled in zip(whole["sampled"], report.sampled, strict=True):
        record |= {"fits": sampled.fits, "is_defect": sampled.is_defect}
        record["rows"]["is_defect"] = sampled.rows.is_defect
    found: dict[str, Any] = _finite(whole)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
