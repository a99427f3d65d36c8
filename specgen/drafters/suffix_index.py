"""Indexes that find where the end of a text occurred before, for prompt lookup.

`TextIndex` searches a text that grows token by token, and `SuffixArray` a corpus that stays.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
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
from typing import (
    Final,
    NamedTuple,
    TypeAlias,
)

import numpy as np
import numpy.typing as npt

from specgen.system.files import replace_bytes
from specgen.text.overlap import common_prefix_length

#: int32[n]: token ids, or indices of tokens.
IntArray: TypeAlias = npt.NDArray[np.int32]
_NOTHING: IntArray = np.empty(0, np.int32)
#: The longest match that is searched for, in tokens.
MAX_MATCH = 32
#: The most occurrences of a match that are considered.
MAX_PLACES = 100
#: The most occurrences of an n-gram in a growing text, latest first, that are tried for a longer
#: match.
_MOST_SEARCHED = 1024
#: Follows each text of a corpus. It is not a token.
SEPARATOR = -1
#: The token that followed last is preferred, unless another one followed this many times as often.
_CLEARLY_OFTENER = 3
#: The errors that reading a damaged archive of arrays raises.
_DAMAGE: Final = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


class Match(NamedTuple):
    """The last tokens of a text, found in an index."""

    #: How many of the last tokens match.
    length: int
    #: The indices of the tokens that follow the occurrences; at least one.
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Followers:
    """The tokens that follow the occurrences of a match."""

    #: How often each token follows.
    counts: dict[int, int]
    #: The last place at which each token follows.
    latest: dict[int, int]

    def ranked(self) -> list[int]:
        """Return the tokens, the most frequent first.

        But the one that followed last comes first, unless another one is clearly more frequent:
        texts tend to repeat what they said recently.
        """
        counts = self.counts
        latest = self.latest
        tokens = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
        last = max(latest, key=latest.__getitem__)
        if counts[tokens[0]] < _CLEARLY_OFTENER * counts[last]:
            tokens.remove(last)
            tokens.insert(0, last)
        return tokens


class SuffixIndex(ABC):
    """Tokens in which the longest occurrences of the end of a text can be found."""

    def __init__(self, tokens: Sequence[int]) -> None:
        #: The tokens as a list or memoryview, whose items are read faster than those of an array.
        self._token_at = tokens

    @abstractmethod
    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending` that is followed by a token."""

    def extend_match(self, match: Match | None, ending: Sequence[int]) -> Match | None:
        """Return the longest match of `ending`, given `match`, that of all but its last token."""
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
        return place < len(self._token_at) and self._token_at[place] != SEPARATOR


class TextIndex(SuffixIndex):
    """Finds endings of at least `min_match` tokens in a text that grows and is taken back."""

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        super().__init__(self._tokens)
        #: The indices of the tokens that follow each n-gram of `min_match` tokens, in order.
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def follow(self, text: Sequence[int]) -> None:
        """Add the tokens of `text` that are new."""
        tokens = self._tokens
        n = self._min_match
        for token in text[len(tokens) :]:
            if len(tokens) >= n:
                self._places[tuple(tokens[-n:])].append(len(tokens))
            tokens.append(token)

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` tokens."""
        tokens = self._tokens
        n = self._min_match
        while len(tokens) > max(0, n_tokens):
            tokens.pop()
            if len(tokens) >= n:
                self._places[tuple(tokens[-n:])].pop()

    def longest(self, ending: Sequence[int]) -> Match | None:
        tokens = self._tokens
        max_length = min(len(ending), MAX_MATCH)
        length = self._min_match
        places: list[int] = []
        candidates = self._places.get(tuple(ending[-length:]), [])
        for place in reversed(candidates[-_MOST_SEARCHED:]):
            if tokens[max(0, place - length) : place] != ending[-length:]:
                continue  # shorter than the longest match so far
            n_equal = length
            n_comparable = min(place, max_length)
            while n_equal < n_comparable and tokens[place - 1 - n_equal] == ending[-1 - n_equal]:
                n_equal += 1
            if n_equal > length:
                length = n_equal
                places.clear()
            if len(places) < MAX_PLACES:
                places.append(place)
            elif length == max_length:
                break
        return Match(length, tuple(places)) if places else None


class SuffixArray(SuffixIndex):
    """Finds endings in a corpus of texts by binary search.

    It holds the prefixes of the texts, one for each token, sorted by their last tokens, the last
    one first (Manber and Myers, "Suffix arrays", 1990). So all prefixes that end with the same
    tokens are neighbours. Those of the text a b a c, for example, are in the order a b a, a, a b,
    a b a c. No match runs from one text into the next.

    Args:
        tokens: int32[n], the texts, each followed by a separator.
        order: int32[n], the indices of the tokens, counted from the end of `tokens`, sorted by the
            `MAX_MATCH` tokens from there backwards. Each stands for the prefix that ends there.
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
        """Sort these texts.

        Among equally frequent followers the last one wins, so put the best text last.
        """
        tokens = join_texts(texts)
        # As bytes, the highest first, slices compare as the tokens do.
        rows = np.ndarray(len(tokens), f"S{4 * MAX_MATCH}", _backwards(tokens), strides=(4,))
        return cls(tokens, rows.argsort(kind="stable").astype(np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def longest(self, ending: Sequence[int]) -> Match | None:
        wanted = tuple(ending[: -MAX_MATCH - 1 : -1])  # the last tokens backwards
        if not wanted or not len(self):
            return None
        for length in range(self._longest_length(wanted), 0, -1):
            places = self._places_after(wanted[:length])
            if places:
                return Match(length, places)
        return None

    def _longest_length(self, wanted: tuple[int, ...]) -> int:
        """Return how many of the tokens `wanted`, from the first one on, occur in this order."""
        key = self._key(len(wanted))
        position = bisect_left(self._place_at, _as_bytes(wanted), key=key)
        # The longest match is next to where the wanted tokens themselves would be inserted.
        neighbours = self._place_at[max(0, position - 1) : position + 1].tolist()
        backwards = self.tokens[::-1]
        longest = 0
        for place in neighbours:
            found = backwards[place : place + len(wanted)].tolist()
            longest = max(longest, common_prefix_length(wanted, found))
        return longest

    def _places_after(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the indices of the tokens after the occurrences; of many, an even sample."""
        key = self._key(len(wanted))
        data = _as_bytes(wanted)
        first = bisect_left(self._place_at, data, key=key)
        end = bisect_right(self._place_at, data, lo=first, key=key)
        step = max(1, math.ceil((end - first) / MAX_PLACES))
        places: list[int] = []
        for backward_index in self._place_at[first:end:step].tolist():
            place = len(self) - backward_index  # there is one: the last entry is a separator
            if self._token_at[place] != SEPARATOR:
                places.append(place)
        return tuple(places)

    def _key(self, n_tokens: int) -> Callable[[int], bytes]:
        """Return the function that `order` is sorted by: the `n_tokens` tokens from a place on."""
        data = self._backwards
        n_bytes = 4 * n_tokens
        return lambda place: data[4 * place : 4 * place + n_bytes]

    def save(self, path: Path, made_of: IntArray = _NOTHING) -> None:
        """Write the array to a file; `made_of` identifies the texts. Raise `OSError`."""
        save_arrays(path, tokens=self.tokens, places=self._order, made_of=made_of)

    @classmethod
    def load(cls, path: Path, made_of: IntArray = _NOTHING) -> SuffixArray | None:
        """Load a saved array; None if the file is missing, damaged, or made of other texts."""
        found = load_arrays(path, "tokens", "places", "made_of")
        if found is None:
            return None
        tokens, order, found_made_of = found
        if not np.array_equal(found_made_of, made_of):
            return None
        return cls(tokens, order)


def _as_bytes(tokens: Sequence[int] | IntArray) -> bytes:
    return np.asarray(tokens).astype(">u4").tobytes()


def _backwards(tokens: IntArray) -> bytes:
    """Return the tokens from the last to the first, and separators for keys that end beyond it."""
    return _as_bytes(tokens[::-1]) + _as_bytes([SEPARATOR] * MAX_MATCH)


def join_texts(texts: Iterable[Sequence[int] | IntArray]) -> IntArray:
    """Join texts to int32[n], a separator after each."""
    parts = [np.array([*text, SEPARATOR], np.int32) for text in texts if len(text)]
    return np.concatenate(parts) if parts else _NOTHING


def split_texts(tokens: IntArray) -> list[IntArray]:
    """Return the texts that `join_texts` joined."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    return [text[:-1] for text in np.split(tokens, ends + 1)[:-1]]


def save_arrays(path: Path, **arrays: IntArray) -> None:
    """Write arrays to a file, replacing it as a whole. Raise `OSError`."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    replace_bytes(path, file.getvalue())


def load_arrays(path: Path, *names: str) -> list[IntArray] | None:
    """Read the named arrays, int32[n] each, from a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return [file[name] for name in names]
    except _DAMAGE:
        return None
