"""What the benchmarks on real models share: prompts in, one summary an answer out."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from specgen.events import FinishedEvent
from specgen.session import Session

#: Some chat templates write the date; it must not change between runs.
_NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(category, prompt) pairs of a JSON Lines file: `prompt`, or the first of `turns`."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (record.get("category", ""), record["turns"][0] if "turns" in record else record["prompt"])
        for record in records
    ]


def chat_text(session: Session, prompt: str) -> str:
    """The prompt in the model's chat template; as it is for a model without one."""
    text = session.chat_prompt(prompt, None, _NOW)
    return prompt if text is None else text


def answer(session: Session, text: str, *, estimate_gain: bool = False) -> FinishedEvent:
    """Generate; `text` is what the model sees."""
    *_, last = session.generate(text, parse_special=True, estimate_gain=estimate_gain)
    assert isinstance(last, FinishedEvent)
    return last
