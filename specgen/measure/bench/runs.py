"""Contenders answer prompts in turns: plain decoding, drafting in some way, another program."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from specgen.errors import PromptError, SpecgenError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent
from specgen.measure.prompts import BenchPrompt

if TYPE_CHECKING:
    from specgen.session.session import Session

#: The date for chat templates that write one, fixed so that prompts do not change between runs.
NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
#: A prompt that fits every context, and how much of an answer warms up.
_WARM_UP = "Count from one to twenty."
_N_WARM_UP = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one answer; None means that a contender does not report it. Times are seconds.

    `tokens_per_s` counts the tokens after the first one. `token_ids` exclude the token that ended the answer.
    Counts by depth begin with the first drafted token. `target_s`, `draft_s` and `own_s` divide the time
    after the prompt: in the target, in the drafter, and in the program itself.
    """

    text: str
    n_tokens: int
    finish_reason: str | None
    tokens_per_s: float | None
    time_to_first_token_s: float | None
    token_ids: tuple[int, ...] | None = None
    n_rounds: int | None = None
    n_drafted: int | None = None
    n_accepted: int | None = None
    mean_accepted_length: float | None = None
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    prompt_s: float | None = None
    target_s: float | None = None
    draft_s: float | None = None
    own_s: float | None = None
    #: Notices for the user, for example that drafting failed.
    notices: tuple[str, ...] = ()

    def says_the_same(self, other: Outcome) -> bool:
        """Whether two texts are equal, token by token if both report their tokens.

        A program that does not report them may write some tokens after the limit: if the other answer ended
        there, only its text has to agree."""
        if self.token_ids is not None and other.token_ids is not None:
            return self.token_ids == other.token_ids
        limited, longer = (self, other) if self.finish_reason == "length" else (other, self)
        if limited.finish_reason == "length":
            # The limit may have cut a character in two; the longer text has all of it.
            return longer.text.startswith(limited.text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return self.text == other.text


class Contender(Protocol):
    """Answers prompts, always in the same way. Both methods may raise a `SpecgenError`: `PromptError` if the
    prompt does not fit, any other if the contender cannot go on."""

    @property
    def name(self) -> str:
        """The name in tables; it is unique in a lineup."""
        ...

    def answer(self, prompt: str) -> Outcome:
        """Answer a prompt, given as a user types it."""
        ...

    def warm_up(self, prompt: str) -> None:
        """Do the work that makes the first answer slower than others."""
        ...


@dataclass(frozen=True, slots=True)
class SessionContender:
    """Loaded models with their options as a contender. It does not close them."""

    name: str
    session: Session
    chat: bool | None = None
    interrupted: Callable[[], bool] = lambda: False

    def answer(self, prompt: str) -> Outcome:
        events = list(self._events(prompt))
        finished = events[-1]
        assert isinstance(finished, FinishedEvent), "the last event of a generation"
        same = {each.name for each in fields(Outcome)} & {each.name for each in fields(finished)}
        values: dict[str, Any] = {name: getattr(finished, name) for name in same}
        values["target_s"] = max(0.0, finished.target_s - finished.prompt_s)
        notices = tuple(event.message for event in events if isinstance(event, NoticeEvent))
        return Outcome(**values, own_s=finished.loop_s, notices=notices)

    def warm_up(self, prompt: str) -> None:
        # Closing the generator frees the contexts.
        with contextlib.closing(self._events(prompt)) as events:
            for event in events:
                if isinstance(event, CommittedEvent) and event.n_tokens >= _N_WARM_UP:
                    break

    def _events(self, prompt: str) -> Generator[Event, None, None]:
        from specgen.session.engine import generate

        begun = self.session.prompts.of_text(prompt, chat=self.chat, now=NOW)
        return generate(self.session, begun, interrupted=self.interrupted, estimate_gain=False)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Plain decoding and the contenders that are compared with it, for a target at a temperature."""

    target: str
    temperature: float
    plain: Contender
    others: tuple[Contender, ...]

    def turn(self, number: int) -> tuple[Contender, ...]:
        """Return the order for one prompt: plain decoding first, the others rotated, so that none always
        follows the same one."""
        start = number % len(self.others) if self.others else 0
        return (self.plain, *self.others[start:], *self.others[:start])


@dataclass(frozen=True, slots=True)
class Result:
    """An answer. `prompt` is its number in the file; `round` counts passes through all prompts, from 1."""

    target: str
    temperature: float
    contender: str
    is_plain: bool
    prompt: int
    category: str
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that could not go on, and the prompt at which it failed; None means in the warm-up."""

    target: str
    temperature: float
    contender: str
    prompt: int | None
    message: str


@dataclass(frozen=True, slots=True)
class SkippedPrompt:
    """A prompt that plain decoding could not answer, and the reason."""

    target: str
    prompt: int
    reason: str


@dataclass(slots=True)
class Runs:
    """The results so far, whose code computed each target, and the error that ended the measurement. A contender
    that failed has no further results."""

    results: list[Result] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[SkippedPrompt] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    error: SpecgenError | None = None

    def is_out(self, lineup: Lineup, contender: Contender, prompt: BenchPrompt) -> bool:
        """Whether a contender failed before, or nobody can answer the prompt."""
        name = lineup.target, lineup.temperature, contender.name
        return any((f.target, f.temperature, f.contender) == name for f in self.failures) or any(
            (s.target, s.prompt) == (lineup.target, prompt.number) for s in self.skipped
        )

    @contextlib.contextmanager
    def failing(
        self, lineup: Lineup, contender: Contender, prompt: int | None = None
    ) -> Iterator[None]:
        """Note what the block raises. Raise it if plain decoding failed: there is nothing to compare with."""
        try:
            yield
        except SpecgenError as error:
            if contender is not lineup.plain:
                self.failures.append(
                    Failure(
                        lineup.target, lineup.temperature, contender.name, prompt, error.message
                    )
                )
            elif prompt is not None and isinstance(error, PromptError):
                self.skipped.append(SkippedPrompt(lineup.target, prompt, error.message))
            else:
                raise


def run_lineups(
    lineups: Sequence[Lineup],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    *,
    n_rounds: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Let all contenders answer all prompts, `n_rounds` times, after a warm-up; add the results to `runs`.

    For each prompt the contenders answer one after the other, so that a machine that is slow for a while
    slows all of them. An interrupted answer is not a result. Raise the `SpecgenError` of a plain contender,
    and `PromptError` if no prompt could be answered.
    """
    turns = [
        (round_number, prompt) for round_number in range(1, n_rounds + 1) for prompt in prompts
    ]
    n_all = len(turns) * sum(1 + len(lineup.others) for lineup in lineups)
    n_before = len(runs.results)
    progress(0, n_all)
    for lineup in lineups:
        for contender in lineup.turn(0):
            if interrupted():
                return
            with runs.failing(lineup, contender):
                contender.warm_up(_WARM_UP)
    every = (
        (round_number, prompt, lineup, contender)
        for turn, (round_number, prompt) in enumerate(turns)
        for lineup in lineups
        for contender in lineup.turn(turn)
    )
    for n_done, (round_number, prompt, lineup, contender) in enumerate(every):
        progress(n_done, n_all)
        if interrupted():
            return
        outcome = None
        if not runs.is_out(lineup, contender, prompt):
            with runs.failing(lineup, contender, prompt.number):
                outcome = contender.answer(prompt.text)
        if outcome is None:
            continue
        if outcome.finish_reason == "interrupted" or interrupted():
            return
        where = lineup.target, lineup.temperature, contender.name, contender is lineup.plain
        runs.results.append(Result(*where, prompt.number, prompt.category, round_number, outcome))
    progress(n_all, n_all)
    if len(runs.results) == n_before and runs.skipped:
        last = runs.skipped[-1]
        raise PromptError(f"no prompt can be answered; prompt {last.prompt}: {last.reason}")
