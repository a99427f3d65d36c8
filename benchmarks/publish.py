"""What of a run of `specgen bench` goes into BENCHMARKS.md: its table, and the raw figures.

    python benchmarks/publish.py RAW.json [RESULT.json]

Prints a table of speed-ups in Markdown, for each target and temperature, the best of all but our
own contenders by category below it, and ratios to these. Writes the file again without the texts,
which may be of prompts with a licence of their own, and without any path of the machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

_SHORT = {
    "reasoning": "reason.",
    "extraction": "extract.",
    "humanities": "human.",
    "translation": "transl.",
    "summarization": "summ.",
    "math_reasoning": "math_r.",
}
#: What a result holds of an answer's text.
_TEXTS = ("text", "token_ids")

Figures = Mapping[str, Any]


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


def tables(report: Mapping[str, Any]) -> list[str]:
    """The lines of the tables, in Markdown."""
    drafters = {c["name"]: c["drafters"] for c in report["contenders"]}
    lineups: dict[tuple[str, float], list[Figures]] = {}
    for figures in report["figures"]:
        if not figures["is_plain"] and figures["speedup"] is not None:
            lineups.setdefault((figures["target"], figures["temperature"]), []).append(figures)
    lines: list[str] = []
    for (target, temperature), lineup in lineups.items():
        ours = [figures for figures in lineup if drafters.get(figures["contender"])]
        theirs = [figures for figures in lineup if figures not in ours]
        lines += [f"{_name(target)}, temperature {temperature:g}:", ""]
        lines += _table([*ours, *theirs], theirs)
        for figures in ours if theirs else ():
            lines += ["", _compared(figures, theirs)]
        lines.append("")
    return lines


def _table(lineup: Sequence[Figures], theirs: Sequence[Figures]) -> list[str]:
    names = list(_categories(lineup[0]))
    columns = ["", "all", "whole", "worst", *(_SHORT.get(name, name) for name in names)]
    rows = [
        [
            _name(figures["contender"]),
            _number(figures["speedup"]),
            _number(figures.get("whole")),
            _number((figures["worst"] or {}).get("speedup")),
            *(_number(_categories(figures).get(name)) for name in names),
        ]
        for figures in lineup
    ]
    if theirs:
        best = _best(theirs)
        of_all = statistics.geometric_mean(best.values())
        rows.append(["the best of these", _number(of_all), "", "", *map(_number, best.values())])
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _compared(ours: Figures, theirs: Sequence[Figures]) -> str:
    best, own = _best(theirs), _categories(ours)
    setting = max(theirs, key=lambda figures: figures["speedup"])
    by_category = {name: own[name] / best[name] for name in best if name in own}
    behind = [f"{name} {ratio:.2f}" for name, ratio in by_category.items() if ratio < 1.0]
    acceptance, shares = ours["acceptance_rate"], ours["shares"] or {}
    return (
        f"{_name(ours['contender'])}: {ours['speedup'] / setting['speedup']:.2f} times "
        f"{setting['contender']}; {statistics.geometric_mean(by_category.values()):.2f} times the "
        f"best of each category; behind in {', '.join(behind) or 'none'}; first token "
        f"{_number(ours['first_token'])}, own time {100 * shares.get('own', 0.0):.1f} %, "
        f"acceptance {_number(acceptance)}, tokens a round "
        f"{_number(ours['mean_accepted_length'])}, texts that differ {ours['n_different']} "
        f"of {ours['n_answers']}"
    )


def _categories(figures: Figures) -> dict[str, float]:
    return {
        category["category"]: category["speedup"]
        for category in figures["categories"]
        if category["speedup"] is not None
    }


def _best(theirs: Sequence[Figures]) -> dict[str, float]:
    """The best of each category, by whoever that is."""
    best: dict[str, float] = {}
    for figures in theirs:
        for name, speedup in _categories(figures).items():
            best[name] = max(speedup, best.get(name, 0.0))
    return best


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(tables(report)))
    if len(sys.argv) == 3:
        text = json.dumps(without_texts(report), ensure_ascii=False, indent=1)
        Path(sys.argv[2]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
