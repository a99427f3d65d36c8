"""A memory changes nothing but the time: `MemoBackend` against the backend inside it.

The fake backend's logits depend on what its cache really holds, so a row that was looked up
for the wrong text, or computed on a cache that was brought up wrongly, is another row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import BackendError
from specgen.events import CommittedEvent
from specgen.measure.proof.memo_backend import MemoBackend
from specgen.method.backend import Batch
from specgen.method.draft import NO_DRAFT, ROOT, Branches, Draft, keep_path, pack
from specgen.options import SamplerOptions
from specgen.session.answer_loop import AnswerLoop
from specgen.system.arrays import Logits
from tests.helpers.common import UNFILTERED
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import GREEDY, Clock, Setup, TreeDrafter, model_drafter

N_VOCAB = 4
ROW_BYTES = 4 * N_VOCAB
LANGUAGE = random_language(N_VOCAB, seed=5)


def fake(*, recurrent: bool = False, n_ctx: int = 512, n_batch: int = 7) -> FakeBackend:
    return FakeBackend(
        FakeVocabulary.letters(N_VOCAB),
        LANGUAGE,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_sequences=8,
        recurrent=recurrent,
    )


def chain(tokens: Sequence[int], start: int = 0, *, sequence: int = 0, wants: int = 1) -> Batch:
    """A batch of one sequence, of whose rows the last `wants` want logits."""
    batch = Batch()
    for offset, token in enumerate(tokens):
        batch.add(token, start + offset, (sequence,), offset >= len(tokens) - wants)
    return batch


def prefill(memo: MemoBackend, text: Sequence[int], *, sequence: int = 0) -> Logits:
    """Decode a text as the loop decodes a prompt; the row after it."""
    logits = np.empty((0, 0), np.float32)
    for start in range(0, len(text), memo.n_batch):
        end = start + memo.n_batch
        piece = chain(text[start:end], start, sequence=sequence, wants=int(end >= len(text)))
        logits = memo.decode(piece)
    return logits


def random_tree(rng: np.random.Generator, n_nodes: int, n_leaves: int) -> Draft:
    """A tree of any form, siblings with equal tokens included."""
    parents: list[int] = []
    for _ in range(n_nodes):
        parent = int(rng.integers(ROOT, len(parents)))
        leaves = set(range(len(parents))) - set(parents)
        if parents and parent not in leaves and len(leaves) == n_leaves:
            parent = min(leaves)
        parents.append(parent)
    n = len(parents)
    tokens = tuple(rng.integers(0, N_VOCAB, n).tolist())
    return Draft(tokens, tuple(parents), ("t",) * n, (None,) * n, (None,) * n)


class Twins:
    """A plain and a remembering backend that are told the same; every row is compared."""

    def __init__(
        self, seed: int, n_bytes_max: int | None = None, inner: FakeBackend | None = None
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.plain = fake()
        self.inner = inner or fake()
        self.memo = MemoBackend(self.inner, n_bytes_max=n_bytes_max)
        self.slots = [Branches(0, 4), Branches(4, 4)]
        #: Of each slot: the text, whose last token is not decoded yet.
        self.texts = [[0], [0]]

    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            step = self.rng.random()
            if step < 0.6:
                self.round([0, 1] if self.rng.random() < 0.3 else [int(self.rng.integers(2))])
            elif step < 0.85:
                self.rewind(int(self.rng.integers(2)))
            else:
                self.adopt(int(self.rng.integers(2)))
            for sequence in range(8):
                assert self.memo.length(sequence) == self.plain.length(sequence)

    def round(self, numbers: Sequence[int]) -> None:
        """What a round of the loop does, with a random verdict."""
        drafts = []
        for _ in numbers:
            n_nodes = int(self.rng.integers(0, 7))
            drafts.append(random_tree(self.rng, n_nodes, 4) if n_nodes else NO_DRAFT)
        rows = []
        for backend in (self.plain, self.memo):
            batch = Batch()
            for number, draft in zip(numbers, drafts, strict=True):
                slot, text = self.slots[number], self.texts[number]
                pack(batch, backend, slot, text[backend.length(slot.first) :], draft)
            batch.wants_logits = [w and i % 5 != 3 for i, w in enumerate(batch.wants_logits)]
            rows.append(backend.decode(batch))
        np.testing.assert_array_equal(rows[0], rows[1])
        rows[1][:] = np.nan  # the caller's to write into
        for number, draft in zip(numbers, drafts, strict=True):
            end = int(self.rng.integers(ROOT, len(draft)))
            path = draft.path(end)
            for backend in (self.plain, self.memo):
                keep_path(backend, self.slots[number], draft, path)
            self.texts[number] += [draft.tokens[node] for node in path]
            self.texts[number] += self.rng.integers(0, N_VOCAB, 1).tolist()

    def rewind(self, number: int) -> None:
        n_kept = int(self.rng.integers(0, len(self.texts[number])))
        del self.texts[number][n_kept + 1 :]
        for backend in (self.plain, self.memo):
            backend.remove(self.slots[number].first, n_kept)

    def adopt(self, number: int) -> None:
        """One slot takes over the other's text."""
        here, there = self.slots[number].first, self.slots[1 - number].first
        self.texts[number] = list(self.texts[1 - number])
        n_kept = int(self.rng.integers(0, len(self.texts[number])))
        for backend in (self.plain, self.memo):
            backend.remove(here)
            backend.copy(there, here, 0, n_kept)
        del self.texts[number][n_kept + 1 :]


@settings(max_examples=150)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 40),
    st.sampled_from([None, 0, ROW_BYTES, 9 * ROW_BYTES]),
)
def test_every_row_is_the_plain_backends(seed: int, n_steps: int, n_bytes_max: int | None) -> None:
    twins = Twins(seed, n_bytes_max)
    twins.run(n_steps)
    memo = twins.memo
    for text, row in memo.rows():
        np.testing.assert_array_equal(row, LANGUAGE(text))
    if n_bytes_max is not None:
        assert memo.n_rows_remembered * ROW_BYTES <= n_bytes_max
    assert memo.n_decodes == twins.inner.n_decodes


@pytest.mark.parametrize("seed", range(30))
def test_the_inner_cache_needs_no_more_room_than_a_plain_one(seed: int) -> None:
    """Whatever is stale goes before a decode, and what branches share they share."""
    n_cells: list[tuple[int, int]] = []

    class Watched(FakeBackend):
        def decode(self, batch: Batch) -> Logits:
            logits = super().decode(batch)
            n_cells.append((self.n_cells, twins.plain.n_cells))
            return logits

    inner = Watched(FakeVocabulary.letters(N_VOCAB), LANGUAGE, n_batch=7)
    twins = Twins(seed, inner=inner)
    for _ in range(40):
        if twins.rng.random() < 0.8:
            twins.round([0])
        else:
            twins.rewind(0)
    assert n_cells
    assert all(inner <= plain for inner, plain in n_cells)


def test_rounds_that_are_repeated_are_not_decoded() -> None:
    inner = fake()
    memo = MemoBackend(inner)
    context = [0, 1, 2, 3, 2, 1, 0, 0, 3, 1]
    n_decodes = []
    for _ in range(4):
        for seed in range(5):
            prefill(memo, context[:-1])
            rng, text = np.random.default_rng(seed), list(context)
            for _ in range(3):
                batch, slot, draft = Batch(), Branches(0, 4), random_tree(rng, 5, 4)
                pack(batch, memo, slot, text[memo.length(0) :], draft)
                memo.decode(batch)
                path = draft.path(int(rng.integers(len(draft))))
                keep_path(memo, slot, draft, path)
                text += [*(draft.tokens[node] for node in path), 1]
            memo.remove(0)
        n_decodes.append(memo.n_decodes)
    assert n_decodes[0] < 5 * 8
    assert n_decodes == [n_decodes[0]] * 4
    assert memo.n_decodes == inner.n_decodes


class Drifting:
    """A language whose rows are never twice the same, as if each batch rounded anew."""

    def __init__(self) -> None:
        self.n_rows = 0

    def __call__(self, text: tuple[int, ...]) -> Logits:
        self.n_rows += 1
        return np.full(N_VOCAB, self.n_rows, np.float32)


def test_a_text_keeps_the_first_row_that_was_computed() -> None:
    inner = fake()
    inner.language = Drifting()
    memo = MemoBackend(inner)
    first = memo.decode(chain([0, 1], wants=2)).copy()
    memo.remove(0)
    # The second row is new, the others are not: in one batch with it they are as they were.
    batch = chain([0, 1, 2], wants=3)
    second = memo.decode(batch).copy()
    assert memo.n_decodes == 2
    np.testing.assert_array_equal(second[:2], first)
    memo.remove(0, 1)
    np.testing.assert_array_equal(memo.decode(chain([1, 2], 1, wants=2)), second[1:])
    # Two generations with one text, in one batch.
    both = Batch()
    for sequence in (0, 4):
        memo.remove(sequence)
        both.add(3, 0, (sequence,), wants_logits=True)
    rows = memo.decode(both)
    np.testing.assert_array_equal(rows[0], rows[1])


def test_what_a_caller_writes_into_rows_is_not_remembered() -> None:
    memo = MemoBackend(fake())
    for _ in range(3):  # computed at first, then recalled
        rows = memo.decode(chain([0, 1, 2], wants=2))
        np.testing.assert_array_equal(rows, [LANGUAGE((0, 1)), LANGUAGE((0, 1, 2))])
        rows[:] = -np.inf
        memo.remove(0)
    row = memo.remembered([0, 1])
    assert row is not None
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0


def test_remembered_rows_are_found_by_their_text() -> None:
    memo = MemoBackend(fake())
    memo.decode(chain([0, 1, 2], wants=2))
    for text in ([0, 1], (0, 1, 2)):
        np.testing.assert_array_equal(memo.remembered(text), LANGUAGE(tuple(text)))
    for text in ([0], [], [1], [0, 1, 2, 3]):
        assert memo.remembered(text) is None
    assert [text for text, _ in memo.rows()] == [(0, 1), (0, 1, 2)]
    assert memo.n_rows_remembered == 2


def test_rows_used_least_recently_go_first() -> None:
    memo = MemoBackend(fake(), n_bytes_max=2 * ROW_BYTES + 1)
    for token in (0, 1, 0, 2):  # 0 is used again before 2 comes
        memo.decode(chain([token]))
        memo.remove(0)
    assert memo.n_decodes == 3
    assert [text for text, _ in memo.rows()] == [(0,), (2,)]
    np.testing.assert_array_equal(memo.decode(chain([1]))[0], LANGUAGE((1,)))
    assert memo.n_decodes == 4


def test_a_long_prompt_is_decoded_once_and_in_few_pieces() -> None:
    inner = fake(n_ctx=2048, n_batch=256)
    memo = MemoBackend(inner)
    prompt = np.random.default_rng(0).integers(0, N_VOCAB, 1000).tolist()
    prefill(memo, prompt)
    assert (inner.n_decodes, inner.n_decoded_rows) == (4, 1000)
    for token in range(N_VOCAB):
        memo.decode(chain([token], 1000))
        memo.remove(0, 1000)
    # A second generation of the same prompt shares the first one's cells.
    prefill(memo, prompt, sequence=4)
    memo.decode(chain([0, 0], 1000, sequence=4))
    assert inner.n_decoded_rows == 1000 + N_VOCAB + 2
    assert inner.text(4) == (*prompt, 0, 0)


def test_an_accepted_branch_is_not_decoded_again() -> None:
    """Even if it was another one than the first: its cells are lent before they are dropped."""
    inner = fake()
    memo = MemoBackend(inner)
    memo.decode(chain([0, 1]))
    draft = Draft((2, 3), (ROOT, ROOT), ("t",) * 2, (None,) * 2, (None,) * 2)
    batch = Batch()
    pack(batch, memo, Branches(0, 2), [2], draft)
    memo.decode(batch)
    keep_path(memo, Branches(0, 2), draft, [1])
    memo.decode(chain([0], 4))
    assert inner.decoded == [0, 1, 2, 2, 3, 0]
    assert inner.text(0) == (0, 1, 2, 3, 0)
    assert inner.text(1) == ()


def test_a_recurrent_cache_is_filled_anew_where_it_cannot_go_back() -> None:
    inner = fake(recurrent=True)
    memo = MemoBackend(inner)
    assert (memo.can_branch, memo.rollback) == (False, "states")
    for last in (1, 2, 3, 2, 1):
        np.testing.assert_array_equal(memo.decode(chain([0, last]))[0], LANGUAGE((0, last)))
        memo.remove(0, 1)
        np.testing.assert_array_equal(memo.decode(chain([last], 1))[0], LANGUAGE((0, last)))
        memo.remove(0)
    assert memo.n_decodes == 3
    with pytest.raises(BackendError, match="cannot share"):
        memo.copy(0, 1)


def test_a_recurrent_cache_keeps_its_checkpoint_where_the_draws_begin() -> None:
    """A draw is some rounds; all of them are taken back at once, and the prompt stays."""
    inner = fake(recurrent=True)
    memo = MemoBackend(inner)
    prompt = [0, 1, 2, 3] * 10
    prefill(memo, prompt)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for _ in range(3):
            n_past = memo.length(0)
            memo.checkpoint(0)
            tokens = rng.integers(0, N_VOCAB, 4).tolist()
            memo.decode(chain(tokens, n_past, wants=4))
            memo.remove(0, n_past + int(rng.integers(1, 5)))
        memo.remove(0, len(prompt))
    assert inner.decoded[: len(prompt)] == prompt
    assert inner.n_decoded_rows <= len(prompt) + 20 * (3 * 4 + 2 * 4)
    for text, row in memo.rows():
        np.testing.assert_array_equal(row, LANGUAGE(text))


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_every_row_of_a_recurrent_cache_is_right(seed: int) -> None:
    """Two sequences that go back to anywhere, at any time."""
    rng = np.random.default_rng(seed)
    memo = MemoBackend(fake(recurrent=True), n_bytes_max=9 * ROW_BYTES)
    texts: list[list[int]] = [[], []]
    for _ in range(40):
        batch, expected = Batch(), []
        for sequence, text in enumerate(texts):
            if rng.random() < 0.3:
                continue
            del text[len(text) - int(rng.integers(0, len(text) + 1)) :]
            memo.remove(sequence, len(text))
            for token in rng.integers(0, N_VOCAB, int(rng.integers(1, 4))).tolist():
                batch.add(token, len(text), (sequence,), wants_logits=True)
                text.append(token)
                expected.append(LANGUAGE(tuple(text)))
        if len(batch):
            np.testing.assert_array_equal(memo.decode(batch), expected)


def test_after_a_failed_decode_the_cache_is_filled_anew() -> None:
    inner = fake()
    memo = MemoBackend(inner)
    memo.decode(chain([0, 1, 2]))

    def fails(text: tuple[int, ...]) -> Logits:
        raise BackendError("computing failed")

    inner.language = fails
    with pytest.raises(BackendError, match="computing failed"):
        memo.decode(chain([3], 3))
    assert memo.length(0) == 3
    assert memo.remembered([0, 1, 2, 3]) is None
    inner.language = LANGUAGE
    np.testing.assert_array_equal(memo.decode(chain([3], 3))[0], LANGUAGE((0, 1, 2, 3)))
    assert inner.text(0) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "batch",
    [
        Batch(),
        chain([0], 3),
        chain([0], 1),
        chain([0], 2, sequence=8),
        chain([0], 2, sequence=-1),
        Batch([0], [2], [()], [True]),
        Batch([0], [2], [(0, 1)], [True]),
        chain([0] * 20, 2),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(batch: Batch) -> None:
    memo = MemoBackend(fake(n_ctx=20))
    memo.decode(chain([0, 1]))
    with pytest.raises(BackendError):
        memo.decode(batch)
    assert memo.length(0) == 2


def test_a_copy_that_is_no_text_is_refused() -> None:
    memo = MemoBackend(fake())
    memo.decode(chain([0, 1, 2]))
    memo.decode(chain([0, 3], sequence=1))
    with pytest.raises(BackendError, match="sequence 1 of 2 tokens"):
        memo.copy(0, 1)
    with pytest.raises(BackendError, match="not be one text"):
        memo.copy(0, 2, 1)
    memo.remove(1, 1)
    memo.copy(0, 1, 1, 2)
    assert memo.length(1) == 2
    memo.copy(0, 1, 0, 1)
    assert memo.length(1) == 2


def test_closing_frees_the_inner_cache_and_keeps_the_rows() -> None:
    inner = fake()
    memo = MemoBackend(inner)
    memo.decode(chain([0]))
    memo.close()
    memo.close()
    assert inner.closed
    assert memo.remembered([0]) is not None


# --- the loop on a memory -------------------------------------------------------------------


def add_drafter(setup: Setup, sampler: SamplerOptions, seed: int) -> None:
    if seed % 2:
        setup.drafter = TreeDrafter(setup.language, 4, 0.7, np.random.default_rng(seed))
    else:
        setup.drafter = model_drafter(
            noisy(setup.language, 1.0), setup.vocabulary, sampler, seed=seed
        )[0]


@pytest.mark.parametrize("sampler", [GREEDY, UNFILTERED])
def test_the_loop_says_the_same_on_a_memory(sampler: SamplerOptions) -> None:
    shared: MemoBackend | None = None
    for seed in range(12):
        setup = Setup(sampler=sampler, seed=seed % 4)
        add_drafter(setup, sampler, seed % 4)
        plain = setup.run()[0].answer
        if shared is None:
            shared = MemoBackend(setup.backend())
        shared.remove(0)
        setup = Setup(sampler=sampler, seed=seed % 4)
        add_drafter(setup, sampler, seed % 4)
        n_decodes = shared.n_decodes
        loop, generation = AnswerLoop(shared, Clock()), setup.generation()
        events = loop.start(generation)
        while generation.finish_reason is None:
            events += loop.round([generation])
        assert generation.answer == plain
        assert any(isinstance(event, CommittedEvent) for event in events)
        if seed >= 4:  # all of it was said before
            assert shared.n_decodes == n_decodes
