"""Prefixes of prompts on the disk, with what contexts computed of them, so that the next process
need not read them.

An entry is a text in a context of the target. Stored is what two prompts share before they part,
such as an agent's system message and tools; what came once is not. Keyed hashes of prompts remember
what was seen. A state is copied when exactly the place has been read, and written beside the
answer. (Drafts read the end of a long text only.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from specgen.drafters.interface import CacheSlot
from specgen.errors import BackendError, RollbackError, UsageError
from specgen.llama import LlamaBackend, build
from specgen.llama.kernels.attached import attached
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.models.files import size_of
from specgen.options import ContextOptions, PrefixOptions
from specgen.session.prompts import Prompt
from specgen.system.files import (
    NEW,
    digest_of,
    existing_parent,
    make_room,
    new_beside,
    open_private,
    replace_bytes,
    write_errors,
)
from specgen.system.processes import is_failing

_FORMAT = "specgen text 1"
#: How a file of texts begins.
_MAGIC = json.dumps({"format": _FORMAT}).removesuffix("}").encode()
_LONGEST_HEADER = 4096
_SUFFIX = ".prefix"
#: Shorter prefixes are read again.
LEAST_TOKENS = 512
#: Prompts are compared at multiples of so many tokens, and where the first control tokens are.
_BLOCK, _N_MARKS = 256, 32
#: Prompts that are remembered, and the bytes of a file of them that is written anew.
_N_SEEN, MOST_SEEN_BYTES = 64, 1 << 19
#: A text is stored if reading it takes so many times as long as loading it.
_WORTH = 3.0
#: How quick loading is supposed to be before any was measured.
BYTES_PER_S = 1e9
#: What the store may take of the free disk, and at most.
_SHARE, _MOST_BYTES = 0.1, 20 * 10**9
#: Bytes that are written at once.
CHUNK = 16 << 20
#: What a process that was killed left is deleted after so many seconds.
_LEFT_S = 3600.0

_log = logging.getLogger("specgen.session.prefix_store")


# --- texts in files


@dataclass(frozen=True, slots=True)
class CachedContext:
    """A context of the target; `key` names all that the state of a text there depends on, but the
    text.
    """

    backend: LlamaBackend
    key: str

    @classmethod
    def of(cls, backend: LlamaBackend, options: ContextOptions) -> CachedContext:
        model, kernels = backend.model, attached()
        parts = [model.name, *model.versions]
        types = [options.cache_type_k, options.cache_type_v, options.flash_attention]
        code = [model.kernels, kernels.digest if kernels is not None else "", build().llama_version]
        about = ["target", parts, code, options.n_gpu_layers, types]
        return cls(backend, digest_of(about)[:16])

    @property
    def goes_back(self) -> bool:
        """Whether it can drop any number of a text's last tokens."""
        return self.backend.rollback == "cells" and not self.backend.model.n_window


@dataclass(frozen=True, slots=True)
class SavedText:
    """A text in a file: a line of JSON, its tokens as int32, and llama.cpp's form of a sequence's
    state.
    """

    path: Path
    key: str
    tokens: NDArray[np.int32]
    #: The seconds that it took to read a token; 0 if that is not known.
    token_s: float
    #: Where the tokens begin in the file, and the bytes of tokens and state.
    start: int
    n_bytes: int
    crc32: int

    @classmethod
    def read(cls, path: Path) -> SavedText | None:
        """Return the text in a file; None if there is none, or it is cut. Raise `OSError`."""
        with (
            path.open("rb") as file,
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError),
        ):
            values = json.loads(file.readline(_LONGEST_HEADER))
            if values.pop("format") != _FORMAT:
                return None
            start, n_tokens = file.tell(), values.pop("n_tokens")
            tokens = np.frombuffer(file.read(4 * n_tokens), "<i4")
            found = cls(path, **values, tokens=tokens, start=start)
            n_bytes = os.fstat(file.fileno()).st_size - start
            is_whole = len(tokens) == n_tokens and found.n_bytes == n_bytes
            return found if is_whole else None
        return None

    def n_shared(self, tokens: NDArray[np.int32]) -> int:
        """Return how many tokens another text shares with this one before they part."""
        n = min(len(self.tokens), len(tokens))
        differ = np.flatnonzero(self.tokens[:n] != tokens[:n])
        return int(differ[0]) if len(differ) else n

    def restore(self, backend: LlamaBackend, sequence: int) -> bool | None:
        """Let a sequence hold the text. Return whether llama.cpp took it, and None if the file is
        damaged. Raise `OSError`.
        """
        data = np.memmap(self.path, np.uint8, "r", self.start, (self.n_bytes,))
        if zlib.crc32(data.data) != self.crc32:
            return None
        return backend.restore_text(sequence, self.tokens.tolist(), data[4 * len(self.tokens) :])


def write_text(
    path: Path,
    key: str,
    text: Sequence[int] | NDArray[np.int32],
    state: NDArray[np.uint8],
    token_s: float = 0.0,
    stopped: Callable[[], bool] = bool,  # never: bool() is False
) -> bool:
    """Append a text to a file, and return whether all of it was written before `stopped`. Raise
    `OSError`.
    """
    tokens = np.array(text, "<i4").view(np.uint8)
    crc32, n_bytes = zlib.crc32(state.data, zlib.crc32(tokens.data)), len(tokens) + len(state)
    header = {"format": _FORMAT, "key": key, "n_tokens": len(text), "token_s": token_s}
    line = json.dumps({**header, "n_bytes": n_bytes, "crc32": crc32}).encode()
    with path.open("ab") as file:
        file.write(line + b"\n" + tokens.tobytes())
        for start in range(0, len(state), CHUNK):
            if stopped():
                return False
            file.write(state[start : start + CHUNK].data)
    return True


def marks_in(vocabulary: LlamaVocabulary, tokens: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Return where control tokens are in a text: at the ends of messages, among others."""
    found = [token for token in np.unique(tokens).tolist() if vocabulary.is_control(token)]
    places: list[int] = np.flatnonzero(np.isin(tokens, found)).tolist()
    return places


class PromptCache:
    """A file that the user names (llama.cpp's `--prompt-cache`): the text that a context held when
    a process ended. Raises `UsageError` if the file is of another kind, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restored: list[int] = []
        try:
            begin = b""
            if path.is_file():
                with path.open("rb") as file:
                    begin = file.read(len(_MAGIC))
        except OSError as error:
            raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error
        if begin not in (b"", _MAGIC) or (path.exists() and not path.is_file()):
            hint = "name another file; this one is not overwritten"
            raise UsageError(f"--prompt-cache {path}: this file is no prompt cache", hint)

    def restore(self, context: CachedContext) -> str:
        """Let the context hold the file's text. Return why it cannot; empty if it can, or if there
        is no file yet.
        """
        if not size_of(self._path):
            return ""
        saved, backend = SavedText.read(self._path), context.backend
        is_taken = None
        if saved is not None:
            if saved.key != context.key or len(saved.tokens) > backend.n_ctx:
                return (
                    f"{self._path} was made with another model or other settings: it is made anew"
                )
            is_taken = saved.restore(backend, 0)
        if is_taken is None:
            return f"{self._path} is damaged: it is made anew"
        if not is_taken:
            return f"{self._path}: llama.cpp refused the saved state: the prompt is read again"
        self._restored = list(backend.text(0))
        return ""

    def save(self, context: CachedContext) -> None:
        """Write the file, if the text changed. Raise `OutputError`."""
        text = list(context.backend.text(0))
        if text and text != self._restored:
            with write_errors(self._path), new_beside(self._path) as new:
                write_text(new, context.key, text, context.backend.saved_text(0))
                new.replace(self._path)


# --- the store


@dataclass(frozen=True, slots=True)
class _Seen:
    """A prompt that was seen in a context with this `key`: its length, and keyed hashes of its
    prefixes by their lengths. `run` is the process, and `subject` the hash of the user's first
    message; empty without a conversation. A later one of the same name replaces it: the
    conversation went on.
    """

    name: str
    key: str
    run: str
    subject: str
    n: int
    hashes: dict[int, str]


_SEEN = TypeAdapter(_Seen)


class PrefixStore:
    """The prefixes in a folder, for the context of one engine. What cannot be read or written
    changes no answer.
    """

    def __init__(
        self,
        folder: Path,
        options: PrefixOptions,
        context: CachedContext,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._options = options
        self._context = context
        self._clock = clock
        #: Texts that are to be stored when a sequence holds them.
        self._due: dict[int, NDArray[np.int32]] = {}
        #: Entries that are being written, or that there was no room for.
        self._tried: set[Path] = set()
        self._seen = folder / "seen.jsonl"
        self._run = secrets.token_hex(4)
        self._bytes_per_s = BYTES_PER_S
        self._writer = ThreadPoolExecutor(1, "prefix store")
        self._is_stopped = False

    def close(self) -> None:
        """Write what waits, but nothing while an exception, such as Ctrl-C, ends the process."""
        self._is_stopped = is_failing()
        self._writer.shutdown(cancel_futures=self._is_stopped)

    def extend(
        self, slot: CacheSlot, prompt: Prompt, marks: Sequence[int], n_held: int, n_again: int
    ) -> int:
        """Load the longest stored prefix of a prompt, if the slot's `n_held` tokens are fewer: at
        most all tokens but the last, and the `n_again` before it. Return how many were loaded.
        Decide what is stored when it is read; `marks` are the places of control tokens.
        """
        backend, n_loaded = self._context.backend, 0
        sequence, tokens = slot.branches(backend).first, np.array(prompt.tokens, "<i4")
        self._due.pop(sequence, None)
        if len(tokens) < LEAST_TOKENS:
            return 0
        try:
            n, saved = self._longest(tokens[:-1], slot.n_ctx(backend))
            n_loaded = self._load(sequence, saved, n - n_again * self._context.goes_back, n_held)
            place = self._place(tokens, marks, prompt.subject)
        except OSError as error:
            _log.info("the store of prefixes: %s: %s", self._folder, error.strerror)
            return n_loaded
        if place > n and self._file(tokens[:place]) not in self._tried:
            self._due[sequence] = tokens[:place]
            try:
                if backend.length(sequence) > place:
                    backend.remove(sequence, place)
            except RollbackError:  # the cells that a sliding window needs are gone
                backend.remove(sequence)
        return n_loaded

    def due(self, sequence: int) -> int:
        """Return where reading has to stop, so that the text is stored; 0 for nowhere."""
        return len(self._due.get(sequence, ()))

    def store(self, sequence: int, reading_s: float) -> None:
        """Copy the state of a text that is due, if the sequence holds it, for another thread to
        write. Reading it takes `reading_s`; 0 if that is not known.
        """
        tokens, backend = self._due.get(sequence), self._context.backend
        if tokens is None or backend.length(sequence) != (n := len(tokens)):
            return
        del self._due[sequence]
        self._tried.add(self._file(tokens))
        if not np.array_equal(backend.text(sequence), tokens):
            return
        try:
            n_bytes = backend.saved_bytes(sequence)
            if reading_s and reading_s < _WORTH * n_bytes / self._bytes_per_s:
                return
            if n_bytes > min(self._most_bytes(), psutil.virtual_memory().available // 2):
                _log.info("a prefix of %d tokens is not stored: too little room", n)
                return
            state = backend.saved_text(sequence)
        except (BackendError, OSError) as error:
            _log.info("a prefix is not stored: %s", error)
            return
        self._writer.submit(self._write, tokens, state, reading_s / n)

    # --- reading

    def _longest(self, tokens: NDArray[np.int32], n_ctx: int) -> tuple[int, SavedText | None]:
        """Return the longest prefix of a text that an entry has, and this entry."""
        best: tuple[int, SavedText | None] = (0, None)
        for saved in self._entries():
            n = saved.n_shared(tokens)
            is_usable = self._context.goes_back or n == len(saved.tokens)
            if n > best[0] and is_usable and len(saved.tokens) < n_ctx:
                best = n, saved
        return best

    def _entries(self) -> Iterator[SavedText]:
        for path in self._folder.glob(f"{self._context.key}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process deleted it
                saved = SavedText.read(path)
                if saved is not None and saved.key == self._context.key:
                    yield saved
                else:
                    self._drop(path)

    def _load(self, sequence: int, saved: SavedText | None, n: int, n_held: int) -> int:
        """Let a sequence hold the first `n` tokens of an entry, if that is quicker than to read
        what it lacks. Return how many were loaded.
        """
        if saved is None or n <= n_held:
            return 0
        if saved.token_s and (n - n_held) * saved.token_s < saved.n_bytes / self._bytes_per_s:
            return 0
        started, backend = self._clock(), self._context.backend
        is_taken = saved.restore(backend, sequence)
        if not is_taken:
            self._drop(saved.path)
            return 0
        if n < len(saved.tokens):
            backend.remove(sequence, n)
        seconds = self._clock() - started
        if saved.n_bytes > CHUNK:  # little says nothing of the disk
            self._bytes_per_s = saved.n_bytes / seconds
        with contextlib.suppress(OSError):
            os.utime(saved.path)  # the least recently used goes first
        _log.info("%s: %d tokens were loaded in %.2f s", backend.model.name, n, seconds)
        return n

    def _drop(self, path: Path) -> None:
        _log.info("a prefix is damaged, or of another version, and deleted: %s", path)
        with contextlib.suppress(OSError):
            path.unlink()

    # --- what is stored

    def _place(self, tokens: NDArray[np.int32], marks: Sequence[int], subject: str) -> int:
        """Return the length of the prefix that is worth storing, 0 for none, and remember the
        prompt.
        """
        n = len(tokens)
        shared, blocks = n - 1, range(_BLOCK, n, _BLOCK)
        if self._options.kept == "shared":
            points = {n, *marks[:_N_MARKS], *blocks}
            shared = self._shared(tokens, points, subject)
        if self._context.goes_back:
            return shared if shared >= LEAST_TOKENS else 0
        # Only a whole entry can be used, so it ends where a message does, which the next prompt may
        # share too.
        for places in (marks, blocks):
            place = max((each for each in places if each <= shared), default=0)
            if place >= LEAST_TOKENS:
                return place
        return 0

    def _shared(self, tokens: NDArray[np.int32], points: set[int], subject: str) -> int:
        """Return how many tokens a prompt shares with an earlier one before they part; 0 if it goes
        on behind one that is as long. The same prompt counts if another process read it.
        """
        key = self._context.key
        hashed = functools.partial(hashlib.blake2b, key=self._secret(), digest_size=8)
        n, known = len(tokens), [seen for seen in self._seen_prompts() if seen.key == key]
        lengths = {seen.n for seen in known if seen.n <= n}
        hashes, state, start = dict[int, str](), hashed(), 0
        for end in sorted(points | lengths):
            state.update(tokens[start:end].tobytes())
            hashes[end], start = state.copy().hexdigest(), end
        about = subject and hashed(subject.encode(errors="replace")).hexdigest()
        name, parted, continued = secrets.token_hex(8), 0, 0
        for seen in known:
            same = (length for length, value in seen.hashes.items() if hashes.get(length) == value)
            shared, is_own = max(same, default=0), seen.run == self._run
            if shared == seen.n and (is_own or shared < n):
                continued = max(continued, shared)
                name = seen.name if is_own else name
            elif not (is_own and about and about == seen.subject):  # not the same conversation
                parted = max(parted, min(shared, n - 1))
        hashes = {each: hashes[each] for each in points}
        with open(self._seen, "ab", opener=open_private) as file:
            # What a killed process wrote of its line stays alone.
            line = _SEEN.dump_json(_Seen(name, key, self._run, about, n, hashes))
            file.write(b"\n" + line + b"\n")
        return parted if parted > continued else 0

    def _seen_prompts(self) -> list[_Seen]:
        """Return the latest prompts, the last one last, from a file to which processes add lines.
        Raise `OSError`.
        """
        known: dict[str, _Seen] = {}
        with open(self._seen, "rb", opener=open_private) as file:
            data = file.read()
        for line in reversed(data.split()):
            with contextlib.suppress(ValidationError):
                seen = _SEEN.validate_json(line)
                known.setdefault(seen.name, seen)
            if len(known) == _N_SEEN:  # older lines need not be read
                break
        latest = [*known.values()][::-1]
        if len(data) > MOST_SEEN_BYTES:  # what another process adds at this moment is lost
            replace_bytes(self._seen, b"\n".join(map(_SEEN.dump_json, latest)))
        return latest

    def _secret(self) -> bytes:
        """Return the key of the hashes. Raise `OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / "secret"
        if not file.exists():
            replace_bytes(file, secrets.token_bytes(32))
        return file.read_bytes()[:64]

    # --- writing, in a thread of its own

    def _write(self, tokens: NDArray[np.int32], state: NDArray[np.uint8], token_s: float) -> None:
        key, path = self._context.key, self._file(tokens)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new_beside(path) as new:
                oldest = new.stat().st_mtime - _LEFT_S
                for left in self._folder.glob(f"*{NEW}"):
                    if left.stat().st_mtime < oldest:
                        left.unlink()
                if not make_room(stored(self._folder), len(state), self._most_bytes()):
                    _log.info("a prefix of %d tokens is not stored: too little room", len(tokens))
                    return
                if not write_text(new, key, tokens, state, token_s, lambda: self._is_stopped):
                    return
                new.replace(path)
            _log.info(
                "%s: stored a prefix of %d tokens", self._context.backend.model.name, len(tokens)
            )
            for saved in self._entries() if self._context.goes_back else ():
                if saved.n_shared(tokens) == len(saved.tokens) < len(tokens):
                    saved.path.unlink()  # the new one has all of it
        except OSError as error:
            _log.info("the store of prefixes: %s: %s", self._folder, error.strerror)

    def _file(self, tokens: NDArray[np.int32]) -> Path:
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        return self._folder / f"{self._context.key}-{digest[:16]}{_SUFFIX}"

    def _most_bytes(self) -> int:
        if self._options.max_bytes is not None:
            return self._options.max_bytes
        free = shutil.disk_usage(existing_parent(self._folder)).free
        free += sum(map(size_of, stored(self._folder)))
        return min(_MOST_BYTES, int(_SHARE * free))


def stored(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))
