"""A backend that remembers the logits of every text that it has decoded.

`specgen verify` draws the same few tokens thousands of times, so nearly every row that its rounds want
has been computed before. The loop runs on this backend without changes; a remembered row costs a copy
instead of a decode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from specgen.errors import BackendError, RollbackError
from specgen.method.backend import Backend, Batch, HiddenBackend
from specgen.method.cost_table import CostTable
from specgen.system.arrays import Hidden, Logits

#: The node of the empty text.
_EMPTY = 0
#: No new checkpoint is set within this many tokens after the last one: draws go back to the position
#: where they began, and a recurrent model keeps only its last checkpoint.
_CHECKPOINT_REACH = 16


class MemoBackend:
    """Wraps another backend, and computes each row only once.

    A text has one row: the *first* that was computed for it, bit for bit, in whatever batch it is wanted
    later. (The last bits of a backend's row depend on its batch. With a memory, all draws from a text
    see the same distribution.)

    The caller's sequences are texts, nodes of a trie. The inner backend's cache is updated only when a
    row is wanted that is not remembered: then sequences are cut back, cells are shared, and missing
    tokens are decoded. Nothing else may use the inner backend; `close` closes it.

    `n_bytes_max` limits the remembered rows: beyond it the least recently used rows are dropped. If the
    text of a dropped row comes again, its row is computed again, perhaps with other last bits.

    With `costs`, a decode that is answered from memory adds to `decode_s` the time that it would have
    taken by this table (`saved_s`). Policies that decide by the costs of decodes then decide as without
    a memory. With `hidden`, hidden states are remembered too, with `all_rows` those of all rows.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        n_bytes_max: int | None = None,
        costs: CostTable | None = None,
        hidden: bool = False,
        all_rows: bool = False,
    ) -> None:
        self._inner = inner
        self.vocabulary = inner.vocabulary
        self.n_vocab = inner.n_vocab
        self.n_ctx = inner.n_ctx
        self.n_batch = inner.n_batch
        self.n_outputs = inner.n_outputs
        self.n_sequences = inner.n_sequences
        self.rollback = inner.rollback
        self.can_branch = inner.can_branch
        #: The inner backend if hidden states are remembered: they follow the logits in a row.
        self._hidden_inner: HiddenBackend | None = None
        if hidden or all_rows:
            assert isinstance(inner, HiddenBackend), "hidden states are asked for"
            self._hidden_inner = inner
        self._all_rows = all_rows
        #: The hidden states of all rows of the last decode of the inner backend, for MTP layers.
        self._states: Hidden = np.empty((0, 0), np.float32)
        self._costs = costs
        #: The seconds that the decodes answered from memory would have taken.
        self.saved_s = 0.0
        self._n_saved_rows = 0
        self._n_bytes_max = n_bytes_max
        self._texts = _Trie()
        #: Rows by node, the least recently used first; read-only.
        self._rows: OrderedDict[int, Logits] = OrderedDict()
        #: The text of each sequence: as the caller knows it, and as the inner cache holds it.
        self._nodes = [_EMPTY] * inner.n_sequences
        self._cached = [_EMPTY] * inner.n_sequences
        #: The last checkpoint of each sequence of the inner cache, a beginning of its text; None if
        #: there is none.
        self._checkpoints: list[int | None] = [None] * inner.n_sequences
        #: Whether a decode failed, so that the content of the inner cache is unknown.
        self._is_lost = False
        self._recalled = np.empty((0, inner.n_vocab), np.float32)
        #: Decodes of the inner backend, including those that only decode missing tokens.
        self.n_decodes = 0

    @property
    def n_rows_remembered(self) -> int:
        return len(self._rows)

    @property
    def decode_s(self) -> float:
        """The seconds that the inner backend spent in decoding, plus `saved_s`."""
        return self._inner.decode_s + self.saved_s

    @property
    def n_decoded_rows(self) -> int:
        """The rows that the inner backend decoded, plus those of batches answered from memory."""
        return self._inner.n_decoded_rows + self._n_saved_rows

    def decode(self, batch: Batch) -> Logits:
        """See `Backend.decode`. Also raise `BackendError` if a batch would leave a gap in a sequence, or
        if one row would continue different texts."""
        return self._decode(batch)[:, : self.n_vocab]

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        """See `HiddenBackend.decode_hidden`. Raise `BackendError` if such hidden states are not remembered.
        States of rows without logits, as in a prompt, are computed each time."""
        if self._hidden_inner is None or all_rows != self._all_rows:
            raise BackendError("no such hidden states are remembered")
        if all_rows and not all(batch.wants_logits):
            nodes, ends = self._read(batch)
            wanted = [node for node, wants in zip(nodes, batch.wants_logits, strict=True) if wants]
            logits = self._compute(batch, wanted, ends)[:, : self.n_vocab]
            for sequence, node in ends.items():
                self._nodes[sequence] = node
            return logits, self._states
        rows = self._decode(batch)
        return rows[:, : self.n_vocab], rows[:, self.n_vocab :]

    def _decode(self, batch: Batch) -> Logits:
        """Return the wanted rows. If hidden states are remembered, they follow the logits in each row."""
        nodes, ends = self._read(batch)
        wanted = [node for node, wants in zip(nodes, batch.wants_logits, strict=True) if wants]
        if all(node in self._rows for node in wanted):
            logits = self._recall(wanted)
            if self._costs:
                self.saved_s += self._costs.seconds(len(batch))
            self._n_saved_rows += len(batch)
        else:
            logits = self._compute(batch, wanted, ends)
        for sequence, node in ends.items():
            self._nodes[sequence] = node
        return logits

    def length(self, sequence: int) -> int:
        return self._texts.depths[self._nodes[sequence]]

    def text(self, sequence: int) -> Sequence[int]:
        return self._texts.tokens_after(_EMPTY, self._nodes[sequence])

    def checkpoint(self, sequence: int) -> None:
        """Do nothing: any text can be returned to, and `decode` sets the inner backend's checkpoints."""

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """See `Backend.copy`. Also raise `BackendError` if `destination` would not be one text without a
        gap afterwards."""
        if not self.can_branch:
            raise BackendError(f"sequences {source} and {destination} cannot share a state")
        texts, here = self._texts, self._nodes[destination]
        shared = self._nodes[source]
        if end >= 0:
            shared = texts.ancestor(shared, end)
        n_here, n_shared = texts.depths[here], texts.depths[shared]
        if n_shared <= start:
            return
        if n_here < start or texts.common(here, shared) not in (here, shared):
            raise BackendError(
                f"sequence {destination} of {n_here} tokens cannot share the tokens {start} to "
                f"{n_shared} of sequence {source}: it would not be one text"
            )
        if n_here < n_shared:
            self._nodes[destination] = shared

    def remove(self, sequence: int, start: int = 0) -> None:
        """See `Backend.remove`. This never fails: if the inner cache cannot drop the end of a sequence,
        it is emptied and filled again when it is next needed."""
        self._nodes[sequence] = self._texts.ancestor(self._nodes[sequence], start)

    def hold(self, sequence: int) -> None:
        """Let the inner cache hold the whole text of a sequence and no more, for a draft that reads it there."""
        if self._is_lost:
            self._empty_inner()
            self._is_lost = False
        self._bring_up([sequence])

    def close(self) -> None:
        """Free the inner cache. Remembered rows can still be looked up."""
        self._inner.close()

    # --- the remembered rows ----------------------------------------------------------------

    def remembered(self, text: Sequence[int]) -> Logits | None:
        """Return the row after a text, float32[n_vocab], read-only; None if it is not remembered."""
        node = self._texts.find(text)
        row = None if node is None else self._rows.get(node)
        return None if row is None else row[: self.n_vocab]

    def rows(self) -> Iterator[tuple[tuple[int, ...], Logits]]:
        """Yield every remembered text and its row, float32[n_vocab], read-only, in the order in which the
        texts were first seen: a text comes after its prefixes."""
        for node in sorted(self._rows):
            row = self._rows.get(node)
            if row is not None:  # the row may have been dropped since the last `yield`
                yield tuple(self._texts.tokens_after(_EMPTY, node)), row[: self.n_vocab]

    def _recall(self, nodes: Sequence[int]) -> Logits:
        """Return copies of remembered rows, float32[n, n_columns]; the caller may write into them."""
        if len(nodes) > len(self._recalled):
            n_columns = len(next(iter(self._rows.values())))
            self._recalled = np.empty((len(nodes), n_columns), np.float32)
        for index, node in enumerate(nodes):
            self._recalled[index] = self._rows[node]
            self._rows.move_to_end(node)
        return self._recalled[: len(nodes)]

    def _remember(self, nodes: Sequence[int], logits: Logits) -> None:
        """Remember rows of float32[n, n_columns]. Overwrite in `logits` each row that is already
        remembered with the remembered one."""
        for index, node in enumerate(nodes):
            known = self._rows.get(node)
            if known is not None:
                logits[index] = known
            else:
                row = logits[index].copy()
                row.flags.writeable = False
                self._rows[node] = row
            self._rows.move_to_end(node)
        if self._n_bytes_max is not None:
            row_bytes = logits.shape[1] * logits.itemsize
            while self._rows and len(self._rows) * row_bytes > self._n_bytes_max:
                self._rows.popitem(last=False)

    # --- the inner backend ------------------------------------------------------------------

    def _read(self, batch: Batch) -> tuple[list[int], dict[int, int]]:
        """Return the node of each row, and the last node of each sequence in the batch. Raise
        `BackendError` if the batch is not valid."""
        if not len(batch):
            raise BackendError("a batch of no rows")
        if sum(batch.wants_logits) > self.n_outputs:
            raise BackendError(
                f"a batch wants {sum(batch.wants_logits)} rows of logits; {self.n_outputs} at most"
            )
        depths, n_ctx = self._texts.depths, self.n_ctx
        nodes: list[int] = []
        ends: dict[int, int] = {}
        for token, position, sequences in zip(
            batch.tokens, batch.positions, batch.sequences, strict=True
        ):
            if not sequences or not all(0 <= s < len(self._nodes) for s in sequences):
                raise BackendError(f"a row of sequences {sequences}; there are {len(self._nodes)}")
            before = {ends.get(s, self._nodes[s]) for s in sequences}
            parent = before.pop()
            if before or depths[parent] != position or position >= n_ctx:
                raise BackendError(
                    f"a row at position {position} of {n_ctx} does not continue the sequences "
                    f"{sequences} as one text"
                )
            node = self._texts.child(parent, token)
            nodes.append(node)
            ends.update(dict.fromkeys(sequences, node))
        return nodes, ends

    def _compute(self, batch: Batch, wanted: Sequence[int], ends: dict[int, int]) -> Logits:
        """Decode the tokens that the inner cache misses, then the batch, and remember its rows."""
        if self._is_lost:
            self._empty_inner()
        self._is_lost = True
        try:
            logits = self._decode_at(batch, sorted(ends))
        except RollbackError:
            self._empty_inner()
            logits = self._decode_at(batch, sorted(ends))
        for sequence, node in ends.items():
            self._cached[sequence] = node
        self._is_lost = False
        self._remember(wanted, logits)
        return logits

    def _decode_at(self, batch: Batch, sequences: Sequence[int]) -> Logits:
        """Decode a batch after the inner cache of these sequences agrees with the caller's texts."""
        self._bring_up(sequences)
        depths = self._texts.depths
        for sequence in sequences:
            known, here = self._checkpoints[sequence], self._cached[sequence]
            if known is None or depths[here] - depths[known] > _CHECKPOINT_REACH:
                self._inner.checkpoint(sequence)
                self._checkpoints[sequence] = here
        return self._decode_inner(batch)

    def _bring_up(self, sequences: Sequence[int]) -> None:
        """Make the inner cache hold the texts of `sequences`, and drop from the other sequences all tokens
        that are not in their texts."""
        firsts: dict[int, int] = {}
        for sequence in sequences:
            firsts.setdefault(self._nodes[sequence], sequence)
        for sequence in firsts.values():
            self._cut(sequence)
            # Before other sequences are cut: a finished branch may hold cells that its trunk needs.
            self._borrow(sequence)
        for sequence in range(len(self._nodes)):
            self._cut(sequence)
        for sequence in sequences:
            first = firsts[self._nodes[sequence]]
            if first == sequence or not self.can_branch:
                self._borrow(sequence)
                self._fill(sequence)
            else:
                self._share(first, sequence)

    def _cut(self, sequence: int) -> None:
        """Drop the tokens from the inner cache that are not in a sequence's text."""
        cached = self._cached[sequence]
        common = self._texts.common(cached, self._nodes[sequence])
        if common != cached:
            self._drop(sequence, common)

    def _borrow(self, sequence: int) -> None:
        """Share cells with the sequence of the inner cache that holds most of this sequence's text."""
        if not self.can_branch:
            return
        texts, wanted, own = self._texts, self._nodes[sequence], self._cached[sequence]
        best, lender = own, sequence
        for other, cached in enumerate(self._cached):
            if best == wanted:
                break
            if texts.depths[cached] > texts.depths[best]:
                common = texts.common(cached, wanted)
                if texts.depths[common] > texts.depths[best]:
                    best, lender = common, other
        if lender != sequence:
            self._inner.copy(lender, sequence, texts.depths[own], texts.depths[best])
            self._cached[sequence] = best

    def _share(self, first: int, sequence: int) -> None:
        """Let a branch share all cells of its trunk, as `pack` does for a tree."""
        if self._cached[sequence] != _EMPTY:
            self._drop(sequence, _EMPTY)
        self._inner.copy(first, sequence)
        self._cached[sequence] = self._cached[first]

    def _fill(self, sequence: int) -> None:
        """Decode the tokens of a sequence's text that the inner cache misses, in batches like a prompt."""
        cached, wanted = self._cached[sequence], self._nodes[sequence]
        missing = self._texts.tokens_after(cached, wanted)
        position = self._texts.depths[cached]
        for start in range(0, len(missing), self.n_batch):
            batch = Batch()
            for offset, token in enumerate(missing[start : start + self.n_batch], start):
                batch.add(token, position + offset, (sequence,), False)
            self._decode_inner(batch)
        self._cached[sequence] = wanted

    def _decode_inner(self, batch: Batch) -> Logits:
        self.n_decodes += 1
        inner = self._hidden_inner
        if inner is None:
            return self._inner.decode(batch)
        if self._all_rows:
            logits, self._states = inner.decode_hidden(batch, all_rows=True)
            states = self._states[np.flatnonzero(batch.wants_logits)]
            return np.concatenate([logits, states], axis=1)
        # Each row of a batch for hidden states costs an output, so leading rows without one go first.
        n_silent = [*batch.wants_logits, True].index(True)
        if n_silent:
            inner.decode(batch.part(0, n_silent))
        if n_silent == len(batch):
            return np.empty((0, self.n_vocab), np.float32)
        return np.concatenate(inner.decode_hidden(batch.part(n_silent, len(batch))), axis=1)

    def _empty_inner(self) -> None:
        for sequence in range(len(self._cached)):
            self._drop(sequence, _EMPTY)

    def _drop(self, sequence: int, kept: int) -> None:
        """Drop the tokens after the text `kept` from a sequence of the inner cache."""
        depths, checkpoint = self._texts.depths, self._checkpoints[sequence]
        self._inner.remove(sequence, depths[kept])
        self._cached[sequence] = kept
        if kept == _EMPTY or (checkpoint is not None and depths[checkpoint] > depths[kept]):
            self._checkpoints[sequence] = None


class _Trie:
    """Texts as numbers: a node is the text of its parent and one more token; node 0 is the empty text.
    Adding a token takes the same short time for a text of any length."""

    def __init__(self) -> None:
        self.depths = [0]
        self._parents = [_EMPTY]
        self._tokens = [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """Return the node of the text with one more token."""
        node = self._children.setdefault((parent, token), len(self.depths))
        if node == len(self.depths):
            self.depths.append(self.depths[parent] + 1)
            self._parents.append(parent)
            self._tokens.append(token)
        return node

    def find(self, text: Sequence[int]) -> int | None:
        """Return the node of a text; None if it was never seen."""
        node: int | None = _EMPTY
        for token in text:
            if node is None:
                break
            node = self._children.get((node, token))
        return node

    def ancestor(self, node: int, depth: int) -> int:
        """Return the node of the first `depth` tokens of a text; of the whole text if it is shorter."""
        if depth <= 0:
            return _EMPTY
        while self.depths[node] > depth:
            node = self._parents[node]
        return node

    def common(self, one: int, other: int) -> int:
        """Return the node of the longest common prefix of both texts."""
        if _EMPTY in (one, other):
            return _EMPTY
        one = self.ancestor(one, self.depths[other])
        other = self.ancestor(other, self.depths[one])
        while one != other:
            one, other = self._parents[one], self._parents[other]
        return one

    def tokens_after(self, beginning: int, node: int) -> list[int]:
        """Return the tokens of a text after one of its prefixes."""
        tokens: list[int] = []
        while node != beginning:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]
