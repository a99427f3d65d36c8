"""The state of one answer: its tokens, its text, and when it ends."""

from __future__ import annotations

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
from specgen.method.backend import Vocabulary
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import Cascade, TargetStates
from specgen.method.policy import Offer, Policy, RoundPlan
from specgen.method.tree_in_cache import Branches
from specgen.method.verify import Verdict, Verifier
from specgen.options import GenerationOptions
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import log_probabilities, most_likely
from specgen.text.tally import Tally, is_impossible
from specgen.text.text_state import Shaper, TextState, TextStream

#: The expected number of tokens of an answer that has just begun. For a short answer, a draft that reads the prompt
#: costs more than it can save.
_N_EXPECTED = 8
_HOW_ESTIMATED = "from the measured costs of the target's batches"
_NOT_KNOWN = "not known: plain decoding was measured while the machine was slower"


@dataclass(slots=True)
class AnswerState:
    """The state of one answer. The loop changes it. `n_ctx` is the most tokens that may be decoded, prompt and answer
    together. `state` starts with the prompt; the drafter may share it. `shaper` has the target's samplers over it.

    `cascade` is None for plain decoding, and becomes None when drafting fails (`why_undrafted`). `trail` takes the
    target's hidden states, if a drafter needs them. `index` is the answer's number in events, and `ends` are tokens
    that end it besides the vocabulary's. `failure` is the error that ended it early; it then has no `finish_reason`.
    """

    vocabulary: Vocabulary
    options: GenerationOptions
    n_ctx: int
    cascade: Cascade | None
    policy: Policy
    verifier: Verifier
    shaper: Shaper
    state: TextState
    rng: np.random.Generator
    slot: Branches = field(default_factory=Branches)
    index: int = 0
    ends: frozenset[int] = frozenset()
    trail: TargetStates | None = None
    why_undrafted: Literal["off", "failed"] = "off"
    #: All committed tokens, prompt and answer: those of `state`.
    tokens: list[int] = field(init=False)
    text: TextStream = field(init=False)
    _prompt_text: TextStream = field(init=False)
    tally: Tally = field(default_factory=Tally)
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None
    failure: SpecgenError | None = None
    n_prompt: int = field(init=False)
    #: The number of prompt tokens that the cache held already.
    n_cached: int = 0
    #: The clock's time when the first piece of the prompt was read; None before.
    read_since_s: float | None = None
    #: Whether the prompt is read, and the first token committed.
    is_started: bool = False
    #: The number of the answer's tokens, without the one that ended it.
    n_answer: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.state.tokens
        self.n_prompt = len(self.tokens)
        if not self.n_prompt:
            raise ValueError("a sequence needs at least one prompt token")
        self.text = TextStream(self.options.stop, self.options.n_indent)
        self._prompt_text = TextStream()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def answer(self) -> list[int]:
        """The answer's tokens, without the one that ended it."""
        return self.tokens[self.n_prompt : self.n_prompt + self.n_answer]

    @property
    def n_read(self) -> int:
        """The number of prompt tokens that the cache held before; all once the prompt is read."""
        return self.n_prompt if self.is_started else self.n_cached

    def offer(self, n_most: int) -> Offer:
        """Return what is known before a round of at most `n_most` drafted tokens. The free drafter proposes now.
        There must be a `cascade`."""
        cascade, n_draftable = self.cascade, max(0, self.n_ctx - len(self.tokens))
        assert cascade is not None, "something drafts"
        if self.options.max_tokens >= 0:  # the target adds a token of its own
            n_draftable = min(n_draftable, max(0, self.options.max_tokens - self.n_answer - 1))
        # The answer is expected to get as many tokens again: long answers tend to go on for longer.
        n_left = min(max(_N_EXPECTED, self.n_answer), n_draftable + 1)
        n_most = min(n_most, self.policy.n_max, n_draftable)
        found = cascade.look_up(self.tokens, n_most)
        price = cascade.price(len(self.tokens))
        return Offer(n_left, n_most, found, cascade.model_name, price)

    def commit(self, token: int) -> str:
        """Add the target's next token, and return the text that may now be shown.

        Sets `finish_reason` if the answer ends with this token. Only here can the content of an answer end it, one
        token at a time, so that a draft cannot move the end.
        """
        self.state.commit(token)
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
        return shown + self.text.flush() if self.finish_reason is not None else shown

    def commit_verdict(
        self,
        draft: Draft,
        verdict: Verdict,
        logits: Logits,
        now_s: float,
        plan: RoundPlan | None = None,
    ) -> list[Event]:
        """Commit the accepted path of a draft, the target's token, and the tokens that the grammar forces after it,
        up to the end of the answer. `logits` are those at the root and at each node; `plan` is the round's
        plan, None for the prompt. Return the events."""
        number = 0 if plan is None else self.tally.n_rounds + 1
        own_kind: TokenKind = "plain"
        events: list[Event] = []
        if len(draft):
            path, token, bytes_of = verdict.path, verdict.next_token, self.vocabulary.token_bytes
            own_kind = "corrected" if draft.children(path[-1] if path else ROOT) else "bonus"
            columns = zip(
                draft.tokens, draft.parents, draft.origins, draft.probabilities, strict=True
            )
            nodes = [
                DraftNode(each, bytes_of(each).decode("utf-8", "replace"), parent, origin, chance)
                for each, parent, origin, chance in columns
            ]
            rejected = self._rejected_branches(draft, path)
            events = [
                DraftedEvent(self.index, now_s, number, tuple(nodes)),
                VerifiedEvent(self.index, now_s, number, path, rejected, token, own_kind),
            ]
        pieces: list[Piece] = []
        for row, node in zip((ROOT, *verdict.path), (*verdict.path, None), strict=True):
            if node is None:
                token = verdict.next_token
                piece = Piece(token, self.commit(token), own_kind, "target")
            else:
                token = draft.tokens[node]
                piece = Piece(token, self.commit(token), "accepted", draft.origins[node])
            if self.options.logprobs is not None:
                piece = self._with_logprobs(piece, logits[row + 1])
            pieces.append(piece)
            if self.finish_reason is not None:
                break
        if self.state.has_grammar:
            pieces += self._forced()
        return [*events, self._committed(pieces, now_s, number, plan)]

    def take_forced(self, now_s: float) -> list[Event]:
        """Commit the tokens to which the grammar leaves no alternative before the prompt is read, and return the
        event, if there are any."""
        pieces = self._forced() if self.options.max_tokens else []
        return [self._committed(pieces, now_s)] if pieces else []

    def interrupt(self, now_s: float) -> list[Event]:
        """End the answer here, and return the event of the text that was held back, if any."""
        self.finish("interrupted")
        piece = Piece(self.tokens[-1], self.text.flush(), "plain", "target")
        return [self._committed([piece], now_s, self.tally.n_rounds)] if piece.text else []

    def _forced(self) -> list[Piece]:
        """Commit the tokens that the grammar forces. Logits would change nothing, so no decode is needed before
        them."""
        pieces: list[Piece] = []
        while not self.is_finished and (token := self.state.forced()) is not None:
            pieces.append(Piece(token, self.commit(token), "forced", "grammar"))
        self.tally.n_forced += len(pieces)
        return pieces

    def _committed(
        self,
        pieces: Sequence[Piece],
        now_s: float,
        number: int = 0,
        plan: RoundPlan | None = None,
    ) -> CommittedEvent:
        text = "".join([piece.text for piece in pieces])
        why = (None, None) if plan is None else (plan.reason, plan.why)
        return CommittedEvent(self.index, now_s, number, tuple(pieces), text, self.n_answer, *why)

    def _with_logprobs(self, piece: Piece, row: Logits) -> Piece:
        """Return the piece with the target's log-probabilities, if they were asked for, from its logits there,
        float32[n_vocab]."""
        n_top = self.options.logprobs
        if n_top is None:
            return piece
        tokens = [*dict.fromkeys([*most_likely(row, n_top), piece.token_id])]
        found = tuple(map(self._with_logprob, tokens, log_probabilities(row, tokens)))
        own = found[tokens.index(piece.token_id)]
        return replace(piece, logprob=own.logprob, top_logprobs=found)

    def _with_logprob(self, token: int, logprob: float) -> TokenLogprob:
        data = self.vocabulary.token_bytes(token)
        text = data.decode("utf-8", "backslashreplace") or self.vocabulary.token_text(token)
        return TokenLogprob(token, text, logprob, tuple(data))

    def scored_prompt(self, start: int, logits: Logits) -> tuple[Piece, ...]:
        """Return the tokens of the prompt whose log-probabilities the `logits` of its rows from `start` on give, if they
        were asked for. Nothing is said of the first token."""
        pieces = []
        for place in range(start + (start > 0), min(start + len(logits) + 1, self.n_prompt)):
            token = self.tokens[place]
            shown = self._prompt_text.push(self.vocabulary.token_bytes(token))
            piece = Piece(token, shown, "forced", "prompt")
            if place:
                piece = self._with_logprobs(piece, logits[place - 1 - start])
            else:
                piece = replace(piece, top_logprobs=(self._with_logprob(token, 0.0),))
            pieces.append(piece)
        return tuple(pieces)

    def _rejected_branches(
        self, draft: Draft, accepted: tuple[int, ...]
    ) -> tuple[RejectedBranch, ...]:
        """Return the rejected branches of a draft, one for each leaf: the nodes from where its branch left the
        accepted path. It is called before the commit: if that path ends in the middle of a character, a branch's text
        starts there."""
        if len(accepted) == len(draft):
            return ()
        token_bytes = self.vocabulary.token_bytes
        branches = []
        for leaf in draft.leaves():
            path = draft.path(leaf)
            lost = tuple([node for node in path if node not in accepted])
            if lost:
                data = [token_bytes(draft.tokens[node]) for node in path]
                n_kept = len(path) - len(lost)
                text = self.text.preview(b"".join(data[:n_kept]), b"".join(data[n_kept:]))
                branches.append(RejectedBranch(lost, text))
        return tuple(branches)

    def finish(self, reason: FinishReason, stopped_by: str | None = None) -> None:
        """End the answer. If it is called again, the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason, self.stopped_by = reason, stopped_by

    def finished_event(self, time_s: float, plain_token_s: float | None) -> FinishedEvent:
        """Return the summary. `plain_token_s` is the cost of a token without a draft, if known."""
        tally, n_tokens = self.tally, len(self.tokens) - self.n_prompt
        tokens_per_s, error = tally.speed(n_tokens), 1.0 + tally.speedup_error()
        speedup = tokens_per_s * plain_token_s if tokens_per_s and plain_token_s else None
        estimate = _HOW_ESTIMATED if plain_token_s else None
        if speedup is not None and is_impossible(speedup, tally.mean_accepted_length):
            plain_token_s, speedup, estimate = None, None, _NOT_KNOWN
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
            ends_grammar=n_tokens > self.n_answer and self.state.has_grammar,
            plain_tokens_per_s=1.0 / plain_token_s if plain_token_s else None,
            estimated_speedup=speedup,
            estimated_speedup_range=None if speedup is None else (speedup / error, speedup * error),
            estimated_whole_speedup=tally.whole_speedup(n_tokens, plain_token_s),
            estimate=estimate,
            **tally.figures(),
        )
