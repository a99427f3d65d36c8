"""Invented vocabularies that are as awkward as real ones, and a language that they share."""

from __future__ import annotations

import codecs
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from hypothesis import strategies as st

from tests.helpers.fake_backend import FakeVocabulary, Language

#: Where the pieces of vocabularies are cut from: characters of one to four bytes, white space.
CORPUS = "the cat is in: 中文字中 é😀é\n\n  \t if x:\n    return مرحبا 😀😀."
#: Names of control tokens, and whether they end a text.
CONTROLS = MappingProxyType({
    "<s>": False,
    "</s>": True,
    "<|im_end|>": True,
    "<|eot|>": True,
    "<|eos|>": True,
    "<|im_start|>": False,
    "<pad>": False,
})  # fmt: skip


def vocabulary(
    pieces: Sequence[bytes],
    controls: Sequence[str] = (),
    *,
    eos: str | None = None,
    eot: str | None = None,
    adds_space: bool = False,
    merges: bool = False,
    add_bos: bool = False,
) -> FakeVocabulary:
    """Text tokens first, then control tokens by their names in `CONTROLS`."""
    ids = {name: len(pieces) + number for number, name in enumerate(controls)}
    ends = [name for name in controls if CONTROLS[name]]
    return FakeVocabulary(
        (*pieces, *(name.encode() for name in controls)),
        ends=frozenset(ids[name] for name in ends),
        controls=frozenset(ids[name] for name in controls if name not in ends),
        bos=ids.get("<s>", -1),
        eos=ids.get(eos or "", ids[ends[0]] if ends else -1),
        eot=ids.get(eot or "", -1),
        adds_space=adds_space,
        merges=merges,
        add_bos=add_bos,
    )


@st.composite
def vocabularies(
    draw: st.DrawFn,
    *,
    spells_all: bool | None = None,
    merges: bool | None = None,
    adds_space: bool | None = None,
    n_longest: int = 9,
) -> FakeVocabulary:
    """Vocabularies whose tokens are random cuts of a corpus, also within characters.

    They have all single bytes to fall back on (`spells_all`), or only some of them.
    """
    data = CORPUS.encode()
    cuts = draw(
        st.lists(
            st.tuples(st.integers(0, len(data) - 1), st.integers(2, n_longest)),
            max_size=30,
        )
    )
    adds_space = draw(st.booleans()) if adds_space is None else adds_space
    pieces = [data[start : start + length] for start, length in cuts]
    if adds_space:  # no tokenizer that does this has longer pieces with line breaks
        pieces = [piece for piece in pieces if b"\n" not in piece]
    if spells_all is None:
        spells_all = draw(st.booleans())
    if spells_all:
        singles = [bytes((byte,)) for byte in range(256)]
    else:
        singles = [bytes((byte,)) for byte in draw(st.sets(st.sampled_from(data)))]
    # As SentencePiece has them: a byte, and then a character, that stand for the same.
    twice = [b"a", b"e", b" "] if draw(st.booleans()) else []
    text_pieces = list(dict.fromkeys(pieces + singles)) + twice
    controls = draw(st.lists(st.sampled_from(sorted(CONTROLS)), unique=True, max_size=5))
    ends = [name for name in controls if CONTROLS[name]]
    return vocabulary(
        text_pieces or [b"a"],
        controls,
        eos=draw(st.sampled_from(ends)) if ends else None,
        eot=draw(st.sampled_from(ends)) if ends else None,
        adds_space=adds_space,
        merges=draw(st.booleans()) if merges is None else merges,
        add_bos=draw(st.booleans()),
    )


def texts(max_size: int = 24) -> st.SearchStrategy[str]:
    """Whole characters, most of them from the corpus."""
    n = len(CORPUS)
    slices = st.tuples(st.integers(0, n - 1), st.integers(1, 6))
    from_corpus = slices.map(lambda cut: CORPUS[cut[0] : cut[0] + cut[1]])
    others = st.text(st.sampled_from("zß語🎉\r\x00a "), max_size=3)
    return st.lists(from_corpus | others, max_size=max_size).map("".join)


def broken_texts() -> st.SearchStrategy[bytes]:
    """Bytes, much of them text, all of them possibly cut in the middle of a character."""
    piece = st.binary(max_size=4) | texts(4).map(str.encode) | st.just("中😀".encode()[:5])
    return st.lists(piece, max_size=6).map(b"".join)


@st.composite
def target_texts(draw: st.DrawFn, vocabulary: FakeVocabulary, max_size: int = 30) -> list[int]:
    """Tokens of a target: tokenized text, and any other tokens that a model may generate."""
    tokens: list[int] = []
    said = st.integers(0, vocabulary.n_tokens - 1)
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            text = draw(texts(4))
            tokens += vocabulary.tokenize(text, add_special=False, parse_special=False)
        else:
            tokens += draw(st.lists(said, max_size=6))
    return tokens[:max_size]


def joined(vocabulary: FakeVocabulary, tokens: Sequence[int]) -> bytes:
    return b"".join(map(vocabulary.token_bytes, tokens))


@dataclass(frozen=True, repr=False)
class CountingVocabulary(FakeVocabulary):
    """A vocabulary that counts the bytes that it tokenizes."""

    counts: list[int] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, inner: FakeVocabulary) -> CountingVocabulary:
        fields = {name: getattr(inner, name) for name in FakeVocabulary.__dataclass_fields__}
        return cls(**fields)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.counts.append(len(text.encode()))
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


# --- one language over many vocabularies

#: The characters of the invented language.
ALPHABET = "ab é中😀\n"


class ByteLanguage:
    """A language of the characters in `ALPHABET`, as probabilities of bytes.

    They depend on the last two complete characters.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._characters = [character.encode() for character in ALPHABET]
        self._after = functools.lru_cache(None)(self._characters_after)

    def log_prob(self, before: bytes, data: bytes) -> float:
        """The log-probability of `data` after `before`."""
        total = 0.0
        for n in range(len(data)):
            last, partial = self._place(before + data[:n])
            chances = self._after(last)
            whole, there = (
                sum(p for c, p in chances.items() if c.startswith(begun))
                for begun in (partial, partial + data[n : n + 1])
            )
            total += math.log(there / whole) if there else -12.0  # nothing of this language
        return total

    def end_score(self, before: bytes) -> float:
        """The score of the end of a text."""
        key = b"end" + self._place(before)[0]
        return float(_normal(1, self._seed, key)[0]) * 3.0 - 2.0

    def _characters_after(self, last: bytes) -> dict[bytes, float]:
        scores = np.exp(2.5 * _normal(len(self._characters), self._seed, last))
        return dict(zip(self._characters, (scores / scores.sum()).tolist(), strict=True))

    @staticmethod
    def _place(text: bytes) -> tuple[bytes, bytes]:
        """The last two characters, and the bytes of one that has only begun."""
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        return decoder.decode(text[-16:])[-2:].encode(), decoder.getstate()[0]


def _normal(n: int, *key: object) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Random numbers that depend on a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=n)


def spoken(language: ByteLanguage, vocabulary: FakeVocabulary, *, seed: int = 0) -> Language:
    """The language as a model of this vocabulary has it.

    Long tokens are preferred, as by models that were trained on tokenized text. Noise depends on
    each token of the text, so that a stray cell in a cache shows.
    """
    pieces = [vocabulary.token_bytes(token) for token in range(vocabulary.n_tokens)]

    @functools.lru_cache(4096)
    def scores(tail: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        row = [language.log_prob(tail, piece) + 1.5 * len(piece) for piece in pieces]
        for token, piece in enumerate(pieces):
            if not piece:
                row[token] = language.end_score(tail) if vocabulary.is_end(token) else -15.0
        return np.array(row)

    @functools.lru_cache(4096)
    def logits(text: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        tail = b"".join(pieces[token] for token in text[-16:])[-16:]
        return (scores(tail) + 0.3 * _normal(len(pieces), seed, text)).astype(np.float32)

    # The row may be written to.
    return lambda text: logits(text).copy()
