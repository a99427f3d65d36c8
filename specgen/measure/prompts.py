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
#: The category of a prompt without one.
_ALL = "all"
#: How the categories of our prompts for trials of drafts begin.
_TRIAL = "trial "
_OWN = Path(__file__).with_name("prompts.jsonl")
_HINT = 'a line is like {"prompt": "...", "category": "..."} or {"turns": ["..."]}'


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt to measure with."""

    #: Its number in the file, from 1.
    number: int
    category: str
    text: str


def own_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts, whose categories (code, edit, prose and chat) alternate."""
    return [each for each in read_bench_prompts(_OWN) if not each.category.startswith(_TRIAL)]


def trial_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts for trials of drafts, in the same categories."""
    found = [each for each in read_bench_prompts(_OWN) if each.category.startswith(_TRIAL)]
    return [
        BenchPrompt(number, each.category.removeprefix(_TRIAL), each.text)
        for number, each in enumerate(found, 1)
    ]


def given_prompts(texts: Iterable[str]) -> list[BenchPrompt]:
    """Return texts as prompts without a category."""
    prompts = [BenchPrompt(number, _ALL, text) for number, text in enumerate(texts, start=1)]
    if not all(prompt.text.strip() for prompt in prompts):
        raise PromptError("a prompt is empty", hint="give some text")
    return prompts


def read_prompts(path: Path) -> list[str]:
    """Read the texts of a file's prompts."""
    return [prompt.text for prompt in read_bench_prompts(path)]


def read_bench_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file's prompts.

    It has a text on each line, or it is JSON Lines with a `prompt` or `turns`, the first of which
    counts, and perhaps a `category`. Empty lines are skipped.

    Raises:
        PromptError: what is wrong, and in which line.
    """
    try:
        # Not `splitlines`, which also splits at characters that JSON allows within a string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PromptError(f"{path}: cannot be read: {reason}") from error
    stripped = enumerate(map(str.strip, lines), 1)
    filled = [(number, line) for number, line in stripped if line]
    if not filled:
        raise PromptError(f"{path}: no prompts in it")
    if _is_json_lines(path, filled[0][1]):
        return [
            _record(line, number, f"{path}, line {line_number}")
            for number, (line_number, line) in enumerate(filled, 1)
        ]
    return given_prompts(line for _, line in filled)


def _is_json_lines(path: Path, first_line: str) -> bool:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json", ".ndjson"):
        return True
    return suffix != ".txt" and first_line.startswith("{")


def evenly_chosen(prompts: Iterable[T], n: int) -> list[T]:
    """Return `n` prompts at even distances; all if there are not more."""
    listed = list(prompts)
    n = min(n, len(listed))
    return [listed[index * len(listed) // n] for index in range(n)]


def first_of_each(prompts: Iterable[BenchPrompt], n: int) -> list[BenchPrompt]:
    """Return the first `n` prompts of each category."""
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
    text = record.get("prompt")
    turns = record.get("turns")
    if isinstance(turns, list) and turns:
        text = turns[0]
    if not isinstance(text, str) or not text:
        raise PromptError(f"{where}: no prompt in it", _HINT)
    category = record.get("category", _ALL)
    if not isinstance(category, str):
        raise PromptError(f"{where}: the category is not a text: {category!r}", _HINT)
    # A category is a name in tables whose columns are separated by tabs.
    return BenchPrompt(number, " ".join(category.split()) or _ALL, text)
