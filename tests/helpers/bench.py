"""Contenders that say what they are told, and reports made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.errors import SpecgenError
from specgen.measure.bench.figures import BenchReport
from specgen.measure.bench.runs import Outcome, Result, Runs
from specgen.measure.prompts import BenchPrompt

#: An answer that was drafted for.
OUTCOME = Outcome(
    text="text",
    n_tokens=11,
    finish_reason="length",
    tokens_per_s=10.0,
    time_to_first_token_s=1.0,
    token_ids=tuple(range(11)),
    n_rounds=5,
    n_drafted=10,
    n_accepted=5,
    mean_accepted_length=2.0,
    drafted_by_depth=(5, 5),
    accepted_by_depth=(4, 1),
    prompt_s=1.0,
    target_s=0.6,
    draft_s=0.3,
    own_s=0.1,
)


def outcome(tokens_per_s: float | None = 10.0, **changes: Any) -> Outcome:
    return replace(OUTCOME, tokens_per_s=tokens_per_s, **changes)


def result(contender: str, prompt: int, tokens_per_s: float | None, **changes: Any) -> Result:
    """An answer; that of `plain` is plain decoding's."""
    values: dict[str, Any] = {
        "target": "target.gguf",
        "temperature": 0.0,
        "category": "all",
        "round": 1,
        "outcome": outcome(tokens_per_s),
        **changes,
    }
    is_plain = contender == "plain"
    return Result(contender=contender, is_plain=is_plain, prompt=prompt, **values)


@dataclass
class FakeContender:
    """Notes what it is asked in `log`; raises what `fails` has for a prompt, "" for warming up."""

    name: str
    log: list[tuple[str, str]]
    fails: dict[str, SpecgenError] = field(default_factory=dict)
    answers: Callable[[str], Outcome] = lambda _prompt: OUTCOME

    def answer(self, prompt: str) -> Outcome:
        self.log.append((self.name, prompt))
        if prompt in self.fails:
            raise self.fails[prompt]
        return self.answers(prompt)

    def warm_up(self, prompt: str) -> None:
        self.log.append((self.name, "warm-up"))
        if "" in self.fails:
            raise self.fails[""]


def report_of(results: Sequence[Result], **changes: Any) -> BenchReport:
    names = {(each.target, each.temperature, each.contender): None for each in results}
    values: dict[str, Any] = {
        "about": {"command": "specgen bench", "machine": {"cpu": "fake"}},
        "contenders": [
            {"target": target, "temperature": temperature, "name": name, "drafters": [name]}
            for target, temperature, name in names
        ],
        "prompts": [BenchPrompt(n, "all", f"prompt {n}") for n in (1, 2)],
        "runs": Runs(list(results)),
        **changes,
    }
    return BenchReport(**values)
