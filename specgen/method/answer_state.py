"""The state of one answer: its tokens, its text, when it ends, and the events about it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from specgen.errors import SpecgenError
from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    DraftNode,
    Event,
    FinishedEvent,
    FinishReason,
    Piece,
    RejectedBranch,
    TokenKind,
    VerifiedEvent,
)
from specgen.method.answer_stats import AnswerStats
from specgen.method.cascade import Cascade
from specgen.method.cost_table import FREE
from specgen.method.draft import ROOT, Branches, Draft
from specgen.method.drafter import HiddenStateSink
from specgen.method.policy import Offer, Policy, RoundResult
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.method.verifiers import Verdict, Verifier
from specgen.options import GenerationOptions
from specgen.system.arrays import Hidden, Logits
from specgen.text.sampling.raw_probabilities import likely_tokens, token_logprob
from specgen.text.text_stream import TextStream
from specgen.text.vocabulary import Vocabulary

#: The expected number of tokens of an answer that has just begun: so few that a long prefill of the
#: draft model does not pay off yet.
_N_EXPECTED_MIN = 12
#: What `FinishedEvent.estimate` says.
_ESTIMATE = "from the measured costs of the target's batches"
_NOT_KNOWN = "not known: plain decoding was measured while the machine was slower"
#: An estimated speed-up may exceed the mean number of tokens per round, its upper limit, by this
#: factor before it counts as impossible.
_LEEWAY = 1.05


@dataclass(frozen=True, slots=True)
class _SpeedupEstimate:
    """An answer's speed-up over plain decoding."""

    #: The seconds per token without drafting; None if unknown.
    plain_token_s: float | None
    #: Without drafting, the answer's tokens after the prompt would take this many times longer;
    #: None if unknown.
    speedup: float | None = None
    #: Where the estimate comes from, or why there is none; None if nothing was drafted.
    source: str | None = None


def interrupted_event(
    index: int,
    time_s: float,
    n_prompt: int,
) -> FinishedEvent:
    """Return the summary of an answer that was interrupted before it began.

    Args:
        index: The number of the answer.
        time_s: The time of the event.
        n_prompt: The number of prompt tokens.
    """
    return FinishedEvent(
        sequence=index,
        time_s=time_s,
        text="",
        token_ids=(),
        finish_reason="interrupted",
        stopped_by=None,
        n_prompt_tokens=n_prompt,
        n_tokens=0,
        tokens_per_s=None,
        **AnswerStats().figures(),
    )


@dataclass(slots=True)
class AnswerState:
    """The state of one answer, which the loop changes."""

    # What the answer is generated with.

    #: The target's vocabulary. It may show some control tokens in the text.
    vocabulary: Vocabulary
    #: When the answer ends, and what is reported about it.
    options: GenerationOptions
    #: The maximum number of tokens, prompt and answer together.
    n_ctx: int
    #: The drafters; None if there are none, or if drafting failed (`why_undrafted`).
    cascade: Cascade | None
    #: Decides how much is drafted in each round.
    policy: Policy
    #: Decides which drafted tokens are accepted.
    verifier: Verifier
    #: Turns the target's logits into distributions.
    sampling: SamplingPipeline
    #: The committed tokens, with the state of the grammar.
    text_state: TextState
    #: The random generator of the target's samples and of verification. Drafts have another one.
    rng: np.random.Generator
    #: The answer's sequences in the target's cache.
    branches: Branches = field(default_factory=Branches)
    #: The number of the answer in events.
    index: int = 0
    #: Tokens that end the answer, in addition to the vocabulary's.
    ends: frozenset[int] = frozenset()
    #: Takes the target's hidden states, if a drafter reads them.
    hidden_states: HiddenStateSink | None = None
    #: Why there is no cascade.
    why_undrafted: Literal["off", "failed"] = "off"
    #: The exception that `hidden_states` raised; the next round ends drafting.
    drafting_error: Exception | None = None

    # What was generated so far.

    #: All committed tokens, prompt and answer. This is the list of `text_state`, not a copy.
    tokens: list[int] = field(init=False)
    #: The answer's characters. It holds back what may be the beginning of a stop string.
    text: TextStream = field(init=False)
    #: The prompt's characters, for prompts with log-probabilities.
    _prompt_text: TextStream = field(init=False)
    #: The counts and times of its rounds.
    stats: AnswerStats = field(default_factory=AnswerStats)
    #: Why the answer ended; None while it goes on, and if an error ended it.
    finish_reason: FinishReason | None = None
    #: The stop string or the end token that ended the answer, if one did.
    stopped_by: str | None = None
    #: The error that ended the answer, if one did.
    failure: SpecgenError | None = None
    #: The number of prompt tokens.
    n_prompt: int = field(init=False)
    #: The number of prompt tokens that were in the cache before the prefill.
    n_cached: int = 0
    #: How many of these were loaded from the disk.
    n_loaded: int = 0
    #: The number of prompt tokens that are in the cache now.
    n_prefilled: int = 0
    #: Positions at which a chunk of the prompt has to end, so that the state there can be kept.
    prefill_stops: tuple[int, ...] = ()
    #: The clock's time when the prefill began; None before.
    prefill_started_s: float | None = None
    #: Whether the prompt is decoded and the first token after it is committed.
    is_started: bool = False
    #: The number of the answer's tokens. An end token that ended it does not count.
    n_answer: int = 0
    #: The number of committed tokens that were the only ones that the grammar allowed.
    _n_without_choice: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.text_state.tokens
        self.n_prompt = len(self.tokens)
        if not self.n_prompt:
            raise ValueError("a sequence needs at least one prompt token")
        self.text = TextStream(self.options.stop, self.options.n_indent)
        self._prompt_text = TextStream()

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended, normally or with an error."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def answer(self) -> list[int]:
        """The answer's tokens, without an end token that ended it."""
        return self.tokens[self.n_prompt : self.n_prompt + self.n_answer]

    def offer(self, n_rows_max: int) -> Offer:
        """Return what a policy needs to know before a round, with the proposal of the free drafter.

        Args:
            n_rows_max: The maximum number of drafted tokens in the target's batch.
        """
        cascade = self.cascade
        assert cascade is not None, "there are no drafters"
        n_context_left = max(0, self.n_ctx - len(self.tokens))
        # The maximum number of drafted tokens that the answer can still take.
        n_draftable = n_context_left
        if self.options.max_tokens >= 0:
            n_answer_left = self.options.max_tokens - self.n_answer
            # The target adds one token of its own to those of the draft.
            n_draftable = min(n_draftable, max(0, n_answer_left - 1))
        # The answer is expected to get twice as long: long answers tend to go on for longer.
        n_expected = min(max(_N_EXPECTED_MIN, self.n_answer), n_draftable + 1)
        # The limit of the answer concerns each branch of a tree, the other limits all its nodes.
        n_nodes_max = min(n_rows_max, self.policy.n_max, n_context_left)
        n_chain_max = min(n_nodes_max, n_draftable)
        found = cascade.look_up(self.tokens, n_chain_max)
        price = FREE
        if cascade.model is not None:
            price = cascade.model.price(len(self.tokens))
        return Offer(
            n_expected=n_expected,
            n_max=n_chain_max,
            found=found,
            drafter=cascade.model_name,
            price=price,
            n_nodes_max=n_nodes_max,
        )

    def keep_states(self, rows: Hidden, n_decoded: int) -> None:
        """Give `hidden_states` the target's states of the last rows; see `HiddenStateSink`."""
        assert self.hidden_states is not None, "no drafter reads hidden states"
        try:
            self.hidden_states.keep_states(rows, self.tokens, n_decoded)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            self.hidden_states = None
            self.drafting_error = error

    # --- commit ---------------------------------------------------------------------------------

    def commit(self, token: int) -> str:
        """Add the next token of the text, and return the text that can be shown now.

        If the token ends the answer, `finish_reason` is set. Tokens are added one at a time, so
        that the answer ends at the same token with and without a draft.
        """
        if self.text_state.forced() is not None:
            self._n_without_choice += 1
        self.text_state.commit(token)
        if self.vocabulary.is_end(token) or token in self.ends:
            self.finish("stop", self.vocabulary.token_text(token))
            return self.text.flush()
        self.n_answer += 1
        shown = self.text.push(self.vocabulary.token_bytes(token))
        if self.text.stopped_by is not None:
            self.finish("stop", self.text.stopped_by)
        elif self.n_answer == self.options.max_tokens:
            self.finish("length")
        elif len(self.tokens) > self.n_ctx:
            self.finish("context")
        if self.finish_reason is not None:
            shown += self.text.flush()
        return shown

    def commit_verdict(
        self,
        draft: Draft,
        verdict: Verdict,
        logits: Logits,
        now_s: float,
        result: RoundResult | None = None,
    ) -> list[Event]:
        """Commit the accepted tokens, the target's token, then forced tokens.

        Where the answer ends, the tokens after it are dropped. If no token can follow the accepted
        ones, it ends with a `failure` after them, as it would without a draft.

        Args:
            draft: The draft; `NO_DRAFT` if there was none.
            verdict: The verifier's verdict on the draft.
            logits: The logits at the root and at each node, float32[1 + n, n_vocab].
            now_s: The time of the events.
            result: The round; None for the token after the prompt.

        Returns:
            The events of the draft and its verdict, if there was a draft, then that of the tokens.

        Raises:
            BackendError: If the grammar fails.
        """
        round_number = 0 if result is None else self.stats.n_rounds + 1
        target_kind: TokenKind = "plain"
        events: list[Event] = []
        if len(draft):
            last_accepted = verdict.path[-1] if verdict.path else ROOT
            # After a leaf nothing was drafted that the target's token could correct.
            target_kind = "corrected" if draft.children[last_accepted] else "bonus"
            events += self._draft_events(draft, verdict, target_kind, now_s, round_number)

        n_without_choice_before = self._n_without_choice
        pieces = self._commit_verified(draft, verdict, target_kind, logits)
        if self.text_state.has_grammar:
            pieces += self._commit_forced()
        if result is not None:
            result.n_without_choice = self._n_without_choice - n_without_choice_before
        return [*events, self._committed_event(pieces, now_s, round_number, result)]

    def _commit_verified(
        self,
        draft: Draft,
        verdict: Verdict,
        target_kind: TokenKind,
        logits: Logits,
    ) -> list[Piece]:
        """Commit the accepted tokens, then the target's token, up to the end of the answer.

        The arguments are those of `commit_verdict`; `target_kind` is the kind of the target's
        token.
        """
        pieces: list[Piece] = []
        row = 0  # of the logits from which the next token was chosen
        for node in verdict.path:
            token = draft.tokens[node]
            pieces.append(self._commit_chosen(token, "accepted", draft.origins[node], logits[row]))
            row = node + 1
            if self.finish_reason is not None:
                return pieces
        if verdict.failure is not None:
            self.failure = verdict.failure
            return pieces
        pieces.append(self._commit_chosen(verdict.next_token, target_kind, "target", logits[row]))
        return pieces

    def _commit_chosen(
        self,
        token: int,
        kind: TokenKind,
        origin: str,
        row: Logits,
    ) -> Piece:
        """Commit a token that was chosen from a row of logits, and return it.

        It has log-probabilities if these were requested, unless it is the only token that the
        grammar allows: plain decoding computes no logits for such a token.
        """
        n_without_choice_before = self._n_without_choice
        piece = Piece(token, self.commit(token), kind, origin)
        if self._n_without_choice > n_without_choice_before:
            return piece
        return self._with_logprobs(piece, row)

    def take_forced(self, now_s: float) -> list[Event]:
        """Commit the tokens that the grammar forces at the start of the answer.

        Returns:
            The event of these tokens; empty if there are none.
        """
        pieces = self._commit_forced() if self.options.max_tokens else []
        return [self._committed_event(pieces, now_s)] if pieces else []

    def _commit_forced(self) -> list[Piece]:
        """Commit tokens as long as the grammar allows only one, and return them."""
        pieces: list[Piece] = []
        while not self.is_finished:
            token = self.text_state.forced()
            if token is None:
                break
            pieces.append(Piece(token, self.commit(token), "forced", "grammar"))
        self.stats.n_forced += len(pieces)
        return pieces

    def interrupt(self, now_s: float) -> list[Event]:
        """End the answer here.

        Returns:
            The event of the text that was held back; empty if there is none.
        """
        self.finish("interrupted")
        text = self.text.flush()
        if not text:
            return []
        # The held-back text becomes that of the last token, which is not committed again.
        piece = Piece(self.tokens[-1], text, "plain", "target")
        return [self._committed_event([piece], now_s, self.stats.n_rounds)]

    def finish(
        self,
        reason: FinishReason,
        stopped_by: str | None = None,
    ) -> None:
        """End the answer. Later calls do nothing: the first reason counts."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stopped_by = stopped_by

    # --- events ---------------------------------------------------------------------------------

    def _draft_events(
        self,
        draft: Draft,
        verdict: Verdict,
        target_kind: TokenKind,
        now_s: float,
        round_number: int,
    ) -> list[Event]:
        """Return the events of a draft and of its verdict.

        The rejected branches are shown as continuations of the text, so call this before the
        commit.
        """
        # The number of independent walks that share each node.
        n_walks = Counter(node for walk in draft.walks for node in walk)
        nodes = tuple(
            DraftNode(
                token_id=token,
                text=self.vocabulary.token_bytes(token).decode("utf-8", "replace"),
                parent=draft.parents[node],
                origin=draft.origins[node],
                probability=draft.probabilities[node],
                n_walks=n_walks[node],
            )
            for node, token in enumerate(draft.tokens)
        )
        rejected = self._rejected_branches(draft, verdict.path)
        drafted = DraftedEvent(self.index, now_s, round_number, nodes, draft.guesses)
        verified = VerifiedEvent(
            self.index,
            now_s,
            round_number,
            verdict.path,
            rejected,
            verdict.next_token,
            target_kind,
        )
        return [drafted, verified]

    def _rejected_branches(
        self, draft: Draft, accepted: tuple[int, ...]
    ) -> tuple[RejectedBranch, ...]:
        """Return the rejected end of each path through the draft that has one.

        The text of a branch is decoded after that of the accepted tokens before it, since it may
        start in the middle of a character.
        """
        if len(accepted) == len(draft):
            return ()
        branches: list[RejectedBranch] = []
        for path in draft.paths():
            rejected = tuple([node for node in path if node not in accepted])
            if rejected:
                path_bytes = [self.vocabulary.token_bytes(draft.tokens[node]) for node in path]
                n_accepted = len(path) - len(rejected)
                accepted_bytes = b"".join(path_bytes[:n_accepted])
                rejected_bytes = b"".join(path_bytes[n_accepted:])
                text = self.text.preview(accepted_bytes, rejected_bytes)
                branches.append(RejectedBranch(rejected, text))
        return tuple(branches)

    def _committed_event(
        self,
        pieces: Sequence[Piece],
        now_s: float,
        round_number: int = 0,
        result: RoundResult | None = None,
    ) -> CommittedEvent:
        """Return the event of committed tokens, with the times of their round if there was one."""
        event = CommittedEvent(
            sequence=self.index,
            time_s=now_s,
            round=round_number,
            pieces=tuple(pieces),
            text="".join([piece.text for piece in pieces]),
            n_tokens=self.n_answer,
        )
        if result is None:
            return event
        return replace(
            event,
            reason=result.plan.reason,
            reason_text=result.plan.why,
            draft_s=result.draft_s,
            target_s=result.target_s,
        )

    def finished_event(
        self,
        time_s: float,
        plain_token_s: float | None,
        *,
        is_rough: bool = False,
    ) -> FinishedEvent:
        """Return the summary of the answer, with its counts, times and estimated speed-up.

        Args:
            time_s: The time of the event.
            plain_token_s: The estimated seconds per token without drafting; None if unknown.
            is_rough: Whether the speed-up is only a rough estimate, since the machine was busy.
        """
        stats = self.stats
        n_tokens = len(self.tokens) - self.n_prompt
        ended_by_token = n_tokens > self.n_answer  # only an end token is missing in `n_answer`
        tokens_per_s = stats.speed(n_tokens)
        estimate = self._estimate_speedup(tokens_per_s, plain_token_s, is_rough=is_rough)
        plain_token_s = estimate.plain_token_s  # limited, or None if it cannot be right
        speedup_range = None
        if estimate.speedup is not None:
            error = 1.0 + stats.speedup_error()
            speedup_range = (estimate.speedup / error, estimate.speedup * error)
        return FinishedEvent(
            sequence=self.index,
            time_s=time_s,
            text=self.text.text,
            token_ids=tuple(self.answer),
            finish_reason=self.finish_reason or "interrupted",
            stopped_by=self.stopped_by,
            n_prompt_tokens=self.n_prompt,
            n_cached_tokens=self.n_cached,
            n_tokens=self.n_answer,
            tokens_per_s=tokens_per_s,
            ends_grammar=ended_by_token and self.text_state.has_grammar,
            plain_tokens_per_s=1.0 / plain_token_s if plain_token_s else None,
            estimated_speedup=estimate.speedup,
            estimated_speedup_range=speedup_range,
            estimated_whole_speedup=stats.whole_speedup(n_tokens, plain_token_s),
            estimate=estimate.source,
            estimate_is_rough=is_rough and estimate.speedup is not None,
            **stats.figures(),
        )

    def _estimate_speedup(
        self,
        tokens_per_s: float | None,
        plain_token_s: float | None,
        *,
        is_rough: bool,
    ) -> _SpeedupEstimate:
        """Compare the answer's speed with plain decoding, as far as both are known."""
        if not plain_token_s:
            return _SpeedupEstimate(plain_token_s)
        if not tokens_per_s:
            return _SpeedupEstimate(plain_token_s, source=_ESTIMATE)
        speedup = tokens_per_s * plain_token_s
        # More is impossible: a pass of the target never takes less than plain decoding of a token.
        limit = self.stats.mean_accepted_length or math.inf
        if is_rough and speedup > limit:
            return _SpeedupEstimate(limit / tokens_per_s, limit, _ESTIMATE)
        if speedup > _LEEWAY * limit:
            # Plain decoding was measured while the machine was slower than it is now.
            return _SpeedupEstimate(None, source=_NOT_KNOWN)
        return _SpeedupEstimate(plain_token_s, speedup, _ESTIMATE)

    # --- log-probabilities ----------------------------------------------------------------------

    def _with_logprobs(self, piece: Piece, row: Logits) -> Piece:
        """Return the piece with log-probabilities from a row of logits, if they were requested."""
        n_top = self.options.logprobs
        if n_top is None:
            return piece
        likely = likely_tokens(row, n_top, [piece.token_id], self.vocabulary)
        own = next(each for each in likely if each.token_id == piece.token_id)
        return replace(piece, logprob=own.logprob, top_logprobs=likely)

    def scored_prompt(
        self,
        start: int,
        logits: Logits,
    ) -> tuple[Piece, ...]:
        """Return the next tokens of the prompt, with log-probabilities if they were requested.

        Row i of `logits` scores the token at `start` + i + 1. No row scores the first token of the
        prompt, which gets the probability 1.

        Args:
            start: The position of the token to which the first row belongs.
            logits: The logits after the tokens from `start` on, float32[n, n_vocab].
        """
        first = start + 1 if start > 0 else 0
        # After the end of the prompt the last row scores the answer's first token.
        end = min(start + len(logits) + 1, self.n_prompt)
        pieces: list[Piece] = []
        for position in range(first, end):
            token = self.tokens[position]
            shown = self._prompt_text.push(self.vocabulary.token_bytes(token))
            piece = Piece(token, shown, "forced", "prompt")
            if position == 0:  # probability 1
                piece = replace(piece, top_logprobs=(token_logprob(token, 0.0, self.vocabulary),))
            else:
                piece = self._with_logprobs(piece, logits[position - 1 - start])
            pieces.append(piece)
        return tuple(pieces)
