"""Find the prefix that a prompt shares with earlier ones, without storing any text.

A file has the latest prompts of all processes, each as keyed hashes of some of its prefixes.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from specgen.system.files import open_private, replace_bytes
from specgen.text.overlap import common_prefix_length

#: Prompts are compared at every multiple of this many tokens.
BLOCK = 32
#: The number of hexadecimal digits of the hash at each of these places. Hashes this short may be
#: equal by chance, which does no harm: an entry is then stored that no later prompt shares.
_N_DIGITS = 8
#: The number of prompts that are remembered.
N_PROMPTS = 64
#: When the file becomes larger than this, it is rewritten without older prompts.
MAX_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class _PrefixHashes:
    """Hashes of prefixes of a prompt."""

    #: By the length of the prefix in tokens.
    at_places: dict[int, str]
    #: Those of the prefixes of 1, 2, 3... blocks, as one text.
    of_blocks: str

    @classmethod
    def of(
        cls,
        tokens: NDArray[np.int32],
        places: Iterable[int],
        secret: bytes,
    ) -> _PrefixHashes:
        """Hash the prefixes of a text that end at some places, and those of whole blocks.

        Args:
            tokens: int32[n]: the text.
            places: The lengths of the prefixes in `at_places`, from 0 to n.
            secret: The key of the hashes.
        """
        at_places = dict.fromkeys(places, "")
        of_blocks: list[str] = []
        block_ends = range(BLOCK, len(tokens) + 1, BLOCK)
        # One pass over the text: each prefix extends the hash of the one before.
        state = hashlib.blake2b(key=secret, digest_size=8)
        start = 0
        for end in sorted({*at_places, *block_ends}):
            state.update(tokens[start:end].tobytes())
            digest = state.copy().hexdigest()
            if end in at_places:
                at_places[end] = digest
            if end in block_ends:
                of_blocks.append(digest[:_N_DIGITS])
            start = end
        return cls(at_places, "".join(of_blocks))


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
    #: Hashes of the whole prompt and of its prefixes up to some control tokens, by their lengths.
    hashes: dict[int, str] = field(default_factory=dict)
    #: The hashes of its prefixes of whole blocks (`_PrefixHashes.of_blocks`).
    blocks: str = ""

    def n_shared(self, other: _PrefixHashes) -> int:
        """Return the length of the longest prefix in common with a prompt that has these hashes."""
        n_equal_digits = common_prefix_length(self.blocks, other.of_blocks)
        n_in_blocks = n_equal_digits // _N_DIGITS * BLOCK
        equal_places = (n for n, value in self.hashes.items() if other.at_places.get(n) == value)
        return max(n_in_blocks, max(equal_places, default=0))


_LINE = TypeAdapter(_SeenPrompt)


@dataclass(slots=True)
class _Comparison:
    """How a prompt relates to earlier ones."""

    #: The name of the prompt: its own, or that of the earlier prompt that it replaces.
    name: str
    #: The length of the longest earlier prompt that it continues.
    n_continued: int = 0
    #: The length of the longest prefix after which it and an earlier prompt diverge.
    n_diverged: int = 0


def _compared(
    prompt: _SeenPrompt, hashes: _PrefixHashes, earlier: Iterable[_SeenPrompt]
) -> _Comparison:
    """Compare a prompt with earlier ones, the latest of them last.

    Args:
        prompt: The prompt.
        hashes: The hashes of its prefixes, also at the lengths of the earlier prompts.
        earlier: The earlier prompts in the same context.
    """
    comparison = _Comparison(prompt.name)
    for seen in earlier:
        n_shared = seen.n_shared(hashes)
        is_own = seen.run == prompt.run
        is_whole_prompt_shared = n_shared == prompt.n
        continues_seen = n_shared == seen.n and (is_own or not is_whole_prompt_shared)
        is_same_conversation = is_own and prompt.subject and prompt.subject == seen.subject
        if continues_seen:
            comparison.n_continued = max(comparison.n_continued, n_shared)
            if is_own:
                # The entry of this prompt replaces that of the prompt it continues.
                comparison.name = seen.name
        elif not is_same_conversation:
            # The last token is never loaded, so that its logits are computed.
            n_diverged = min(n_shared, prompt.n - 1)
            comparison.n_diverged = max(comparison.n_diverged, n_diverged)
        elif n_shared > seen.n // 2:
            # A later turn, before which the client or the template changed earlier ones. (A
            # request of another kind, such as one for a title, shares less.)
            comparison.name = seen.name
    return comparison


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
        marks: Collection[int],
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
            marks: The lengths of prefixes at which it is compared with other prompts, besides its
                own length and all multiples of `BLOCK`.
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
        own_places = {n, *marks}
        lengths = {seen.n for seen in earlier if seen.n <= n}
        hashes = _PrefixHashes.of(tokens, own_places | lengths, secret)
        prompt = _SeenPrompt(
            name=secrets.token_hex(8),
            key=self._context_key,
            run=self._run,
            subject=_subject_hash(subject, secret),
            n=n,
            hashes={place: hashes.at_places[place] for place in own_places},
            blocks=hashes.of_blocks,
        )
        comparison = _compared(prompt, hashes, earlier)
        self._append(replace(prompt, name=comparison.name))
        if comparison.n_diverged > comparison.n_continued:
            return comparison.n_diverged
        return 0

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
            if len(by_name) == N_PROMPTS:
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
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / "secret"
        if not file.exists():
            replace_bytes(file, secrets.token_bytes(32))
        return file.read_bytes()[:64]


def _subject_hash(subject: str, secret: bytes) -> str:
    if not subject:
        return ""
    data = subject.encode(errors="replace")
    return hashlib.blake2b(data, key=secret, digest_size=8).hexdigest()
