"""Prefixes of prompts on the disk, with the state that the target computed for them.

An entry is a text with the state of a context of the target (`saved_text.py`), which other
processes can load instead of prefilling the text. By default, two kinds of prefixes are stored:
what two different prompts share (`seen_prompts.py`), and an agent's instructions (its system
message and tools), even when they are first seen.

The state is copied when exactly the prefix has been prefilled, and another thread writes it while
the answer is generated. (Draft models have no entries: they prefill only the end of a long text.)
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.interface import CacheSlot
from specgen.errors import BackendError, RollbackError
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.models.files import size_of
from specgen.options import PrefixOptions
from specgen.session.prompts import Prompt
from specgen.session.saved_text import (
    CHUNK,
    CachedContext,
    RestoreResult,
    SavedText,
    write_text,
)
from specgen.session.seen_prompts import BLOCK, SeenPrompts
from specgen.system.files import NEW_SUFFIX, existing_parent, make_room, new_beside
from specgen.system.machine import available_memory_bytes
from specgen.system.processes import is_failing

_SUFFIX = ".prefix"
#: Shorter prefixes are not stored: prefilling them again is quick.
MIN_TOKENS = 512
#: A prefix is stored only if it has at least this many tokens more than the longest one stored.
_MIN_GAIN = 64
#: To store a prefix of a text in the cache, at most this many tokens after it are dropped there.
_MAX_DROPPED = 256
#: Prompts are compared at the ends of blocks, and at this many of their first control tokens.
_N_MARKS = 32
#: The number of agents' instructions in a row that are stored at first sight and then never used.
_MAX_IN_VAIN = 4
#: A text is stored only if its prefill takes at least this many times as long as loading it.
_MIN_SPEEDUP = 3.0
#: How fast files are assumed to load before the first one was timed.
BYTES_PER_S = 1e9
#: The store may take this share of the free disk space...
_DISK_SHARE = 0.1
#: ...but not more than this.
_MAX_BYTES = 20 * 10**9
#: Half-written files of killed processes are deleted after this time.
_LEFTOVER_S = 3600.0

_log = logging.getLogger("specgen.session.prefix_store")


class PrefixStore:
    """The prefixes in a folder, for the context of one engine.

    Entries that cannot be read or written are logged; answers are generated without them.
    """

    def __init__(
        self,
        folder: Path,
        options: PrefixOptions,
        context: CachedContext,
        clock: Callable[[], float],
    ) -> None:
        """Open the store; the folder need not exist.

        Args:
            folder: The folder of all entries.
            options: Which prefixes are stored, and how much space they may take.
            context: The context of the engine. Entries of other contexts are ignored.
            clock: Returns the current time in seconds.
        """
        self._folder = folder
        self._options = options
        self._context = context
        self._clock = clock
        self._seen = SeenPrompts(folder, context.key)
        #: The texts to store for each sequence, by their lengths, once it holds exactly that text.
        self._due: dict[int, dict[int, NDArray[np.int32]]] = {}
        #: The number of instructions that were stored at first sight since an entry was last used.
        self._n_in_vain = 0
        #: Entries that this process has already written, or decided not to write.
        self._tried: set[Path] = set()
        #: How fast entries load from this disk.
        self._bytes_per_s = BYTES_PER_S
        self._writer = ThreadPoolExecutor(1, "prefix store")
        self._is_stopped = False

    def close(self) -> None:
        """Wait until all entries are written, unless an exception such as Ctrl-C is in flight."""
        self._is_stopped = is_failing()
        self._writer.shutdown(cancel_futures=self._is_stopped)

    def extend(
        self,
        slot: CacheSlot,
        prompt: Prompt,
        marks: Sequence[int],
        n_held: int,
        n_redecoded: int,
    ) -> int:
        """Load the longest stored prefix of a prompt, if it is longer than what the slot holds.

        This also decides which prefixes of the prompt will be stored later (`stops`, `store`).

        Args:
            slot: Where the prompt will be prefilled.
            prompt: The prompt. Its last token is never loaded, because its logits are needed.
            marks: The positions of control tokens in it.
            n_held: The number of its first tokens that the slot holds already.
            n_redecoded: The number of tokens at the end of a prefix that have to be decoded again,
                because a draft needs their hidden states.

        Returns:
            The number of tokens that the slot now holds from the disk; 0 if nothing was loaded.
        """
        backend = self._context.backend
        sequence = slot.branches(backend).first
        tokens = np.array(prompt.tokens, "<i4")
        self._due.pop(sequence, None)
        if len(tokens) < MIN_TOKENS:
            return 0
        n_loaded = 0
        try:
            n_stored, saved = self._longest(tokens[:-1], slot.n_ctx(backend))
            if saved is not None:
                if n_stored >= MIN_TOKENS:
                    _mark_as_used(saved.path)
                n_wanted = n_stored
                if self._context.goes_back:  # other caches cannot drop a few tokens
                    n_wanted -= n_redecoded
                n_loaded = self._load(sequence, saved, n_wanted, n_held)
            lengths = self._lengths_to_store(tokens, marks, prompt, n_stored)
        except OSError as error:
            _log.info("the store of prefixes: %s: %s", self._folder, error.strerror)
            return n_loaded
        self._store_later(sequence, [tokens[:length] for length in lengths])
        return n_loaded

    def stops(self, sequence: int) -> list[int]:
        """Return the lengths at which prefill has to pause to store a prefix."""
        return list(self._due.get(sequence, ()))

    def store(
        self,
        sequence: int,
        prefill_s: Callable[[int], float],
    ) -> None:
        """Store the prefix that is due for a sequence, if the sequence now holds exactly that text.

        Its state is copied here, and another thread writes it to the disk. The prefix is dropped
        without storing it if loading would not be much faster than prefill, or if memory or disk
        space is short.

        Args:
            sequence: The sequence in which the prompt is prefilled.
            prefill_s: Returns the seconds that the prefill of n tokens takes; 0 if unknown.
        """
        backend = self._context.backend
        tokens = self._due.get(sequence, {}).pop(backend.length(sequence), None)
        if tokens is None:
            return
        self._tried.add(self._file(tokens))
        if not np.array_equal(backend.text(sequence), tokens):
            return
        took_s = prefill_s(len(tokens))
        try:
            n_bytes = backend.saved_bytes(sequence)
            # The quotient is the time that loading will take.
            if took_s and took_s < _MIN_SPEEDUP * n_bytes / self._bytes_per_s:
                return
            if n_bytes > min(self._max_bytes(), available_memory_bytes() // 2):
                _log.info("a prefix of %d tokens is not stored: too little room", len(tokens))
                return
            state = backend.saved_text(sequence)
        except (BackendError, OSError) as error:
            _log.info("a prefix is not stored: %s", error)
            return
        self._writer.submit(self._write, tokens, state, took_s / len(tokens))

    # --- loading

    def _longest(
        self,
        tokens: NDArray[np.int32],
        n_ctx: int,
    ) -> tuple[int, SavedText | None]:
        """Return the length of the longest stored prefix of a text, and its entry.

        Args:
            tokens: The text.
            n_ctx: The size of the slot; entries that do not fit into it are ignored.

        Returns:
            The length, and the entry; 0 and None if no entry shares a prefix.
        """
        longest = 0
        best: SavedText | None = None
        for saved in self._entries():
            n_shared = saved.n_shared(tokens)
            # A cache that cannot go back can only use an entry that is a prefix as a whole.
            is_usable = self._context.goes_back or n_shared == len(saved.tokens)
            if n_shared == 0 or not is_usable or len(saved.tokens) >= n_ctx:
                continue
            # Of entries that share equally much, the smallest loads most quickly.
            is_smaller = best is not None and saved.n_bytes < best.n_bytes
            if n_shared > longest or (n_shared == longest and is_smaller):
                longest = n_shared
                best = saved
        return longest, best

    def _entries(self) -> Iterator[SavedText]:
        """Yield the entries for this context, and delete those that are damaged."""
        for path in self._folder.glob(f"{self._context.key}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may delete it at any time
                saved = SavedText.read(path)
                if saved is not None and saved.key == self._context.key:
                    yield saved
                else:
                    self._delete_damaged(path)

    def _load(
        self,
        sequence: int,
        saved: SavedText,
        n_wanted: int,
        n_held: int,
    ) -> int:
        """Load the first tokens of an entry into a sequence, if that is faster than their prefill.

        Args:
            sequence: The sequence, whose text is replaced.
            saved: The entry.
            n_wanted: The number of tokens to load.
            n_held: The number of these tokens that the sequence holds already.

        Returns:
            `n_wanted` if they were loaded, else 0.
        """
        n_more = n_wanted - n_held
        if n_more <= 0:
            return 0
        load_s = saved.n_bytes / self._bytes_per_s
        if saved.token_s and n_more * saved.token_s < load_s:
            return 0
        backend = self._context.backend
        started_s = self._clock()
        if saved.restore(backend, sequence) is not RestoreResult.LOADED:
            self._delete_damaged(saved.path)
            return 0
        if n_wanted < len(saved.tokens):
            backend.remove(sequence, n_wanted)
        took_s = self._clock() - started_s
        if saved.n_bytes > CHUNK:  # small files tell little about the speed of the disk
            self._bytes_per_s = saved.n_bytes / took_s
        _log.info("%s: %d tokens were loaded in %.2f s", backend.model.name, n_wanted, took_s)
        return n_wanted

    def _delete_damaged(self, path: Path) -> None:
        _log.info("a prefix is damaged, or of another version, and deleted: %s", path)
        with contextlib.suppress(OSError):
            path.unlink()

    # --- what to store

    def _lengths_to_store(
        self,
        tokens: NDArray[np.int32],
        marks: Sequence[int],
        prompt: Prompt,
        n_stored: int,
    ) -> list[int]:
        """Return the lengths of the prefixes of a prompt to store, the shortest first.

        The prompt is remembered, to be compared with later ones.

        Args:
            tokens: Its tokens.
            marks: The positions of control tokens in it.
            prompt: The prompt.
            n_stored: The length of its longest prefix that is stored already.
        """
        # Store all but the last token, or only the prefix that it shares with earlier prompts.
        n_shared = len(tokens) - 1
        if self._options.kept == "shared":
            n_shared = self._seen.add(tokens, marks[:_N_MARKS], prompt.subject)
        lengths = [n_shared]
        if not self._context.goes_back:
            lengths = _lengths_of_whole_entries(n_shared, marks)
        if self._expects_instructions_again(prompt.n_instructions, n_stored):
            lengths.append(prompt.n_instructions)
        if self._context.goes_back:  # the longest entry serves for all others
            lengths = [max(lengths)]

        # Leave out those that are hardly longer than the one before.
        chosen: list[int] = []
        n_min = max(MIN_TOKENS, n_stored + _MIN_GAIN)
        for length in sorted(lengths):
            if length >= n_min:
                chosen.append(length)
                n_min = length + _MIN_GAIN
        return chosen

    def _expects_instructions_again(
        self,
        n_instructions: int,
        n_stored: int,
    ) -> bool:
        """Decide whether to store the instructions of an agent at first sight.

        Instructions may differ in each conversation, as with the time of the day at their
        beginning. So this is given up after a few entries (counted here) if none of them was used.

        Args:
            n_instructions: The number of tokens of a prompt's instructions.
            n_stored: The length of the prompt's longest prefix that is stored already.
        """
        if n_stored >= MIN_TOKENS:
            self._n_in_vain = 0
        if n_instructions < max(MIN_TOKENS, n_stored + 1):
            return False
        self._n_in_vain += 1
        return self._n_in_vain <= _MAX_IN_VAIN

    def _store_later(
        self,
        sequence: int,
        prefixes: Iterable[NDArray[np.int32]],
    ) -> None:
        """Store each of some prefixes as soon as a sequence holds exactly that text.

        If the sequence already holds a little more than a prefix, the rest is dropped, so that
        prefill passes the end of the prefix.
        """
        backend = self._context.backend
        n_held = backend.length(sequence)
        due: dict[int, NDArray[np.int32]] = {}
        for tokens in prefixes:
            n_dropped = 0
            if n_held > len(tokens):
                n_dropped = n_held - backend.n_restorable(sequence, len(tokens))
            if n_dropped <= _MAX_DROPPED and self._file(tokens) not in self._tried:
                due[len(tokens)] = tokens
        if not due:
            return
        self._due[sequence] = due
        shortest = min(due)
        try:
            if n_held > shortest:
                backend.remove(sequence, shortest)
        except RollbackError:  # the cells that a sliding window needs are gone
            backend.remove(sequence)

    # --- writing, in a separate thread

    def _write(
        self,
        tokens: NDArray[np.int32],
        state: NDArray[np.uint8],
        token_s: float,
    ) -> None:
        """Write an entry, make room for it, and delete entries that it makes superfluous.

        Args:
            tokens: The prefix.
            state: The state of the sequence that holds it.
            token_s: The seconds per token of its prefill.
        """
        path = self._file(tokens)
        name = self._context.backend.model.name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new_beside(path) as new:
                self._delete_leftovers(new.stat().st_mtime - _LEFTOVER_S)
                if not make_room(stored(self._folder), len(state), self._max_bytes()):
                    _log.info("a prefix of %d tokens is not stored: too little room", len(tokens))
                    return
                is_complete = write_text(
                    new,
                    self._context.key,
                    tokens,
                    state,
                    token_s,
                    lambda: self._is_stopped,
                )
                if not is_complete:
                    return
                new.replace(path)
            _log.info("%s: stored a prefix of %d tokens", name, len(tokens))
            if self._context.goes_back:
                self._delete_prefixes_of(tokens)
        except OSError as error:
            _log.info("the store of prefixes: %s: %s", self._folder, error.strerror)

    def _delete_leftovers(self, older_than: float) -> None:
        for leftover in self._folder.glob(f"*{NEW_SUFFIX}"):
            if leftover.stat().st_mtime < older_than:
                leftover.unlink()

    def _delete_prefixes_of(self, tokens: NDArray[np.int32]) -> None:
        """Delete the entries that are prefixes of a new one: it can be used in their place."""
        for saved in self._entries():
            if saved.n_shared(tokens) == len(saved.tokens) < len(tokens):
                saved.path.unlink()

    def _file(self, tokens: NDArray[np.int32]) -> Path:
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        return self._folder / f"{self._context.key}-{digest[:16]}{_SUFFIX}"

    def _max_bytes(self) -> int:
        """Return the maximum size of all entries, as the options or the free disk space allow."""
        if self._options.max_bytes is not None:
            return self._options.max_bytes
        free_bytes = shutil.disk_usage(existing_parent(self._folder)).free
        own_bytes = sum(size_of(path) for path in stored(self._folder))
        return min(_MAX_BYTES, int(_DISK_SHARE * (free_bytes + own_bytes)))


def stored(folder: Path) -> list[Path]:
    """Return the entries in a folder, for all contexts."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def _lengths_of_whole_entries(n_shared: int, marks: Sequence[int]) -> list[int]:
    """Return where entries that can only be used as a whole should end.

    The first ends at the end of a message, which later prompts are likely to share. If the shared
    prefix is much longer than that, the second ends shortly before its end: the last tokens may be
    shared by chance, as when two questions begin with the same words.

    Args:
        n_shared: The length of the prefix that is worth storing.
        marks: The positions of control tokens in it.
    """
    n_messages = max((mark for mark in marks if mark <= n_shared), default=0)
    n_blocks = n_shared // BLOCK * BLOCK - BLOCK
    if n_messages < MIN_TOKENS:
        return [n_blocks]
    if n_blocks < n_messages + _MIN_GAIN:
        return [n_messages]
    return [n_messages, n_blocks]


def _mark_as_used(path: Path) -> None:
    """Note that an entry is in use: the least recently used ones are deleted first."""
    with contextlib.suppress(OSError):  # another process may delete it at any time
        os.utime(path)


def positions_of_control_tokens(vocabulary: LlamaVocabulary, tokens: Sequence[int]) -> list[int]:
    """Return the positions of control tokens, which mark the ends of messages among others."""
    controls = [token for token in np.unique(tokens).tolist() if vocabulary.is_control(token)]
    positions: list[int] = np.flatnonzero(np.isin(tokens, controls)).tolist()
    return positions
