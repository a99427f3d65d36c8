"""The prompts of the checks: the user's from a file, or specgen's own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from specgen.errors import PromptError
from specgen.system.json_values import json_reason

T = TypeVar("T")

#: Prompts of many kinds, so that some are easy and some are hard to draft for.
OWN_PROMPTS = (
    "Write a Python function that merges two sorted lists, with a docstring and a test.",
    "Explain to a child why the sky is blue and sunsets are red.",
    "List the planets with their diameters as JSON, one object a planet.",
    "Translate into French: The train to the coast leaves at seven, but nobody told the cook.",
    "Rename x to total and give the whole code again: x = 0\nfor v in values:\n    x = x + v",
    "A farmer has 17 sheep, sells 9 and buys 4 times as many as are left. How many are there?",
    "Continue the story: The lighthouse had been dark for eleven years when the letter came.",
    "Sum up: Bees find their way by the sun. At the hive they dance it for the others.",
    "Which is heavier, a litre of ice or a litre of water? Say why.",
    "Write a limerick about a compiler.",
    "Give me an SQL query for the three customers with the largest orders of last year.",
    "请用三句话介绍一下长城。",
    "Describe the taste of a lemon without the words sour, acid or yellow.",
    "def fibonacci(n):\n    ",
    "Write a polite e-mail that declines an invitation to a wedding in June.",
    "Compare a stack and a queue in a table with three rows.",
)


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a JSON Lines file: `prompt` of each line, or the first of its `turns`.

    Raise `PromptError`, which names the line, if the file is not valid.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PromptError(f"{path}: cannot be read: {reason}") from error
    prompts = [
        _prompt(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path}: no prompts in it")
    return prompts


def _prompt(line: str, where: str) -> str:
    hint = 'a line is like {"prompt": "..."} or {"turns": ["..."]}'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON: {json_reason(error)}", hint) from None
    if isinstance(record, dict):
        turns = record.get("turns")
        prompt = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
        if isinstance(prompt, str) and prompt:
            return prompt
    raise PromptError(f"{where}: no prompt in it", hint)


def evenly_chosen(prompts: Iterable[T], n: int) -> list[T]:
    """Return `n` prompts, evenly spaced in the whole list; all if there are not more."""
    whole = list(prompts)
    if n >= len(whole):
        return whole
    return [whole[index * len(whole) // n] for index in range(n)]
