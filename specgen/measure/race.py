"""`specgen race`: answer a prompt twice, without and with drafts, and compare the two answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from specgen.events import (
    CommittedEvent,
    Event,
    FinishedEvent,
    NoticeEvent,
    Piece,
    PromptEvent,
    TokenKind,
)
from specgen.measure.benchmark import answer_events, warm_up, without_drafts
from specgen.method.drafter import never
from specgen.options import SamplerOptions
from specgen.system.files import as_json
from specgen.system.quantities import counted, seconds_text, times_text
from specgen.text.overlap import common_prefix_length
from specgen.text.sampling.chain import Sampler

if TYPE_CHECKING:
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: How the two answers of a race were generated.
CONDITIONS = (
    "first without drafts, then with them, each with its own prefill; both were warmed up before"
)


@dataclass(frozen=True, slots=True)
class RacedAnswer:
    """One of the two answers of a race."""

    #: Its events. The last is a `FinishedEvent`. Their times are relative to that of the
    #: first, the `PromptEvent`, which is the start of the prefill.
    events: tuple[Event, ...]

    @classmethod
    def of(cls, events: Iterable[Event]) -> RacedAnswer:
        """Return the answer with these events, whose times are relative to any moment."""
        all_events = tuple(events)
        started_s = all_events[0].time_s
        return cls(tuple(replace(event, time_s=event.time_s - started_s) for event in all_events))

    @property
    def prompt(self) -> PromptEvent:
        """The first event."""
        event = self.events[0]
        assert isinstance(event, PromptEvent)
        return event

    @property
    def finished(self) -> FinishedEvent:
        """The last event."""
        event = self.events[-1]
        assert isinstance(event, FinishedEvent)
        return event

    @property
    def rounds(self) -> tuple[CommittedEvent, ...]:
        """The events that added tokens."""
        return tuple(event for event in self.events if isinstance(event, CommittedEvent))

    @property
    def pieces(self) -> list[Piece]:
        """The tokens."""
        return [piece for event in self.rounds for piece in event.pieces]

    @property
    def seconds(self) -> float:
        """The time from the start of the prefill to the last token."""
        rounds = self.rounds
        return rounds[-1].time_s if rounds else 0.0

    @property
    def length(self) -> str:
        """Its number of tokens and its time, in words."""
        n_tokens = counted(self.finished.n_tokens, "token")
        return f"{n_tokens} in {seconds_text(self.seconds)}"

    @property
    def title(self) -> str:
        """How the answer was generated: "without drafts", or "drafts from" a name."""
        draft = self.prompt.draft
        return "without drafts" if draft == "none" else f"drafts from {draft}"

    @property
    def notices(self) -> Iterator[str]:
        """What the user should know, for example that drafting failed."""
        return (event.message for event in self.events if isinstance(event, NoticeEvent))


@dataclass(frozen=True, slots=True)
class RaceFigures:
    """The figures of one answer; those that are not known are None."""

    #: What drafted: a model's file name, ``ngram`` or the like; ``none`` for plain decoding.
    draft: str
    #: The number of the answer's tokens.
    n_tokens: int
    #: The time from the start of the prefill to the last token.
    seconds: float
    #: The seconds from the start of the prefill to the first token.
    time_to_first_token_s: float | None
    #: Tokens per second after the first token.
    tokens_per_s: float | None
    #: Accepted tokens per drafted position; the branches of a tree share their positions.
    acceptance_rate: float | None
    #: How many times as fast as plain decoding it was; None if the race was interrupted.
    speedup: float | None
    #: Why the answer ended, as in `FinishedEvent`.
    finish_reason: str
    #: The answer.
    text: str


@dataclass(frozen=True, slots=True)
class Race:
    """The answers to a prompt, as far as they were generated."""

    #: The answer without drafts, and then the one with drafts. If the race was interrupted, the
    #: last one is incomplete, and there may be fewer than two.
    answers: tuple[RacedAnswer, ...]

    @property
    def is_interrupted(self) -> bool:
        """Whether there are not two complete answers."""
        reasons = [answer.finished.finish_reason for answer in self.answers]
        return len(reasons) < 2 or "interrupted" in reasons

    @property
    def speedup(self) -> float | None:
        """How many times as fast drafting was; None if that is not known.

        For the same text, it is the ratio of the times that the whole answers took, with their
        prefill. Other texts may have another length: then it is the ratio of the tokens per second
        after the first token.
        """
        if self.is_interrupted:
            return None
        plain, drafted = self.answers
        if self.is_same_text:
            return plain.seconds / drafted.seconds if drafted.seconds else None
        drafted_speed = drafted.finished.tokens_per_s
        plain_speed = plain.finished.tokens_per_s
        return drafted_speed / plain_speed if drafted_speed and plain_speed else None

    @property
    def is_same_text(self) -> bool:
        """Whether there are two answers with the same text."""
        texts = [answer.finished.text for answer in self.answers]
        return len(texts) == 2 and texts[0] == texts[1]

    @property
    def is_greedy(self) -> bool:
        """Whether the answers have to be the same, because no token was sampled."""
        return not any(_is_random(answer.prompt.sampler) for answer in self.answers)

    @property
    def kinds(self) -> list[TokenKind]:
        """The kinds of tokens in the answers, in the order of their definition."""
        found = {piece.kind for answer in self.answers for piece in answer.pieces}
        return [kind for kind in get_args(TokenKind) if kind in found]

    @property
    def n_same_tokens(self) -> int:
        """The number of tokens that the answers have in common at their start."""
        tokens = [answer.finished.token_ids for answer in self.answers]
        return common_prefix_length(tokens[0], tokens[1]) if len(tokens) == 2 else 0

    @property
    def verdict(self) -> str:
        """The result in words: "2.3 times as fast, identical text"."""
        if self.is_interrupted:
            return "interrupted"
        speedup = self.speedup
        speed = "too short to compare the speed"
        if speedup is not None:
            speed = f"{times_text(speedup, speedup)} times as fast"
        if self.is_same_text:
            return f"{speed}, identical text"
        if speedup is not None:
            speed += " after the first token"
        if not self.is_greedy:
            return f"{speed}, same distribution"
        return f"{speed}, but the texts differ from token {self.n_same_tokens + 1} on"

    @property
    def difference(self) -> str:
        """The first tokens that differ, and what to do; empty if the texts need not be the same."""
        if self.is_interrupted or self.is_same_text or not self.is_greedy:
            return ""
        position = self.n_same_tokens
        tokens = []
        for answer in self.answers:
            pieces = answer.pieces
            is_end = position >= answer.finished.n_tokens
            tokens.append("the end" if is_end else repr(pieces[position].text))
        return (
            f"token {position + 1} is {tokens[0]} without drafts, and {tokens[1]} with them: "
            "`specgen verify` finds out whether rounding explains that"
        )

    @property
    def figures(self) -> tuple[RaceFigures, ...]:
        """The figures of each answer."""
        plain_speedup = None if self.is_interrupted else 1.0
        # An interrupted race may have fewer than two answers.
        pairs = zip(self.answers, (plain_speedup, self.speedup), strict=False)
        return tuple(_figures(answer, speedup) for answer, speedup in pairs)

    def to_json_object(self) -> dict[str, Any]:
        """Return the result as `--json` prints it."""
        return {
            "verdict": self.verdict,
            "is_same_text": self.is_same_text,
            "n_same_tokens": self.n_same_tokens,
            "is_interrupted": self.is_interrupted,
            "conditions": CONDITIONS,
            "answers": as_json(self.figures),
        }


def _is_random(sampler: Mapping[str, Any]) -> bool:
    """Return whether tokens are sampled with these options, by name."""
    names = ("temperature", "samplers", "dynatemp_range", "xtc_probability", "xtc_threshold")
    options = SamplerOptions(**{name: sampler[name] for name in names if name in sampler})
    return Sampler(options).is_random


def _figures(answer: RacedAnswer, speedup: float | None) -> RaceFigures:
    finished = answer.finished
    return RaceFigures(
        draft=answer.prompt.draft,
        n_tokens=finished.n_tokens,
        seconds=answer.seconds,
        time_to_first_token_s=finished.time_to_first_token_s,
        tokens_per_s=finished.tokens_per_s,
        acceptance_rate=finished.acceptance_rate,
        speedup=speedup,
        finish_reason=finished.finish_reason,
        text=finished.text,
    )


def run_race(
    session: Session,
    prompt: Prompt,
    *,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = never,
) -> Race:
    """Answer a prompt without drafts, and then with those of a session.

    Each answer has its own contexts, and plain decoding its own session, so that neither finds
    anything that the other has computed or learnt. Both are warmed up first, on another prompt.

    Args:
        session: The session with drafts. It must not keep prefixes of prompts, nor answers.
        prompt: The prompt.
        progress: Receives the name of the current step, how much of it is done, and the total.
        interrupted: Whether to stop. An unfinished answer then ends with the text that it has.

    Raises:
        SpecgenError: If one of the answers fails.
        KeyboardInterrupt: If it is interrupted while the costs of drafting are measured.
    """
    from specgen.session.open import open_measurements
    from specgen.session.session import Session

    options = without_drafts(session.options)
    answers: list[RacedAnswer] = []
    # Both sessions share the target's weights, which are in memory already.
    with Session(
        options,
        session.clock,
        open_measurements(),
        budget=session.budget,
    ) as plain_session:
        contenders = {"without drafts": plain_session, "with drafts": session}
        for n_done, contender in enumerate(contenders.values()):
            progress("warming up", n_done, len(contenders))
            warm_up(contender, interrupted=interrupted)
        for name, contender in contenders.items():
            if interrupted():
                break
            events = answer_events(contender, prompt, interrupted)
            answers.append(RacedAnswer.of(_watched(events, contender, name, progress)))
    return Race(tuple(answers))


def _watched(
    events: Iterable[Event],
    session: Session,
    name: str,
    progress: Progress,
) -> Iterator[Event]:
    """Yield the events of an answer, and report the number of its tokens as progress."""
    n_max = 0
    for event in events:
        if isinstance(event, PromptEvent):
            n_max = event.n_ctx - event.n_prompt_tokens
            if session.options.generation.max_tokens >= 0:
                n_max = min(n_max, session.options.generation.max_tokens)
        elif isinstance(event, CommittedEvent):
            progress(name, event.n_tokens, n_max)
        yield event
