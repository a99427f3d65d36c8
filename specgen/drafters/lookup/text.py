"""Repetitions in a text that grows: where each n-gram of its tokens occurred."""

from __future__ import annotations

from collections import defaultdict

from specgen.drafters.lookup.array import MAX_MATCH, MAX_PLACES, Match, Matches

#: The most occurrences of an n-gram among which the longest match is looked for, the latest.
_MOST_SEARCHED = 1024


class TextIndex(Matches):
    """A text to which tokens are added, and from whose end they are taken back. It finds endings of at least
    `min_match` tokens."""

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        super().__init__(self._tokens)
        #: By the n-grams of `min_match` tokens: the indices of the tokens that follow them, in order.
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        """Return the number of tokens in the text."""
        return len(self._tokens)

    def extend(self, token: int) -> None:
        """Add a token to the end of the text."""
        self._tokens.append(token)
        if len(self._tokens) > self._min_match:
            self._places[self._before_last()].append(len(self._tokens) - 1)

    def rewind(self, n_tokens: int) -> None:
        """Take back all of the text's tokens but the first `n_tokens`."""
        while len(self._tokens) > max(0, n_tokens):
            if len(self._tokens) > self._min_match:
                self._places[self._before_last()].pop()
            self._tokens.pop()

    def longest(self, ending: list[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending` that is followed by something in the text; of
        many occurrences the latest."""
        tokens, length, n_most = self._tokens, self._min_match, min(len(ending), MAX_MATCH)
        places: list[int] = []
        for at in reversed(self._places.get(tuple(ending[-length:]), [])[-_MOST_SEARCHED:]):
            if at < length or tokens[at - length : at] != ending[-length:]:
                continue
            n_before = length
            while length < min(at, n_most) and tokens[at - 1 - length] == ending[-1 - length]:
                length += 1
            if length > n_before:
                places.clear()
            if len(places) < MAX_PLACES:
                places.append(at)
            elif length == n_most:
                break
        return Match(length, tuple(places)) if places else None

    def _before_last(self) -> tuple[int, ...]:
        return tuple(self._tokens[-1 - self._min_match : -1])
