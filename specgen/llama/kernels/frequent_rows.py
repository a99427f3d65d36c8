"""The part of a draft's output matrix that is computed: the rows of frequent tokens.

In a small draft with a large vocabulary, reading this matrix is most of a token's cost, and the
target checks the draft anyway. (FR-Spec, Zhao et al., arXiv:2502.14856, shortens the matrix; here
the kernels leave rows out.) The logits of the others are -infinity: the draft's distribution is
that over the rows that are computed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specgen.llama.kernels.attached import Kernels, attached
from specgen.llama.vocabulary import LlamaVocabulary

if TYPE_CHECKING:
    from specgen.llama.context import LlamaBackend

#: Tokenizers give low ids to frequent tokens: 0.94 of those of answers in English and code are
#: below.
N_FREQUENT = 32_768
#: The most other tokens that are computed because they occurred; with more, the oldest are
#: forgotten.
MOST_SEEN = 4096


class RowLimit:
    """Which rows of a matrix with `n_rows` rows are computed, increasing; the other outputs are
    -infinity. Rows are computed in groups, so a few others are too. As a context manager it applies
    to what the calling thread decodes.
    """

    def __init__(self, kernels: Kernels, n_rows: int, rows: NDArray[np.int32]) -> None:
        self._native = kernels.native
        self._handle = self._native.new_row_limit(n_rows, rows.ctypes.data, len(rows))

    def __enter__(self) -> None:
        self._native.set_row_limit(self._handle)

    def __exit__(self, *_: object) -> None:
        self._native.set_row_limit(None)

    def close(self) -> None:
        self._native.delete_row_limit(self._handle)


class FrequentRows:
    """The rows of the first `N_FREQUENT` tokens, of those that end a text, and of those that
    occurred.
    """

    def __init__(self, vocabulary: LlamaVocabulary, kernels: Kernels) -> None:
        self._n_vocab = vocabulary.n_tokens
        self._kernels = kernels
        # The others of `end_tokens` end few texts, and finding them takes a look at the whole
        # vocabulary.
        named = vocabulary.special_tokens()
        self._ends = [token for token in (named["eos"], named["eot"]) if token >= N_FREQUENT]
        #: In the order in which they occurred.
        self._seen: dict[int, None] = {}
        self._limit: RowLimit | None = None

    def limit(self, tokens: Collection[int]) -> RowLimit:
        """Return the limit for a decode of `tokens`, which count as occurred. It is valid until the
        next call.
        """
        rare = [token for token in tokens if token >= N_FREQUENT and token not in self._seen]
        if rare:
            self._seen.update(dict.fromkeys(rare))
            for token in list(self._seen)[: max(0, len(self._seen) - MOST_SEEN)]:
                del self._seen[token]
        if rare or self._limit is None:
            others = sorted({*self._ends, *self._seen})
            rows = np.concatenate([np.arange(N_FREQUENT), others]).astype(np.int32)
            self.close()
            self._limit = RowLimit(self._kernels, self._n_vocab, rows)
        return self._limit

    def close(self) -> None:
        if self._limit is not None:
            self._limit.close()
            self._limit = None


def compute_frequent_tokens(backend: LlamaBackend) -> None:
    """Compute the logits of frequent tokens only from now on, where specgen's kernels can and it
    saves much.
    """
    kernels, vocabulary = attached(), backend.vocabulary
    is_large = vocabulary.n_tokens >= 2 * N_FREQUENT
    if kernels is not None and kernels.computes_products and is_large:
        backend.computed_rows = FrequentRows(vocabulary, kernels)
