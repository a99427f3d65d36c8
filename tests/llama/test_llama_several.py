"""Several texts in one cache of llama.cpp: each is computed as if it were alone.

Texts are drafted, rolled back, begun anew and continued in random order, as an engine does. All rows are
compared with those of an empty cache. A cell of another text, or a missing cell, changes a row by far more
than rounding (see `tests/llama/test_llama_rollback.py`, whose models these are).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.context import n_native_sequences
from specgen.llama.library import llama_cpp
from specgen.method.backend import Batch
from specgen.method.draft import ROOT, Branches, Draft, keep_path, pack
from specgen.session.request import Slot
from specgen.system.arrays import Logits
from tests.helpers.rows import batch_of, decoded
from tests.llama.test_llama_rollback import OPTIONS, WAYS, Way, loaded_models

N_TEXTS = 3
#: The room for a text in the cache, which is filled to its end.
N_CTX = 48
N_DRAFTED = 6
N_BRANCHES = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LlamaModel]]:
    yield from loaded_models(tmp_path_factory.mktemp("models"))


class Alone:
    """Rows of a model whose cache is empty."""

    def __init__(self, model: LlamaModel) -> None:
        self._backend = LlamaBackend(
            model, OPTIONS, n_ctx=N_CTX, clock=time.perf_counter, n_outputs=1 + N_DRAFTED
        )

    def rows(self, text: Sequence[int], n: int) -> Logits:
        """The last n rows of a text, decoded in one batch: float32[n, n_vocab]."""
        self._backend.remove(0)
        if len(text) > n:
            self._backend.decode(batch_of(text[:-n], wanted="none"))
        return decoded(self._backend, text[-n:])

    def close(self) -> None:
        self._backend.close()


@dataclass
class Text:
    """One of the texts: its tokens, the last of which the cache does not hold yet."""

    slot: Branches
    part: Slot
    tokens: list[int] = field(default_factory=list)


class Several:
    """`N_TEXTS` texts, and the rounds that happen to them."""

    def __init__(self, name: str, backend: LlamaBackend, alone: Alone, seed: int) -> None:
        self._atol = 0.02 if name == "gemma3" else 1e-4
        self._backend = backend
        self._alone = alone
        self._rng = np.random.default_rng(seed)
        parts = [Slot(number, N_TEXTS) for number in range(N_TEXTS)]
        self._texts = [Text(part.branches(backend), part) for part in parts]
        for text in self._texts:
            self.begin(text)

    def random_tokens(self, n: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, 280, n)]

    def begin(self, text: Text) -> None:
        """Begin a text, which may begin like another one, and read all but its last token."""
        other = self._texts[int(self._rng.integers(N_TEXTS))]
        n_shared = int(self._rng.integers(0, len(other.tokens) + 1))
        text.tokens = other.tokens[:n_shared][: N_CTX - 10] + self.random_tokens(
            int(self._rng.integers(2, 9))
        )
        n_held = text.part.share_prefix(self._backend, text.tokens)
        batch = batch_of(text.tokens[n_held:-1], n_held, text.slot.first, "none")
        if len(batch):
            self._backend.decode(batch)

    def go_back(self, text: Text) -> None:
        """Drop the end of a text, and go on otherwise."""
        n_kept = int(self._rng.integers(1, len(text.tokens)))
        text.tokens = [*text.tokens[:n_kept], *self.random_tokens(1)]
        if self._backend.length(text.slot.first) > n_kept:
            self._backend.remove(text.slot.first, n_kept)

    def draft(self, text: Text) -> Draft:
        n_most = min(N_DRAFTED, N_CTX - len(text.tokens))
        tokens = self.random_tokens(int(self._rng.integers(0, n_most + 1)))
        if self._backend.rollback != "cells" or self._rng.random() < 0.4:
            return Draft.chain(tokens, "model")
        parents: list[int] = []
        for node in range(len(tokens)):
            n_leaves = node - len(set(parents) - {ROOT})
            parent = int(self._rng.integers(ROOT, node)) if n_leaves < N_BRANCHES else node - 1
            parents.append(parent)
        origins, unknown = ("model",) * len(tokens), (None,) * len(tokens)
        return Draft(tuple(tokens), tuple(parents), origins, unknown, unknown)

    def round(self) -> None:
        """Decode drafts of some of the texts in one batch, compare all rows, and keep a path of each."""
        chosen = [text for text in self._texts if self._rng.random() < 0.7]
        batch = Batch()
        drafts = [self.draft(text) for text in chosen]
        for text, draft in zip(chosen, drafts, strict=True):
            pending = text.tokens[self._backend.length(text.slot.first) :]
            pack(batch, self._backend, text.slot, pending, draft)
        if not chosen:
            return
        logits = self._backend.decode(batch).copy()
        first = 0
        for text, draft in zip(chosen, drafts, strict=True):
            self.compare(text, draft, logits[first : first + 1 + len(draft)])
            first += 1 + len(draft)
        for text, draft in zip(chosen, drafts, strict=True):
            self.keep(text, draft)

    def compare(self, text: Text, draft: Draft, rows: Logits) -> None:
        for leaf in draft.leaves() or [ROOT]:
            path = [] if leaf == ROOT else draft.path(leaf)
            tokens = [*text.tokens, *(draft.tokens[node] for node in path)]
            expected = self._alone.rows(tokens, 1 + len(path))
            found = rows[[0, *(1 + node for node in path)]]
            np.testing.assert_allclose(found, expected, atol=self._atol)

    def keep(self, text: Text, draft: Draft) -> None:
        path: Sequence[int] = ()
        if len(draft):
            whole = draft.path(int(self._rng.integers(len(draft))))
            path = whole[: int(self._rng.integers(0, len(whole) + 1))]
        keep_path(self._backend, text.slot, draft, path)
        text.tokens += [draft.tokens[node] for node in path]
        if len(text.tokens) < N_CTX:
            text.tokens += self.random_tokens(1)

    def run(self, n_rounds: int) -> None:
        for _ in range(n_rounds):
            for text in self._texts:
                kind = self._rng.random()
                is_full = self._backend.length(text.slot.first) >= min(N_CTX, len(text.tokens))
                if is_full or kind < 0.05:
                    self.begin(text)
                elif kind < 0.12:
                    self.go_back(text)
            self.round()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_several_texts_at_once_are_each_as_if_alone(
    models: dict[str, LlamaModel], way: Way, seed: int
) -> None:
    name, n_rollback, _ = way
    n_branches = N_BRANCHES if not models[name].has_recurrent_state else 1
    backend = LlamaBackend(
        models[name],
        OPTIONS,
        n_ctx=N_CTX * N_TEXTS,
        clock=time.perf_counter,
        n_sequences=n_branches * N_TEXTS,
        n_outputs=(1 + N_DRAFTED) * N_TEXTS,
        n_rollback=n_rollback,
        n_branches=n_branches,
    )
    assert llama_cpp.llama_n_seq_max(backend.handle) <= N_TEXTS * n_native_sequences(
        models[name], n_branches
    )
    alone = Alone(models[name])
    try:
        Several(name, backend, alone, seed).run(60)
    finally:
        backend.close()
        alone.close()
