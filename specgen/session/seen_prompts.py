"""Find the prefix that a prompt shares with earlier ones, without storing any text.

A file has the latest prompts of all processes, each as keyed hashes of some of its prefixes.
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

#: The number of prompts that are remembered.
_N_PROMPTS = 64
#: When the file becomes larger than this, it is rewritten without older prompts.
MAX_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class _SeenPrompt:
    """A prompt, as a line of the file."""

    #: A random name. When a conversation goes on, its next prompt gets the same name and replaces
    #: this one.
    name: str
    #: The key of the `CachedContext` that prefilled it.
    key: str
    #: The name of the process that prefilled it.
    run: str
    #: A hash of the user's first message; empty without a conversation.
    subject: str
    #: The length in tokens.
    n: int
    #: Hashes of prefixes, by their lengths in tokens.
    hashes: dict[int, str]

    def n_shared(self, hashes: Mapping[int, str]) -> int:
        """Return the length of the longest prefix in common with a prompt that has these hashes."""
        same = (length for length, value in self.hashes.items() if hashes.get(length) == value)
        return max(same, default=0)


_LINE = TypeAdapter(_SeenPrompt)


class SeenPrompts:
    """The prompts that this and other processes prefilled in contexts with the same key."""

    def __init__(self, folder: Path, context_key: str) -> None:
        self._folder = folder
        self._file = folder / "seen.jsonl"
        self._context_key = context_key
        #: A random name for this process.
        self._run = secrets.token_hex(4)

    def add(
        self,
        tokens: NDArray[np.int32],
        places: set[int],
        subject: str,
    ) -> int:
        """Remember a prompt, and return the length of its prefix that is worth storing.

        That is the longest prefix that the prompt shares with an earlier one from which it then
        diverges, such as a system message before another question. Two kinds of earlier prompts do
        not count:

        - one that this prompt continues: a single conversation is not worth storing,
        - one of this process with the same first message: it belongs to the same conversation.

        The same prompt again counts if another process prefilled it.

        Args:
            tokens: int32[n]: the prompt.
            places: The lengths at which later prompts will be compared with it.
            subject: The user's first message; empty without a conversation.

        Returns:
            The length of the shared prefix in tokens; 0 if there is none, or if the prompt
            continues an earlier prompt that is at least as long as that prefix.

        Raises:
            OSError: If the file cannot be read or written.
        """
        n = len(tokens)
        secret = self._secret()
        earlier = [seen for seen in self._latest() if seen.key == self._context_key]
        lengths = {seen.n for seen in earlier if seen.n <= n}
        hashes = _prefix_hashes(tokens, places | lengths, secret)
        subject_hash = _subject_hash(subject, secret)

        name = secrets.token_hex(8)
        #: The length of the longest earlier prompt that this one continues.
        n_continued = 0
        #: The length of the longest prefix after which this prompt and an earlier one diverge.
        n_diverged = 0
        for seen in earlier:
            n_shared = seen.n_shared(hashes)
            is_own = seen.run == self._run
            is_whole_prompt_shared = n_shared == n
            continues_seen = n_shared == seen.n and (is_own or not is_whole_prompt_shared)
            is_same_conversation = is_own and subject_hash and subject_hash == seen.subject
            if continues_seen:
                n_continued = max(n_continued, n_shared)
                if is_own:
                    # The entry of this prompt replaces that of the prompt it continues.
                    name = seen.name
            elif not is_same_conversation:
                # The last token is never loaded, so that its logits are computed.
                n_diverged = max(n_diverged, min(n_shared, n - 1))

        own_hashes = {place: hashes[place] for place in places}
        self._append(
            _SeenPrompt(
                name,
                self._context_key,
                self._run,
                subject_hash,
                n,
                own_hashes,
            )
        )
        return n_diverged if n_diverged > n_continued else 0

    def _latest(self) -> list[_SeenPrompt]:
        """Return the latest prompts, the last one last. A large file is shortened to them."""
        by_name: dict[str, _SeenPrompt] = {}
        with open(self._file, "rb", opener=open_private) as file:
            data = file.read()
        # From the end, so that the first line found with a name is its latest.
        for line in reversed(data.split()):
            with contextlib.suppress(ValidationError):
                seen = _LINE.validate_json(line)
                by_name.setdefault(seen.name, seen)
            if len(by_name) == _N_PROMPTS:
                break
        latest = list(reversed(by_name.values()))
        if len(data) > MAX_BYTES:
            # A line that another process appends at this very moment is lost, which does no harm.
            replace_bytes(self._file, b"\n".join(map(_LINE.dump_json, latest)))
        return latest

    def _append(self, seen: _SeenPrompt) -> None:
        with open(self._file, "ab", opener=open_private) as file:
            # Start with a line break, in case a killed process left half a line behind.
            file.write(b"\n" + _LINE.dump_json(seen) + b"\n")

    def _secret(self) -> bytes:
        """Return the key of the hashes. Without it, they cannot be compared with other texts."""
        self._folder.mkdir(
            mode=0o700,
            parents=True,
            exist_ok=True,
        )
        file = self._folder / "secret"
        if not file.exists():
            replace_bytes(file, secrets.token_bytes(32))
        return file.read_bytes()[:64]


def _prefix_hashes(
    tokens: NDArray[np.int32],
    lengths: Iterable[int],
    secret: bytes,
) -> dict[int, str]:
    """Return the hashes of the prefixes of a text with these lengths, by length."""
    hashes: dict[int, str] = {}
    # One pass over the text: each prefix extends the hash of the one before.
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
