"""The state of one answer: its tokens, its text, when it ends, and its counts and times for the
summary.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

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
    ReasonCount,
    RejectedBranch,
    TokenKind,
    TokenLogprob,
    VerifiedEvent,
)
from specgen.method.cascade import Cascade
from specgen.method.cost_table import FREE, CostTable
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

#: The expected tokens of an answer that has just begun: for few, reading the prompt does not pay
#: off.
_N_EXPECTED = 8
_NOT_KNOWN = "not known: plain decoding was measured while the machine was slower"
#: The least equal decodes of a kind, and in all, from which their noise is learnt; else it is
#: usual.
_MIN_OF_A_KIND, _MIN_DECODES, _USUAL_NOISE = 3, 6, 0.1
#: The least uncertainty of a comparison with plain decoding, whose price was measured at another
#: moment.
_LEAST_ERROR = 0.1
#: A speed-up may exceed the tokens per pass by this factor before it counts as impossible.
_LEEWAY = 1.05


@dataclass(slots=True)
class Tally:
    """Counts and times, in seconds, of one generation. Fields with a name of `FinishedEvent` have
    its meaning.
    """

    n_rounds: int = 0
    n_forced: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_rank: Counter[int] = field(default_factory=Counter)
    accepted_by_rank: Counter[int] = field(default_factory=Counter)
    rounds_by_tokens: Counter[int] = field(default_factory=Counter)
    prompt_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    wall_s: float = 0.0
    time_to_first_token_s: float | None = None
    #: Tokens committed in rounds, in all and by the number of sequences that shared the round.
    n_round_tokens: int = 0
    n_tokens_by_sequences: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: `wall_s` when the prompt was decoded and its token committed, and the number of tokens then.
    start_s: float = 0.0
    n_start_tokens: int = 0
    #: The target's decode times by the number of rows.
    target_s_by_rows: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _undrafted: dict[str, ReasonCount] = field(default_factory=dict)

    def add_prompt(self, target_s: float, wall_s: float, n_tokens: int) -> None:
        self.prompt_s += target_s
        self.target_s += target_s
        self.wall_s += wall_s
        self.start_s, self.n_start_tokens = self.wall_s, n_tokens

    def add_round(self, result: RoundResult) -> None:
        """Add a round; the sequences share its batch's time equally."""
        n_committed = min(len(result.path) + 1, len(result.committed))  # the others were forced
        self.n_rounds += 1
        self.n_round_tokens += n_committed
        self.rounds_by_tokens[max(0, n_committed - 1)] += 1
        self.n_tokens_by_sequences[result.n_sequences] += n_committed
        self.target_s_by_rows[result.n_rows].append(result.target_s)
        self.target_s += result.target_s / result.n_sequences
        self.draft_s += result.model_s
        if not len(result.draft):
            reason, before = result.plan.reason, self._undrafted.get(result.plan.reason)
            n_before = 0 if before is None else before.n_rounds
            self._undrafted[reason] = ReasonCount(reason, result.plan.why, n_before + 1)
            return
        accepted = result.path[:n_committed]
        depths, ranks = result.draft.depths, result.draft.ranks
        self.n_drafted += len(depths)
        self.n_accepted += len(accepted)
        self.drafted_by_depth.update(set(depths))
        self.accepted_by_depth.update(range(len(accepted)))
        self.drafted_by_rank.update(ranks)
        self.accepted_by_rank.update(map(ranks.__getitem__, accepted))

    @property
    def undrafted(self) -> tuple[ReasonCount, ...]:
        return tuple(sorted(self._undrafted.values(), key=lambda each: -each.n_rounds))

    @property
    def loop_s(self) -> float:
        return max(0.0, self.wall_s - self.draft_s - self.target_s)

    @property
    def acceptance_rate(self) -> float | None:
        n_drafted = sum(self.drafted_by_depth.values())
        return self.n_accepted / n_drafted if n_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        return self.n_round_tokens / self.n_rounds if self.n_rounds else None

    def figures(self) -> dict[str, Any]:
        names = [each.name for each in fields(FinishedEvent) if hasattr(self, each.name)]
        found = {name: getattr(self, name) for name in names}
        for name, value in found.items():
            if isinstance(value, Counter):
                found[name] = tuple(value[n] for n in range(max(value, default=-1) + 1))
        return found

    def speed(self, n_tokens: int) -> float | None:
        """Return the tokens per second, without the prompt's decode and the tokens that came with
        it.
        """
        if n_tokens <= self.n_start_tokens or self.wall_s <= self.start_s:
            return None
        return (n_tokens - self.n_start_tokens) / (self.wall_s - self.start_s)

    def whole_speedup(self, n_tokens: int, plain_token_s: float | None) -> float | None:
        """Return the speed-up of the whole answer; plain decoding prefills the target alone."""
        if plain_token_s is None or not self.wall_s or n_tokens <= self.n_start_tokens:
            return None
        return (self.prompt_s + (n_tokens - self.n_start_tokens) * plain_token_s) / self.wall_s

    def speedup_error(self) -> float:
        """Return two standard errors of the speed-up, as a share of it. Plain decoding counts as
        one measurement, this answer as all its rounds; both vary as equal decodes do here, without
        the sixth at either end.
        """
        ratios: list[float] = []
        for each in self.target_s_by_rows.values():
            if len(each) >= _MIN_OF_A_KIND and min(each) > 0.0:
                usual = statistics.median(each)
                ratios += [math.log(seconds / usual) for seconds in each]
        noise = _USUAL_NOISE
        if len(ratios) >= _MIN_DECODES:
            sixths = statistics.quantiles(ratios, n=6, method="inclusive")
            noise = (sixths[-1] - sixths[0]) / 2
        n_rounds = max(1, self.n_rounds)
        return max(_LEAST_ERROR, 2.0 * noise * math.sqrt(1 + 1 / n_rounds))

    def priced_token_s(self, costs: CostTable) -> float | None:
        """Return the mean time of a token without drafts, by the costs of the target's batches at
        the machine's speed during this answer, shared by the sequences of a round; None if nothing
        was measured.
        """
        if not costs or not self.n_round_tokens:
            return None
        expected_s = sum(len(each) * costs.seconds(n) for n, each in self.target_s_by_rows.items())
        observed_s = sum(map(sum, self.target_s_by_rows.values()))
        seconds = sum(
            n_tokens * costs.seconds(n) / n for n, n_tokens in self.n_tokens_by_sequences.items()
        )
        return observed_s / expected_s * seconds / self.n_round_tokens


def interrupted_event(index: int, time_s: float, n_prompt: int) -> FinishedEvent:
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
        **Tally().figures(),
    )


@dataclass(slots=True)
class AnswerState:
    """The state of one answer, which the loop changes. `n_ctx` is the most tokens, prompt and
    answer together. `cascade` is None if nothing drafts, or drafting failed (`why_undrafted`).
    `trail` takes the target's hidden states for drafters. `ends` are tokens that end it besides the
    vocabulary's. `failure` ended it early.
    """

    vocabulary: Vocabulary
    options: GenerationOptions
    n_ctx: int
    cascade: Cascade | None
    policy: Policy
    verifier: Verifier
    shaper: SamplingPipeline
    state: TextState
    rng: np.random.Generator
    slot: Branches = field(default_factory=Branches)
    index: int = 0
    ends: frozenset[int] = frozenset()
    hidden_states: HiddenStateSink | None = None
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
    #: The prompt tokens that the cache held already, those of them that came from the disk, and
    #: what it holds now.
    n_cached: int = 0
    n_loaded: int = 0
    n_read: int = 0
    #: Lengths of the text at which a piece of the prompt ends, so that its state can be kept.
    prefill_stops: tuple[int, ...] = ()
    #: The clock's time when the first piece of the prompt was read; None before.
    prefill_started_s: float | None = None
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
        return self.tokens[self.n_prompt : self.n_prompt + self.n_answer]

    def offer(self, n_most: int) -> Offer:
        """Return what is known before a round of at most `n_most` drafted tokens; the free drafter
        proposes now.
        """
        cascade, n_draftable = self.cascade, max(0, self.n_ctx - len(self.tokens))
        assert cascade is not None, "something drafts"
        if self.options.max_tokens >= 0:  # the target adds a token of its own
            n_draftable = min(n_draftable, max(0, self.options.max_tokens - self.n_answer - 1))
        # The answer is expected to get as many tokens again: long answers tend to go on for longer.
        n_left = min(max(_N_EXPECTED, self.n_answer), n_draftable + 1)
        n_nodes = min(n_most, self.policy.n_max, max(0, self.n_ctx - len(self.tokens)))
        n_most = min(n_nodes, n_draftable)
        found = cascade.look_up(self.tokens, n_most)
        price = FREE if cascade.model is None else cascade.model.price(len(self.tokens))
        return Offer(n_left, n_most, found, cascade.model_name, price, n_nodes)

    def commit(self, token: int) -> str:
        """Add the target's next token, and return the text that may be shown; `finish_reason` says
        if the answer ends here. Only here can its content end it, a token at a time, so that a
        draft cannot move the end.
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
        result: RoundResult | None = None,
    ) -> list[Event]:
        """Commit a draft's accepted path, the target's token and forced ones, up to the answer's
        end. `logits` are those at the root and each node; `result` is None for the prompt. Return
        the events.
        """
        number = 0 if result is None else self.tally.n_rounds + 1
        own_kind: TokenKind = "plain"
        events: list[Event] = []
        if len(draft):
            path, token, bytes_of = verdict.path, verdict.next_token, self.vocabulary.token_bytes
            own_kind = "corrected" if draft.children[path[-1] if path else ROOT] else "bonus"
            texts = [bytes_of(each).decode("utf-8", "replace") for each in draft.tokens]
            n_walks = Counter(node for walk in draft.walks for node in walk)
            walks = [n_walks[node] for node in range(len(draft))]
            columns = draft.tokens, texts, draft.parents, draft.origins, draft.probabilities, walks
            nodes = tuple(DraftNode(*values) for values in zip(*columns, strict=True))
            rejected = self._rejected_branches(draft, path)
            events = [
                DraftedEvent(self.index, now_s, number, nodes, draft.guesses),
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
            pieces.append(self._with_logprobs(piece, logits[row + 1]))
            if self.finish_reason is not None:
                break
        if self.state.has_grammar:
            pieces += self._forced()
        return [*events, self._committed(pieces, now_s, number, result)]

    def take_forced(self, now_s: float) -> list[Event]:
        """Commit the tokens that the grammar forces before the prompt is read; return the event, if
        any.
        """
        pieces = self._forced() if self.options.max_tokens else []
        return [self._committed(pieces, now_s)] if pieces else []

    def interrupt(self, now_s: float) -> list[Event]:
        """End the answer here, and return the event of the text that was held back, if any."""
        self.finish("interrupted")
        piece = Piece(self.tokens[-1], self.text.flush(), "plain", "target")
        return [self._committed([piece], now_s, self.tally.n_rounds)] if piece.text else []

    def _forced(self) -> list[Piece]:
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
        result: RoundResult | None = None,
    ) -> CommittedEvent:
        text, known = "".join([piece.text for piece in pieces]), tuple[Any, ...]()
        if result is not None:
            known = (result.plan.reason, result.plan.why, result.draft_s, result.target_s)
        return CommittedEvent(self.index, now_s, number, tuple(pieces), text, self.n_answer, *known)

    def _with_logprobs(self, piece: Piece, row: Logits) -> Piece:
        n_top = self.options.logprobs
        if n_top is None:
            return piece
        tokens = [*dict.fromkeys([*best(row, n_top).tolist(), piece.token_id])]
        found = tuple(map(self._with_logprob, tokens, log_probabilities(row, tokens)))
        own = found[tokens.index(piece.token_id)]
        return replace(piece, logprob=own.logprob, top_logprobs=found)

    def _with_logprob(self, token: int, logprob: float) -> TokenLogprob:
        data = self.vocabulary.token_bytes(token)
        text = data.decode("utf-8", "backslashreplace") or self.vocabulary.token_text(token)
        return TokenLogprob(token, text, logprob, tuple(data))

    def scored_prompt(self, start: int, logits: Logits) -> tuple[Piece, ...]:
        """Return the prompt's tokens with log-probabilities, by rows from `start` on, if they were
        asked for.
        """
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
        """Return the rejected branches, one for each leaf. Called before the commit: one may start
        inside a character.
        """
        if len(accepted) == len(draft):
            return ()
        token_bytes = self.vocabulary.token_bytes
        branches = []
        for path in draft.paths():
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
        estimate = "from the measured costs of the target's batches" if plain_token_s else None
        if speedup and speedup > _LEEWAY * (tally.mean_accepted_length or math.inf):
            # It is more than drafting can give: the machine is less busy by now.
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
