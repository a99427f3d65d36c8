"""Prompts to measure with: the user's own from a file, or ours.

Those that `specgen bench` measures with are none of those that `tune`, `draft find` and `verify` try drafts with.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specgen.errors import PromptError
from specgen.system.files import json_reason

T = TypeVar("T")

#: The date for chat templates that write one: the present one must not change the answers.
NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
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


def read_prompts(path: Path) -> list[str]:
    """Return the texts of a file's prompts. Raise `PromptError`, which names the line."""
    return [prompt.text for prompt in read_bench_prompts(path)]


def evenly_chosen(prompts: Iterable[T], n: int) -> list[T]:
    """Return `n` prompts, evenly spaced in the whole list; all if there are not more."""
    whole = list(prompts)
    if n >= len(whole):
        return whole
    return [whole[index * len(whole) // n] for index in range(n)]


def own_prompts() -> list[BenchPrompt]:
    """Return specgen's prompts; the categories code, edit, prose and chat alternate."""
    prompts: list[BenchPrompt] = []
    for texts in zip(*_OWN_PROMPTS.values(), strict=True):
        for category, text in zip(_OWN_PROMPTS, texts, strict=True):
            prompts.append(BenchPrompt(len(prompts) + 1, category, text))
    return prompts


def given_prompts(texts: Sequence[str]) -> list[BenchPrompt]:
    """Return texts as prompts. Raise `PromptError` for an empty one."""
    if not all(text.strip() for text in texts):
        raise PromptError("a prompt is empty", hint="give some text")
    return [BenchPrompt(number, ALL, text) for number, text in enumerate(texts, start=1)]


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
        raise PromptError(f"{where}: not JSON: {json_reason(error)}", _HINT) from None
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


# --- our own --------------------------------------------------------------------------------------

#: Prompts of many kinds, so that some are easy and some are hard to draft for.
TRIAL_PROMPTS = (
    "Write a Python function that counts the words of a text, with a docstring and a test.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "List the planets with their diameters as JSON, one object a planet.",
    "Translate into French: The train to the coast leaves at seven, but nobody told the cook.",
    "Rename x to total and give the whole code again: x = 0\nfor v in values:\n    x = x + v",
    "A farmer has 17 sheep, sells 9 and buys 4 times as many as are left. How many are there?",
    "Continue the story: Nobody had wound the clock on the town hall since the flood.",
    "Sum up: Bees find their way by the sun. At the hive they dance it for the others.",
    "Which weighs more, a kilogram of feathers or a pound of lead? Say why.",
    "Write a limerick about a compiler.",
    "Give me an SQL query for the three customers with the largest orders of last year.",
    "请用三句话介绍一下长城。",
    "Describe the taste of a lemon without the words sour, acid or yellow.",
    "def fibonacci(n):\n    ",
    "Write a polite e-mail that declines an invitation to a wedding in June.",
    "Compare trains and buses in a table with three rows.",
)

_AVERAGES = """\
def average(values):
    x = 0
    for value in values:
        x = x + value
    if len(values) == 0:
        return 0
    return x / len(values)


def variance(values):
    mean = average(values)
    x = 0
    for value in values:
        x = x + (value - mean) ** 2
    if len(values) == 0:
        return 0
    return x / len(values)
"""

_STACK = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""

_CART = """\
function total(cart) {
  var sum = 0;
  for (var i = 0; i < cart.items.length; i++) {
    var item = cart.items[i];
    if (item.quantity > 0) {
      sum = sum + item.price * item.quantity;
    }
  }
  if (cart.discount) {
    sum = sum - sum * cart.discount;
  }
  return sum;
}
"""

_SERVER = """\
[server]
host = "127.0.0.1"
port = 8080
workers = 4

[server.log]
level = "info"
file = "/var/log/server.log"

[database]
url = "postgres://localhost/app"
pool = 10
timeout = 30
"""

_RENAME = "Rename the variable `x` to `total` and add type hints. Answer with the whole code."
_DOCUMENT = "Add a docstring to each method and change nothing else. Answer with the whole code."
_MODERNISE = "Use const and let in place of var and a for...of loop. Answer with the whole code."
_CONVERT = "Turn this configuration into JSON with the same values, and change nothing else."

#: specgen's own prompts by category, used if the user gives none. Drafts differ most between categories: new code,
#: where a small model is often right; editing, where the prompt contains most of the answer; prose, which is
#: hard to predict; and questions as people ask them.
_OWN_PROMPTS: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that merges two sorted lists, with a docstring and a test.",
        "Implement a least-recently-used cache class in Python with get, put and a maximum size.",
        "Write SQL that creates tables for books and their authors, and finds the busiest author.",
        "Write a C function that reverses the words of a string in place, without allocating.",
    ),
    "edit": (
        f"{_RENAME}\n\n```python\n{_AVERAGES}```",
        f"{_DOCUMENT}\n\n```python\n{_STACK}```",
        f"{_MODERNISE}\n\n```javascript\n{_CART}```",
        f"{_CONVERT}\n\n```toml\n{_SERVER}```",
    ),
    "prose": (
        "Explain in three paragraphs why the sea is salty and lakes mostly are not.",
        "Continue the story: The lighthouse had been dark for eleven years when the letter came.",
        "Write a polite letter to a neighbour who plays the drums at night.",
        "Describe a walk through a harbour town on a foggy morning.",
    ),
    "chat": (
        "My sourdough never rises. What should I check first?",
        "Which is heavier, a litre of ice or a litre of water? Say why.",
        "Can you compare a stack and a queue in a table with three rows?",
        "I have two days in Lisbon, and it will rain. What do you suggest?",
    ),
}
