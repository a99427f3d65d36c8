"""The texts in which n-grams are looked up, besides the answer's own text: files and earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.backend.llama.vocabulary import LlamaVocabulary
from specgen.drafters import SuffixDrafter
from specgen.drafters.lookup.array import SuffixArray
from specgen.drafters.lookup.corpus import load_corpus
from specgen.drafters.lookup.store import EarlierTexts
from specgen.options import DraftOptions

#: The most continuations that n-grams propose at one place.
_N_BRANCHES = 3


class Lookups:
    """The lookup texts that `drafting` names, loaded. Their search structures, and earlier answers, are
    kept in the folder `cache` (None: nothing is kept). Raises `UsageError` if a file cannot be read."""

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
        """Return a drafter from n-grams of a text and of the lookup texts. With `branches`, it proposes
        several continuations."""
        n_children, n_deepest = 1, None
        if branches:
            n_children, n_deepest = _N_BRANCHES, drafting.tree_depth
            if drafting.tree.is_fixed:
                n_children, n_deepest = max(drafting.tree.numbers), drafting.tree.n_levels
        return SuffixDrafter(
            *drafting.ngrams_of, self._corpora, n_children=n_children, n_deepest=n_deepest
        )

    def keep(self, tokens: Sequence[int]) -> None:
        """Store a finished text for lookups of later answers, if the options ask for that."""
        if self._store is not None:
            self._store.add(tokens)
