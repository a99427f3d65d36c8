"""What the benchmarks share: arguments, models and prompts in, answers, ratios and JSON out."""

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
    NOW,
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

#: What a setting may say of a draft: the option's name and what its value is.
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
    """Return a parser with -m and --json, and with those of -N, -n, -c and -md that are asked for.

    -N comes with --prompts.
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
        parser.add_argument("-c", "--ctx-size", type=int, default=ctx_size, help="for each answer")
    return parser


def prompts_of(asked: argparse.Namespace) -> list[str]:
    """As many prompts of the file as were asked for, spread evenly over it."""
    return evenly_chosen(read_prompts(asked.prompts), asked.count)


def bench_prompts(file: Path | None, n_of_each: int | None) -> list[BenchPrompt]:
    """The prompts of a file, or those of `specgen bench`; the first of each category, or all."""
    prompts = own_prompts() if file is None else read_bench_prompts(file)
    return first_of_each(prompts, n_of_each) if n_of_each else prompts


def drafts_of(models: Iterable[Path], *, ngrams: bool = True) -> dict[str, DraftSource]:
    """No draft, n-grams, and draft models, by name."""
    found: dict[str, DraftSource] = {"none": "none"}
    if ngrams:
        found["ngram"] = "ngram"
    return found | {path.name: path for path in models}


def read_setting(setting: str) -> tuple[DraftSource, DraftOptions]:
    """What `DRAFT[:option=value,...]` says; DRAFT is a file, `ngram` or `none`."""
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
    """A session with the options of `specgen run`, but for the draft and the length of answers."""
    generation = GenerationOptions(max_tokens=max_tokens)
    return Session(
        SessionOptions(target, draft, generation=generation), time.perf_counter, measurements
    )


def begin(session: Session, prompt: str) -> Prompt:
    """The prompt in the model's chat template; as it is for a model without one."""
    return session.prompts.of_text(prompt, now=NOW)


def answer(session: Session, prompt: str | Prompt) -> FinishedEvent:
    """Generate an answer to a prompt."""
    begun = begin(session, prompt) if isinstance(prompt, str) else prompt
    *_, last = generate(session, begun)
    assert isinstance(last, FinishedEvent)
    return last


@contextlib.contextmanager
def running(command: Sequence[str], url: str) -> Iterator[None]:
    """A server, from when `url` says that it is healthy until the end."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            for _ in range(600):
                if server.poll() is not None:
                    sys.exit(f"the server ended: {' '.join(command)}")
                # An answer that is an error, too, is an `OSError`.
                with contextlib.suppress(urllib.error.URLError, OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                time.sleep(0.2)
            yield
        finally:
            server.terminate()


# --- figures --------------------------------------------------------------------------------


def n_equal(ones: Iterable[object], others: Iterable[object]) -> int:
    """How many answers are equal."""
    return sum(one == other for one, other in zip(ones, others, strict=True))


def mean_ratio(values: Iterable[float], plain: Iterable[float]) -> float:
    """The geometric mean of the ratios to plain decoding in the same turn."""
    return geometric_mean(own / other for own, other in zip(values, plain, strict=True))


def tell(done: int, total: int) -> None:
    """Tell the progress on stderr."""
    print(f"{done} of {total}", file=sys.stderr)


def command_line(module: str, arguments: Sequence[str]) -> str:
    """Return the command that ran a benchmark, with the names of files in place of absolute paths.

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
    """Write a result, if a file was named for it."""
    if file is not None:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        file.write_text(f"{text}\n", encoding="utf-8")
