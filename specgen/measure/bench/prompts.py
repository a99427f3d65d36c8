"""Prompts to measure with: the user's own from a file, or ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import PromptError
from specgen.measure.bench.own_prompts import OWN_PROMPTS

__all__ = ["ALL", "BenchPrompt", "first_of_each", "own_prompts", "read_bench_prompts"]

#: The category of a prompt without one.
ALL = "all"
_HINT = 'a line is like {"prompt": "...", "category": "..."} or {"turns": ["..."]}'
_JSON_LINES = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt, its number in the file, from 1, and its category."""

    number: int
    category: str
    text: str


def own_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts; the categories code, edit, prose and chat alternate."""
    prompts: list[BenchPrompt] = []
    for texts in zip(*OWN_PROMPTS.values(), strict=True):
        for category, text in zip(OWN_PROMPTS, texts, strict=True):
            prompts.append(BenchPrompt(len(prompts) + 1, category, text))
    return prompts


def read_bench_prompts(path: Path) -> list[BenchPrompt]:
    """Read the prompts of a file.

    In JSON Lines, each line has a `prompt`, or `turns`, the first of which is the prompt, and may have a
    `category`. In any other file, each line is a prompt. Empty lines are skipped. Raise a `PromptError`
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
    is_json = _is_json_lines(path, told[0][1])
    prompts: list[BenchPrompt] = []
    for line_number, line in told:
        where, number = f"{path}, line {line_number}", len(prompts) + 1
        prompts.append(_record(line, number, where) if is_json else BenchPrompt(number, ALL, line))
    return prompts


def first_of_each(prompts: Iterable[BenchPrompt], n: int) -> list[BenchPrompt]:
    """Return the first n prompts of each category, in their order."""
    seen: Counter[str] = Counter()
    chosen: list[BenchPrompt] = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if seen[prompt.category] <= n:
            chosen.append(prompt)
    return chosen


def _is_json_lines(path: Path, first: str) -> bool:
    suffix = path.suffix.lower()
    return suffix in _JSON_LINES or (suffix != ".txt" and first.startswith("{"))


def _record(line: str, number: int, where: str) -> BenchPrompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON: {error}", _HINT) from None
    if not isinstance(record, dict):
        raise PromptError(f"{where}: not a JSON object", _HINT)
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(text, str) or not text:
        raise PromptError(f"{where}: no prompt in it", _HINT)
    category = record.get("category", ALL)
    if not isinstance(category, str):
        raise PromptError(f"{where}: the category is no text: {category!r}", _HINT)
    # A category is a name in tables whose columns are separated by tabs.
    return BenchPrompt(number, " ".join(category.split()) or ALL, text)
