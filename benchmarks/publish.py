"""Write the raw figures of a run of `specgen bench` as they are kept in benchmarks/results/.

    python benchmarks/publish.py RAW.json RESULT.json

That is without the texts, which may be of prompts with a licence of their own, and without any path
of the machine. `make docs` makes pages of what is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

#: What a result holds of an answer's text.
_TEXTS = ("text", "token_ids")


def without_texts(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report without texts and paths."""
    results = [
        {**r, "outcome": {k: v for k, v in r["outcome"].items() if k not in _TEXTS}}
        for r in report["results"]
    ]
    prompts = [{k: v for k, v in p.items() if k != "text"} for p in report["prompts"]]
    whole = _without_folders({**report, "results": results, "prompts": prompts})
    return cast(dict[str, Any], whole)


def _without_folders(value: object) -> object:
    """Absolute paths, which have a name of their own or stand in a command, as their last parts."""
    if isinstance(value, Mapping):
        return {_without_folders(k): _without_folders(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    if isinstance(value, str):
        return " ".join(map(_name, value.split(" ")))
    return value


def _name(word: str) -> str:
    return Path(word).name if word.startswith("/") else word


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    text = json.dumps(without_texts(report), ensure_ascii=False, indent=1)
    Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
