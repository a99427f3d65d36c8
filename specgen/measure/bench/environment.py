"""The machine and the versions of a benchmark, for its report."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specgen import __version__
from specgen.measure.bench.plan import Field, Plan
from specgen.system.json_values import as_json


def about(plan: Plan, fields: Sequence[Field], command: str) -> dict[str, Any]:
    """Return the machine, the versions, the files and all settings as JSON values; `command` is the command
    line of the benchmark."""
    from specgen.llama import build
    from specgen.llama.kernels import computing
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
        "kernels": computing(),
        "files": {
            str(file): file.stat().st_size
            for file in dict.fromkeys(files)
            if isinstance(file, Path) and file.exists()
        },
        "settings": {name: as_json(value) for name, value in settings.items()},
    }
