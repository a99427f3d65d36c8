"""The report of `specgen verify`: its settings, its results, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from specgen.measure.exactness.greedy_check import GreedyResult
from specgen.measure.exactness.sampled_check import SampledResult
from specgen.options import SamplerOptions
from specgen.system.files import as_json

CheckName: TypeAlias = Literal["both", "greedy", "sampled"]
CheckOutcome: TypeAlias = Literal["lossless", "defect", "interrupted", "nothing drafted"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The settings and results of `specgen verify`."""

    #: The target's name.
    target: str
    #: The draft's name.
    draft: str
    #: How drafts were verified.
    verifier: str
    #: The maximum number of tokens of a draft.
    draft_max: int
    #: The sampler options of the sampled check.
    sampler: SamplerOptions
    #: Which of the two checks were made.
    check: CheckName
    #: The results of the greedy check.
    greedy: tuple[GreedyResult, ...]
    #: The results of the sampled check.
    sampled: tuple[SampledResult, ...]
    #: The numbers of the prompts that did not fit in the context.
    skipped: tuple[int, ...] = ()
    #: Whether the user interrupted the checks.
    is_interrupted: bool = False
    #: The kernels that were used: specgen's or llama.cpp's.
    kernels: str = ""
    #: Why rows depend on their batch; empty if they do not.
    unequal_rows: str = ""
    #: Sentences about how the drafts differed from those that the user asked for.
    instead: tuple[str, ...] = ()

    @property
    def _results(self) -> Sequence[GreedyResult | SampledResult]:
        return (*self.greedy, *self.sampled)

    @property
    def undrafted(self) -> list[str]:
        """The names of the checks that prove nothing, because nothing was drafted in them.

        Results of the "cost" way are left out, since that policy may decide not to draft.
        """
        results_by_check: dict[str, Sequence[GreedyResult | SampledResult]] = {}
        if self.check != "sampled":
            one_at_a_time = [result for result in self.greedy if result.n_at_once == 1]
            several_at_once = [result for result in self.greedy if result.n_at_once > 1]
            results_by_check["greedy"] = one_at_a_time
            if several_at_once:  # some models can only generate one answer at a time
                results_by_check["several answers at once"] = several_at_once
        if self.check != "greedy":
            results_by_check["sampled"] = self.sampled
        return [
            name
            for name, results in results_by_check.items()
            if not any(result.n_drafted for result in results if result.way != "cost")
        ]

    @property
    def verdict(self) -> CheckOutcome:
        """The outcome of all checks together."""
        if any(result.is_defect for result in self._results):
            return "defect"
        if self.is_interrupted:
            return "interrupted"
        return "nothing drafted" if self.undrafted else "lossless"

    def to_json_object(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        report: dict[str, Any] = {"verdict": self.verdict, **as_json(self)}
        records = (*report["greedy"], *report["sampled"])
        for record, result in zip(records, self._results, strict=True):
            record["is_defect"] = result.is_defect
        return report
