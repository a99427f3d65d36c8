"""Dropping the end of a sequence where the cache cannot: recurrent and hybrid models.

An attention cache holds one cell a token, of which some can be dropped. A recurrent model
holds one state a sequence, which every token changes; to take a token back is to go back to
an earlier state. There are three ways, and the first that serves is taken:

- llama.cpp's *snapshots*, for some architectures: decoding n rows of a sequence keeps the
  states after each of the last few of them. They reach back to the first row of the last
  decode, not to before it, and are gone with the next decode.
- A *copy* of the state (`StateCopies`), made at a checkpoint; the tokens between there and
  where the sequence is to end are decoded again.
- Decoding the sequence again from its beginning.

Nothing of this is done when a removal is asked for. The text of each sequence is remembered,
and the cache is brought to agree with it before the sequence's next decode: several removals
then cost no more than one, and what has to be decoded again goes in front of the new rows in
the same batch.

Where layers have a sliding window, sequences that are decoded at the same time, or while the
cache holds dropped tokens of others, can lose cells that they need (see `Cache.check_window`;
llama-cpp-python 0.3.36 also forgets cells that the first part of a batch needs, when it plans
the parts after it). There, sequences are decoded one after another, removals are carried out
at once, and a decode of one sequence ends the snapshots of the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specgen.arrays import Logits
from specgen.backend.base import Batch
from specgen.backend.llama.cache import Cache, StateCopies
from specgen.errors import BackendError

#: How many tokens at most are decoded again, round after round, in front of new rows, before
#: they are decoded for good by themselves and the state behind them is copied. A row more in
#: a batch costs from a twentieth of a decode (a GPU) to half of one (a small model on a CPU),
#: a decode by itself a whole one: 0 is best for the latter, 6 for the former, 3 within a tenth
#: of the best for both.
_MAX_REPEATED = 3


@dataclass(slots=True)
class _Text:
    """A sequence: its tokens, and how far the cache agrees with them."""

    tokens: list[int] = field(default_factory=list)
    #: Tokens that the cache holds, and how many of these, from the first, are of the text.
    n_cached: int = 0
    n_agreed: int = 0
    #: Snapshots go back to this position, at the earliest; `n_cached` where there are none.
    snapshots_from: int = 0
    #: Where the copy of the state was made.
    copied_at: int | None = None
    #: Tokens from here on may be dropped, and nothing has been decoded since that was said.
    checkpoint_due: bool = False

    @property
    def n_missing(self) -> int:
        """Tokens of the text that the cache does not hold; once it holds nothing else."""
        return len(self.tokens) - self.n_cached


class Rewinder:
    """Decodes for a context whose cache is of this kind.

    `decode` decodes a batch as it is, of at most `n_rows` rows; `n_snapshots` is how many
    tokens llama.cpp's snapshots can go back, 0 where it has none.
    """

    def __init__(
        self,
        cache: Cache,
        copies: StateCopies,
        decode: Callable[[Batch], Logits],
        *,
        n_rows: int,
        n_snapshots: int,
    ) -> None:
        self._cache = cache
        self._copies = copies
        self._decode_rows = decode
        self._n_rows = n_rows
        self._n_snapshots = n_snapshots
        self._texts: dict[int, _Text] = {}

    def length(self, sequence: int) -> int:
        text = self._texts.get(sequence)
        return len(text.tokens) if text else 0

    def text(self, sequence: int) -> list[int]:
        text = self._texts.get(sequence)
        return text.tokens if text else []

    def checkpoint(self, sequence: int) -> None:
        self._text(sequence).checkpoint_due = True

    def remove(self, sequence: int, start: int) -> None:
        text = self._text(sequence)
        if start <= 0:
            self._copies.forget(sequence)
            self._cache.remove(sequence)
            del self._texts[sequence]
            return
        del text.tokens[start:]
        text.n_agreed = min(text.n_agreed, start)
        if text.copied_at is not None and text.copied_at > start:
            self._copies.forget(sequence)
            text.copied_at = None
        if self._cache.n_window:
            self._agree(sequence)

    def decode(self, batch: Batch) -> Logits:
        """Decode a batch behind what its sequences hold. Raises `BackendError`, of which
        `RollbackError` is one kind."""
        n_rows = self._check(batch)
        if self._cache.n_window and len(n_rows) > 1:
            return self._decode_apart(batch, n_rows)
        for sequence in n_rows:
            self._agree(sequence)
        n_whole = Counter({s: n + self._texts[s].n_missing for s, n in n_rows.items()})
        for sequence, n in n_rows.items():
            self._copy_if_due(sequence, n, n_whole)
        whole = Batch()
        for sequence in n_rows:
            self._add_missing(whole, sequence)
        if len(whole) + len(batch) > self._n_rows:
            for sequence in n_rows:
                self._catch_up(sequence)
            whole = Batch()
        if len(whole) == 0:
            whole = batch
        else:
            whole.tokens += batch.tokens
            whole.positions += batch.positions
            whole.sequences += batch.sequences
            whole.wants_logits += batch.wants_logits
        logits = self._run(whole)
        for token, (sequence,) in zip(batch.tokens, batch.sequences, strict=True):
            self._texts[sequence].tokens.append(token)
        return logits

    def _decode_apart(self, batch: Batch, n_rows: Counter[int]) -> Logits:
        """Decode each sequence's rows by themselves; the logits in the order of the batch."""
        parts: list[Logits] = []
        order: list[int] = []
        for sequence in n_rows:
            text = self._text(sequence)
            if text.checkpoint_due:  # the others' decodes will end this one's snapshots
                text.checkpoint_due = False
                self._agree(sequence)
                self._copy(sequence)
            part = Batch()
            n_before = 0  # rows of logits
            for index, (owner,) in enumerate(batch.sequences):
                if owner == sequence:
                    wants = batch.wants_logits[index]
                    part.add(batch.tokens[index], batch.positions[index], (owner,), wants)
                    if wants:
                        order.append(n_before)
                n_before += batch.wants_logits[index]
            parts.append(self.decode(part).copy())
        logits: Logits = np.concatenate(parts)[np.argsort(order)]
        return logits

    def _text(self, sequence: int) -> _Text:
        return self._texts.setdefault(sequence, _Text())

    def _check(self, batch: Batch) -> Counter[int]:
        """The number of rows of each sequence. llama.cpp would only warn of a wrong position
        and go on in a state that is another text's."""
        n_rows: Counter[int] = Counter()
        for position, sequences in zip(batch.positions, batch.sequences, strict=True):
            if len(sequences) != 1:
                raise BackendError(
                    f"{self._cache.name}: a row of sequences {sequences}; a recurrent state "
                    "belongs to one",
                )
            sequence = sequences[0]
            expected = self.length(sequence) + n_rows[sequence]
            if position != expected:
                raise BackendError(
                    f"{self._cache.name}: a row at position {position}; sequence {sequence} "
                    f"goes on at {expected}"
                )
            n_rows[sequence] += 1
        return n_rows

    def _agree(self, sequence: int) -> None:
        """Drop from the cache what is not of the text; it may then hold less than the text."""
        text = self._text(sequence)
        if text.n_agreed == text.n_cached:
            return
        if text.n_agreed >= text.snapshots_from:
            self._cache.remove(sequence, text.n_agreed)
            self._cache.check_length(sequence, text.n_agreed)
        elif text.copied_at is not None and text.copied_at <= text.n_agreed:
            self._copies.restore(sequence, text.copied_at)
            text.n_agreed = text.copied_at
        else:
            self._cache.remove(sequence)
            text.n_agreed = 0
        # llama.cpp takes one step back between two decodes, so no snapshot serves any more.
        text.n_cached = text.snapshots_from = text.n_agreed

    def _copy_if_due(self, sequence: int, n: int, n_whole: Counter[int]) -> None:
        """Before n rows that may be dropped are decoded: copy the state, unless snapshots
        will serve. `n_whole` counts the rows of each sequence with those that are decoded
        again."""
        text = self._text(sequence)
        if not text.checkpoint_due:
            return
        text.checkpoint_due = False
        reach = self._reach(n_whole[sequence], n_whole)
        if reach >= n or (reach == n - 1 and n > 1):
            # In the latter case not if all n are dropped. Who decodes several rows does that
            # to keep some, and the text from its beginning is still there.
            return
        self._copy(sequence)

    def _copy(self, sequence: int) -> None:
        """Have a copy of the state at the end of the text, or of one that is near enough."""
        text = self._text(sequence)
        if text.n_missing and text.copied_at is not None and text.n_missing <= _MAX_REPEATED:
            return
        self._catch_up(sequence)
        if text.copied_at != len(text.tokens):
            self._copies.save(sequence, len(text.tokens))
            text.copied_at = len(text.tokens)

    def _catch_up(self, sequence: int) -> None:
        """Decode again what the cache does not hold of the text."""
        text = self._text(sequence)
        while text.n_missing:
            batch = Batch()
            self._add_missing(batch, sequence)
            self._run(batch)

    def _add_missing(self, batch: Batch, sequence: int) -> None:
        """Rows for what the cache does not hold of the text, at most one full batch."""
        text = self._text(sequence)
        for position in range(text.n_cached, len(text.tokens))[: self._n_rows]:
            batch.add(text.tokens[position], position, (sequence,), False)

    def _run(self, batch: Batch) -> Logits:
        """Decode rows, and note what the cache and its snapshots hold then."""
        n_rows = Counter(sequence for (sequence,) in batch.sequences)
        try:
            logits = self._decode_rows(batch)
        except BaseException:
            # Part of the batch may be in the cache, or all of it: hold on to nothing there.
            for sequence in n_rows:
                text = self._text(sequence)
                text.n_agreed, text.copied_at = 0, None
                text.n_cached = text.snapshots_from = len(text.tokens) + len(batch)
            raise
        for sequence, n in n_rows.items():
            text = self._text(sequence)
            text.n_cached += n
            text.n_agreed = text.n_cached
            text.snapshots_from = text.n_cached - self._reach(n, n_rows)
        if len(n_rows) > 1 or self._cache.n_window:
            # Cells that are decoded together are moved together. Where that puts the cell of
            # another sequence elsewhere, its state goes with it, its snapshots do not.
            for sequence, text in self._texts.items():
                if sequence not in n_rows:
                    text.snapshots_from = text.n_cached
        return logits

    def _reach(self, n: int, n_rows: Counter[int]) -> int:
        """How far snapshots go back after a decode of n rows of a sequence.

        Sequences with unequal numbers of rows are decoded one part after another. With three
        or more, a later part may move the cell of an earlier one.
        """
        if len(n_rows) > 2 and len(set(n_rows.values())) > 1:
            return 0
        return min(n - 1, self._n_snapshots)


__all__ = ["Rewinder"]
