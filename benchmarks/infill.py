"""What drafts bring to fill-in-the-middle, on code of installed packages.

    python benchmarks/infill.py -m coder.gguf -md 135m.gguf --packages rich typer --json out.json

Bodies of functions of 4 to 20 lines are cut out of the packages' files, and filled in again: without drafts,
with n-grams, and with each draft model, by turns for each gap. A ratio compares tokens a second after the
first with those without drafts for the same gap; given are the geometric mean and the worst. "exact" counts
the middles that are the text that was cut out. All texts must be those without drafts.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specgen.calibration.memory import Memory
from specgen.catalogue import cache_folder
from specgen.engine.infill import Gap
from specgen.engine.session import Session, SessionOptions
from specgen.events import FinishedEvent
from specgen.kernels import choose_kernels
from specgen.options import DraftSource, GenerationOptions

N_LINES = range(4, 21)
#: Tokens of the prompt, at most.
N_ROOM = 700


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("-md", "--draft", type=Path, action="append", default=[])
    parser.add_argument("--packages", nargs="+", default=["rich", "typer", "jinja2"])
    parser.add_argument("-N", "--count", type=int, default=20)
    parser.add_argument("-n", "--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    choose_kernels("auto", cache_folder())
    every = [gap for name in asked.packages for path in _files(name) for gap in _gaps(path)]
    gaps = random.Random(0).sample(every, asked.count)
    memory = Memory()
    options = GenerationOptions(max_tokens=asked.max_tokens)
    drafts: dict[str, DraftSource] = {"none": "none", "ngram": "ngram"}
    drafts |= {path.name: path for path in asked.draft}
    sessions = {
        name: Session(
            SessionOptions(asked.target, draft, generation=options), time.perf_counter, memory
        )
        for name, draft in drafts.items()
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sessions}
    for number, (gap, cut) in enumerate(gaps):
        for name, session in sessions.items():
            runs[name].append(_fill(session, gap, cut))
        print(f"{number + 1} of {len(gaps)}: {gap.name}", file=sys.stderr)
    for name, found in runs.items():
        print("\t".join(map(str, (name, *_figures(found, runs["none"]).values()))))
    if asked.json is not None:
        about = {
            "target": asked.target.name,
            "n_gaps": len(gaps),
            "contenders": [
                {"draft": name, **_figures(found, runs["none"]), "runs": found}
                for name, found in runs.items()
            ],
        }
        asked.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def _files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.glob("*.py"))


def _gaps(path: Path) -> Iterator[tuple[Gap, str]]:
    """The bodies of a file's functions, without their docstrings: the gap, and what was there."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body or body[0].lineno == node.lineno:
            continue
        first, last = body[0].lineno - 1, body[-1].end_lineno
        assert last is not None
        if last - first in N_LINES:
            start = sum(map(len, lines[:first])) + body[0].col_offset
            end = sum(map(len, lines[:last])) - 1
            yield Gap(text[:start], text[end:], name=path.name), text[start:end]


def _fill(session: Session, gap: Gap, cut: str) -> dict[str, Any]:
    prompt = session.infill(gap, N_ROOM).prompt
    *_, finished = session.generate(prompt, estimate_gain=False)
    assert isinstance(finished, FinishedEvent)
    return {
        "gap": gap.name,
        "n_prompt_tokens": finished.n_prompt_tokens,
        "n_tokens": finished.n_tokens,
        "tokens_per_s": finished.tokens_per_s,
        "n_rounds": finished.n_rounds,
        "n_drafted": finished.n_drafted,
        "n_accepted": finished.n_accepted,
        "is_exact": finished.text.rstrip().startswith(cut.rstrip()),
        "text": finished.text,
    }


def _figures(found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [
        (one, other)
        for one, other in zip(found, plain, strict=True)
        if one["tokens_per_s"] and other["tokens_per_s"]
    ]
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs]
    n_drafted = sum(run["n_drafted"] for run in found)
    n_accepted = sum(run["n_accepted"] for run in found)
    n_rounds = sum(run["n_rounds"] for run in found)
    return {
        "ratio": round(geometric_mean(ratios), 2),
        "worst": round(min(ratios), 2),
        "acceptance_rate": round(n_accepted / n_drafted, 2) if n_drafted else None,
        "tokens_per_round": round(sum(run["n_tokens"] for run in found) / n_rounds, 2),
        "n_exact": sum(run["is_exact"] for run in found),
        "n_equal": sum(a["text"] == b["text"] for a, b in zip(found, plain, strict=True)),
    }


if __name__ == "__main__":
    main()
