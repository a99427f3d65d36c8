"""Samples of several tokens at one position of a text, and their exact joint distribution.

The samples come from the loop of `specgen run`. Logits are cached by text, so that thousands of
samples need only a few hundred decodes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

from specgen.drafters.draft_text import DraftText
from specgen.drafters.heads import LoadedHeads
from specgen.drafters.translated import TranslatedDrafter
from specgen.measure.exactness.finished_answers import tokens_of
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.answer_stats import AnswerStats
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import Drafter
from specgen.method.hidden_states import LastHiddenState
from specgen.method.policy import Offer, Policy, RoundPlan
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.method.verifiers import TargetAt, Verdict, Verifier, sampled_from
from specgen.session import drafter_factory
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.arrays import Hidden, Logits
from specgen.text.overlap import common_prefix_length
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from tests.helpers.fake_generations import read_prompt
from tests.helpers.goodness_of_fit import DepthFit, fits_of

#: How many of an answer's first tokens are searched for the position.
N_SEARCHED = 48
Cell = tuple[int, ...]


def _rows(text: Sequence[int], start: int, end: int, n_wanted: int = 0) -> Batch:
    batch = Batch()
    for position in range(start, end):
        batch.add(text[position], position, (0,), position >= end - n_wanted)
    return batch


class MemoBackend:
    """A backend that caches logits by text, and decodes each text only once.

    It decodes in sequence 0 of another backend, without drafts. The caller's sequences are only
    texts, so any of them can be cut, copied and restored. With `has_states`, hidden states are
    cached, too.
    """

    def __init__(self, inner: Backend, *, has_states: bool = False) -> None:
        self._inner = inner
        self._has_states = has_states
        self.vocabulary = inner.vocabulary
        self.n_vocab = inner.n_vocab
        self.n_ctx = inner.n_ctx
        self.n_batch = inner.n_batch
        self.n_outputs = inner.n_outputs
        self.n_sequences = inner.n_sequences
        self.rollback = inner.rollback
        self.n_decoded_rows = 0
        self.replays_graphs = False
        self.is_unwanted: Callable[[], bool] | None = None
        self._texts: list[Cell] = [()] * inner.n_sequences
        self._cached: Cell = ()
        #: By text: the logits after it, and the hidden state if the backend has one.
        self._rows: dict[Cell, tuple[Logits, Hidden]] = {}

    @property
    def decode_s(self) -> float:
        return self._inner.decode_s

    def decode(self, batch: Batch) -> Logits:
        return self.decode_hidden(batch)[0]

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        assert not all_rows, "such drafts are sampled through the engine"
        wanted: list[tuple[Logits, Hidden]] = []
        for token, position, sequences, wants in zip(
            batch.tokens, batch.positions, batch.sequences, batch.wants_logits, strict=True
        ):
            before = {self._texts[sequence] for sequence in sequences}
            assert len(before) == 1, "a row must continue a single text"
            text = (*before.pop(), token)
            assert len(text) == position + 1, "without a gap"
            for sequence in sequences:
                self._texts[sequence] = text
            if wants:
                wanted.append(self.row(text))
        self.n_decoded_rows += len(batch)
        if not wanted:
            return np.empty((0, self.n_vocab), np.float32), np.empty((0, 0), np.float32)
        return np.array([row for row, _ in wanted]), np.array([state for _, state in wanted])

    def row(self, text: Cell) -> tuple[Logits, Hidden]:
        """The logits after a text, and the hidden state."""
        if text not in self._rows:
            n_kept = common_prefix_length(self._cached, text[:-1])
            if n_kept < len(self._cached):
                n_kept = n_kept if self.rollback == "cells" else 0
                self._inner.remove(0, n_kept)
            last = len(text) - 1
            for start in range(n_kept, last, self.n_batch):
                self._inner.decode(_rows(text, start, min(start + self.n_batch, last)))
            self._rows[text] = self._decode_inner(_rows(text, last, last + 1, n_wanted=1))
            self._cached = text
        return self._rows[text]

    def _decode_inner(self, batch: Batch) -> tuple[Logits, Hidden]:
        if not self._has_states:
            return self._inner.decode(batch)[0].copy(), np.empty(0, np.float32)
        logits, hidden = self._inner.decode_hidden(batch)
        return logits[0].copy(), hidden[0].copy()

    def length(self, sequence: int) -> int:
        return len(self._texts[sequence])

    def text(self, sequence: int) -> Sequence[int]:
        return self._texts[sequence]

    def anchor(self, sequence: int) -> None:
        pass

    def n_restorable(self, sequence: int, n: int) -> int:
        return 0

    def checkpoint(self, sequence: int) -> None:
        pass

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        shared = self._texts[source] if end < 0 else self._texts[source][:end]
        if len(shared) > len(self._texts[destination]) >= start:
            self._texts[destination] = shared

    def remove(self, sequence: int, start: int = 0) -> None:
        self._texts[sequence] = self._texts[sequence][: max(0, start)]

    def close(self) -> None:
        self._inner.close()


@dataclass
class _Scout:
    """A verifier that records how visible a wrong verdict would be.

    That is the smallest of these probabilities: that the first drafted token is accepted, that it
    is rejected, and that target and drafter sample another token than their most likely one.
    """

    inner: Verifier
    chance: float = -1.0

    @property
    def wants_sampled_drafts(self) -> bool:
        return self.inner.wants_sampled_drafts

    def verify(self, draft: Draft, target: TargetAt, rng: np.random.Generator) -> Verdict:
        self.chance = -1.0
        if draft.children[ROOT]:
            first = draft.children[ROOT][0]
            target_first = target(ROOT)
            source = sampled_from(draft, first)
            rejection = target_first.excess(source)
            unsure = [target_first]
            if draft.distributions[first] is not None:
                unsure.append(source)
            tops = (1.0 - float(each.probs.max()) for each in unsure)
            self.chance = min(rejection, 1.0 - rejection, *tops)
        return self.inner.verify(draft, target, rng)


class _Mark:
    """A position in a text that tests can restore, which specgen itself never does."""

    def __init__(self, sequence: AnswerState) -> None:
        self.n_tokens = len(sequence.text_state.tokens)
        self._grammar = sequence.text_state.grammar()
        self._drafter: Drafter | None = None
        if sequence.cascade is not None:
            self._drafter = sequence.cascade.model
        self._hidden: tuple[int, Hidden] | None = None
        if isinstance(sequence.hidden_states, LastHiddenState):
            self._hidden = sequence.hidden_states.last
        if isinstance(self._drafter, TranslatedDrafter):
            self._spelled = _copied(self._drafter.text)

    def restore(self, sequence: AnswerState) -> None:
        state = sequence.text_state
        del state.tokens[self.n_tokens :]
        state._n_copied = min(state._n_copied, self.n_tokens)  # noqa: SLF001
        state._grammar = self._grammar  # noqa: SLF001
        drafter = self._drafter
        if sequence.cascade is not None and sequence.cascade.free is not None:
            sequence.cascade.free.rewind(self.n_tokens)
        if isinstance(sequence.hidden_states, LastHiddenState):
            sequence.hidden_states.last = self._hidden
        elif isinstance(drafter, TranslatedDrafter):
            drafter.text = _copied(self._spelled)
            drafter.drafted = NO_DRAFT
            # The last few tokens may be different ones in its cache.
            drafter.inner.rewind(max(0, len(drafter.text.tokens) - 16))
        elif drafter is not None:
            drafter.rewind(self.n_tokens)


def _copied(text: DraftText) -> DraftText:
    duplicate = copy.copy(text)
    duplicate.tokens = text.tokens[:]
    duplicate.ends = text.ends[:]
    duplicate.data = text.data[:]
    return duplicate


class _UpTo:
    """A policy that limits drafts to a length, which is set for each sample."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.n_max = 1
        self.observe = inner.observe

    def plan(self, offer: Offer) -> RoundPlan:
        return self._inner.plan(replace(offer, n_max=min(self.n_max, offer.n_max)))


@dataclass(frozen=True)
class JointDraws:
    """The result of sampling: the fit of the next token, of the next two tokens, and so on."""

    fits: tuple[DepthFit, ...]
    n_drafted: int
    n_accepted: int


def draw_with_models(
    session: Session, prompt: Prompt, depth: int, n_draws: int, seed: int
) -> JointDraws | None:
    """Sample `depth` tokens repeatedly, at the position of an answer where bugs are most visible.

    Drafts have one token, then two, and so on in turn, so that the bonus token after a fully
    accepted draft is tested, too. This is not for drafts that read the hidden states of the whole
    text.

    Returns:
        The result; None if nothing is drafted.
    """
    assert session.draft is None or not session.draft.reads_all_rows
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED + depth)
    with session.contexts(n_ctx) as (cache, draft_caches):
        has_states = isinstance(session.draft, LoadedHeads)
        target = MemoBackend(cache, has_states=has_states)
        drafts = [MemoBackend(each) for each in draft_caches]
        with patch.object(drafter_factory, "SamplingPipeline", RememberingPipeline):
            sequence = DrafterFactory(session).new_answer(prompt, n_ctx, drafts, seed)
        loop = AnswerLoop(target, session.clock)
        place = _find_place(sequence, loop)
        return None if place is None else _draw(sequence, loop, place, depth, n_draws)


def _find_place(sequence: AnswerState, loop: AnswerLoop) -> _Mark | None:
    scout = _Scout(sequence.verifier)
    searching = replace(sequence.options, max_tokens=N_SEARCHED, stop=())
    answering = replace(sequence, verifier=scout, options=searching)
    best = None
    best_chance = 0.0
    read_prompt(loop, answering)
    while not answering.is_finished:
        place = _Mark(answering)
        scout.chance = -1.0
        loop.round([answering])
        assert answering.failure is None, answering.failure
        if scout.chance > best_chance:
            best = place
            best_chance = scout.chance
    return best


def _draw(
    sequence: AnswerState, loop: AnswerLoop, place: _Mark, depth: int, n_draws: int
) -> JointDraws:
    policy = _UpTo(sequence.policy)
    options = replace(sequence.options, max_tokens=2 * depth + 2, stop=())
    drawing = replace(sequence, policy=policy, options=options)
    drawn: Counter[Cell] = Counter()
    n_drafted = n_accepted = 0
    for _ in range(n_draws):
        policy.n_max = 1 + policy.n_max % max(1, min(depth, sequence.policy.n_max))
        place.restore(drawing)
        loop.target.remove(0, place.n_tokens - 1)
        once = replace(drawing, stats=AnswerStats(), finish_reason=None)
        found: list[int] = []
        while len(found) < depth and not once.is_finished:
            found += tokens_of(loop.round([once]))
            assert once.failure is None, once.failure
        n_drafted += once.stats.n_drafted
        n_accepted += once.stats.n_accepted
        drawn[tuple(found[:depth])] += 1
    place.restore(drawing)
    exact = exact_cells(sequence, loop.target, depth)
    return JointDraws(tuple(fits_of(drawn, exact, depth)), n_drafted, n_accepted)


def exact_cells(sequence: AnswerState, target: Backend, depth: int) -> dict[Cell, float]:
    """The probability of each continuation of the text by `depth` tokens, or to its end."""
    # A new pipeline, because that of the samples caches the distributions that it used, which may
    # be wrong.
    sampling = SamplingPipeline(sequence.sampling._sampler, sequence.text_state)  # noqa: SLF001
    is_end = sequence.vocabulary.is_end
    cells: dict[Cell, float] = {}

    def follow(drafted: Cell, prob: float) -> None:
        if len(drafted) == depth or (drafted and is_end(drafted[-1])):
            cells[drafted] = prob
            return
        forced = sequence.text_state.forced(drafted)
        if forced is not None:
            follow((*drafted, forced), prob)
            return
        text = (*sequence.text_state.tokens, *drafted)
        target.remove(0, len(sequence.text_state.tokens) - 1)
        batch = _rows(text, target.length(0), len(text), n_wanted=1)
        step = sampling.distribution(target.decode(batch)[-1].copy(), drafted)
        for token, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
            follow((*drafted, token), prob * p)

    follow((), 1.0)
    return cells


class RememberingPipeline(SamplingPipeline):
    """Computes the distribution after each text only once.

    This is for texts that are repeated many times, with the same logits each time.
    """

    def __init__(self, sampler: Sampler, state: TextState) -> None:
        super().__init__(sampler, state)
        self._n_fixed = len(state.tokens)
        self._known: dict[tuple[int, ...], Distribution] = {}

    def distribution(self, logits: Logits, drafted: Sequence[int] = ()) -> Distribution:
        text = (*self._state.tokens[self._n_fixed :], *drafted)
        found = self._known.get(text)
        if found is None:
            found = super().distribution(logits, drafted)
            if len(found.token_ids) <= 2000:
                self._known[text] = found
        return found
