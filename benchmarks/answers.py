"""What the benchmarks on real models share: prompts in, one summary an answer out."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from specgen.events import FinishedEvent
from specgen.session import Prompt, Session

#: Some chat templates write the date; it must not change between runs.
_NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(category, prompt) pairs of a JSON Lines file: `prompt`, or the first of `turns`."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (record.get("category", ""), record["turns"][0] if "turns" in record else record["prompt"])
        for record in records
    ]


def begin(session: Session, prompt: str) -> Prompt:
    """The prompt in the model's chat template; as it is for a model without one."""
    return session.prompt(prompt, now=_NOW)


def answer(session: Session, prompt: str, *, estimate_gain: bool = False) -> FinishedEvent:
    """Generate an answer to a prompt."""
    *_, last = session.generate(begin(session, prompt), estimate_gain=estimate_gain)
    assert isinstance(last, FinishedEvent)
    return last
