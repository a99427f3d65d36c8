"""DRY, "don't repeat yourself": a penalty on the token that would continue a repetition.

By p-e-w (github.com/oobabooga/text-generation-webui/pull/5677), with the sequence breakers of
KoboldCpp and llama.cpp: no repetition reaches back over one. If the last n tokens of the text
occurred before, the score of the token that followed them there is reduced by
multiplier * base ** (n - allowed_length), for the longest such n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from specgen.system.arrays import ProbArray, TokenArray
from specgen.text.sampling.samplers import last
from specgen.text.vocabulary import Vocabulary

#: llama.cpp's limits: the longest breaker in bytes, and the most tokens after its first one.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL = 20
#: The logarithm of the largest float32: base ** exponent must stay below it.
_LOG_MAX = 88.7228391
#: Up to this many positions are compared one by one, which is quicker for so few.
_FEW = 16
#: After every so many tokens that are equal at all positions, long repetitions are measured.
_TOKENS_BETWEEN_MEASURES = 8

#: The tokens that complete a breaker.
_Tail: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DryBreakers:
    """Sequence breakers as tokens."""

    #: For a token, the tails of which any completes a breaker after it; an empty tail means that
    #: the token contains a whole breaker.
    tails: Mapping[int, frozenset[_Tail]] = field(default_factory=dict)

    @classmethod
    def of(cls, vocabulary: Vocabulary, breakers: Sequence[str]) -> DryBreakers:
        """Find the tokens of breakers; empty breakers are skipped.

        A breaker begins with a token that contains it, or that ends with its start. This passes
        once over the vocabulary: half a second for 152 thousand tokens. As in llama.cpp, a token's
        text is what its decoder writes for it alone, without the space that some tokenizers put
        first.
        """
        texts = [text.encode()[:_MAX_BREAKER_BYTES] for text in breakers if text]
        if not texts:
            return cls()
        tails: dict[int, set[_Tail]] = {}
        tail_of_rest: dict[bytes, _Tail] = {b"": ()}
        strip = any(text.startswith(b" ") for text in texts) and _puts_space_first(vocabulary)
        for token_id, word in enumerate(_words(vocabulary, strip=strip)):
            for text in texts:
                if text[:1] not in word:  # true of most words
                    continue
                for rest in _rests(text, word):
                    if rest not in tail_of_rest:
                        tail_of_rest[rest] = _tail(vocabulary, rest)
                    tails.setdefault(token_id, set()).add(tail_of_rest[rest])
        return cls({token_id: frozenset(found) for token_id, found in tails.items()})

    def distance(self, text: Sequence[int]) -> int | None:
        """Return the number of tokens of `text` after its last breaker; None if it has none."""
        for start in range(len(text) - 1, -1, -1):
            lengths = [
                len(tail)
                for tail in self.tails.get(text[start], ())
                if tuple(text[start + 1 : start + 1 + len(tail)]) == tail
            ]
            if lengths:
                return len(text) - start - 1 - max(lengths)
        return None


def _rests(breaker: bytes, word: bytes) -> Iterator[bytes]:
    """Yield what has to follow a token's text to complete a breaker that begins in it."""
    if breaker in word:
        yield b""
        return
    for n in range(1, min(len(breaker), len(word) + 1)):
        if word.endswith(breaker[:n]):
            yield breaker[n:]


def dry_penalties(
    history: TokenArray,
    breakers: DryBreakers,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
) -> tuple[TokenArray, ProbArray]:
    """Return the tokens that would continue a repetition, and their penalties.

    Args:
        history: The text, int64[n].
        breakers: What repetitions do not reach back over.
        multiplier: The penalty of a repetition of `allowed_length`; 0 means no penalties.
        base: Its growth with each further token; below 1 means no penalties.
        allowed_length: Shorter repetitions are free.
        last_n: How many of the last tokens count; negative means all of them.

    Returns:
        Increasing ids, int64[m], and penalties, float64[m].
    """
    text = last(history, last_n)
    if multiplier == 0.0 or base < 1.0 or len(text) <= max(allowed_length, 1):
        return np.zeros(0, np.int64), np.zeros(0)
    # Longer repetitions than `enough` get the same penalty.
    max_exponent = int(_LOG_MAX / math.log(base)) if base > 1.000001 else 0
    enough = len(text)
    if max_exponent or base == 1.0:
        enough = min(enough, max(allowed_length, 1) + max_exponent)
    lengths = _continued_lengths(text, breakers, allowed_length, enough)
    # A token that contains a whole breaker is never penalised.
    token_ids = sorted(token for token in lengths if () not in breakers.tails.get(token, ()))
    exponents = np.array([lengths[token] - allowed_length for token in token_ids], np.float64)
    if max_exponent:
        exponents = np.minimum(exponents, max_exponent)
    return np.array(token_ids, np.int64), multiplier * np.power(base, exponents)


def _continued_lengths(
    text: TokenArray,
    breakers: DryBreakers,
    allowed_length: int,
    enough: int,
) -> dict[int, int]:
    """Return the tokens that would continue a repetition, and the length of the longest one."""
    backwards = text[::-1].copy()
    lengths = _repetitions(backwards, enough)
    places = np.flatnonzero(lengths >= allowed_length)
    if not len(places):
        return {}
    # Breakers cut repetitions; one before the longest repetition has no effect.
    n_relevant = int(lengths[places].max()) + _MAX_TAIL + 1
    limit = breakers.distance(text[-n_relevant:].tolist())
    if limit is not None:
        if limit < allowed_length:
            return {}
        lengths = np.minimum(lengths, limit)
    # The longest repetition of a token comes last, so the dictionary keeps that one.
    ranked = places[lengths[places].argsort(kind="stable")]
    return dict(zip(backwards[ranked].tolist(), lengths[ranked].tolist(), strict=True))


def _repetitions(backwards: TokenArray, enough: int) -> TokenArray:
    """Return how many tokens before each token are also the last ones of the text.

    All places where the last token occurred are compared at once, one token at a time.

    Args:
        backwards: The text, int64[n], its last token first.
        enough: Lengths from here on need not be exact.

    Returns:
        int64[n - 1], of the last token first.
    """
    lengths = np.zeros(len(backwards) - 1, np.int64)
    places = np.flatnonzero(backwards[1:] == backwards[0])
    length = 0
    while len(places):
        length += 1
        lengths[places] = length
        if length >= enough:
            break
        if length % _TOKENS_BETWEEN_MEASURES == 0:  # such repetitions are probably long
            places = _measured(backwards, places, lengths, enough)
        places = places[places + 1 + length < len(backwards)]
        places = places[backwards[places + 1 + length] == backwards[length]]
    return lengths


def _measured(
    backwards: TokenArray,
    places: TokenArray,
    lengths: TokenArray,
    enough: int,
) -> TokenArray:
    """Complete the lengths of the repetitions at some places, one by one; return the other places.

    If there are few places, all are measured. Of many, as in a periodic text, only the first is:
    once it has `enough`, places that are followed by the same token add nothing.
    """
    n_measured = len(places) if len(places) <= _FEW else 1
    for place in places[:n_measured].tolist():
        earlier = backwards[place + 1 : place + 1 + enough]
        first_difference = (earlier != backwards[: len(earlier)]).argmax()
        # 0 means that there is none: the first tokens are known to be equal.
        lengths[place] = first_difference or len(earlier)
    rest: TokenArray = places[n_measured:]
    if lengths[places[0]] >= enough:
        rest = rest[backwards[rest] != backwards[places[0]]]
    return rest


def _words(vocabulary: Vocabulary, *, strip: bool) -> Iterator[bytes]:
    for token_id in range(vocabulary.n_tokens):
        word = vocabulary.token_bytes(token_id) or _control_text(vocabulary, token_id)
        yield word[1:] if strip and word.startswith(b" ") else word


def _control_text(vocabulary: Vocabulary, token_id: int) -> bytes:
    """Return the name of a control token; nothing for padding, which no text is tokenized to."""
    text = vocabulary.token_text(token_id)
    if text and vocabulary.tokenize(text, add_special=False, parse_special=True) == [token_id]:
        return text.encode()
    return b""


def _puts_space_first(vocabulary: Vocabulary) -> bool:
    tokens = vocabulary.tokenize("a", add_special=False, parse_special=False)
    return b"".join(map(vocabulary.token_bytes, tokens)).startswith(b" ")


def _tail(vocabulary: Vocabulary, rest: bytes) -> _Tail:
    # The rest may begin in the middle of a character. llama.cpp reads such bytes as U+FFFD, too.
    text = rest.decode("utf-8", "replace")
    return tuple(vocabulary.tokenize(text, add_special=False, parse_special=False)[:_MAX_TAIL])
