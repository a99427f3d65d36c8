"""The target's exact distribution over the next tokens."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from specgen.measure.proof.memo_backend import MemoBackend
from specgen.measure.proof.rows import decode
from specgen.measure.proof.statistics import Cells
from specgen.method.distribution import Distribution
from specgen.system.arrays import Logits
from specgen.text.text_state import Shaper, TextState

#: Prefixes that are less likely than this are not extended, because each extension costs a decode.
_MIN_PREFIX = 0.004
_MAX_PREFIXES = 300
#: Outcomes that are less likely than this share a cell with others of the same prefix.
_MIN_OUTCOME = 1e-4
#: Stands in an outcome for any of the tokens that share a cell.
_ANY = -1


class Exact:
    """The target's joint distribution of the next `depth` tokens after a text.

    Prefixes are extended in the order of their probability. A prefix that is too unlikely is one cell.
    After each prefix, all tokens that are too unlikely share one cell: if no sampler truncates the
    vocabulary, there would otherwise be millions of cells.
    """

    def __init__(self, target: MemoBackend, shaper: Shaper, state: TextState, depth: int) -> None:
        self._target = target
        self._shaper = shaper
        self._state = state
        self._depth = depth
        self._text = list(state.tokens)
        self._n_followed = 0
        #: For each prefix a bit for each token: whether it is in the shared cell of unlikely tokens.
        self._unlikely: dict[tuple[int, ...], npt.NDArray[np.uint8]] = {}

    def cells(self) -> Cells:
        """Compute the outcomes and their probabilities."""
        is_end = self._target.vocabulary.is_end
        found: dict[tuple[int, ...], float] = {}
        open_prefixes: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while open_prefixes:
            negative, prefix = heapq.heappop(open_prefixes)
            prob = -negative
            is_whole = len(prefix) == self._depth or (prefix and is_end(prefix[-1]))
            too_many = prob < _MIN_PREFIX or self._n_followed >= _MAX_PREFIXES
            if is_whole or (prefix and too_many):
                found[prefix] = prob
                continue
            step = self._after(prefix)
            likely = step.probs * prob >= _MIN_OUTCOME
            for token, p in zip(
                step.token_ids[likely].tolist(), step.probs[likely].tolist(), strict=True
            ):
                heapq.heappush(open_prefixes, (-prob * p, (*prefix, token)))
            if not likely.all():
                unlikely = np.zeros(self._target.n_vocab, np.bool_)
                unlikely[step.token_ids[~likely]] = True
                self._unlikely[prefix] = np.packbits(unlikely)
                found[(*prefix, _ANY)] = prob * float(step.probs[~likely].sum())
        return Cells.of(found)

    def cell(self, outcome: tuple[int, ...]) -> tuple[int, ...]:
        """Return a drawn outcome in the form that `cells` uses: an unlikely token becomes `_ANY`."""
        for length, token in enumerate(outcome):
            bits = self._unlikely.get(outcome[:length])
            if bits is not None and bits[token >> 3] >> (7 - (token & 7)) & 1:
                return (*outcome[:length], _ANY)
        return outcome

    def _after(self, prefix: tuple[int, ...]) -> Distribution:
        forced = self._state.forced(prefix)
        if forced is not None:  # no row is needed
            return Distribution.certain(forced)
        self._n_followed += 1
        return self._shaper.distribution(self.row(prefix), prefix)

    def row(self, prefix: tuple[int, ...]) -> Logits:
        """Return the target's logits after a prefix, float32[n_vocab]."""
        text = [*self._text, *prefix]
        known = self._target.remembered(text)
        if known is not None:
            return known.copy()
        self._target.remove(0, len(self._text) - 1)
        n_cached = self._target.length(0)
        ((_, row),) = decode(self._target, text[n_cached:], n_cached, 1)
        return row
