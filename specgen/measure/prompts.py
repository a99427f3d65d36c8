"""Prompts to measure with: the user's own from a file, or ours (prompts.jsonl)."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specgen.errors import PromptError

T = TypeVar("T")

#: The date for chat templates that write one: the present one must not change the answers.
NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
#: The category of a prompt without one, and that of our prompts for trials of drafts.
_ALL, _TRIAL = "all", "trial "
_OWN = Path(__file__).with_name("prompts.jsonl")
_HINT = 'a line is like {"prompt": "...", "category": "..."} or {"turns": ["..."]}'


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt, its number in the file, from 1, and its category."""

    number: int
    category: str
    text: str


def own_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts; the categories code, edit, prose and chat alternate."""
    return [each for each in read_bench_prompts(_OWN) if not each.category.startswith(_TRIAL)]


def trial_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts to try drafts with, of the same categories."""
    found = [each for each in read_bench_prompts(_OWN) if each.category.startswith(_TRIAL)]
    return [
        BenchPrompt(number, each.category.removeprefix(_TRIAL), each.text)
        for number, each in enumerate(found, 1)
    ]


def given_prompts(texts: Iterable[str]) -> list[BenchPrompt]:
    prompts = [BenchPrompt(number, _ALL, text) for number, text in enumerate(texts, start=1)]
    if not all(prompt.text.strip() for prompt in prompts):
        raise PromptError("a prompt is empty", hint="give some text")
    return prompts


def read_prompts(path: Path) -> list[str]:
    return [prompt.text for prompt in read_bench_prompts(path)]


def read_bench_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file's prompts: a text on each line, or JSON Lines with a `prompt` or `turns`, of
    which the first counts, and perhaps a `category`. Empty lines are skipped. Raise a `PromptError`
    that names the line.
    """
    try:
        # Not `splitlines`, which also splits at characters that JSON allows within a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PromptError(f"{path}: cannot be read: {reason}") from error
    told = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not told:
        raise PromptError(f"{path}: no prompts in it")
    suffix, first = path.suffix.lower(), told[0][1]
    if suffix in (".jsonl", ".json", ".ndjson") or (suffix != ".txt" and first.startswith("{")):
        return [
            _record(line, number, f"{path}, line {line_number}")
            for number, (line_number, line) in enumerate(told, 1)
        ]
    return given_prompts(line for _, line in told)


def evenly_chosen(prompts: Iterable[T], n: int) -> list[T]:
    """Return `n` prompts, evenly spaced in the whole list; all if there are not more."""
    whole = list(prompts)
    n = min(n, len(whole))
    return [whole[index * len(whole) // n] for index in range(n)]


def first_of_each(prompts: Iterable[BenchPrompt], n: int) -> list[BenchPrompt]:
    seen: Counter[str] = Counter()
    chosen: list[BenchPrompt] = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= n:
            chosen.append(prompt)
    return chosen


def _record(line: str, number: int, where: str) -> BenchPrompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: not JSON: {error.msg} at column {error.colno}", _HINT
        ) from None
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise PromptError(f"{where}: not JSON: {error}", _HINT) from None
    if not isinstance(record, dict):
        raise PromptError(f"{where}: not a JSON object", _HINT)
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(text, str) or not text:
        raise PromptError(f"{where}: no prompt in it", _HINT)
    category = record.get("category", _ALL)
    if not isinstance(category, str):
        raise PromptError(f"{where}: the category is no text: {category!r}", _HINT)
    # A category is a name in tables whose columns are separated by tabs.
    return BenchPrompt(number, " ".join(category.split()) or _ALL, text)
