"""Run the checks of one architecture, and print lines of JSON.

    python -m tests.architectures.child \\
        '{"name": ..., "folder": ..., "wrong": ..., "cache": ..., "todo": [...]}'

`tests/architectures/run.py` starts it. `todo` lists (type, who computes, check). Each check has two
lines: one when it begins and one with its result. So the reader knows which check was running when
llama.cpp crashed. If specgen's kernels cannot be used, only llama.cpp's are checked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from specgen.errors import SpecgenError
from specgen.llama.kernels.admission import choose_kernels
from tests.architectures.checks import CHECKS, CheckFailedError, Subject, can_branch


def main() -> None:
    from specgen.llama.kernels.attached import attached

    job: dict[str, Any] = json.loads(sys.argv[1])
    folder, name = Path(job["folder"]), job["name"]
    choose_kernels("auto", Path(job["cache"]))
    kernels = attached()
    not_loaded: set[tuple[str, str]] = set()
    for kind, who, check in job["todo"]:
        if (kind, who) in not_loaded or (who == "specgen" and kernels is None):
            continue
        other = "f32" if kind == "q4_k" else "q4_k"
        subject = Subject(
            path=folder / f"{name}-{kind}.gguf",
            near=folder / f"{name}-{other}.gguf",
            wrong=Path(job["wrong"]),
            kernels=who == "specgen",
        )
        if kernels is not None:
            kernels.enable(products=subject.kernels, attention=subject.kernels)
        _tell(kind, who, check)
        facts: dict[str, Any] = {}
        try:
            found = CHECKS[check](subject)
            if check == "load":
                facts["can_branch"] = can_branch(subject)
            facts |= {"ok": True, "detail": found}
        except (CheckFailedError, SpecgenError) as error:
            message = error.message if isinstance(error, SpecgenError) else str(error)
            facts |= {"ok": False, "detail": message.replace(f"{folder}{os.sep}", "")}
            if check == "load":
                not_loaded.add((kind, who))
        _tell(kind, who, check, **facts)


def _tell(kind: str, who: str, check: str, **facts: Any) -> None:
    print(json.dumps({"type": kind, "by": who, "check": check, **facts}), flush=True)


if __name__ == "__main__":
    main()
