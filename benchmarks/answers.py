"""What the benchmarks share: command lines, prompts, sessions, answers, ratios and JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specgen.events import FinishedEvent
from specgen.measure.prompts import (
    FIXED_NOW,
    BenchPrompt,
    evenly_chosen,
    first_of_each,
    own_prompts,
    read_bench_prompts,
    read_prompts,
)
from specgen.options import DraftOptions, DraftSource, GenerationOptions, SessionOptions, parse_tree
from specgen.session.engine import generate
from specgen.session.measurement_store import MeasurementStore
from specgen.session.prompts import Prompt
from specgen.session.session import Session

#: The options of a setting, each with its field of `DraftOptions` and the parser of its value.
_FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "policy": ("policy", str),
    "tree": ("tree", parse_tree),
    "draft_max": ("max_tokens", int),
    "draft_min": ("min_tokens", int),
    "draft_p_min": ("p_min", float),
    "ngram_min": ("ngram_min", int),
    "ngram_max": ("ngram_max", int),
    "translate": ("translate", str),
    "verifier": ("verifier", str),
    "ngrams": ("ngrams", lambda value: value == "on"),
}


# --- arguments ------------------------------------------------------------------------------


def parser_of(
    doc: str | None,
    *,
    count: int | None = None,
    max_tokens: int | None = None,
    ctx_size: int | None = None,
    drafts: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with the options that several benchmarks have.

    -m and --json are always there; the others only if they are asked for.

    Args:
        doc: The benchmark's docstring, whose first line becomes the description.
        count: The default of -N, the number of prompts, which comes with --prompts.
        max_tokens: The default of -n.
        ctx_size: The default of -c.
        drafts: Whether to add -md.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    if drafts:
        parser.add_argument("-md", "--draft", type=Path, action="append", default=[])
    if count is not None:
        parser.add_argument("--prompts", type=Path, required=True)
        parser.add_argument("-N", "--count", type=int, default=count)
    if max_tokens is not None:
        parser.add_argument("-n", "--max-tokens", type=int, default=max_tokens)
    if ctx_size is not None:
        parser.add_argument("-c", "--ctx-size", type=int, default=ctx_size, help="per answer")
    return parser


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    """The number of prompts that --count asks for, spread evenly over the file."""
    return evenly_chosen(read_prompts(arguments.prompts), arguments.count)


def bench_prompts(file: Path | None, n_of_each: int | None) -> list[BenchPrompt]:
    """The prompts of a file, or without one those of `specgen bench`.

    Args:
        file: The file of prompts.
        n_of_each: How many prompts of each category to return; None or 0 for all.
    """
    prompts = own_prompts() if file is None else read_bench_prompts(file)
    return first_of_each(prompts, n_of_each) if n_of_each else prompts


def drafts_of(models: Iterable[Path], *, ngrams: bool = True) -> dict[str, DraftSource]:
    """Return the sources of drafts by name: none, n-grams, and the draft models."""
    sources: dict[str, DraftSource] = {"none": "none"}
    if ngrams:
        sources["ngram"] = "ngram"
    return sources | {path.name: path for path in models}


def read_setting(setting: str) -> tuple[DraftSource, DraftOptions]:
    """Parse `DRAFT[:option=value,...]`, where DRAFT is a file, `ngram` or `none`."""
    name, _, values = setting.partition(":")
    changes: dict[str, Any] = {}
    for assignment in filter(None, values.split(",")):
        key, _, value = assignment.partition("=")
        field, kind = _FIELDS[key]
        changes[field] = kind(value)
    draft: DraftSource = Path(name)
    if name in ("ngram", "none"):
        draft = "ngram" if name == "ngram" else "none"
    return draft, DraftOptions(**changes)


# --- models and answers ---------------------------------------------------------------------


def opened(
    target: Path, draft: DraftSource, max_tokens: int, measurements: MeasurementStore | None = None
) -> Session:
    """A session with the default options of `specgen run`, except for draft and answer length."""
    generation = GenerationOptions(max_tokens=max_tokens)
    return Session(
        SessionOptions(target, draft, generation=generation), time.perf_counter, measurements
    )


def format_prompt(session: Session, prompt: str) -> Prompt:
    """The prompt in the model's chat template, or unchanged if the model has none."""
    return session.prompts.of_text(prompt, now=FIXED_NOW)


def answer(session: Session, prompt: str | Prompt) -> FinishedEvent:
    """Generate an answer to a prompt."""
    formatted = format_prompt(session, prompt) if isinstance(prompt, str) else prompt
    *_, last = generate(session, formatted)
    assert isinstance(last, FinishedEvent)
    return last


@contextlib.contextmanager
def running(command: Sequence[str], url: str) -> Iterator[None]:
    """Run a server in the block, which begins when the server at `url` is healthy."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            for _ in range(600):
                if server.poll() is not None:
                    sys.exit(f"the server ended: {' '.join(command)}")
                # An HTTP error is an `OSError`, too.
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


# --- figures --------------------------------------------------------------------------------


def n_equal(ones: Iterable[object], others: Iterable[object]) -> int:
    """Count the answers that are equal, pair by pair."""
    return sum(one == other for one, other in zip(ones, others, strict=True))


def mean_ratio(values: Iterable[float], plain: Iterable[float]) -> float:
    """The geometric mean of the ratios to plain decoding, turn by turn."""
    return geometric_mean(value / base for value, base in zip(values, plain, strict=True))


def show_progress(done: int, total: int) -> None:
    """Print the progress on stderr."""
    print(f"{done} of {total}", file=sys.stderr)


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the command that ran a benchmark, with absolute paths shortened to file names.

    Args:
        module: The benchmark's module.
        arguments: The arguments of its command line.
    """
    words = ["python", "-m", f"benchmarks.{module}"]
    for argument in arguments:
        name, equals, value = argument.rpartition("=")
        path = Path(value)
        words.append(f"{name}{equals}{path.name if path.is_absolute() else value}")
    return " ".join(words)


def write_json(file: Path | None, value: object) -> None:
    """Write a result as JSON, unless the file is None."""
    if file is not None:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")
