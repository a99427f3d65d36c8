"""A suffix array: finds the ending of a text in other texts, which do not change."""

from __future__ import annotations

import io
import zipfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.system.files import replace_bytes

#: int32[n]: token ids, or positions.
IntArray: TypeAlias = npt.NDArray[np.int32]

#: The longest match that is looked for, in tokens; a power of two.
MAX_MATCH: Final = 64
#: The most occurrences of a match that are looked at, evenly spread.
MAX_PLACES: Final = 100
#: The errors that reading a damaged archive of arrays raises.
_DAMAGE: Final = (
    *(OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
#: Stands behind each text; no token.
_SEPARATOR: Final = -1


@dataclass(frozen=True, slots=True)
class Match:
    """An ending of `length` tokens that occurs in the texts. `places` are the indices of the tokens
    that follow it, one for each occurrence, in no particular order; there is at least one."""

    length: int
    places: tuple[int, ...]


class Matches(ABC):
    """Tokens, and the matches of endings in them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._token_at = tokens

    def advance(self, match: Match, token: int) -> Match | None:
        """Return the match extended by `token`, which is the longest match of the extended ending; None if
        there is none."""
        tokens = self._token_at
        places = tuple(
            place + 1
            for place in match.places
            if tokens[place] == token
            and place + 1 < len(tokens)
            and tokens[place + 1] != _SEPARATOR
        )
        return Match(match.length + 1, places) if places else None

    @abstractmethod
    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending` that is followed by something; None if
        there is none."""

    def longer(self, match: Match | None, ending: Sequence[int]) -> Match | None:
        """Return the longest match of `ending`; `match` is that of all but its last token."""
        advanced = self.advance(match, ending[-1]) if match is not None else None
        return advanced or self.longest(ending)

    def followers(self, match: Match) -> dict[int, tuple[int, int]]:
        """Return the tokens that follow a match, each with its number of occurrences and the position of
        the last one."""
        followers: dict[int, tuple[int, int]] = {}
        for place in match.places:
            token = self._token_at[place]
            count, latest = followers.get(token, (0, place))
            followers[token] = (count + 1, max(latest, place))
        return followers


class SuffixArray(Matches):
    """All prefixes of some texts, sorted by their tokens from the last to the first. Binary search finds
    the longest match of an ending: it is next to where the ending itself would be inserted.

    (Manber and Myers, "Suffix arrays", 1990.) Matches do not run from one text into the next.
    `made_of` identifies the texts, for code that saves and loads the array.
    """

    def __init__(self, tokens: IntArray, places: IntArray, made_of: str = "") -> None:
        """Make an array from the saved fields of another one; otherwise use `build`. Both are
        int32[n]: the texts' tokens, with a separator after each text; and their indices, counted
        from the end, sorted by the tokens from there backwards."""
        self.made_of = made_of
        self._tokens = tokens
        self._places = places
        # As bytes, the highest first, slices compare as the tokens do. Memory views give
        # Python's integers.
        self._backwards = tokens[::-1].astype(">u4").tobytes()
        self._place_at = np.ascontiguousarray(places).data
        super().__init__(np.ascontiguousarray(tokens).data)

    @classmethod
    def build(cls, texts: Sequence[Sequence[int] | IntArray], made_of: str = "") -> SuffixArray:
        """Build the array of these texts of token ids, without empty texts. Among equally frequent
        followers the last one wins, so put the best text last."""
        tokens = joined(texts)
        return cls(tokens, sorted_suffixes(tokens[::-1]).astype(np.int32), made_of)

    def __len__(self) -> int:
        """Return the number of tokens in the texts, separators included."""
        return len(self._tokens)

    @property
    def tokens(self) -> IntArray:
        """The texts' tokens, int32[n], with a negative separator behind each text."""
        return self._tokens

    def longest(self, ending: Sequence[int]) -> Match | None:
        n = min(MAX_MATCH, len(ending))
        if not n or not len(self):
            return None
        reversed_ending = np.array(ending[len(ending) - n :][::-1], ">u4").tobytes()
        place = bisect_left(self._place_at, reversed_ending, key=self._key(n))
        neighbours = self._place_at[max(0, place - 1) : place + 1].tolist()
        n_common = max(_n_common(reversed_ending, self._key(n)(at)) for at in neighbours)
        for length in range(n_common, 0, -1):
            places = self._followed(reversed_ending[: 4 * length])
            if places:
                return Match(length, places)
        return None

    def save(self, path: Path) -> None:
        """Write the array to a file, replacing it whole. Raise `OSError`."""
        made_of = np.frombuffer(self.made_of.encode(), np.uint8).astype(np.int32)
        save_arrays(path, tokens=self._tokens, places=self._places, made_of=made_of)

    @classmethod
    def load(cls, path: Path) -> SuffixArray | None:
        """Load a saved array; return None if the file is missing or damaged."""
        found = load_arrays(path, "tokens", "places", "made_of")
        if found is None:
            return None
        tokens, places, made_of = found
        n = len(tokens)
        if places.shape != tokens.shape or (n and not 0 <= places.min() <= places.max() < n):
            return None
        return cls(tokens, places, bytes(made_of.astype(np.uint8)).decode("utf-8", "replace"))

    def _key(self, n_tokens: int) -> Callable[[int], bytes]:
        data, n_bytes = self._backwards, 4 * n_tokens
        return lambda place: data[4 * place : 4 * place + n_bytes]

    def _followed(self, reversed_ending: bytes) -> tuple[int, ...]:
        key = self._key(len(reversed_ending) // 4)
        first = bisect_left(self._place_at, reversed_ending, key=key)
        end = bisect_right(self._place_at, reversed_ending, lo=first, key=key)
        step = -(-(end - first) // MAX_PLACES) or 1
        n, tokens = len(self._tokens), self._token_at
        # Every token has one behind it: the last is a separator, which no ending has.
        followers = [n - place for place in self._place_at[first:end:step].tolist()]
        return tuple(place for place in followers if tokens[place] != _SEPARATOR)


def joined(texts: Iterable[Sequence[int] | IntArray]) -> IntArray:
    """Return the tokens of texts, without empty ones, with a separator behind each: int32[n]."""
    separator = np.array([_SEPARATOR], np.int32)
    parts = [
        np.asarray(part, np.int32) for text in texts if len(text) for part in (text, separator)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def split(tokens: IntArray) -> list[IntArray]:
    """Return the texts that `joined` joined."""
    ends = np.flatnonzero(tokens == _SEPARATOR)
    return [text[:-1] for text in np.split(tokens, ends + 1)[:-1]]


def save_arrays(path: Path, **arrays: IntArray) -> None:
    """Write arrays to a file, replacing it whole. Raise `OSError`."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    replace_bytes(path, file.getvalue())


def load_arrays(path: Path, *names: str) -> list[IntArray] | None:
    """Read arrays, int32[n] each, from a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = [file[name] for name in names]
    except _DAMAGE:
        return None
    is_right = all(array.dtype == np.int32 and array.ndim == 1 for array in arrays)
    return arrays if is_right else None


def _n_common(first: bytes, second: bytes) -> int:
    """Count the tokens of four bytes in the common prefix of two strings."""
    n_bytes = min(len(first), len(second)) // 4 * 4
    difference = int.from_bytes(first[:n_bytes], "big") ^ int.from_bytes(second[:n_bytes], "big")
    return (8 * n_bytes - difference.bit_length()) // 32


def sorted_suffixes(tokens: IntArray) -> npt.NDArray[np.int64]:
    """Return the indices of a text's suffixes, sorted by their first `MAX_MATCH` tokens: int64[n].

    Suffixes that are sorted by their first h tokens can be sorted by 2h, with the ranks of the
    suffixes h tokens further on. Only suffixes that still have equal ranks are looked at again
    (Larsson and Sadakane, "Faster suffix sorting", 1999).
    """
    n = len(tokens)
    # Separators last, as where bytes are compared.
    keys = tokens.astype(np.uint32).astype(np.int64)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    #: The rank of each suffix: the first index of those that are equal to it so far.
    ranks = np.empty(n + 1, np.int64)
    ranks[n] = -1
    places = np.arange(n)
    n_known = 1
    while len(places):
        is_first = np.ones(len(keys), np.bool_)
        is_first[1:] = keys[1:] != keys[:-1]
        ranks[order[places]] = places[is_first][np.cumsum(is_first) - 1]
        # A suffix stands alone if a group begins with it, and another one with the next suffix.
        is_alone = is_first & np.append(is_first[1:], True)
        places = places[~is_alone]
        if n_known >= MAX_MATCH:
            break
        suffixes = order[places]
        keys = ranks[suffixes] * (n + 1) + ranks[np.minimum(suffixes + n_known, n)] + 1
        by_key = np.argsort(keys, kind="stable")
        keys = keys[by_key]
        order[places] = suffixes[by_key]
        n_known *= 2
    return order
