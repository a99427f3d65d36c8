"""Phrases that answers to different prompts have in common, for n-grams to search.

A model repeats its own phrases even when it answers different questions ("To determine how many",
"Here is an example of"). What only one answer contains is not kept, nor what answers quote from
their prompts: prompt lookup finds that anyway.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specgen.drafters.stored_texts import (
    IntArray,
    append_texts,
    join_texts,
    read_tokens,
    split_texts,
    store_texts,
)
from specgen.drafters.suffix_index import GrowingCorpus
from specgen.system.folders import phrases_folder

#: The shortest phrase, in tokens.
SHORTEST = 3
#: When the phrases have more tokens than this in total, the older half is forgotten.
MAX_TOKENS = 16_384
#: The number of n-grams of recent answers that new answers are compared with.
_MAX_SEEN = 65_536
#: The number of recent prompts that are remembered.
_MAX_PROMPTS = 4096
#: New phrases are saved when the engine is closed, and when there are this many.
_SAVE_AFTER = 64


class _PhraseFinder:
    """Finds what an answer has in common with earlier answers of this process.

    Answers are compared by hashes of their n-grams of `SHORTEST` tokens: the sum of the tokens,
    each times a random factor. Hashes may be equal by chance, which does no harm: a phrase is then
    found that occurred only once. They are never stored, since texts could be guessed from them.
    """

    def __init__(self) -> None:
        #: int32[SHORTEST]: the factors of the hashes, which are odd.
        self._factors = np.frombuffer(secrets.token_bytes(4 * SHORTEST), np.int32) | np.int32(1)
        #: int32[n]: the hashes of the n-grams in recent answers, the latest last.
        self._seen = np.empty(0, np.int32)
        #: The hashes of recent prompts, the latest last.
        self._prompts: dict[int, None] = {}

    def find(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        known: IntArray,
    ) -> list[IntArray]:
        """Return the phrases that an answer shares with earlier ones, int32[n] each.

        Another answer to one of the recent prompts is ignored, since all of it might be shared.

        Args:
            prompt: The tokens before the answer.
            answer: The tokens of the answer.
            known: int32[n]: earlier phrases. A phrase without a new n-gram is left out.
        """
        if not self._remember(prompt):
            return []
        # Tell for each n-gram of the answer where else it occurs.
        tokens = np.array(answer, np.int32)
        hashes = self._hashes(tokens)
        is_quoted = _are_in(hashes, self._hashes(np.array(prompt, np.int32)))
        is_shared = _are_in(hashes, self._seen) & ~is_quoted
        is_known = _are_in(hashes, self._hashes(known))
        # Neighbouring n-grams that are shared make up one phrase. It is new if any of them is.
        edges = np.flatnonzero(np.diff(is_shared, prepend=False, append=False))
        phrases = [
            tokens[start : end + SHORTEST - 1]
            for start, end in edges.reshape(-1, 2).tolist()
            if not is_known[start:end].all()
        ]
        # Remember the other n-grams, in case a later answer shares them.
        is_first_time = ~is_quoted & ~is_shared
        self._seen = np.append(self._seen, hashes[is_first_time])[-_MAX_SEEN:]
        return phrases

    def _remember(self, prompt: Sequence[int]) -> bool:
        """Remember a prompt, and return whether it is new."""
        prompt_hash = hash(tuple(prompt))
        if prompt_hash in self._prompts:
            return False
        self._prompts[prompt_hash] = None
        if len(self._prompts) > _MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return True

    def _hashes(self, tokens: IntArray) -> IntArray:
        """Return the hashes of a text's n-grams: int32[n - SHORTEST + 1], or none."""
        n_hashes = max(0, len(tokens) - SHORTEST + 1)
        hashes = np.zeros(n_hashes, np.int32)
        for offset, factor in enumerate(self._factors):
            hashes += tokens[offset : offset + n_hashes] * factor  # modulo 2^32
        return hashes


def _are_in(hashes: IntArray, others: IntArray) -> npt.NDArray[np.bool_]:
    """Return which hashes are among others: bool[n], as `np.isin` does, but in a tenth of its time.

    Args:
        hashes: int32[n]: some hashes.
        others: int32[m]: many others, in any order.
    """
    if not len(others):
        return np.zeros(len(hashes), np.bool_)
    ordered = np.sort(others)
    places = np.searchsorted(ordered, hashes)
    neighbours = ordered[np.minimum(places, len(ordered) - 1)]
    return np.equal(neighbours, hashes)


def phrases_file(cache: Path, fingerprint: str) -> Path:
    """Return the file in a cache folder with the phrases of all targets with one vocabulary.

    Args:
        cache: The cache folder.
        fingerprint: Identifies the vocabulary, and is valid as the name of a file.
    """
    return phrases_folder(cache) / f"{fingerprint}.npz"


class SharedPhrases:
    """Common phrases, and those that answers to different prompts have in common.

    Several processes may share a file. What others add to it is found by the next process that
    opens it. A file that cannot be read counts as empty, and without one that can be written, the
    phrases are only kept in memory.

    Args:
        file: The file; None keeps the phrases in memory only.
        common: The tokens of phrases to begin with. They are not stored.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        common: Iterable[Sequence[int]] = (),
    ) -> None:
        self._file = file
        self._finder = _PhraseFinder()
        #: int32[n]: the phrases to begin with, as `join_texts` joins them.
        self._common = join_texts(common)
        #: int32[n]: the phrases of answers, likewise, the latest last.
        self._found = join_texts([]) if file is None else read_tokens(file)
        #: The phrases that are not in the file yet.
        self._unsaved: list[IntArray] = []
        #: Finds endings in all phrases; None until it is needed.
        self._index: GrowingCorpus | None = None

    @property
    def index(self) -> GrowingCorpus:
        """Finds endings in all phrases."""
        if self._index is None:
            self._index = GrowingCorpus()
            for phrase in split_texts(np.append(self._common, self._found)):
                self._index.add_text(phrase.tolist())
        return self._index

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Look for phrases in a finished answer."""
        known = np.append(self._common, self._found)
        phrases = self._finder.find(prompt, answer, known)
        self._found = append_texts(self._found, phrases, MAX_TOKENS)
        if self._index is not None:
            for phrase in phrases:
                self._index.add_text(phrase.tolist())
            if len(self._index) > len(self._common) + len(self._found):
                # The older half was forgotten. Drafters that use the old index keep it.
                self._index = None
        if self._file is not None:
            self._unsaved += phrases
            if len(self._unsaved) >= _SAVE_AFTER:
                self.save()

    def save(self) -> None:
        """Add the phrases that were found since the last time to the file, if possible."""
        if self._file is not None and self._unsaved:
            store_texts(self._file, self._unsaved, MAX_TOKENS)
        self._unsaved.clear()
