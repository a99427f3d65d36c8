"""Which prefix a prompt shares with earlier ones, without keeping any text.

A file holds the latest prompts of all processes, each as keyed hashes of some of its prefixes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from specgen.system.files import open_private, replace_bytes

#: How many prompts are remembered.
_N_PROMPTS = 64
#: A file that is larger is written anew, without older prompts.
MOST_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class _SeenPrompt:
    """A prompt, as a line of the file."""

    #: A later prompt of the same name replaces it: the conversation went on.
    name: str
    #: The key of the `CachedContext` that read it.
    key: str
    #: The process that read it.
    run: str
    #: A hash of the user's first message; empty without a conversation.
    subject: str
    #: Its length in tokens.
    n: int
    #: Hashes of its prefixes, by their lengths.
    hashes: dict[int, str]

    def n_shared(self, hashes: Mapping[int, str]) -> int:
        """Return the longest length at which a prompt with these hashes has the same prefix."""
        same = (length for length, value in self.hashes.items() if hashes.get(length) == value)
        return max(same, default=0)


_LINE = TypeAdapter(_SeenPrompt)


class SeenPrompts:
    """The prompts that were seen in contexts with this key, by this and other processes."""

    def __init__(self, folder: Path, context_key: str) -> None:
        self._folder = folder
        self._file = folder / "seen.jsonl"
        self._context_key = context_key
        #: The name of this process.
        self._run = secrets.token_hex(4)

    def add(
        self,
        tokens: NDArray[np.int32],
        places: set[int],
        subject: str,
    ) -> int:
        """Remember a prompt, and return how much of it is worth storing.

        That is the longest prefix that it shares with an earlier prompt before the two part. A
        prompt that continues an earlier one does not part from it: one conversation alone is not
        worth storing. The same prompt again counts only if another process read it.

        Args:
            tokens: int32[n]: the prompt.
            places: The lengths at which it is compared with later prompts.
            subject: The user's first message; empty without a conversation.

        Returns:
            The length of the shared prefix; 0 if the longest match is one that it continues.

        Raises:
            OSError: The file cannot be read or written.
        """
        n = len(tokens)
        secret = self._secret()
        earlier = [seen for seen in self._latest() if seen.key == self._context_key]
        lengths = {seen.n for seen in earlier if seen.n <= n}
        hashes = _prefix_hashes(tokens, places | lengths, secret)
        subject_hash = _subject_hash(subject, secret)

        name = secrets.token_hex(8)
        n_continued = 0
        n_parted = 0
        for seen in earlier:
            n_shared = seen.n_shared(hashes)
            is_own = seen.run == self._run
            begins_with_it = n_shared == seen.n
            is_repetition = n_shared == n
            if begins_with_it and (is_own or not is_repetition):
                n_continued = max(n_continued, n_shared)
                if is_own:
                    name = seen.name
            elif not (is_own and subject_hash and subject_hash == seen.subject):
                n_parted = max(n_parted, min(n_shared, n - 1))

        own_hashes = {place: hashes[place] for place in places}
        self._append(_SeenPrompt(name, self._context_key, self._run, subject_hash, n, own_hashes))
        return n_parted if n_parted > n_continued else 0

    def _latest(self) -> list[_SeenPrompt]:
        """Return the latest prompts, the last one last. Other processes may add lines meanwhile."""
        known: dict[str, _SeenPrompt] = {}
        with open(self._file, "rb", opener=open_private) as file:
            data = file.read()
        for line in reversed(data.split()):
            with contextlib.suppress(ValidationError):
                seen = _LINE.validate_json(line)
                known.setdefault(seen.name, seen)
            if len(known) == _N_PROMPTS:
                break
        latest = list(reversed(known.values()))
        if len(data) > MOST_BYTES:  # what another process adds at this moment is lost
            replace_bytes(self._file, b"\n".join(map(_LINE.dump_json, latest)))
        return latest

    def _append(self, seen: _SeenPrompt) -> None:
        with open(self._file, "ab", opener=open_private) as file:
            # The line break before it ends a line that a killed process may have left half written.
            file.write(b"\n" + _LINE.dump_json(seen) + b"\n")

    def _secret(self) -> bytes:
        """Return the key of the hashes, which makes them useless elsewhere."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / "secret"
        if not file.exists():
            replace_bytes(file, secrets.token_bytes(32))
        return file.read_bytes()[:64]


def _prefix_hashes(
    tokens: NDArray[np.int32],
    lengths: Iterable[int],
    secret: bytes,
) -> dict[int, str]:
    """Return the hashes of a text's prefixes of these lengths."""
    hashes: dict[int, str] = {}
    state = hashlib.blake2b(key=secret, digest_size=8)
    start = 0
    for end in sorted(lengths):
        state.update(tokens[start:end].tobytes())
        hashes[end] = state.copy().hexdigest()
        start = end
    return hashes


def _subject_hash(subject: str, secret: bytes) -> str:
    if not subject:
        return ""
    data = subject.encode(errors="replace")
    return hashlib.blake2b(data, key=secret, digest_size=8).hexdigest()
