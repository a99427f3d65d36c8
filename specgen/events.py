"""What happens during a generation, as plain values.

`make docs` writes docs/events.md and docs/events.schema.json from this module: the comments above
classes' fields are their descriptions there.

All times are in seconds, on a monotonic clock. Text fields hold whole characters only: the bytes of
an incomplete character belong to the token that completes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

FinishReason: TypeAlias = Literal["stop", "length", "context", "interrupted"]

#: Where a token of the answer comes from.
#:
#: - ``accepted``: drafted, and accepted by the target;
#: - ``corrected``: chosen by the target where it rejected the draft;
#: - ``bonus``: chosen by the target after it accepted the whole draft;
#: - ``plain``: chosen by the target in a round without a draft;
#: - ``forced``: the only token that the grammar allows, which needs no decode.
TokenKind: TypeAlias = Literal["accepted", "corrected", "bonus", "plain", "forced"]


# A key of `REASONS`.
ReasonName: TypeAlias = str

REASONS: Final[Mapping[ReasonName, str]] = MappingProxyType(
    {
        "found": "earlier text continues from here, and checking that should save time",
        "model": "the draft model is expected to save time",
        "trial": "the draft model is tried again, to see whether it pays off by now",
        "fixed": "the draft length does not depend on costs",
        "threshold": "the draft as a whole must be likely enough",
        "off": "no drafter is in use for this answer",
        "costs unknown": "the cost of the target's decodes is not known yet",
        "plain decode": "a round without a draft measures what plain decoding costs",
        "no room": "the answer, the context or the batch has no room for a draft",
        "nothing found": "no earlier text continues from here",
        "prefill": "the draft model would have to prefill the text first, which may not pay off",
        "row cost": "at these costs not even a perfect draft would save time",
        "acceptance": "too few drafted tokens are expected to be accepted",
        "put aside": "the drafter lost time in this answer and is paused",
        "unsure": "the drafter was too unsure of its first token",
        "not ready": "the drafter had no room, had not caught up with the text, or found nothing",
        "grammar": "the grammar allows none of the drafted tokens",
        "failed": "the drafter failed",
    }
)


@dataclass(frozen=True, slots=True)
class _Event:
    #: The name of the event, in JSON and in docs/events.md.
    event: ClassVar[str]

    #: Which of several parallel answers this is about (0 for `run`).
    sequence: int
    #: Seconds since the start of the generation.
    time_s: float

    def __init_subclass__(cls, event: str = "") -> None:
        if event:  # `slots=True` makes a second class, without this argument
            cls.event = event


@dataclass(frozen=True, slots=True)
class PromptEvent(_Event, event="prompt"):
    """Once, before anything is decoded: the prompt, the models and the settings."""

    #: The prompt as the model sees it, with the chat template applied.
    text: str
    #: Number of prompt tokens.
    n_prompt_tokens: int
    #: The target model's file name.
    target: str
    #: What drafts: a model's file name, ``ngram``, or ``none``.
    draft: str
    #: Whether the draft model has another vocabulary, so that its text is translated.
    translated: bool
    #: Which kernels are used: ``specgen`` and an instruction set, ``llama.cpp``, ``workers``, or
    #: several by device (``llama.cpp on the GPU (12 of 29 layers), specgen avx512-vnni on the
    #: CPU``).
    kernels: str
    #: Size of the target's context, in tokens.
    n_ctx: int
    #: The sampling options, by name, and the `seed` in use.
    sampler: dict[str, Any]
    #: How drafts are verified: ``auto``, ``match``, ``residual``, ``block`` or ``spectr``.
    verifier: str
    #: The grammar that the answer follows, in GBNF, or the JSON schema; null without one.
    grammar: str | None


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One token of a draft tree."""

    #: The token's id.
    token_id: int
    #: The token's own bytes as text; an incomplete character becomes U+FFFD.
    text: str
    #: Index of the parent node within the draft; -1 for a child of the last token of the text.
    parent: int
    #: The drafter that proposed the token: ``model``, ``ngram``, ...
    origin: str
    #: The probability that the drafter gave the token; null if it gives none.
    probability: float | None
    #: How many of the round's independent drafts (`--verifier spectr`) contain the node; else 0.
    n_walks: int = 0


@dataclass(frozen=True, slots=True)
class DraftedEvent(_Event, event="drafted"):
    """A drafter proposed a tree (a chain is a tree with one branch)."""

    #: The number of the round, from 1. A round is one decode of the target.
    round: int
    #: The tokens of the tree, parents before their children.
    nodes: tuple[DraftNode, ...]
    #: A sentence about how many of the tokens a second draft, which drafts for the draft model, had
    #: guessed; empty without one.
    guesses: str = ""


@dataclass(frozen=True, slots=True)
class RejectedBranch:
    """A rejected branch of the draft, from its first rejected node down to a leaf."""

    #: Indices of the draft's nodes.
    nodes: tuple[int, ...]
    #: The branch's text, as it would have continued the text shown so far.
    text: str


@dataclass(frozen=True, slots=True)
class VerifiedEvent(_Event, event="verified"):
    """The target verified the draft of this round; rounds without a draft have no such event."""

    #: The number of the round, from 1.
    round: int
    #: Indices of the accepted nodes: one path, from the root down.
    accepted: tuple[int, ...]
    #: The rejected parts of the draft, branch by branch; empty if everything was accepted.
    rejected: tuple[RejectedBranch, ...]
    #: The token that the target chose after the accepted path.
    next_token_id: int
    #: The kind of this token: ``corrected`` or ``bonus``.
    next_kind: TokenKind


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One of the most likely tokens at a position, with `--logprobs`."""

    #: The token's id.
    token_id: int
    #: The token's own bytes as text; the bytes of an incomplete character as ``\xe2``; for a
    #: control token its name.
    text: str
    #: Natural logarithm of the token's probability at temperature 1, before samplers and grammar.
    logprob: float
    #: The bytes that the token adds to the text; none for a control token.
    bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of the answer, as shown."""

    #: The token's id.
    token_id: int
    #: The characters that this token completes; may be empty.
    text: str
    #: Where the token comes from.
    kind: TokenKind
    #: The drafter of an accepted token; ``grammar`` for a forced one; ``target`` otherwise.
    origin: str
    #: With `--logprobs`, the natural logarithm of its probability at temperature 1, before samplers
    #: and grammar; null for a token that is the only one that the grammar allows, drafted or not.
    logprob: float | None = None
    #: With `--logprobs N`, the N most likely tokens at this position, in descending order, followed
    #: by this token if it is not one of them.
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillEvent(_Event, event="prefill"):
    """A part of a long prompt was prefilled, and others follow."""

    #: How many tokens of the prompt are in the target's cache now.
    n_prefilled: int
    #: Number of prompt tokens.
    n_prompt_tokens: int
    #: Estimated seconds until the whole prompt is prefilled.
    left_s: float
    #: How many prompt tokens were in the cache already, from an earlier answer.
    n_cached_tokens: int = 0
    #: How many of these were loaded from disk.
    n_loaded_tokens: int = 0
    #: Seconds spent on the prompt so far.
    spent_s: float = 0.0
    #: The tokens of this part with their log-probabilities, if a request asked for them.
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedEvent(_Event, event="committed"):
    """Tokens became part of the answer. The texts of all these events, joined, are the answer.

    An end-of-text token is the last piece and has no text. An interruption may release text that
    was held back.
    """

    #: The number of the round, from 1; 0 for tokens before the first round.
    round: int
    #: The tokens.
    pieces: tuple[Piece, ...]
    #: The pieces' texts, joined. Text that may be the beginning of a stop string is held back.
    text: str
    #: Number of tokens of the answer so far.
    n_tokens: int
    #: Why the round drafted as much as it did: [a name](#reasons). Null outside rounds.
    reason: str | None = None
    #: The reason in words. Null outside rounds.
    reason_text: str | None = None
    #: Seconds of drafting, including specgen's own part of it. Null outside rounds.
    draft_s: float | None = None
    #: Seconds of the target's batch, which parallel answers share. Null outside rounds.
    target_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """The number of rounds that drafted nothing for one reason."""

    #: [The name](#reasons) of the reason.
    reason: str
    #: The reason in words, from the last of these rounds.
    text: str
    #: The number of rounds.
    n_rounds: int


def undrafted_text(reasons: Sequence[ReasonCount], n_rounds: int) -> str:
    """Return a sentence that says how many of an answer's rounds drafted nothing, and why.

    Args:
        reasons: The reasons, with their numbers of rounds.
        n_rounds: The number of all rounds of the answer.
    """
    n_undrafted = sum(reason.n_rounds for reason in reasons)
    rounds = "1 round" if n_rounds == 1 else f"{n_rounds} rounds"
    why = "; ".join(f"{reason.text} ({reason.n_rounds})" for reason in reasons)
    return f"{n_undrafted} of {rounds} drafted nothing: {why}"


@dataclass(frozen=True, slots=True)
class NoticeEvent(_Event, event="notice"):
    """Something that the user should know, which does not end the answer."""

    #: One line.
    message: str
    #: More detail, for `--verbose`; may have several lines.
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FinishedEvent(_Event, event="finished"):
    """Once, at the end."""

    #: The whole answer.
    text: str
    #: The answer's tokens, without the end-of-text token.
    token_ids: tuple[int, ...]
    #: ``stop``: end of text or a stop string; ``length``: `--max-tokens` reached; ``context``: the
    #: context is full; ``interrupted``: Ctrl-C, or a worker of `--rpc` was lost.
    finish_reason: FinishReason
    #: The stop string or end-of-text token that ended the answer, else null.
    stopped_by: str | None
    #: Number of prompt tokens.
    n_prompt_tokens: int
    #: Number of tokens of the answer.
    n_tokens: int
    #: Number of decodes of the target after the prompt's; each added at least one token.
    n_rounds: int
    #: Number of drafted tokens that the target verified.
    n_drafted: int
    #: Number of drafted tokens that the target accepted.
    n_accepted: int
    #: The share of drafted positions at which a token was accepted (in chains: of drafted tokens);
    #: null without drafts.
    acceptance_rate: float | None
    #: Tokens added per round, without forced ones; null before the first round.
    mean_accepted_length: float | None
    #: How often a token was accepted, by position in the draft (index 0 is the first).
    accepted_by_depth: tuple[int, ...]
    #: How often tokens were drafted, by position in the draft; a tree's branches count as one.
    drafted_by_depth: tuple[int, ...]
    #: Tokens per second after the first one; null without more tokens.
    tokens_per_s: float | None
    #: Seconds from the start of the prefill to the first token; null without a token.
    time_to_first_token_s: float | None
    #: Seconds of the prefill with the target (part of target_s).
    prompt_s: float
    #: Seconds of the draft model's decodes.
    draft_s: float
    #: Seconds of the target's decodes.
    target_s: float
    #: Seconds of specgen's own work, without rendering.
    loop_s: float
    #: The sum of draft_s, target_s and loop_s.
    wall_s: float
    #: Estimated tokens per second of plain decoding. Null below 30 tokens.
    plain_tokens_per_s: float | None = None
    #: Estimated speed-up over plain decoding, after the first token. Null below 30 tokens.
    estimated_speedup: float | None = None
    #: Estimated speed-up over plain decoding, with the prefill. Null below 30 tokens.
    estimated_whole_speedup: float | None = None
    #: How the speed-up was estimated, or why it is not known. Null below 30 tokens.
    estimate: str | None = None
    #: Number of tokens of the answer that the grammar forced.
    n_forced: int = 0
    #: How many tokens were accepted, by their rank among siblings in a draft tree (index 0: the
    #: first guess).
    accepted_by_rank: tuple[int, ...] = ()
    #: How many tokens were drafted, by their rank among siblings.
    drafted_by_rank: tuple[int, ...] = ()
    #: How many prompt tokens were in the target's cache already.
    n_cached_tokens: int = 0
    #: Why rounds drafted nothing, the most frequent reason first.
    undrafted: tuple[ReasonCount, ...] = ()
    #: Number of rounds by how many tokens they added, without forced ones (index 0: one token).
    rounds_by_tokens: tuple[int, ...] = ()
    #: Whether the answer ended where its grammar allows the end.
    ends_grammar: bool = False
    #: The share of the cores' time that other programs took, on the cores that specgen may use;
    #: null if it was not measured.
    others_share: float | None = None
    #: Seconds of loading the models and opening their contexts, before the first answer; not part
    #: of wall_s.
    loading_s: float = 0.0
    #: Seconds of loading models whose weights had to be packed first; neither part of loading_s nor
    #: of wall_s.
    packing_s: float = 0.0
    #: Seconds of measuring what drafting costs, before the first answer; not part of wall_s.
    measuring_s: float = 0.0
    #: `estimated_speedup` minus and plus two standard errors, from the times of this answer's
    #: decodes; the margin is at least 10%.
    estimated_speedup_range: tuple[float, float] | None = None
    #: Whether the speed-up is rough, because other programs kept the machine busy during the answer
    #: or while the costs of decodes were measured.
    estimate_is_rough: bool = False
    #: Seconds of the command before the first answer that are not counted above: finding and
    #: downloading models, testing the kernels, and making the prompt; not part of wall_s.
    starting_s: float = 0.0

    @property
    def n_positions(self) -> int:
        """The number of drafted positions; `acceptance_rate` is the share that was accepted.

        Branches of a tree share their positions, so there may be fewer than drafted tokens.
        """
        return sum(self.drafted_by_depth)


Event: TypeAlias = (
    PromptEvent
    | PrefillEvent
    | DraftedEvent
    | VerifiedEvent
    | CommittedEvent
    | NoticeEvent
    | FinishedEvent
)

EVENT_TYPES: tuple[type[Event], ...] = get_args(Event)


def to_json_object(event: Event) -> dict[str, Any]:
    """Return an event as the JSON object that `specgen run --json` writes."""
    return {"event": event.event, **dataclasses.asdict(event)}
