"""The part of a draft's output matrix that is computed: the rows of frequent tokens.

In a small draft with a large vocabulary, reading this matrix is most of a token's cost, and a draft
may miss rare tokens: the target checks it. (FR-Spec, Zhao et al., arXiv:2502.14856, shortens the
matrix; here the kernels leave rows out.) The logits of the other tokens are -infinity, so that the
draft's distribution is over the computed ones.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from specgen.llama.kernels.attached import Kernels, attached
from specgen.llama.vocabulary import LlamaVocabulary

#: Tokens with lower ids are taken to be frequent. Tokenizers assign low ids to frequent tokens: 94%
#: of the tokens of answers in English and code are below this one.
N_FREQUENT = 32_768
#: The maximum number of other tokens that are computed because they occurred. Of more, the oldest
#: are forgotten.
MAX_SEEN = 4096


class RowLimit:
    """A choice of a matrix's rows. In a `with` block, only these rows are computed.

    It applies to what the calling thread decodes. The outputs of other rows are -infinity. Rows are
    computed in groups, so a few neighbours of the chosen rows are computed, too.

    Args:
        kernels: The kernels.
        n_rows: The limit applies to matrices with this number of rows.
        rows: The chosen rows, int32[n], ascending.
    """

    def __init__(
        self,
        kernels: Kernels,
        n_rows: int,
        rows: NDArray[np.int32],
    ) -> None:
        self._native = kernels.native
        self._handle = self._native.new_row_limit(n_rows, rows.ctypes.data, len(rows))

    def __enter__(self) -> None:
        self._native.set_row_limit(self._handle)

    def __exit__(self, *_: object) -> None:
        self._native.set_row_limit(None)

    def close(self) -> None:
        """Free it."""
        self._native.delete_row_limit(self._handle)


class FrequentRows:
    """The rows of the first `N_FREQUENT` tokens, of the end tokens, and of tokens that occurred."""

    def __init__(
        self,
        vocabulary: LlamaVocabulary,
        kernels: Kernels,
    ) -> None:
        self._n_vocab = vocabulary.n_tokens
        self._kernels = kernels
        # Not the vocabulary's `end_tokens`: the others end few texts, and finding them takes a
        # search through all tokens.
        special = vocabulary.special_tokens()
        end_tokens = (special["eos"], special["eot"])
        self._rare_end_tokens = [token for token in end_tokens if token >= N_FREQUENT]
        #: The rare tokens that occurred, oldest first: a dict serves as an ordered set.
        self._seen: dict[int, None] = {}
        self._limit: RowLimit | None = None

    @classmethod
    def of(cls, vocabulary: LlamaVocabulary) -> FrequentRows | None:
        """Return the rows of a vocabulary; None if the kernels would leave out few, or none."""
        kernels = attached()
        if kernels is None or not kernels.computes_products:
            return None
        # In smaller vocabularies too few rows would be left out.
        if vocabulary.n_tokens < 2 * N_FREQUENT:
            return None
        return cls(vocabulary, kernels)

    def limit(self, tokens: Collection[int]) -> RowLimit:
        """Return the limit for a decode of some tokens, which are added to those that occurred.

        It is valid until the next call.
        """
        new = [token for token in tokens if token >= N_FREQUENT and token not in self._seen]
        if not new and self._limit is not None:
            return self._limit
        self._remember(new)
        self.close()
        rare_tokens = sorted({*self._rare_end_tokens, *self._seen})
        rows = np.concatenate([np.arange(N_FREQUENT), rare_tokens]).astype(np.int32)
        self._limit = RowLimit(self._kernels, self._n_vocab, rows)
        return self._limit

    def _remember(self, tokens: Collection[int]) -> None:
        self._seen.update(dict.fromkeys(tokens))
        n_excess = max(0, len(self._seen) - MAX_SEEN)
        for token in list(self._seen)[:n_excess]:
            del self._seen[token]

    def close(self) -> None:
        """Free the limit."""
        if self._limit is not None:
            self._limit.close()
            self._limit = None
