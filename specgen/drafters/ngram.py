"""Prompt lookup: what followed the last time that these tokens stood here.

(Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al., arXiv:2304.04487.)
"""

from __future__ import annotations

from collections.abc import Sequence

from specgen.draft import NO_DRAFT, Draft
from specgen.policy import Policy, RoundReport
from specgen.tables import FREE, Price


class NgramDrafter:
    """Drafts the continuation of the longest, then latest, earlier occurrence of the text's
    last tokens.

    Matches of `ngram_max` down to `ngram_min` tokens are looked for. An index from n-grams to
    where they were last followed by something is kept as the text grows: a new token costs
    one entry per length and a look-up one probe per length, whatever the text's length.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        if not 1 <= ngram_min <= ngram_max:
            raise ValueError(f"n-grams of {ngram_min} to {ngram_max} tokens")
        self._sizes = range(ngram_min, ngram_max + 1)
        #: From an n-gram to the index of the token that followed it last.
        self._followers: dict[tuple[int, ...], int] = {}
        #: What each entry replaced, oldest first, for going back: the index of the token that
        #: was entered, the n-gram, and the follower that it had before.
        self._replaced: list[tuple[int, tuple[int, ...], int | None]] = []
        self._n_indexed = 0

    @property
    def name(self) -> str:
        return "ngram"

    @property
    def model_s(self) -> float:
        return 0.0

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(self, context: Sequence[int], n_max: int, policy: Policy) -> Draft:
        self._index(context)
        start = self._find(context)
        if start is None:
            return NO_DRAFT
        tokens = list(context[start : start + n_max])
        # Where the match reaches the text's end, the text repeats itself with the period
        # from there to the match: go on with what was just drafted.
        period = len(context) - start
        while len(tokens) < n_max:
            tokens.append(tokens[len(tokens) - period])
        return Draft.chain(tokens, self.name)

    def observe(self, report: RoundReport) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        while self._replaced and self._replaced[-1][0] >= n_tokens:
            _, ngram, before = self._replaced.pop()
            if before is None:
                del self._followers[ngram]
            else:
                self._followers[ngram] = before
        self._n_indexed = min(self._n_indexed, n_tokens)

    def close(self) -> None:
        self._followers.clear()
        self._replaced.clear()

    def _index(self, context: Sequence[int]) -> None:
        """Enter the n-grams that tokens since the last call follow."""
        for end in range(max(1, self._n_indexed), len(context)):
            for size in self._sizes:
                if size > end:
                    break
                ngram = tuple(context[end - size : end])
                self._replaced.append((end, ngram, self._followers.get(ngram)))
                self._followers[ngram] = end
        self._n_indexed = len(context)

    def _find(self, context: Sequence[int]) -> int | None:
        for size in reversed(self._sizes):
            if size <= len(context):
                follower = self._followers.get(tuple(context[-size:]))
                if follower is not None:
                    return follower
        return None
