"""Prompts to measure with: the user's from a file, or specgen's (prompts.jsonl)."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specgen.errors import PromptError
from specgen.system.files import read_text

T = TypeVar("T")

#: The time for chat templates that show one: always the same, so that answers do not change daily.
FIXED_NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
#: The category of prompts that do not name one.
_DEFAULT_CATEGORY = "all"
#: The prefix of the categories of specgen's prompts that are used to try drafts.
_TRIAL_PREFIX = "trial "
_OWN_FILE = Path(__file__).with_name("prompts.jsonl")
_HINT = 'a line is like {"prompt": "...", "category": "..."} or {"turns": ["..."]}'


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt to measure with."""

    #: Its number in the file, from 1.
    number: int
    #: The kind of task.
    category: str
    #: The prompt, as the user typed it.
    text: str


def own_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts for `specgen bench`.

    Their categories alternate: code, edit, prose and chat.
    """
    prompts = read_bench_prompts(_OWN_FILE)
    return [prompt for prompt in prompts if not prompt.category.startswith(_TRIAL_PREFIX)]


def trial_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts for trying drafts, with the same categories as `own_prompts`."""
    prompts = read_bench_prompts(_OWN_FILE)
    chosen = [prompt for prompt in prompts if prompt.category.startswith(_TRIAL_PREFIX)]
    return [
        BenchPrompt(number, prompt.category.removeprefix(_TRIAL_PREFIX), prompt.text)
        for number, prompt in enumerate(chosen, 1)
    ]


def given_prompts(texts: Iterable[str]) -> list[BenchPrompt]:
    """Return texts as prompts of the default category.

    Raises:
        PromptError: If a text is blank.
    """
    prompts = [
        BenchPrompt(number, _DEFAULT_CATEGORY, text) for number, text in enumerate(texts, start=1)
    ]
    if not all(prompt.text.strip() for prompt in prompts):
        raise PromptError("a prompt is empty", hint="give some text")
    return prompts


def read_prompts(path: Path) -> list[str]:
    """Read the texts of a file's prompts, as `read_bench_prompts` does."""
    return [prompt.text for prompt in read_bench_prompts(path)]


def read_bench_prompts(path: Path) -> list[BenchPrompt]:
    """Read a file's prompts.

    The file has one text per line, or one JSON object per line. An object has a `prompt`,
    or `turns`, the first of which is used. It may have a `category`. Blank lines are skipped.

    Raises:
        PromptError: If the file cannot be read, has no prompts, or has an invalid line.
    """
    # Not `splitlines`, which also splits at characters that JSON allows within a string.
    lines = read_text(path, str(path), PromptError).split("\n")
    stripped = enumerate(map(str.strip, lines), 1)
    numbered_lines = [(line_number, line) for line_number, line in stripped if line]
    if not numbered_lines:
        raise PromptError(f"{path}: no prompts in it")
    _, first_line = numbered_lines[0]
    if _is_json_lines(path, first_line):
        return [
            _parse_json_line(line, number, f"{path}, line {line_number}")
            for number, (line_number, line) in enumerate(numbered_lines, 1)
        ]
    return given_prompts(line for _, line in numbered_lines)


def _is_json_lines(path: Path, first_line: str) -> bool:
    """Decide by the file's extension, or else by the first line."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".json", ".ndjson"):
        return True
    return suffix != ".txt" and first_line.startswith("{")


def evenly_chosen(prompts: Iterable[T], n: int) -> list[T]:
    """Return `n` prompts that are evenly spaced in the list, or all if there are fewer."""
    all_prompts = list(prompts)
    n = min(n, len(all_prompts))
    return [all_prompts[index * len(all_prompts) // n] for index in range(n)]


def first_of_each(prompts: Iterable[BenchPrompt], n: int) -> list[BenchPrompt]:
    """Return the first `n` prompts of each category."""
    n_seen: Counter[str] = Counter()
    chosen: list[BenchPrompt] = []
    for prompt in prompts:
        n_seen[prompt.category] += 1
        if n_seen[prompt.category] <= n:
            chosen.append(prompt)
    return chosen


def _parse_json_line(
    line: str,
    number: int,
    where: str,
) -> BenchPrompt:
    """Parse a line of a JSON Lines file.

    Args:
        line: The line.
        number: The prompt's number.
        where: The file and the line number, for error messages.

    Raises:
        PromptError: If the line is not a JSON object with a prompt.
    """
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
    category = record.get("category", _DEFAULT_CATEGORY)
    if not isinstance(category, str):
        raise PromptError(f"{where}: the category is not a text: {category!r}", _HINT)
    # Tabs and line breaks are replaced, since `specgen bench` prints tab-separated lines.
    return BenchPrompt(number, " ".join(category.split()) or _DEFAULT_CATEGORY, text)
