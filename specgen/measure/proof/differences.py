"""How a speculative answer differs from plain decoding's, and whether batches explain it.

With specgen's kernels a row of logits has the same bits in a batch as alone, so the texts are equal and
any difference is a defect. llama.cpp's own code may round a row differently in a batch. If two tokens
are almost equally likely, rounding can change the choice, and from there on the texts differ. This is
a *near-tie*: another build or another batch size could change the choice too. Any other difference
is a *defect*: a token was kept that the target did not choose, or the cache holds rejected tokens.

Two questions distinguish them. Did the target, in the speculative run, choose the token that the text
has at this position? And is the row that it chose from as close to plain decoding's row as batches
alone leave rows (`specgen.measure.proof.rows`)? The second question is asked for all rows, not only where the
texts differ: a wrong cache moves rows long before it changes a choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specgen.events import Event
from specgen.measure.proof.drafting_plans import DraftingPlan, WayName, drafted_by, tokens_told
from specgen.measure.proof.rows import (
    batches_move,
    drafting_batch_sizes,
    is_moved,
    movement,
    plain_rows,
)
from specgen.method.distribution import Distribution
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.testing.bugs import Bug
from specgen.text.sampling import Sampler
from specgen.text.tally import Tally
from specgen.text.text_state import Shaper, TextState


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that plain decoding or the speculative run chose, with its logit in plain decoding (one
    token at a time) and in the round of the speculative run. `token_id` is -1 if the text ended."""

    token_id: int
    text: str
    plain_logit: float
    speculative_logit: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where the texts differ.

    `position` counts the answer's tokens from 0. `was_chosen` says whether the target, in the
    speculative run, really chose the token of that run's text. `gap` is how much plain decoding prefers
    its own token, in logits. `moved_by` is the distance of the speculative run's row from plain
    decoding's row. `batches_move` is the largest distance that batches alone have caused so far (see
    `specgen.measure.proof.rows.movement`); with `exact_rows` they must cause none. `same_in_batches_of` is the
    smallest batch size in which plain decoding itself chooses the other token here; None if it never
    does.
    """

    position: int
    plain: Choice
    speculative: Choice
    was_chosen: bool
    gap: float
    moved_by: float
    batches_move: float
    same_in_batches_of: int | None
    exact_rows: bool = False

    @property
    def is_defect(self) -> bool:
        """Whether rounding in batches cannot explain the difference."""
        moved = is_moved(self.moved_by, self.batches_move, exact=self.exact_rows)
        return self.exact_rows or moved or not self.was_chosen


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The result of one prompt; `prompt` counts from 1.

    `n_at_once` is the number of answers that were made at once in one cache. `way` names what decided how
    much was drafted. `drafted_by` has the number of verified tokens that
    each drafter proposed.

    `n_tokens` tokens of plain decoding were compared; `difference` is None if all are equal. `n_rows`
    rows of logits, up to the first difference, were compared too. `moved_by` is the largest distance of
    a row from plain decoding's. `batches_move` is the largest distance that batches alone have caused;
    it is 0 until a row made this measurement necessary. `exact_rows` means that specgen's kernels
    computed and that batches alone changed no bit of any row.
    """

    prompt: int
    n_tokens: int
    n_drafted: int
    n_accepted: int
    n_rows: int
    moved_by: float
    batches_move: float
    difference: Difference | None
    exact_rows: bool = False
    way: WayName = "fixed"
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    n_at_once: int = 1

    @property
    def is_moved(self) -> bool:
        """Whether batches cannot explain the distance of the rows from plain decoding's."""
        return is_moved(self.moved_by, self.batches_move, exact=self.exact_rows)

    @property
    def is_defect(self) -> bool:
        return self.is_moved or (self.difference is not None and self.difference.is_defect)


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer of plain decoding. `tokens` includes the token that ended it. `rows` are the rows of
    logits that the tokens were chosen from, float32[n_vocab] each; the key is the number of the answer's
    tokens before the row."""

    tokens: list[int]
    rows: dict[int, Logits]


class Comparison:
    """Compares speculative answers with plain ones. How far batches alone move rows is measured when rows
    have moved further than that was found to be before. `measure` does more for this than `batches_move`.
    """

    def __init__(
        self,
        loaded: Session,
        n_ctx: int,
        way: DraftingPlan,
        measure: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._loaded = loaded
        self._n_ctx = n_ctx
        self._way = way
        self._measure = measure
        self._by_batches = 0.0
        # True until batches alone move a row: the kernels may not compute all of a model, or its cache type.
        self._exact = loaded.target.has_equal_rows

    def result(
        self,
        number: int,
        prompt: Prompt,
        plain: PlainAnswer,
        watch: Watch,
        tally: Tally,
        events: Sequence[Event],
        bug: Bug | None = None,
        n_at_once: int = 1,
    ) -> GreedyResult:
        """Return the result of a prompt, from the events of its speculative answer."""
        loses_bonus = bug is not None and bug.loses_bonus
        found = list(tokens_told(events, loses_bonus=loses_bonus))
        expected = plain.tokens
        moved_by = max(watch.moved_by.values(), default=0.0)
        # The rows are further away than batches have moved rows so far: measure it for this prompt.
        if is_moved(moved_by, self._by_batches, exact=self._exact):
            here = batches_move(self._loaded, self._n_ctx, prompt.tokens, expected[:-1], plain.rows)
            self._by_batches = max(self._by_batches, here, self._measure())
            self._exact = self._exact and self._by_batches == 0.0
        return GreedyResult(
            prompt=number,
            n_tokens=len(expected),
            n_drafted=tally.n_drafted,
            n_accepted=tally.n_accepted,
            n_rows=len(watch.moved_by),
            moved_by=moved_by,
            batches_move=self._by_batches,
            difference=_difference(
                self._loaded,
                self._n_ctx,
                prompt.tokens,
                expected,
                found,
                watch,
                self._by_batches,
                exact=self._exact,
            ),
            exact_rows=self._exact,
            way=self._way.name,
            drafted_by=dict(drafted_by(events)),
            n_at_once=n_at_once,
        )


class Watch(Shaper):
    """A shaper that compares the rows of the speculative run with plain decoding's, while the text is
    the same, and records the target's choices."""

    def __init__(
        self,
        sampler: Sampler,
        state: TextState,
        plain: PlainAnswer,
    ) -> None:
        super().__init__(sampler, state)
        self._n_prompt = len(state.tokens)
        self._expected = plain.tokens
        self._rows = plain.rows
        #: By position in the answer: the distance of the row from plain decoding's, and the choice.
        self.moved_by: dict[int, float] = {}
        self.choices: dict[int, int] = {}
        #: The position and the row of the first choice that is not the expected one.
        self.turned: tuple[int, Logits] | None = None

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        found = super().distribution(logits, path)
        text = [*self._state.tokens[self._n_prompt :], *path]
        position = len(text)
        if position < len(self._expected) and text == self._expected[:position]:
            choice = self.choices[position] = found.mode
            if position in self._rows:
                self.moved_by[position] = movement(logits, self._rows[position])
            if self.turned is None and choice != self._expected[position]:
                self.turned = position, logits.copy()
        return found


def _difference(
    loaded: Session,
    n_ctx: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    watch: Watch,
    by_batches: float,
    *,
    exact: bool,
) -> Difference | None:
    if expected == found:
        return None
    position = next(
        (i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    if position == min(len(expected), len(found)):
        # One text continues where the other ends: no choice of a token explains that.
        return _of_length(loaded, position, expected, found)
    ours, theirs = expected[position], found[position]
    shaper = Shaper(loaded.settings.sampler, _text(loaded, prompt, expected[:position]))
    alone: Logits | None = None
    same_in_batches_of = None
    for size in drafting_batch_sizes(loaded):
        *_, last = (
            row.copy() for _, row in plain_rows(loaded, n_ctx, prompt, expected[:position], size)
        )
        if alone is None:
            alone = last
        by_batches = max(by_batches, movement(last, alone))
        if same_in_batches_of is None and shaper.distribution(last).mode == theirs:
            same_in_batches_of = size
    assert alone is not None, "a batch has one row at least"
    turned = watch.turned if watch.turned is not None and watch.turned[0] == position else None
    seen = alone if turned is None else turned[1]

    def choice(token: int) -> Choice:
        text = loaded.target.vocabulary.token_text(token)
        return Choice(token, text, float(alone[token]), float(seen[token]))

    return Difference(
        position=position,
        plain=choice(ours),
        speculative=choice(theirs),
        was_chosen=turned is not None and watch.choices[position] == theirs,
        gap=float(alone[ours]) - float(alone[theirs]),
        moved_by=movement(seen, alone) if turned is not None else watch.moved_by.get(position, 0.0),
        batches_move=by_batches,
        same_in_batches_of=same_in_batches_of,
        exact_rows=exact,
    )


def _of_length(
    loaded: Session, position: int, expected: Sequence[int], found: Sequence[int]
) -> Difference:
    def choice(tokens: Sequence[int]) -> Choice:
        if position == len(tokens):
            return Choice(-1, "", math.nan, math.nan)
        token = tokens[position]
        text = loaded.target.vocabulary.token_text(token)
        return Choice(token, text, math.nan, math.nan)

    return Difference(position, choice(expected), choice(found), False, math.inf, 0.0, 0.0, None)


def _text(loaded: Session, prompt: Sequence[int], answer: Iterable[int]) -> TextState:
    state = TextState(prompt, loaded.settings.grammar)
    for token in answer:
        state.commit(token)
    return state
