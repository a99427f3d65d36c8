"""Indexes for prompt lookup: they find where the end of a text occurred before.

`TextIndex` searches a text that grows token by token, `GrowingCorpus` finished texts to which
others are added, and `SuffixArray` texts that do not change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import (
    Callable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specgen.drafters.stored_texts import (
    SEPARATOR,
    IntArray,
    join_texts,
    load_arrays,
    save_arrays,
)
from specgen.text.overlap import common_prefix_length

#: The default of `made_of`: no numbers identify the texts.
_NOTHING: IntArray = np.empty(0, np.int32)
#: The longest match that is searched for, in tokens.
MAX_MATCH = 32
#: The maximum number of occurrences of a match that are considered.
MAX_PLACES = 100
#: The maximum number of occurrences of an n-gram in a growing text, from the latest on, that are
#: examined for a longer match.
_MAX_SEARCHED = 1024
#: The lengths of n-grams that are indexed in addition to the shortest match.
_MORE_N_GRAMS = (4, 2)
#: The token that followed most recently is preferred, unless another one followed at least this
#: many times as often.
_CLEARLY_MORE_OFTEN = 3


class Match(NamedTuple):
    """The last tokens of a text, found in an index."""

    #: The number of last tokens that match.
    length: int
    #: The indices of the tokens that follow the occurrences. There is at least one.
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Followers:
    """The tokens that follow the occurrences of a match."""

    #: The number of times that each token follows.
    counts: dict[int, int]
    #: The index of the last occurrence at which each token follows.
    latest: dict[int, int]

    def ranked(self) -> list[int]:
        """Return the tokens, the most promising first.

        The most frequent tokens come first, with one exception: the token that followed most
        recently is put first, unless another one is clearly more frequent, because texts tend to
        repeat what they said recently.
        """
        counts = self.counts
        latest = self.latest
        tokens = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
        last = max(latest, key=latest.__getitem__)
        if counts[tokens[0]] < _CLEARLY_MORE_OFTEN * counts[last]:
            tokens.remove(last)
            tokens.insert(0, last)
        return tokens


class SuffixIndex(ABC):
    """Tokens in which the longest occurrences of the end of a text can be found."""

    def __init__(self, tokens: Sequence[int]) -> None:
        #: The tokens as a list or a memoryview, whose items are read faster than an array's.
        self._token_at = tokens

    @abstractmethod
    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending`; None if there is none.

        Only occurrences that are followed by a token count.
        """

    def extend_match(
        self,
        match: Match | None,
        ending: Sequence[int],
    ) -> Match | None:
        """Return the longest match of `ending`, faster than `longest`.

        Args:
            match: The longest match of `ending` without its last token; None if there is none.
            ending: The last tokens of a text.
        """
        # If the new token follows some of the occurrences, these are the occurrences of the longer
        # ending, and no longer match can exist.
        if match is not None:
            places = tuple(
                place + 1
                for place in match.places
                if self._token_at[place] == ending[-1] and self._has_token(place + 1)
            )
            if places:
                return Match(match.length + 1, places)
        return self.longest(ending)

    def followers(self, match: Match) -> Followers:
        """Count the tokens that follow a match."""
        counts: dict[int, int] = {}
        latest: dict[int, int] = {}
        for place in match.places:
            token = self._token_at[place]
            counts[token] = counts.get(token, 0) + 1
            latest[token] = max(place, latest.get(token, place))
        return Followers(counts, latest)

    def _has_token(self, place: int) -> bool:
        """Return whether there is a token at an index, and not the end of a text."""
        return place < len(self._token_at) and self._token_at[place] != SEPARATOR


class TextIndex(SuffixIndex):
    """Finds endings of at least `min_match` tokens in a text that grows and can be shortened."""

    def __init__(self, min_match: int) -> None:
        self._tokens: list[int] = []
        super().__init__(self._tokens)
        #: The lengths of the n-grams that are indexed, the longest first. A match is searched for
        #: among the occurrences of the longest n-gram that there is: these are few.
        self._n_gram_lengths = [n for n in _MORE_N_GRAMS if n > min_match] + [min_match]
        #: For each of these lengths, the indices of the tokens that follow each n-gram, ascending.
        self._places: list[defaultdict[tuple[int, ...], list[int]]] = [
            defaultdict(list) for _ in self._n_gram_lengths
        ]

    def __len__(self) -> int:
        return len(self._tokens)

    def last(self, n_tokens: int) -> list[int]:
        """Return the last `n_tokens` tokens of the text, or all if it is shorter."""
        return self._tokens[max(0, len(self._tokens) - n_tokens) :]

    def follow(self, text: Sequence[int]) -> None:
        """Add the tokens of `text` that are new."""
        for token in text[len(self._tokens) :]:
            self.add(token)

    def add(self, token: int) -> None:
        """Add the next token of the text."""
        tokens = self._tokens
        n_tokens = len(tokens)
        for n, places in zip(self._n_gram_lengths, self._places, strict=True):
            if n_tokens >= n:
                places[tuple(tokens[-n:])].append(n_tokens)
        tokens.append(token)

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` tokens."""
        tokens = self._tokens
        while len(tokens) > max(0, n_tokens):
            tokens.pop()
            for n, places in zip(self._n_gram_lengths, self._places, strict=True):
                if len(tokens) >= n:
                    places[tuple(tokens[-n:])].pop()

    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match, starting from the occurrences of the longest known n-gram."""
        max_length = min(len(ending), MAX_MATCH)
        for n, places in zip(self._n_gram_lengths, self._places, strict=True):
            if n <= max_length:
                candidates = places.get(tuple(ending[-n:]))
                if candidates:
                    return self._longest_of(candidates, n, ending, max_length)
                max_length = n - 1  # no n-gram of this length matches
        return None

    def _longest_of(
        self,
        candidates: Sequence[int],
        length: int,
        ending: Sequence[int],
        max_length: int,
    ) -> Match:
        """Return the longest match among occurrences of the last `length` tokens.

        Args:
            candidates: The indices of the tokens that follow these occurrences; at least one.
            length: The number of last tokens that are known to match.
            ending: The last tokens of a text.
            max_length: The maximum length of a match.
        """
        tokens = self._tokens
        places: list[int] = []
        for place in reversed(candidates[-_MAX_SEARCHED:]):
            if tokens[max(0, place - length) : place] != ending[-length:]:
                continue  # shorter than the longest match so far
            # It is at least as long. Compare further tokens, backwards.
            n_equal = length
            n_comparable = min(place, max_length)
            while n_equal < n_comparable and tokens[place - 1 - n_equal] == ending[-1 - n_equal]:
                n_equal += 1
            if n_equal > length:
                length = n_equal
                places.clear()
            if len(places) < MAX_PLACES:
                places.append(place)
            elif length == max_length:  # there are enough, and none can be longer
                break
        return Match(length, tuple(places))


class GrowingCorpus(TextIndex):
    """Finds endings in finished texts, to which others are added. It cannot be rewound.

    No match extends from one text into the next.
    """

    def __init__(self) -> None:
        super().__init__(min_match=1)

    def add_text(self, text: Sequence[int]) -> None:
        """Add a text as the last one."""
        for token in text:
            self.add(token)
        # Not by `add`, which would index the separator as a token that follows the end of the text.
        self._tokens.append(SEPARATOR)


class SuffixArray(SuffixIndex):
    """Finds endings in a corpus of texts by binary search.

    This is a suffix array of the reversed texts (Manber and Myers, "Suffix arrays", 1990): all
    prefixes of the texts, sorted by their tokens from the last to the first. So all prefixes that
    end with the same tokens are neighbours. Those of the text a b a c, for example, are in the
    order a b a, a, a b, a b a c. No match extends from one text into the next.

    Args:
        tokens: int32[n]: the texts, each followed by a separator.
        order: int32[n]: the sorted prefixes. Each is given by the index of its last token, counted
            from the end of `tokens`. Only the last `MAX_MATCH` tokens of a prefix are compared.
    """

    def __init__(self, tokens: IntArray, order: IntArray) -> None:
        super().__init__(np.ascontiguousarray(tokens).data)
        self.tokens = tokens
        self._order = order
        #: `order` as a memoryview, whose items are read faster.
        self._place_at = np.ascontiguousarray(order).data
        self._backwards = _backwards(tokens)

    @classmethod
    def build(cls, texts: Iterable[Sequence[int] | IntArray]) -> SuffixArray:
        """Make a suffix array of texts.

        Among equally frequent followers, the one in the last text wins, so put the best text last.
        """
        tokens = join_texts(texts)
        # Each row is the bytes of `MAX_MATCH` tokens, overlapping its neighbours by all but one
        # token. With the highest byte of each token first, rows compare as the tokens do.
        rows = np.ndarray(len(tokens), f"S{4 * MAX_MATCH}", _backwards(tokens), strides=(4,))
        return cls(tokens, rows.argsort(kind="stable").astype(np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match by binary search."""
        wanted = tuple(ending[: -MAX_MATCH - 1 : -1])  # the last tokens, from the last one back
        if not wanted or not len(self):
            return None
        # The longest occurrences may all be at the end of a text, where no token follows.
        for length in range(self._longest_length(wanted), 0, -1):
            places = self._places_after(wanted[:length])
            if places:
                return Match(length, places)
        return None

    def _longest_length(self, wanted: tuple[int, ...]) -> int:
        """Return the length of the longest prefix of `wanted` that occurs in the reversed texts."""
        key = self._key(len(wanted))
        position = bisect_left(self._place_at, _as_bytes(wanted), key=key)
        # The longest match is next to where the wanted tokens themselves would be inserted.
        neighbours = self._place_at[max(0, position - 1) : position + 1].tolist()
        backwards = self.tokens[::-1]
        longest = 0
        for place in neighbours:
            candidate = backwards[place : place + len(wanted)].tolist()
            longest = max(longest, common_prefix_length(wanted, candidate))
        return longest

    def _places_after(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the indices of the tokens that follow the occurrences of an ending.

        If there are more than `MAX_PLACES`, it is an even sample of them.

        Args:
            wanted: The ending, from its last token back.
        """
        key = self._key(len(wanted))
        data = _as_bytes(wanted)
        first = bisect_left(self._place_at, data, key=key)
        end = bisect_right(self._place_at, data, lo=first, key=key)
        step = max(1, math.ceil((end - first) / MAX_PLACES))
        places: list[int] = []
        for backward_index in self._place_at[first:end:step].tolist():
            # The index after the occurrence; there is one, since the last entry is a separator.
            place = len(self) - backward_index
            if self._token_at[place] != SEPARATOR:
                places.append(place)
        return tuple(places)

    def _key(self, n_tokens: int) -> Callable[[int], bytes]:
        """Return the sort key of `order`, limited to `n_tokens` tokens.

        The key of an index is the bytes of the reversed tokens from there on.
        """
        data = self._backwards
        n_bytes = 4 * n_tokens
        return lambda place: data[4 * place : 4 * place + n_bytes]

    def save(self, path: Path, made_of: IntArray = _NOTHING) -> None:
        """Write the array to a file.

        Args:
            path: The file, which is replaced.
            made_of: int32[n], any numbers that identify the texts, for `load`.

        Raises:
            OSError: If the file cannot be written.
        """
        save_arrays(path, tokens=self.tokens, places=self._order, made_of=made_of)

    @classmethod
    def load(
        cls,
        path: Path,
        made_of: IntArray = _NOTHING,
    ) -> SuffixArray | None:
        """Load a saved array; None if the file is missing, damaged, or made of other texts.

        Args:
            path: The file.
            made_of: The numbers that identify the texts, as in `save`.
        """
        arrays = load_arrays(path, "tokens", "places", "made_of")
        if arrays is None:
            return None
        tokens, order, saved_made_of = arrays  # the order is called "places" in the file
        if not np.array_equal(saved_made_of, made_of):
            return None
        return cls(tokens, order)


def _as_bytes(tokens: Sequence[int] | IntArray) -> bytes:
    """Return tokens as bytes, the highest byte first, so that bytes compare as the tokens do."""
    return np.asarray(tokens).astype(">u4").tobytes()


def _backwards(tokens: IntArray) -> bytes:
    """Return the bytes of the reversed tokens, padded with separators for the last sort keys."""
    return _as_bytes(tokens[::-1]) + _as_bytes([SEPARATOR] * MAX_MATCH)
