"""Phrases that answers to different prompts have in common, for n-grams to search.

A model repeats its own phrases even when it answers different questions ("To determine how many",
"Here is an example of"). What only one answer contains is not kept, nor what answers quote from
their prompts: prompt lookup finds that anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specgen.drafters.suffix_index import (
    GrowingCorpus,
    IntArray,
    join_texts,
    load_arrays,
    newest_texts,
    save_arrays,
    split_texts,
)
from specgen.errors import OutputError
from specgen.system.files import locked
from specgen.system.folders import phrases_folder

#: The shortest phrase, in tokens.
SHORTEST = 3
#: When the phrases have more tokens than this, the older half is forgotten.
MAX_TOKENS = 16_384
#: The number of n-grams of recent answers that new answers are compared with.
MAX_SEEN = 65_536
#: The number of recent prompts that are remembered.
_MAX_PROMPTS = 4096
#: The phrases are saved when the engine is closed, and after this many answers.
_SAVE_AFTER = 16
#: The longest wait for another process that saves phrases, in seconds.
_WAIT_S = 0.5
#: The names of the arrays in the file, which are the fields of `_Phrases`.
_ARRAYS = ("factors", "tokens", "seen", "prompts")


def _nothing() -> IntArray:
    return np.empty(0, np.int32)


def _random_factors() -> IntArray:
    """Return random odd numbers: int32[SHORTEST]."""
    return np.frombuffer(secrets.token_bytes(4 * SHORTEST), np.int32) | np.int32(1)


@dataclass(slots=True)
class _Phrases:
    """The phrases, and hashes of the answers in which others will be found.

    Answers are compared by their n-grams of `SHORTEST` tokens. The hash of an n-gram is the sum of
    its tokens, each times one of the `factors`. Hashes may be equal by chance, which does no harm:
    a phrase is then kept that occurred only once.
    """

    #: int32[SHORTEST]: the factors of the hashes.
    factors: IntArray = field(default_factory=_random_factors)
    #: int32[n]: the phrases as `join_texts` joins them, the latest last.
    tokens: IntArray = field(default_factory=_nothing)
    #: int32[n]: the hashes of the n-grams in recent answers, the latest last.
    seen: IntArray = field(default_factory=_nothing)
    #: int32[n]: the hashes of recent prompts, the latest last.
    prompts: IntArray = field(default_factory=_nothing)

    @classmethod
    def load(cls, path: Path) -> _Phrases:
        """Read a file; without a valid one, start without phrases."""
        arrays = load_arrays(path, *_ARRAYS)
        if arrays is None:
            return cls()
        if any(array.dtype != np.int32 or array.ndim != 1 for array in arrays):
            return cls()
        phrases = cls(*arrays)
        return phrases if len(phrases.factors) == SHORTEST else cls()

    def save(self, path: Path) -> None:
        """Write a file, which is replaced.

        Raises:
            OSError: If it cannot be written.
        """
        save_arrays(path, **{name: getattr(self, name) for name in _ARRAYS})

    def learn(self, prompt: Sequence[int], answer: Sequence[int]) -> list[IntArray]:
        """Find the phrases that an answer shares with earlier ones.

        Another answer to one of the recent prompts is ignored, since all of it might be shared.

        Args:
            prompt: The tokens before the answer.
            answer: The tokens of the answer.

        Returns:
            The new phrases, int32[n] each.
        """
        prompt_tokens = np.array(prompt, np.int32)
        prompt_hash = self._hash_of_whole(prompt_tokens)
        if prompt_hash in self.prompts:
            return []
        self.prompts = np.append(self.prompts, prompt_hash)[-_MAX_PROMPTS:]
        # Tell for each n-gram of the answer where else it occurs.
        tokens = np.array(answer, np.int32)
        hashes = self._hashes(tokens)
        is_quoted = _are_in(hashes, self._hashes(prompt_tokens))
        is_shared = _are_in(hashes, self.seen) & ~is_quoted
        is_known = _are_in(hashes, self._hashes(self.tokens))
        # Neighbouring n-grams that are shared make up one phrase. It is new if any of them is.
        edges = np.flatnonzero(np.diff(is_shared, prepend=False, append=False))
        phrases = [
            tokens[start : end + SHORTEST - 1]
            for start, end in edges.reshape(-1, 2).tolist()
            if not is_known[start:end].all()
        ]
        self.tokens = np.append(self.tokens, join_texts(phrases))
        if len(self.tokens) > MAX_TOKENS:
            newest = newest_texts(split_texts(self.tokens), MAX_TOKENS // 2)
            self.tokens = join_texts(newest)
        # Remember the other n-grams, in case a later answer shares them.
        is_first_time = ~is_quoted & ~is_shared
        self.seen = np.append(self.seen, hashes[is_first_time])[-MAX_SEEN:]
        return phrases

    def _hash_of_whole(self, tokens: IntArray) -> IntArray:
        """Return a hash of a text: int32[1]."""
        key = self.factors.tobytes()
        digest = hashlib.blake2b(tokens.tobytes(), key=key, digest_size=4).digest()
        return np.frombuffer(digest, np.int32)

    def _hashes(self, tokens: IntArray) -> IntArray:
        """Return the hashes of a text's n-grams: int32[n - SHORTEST + 1], or none."""
        n_hashes = max(0, len(tokens) - SHORTEST + 1)
        hashes = np.zeros(n_hashes, np.int32)
        for offset, factor in enumerate(self.factors):
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


def phrases_in(file: Path) -> list[IntArray]:
    """Return the phrases in a file, int32[n] each; none if it cannot be read."""
    return split_texts(_Phrases.load(file).tokens)


class SharedPhrases:
    """The phrases that answers to different prompts have in common.

    Several processes may share a file. What others add to it is found by the next process that
    opens it. A file that cannot be read counts as empty, and without one that can be written, the
    phrases are only kept in memory.

    Args:
        file: The file; None keeps the phrases in memory only.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._phrases = _Phrases() if file is None else _Phrases.load(file)
        #: The prompts and answers that are not in the file yet.
        self._unsaved: list[tuple[Sequence[int], Sequence[int]]] = []
        #: Finds endings in the phrases.
        self.index = self._make_index()

    def _make_index(self) -> GrowingCorpus:
        index = GrowingCorpus()
        for phrase in split_texts(self._phrases.tokens):
            index.add_text(phrase.tolist())
        return index

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Look for phrases in a finished answer."""
        for phrase in self._phrases.learn(prompt, answer):
            self.index.add_text(phrase.tolist())
        if len(self.index) > MAX_TOKENS:
            # The older half was forgotten. Drafters that use the old index keep it.
            self.index = self._make_index()
        if self._file is not None:
            self._unsaved.append((prompt, answer))
            if len(self._unsaved) >= _SAVE_AFTER:
                self.save()

    def save(self) -> None:
        """Add what was learnt since the last time to the file, if it can be written."""
        file = self._file
        if file is None or not self._unsaved:
            return
        lock_error = OutputError(f"{file}: another process is writing to it")
        lock = locked(file.with_name("lock"), lock_error, _WAIT_S)
        with contextlib.suppress(OSError, OutputError), lock:
            # Other processes may have written to the file in the meantime.
            self._phrases = _Phrases.load(file)
            for prompt, answer in self._unsaved:
                self._phrases.learn(prompt, answer)
            self._phrases.save(file)
        self._unsaved.clear()
