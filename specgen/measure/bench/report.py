"""The results of a benchmark, with the machine and the versions, also as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen import __version__
from specgen.measure.bench.figures import ContenderFigures
from specgen.measure.bench.plan import Field, Plan
from specgen.measure.bench.prompts import BenchPrompt
from specgen.measure.bench.runs import Runs
from specgen.system.json_values import as_json


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark. `about` has the machine, versions, command line and settings.

    `contenders` describes each contender: its `target`, `temperature`, `name` and `drafters`. Both are JSON
    values."""

    about: Mapping[str, Any]
    contenders: Sequence[Mapping[str, Any]]
    prompts: Sequence[BenchPrompt]
    n_rounds: int
    runs: Runs
    figures: Sequence[ContenderFigures]
    is_interrupted: bool = False
    #: The share of all cores' time that other programs took meanwhile; None if it is unknown.
    others_share: float | None = None

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


def to_json_object(report: BenchReport) -> dict[str, Any]:
    """Return everything as JSON values, with times in seconds."""
    return {
        **report.about,
        "n_rounds": report.n_rounds,
        "is_interrupted": report.is_interrupted,
        "others_share": report.others_share,
        "prompts": [dataclasses.asdict(prompt) for prompt in report.prompts],
        "contenders": [dict(contender) for contender in report.contenders],
        "figures": [dataclasses.asdict(each) for each in report.figures],
        "failures": [dataclasses.asdict(failure) for failure in report.runs.failures],
        "skipped_prompts": [dataclasses.asdict(skipped) for skipped in report.runs.skipped],
        "results": [dataclasses.asdict(result) for result in report.runs.results],
    }


def about(
    plan: Plan, fields: Sequence[Field], command: str, kernels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the machine, the versions, the files and all settings as JSON values; `command` is the command
    line of the benchmark, `kernels` tells what computes each target."""
    from specgen.llama import build
    from specgen.system.machine import look_at_machine

    made = build()
    files = [
        file
        for field in fields
        for file in (field.target, *itertools.chain.from_iterable(field.drafts.values()))
    ]
    settings = {
        "temperatures": plan.temperatures,
        "policies": plan.policies,
        "trees": [str(tree) for tree in plan.trees],
        "chat": plan.chat,
        "generation": plan.answer,
        "drafting": plan.drafting,
        "sampling": plan.sampling,
        "target_context": {field.name: plan.options(field).target_context for field in fields},
        "draft_context": plan.machine.draft,
    }
    return {
        "specgen": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "machine": as_json(look_at_machine()),
        "llama_cpp": {
            "python_package": made.version,
            "version": made.llama_version,
            "features": {part: list(names) for part, names in made.features.items()},
            "devices": [device.description or device.name for device in made.devices],
        },
        "kernels": dict(kernels),
        "files": {
            str(file): file.stat().st_size
            for file in dict.fromkeys(files)
            if isinstance(file, Path) and file.exists()
        },
        "settings": {name: as_json(value) for name, value in settings.items()},
    }
