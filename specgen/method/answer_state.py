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
    TokenLogprob,
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
from specgen.system.arrays import Logits, best
from specgen.text.sampling.raw_probabilities import log_probabilities
from specgen.text.text_stream import TextStream
from specgen.text.vocabulary import Vocabulary

#: The expected tokens of an answer that has just begun: for so few, a prefill of the draft model
#: does not pay off.
_N_EXPECTED = 8
_ESTIMATE = "from the measured costs of the target's batches"
_NOT_KNOWN = "not known: plain decoding was measured while the machine was slower"
#: A speed-up may exceed the tokens per pass by this factor before it counts as impossible.
_LEEWAY = 1.05


def interrupted_event(
    index: int,
    time_s: float,
    n_prompt: int,
) -> FinishedEvent:
    """Return the summary of an answer that was interrupted before it began."""
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

    vocabulary: Vocabulary
    options: GenerationOptions
    #: The most tokens, prompt and answer together.
    n_ctx: int
    #: What drafts; None if nothing does, or if drafting failed (`why_undrafted`).
    cascade: Cascade | None
    policy: Policy
    verifier: Verifier
    #: Turns the target's logits into distributions.
    sampling: SamplingPipeline
    #: The committed tokens, with the state of the grammar.
    text_state: TextState
    rng: np.random.Generator
    #: The answer's sequences in the target's cache.
    slot: Branches = field(default_factory=Branches)
    #: The number of the answer in events.
    index: int = 0
    #: Tokens that end the answer, besides the vocabulary's.
    ends: frozenset[int] = frozenset()
    #: Takes the target's hidden states, if a drafter reads them.
    hidden_states: HiddenStateSink | None = None
    why_undrafted: Literal["off", "failed"] = "off"

    #: All committed tokens, prompt and answer: those of `text_state`.
    tokens: list[int] = field(init=False)
    #: The answer's characters, without what may be the beginning of a stop string.
    text: TextStream = field(init=False)
    #: The prompt's characters, for prompts with log-probabilities.
    _prompt_text: TextStream = field(init=False)
    stats: AnswerStats = field(default_factory=AnswerStats)
    #: Why and by what the answer ended; None while it goes on.
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None
    #: The error that ended it.
    failure: SpecgenError | None = None
    #: The number of prompt tokens.
    n_prompt: int = field(init=False)
    #: The prompt tokens that the cache held already, and those of them that came from the disk.
    n_cached: int = 0
    n_loaded: int = 0
    #: The prompt tokens that the cache holds now.
    n_prefilled: int = 0
    #: Lengths of the text at which a chunk of the prompt ends, so that its state can be kept.
    prefill_stops: tuple[int, ...] = ()
    #: The clock's time when the prefill began; None before.
    prefill_started_s: float | None = None
    #: Whether the prompt is decoded, and the first token committed.
    is_started: bool = False
    #: The number of the answer's tokens, without the one that ended it.
    n_answer: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.text_state.tokens
        self.n_prompt = len(self.tokens)
        if not self.n_prompt:
            raise ValueError("a sequence needs at least one prompt token")
        self.text = TextStream(self.options.stop, self.options.n_indent)
        self._prompt_text = TextStream()

    @property
    def is_finished(self) -> bool:
        """Whether the answer ended, also by a failure."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def answer(self) -> list[int]:
        """The answer's tokens, without the one that ended it."""
        return self.tokens[self.n_prompt : self.n_prompt + self.n_answer]

    def offer(self, n_most: int) -> Offer:
        """Return what is known before a round of at most `n_most` drafted tokens.

        The free drafter proposes now.
        """
        cascade = self.cascade
        assert cascade is not None, "something drafts"
        n_context_left = max(0, self.n_ctx - len(self.tokens))
        n_draftable = n_context_left
        if self.options.max_tokens >= 0:  # the target adds a token of its own
            n_answer_left = self.options.max_tokens - self.n_answer - 1
            n_draftable = min(n_draftable, max(0, n_answer_left))
        # The answer is expected to get as many tokens again: long answers tend to go on for longer.
        n_left = min(max(_N_EXPECTED, self.n_answer), n_draftable + 1)
        n_nodes = min(n_most, self.policy.n_max, n_context_left)
        n_chain = min(n_nodes, n_draftable)
        found = cascade.look_up(self.tokens, n_chain)
        price = FREE
        if cascade.model is not None:
            price = cascade.model.price(len(self.tokens))
        return Offer(n_left, n_chain, found, cascade.model_name, price, n_nodes)

    # --- commit ---------------------------------------------------------------------------------

    def commit(self, token: int) -> str:
        """Add the target's next token, and return the text that may be shown.

        If the answer ends here, `finish_reason` is set. Only here can its content end it, a token
        at a time, so that a draft cannot move the end.
        """
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
        """Commit the accepted path, the target's token and forced ones, up to the answer's end.

        Args:
            draft: The draft, perhaps none.
            verdict: What the verifier says about it.
            logits: The logits at the root and at each node, float32[1 + n, n_vocab].
            now_s: The time of the events.
            result: The round; None for the token after the prompt.

        Returns:
            The events.
        """
        round_number = 0 if result is None else self.stats.n_rounds + 1
        own_kind: TokenKind = "plain"
        events: list[Event] = []
        if len(draft):
            is_leaf = not draft.children[verdict.path[-1] if verdict.path else ROOT]
            own_kind = "bonus" if is_leaf else "corrected"
            events += self._draft_events(draft, verdict, own_kind, now_s, round_number)

        pieces: list[Piece] = []
        row = 0  # the logits from which the token was chosen
        for node in verdict.path:
            token = draft.tokens[node]
            piece = Piece(token, self.commit(token), "accepted", draft.origins[node])
            pieces.append(self._with_logprobs(piece, logits[row]))
            row = node + 1
            if self.finish_reason is not None:
                break
        if self.finish_reason is None:
            token = verdict.next_token
            piece = Piece(token, self.commit(token), own_kind, "target")
            pieces.append(self._with_logprobs(piece, logits[row]))
        if self.text_state.has_grammar:
            pieces += self._commit_forced()
        return [*events, self._committed_event(pieces, now_s, round_number, result)]

    def take_forced(self, now_s: float) -> list[Event]:
        """Commit what the grammar forces before the prefill; return the event, if there is one."""
        pieces = self._commit_forced() if self.options.max_tokens else []
        return [self._committed_event(pieces, now_s)] if pieces else []

    def _commit_forced(self) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.is_finished:
            token = self.text_state.forced()
            if token is None:
                break
            pieces.append(Piece(token, self.commit(token), "forced", "grammar"))
        self.stats.n_forced += len(pieces)
        return pieces

    def interrupt(self, now_s: float) -> list[Event]:
        """End the answer here; return the event of the text that was held back, if there is any."""
        self.finish("interrupted")
        text = self.text.flush()
        if not text:
            return []
        piece = Piece(self.tokens[-1], text, "plain", "target")
        return [self._committed_event([piece], now_s, self.stats.n_rounds)]

    def finish(self, reason: FinishReason, stopped_by: str | None = None) -> None:
        """End the answer. If it is called again, the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stopped_by = stopped_by

    # --- events ---------------------------------------------------------------------------------

    def _draft_events(
        self,
        draft: Draft,
        verdict: Verdict,
        own_kind: TokenKind,
        now_s: float,
        round_number: int,
    ) -> list[Event]:
        """Return the events of a draft and of its verdict; called before the commit."""
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
            own_kind,
        )
        return [drafted, verified]

    def _rejected_branches(
        self, draft: Draft, accepted: tuple[int, ...]
    ) -> tuple[RejectedBranch, ...]:
        """Return the rejected branches, one for each leaf. One may start inside a character."""
        if len(accepted) == len(draft):
            return ()
        branches: list[RejectedBranch] = []
        for path in draft.paths():
            rejected = tuple([node for node in path if node not in accepted])
            if rejected:
                data = [self.vocabulary.token_bytes(draft.tokens[node]) for node in path]
                n_kept = len(path) - len(rejected)
                kept_bytes = b"".join(data[:n_kept])
                rejected_bytes = b"".join(data[n_kept:])
                text = self.text.preview(kept_bytes, rejected_bytes)
                branches.append(RejectedBranch(rejected, text))
        return tuple(branches)

    def _committed_event(
        self,
        pieces: Sequence[Piece],
        now_s: float,
        round_number: int = 0,
        result: RoundResult | None = None,
    ) -> CommittedEvent:
        text = "".join([piece.text for piece in pieces])
        tokens = (tuple(pieces), text, self.n_answer)
        if result is None:
            return CommittedEvent(self.index, now_s, round_number, *tokens)
        return CommittedEvent(
            self.index,
            now_s,
            round_number,
            *tokens,
            reason=result.plan.reason,
            reason_text=result.plan.why,
            draft_s=result.draft_s,
            target_s=result.target_s,
        )

    def finished_event(self, time_s: float, plain_token_s: float | None) -> FinishedEvent:
        """Return the summary.

        Args:
            time_s: The time of the event.
            plain_token_s: The seconds of a token without a draft, if that is known.
        """
        stats = self.stats
        n_tokens = len(self.tokens) - self.n_prompt
        tokens_per_s = stats.speed(n_tokens)
        speedup = None
        estimate = None
        if plain_token_s:
            estimate = _ESTIMATE
            if tokens_per_s:
                speedup = tokens_per_s * plain_token_s
        if speedup and speedup > _LEEWAY * (stats.mean_accepted_length or math.inf):
            # It is more than drafting can give: the machine is less busy by now.
            plain_token_s = None
            speedup = None
            estimate = _NOT_KNOWN
        speedup_range = None
        if speedup is not None:
            error = 1.0 + stats.speedup_error()
            speedup_range = (speedup / error, speedup * error)
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
            ends_grammar=n_tokens > self.n_answer and self.text_state.has_grammar,
            plain_tokens_per_s=1.0 / plain_token_s if plain_token_s else None,
            estimated_speedup=speedup,
            estimated_speedup_range=speedup_range,
            estimated_whole_speedup=stats.whole_speedup(n_tokens, plain_token_s),
            estimate=estimate,
            **stats.figures(),
        )

    # --- log-probabilities ----------------------------------------------------------------------

    def _with_logprobs(self, piece: Piece, row: Logits) -> Piece:
        """Return the piece with log-probabilities by a row of logits, if they are asked for."""
        n_top = self.options.logprobs
        if n_top is None:
            return piece
        tokens = best(row, n_top).tolist()
        if piece.token_id not in tokens:
            tokens.append(piece.token_id)
        logprobs = tuple(map(self._token_logprob, tokens, log_probabilities(row, tokens)))
        own = logprobs[tokens.index(piece.token_id)]
        return replace(piece, logprob=own.logprob, top_logprobs=logprobs)

    def _token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        data = self.vocabulary.token_bytes(token)
        text = data.decode("utf-8", "backslashreplace") or self.vocabulary.token_text(token)
        return TokenLogprob(token, text, logprob, tuple(data))

    def scored_prompt(self, start: int, logits: Logits) -> tuple[Piece, ...]:
        """Return the prompt's tokens with log-probabilities, if they are asked for.

        Args:
            start: The position of the first row's token.
            logits: The logits after the tokens from there on, float32[n, n_vocab]. Each row scores
                the token after it; the first token of the prompt has probability 1.
        """
        first = start + 1 if start > 0 else 0
        end = min(start + len(logits) + 1, self.n_prompt)
        pieces: list[Piece] = []
        for position in range(first, end):
            token = self.tokens[position]
            shown = self._prompt_text.push(self.vocabulary.token_bytes(token))
            piece = Piece(token, shown, "forced", "prompt")
            if position == 0:
                piece = replace(piece, top_logprobs=(self._token_logprob(token, 0.0),))
            else:
                piece = self._with_logprobs(piece, logits[position - 1 - start])
            pieces.append(piece)
        return tuple(pieces)
