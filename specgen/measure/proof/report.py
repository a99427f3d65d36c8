"""The results of `specgen verify`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from specgen.measure.proof.differences import GreedyResult
from specgen.measure.proof.sampled import SampledResult
from specgen.options import SamplerOptions

ProofCheck: TypeAlias = Literal["both", "greedy", "sampled"]
ProofVerdict: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]


@dataclass(frozen=True, slots=True)
class UncheckedPrompt:
    """A prompt, counted from 1, that was not used for a check, and the reason."""

    prompt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The settings, and the result of each prompt and position."""

    target: str
    draft: str
    verifier: str
    draft_max: int
    #: The samplers of the sampled check; the greedy one has temperature 0.
    sampler: SamplerOptions
    seeded_bug: str | None
    check: ProofCheck
    greedy: tuple[GreedyResult, ...]
    sampled: tuple[SampledResult, ...]
    skipped: tuple[UncheckedPrompt, ...] = ()
    #: Whether the checks were interrupted.
    is_interrupted: bool = False
    #: Why rows of the target depend on their batch although specgen's kernels compute; empty if they do not.
    unequal_rows: str = ""
    #: Whose code computes the target, and where.
    kernels: str = ""

    @property
    def differences(self) -> list[GreedyResult]:
        """The results whose texts differ."""
        return [result for result in self.greedy if result.difference is not None]

    @property
    def is_defect(self) -> bool:
        greedy = any(result.is_defect for result in self.greedy)
        return greedy or any(result.is_defect for result in self.sampled)

    @property
    def undrafted(self) -> list[str]:
        """The checks in which nothing was drafted, so that they showed nothing. Where costs decide, that is
        no fault: each check is made again with a draft in every round."""
        alone = [result for result in self.greedy if result.n_at_once == 1]
        at_once = [result for result in self.greedy if result.n_at_once > 1]
        checks: dict[str, Sequence[GreedyResult | SampledResult]] = {}
        if self.check != "sampled":
            checks |= {"greedy": alone, "several answers at once": at_once}
        if self.check != "greedy":
            checks["sampled"] = self.sampled
        return [
            name
            for name, results in checks.items()
            if not any(result.n_drafted for result in results if result.way != "cost")
        ]

    @property
    def verdict(self) -> ProofVerdict:
        if self.is_defect:
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"


def to_json_object(report: ProofReport) -> dict[str, Any]:
    """Return the report as a JSON-ready dict; infinities and NaN become null.

    - `verdict`: "lossless" (no defect found), "defect", "interrupted" (no defect found until
      then) or "nothing drafted" (in one of the checks, so that it showed nothing).
    - `target`, `draft`: file names, or "ngram". `verifier`, `draft_max`, `sampler`: the
      settings, as `SamplerOptions` names them. `check`: "both", "greedy" or "sampled".
      `seeded_bug`: the name of the bug that was built in, or null. `is_interrupted`. `unequal_rows`:
      why rows of the target depend on their batch although specgen's kernels compute, or "". `kernels`: whose code computes
      the target, and where.
    - `skipped`: `prompt` and `reason` of the prompts that were not used. Prompts are counted from
      1, in the order of their file.
    - `greedy`: for each way to draft and prompt the fields of `GreedyResult` (`prompt`, `way`,
      `n_at_once` (1, and then again some prompts with several answers at once), `n_tokens`, `n_drafted`, `drafted_by`, `n_accepted`, `n_rows`, `moved_by`, `batches_move`,
      `exact_rows`) and `is_defect`; `difference` is null or the fields of `Difference` and
      `is_defect`, its `plain` and `speculative` those of `Choice`.
    - `sampled`: for each way to draft and position the fields of `SampledResult` (`prompt`, `way`,
      `n_prompt`, `n_answer`, `n_draws`, `n_impossible`, `n_rounds`, `n_drafted`, `drafted_by`,
      `n_accepted`, `n_decodes`, `level`),
      `is_tested`, `fits` and `is_defect`; `rows`: `n_rows`, `moved_by`, `batches_move`,
      `exact_rows`, `is_defect`; `depths`: for 1, 2, ... tokens `n_tokens`, `detectable`, `test` (`statistic`,
      `degrees_of_freedom`, `p_value`, `n_pooled`, `n_cells`) and `distance` (`measured`,
      `if_exact`, `lower`, `upper`, `confidence`).
    """
    whole = {"verdict": report.verdict, **dataclasses.asdict(report)}
    for record, result in zip(whole["greedy"], report.greedy, strict=True):
        record["is_defect"] = result.is_defect
        if result.difference is not None:
            record["difference"]["is_defect"] = result.difference.is_defect
    for record, place in zip(whole["sampled"], report.sampled, strict=True):
        record |= {"is_tested": place.is_tested, "fits": place.fits, "is_defect": place.is_defect}
        record["rows"]["is_defect"] = place.rows.is_defect
        for depth_record, depth in zip(record["depths"], place.depths, strict=True):
            depth_record["test"]["n_cells"] = depth.test.n_cells
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
