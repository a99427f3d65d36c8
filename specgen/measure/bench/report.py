"""The results of a benchmark, also as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specgen.measure.bench.figures import ContenderFigures, geometric_mean, speedup_of
from specgen.measure.bench.foresight_replay import Foresight
from specgen.measure.bench.prompts import BenchPrompt
from specgen.measure.bench.runs import Result, Runs


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark. `about` has the machine, versions, command line and settings.

    `contenders` describes each contender: its `target`, `temperature` and `name`, and its `drafters` if it is
    compared with foresight. Both are JSON values."""

    about: Mapping[str, Any]
    contenders: Sequence[Mapping[str, Any]]
    prompts: Sequence[BenchPrompt]
    n_rounds: int
    runs: Runs
    figures: Sequence[ContenderFigures]
    foresights: Sequence[Foresight] = ()
    is_interrupted: bool = False

    @property
    def lineups(self) -> list[tuple[str, float]]:
        """The targets and temperatures that have figures."""
        return list(dict.fromkeys((each.target, each.temperature) for each in self.figures))

    @property
    def categories(self) -> list[str]:
        """The categories of the prompts that were answered."""
        return list(
            dict.fromkeys(
                category.category for each in self.figures for category in each.categories
            )
        )

    def of(self, lineup: tuple[str, float]) -> list[ContenderFigures]:
        """Return the figures of a lineup, plain decoding first."""
        return [each for each in self.figures if (each.target, each.temperature) == lineup]

    def drafters(self, figures: ContenderFigures) -> Sequence[str]:
        """Return the names of a contender's drafters, if they are known."""
        for contender in self.contenders:
            names = (contender["target"], contender["temperature"], contender["name"])
            if names == (figures.target, figures.temperature, figures.contender):
                return list(contender.get("drafters", ()))
        return ()

    def share_reached(self, figures: ContenderFigures) -> float | None:
        """Return the share that is reached of perfect foresight's speed with the same drafts.

        It is the geometric mean over the answers; None if it is not known. A share is the seconds of
        foresight over the contender's own, both relative to plain decoding measured at about the same time,
        since a machine's speed changes.
        """
        drafters = self.drafters(figures)
        if figures.temperature > 0.0 or not drafters:
            return None
        for foresight in self.foresights:
            if foresight.target == figures.target:
                best = foresight.speedups(drafters)
                shares = [
                    speedup / best[prompt]
                    for prompt, speedup in self._speedups(figures)
                    if prompt in best
                ]
                return geometric_mean(shares)
        return None

    def _speedups(self, figures: ContenderFigures) -> list[tuple[int, float]]:
        lineup = (figures.target, figures.temperature)
        plain: dict[tuple[int, int], Result] = {}
        own: list[Result] = []
        for result in self.runs.results:
            if (result.target, result.temperature) != lineup:
                continue
            if result.is_plain:
                plain[result.prompt, result.round] = result
            if result.contender == figures.contender:
                own.append(result)
        found = [(r.prompt, speedup_of(r, plain.get((r.prompt, r.round)))) for r in own]
        return [(prompt, speedup) for prompt, speedup in found if speedup is not None]


def to_json_object(report: BenchReport) -> dict[str, Any]:
    """Return everything as JSON values, with times in seconds."""
    return {
        **report.about,
        "n_rounds": report.n_rounds,
        "is_interrupted": report.is_interrupted,
        "prompts": [dataclasses.asdict(prompt) for prompt in report.prompts],
        "contenders": [dict(contender) for contender in report.contenders],
        "figures": [
            {**dataclasses.asdict(each), "foresight_reached": report.share_reached(each)}
            for each in report.figures
        ],
        "foresight": [_foresight(foresight) for foresight in report.foresights],
        "failures": [dataclasses.asdict(failure) for failure in report.runs.failures],
        "skipped_prompts": [dataclasses.asdict(skipped) for skipped in report.runs.skipped],
        "results": [dataclasses.asdict(result) for result in report.runs.results],
    }


def _foresight(foresight: Foresight) -> dict[str, Any]:
    return {
        "target": foresight.target,
        "batch_s": {str(size): seconds for size, seconds in sorted(foresight.batch_s.items())},
        "drafters": {
            name: {"first_s": first_s, "next_s": next_s}
            for name, (first_s, next_s) in foresight.draft_s.items()
        },
        "best": [{**dataclasses.asdict(one), "speedup": one.speedup} for one in foresight.foreseen],
    }
