"""DRY, "don't repeat yourself": a penalty on the token that would continue a repetition.

By p-e-w (github.com/oobabooga/text-generation-webui/pull/5677), with the sequence breakers of
KoboldCpp and llama.cpp, over which no repetition reaches back. The score of a token that followed
the text's last n tokens before is reduced by multiplier * base ** (n - allowed_length), for the
longest such n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specgen.system.arrays import ProbArray, TokenArray
from specgen.text.sampling.samplers import last
from specgen.text.vocabulary import Vocabulary

#: The limits of llama.cpp: the longest breaker in bytes, and the most tokens after its first.
_MAX_BREAKER_BYTES = 40
_MAX_TAIL = 20
#: The logarithm of the largest float32: base ** exponent must stay below.
_LOG_MAX = 88.7228391
#: Up to this many positions are quickly compared one by one.
_FEW = 16


@dataclass(frozen=True, slots=True)
class DryBreakers:
    """Sequence breakers as tokens: `tails[token]` complete a breaker after it; an empty one is a
    whole one.
    """

    tails: Mapping[int, frozenset[tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, vocabulary: Vocabulary, breakers: Sequence[str]) -> DryBreakers:
        """Find tokens that contain a breaker, or end with the start of one, and the tokens of its
        rest; empty ones are skipped. This passes once over the vocabulary (half a second for 152
        thousand tokens). As in llama.cpp, a token's text is what its decoder writes for it alone,
        without the space that some tokenizers put first.
        """
        cut = [text.encode()[:_MAX_BREAKER_BYTES] for text in breakers if text]
        tails: dict[int, set[tuple[int, ...]]] = {}
        if not cut:
            return cls()
        rests: dict[bytes, tuple[int, ...]] = {}
        strip = any(text.startswith(b" ") for text in cut) and _puts_space_first(vocabulary)
        for token_id, word in enumerate(_words(vocabulary, strip=strip)):
            for text in cut:
                if text[:1] not in word:
                    continue
                if text in word:
                    tails.setdefault(token_id, set()).add(())
                    continue
                for n in range(1, min(len(text), len(word) + 1)):
                    if word.endswith(text[:n]):
                        rest = text[n:]
                        if rest not in rests:
                            rests[rest] = _tail(vocabulary, rest)
                        tails.setdefault(token_id, set()).add(rests[rest])
        return cls({token_id: frozenset(found) for token_id, found in tails.items()})

    def distance(self, text: Sequence[int]) -> int | None:
        """Return the number of tokens of `text` after its last breaker; None if it has no breaker."""
        n = len(text)
        for start in range(n - 1, -1, -1):
            lengths = [
                len(tail)
                for tail in self.tails.get(text[start], ())
                if tuple(text[start + 1 : start + 1 + len(tail)]) == tail
            ]
            if lengths:
                return n - start - 1 - max(lengths)
        return None


def dry_penalties(
    history: TokenArray,
    breakers: DryBreakers,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
    last_n: int,
) -> tuple[TokenArray, ProbArray]:
    """Return the penalties of tokens after int64[n_history]: increasing ids int64[m], float64[m].
    Only the last `last_n` count (negative: all); there are none if `multiplier` is 0 or `base`
    below 1.
    """
    nothing = np.zeros(0, np.int64), np.zeros(0)
    text = last(history, last_n)
    if multiplier == 0.0 or base < 1.0 or len(text) <= max(allowed_length, 1):
        return nothing
    backwards = text[::-1].copy()
    max_exponent = int(_LOG_MAX / math.log(base)) if base > 1.000001 else 0
    # Longer repetitions than this make no difference.
    enough = len(text)
    if max_exponent or base == 1.0:
        enough = min(enough, max(allowed_length, 1) + max_exponent)
    lengths = _repetitions(backwards, enough)
    places = np.flatnonzero(lengths >= allowed_length)
    if not len(places):
        return nothing
    # A breaker before the longest repetition limits nothing.
    n_relevant = int(lengths[places].max()) + _MAX_TAIL + 1
    limit = breakers.distance(text[-n_relevant:].tolist())
    if limit is not None:
        if limit < allowed_length:
            return nothing
        lengths = np.minimum(lengths, limit)
    order = lengths[places].argsort(kind="stable")
    # The longest repetition of a token comes last, so the dictionary keeps that one.
    ranked = places[order]
    repeated = dict(zip(backwards[ranked].tolist(), lengths[ranked].tolist(), strict=True))
    # A token that is a breaker by itself is never penalised.
    token_ids = sorted(token for token in repeated if () not in breakers.tails.get(token, ()))
    exponents = np.array([repeated[token] - allowed_length for token in token_ids], np.float64)
    if max_exponent:
        exponents = np.minimum(exponents, max_exponent)
    return np.array(token_ids, np.int64), multiplier * np.power(base, exponents)


def _repetitions(backwards: TokenArray, enough: int) -> TokenArray:
    """Return how many tokens before each one are also the text's last ones: int64[n - 1], the last
    one first; `enough` and more need not be exact. All places of the last token are compared at
    once, a token at a time.
    """
    lengths = np.zeros(len(backwards) - 1, np.int64)
    places = np.flatnonzero(backwards[1:] == backwards[0])
    length = 0
    while len(places):
        length += 1
        lengths[places] = length
        if length >= enough:
            break
        if length % 8 == 0:  # the places are equal so far, and probably stay so for long
            places = _measured(backwards, places, lengths, enough)
        places = places[places + 1 + length < len(backwards)]
        places = places[backwards[places + 1 + length] == backwards[length]]
    return lengths


def _measured(
    backwards: TokenArray, places: TokenArray, lengths: TokenArray, enough: int
) -> TokenArray:
    """Finish the lengths of some positions, one by one; return the others. If there are few, all
    are; of many, only the first: once one of a periodic text's many has `enough`, those with the
    same token after them add nothing.
    """
    n_measured = len(places) if len(places) <= _FEW else 1
    for place in places[:n_measured].tolist():
        earlier = backwards[place + 1 : place + 1 + enough]
        differs = (earlier != backwards[: len(earlier)]).argmax()
        lengths[place] = differs or len(earlier)  # the first tokens are known not to differ
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


def _tail(vocabulary: Vocabulary, rest: bytes) -> tuple[int, ...]:
    # A rest may begin within a character. llama.cpp too reads such bytes as U+FFFD.
    text = rest.decode("utf-8", "replace")
    return tuple(vocabulary.tokenize(text, add_special=False, parse_special=False)[:_MAX_TAIL])
