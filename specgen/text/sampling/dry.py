"""DRY, "don't repeat yourself": a penalty on the token that would continue a repetition.

If the last n tokens of the text occurred before, the score of the token that followed them there is
reduced by multiplier * base ** (n - allowed_length), for the largest such n. A repetition never
extends back over a sequence breaker, such as a newline.

DRY is by p-e-w (github.com/oobabooga/text-generation-webui/pull/5677), its sequence breakers are
those of KoboldCpp and llama.cpp.
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

#: llama.cpp's limit on the length of a breaker.
_MAX_BREAKER_BYTES = 40
#: llama.cpp's limit on the number of tokens in a breaker after its first one.
_MAX_TAIL = 20
#: The logarithm of the largest float32: base ** exponent must stay below that number.
_LOG_MAX = 88.7228391
#: At up to this many places, long repetitions are measured one by one, which is faster for so few.
_MAX_MEASURED_SINGLY = 16
#: Long repetitions are measured whenever this many more tokens were found to be equal.
_TOKENS_BETWEEN_MEASURES = 8

#: The tokens that complete a breaker after its first token.
_Tail: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DryBreakers:
    """Sequence breakers as tokens."""

    #: For each token that may begin a breaker, the tails that complete it. An empty tail means that
    #: the token contains a whole breaker.
    tails: Mapping[int, frozenset[_Tail]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        vocabulary: Vocabulary,
        breakers: Sequence[str],
    ) -> DryBreakers:
        r"""Find the tokens of breakers; empty breakers are skipped.

        The first token of a breaker contains all of it, or ends with its beginning. What is left of
        the breaker is its *rest*, and the tokens of the rest are its *tail*. For example, the token
        ".\n" begins the breaker "\n\n": the rest is "\n", and the tail is the token "\n".

        Finding these tokens takes one pass over the vocabulary: half a second for 152 thousand
        tokens. As in llama.cpp, a token's text is what is decoded for the token alone, without the
        space that some tokenizers put first.
        """
        texts = [text.encode()[:_MAX_BREAKER_BYTES] for text in breakers if text]
        if not texts:
            return cls()
        tails: dict[int, set[_Tail]] = {}
        #: The tail of each rest, so that each is tokenized once. Without a rest there is no tail.
        tail_of_rest: dict[bytes, _Tail] = {b"": ()}
        # A space that the tokenizer adds matters only to breakers that start with one.
        strip = any(text.startswith(b" ") for text in texts) and _puts_space_first(vocabulary)
        for token_id, word in enumerate(_words(vocabulary, strip=strip)):
            for text in texts:
                if text[:1] not in word:  # a fast check that excludes most tokens
                    continue
                for rest in _rests(text, word):
                    if rest not in tail_of_rest:
                        tail_of_rest[rest] = _tail(vocabulary, rest)
                    tails.setdefault(token_id, set()).add(tail_of_rest[rest])
        return cls({token_id: frozenset(token_tails) for token_id, token_tails in tails.items()})

    def distance(self, text: Sequence[int]) -> int | None:
        """Return the number of tokens of `text` after its last breaker; None if it has none."""
        for start in range(len(text) - 1, -1, -1):
            after_start = start + 1
            tail_lengths = [
                len(tail)
                for tail in self.tails.get(text[start], ())
                if tuple(text[after_start : after_start + len(tail)]) == tail
            ]
            if tail_lengths:
                return len(text) - after_start - max(tail_lengths)
        return None


def _rests(breaker: bytes, word: bytes) -> Iterator[bytes]:
    """Yield what has to follow a token's text to complete a breaker that begins in it.

    If the token contains the whole breaker, that is nothing.
    """
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
        breakers: The breakers, which end repetitions.
        multiplier: The penalty for a repetition of `allowed_length` tokens; 0 is off.
        base: The factor of the penalty for each further token; below 1 is off.
        allowed_length: The length from which repetitions are penalised.
        last_n: The number of last tokens to look at; negative means all of them.

    Returns:
        The token ids, int64[m], increasing, and their penalties, float64[m].
    """
    text = last(history, last_n)
    if multiplier == 0.0 or base < 1.0 or len(text) <= max(allowed_length, 1):
        return np.zeros(0, np.int64), np.zeros(0)
    # As in llama.cpp, the exponent is limited, unless the base is 1 or hardly more.
    max_exponent = int(_LOG_MAX / math.log(base)) if base > 1.000001 else 0
    # Repetitions longer than this get no larger penalty, so they need not be measured exactly.
    max_length = len(text)
    if max_exponent or base == 1.0:
        max_length = min(max_length, max(allowed_length, 1) + max_exponent)
    lengths = _continued_lengths(text, breakers, allowed_length, max_length)
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
    max_length: int,
) -> dict[int, int]:
    """Return the tokens that would continue a repetition, and the length of the longest one.

    Args:
        text: The text, int64[n].
        breakers: The breakers, which end repetitions.
        allowed_length: Shorter repetitions do not count.
        max_length: Lengths above this need not be exact.

    Returns:
        By token, the length of the longest repetition that it would continue.
    """
    backwards = text[::-1].copy()
    lengths = _repetition_lengths(backwards, max_length)
    places = np.flatnonzero(lengths >= allowed_length)
    if not len(places):
        return {}
    # A repetition ends at the last breaker. A breaker only matters if it is within the longest
    # repetition, perhaps with its first token and a part of its tail before it.
    n_relevant = int(lengths[places].max()) + _MAX_TAIL + 1
    n_after_breaker = breakers.distance(text[-n_relevant:].tolist())
    if n_after_breaker is not None:
        if n_after_breaker < allowed_length:
            return {}
        lengths = np.minimum(lengths, n_after_breaker)
    # A token may have followed several repetitions. In ascending order of their lengths, the
    # longest one comes last, and is the one that the dictionary keeps.
    ascending = places[lengths[places].argsort(kind="stable")]
    return dict(zip(backwards[ascending].tolist(), lengths[ascending].tolist(), strict=True))


def _repetition_lengths(backwards: TokenArray, max_length: int) -> TokenArray:
    """Return, for each token of a text, how many tokens before it equal the end of the text.

    All places where the last token occurred are compared at once, one token at a time.

    Args:
        backwards: The text in reverse, int64[n]: its last token first.
        max_length: Lengths above this need not be exact.

    Returns:
        int64[n - 1], in the order of `backwards`. (Nothing is before the text's first token.)
    """
    lengths = np.zeros(len(backwards) - 1, np.int64)
    places = np.flatnonzero(backwards[1:] == backwards[0])
    length = 0
    while len(places):
        length += 1
        lengths[places] = length
        if length >= max_length:
            break
        if length % _TOKENS_BETWEEN_MEASURES == 0:  # the rest are probably long repetitions
            places = _measure(backwards, places, lengths, max_length)
        # Keep the places where the next token before is equal, too.
        places = places[places + 1 + length < len(backwards)]
        places = places[backwards[places + 1 + length] == backwards[length]]
    return lengths


def _measure(
    backwards: TokenArray,
    places: TokenArray,
    lengths: TokenArray,
    max_length: int,
) -> TokenArray:
    """Measure the whole repetitions at some places, one place after the other.

    If there are few places, all are measured. If there are many, as in a periodic text, only the
    first one is. If its repetition reaches `max_length`, other places that are followed by the same
    token cannot increase the penalty of that token.

    Args:
        backwards: The text in reverse, int64[n].
        places: The places to consider, at least one.
        lengths: The lengths by place. Those that are measured are set.
        max_length: Lengths above this need not be exact.

    Returns:
        The places that still have to be compared.
    """
    n_measured = len(places) if len(places) <= _MAX_MEASURED_SINGLY else 1
    for place in places[:n_measured].tolist():
        earlier = backwards[place + 1 : place + 1 + max_length]
        first_difference = (earlier != backwards[: len(earlier)]).argmax()
        # 0 means that there is no difference, since the first tokens are known to be equal.
        lengths[place] = first_difference or len(earlier)
    rest: TokenArray = places[n_measured:]
    if lengths[places[0]] >= max_length:
        rest = rest[backwards[rest] != backwards[places[0]]]
    return rest


def _words(vocabulary: Vocabulary, *, strip: bool) -> Iterator[bytes]:
    """Yield the text of each token; with `strip`, without a space at its start."""
    for token_id in range(vocabulary.n_tokens):
        word = vocabulary.token_bytes(token_id) or _control_text(vocabulary, token_id)
        yield word[1:] if strip and word.startswith(b" ") else word


def _control_text(vocabulary: Vocabulary, token_id: int) -> bytes:
    """Return the name of a control token; empty if no text is tokenized to it, as for padding."""
    text = vocabulary.token_text(token_id)
    if text and vocabulary.tokenize(text, add_special=False, parse_special=True) == [token_id]:
        return text.encode()
    return b""


def _puts_space_first(vocabulary: Vocabulary) -> bool:
    """Return whether the tokenizer puts a space before a text."""
    tokens = vocabulary.tokenize("a", add_special=False, parse_special=False)
    return b"".join(map(vocabulary.token_bytes, tokens)).startswith(b" ")


def _tail(vocabulary: Vocabulary, rest: bytes) -> _Tail:
    """Tokenize the rest of a breaker."""
    # The rest may begin in the middle of a character. As in llama.cpp, such bytes become U+FFFD.
    text = rest.decode("utf-8", "replace")
    return tuple(vocabulary.tokenize(text, add_special=False, parse_special=False)[:_MAX_TAIL])
