r"""Speed-up of fill-in-the-middle by drafts, on the code of installed packages.

    python benchmarks/infill.py -m coder.gguf -md 135m.gguf --packages rich typer --json out.json \
        --server llama-server --server-draft 0.5b.gguf

Function bodies of 5 to 20 lines are cut out of the packages' files and filled in again: by specgen
without drafts, with n-grams and with each draft model, and by llama.cpp's server (`/infill`)
without drafts, with n-grams and with `--server-draft`. All contenders get the same text around a
gap, and take turns for each gap.

All gaps are filled `--passes` times, and the fastest run of each contender counts: other programs
can only slow a run down, and did so here by up to five times. A ratio compares the tokens per
second after the first token with specgen's without drafts for the same gap. Printed are the
geometric mean, the median and the worst. `n_exact` counts the middles that begin with the text that
was cut out, and `n_equal` the texts that are the same as without drafts in every pass, which all of
specgen's must be.
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
#: Maximum characters before and after a gap, about 650 tokens together.
N_PREFIX = 1600
N_SUFFIX = 500
#: The context size, and for the server the batch size. All prompts are shorter.
N_CTX = 2048
PORT = 18436
#: llama.cpp's n-grams: the tokens to match and the tokens to propose. Its defaults, 12 and 48,
#: rarely match anything.
NGRAMS = (
    *("--spec-type", "ngram-simple"),
    *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
)

#: Fills a gap, given the text that was cut out of it, and returns the figures.
Fill: TypeAlias = Callable[[Gap, str], dict[str, Any]]


def main() -> None:
    parser = parser_of(__doc__, max_tokens=96, drafts=True)
    parser.add_argument("--packages", nargs="+", default=["rich", "typer", "jinja2"])
    parser.add_argument("-N", "--count", type=int, default=20)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--server", help="the program of llama.cpp's server")
    parser.add_argument("--server-draft", type=Path, help="a draft model for llama.cpp's server")
    arguments = parser.parse_args()
    choose_kernels("auto", cache_folder())
    all_gaps = [gap for name in arguments.packages for path in _files(name) for gap in _gaps(path)]
    gaps = random.Random(0).sample(all_gaps, arguments.count)
    with contextlib.ExitStack() as stack:
        fills = dict(_specgen(arguments, stack, gaps[0][0])) | dict(_servers(arguments, stack))
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in fills}
        for number, (gap, cut) in enumerate(gaps * arguments.passes):
            for name, fill in fills.items():
                runs[name].append(fill(gap, cut))
            print(f"{number + 1} of {len(gaps) * arguments.passes}: {gap.name}", file=sys.stderr)
    contenders = [
        {"draft": name, **_figures(own_runs, runs["none"], len(gaps))}
        for name, own_runs in runs.items()
    ]
    for entry in contenders:
        print("\t".join(map(str, entry.values())))
    about = {
        "target": arguments.target.name,
        "n_gaps": len(gaps),
        "n_passes": arguments.passes,
        "max_tokens": arguments.max_tokens,
        "contenders": [
            {**entry, "runs": [_without_text(run) for run in runs[str(entry["draft"])]]}
            for entry in contenders
        ],
    }
    write_json(arguments.json, about)


def _without_text(run: dict[str, Any]) -> dict[str, Any]:
    """A run without its text, which may be code under another licence."""
    return {name: value for name, value in run.items() if name != "text"}


def _files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.glob("*.py"))


def _gaps(path: Path) -> Iterator[tuple[Gap, str]]:
    """Yield the bodies of a file's functions, without docstrings: the gap, and the text in it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body or body[0].lineno == node.lineno:
            continue
        first = body[0].lineno - 1
        last = body[-1].end_lineno
        assert last is not None
        if last - first in N_LINES:
            start = sum(map(len, lines[:first])) + body[0].col_offset
            end = sum(map(len, lines[:last])) - 1
            prefix = text[max(0, start - N_PREFIX) : start]
            suffix = text[end : end + N_SUFFIX]
            yield Gap(prefix, suffix, name=path.name), text[start:end]


# --- contenders ---------------------------------------------------------------------------------


def _specgen(
    arguments: argparse.Namespace, stack: contextlib.ExitStack, first: Gap
) -> Iterator[tuple[str, Fill]]:
    """Open specgen's contenders. Each fills a gap first, so that costs are measured by then."""
    measurements = MeasurementStore()
    for name, draft in drafts_of(arguments.draft).items():
        loaded = stack.enter_context(
            opened(arguments.target, draft, arguments.max_tokens, measurements)
        )
        _fill(loaded, first, "")
        # With costs that were measured on a busy machine, specgen might not draft at all.
        if loaded.costs.of(None).are_rough:
            sys.exit(
                f"other programs disturbed the measurement of costs with {name!r}: "
                "run this on an idle machine"
            )
        yield name, partial(_fill, loaded)


def _fill(session: Session, gap: Gap, cut: str) -> dict[str, Any]:
    prompt = infill_prompt(session.target, session.translated_draft, gap, N_CTX)[0]
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


def _servers(
    arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> Iterator[tuple[str, Fill]]:
    """Start llama.cpp's servers.

    Their batch is as long as the context. That leaves no space in a prompt for the headings of
    other files, which specgen's prompts do not have either.
    """
    if arguments.server is None:
        return
    common = [arguments.server, "-m", str(arguments.target), "-np", "1", "--no-webui"]
    common += ["-c", str(N_CTX), "-b", str(N_CTX), "-n", str(arguments.max_tokens)]
    settings: dict[str, tuple[str, ...]] = {"none": (), "ngram": NGRAMS}
    if arguments.server_draft is not None:
        draft = str(arguments.server_draft)
        settings[arguments.server_draft.name] = ("-md", draft, "--spec-type", "draft-simple")
    for number, (name, options) in enumerate(settings.items()):
        port = PORT + number
        command = [*common, *options, "--port", str(port)]
        stack.enter_context(running(command, f"http://127.0.0.1:{port}"))
        yield f"llama-server, {name}", partial(_ask, port, arguments.max_tokens)


def _ask(port: int, max_tokens: int, gap: Gap, cut: str) -> dict[str, Any]:
    body = {
        "input_prefix": gap.prefix,
        "input_suffix": gap.suffix,
        "n_predict": max_tokens,
        "temperature": 0,
        "cache_prompt": False,
    }
    answer = requests.post(f"http://127.0.0.1:{port}/infill", json=body, timeout=600).json()
    text = answer["content"]
    timings = answer["timings"]
    n_tokens = timings["predicted_n"]
    n_accepted = timings.get("draft_n_accepted", 0)
    return {
        "gap": gap.name,
        "n_prompt_tokens": answer["tokens_evaluated"],
        "n_tokens": n_tokens,
        # The server's clock starts at the first token.
        "tokens_per_s": (n_tokens - 1) / timings["predicted_ms"] * 1000 if n_tokens > 1 else None,
        "n_rounds": n_tokens - n_accepted,
        "n_drafted": timings.get("draft_n", 0),
        "n_accepted": n_accepted,
        "is_exact": text.rstrip().startswith(cut.rstrip()),
        "text": text,
    }


# --- figures ------------------------------------------------------------------------------------


def _figures(
    runs: list[dict[str, Any]], plain: list[dict[str, Any]], n_gaps: int
) -> dict[str, Any]:
    """Summarise a contender's runs, compared with those of specgen without drafts.

    Args:
        runs: The contender's runs, pass after pass.
        plain: The runs of specgen without drafts.
        n_gaps: The number of gaps, which is the number of runs in a pass.
    """
    ratios = [
        run["tokens_per_s"] / base["tokens_per_s"]
        for run, base in zip(_fastest(runs, n_gaps), _fastest(plain, n_gaps), strict=True)
        if run["tokens_per_s"] and base["tokens_per_s"]
    ]
    n_drafted = sum(run["n_drafted"] for run in runs)
    n_accepted = sum(run["n_accepted"] for run in runs)
    n_rounds = sum(run["n_rounds"] for run in runs)
    is_equal = [run["text"] == base["text"] for run, base in zip(runs, plain, strict=True)]
    return {
        "ratio": round(geometric_mean(ratios), 2),
        "median": round(median(ratios), 2),
        "worst": round(min(ratios), 2),
        "n_drafted": n_drafted,
        "acceptance_rate": round(n_accepted / n_drafted, 2) if n_drafted else None,
        "tokens_per_round": round(sum(run["n_tokens"] for run in runs) / n_rounds, 2),
        "n_exact": sum(run["is_exact"] for run in runs[:n_gaps]),
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
