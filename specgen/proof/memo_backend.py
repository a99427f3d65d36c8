"""A backend that remembers the logits of every text it has seen.

`specgen verify` draws the same few tokens thousands of times: nearly every row that its
rounds ask for has been computed before. The loop runs on this backend unchanged, and what is
remembered costs a copy instead of a decode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from specgen.arrays import Hidden, Logits
from specgen.backend.base import Backend, Batch, HiddenBackend, Rollback, Vocabulary
from specgen.calibration.cost_table import CostTable
from specgen.errors import BackendError, RollbackError

#: The node of the empty text.
_EMPTY = 0
#: How many tokens behind a checkpoint none is made again: draws go back to where they began,
#: and a recurrent model has one checkpoint, the last.
_CHECKPOINT_REACH = 16


class MemoBackend:
    """Another backend, each of whose rows is computed once.

    A text has one row: the *first* that was computed for it, bit for bit, whatever batch asks
    for it later. (A backend's rows differ in their last bits with the batch that they are
    computed in. With a memory, all draws from a text see one and the same distribution.)

    The sequences that a caller sees are texts, nodes of a trie. Only when a row is asked for
    that is not remembered is the inner backend's cache brought to where it would be by now:
    cut back, shared by copies, and given the rows that it missed. The inner backend is this
    one's alone; `close` closes it.

    `n_bytes_max` bounds the remembered rows: beyond it, those used least recently go, and
    count in `n_evicted`. A text whose row went is computed anew when it comes again, perhaps
    with other last bits.

    With `costs`, a decode that is answered from memory counts in `decode_s` with what the table
    says that it would have taken (`saved_s`): whoever decides by what decodes cost then decides
    as without a memory. With `hidden`, hidden states are remembered too.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        n_bytes_max: int | None = None,
        costs: CostTable | None = None,
        hidden: bool = False,
    ) -> None:
        self._inner = inner
        #: What tells hidden states too; these stand behind the logits of a row then.
        self._hidden_inner: HiddenBackend | None = None
        if hidden:
            assert isinstance(inner, HiddenBackend), "hidden states are asked for"
            self._hidden_inner = inner
        self._costs = costs
        #: Seconds that decodes which were answered from memory would have taken.
        self.saved_s = 0.0
        self._n_saved_rows = 0
        self._n_bytes_max = n_bytes_max
        self._texts = _Trie()
        #: Rows by node, the least recently used first; not to be written to.
        self._rows: OrderedDict[int, Logits] = OrderedDict()
        #: The text of each sequence: as the caller knows it, and as the inner cache holds it.
        self._nodes = [_EMPTY] * inner.n_sequences
        self._cached = [_EMPTY] * inner.n_sequences
        #: Where each sequence of the inner cache can go back to for certain, a beginning of
        #: what it holds; None if nobody said so.
        self._checkpoints: list[int | None] = [None] * inner.n_sequences
        #: After a failure nobody knows what the inner cache holds.
        self._is_lost = False
        self._recalled = np.empty((0, inner.n_vocab), np.float32)
        #: Decodes of the inner backend, those that only catch up among them.
        self.n_decodes = 0
        #: Decodes that were answered from memory.
        self.n_hits = 0
        #: Rows that had to go.
        self.n_evicted = 0

    @property
    def n_rows_remembered(self) -> int:
        return len(self._rows)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._inner.vocabulary

    @property
    def n_vocab(self) -> int:
        return self._inner.n_vocab

    @property
    def n_ctx(self) -> int:
        return self._inner.n_ctx

    @property
    def n_batch(self) -> int:
        return self._inner.n_batch

    @property
    def n_outputs(self) -> int:
        return self._inner.n_outputs

    @property
    def n_sequences(self) -> int:
        return self._inner.n_sequences

    @property
    def rollback(self) -> Rollback:
        return self._inner.rollback

    @property
    def can_branch(self) -> bool:
        return self._inner.can_branch

    @property
    def decode_s(self) -> float:
        """Seconds that the inner backend spent in decoding, and `saved_s`."""
        return self._inner.decode_s + self.saved_s

    @property
    def n_decoded_rows(self) -> int:
        """Rows that the inner backend decoded, and those that were answered from memory."""
        return self._inner.n_decoded_rows + self._n_saved_rows

    def decode(self, batch: Batch) -> Logits:
        """See `Backend.decode`. Raises `BackendError` also where a batch would leave a gap in
        a sequence, or continue different texts by one row."""
        return self._decode(batch)[:, : self.n_vocab]

    def decode_hidden(self, batch: Batch) -> tuple[Logits, Hidden]:
        """See `HiddenBackend.decode_hidden`; where hidden states are remembered."""
        if self._hidden_inner is None:
            raise BackendError("no hidden states are remembered")
        rows = self._decode(batch)
        return rows[:, : self.n_vocab], rows[:, self.n_vocab :]

    def _decode(self, batch: Batch) -> Logits:
        """The rows that are wanted, with the hidden states behind the logits."""
        nodes, ends = self._read(batch)
        wanted = [node for node, wants in zip(nodes, batch.wants_logits, strict=True) if wants]
        if all(node in self._rows for node in wanted):
            self.n_hits += bool(wanted)
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
        """Nothing: any text can be gone back to, and the inner backend is told by `decode`."""

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """See `Backend.copy`. Raises `BackendError` also if `destination` would not be one
        text without a gap afterwards."""
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
        """See `Backend.remove`. Never fails: an inner cache that cannot drop the end of a
        sequence is filled anew when it is next needed."""
        self._nodes[sequence] = self._texts.ancestor(self._nodes[sequence], start)

    def close(self) -> None:
        """Free the inner cache; what is remembered can still be looked up."""
        self._inner.close()

    # --- what is remembered -----------------------------------------------------------------

    def remembered(self, text: Sequence[int]) -> Logits | None:
        """The row after a text, float32[n_vocab], read-only; None if it is not remembered."""
        node = self._texts.find(text)
        row = None if node is None else self._rows.get(node)
        return None if row is None else row[: self.n_vocab]

    def rows(self) -> Iterator[tuple[tuple[int, ...], Logits]]:
        """Every remembered text and its row, float32[n_vocab], read-only; in the order in
        which the texts were first seen, so that a text comes after its beginnings."""
        for node in sorted(self._rows):
            row = self._rows.get(node)
            if row is not None:  # unless it went while the caller was busy
                yield tuple(self._texts.tokens_after(_EMPTY, node)), row[: self.n_vocab]

    def _recall(self, nodes: Sequence[int]) -> Logits:
        """Copies of remembered rows, float32[n, n_columns]: the caller may write into them."""
        if len(nodes) > len(self._recalled):
            n_columns = len(next(iter(self._rows.values())))
            self._recalled = np.empty((len(nodes), n_columns), np.float32)
        for index, node in enumerate(nodes):
            self._recalled[index] = self._rows[node]
            self._rows.move_to_end(node)
        return self._recalled[: len(nodes)]

    def _remember(self, nodes: Sequence[int], logits: Logits) -> None:
        """Remember new rows of float32[n, n_columns]; put the first one where there is one."""
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
                self.n_evicted += 1

    # --- the inner backend ------------------------------------------------------------------

    def _read(self, batch: Batch) -> tuple[list[int], dict[int, int]]:
        """The node of each row, and where the sequences end after them."""
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
        """Decode a batch, after whatever the inner cache missed, and remember its rows."""
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
        """Decode a batch of these sequences where the caller knows them to be."""
        self._bring_up(sequences)
        depths = self._texts.depths
        for sequence in sequences:
            known, here = self._checkpoints[sequence], self._cached[sequence]
            if known is None or depths[here] - depths[known] > _CHECKPOINT_REACH:
                self._inner.checkpoint(sequence)
                self._checkpoints[sequence] = here
        return self._decode_inner(batch)

    def _bring_up(self, sequences: Sequence[int]) -> None:
        """Make the inner cache hold the texts of `sequences`, and of the other sequences
        nothing that they do not have."""
        firsts: dict[int, int] = {}
        for sequence in sequences:
            firsts.setdefault(self._nodes[sequence], sequence)
        for sequence in firsts.values():
            self._cut(sequence)
            # Before anything else is cut: a branch that is over may hold what its trunk needs.
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
        """Drop what a sequence does not have from the inner cache."""
        cached = self._cached[sequence]
        common = self._texts.common(cached, self._nodes[sequence])
        if common != cached:
            self._drop(sequence, common)

    def _borrow(self, sequence: int) -> None:
        """Share the cells of whichever sequence holds more of this one's text."""
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
        """Let a branch have the very cells of its trunk, as the packing of a tree does."""
        if self._cached[sequence] != _EMPTY:
            self._drop(sequence, _EMPTY)
        self._inner.copy(first, sequence)
        self._cached[sequence] = self._cached[first]

    def _fill(self, sequence: int) -> None:
        """Decode what is missing of a sequence's text in the inner cache, as a prompt is."""
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
        # Of a batch for hidden states each row costs an output: those that nobody asks for go before.
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
        """Drop what comes after the text `kept` from a sequence of the inner cache."""
        depths, checkpoint = self._texts.depths, self._checkpoints[sequence]
        self._inner.remove(sequence, depths[kept])
        self._cached[sequence] = kept
        if kept == _EMPTY or (checkpoint is not None and depths[checkpoint] > depths[kept]):
            self._checkpoints[sequence] = None


class _Trie:
    """Texts as numbers: a node is its parent's text and one token more, node 0 the empty
    text. Adding a token to a text of any length takes the same short time."""

    def __init__(self) -> None:
        self.depths = [0]
        self._parents = [_EMPTY]
        self._tokens = [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """The text with a token more."""
        node = self._children.setdefault((parent, token), len(self.depths))
        if node == len(self.depths):
            self.depths.append(self.depths[parent] + 1)
            self._parents.append(parent)
            self._tokens.append(token)
        return node

    def find(self, text: Sequence[int]) -> int | None:
        """The node of a text; None if it was never seen."""
        node: int | None = _EMPTY
        for token in text:
            if node is None:
                break
            node = self._children.get((node, token))
        return node

    def ancestor(self, node: int, depth: int) -> int:
        """The first `depth` tokens of a text; all of it if it is shorter."""
        if depth <= 0:
            return _EMPTY
        while self.depths[node] > depth:
            node = self._parents[node]
        return node

    def common(self, one: int, other: int) -> int:
        """The longest text with which both texts begin."""
        if _EMPTY in (one, other):
            return _EMPTY
        one = self.ancestor(one, self.depths[other])
        other = self.ancestor(other, self.depths[one])
        while one != other:
            one, other = self._parents[one], self._parents[other]
        return one

    def tokens_after(self, beginning: int, node: int) -> list[int]:
        """The tokens of a text after one of its beginnings."""
        tokens: list[int] = []
        while node != beginning:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]
