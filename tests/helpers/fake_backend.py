"""A backend without a model, whose logits depend on the actual content of its cache.

The loop is tested on it. It is a complete implementation rather than a stub: cells have positions
and owners, a row attends to exactly the cells of its first sequence at smaller positions, and its
logits are a hash of these cells. So any mistake changes the output: a cell that was not rolled
back, a branch that attends to its sibling, or a token at a wrong position.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from specgen.errors import BackendError, DecodeEndedError, RollbackError
from specgen.method.backend import Batch, Rollback
from specgen.system.arrays import Hidden, Logits

#: Gives the logits of the token after a text: float32[n_vocab], which must not be written to.
Language = Callable[[tuple[int, ...]], Logits]

#: The rows that an invented language caches. Computing a row takes longer than everything that the
#: loop does with it, and tests ask for most rows several times.
_N_CACHED_ROWS = 2**14


def random_language(n_vocab: int, *, seed: int = 0, scale: float = 3.0, order: int = 3) -> Language:
    """Return an invented language with normally distributed logits.

    They depend on the last `order` tokens, on the length of the text, and on the sum of its tokens.

    Args:
        n_vocab: The number of tokens.
        seed: Chooses the language.
        scale: The standard deviation of the logits.
        order: The number of tokens at the end that matter.
    """

    @lru_cache(_N_CACHED_ROWS)
    def row(last: tuple[int, ...], total: int, length: int) -> Logits:
        return _frozen(_normal((seed, last, total, length), scale, n_vocab).astype(np.float32))

    # With only the last tokens, text repeats itself often enough for n-grams. With the sum of all
    # tokens, a stray cell anywhere in the cache changes the result.
    return lambda text: row(text[-order:], sum(text) % 7, len(text) % 5)


def noisy(language: Language, noise: float, *, seed: int = 1) -> Language:
    """Return a language that adds noise to the logits of another one, as that of a draft model."""

    @lru_cache(_N_CACHED_ROWS)
    def row(text: tuple[int, ...]) -> Logits:
        clean = language(text)
        return _frozen((clean + _normal((seed, text), noise, len(clean))).astype(np.float32))

    return row


def _normal(key: object, scale: float, n: int) -> npt.NDArray[np.float64]:
    """Return normally distributed numbers, float64[n], that depend only on the repr of `key`."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0.0, scale, n)


def _frozen(row: Logits) -> Logits:
    """Make a row read-only, because it is cached, and return it."""
    row.setflags(write=False)
    return row


@dataclass(frozen=True, repr=False)
class FakeVocabulary:
    """A vocabulary of any tokens. The tokenizer leaves out text that no token stands for."""

    #: The bytes of each token. Those of a control token are only its name.
    pieces: tuple[bytes, ...]
    #: The control tokens that end a text.
    ends: frozenset[int] = frozenset()
    add_bos: bool = False
    #: The other control tokens.
    controls: frozenset[int] = frozenset()
    bos: int = -1
    #: The end-of-text token; None for the first of `ends`.
    eos: int | None = None
    eot: int = -1
    #: Whether a space is put before each text, as in SentencePiece.
    adds_space: bool = False
    #: Whether neighbouring tokens are merged as in BPE, where the merged token with the lowest id
    #: comes first. Otherwise the longest token is chosen at each position of the text.
    merges: bool = False

    @classmethod
    def letters(cls, n_tokens: int, ends: Sequence[int] = ()) -> FakeVocabulary:
        """Return a vocabulary whose tokens are single characters, beginning with letters."""
        return cls(tuple(chr(97 + i).encode() for i in range(n_tokens)), frozenset(ends))

    def __repr__(self) -> str:
        """Return the fields, without the tokens of one byte, of which there may be hundreds."""
        pieces = {i: piece for i, piece in enumerate(self.pieces) if len(piece) != 1}
        return f"<{self.n_tokens} tokens, {pieces}, ends {set(self.ends)}, {self._flags}>"

    @property
    def n_tokens(self) -> int:
        return len(self.pieces)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [self.bos] if add_special and self.add_bos and self.bos >= 0 else []
        for number, part in enumerate(self._names.split(text) if parse_special else [text]):
            if number % 2:
                tokens.append(self._named[part])
            elif part:
                data = (" " if self.adds_space else "").encode() + part.encode()
                tokens += self._merged(data) if self.merges else self._longest(data)
        return tokens

    def tokenize_inside(self, text: str, *, parse_special: bool) -> list[int]:
        return self.tokenize(text, add_special=False, parse_special=parse_special)

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self._is_control(token_id) else self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        return self.pieces[token_id].decode(errors="replace")

    def special_tokens(self) -> dict[str, int]:
        eos = min(self.ends, default=-1) if self.eos is None else self.eos
        return {"bos": self.bos, "eos": eos, "eot": self.eot}

    def is_end(self, token_id: int) -> bool:
        return token_id in self.ends

    def end_tokens(self) -> Sequence[int]:
        return sorted(self.ends)

    def _is_control(self, token_id: int) -> bool:
        return token_id in self.ends or token_id in self.controls

    @property
    def _flags(self) -> str:
        names = ("bos", "eos", "eot", "add_bos", "adds_space", "merges")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @cached_property
    def _named(self) -> dict[str, int]:
        named = {self.token_text(token_id): token_id for token_id in self.ends | self.controls}
        return {name: token_id for name, token_id in named.items() if name}

    @cached_property
    def _names(self) -> re.Pattern[str]:
        names = sorted(map(re.escape, self._named), key=len, reverse=True)
        return re.compile(f"({'|'.join(names)})" if names else "(?!)")

    @cached_property
    def _tokens(self) -> dict[bytes, int]:
        """Text tokens by their bytes. If several have the same bytes, the last one."""
        return {
            piece: token_id
            for token_id, piece in enumerate(self.pieces)
            if piece and not self._is_control(token_id)
        }

    @cached_property
    def _n_longest(self) -> int:
        return max(map(len, self._tokens), default=0)

    def _longest(self, data: bytes) -> list[int]:
        tokens: list[int] = []
        start = 0
        while start < len(data):
            for length in range(self._n_longest, 0, -1):
                token_id = self._tokens.get(data[start : start + length])
                if token_id is not None:
                    tokens.append(token_id)
                    start += len(self.pieces[token_id])
                    break
            else:
                start += 1
        return tokens

    def _merged(self, data: bytes) -> list[int]:
        parts = [data[i : i + 1] for i in range(len(data))]
        while True:
            merges = [
                (token_id, i)
                for i in range(len(parts) - 1)
                if (token_id := self._tokens.get(parts[i] + parts[i + 1])) is not None
            ]
            if not merges:
                return [self._tokens[part] for part in parts if part in self._tokens]
            _, i = min(merges)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


@dataclass(slots=True, eq=False)
class _Cell:
    token: int
    position: int
    sequences: set[int]


_position = attrgetter("position")


@dataclass(slots=True)
class FakeBackend:
    """A backend whose logits depend on the actual content of its cache."""

    vocabulary: FakeVocabulary
    language: Language
    n_ctx: int = 512
    n_batch: int = 64
    n_outputs: int = 64
    n_sequences: int = 8
    #: Whether to behave like a model with a recurrent state: a sequence can only be rolled back to
    #: its checkpoint or removed completely, and cannot be copied.
    recurrent: bool = False
    decode_s: float = 0.0
    n_decoded_rows: int = 0
    replays_graphs: bool = False
    is_unwanted: Callable[[], bool] | None = None
    #: The tokens of all rows decoded so far, in order, for tests to check.
    decoded: list[int] = field(default_factory=list)
    n_decodes: int = 0
    closed: bool = False
    #: Cells that any sequence owns.
    n_cells: int = 0
    #: The cells of each sequence, by position.
    _cells: defaultdict[int, list[_Cell]] = field(default_factory=lambda: defaultdict(list))
    _checkpoints: dict[int, int] = field(default_factory=dict)

    n_vocab: int = field(init=False)
    rollback: Rollback = field(init=False)

    def __post_init__(self) -> None:
        self.n_vocab = self.vocabulary.n_tokens
        self.rollback = "states" if self.recurrent else "cells"

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        raise BackendError("no hidden states")

    def decode(self, batch: Batch) -> Logits:
        if self.is_unwanted is not None and self.is_unwanted():
            raise DecodeEndedError("a decode was ended")
        n_max = max(self.n_batch, self.n_outputs)
        if not 0 < len(batch) <= n_max or sum(batch.wants_logits) > self.n_outputs:
            raise BackendError(f"a batch of {len(batch)} rows; 1 to {n_max} can be decoded")
        if self.n_cells + len(batch) > self.n_ctx:
            raise BackendError(f"the cache of {self.n_ctx} cells is full")
        rows = list(
            zip(batch.tokens, batch.positions, batch.sequences, batch.wants_logits, strict=True)
        )
        next_position = {s: self.length(s) for s in {s for row in rows for s in row[2]}}
        for token, position, sequences, _ in rows:
            if self.recurrent and len(sequences) != 1:
                raise BackendError(f"a row of sequences {sequences}; a state belongs to one")
            for sequence in sequences:
                if not 0 <= sequence < self.n_sequences:
                    raise BackendError(f"sequence {sequence} of {self.n_sequences}")
                if next_position[sequence] != position:
                    raise BackendError(
                        f"sequence {sequence} continues at {next_position[sequence]}, "
                        f"the row is at {position}"
                    )
                next_position[sequence] = position + 1
            cell = _Cell(token, position, set(sequences))
            self.n_cells += 1
            for sequence in sequences:
                self._cells[sequence].append(cell)
        self.n_decodes += 1
        self.n_decoded_rows += len(batch)
        self.decoded.extend(batch.tokens)
        wanted = [
            self.language(self.text(sequences[0], position + 1))
            for _, position, sequences, wants_logits in rows
            if wants_logits
        ]
        return np.array(wanted, np.float32).reshape(len(wanted), self.n_vocab)

    def text(self, sequence: int, end: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a sequence that are in the cache, by position, up to `end`."""
        cells = self._cells[sequence]
        n_seen = len(cells) if end is None else bisect_left(cells, end, key=_position)
        return tuple([cell.token for cell in cells[:n_seen]])

    def length(self, sequence: int) -> int:
        cells = self._cells[sequence]
        return cells[-1].position + 1 if cells else 0

    def anchor(self, sequence: int) -> None:
        pass

    def n_restorable(self, sequence: int, n: int) -> int:
        return 0

    def checkpoint(self, sequence: int) -> None:
        self._checkpoints[sequence] = self.length(sequence)

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        if self.recurrent:
            raise BackendError(f"sequences {source} and {destination} cannot share a state")
        copies = self._cells[destination]
        for cell in self._cells[source]:
            is_in_range = start <= cell.position and (end < 0 or cell.position < end)
            if is_in_range and destination not in cell.sequences:
                cell.sequences.add(destination)
                copies.append(cell)
        copies.sort(key=_position)

    def remove(self, sequence: int, start: int = 0) -> None:
        if self.recurrent and 0 < start < self.length(sequence):
            checkpoint = self._checkpoints.get(sequence)
            if checkpoint is None or start < checkpoint:
                raise RollbackError(
                    f"sequence {sequence} cannot go back to {start}: "
                    + ("no checkpoint" if checkpoint is None else f"checkpoint at {checkpoint}")
                )
        if start <= 0:
            self._checkpoints.pop(sequence, None)
        cells = self._cells[sequence]
        n_kept = bisect_left(cells, start, key=_position)
        for cell in cells[n_kept:]:
            cell.sequences.remove(sequence)
            if not cell.sequences:
                self.n_cells -= 1
        del cells[n_kept:]

    def close(self) -> None:
        self.closed = True
