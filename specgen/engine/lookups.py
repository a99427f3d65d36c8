"""The texts in which n-grams are looked up, besides the answer's own: files, and earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.backend.llama.vocabulary import LlamaVocabulary
from specgen.drafters import SuffixDrafter
from specgen.drafters.lookup.array import SuffixArray
from specgen.drafters.lookup.corpus import load_corpus
from specgen.drafters.lookup.store import EarlierTexts
from specgen.options import DraftOptions

#: The most ways to go on from one place that n-grams of a text propose.
_N_BRANCHES = 3


class Lookups:
    """What `drafting` says is to be looked up, read; what is made of it is kept in the folder `cache`
    (None: it is not kept). Raises `UsageError` if a file cannot be read."""

    def __init__(
        self, drafting: DraftOptions, cache: Path | None, vocabulary: LlamaVocabulary
    ) -> None:
        self._store: EarlierTexts | None = None
        self._corpora: tuple[SuffixArray, ...] = ()
        if not drafting.lookup_files and not drafting.lookup_store:
            return
        kind = vocabulary.digest()
        corpora: list[SuffixArray] = []
        if drafting.lookup_files:
            folder = cache / "lookup" if cache is not None else None
            corpora.append(load_corpus(drafting.lookup_files, vocabulary, kind, folder))
        if drafting.lookup_store and cache is not None:
            self._store = EarlierTexts(cache / "texts", kind)
            corpora += self._store.arrays()
        self._corpora = tuple(corpora)

    def ngrams(self, drafting: DraftOptions, *, branches: bool) -> SuffixDrafter:
        """N-grams of a text, and of the texts that are looked up; with `branches`, they propose
        several ways to go on."""
        n_children, n_deepest = 1, None
        if branches:
            n_children, n_deepest = _N_BRANCHES, drafting.tree_depth
            if drafting.tree.is_fixed:
                n_children, n_deepest = max(drafting.tree.numbers), drafting.tree.n_levels
        return SuffixDrafter(
            *drafting.ngrams_of, self._corpora, n_children=n_children, n_deepest=n_deepest
        )

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep a finished text for later answers to draft from, if the options ask for that."""
        if self._store is not None:
            self._store.add(tokens)
