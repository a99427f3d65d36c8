"""Prepare the raw figures of a run of `specgen bench` for benchmarks/results/.

    python benchmarks/publish.py RAW.json RESULT.json

Removes the texts of prompts and answers, because prompts may be under another licence, and shortens
absolute paths to file names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

#: The fields of an outcome that contain the answer's text.
_TEXTS = ("text", "token_ids")


def without_texts(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report without texts and without folders."""
    results = [
        {**result, "outcome": _without(result["outcome"], _TEXTS)} for result in report["results"]
    ]
    prompts = [_without(prompt, ("text",)) for prompt in report["prompts"]]
    stripped = _without_folders({**report, "results": results, "prompts": prompts})
    return cast(dict[str, Any], stripped)


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _without_folders(value: object) -> object:
    """Shorten absolute paths to file names in all strings, also within command lines."""
    if isinstance(value, Mapping):
        return {_without_folders(name): _without_folders(each) for name, each in value.items()}
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
