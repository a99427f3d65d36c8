r"""What drafts bring to fill-in-the-middle, on code of installed packages.

    python benchmarks/infill.py -m coder.gguf -md 135m.gguf --packages rich typer --json out.json \
        --server llama-server --server-draft 0.5b.gguf

Bodies of functions of 5 to 20 lines are cut out of the packages' files and filled in again: without
drafts, with n-grams and with each draft model, and by llama.cpp's server (`/infill`) without
drafts, with n-grams and with `--server-draft`. All get the same text around a gap, and take turns
for each gap. All gaps are filled `--passes` times, and the fastest run of each contender counts for
a gap: other work on a machine can only slow a run, and did so here by up to five times. A ratio
compares tokens a second after the first with specgen's without drafts for the same gap; given are
the geometric mean, the median and the worst. "exact" counts the middles that begin with the text
that was cut out. All of specgen's texts must be those without drafts, in every pass.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, TypeAlias

import requests

from benchmarks.answers import answer, drafts_of, opened, parser_of, running, write_json
from specgen.llama.kernels.admission import choose_kernels
from specgen.session.measurement_store import MeasurementStore
from specgen.session.prompts.infill import Gap, infill_prompt
from specgen.session.session import Session
from specgen.system.folders import cache_folder

N_LINES = range(5, 21)
#: Characters around a gap, at most: some 650 tokens.
N_PREFIX, N_SUFFIX = 1600, 500
#: A context, and for the server a batch, that no prompt fills.
N_CTX = 2048
PORT = 18436
#: What llama.cpp's n-grams look for and propose, in tokens: its defaults, 12 and 48, rarely find
#: anything.
NGRAMS = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
)

#: Fills a gap in which a text was, and tells of it.
Fill: TypeAlias = Callable[[Gap, str], dict[str, Any]]


def main() -> None:
    parser = parser_of(__doc__, max_tokens=96, drafts=True)
    parser.add_argument("--packages", nargs="+", default=["rich", "typer", "jinja2"])
    parser.add_argument("-N", "--count", type=int, default=20)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--server", help="llama.cpp's server")
    parser.add_argument("--server-draft", type=Path, help="a draft model for it")
    asked = parser.parse_args()
    choose_kernels("auto", cache_folder())
    every = [gap for name in asked.packages for path in _files(name) for gap in _gaps(path)]
    gaps = random.Random(0).sample(every, asked.count)
    with contextlib.ExitStack() as stack:
        fills = dict(_specgen(asked, stack, gaps[0][0])) | dict(_servers(asked, stack))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in fills}
        for number, (gap, cut) in enumerate(gaps * asked.passes):
            for name, fill in fills.items():
                runs[name].append(fill(gap, cut))
            print(f"{number + 1} of {len(gaps) * asked.passes}: {gap.name}", file=sys.stderr)
    contenders = [
        {"draft": name, **_figures(found, runs["none"], len(gaps))} for name, found in runs.items()
    ]
    for entry in contenders:
        print("\t".join(map(str, entry.values())))
    about = {
        "target": asked.target.name,
        "n_gaps": len(gaps),
        "n_passes": asked.passes,
        "max_tokens": asked.max_tokens,
        "contenders": [
            {**entry, "runs": [_without_text(run) for run in runs[str(entry["draft"])]]}
            for entry in contenders
        ],
    }
    write_json(asked.json, about)


def _without_text(run: dict[str, Any]) -> dict[str, Any]:
    """A run without the middle, which may be code with a licence of its own."""
    return {name: value for name, value in run.items() if name != "text"}


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
            around = text[max(0, start - N_PREFIX) : start], text[end : end + N_SUFFIX]
            yield Gap(*around, name=path.name), text[start:end]


# --- contenders ---------------------------------------------------------------------------------


def _specgen(
    asked: argparse.Namespace, stack: contextlib.ExitStack, first: Gap
) -> Iterator[tuple[str, Fill]]:
    """Specgen's contenders, which have measured what decodes cost."""
    measurements = MeasurementStore()
    for name, draft in drafts_of(asked.draft).items():
        loaded = stack.enter_context(opened(asked.target, draft, asked.max_tokens, measurements))
        _fill(loaded, first, "")
        if loaded.costs.are_rough():  # what is measured then may say that no draft pays
            sys.exit(f"other work slowed the measurement of {name!r}: run it on an idle machine")
        yield name, partial(_fill, loaded)


def _fill(session: Session, gap: Gap, cut: str) -> dict[str, Any]:
    prompt = infill_prompt(session.target, session.own_vocabulary, gap, N_CTX)[0]
    finished = answer(session, prompt)
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


def _servers(asked: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[tuple[str, Fill]]:
    """Start llama.cpp's servers.

    With a batch as long as the context, their prompts have no room for the headings of files, which
    specgen's do not have either.
    """
    if asked.server is None:
        return
    common = [asked.server, "-m", str(asked.target), "-np", "1", "--no-webui"]
    common += ["-c", str(N_CTX), "-b", str(N_CTX), "-n", str(asked.max_tokens)]
    ways: dict[str, tuple[str, ...]] = {"none": (), "ngram": NGRAMS}
    if asked.server_draft is not None:
        draft = str(asked.server_draft)
        ways[asked.server_draft.name] = ("-md", draft, "--spec-type", "draft-simple")
    for number, (name, options) in enumerate(ways.items()):
        port = PORT + number
        url, command = f"http://127.0.0.1:{port}", [*common, *options, "--port", str(port)]
        stack.enter_context(running(command, url))
        yield f"llama-server, {name}", partial(_ask, port, asked.max_tokens)


def _ask(port: int, max_tokens: int, gap: Gap, cut: str) -> dict[str, Any]:
    around = {"input_prefix": gap.prefix, "input_suffix": gap.suffix}
    body = {**around, "n_predict": max_tokens, "temperature": 0, "cache_prompt": False}
    found = requests.post(f"http://127.0.0.1:{port}/infill", json=body, timeout=600).json()
    timings, text = found["timings"], found["content"]
    n_tokens, n_accepted = timings["predicted_n"], timings.get("draft_n_accepted", 0)
    return {
        "gap": gap.name,
        "n_prompt_tokens": found["tokens_evaluated"],
        "n_tokens": n_tokens,
        # Its time begins with the first token.
        "tokens_per_s": (n_tokens - 1) / timings["predicted_ms"] * 1000 if n_tokens > 1 else None,
        "n_rounds": n_tokens - n_accepted,
        "n_drafted": timings.get("draft_n", 0),
        "n_accepted": n_accepted,
        "is_exact": text.rstrip().startswith(cut.rstrip()),
        "text": text,
    }


# --- figures ------------------------------------------------------------------------------------


def _figures(
    found: list[dict[str, Any]], plain: list[dict[str, Any]], n_gaps: int
) -> dict[str, Any]:
    pairs = [
        (one["tokens_per_s"], other["tokens_per_s"])
        for one, other in zip(_fastest(found, n_gaps), _fastest(plain, n_gaps), strict=True)
        if one["tokens_per_s"] and other["tokens_per_s"]
    ]
    ratios = [one / other for one, other in pairs]
    n_drafted = sum(run["n_drafted"] for run in found)
    n_accepted = sum(run["n_accepted"] for run in found)
    n_rounds = sum(run["n_rounds"] for run in found)
    is_equal = [a["text"] == b["text"] for a, b in zip(found, plain, strict=True)]
    return {
        "ratio": round(geometric_mean(ratios), 2),
        "median": round(median(ratios), 2),
        "worst": round(min(ratios), 2),
        "n_drafted": n_drafted,
        "acceptance_rate": round(n_accepted / n_drafted, 2) if n_drafted else None,
        "tokens_per_round": round(sum(run["n_tokens"] for run in found) / n_rounds, 2),
        "n_exact": sum(run["is_exact"] for run in found[:n_gaps]),
        "n_equal": sum(all(is_equal[number::n_gaps]) for number in range(n_gaps)),
    }


def _fastest(runs: list[dict[str, Any]], n_gaps: int) -> list[dict[str, Any]]:
    """The fastest run for each gap."""
    return [
        max(runs[number::n_gaps], key=lambda run: run["tokens_per_s"] or 0.0)
        for number in range(n_gaps)
    ]


if __name__ == "__main__":
    main()
