"""What happens during a generation, as plain values: `docs/events.md` and its schema are generated
from these.

All times are seconds on a monotonic clock. Text fields hold whole characters only: bytes of a
character that is not complete yet belong to the token that completes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

FinishReason: TypeAlias = Literal["stop", "length", "context", "interrupted"]

#: Where a committed token comes from.
#:
#: - ``accepted``: drafted, and kept by the target;
#: - ``corrected``: chosen by the target where it rejected the draft;
#: - ``bonus``: chosen by the target after the whole draft was accepted;
#: - ``plain``: chosen by the target in a round without a draft;
#: - ``forced``: the only token that the grammar allows; it needed no decode.
TokenKind: TypeAlias = Literal["accepted", "corrected", "bonus", "plain", "forced"]


# A key of `REASONS`.
ReasonName: TypeAlias = str

REASONS: Final[Mapping[ReasonName, str]] = MappingProxyType(
    {
        "found": "earlier text continues from here, and checking that should save time",
        "model": "the draft model is expected to save time",
        "trial": "the draft model is tried again, to see whether it pays by now",
        "fixed": "the draft length does not depend on costs",
        "threshold": "a whole draft must be likely enough",
        "off": "nothing drafts for this answer",
        "costs unknown": "the cost of the target's decodes is not known yet",
        "plain decode": "a round without a draft measures what a token costs without one",
        "no room": "the answer, the context or the batch has no room for a draft",
        "nothing found": "no earlier text continues from here",
        "prefill": "the draft model would have to read the text first, and that may not pay off",
        "row cost": "even a draft that is always right would save nothing at these costs",
        "acceptance": "too few drafted tokens are expected to be accepted",
        "put aside": "the drafter lost time in this answer and waits",
        "unsure": "the drafter was too unsure of its first token",
        "not ready": "the drafter had no room, had not read enough of the text, or found nothing",
        "grammar": "the grammar allows none of the drafted tokens",
        "failed": "the drafter failed",
    }
)


@dataclass(frozen=True, slots=True)
class _Event:
    event: ClassVar[str]

    #: Which of several parallel sequences this is about (0 for `run`).
    sequence: int
    #: Seconds since the start of the generation.
    time_s: float

    def __init_subclass__(cls, event: str = "") -> None:
        if event:  # the class that has slots is made of another one
            cls.event = event


@dataclass(frozen=True, slots=True)
class PromptEvent(_Event, event="prompt"):
    """Once, before anything is decoded: the prompt, the models and the settings."""

    #: The prompt as the model sees it, the chat template applied.
    text: str
    #: Number of prompt tokens.
    n_prompt_tokens: int
    #: The target model's file name.
    target: str
    #: What drafts: a model's file name, ``ngram``, or ``none``.
    draft: str
    #: Whether the draft has another vocabulary, so that its text is translated.
    translated: bool
    #: Whose code computes: ``specgen`` and an instruction set, ``llama.cpp``, ``workers``, or what
    #: computes where (``llama.cpp on the GPU (12 of 29 layers), specgen avx512-vnni on the CPU``).
    kernels: str
    #: Size of the target's context, in tokens.
    n_ctx: int
    #: The settings of the samplers by the names of their options, and the `seed` in use.
    sampler: dict[str, Any]
    #: How drafts are verified: ``auto``, ``match``, ``residual``, ``block`` or ``spectr``.
    verifier: str
    #: The grammar that the answer follows, in GBNF, or the JSON schema; null without one.
    grammar: str | None


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One token of a draft tree."""

    token_id: int
    #: The token's own bytes as text; an incomplete character shows as U+FFFD.
    text: str
    #: Index of the parent node within the draft; -1 for a child of the last committed token.
    parent: int
    #: Which drafter proposed it: ``model``, ``ngram``, ...
    origin: str
    #: Probability that the drafter gave this token, where it has one.
    probability: float | None
    #: How many of the independent drafts of a round (`--verifier spectr`) go through it; else 0.
    n_walks: int = 0


@dataclass(frozen=True, slots=True)
class DraftedEvent(_Event, event="drafted"):
    """A drafter proposed a tree (a chain is a tree with one branch)."""

    #: Rounds count from 1; a round is one decode of the target.
    round: int
    nodes: tuple[DraftNode, ...]
    #: What a second draft, which drafts for the first, guessed of it, in words; empty without one.
    guesses: str = ""


@dataclass(frozen=True, slots=True)
class RejectedBranch:
    """A branch of the draft that was rejected, from its first rejected node down to a leaf."""

    #: Indices into the draft's nodes.
    nodes: tuple[int, ...]
    #: The branch's text, as it would have continued the text shown so far.
    text: str


@dataclass(frozen=True, slots=True)
class VerifiedEvent(_Event, event="verified"):
    """The target judged the draft of this round (there is none in a round without one)."""

    round: int
    #: Indices of the accepted nodes, from the root down: one path.
    accepted: tuple[int, ...]
    #: The rejected parts of the draft, branch by branch; empty when everything was accepted.
    rejected: tuple[RejectedBranch, ...]
    #: The token that the target chose after the accepted path.
    next_token_id: int
    next_kind: TokenKind


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One of the most likely tokens at a position, with `--logprobs`."""

    token_id: int
    #: The token's own bytes as text, those of an incomplete character as ``\\xe2``; the name of a
    #: control token.
    text: str
    #: Natural logarithm of its probability at temperature 1, before samplers and grammar.
    logprob: float
    #: The bytes that it adds to the text; none for a control token.
    bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One committed token as shown."""

    token_id: int
    #: The characters that this token completes; may be empty.
    text: str
    kind: TokenKind
    #: The drafter of an accepted token; ``grammar`` for a forced one; ``target`` otherwise.
    origin: str
    #: With `--logprobs`, the natural logarithm of its probability (as below); null for forced
    #: tokens.
    logprob: float | None = None
    #: With `--logprobs N`, the N most likely tokens at this position, the likeliest first; then
    #: this token, if it is none of them.
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadingEvent(_Event, event="reading"):
    """A piece of a long prompt was decoded, and others follow."""

    #: Tokens of the prompt that the target has read, cached ones among them.
    n_read: int
    n_prompt_tokens: int
    #: Estimated seconds until it is read.
    left_s: float
    #: Tokens from an answer before, those of them that came from the disk, and the seconds spent so
    #: far.
    n_cached_tokens: int = 0
    n_loaded_tokens: int = 0
    spent_s: float = 0.0
    #: The tokens of this piece with their log-probabilities, if a request asked for them.
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedEvent(_Event, event="committed"):
    """Tokens became part of the answer. The texts of all these events, joined, are the answer.

    An end-of-text token is the last piece and has no text. An interruption may release text that
    was held back.
    """

    round: int
    #: The tokens.
    pieces: tuple[Piece, ...]
    #: The pieces' texts joined. What may be the beginning of a stop string is held back.
    text: str
    #: Tokens of the answer so far.
    n_tokens: int
    #: Why the round drafted what it drafted: [a name](#reasons), and in words. Null outside rounds.
    reason: str | None = None
    reason_text: str | None = None
    #: Seconds of drafting, and of the target's batch, which parallel sequences share. Null outside
    #: rounds.
    draft_s: float | None = None
    target_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """The number of rounds that drafted nothing for one reason."""

    #: A name of the list of reasons.
    reason: str
    #: The reason in words, in the last of these rounds.
    text: str
    n_rounds: int


def undrafted_text(reasons: Sequence[ReasonCount], n_rounds: int) -> str:
    n_undrafted = sum(each.n_rounds for each in reasons)
    rounds = "1 round" if n_rounds == 1 else f"{n_rounds} rounds"
    why = "; ".join(f"{each.text} ({each.n_rounds})" for each in reasons)
    return f"{n_undrafted} of {rounds} drafted nothing: {why}"


@dataclass(frozen=True, slots=True)
class NoticeEvent(_Event, event="notice"):
    """Something the user should know that does not end the answer."""

    #: In a line.
    message: str
    #: More detail for `--verbose`; may have several lines.
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FinishedEvent(_Event, event="finished"):
    """Once, at the end."""

    #: The whole answer.
    text: str
    #: Its tokens, without the end-of-text token.
    token_ids: tuple[int, ...]
    #: ``stop``: end of text or a stop string; ``length``: `--max-tokens` reached;
    #: ``context``: the context is full; ``interrupted``: Ctrl-C, or a worker of `--rpc` was lost.
    finish_reason: FinishReason
    #: The stop string or end-of-text token that ended the answer, else null.
    stopped_by: str | None
    n_prompt_tokens: int
    #: Tokens of the answer.
    n_tokens: int
    #: Decodes of the target after the prompt's; each committed at least one token.
    n_rounds: int
    #: Draft tokens that the target was asked to verify, and how many it kept.
    n_drafted: int
    n_accepted: int
    #: The share of drafted positions at which a token was accepted (of tokens, in chains); null
    #: without drafts.
    acceptance_rate: float | None
    #: Tokens committed per round, without those that the grammar forced; null before the first
    #: round.
    mean_accepted_length: float | None
    #: Accepted and drafted counts by position in the draft (index 0 is the first); a tree's
    #: branches count as one.
    accepted_by_depth: tuple[int, ...]
    drafted_by_depth: tuple[int, ...]
    #: Tokens per second after the first one; null without more tokens.
    tokens_per_s: float | None
    #: From the start of the prompt's decode to the first token; null without a token.
    time_to_first_token_s: float | None
    #: Decoding the prompt with the target (part of target_s).
    prompt_s: float
    #: Time in the draft model's decodes, in the target's, and in specgen itself, without rendering.
    draft_s: float
    target_s: float
    loop_s: float
    #: Sum of the three.
    wall_s: float
    #: Estimated tokens per second of plain decoding, the gain over it after the first token and
    #: with reading the prompt, and how it was estimated, or why it is not known. Null below 30
    #: tokens.
    plain_tokens_per_s: float | None = None
    estimated_speedup: float | None = None
    estimated_whole_speedup: float | None = None
    estimate: str | None = None
    #: Tokens of the answer that the grammar forced.
    n_forced: int = 0
    #: Accepted and drafted counts by the rank among the siblings in a draft tree (index 0: the
    #: first guess).
    accepted_by_rank: tuple[int, ...] = ()
    drafted_by_rank: tuple[int, ...] = ()
    #: How many of the prompt's tokens were in the target's cache already.
    n_cached_tokens: int = 0
    #: Why rounds drafted nothing, the most frequent reason first.
    undrafted: tuple[ReasonCount, ...] = ()
    #: Rounds by the number of tokens that they added (index 0: one token), without forced ones.
    rounds_by_tokens: tuple[int, ...] = ()
    #: Whether the answer ended where its grammar allowed the end.
    ends_grammar: bool = False
    #: The share of all cores' time that other programs took; null if it was not measured.
    others_share: float | None = None
    #: Before the first answer, and no part of wall_s: loading the models, or loading and packing
    #: them, and measuring what drafting costs.
    loading_s: float = 0.0
    packing_s: float = 0.0
    measuring_s: float = 0.0
    #: `estimated_speedup` minus and plus two standard errors, by the times of this answer's
    #: decodes; 10 % at least.
    estimated_speedup_range: tuple[float, float] | None = None


Event: TypeAlias = (
    PromptEvent
    | ReadingEvent
    | DraftedEvent
    | VerifiedEvent
    | CommittedEvent
    | NoticeEvent
    | FinishedEvent
)

EVENT_TYPES: tuple[type[Event], ...] = get_args(Event)


def to_json_object(event: Event) -> dict[str, Any]:
    return {"event": event.event, **dataclasses.asdict(event)}
