"""Texts as tokens, in files that several processes share.

In memory and in a file, texts are joined in one array, each followed by a separator.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from specgen.errors import OutputError
from specgen.system.arrays import FILE_DAMAGE
from specgen.system.files import locked, replace_bytes

#: int32[n]: token ids, or indices of tokens.
IntArray: TypeAlias = npt.NDArray[np.int32]
#: Follows each text. It is not a token.
SEPARATOR = -1
_NOTHING: IntArray = np.empty(0, np.int32)
#: The longest wait for another process that stores texts, in seconds.
_WAIT_S = 2.0


# --- joined texts


def join_texts(texts: Iterable[Sequence[int] | IntArray]) -> IntArray:
    """Join texts, each followed by a separator: int32[n]. Empty texts are left out."""
    parts = [np.array([*text, SEPARATOR], np.int32) for text in texts if len(text)]
    return np.concatenate(parts) if parts else _NOTHING


def split_texts(tokens: IntArray) -> list[IntArray]:
    """Return the texts that `join_texts` joined, without the separators: int32[n] each."""
    ends = np.flatnonzero(tokens == SEPARATOR)
    return [text[:-1] for text in np.split(tokens, ends + 1)[:-1]]


def append_texts(
    tokens: IntArray,
    new: Sequence[IntArray],
    max_tokens: int,
) -> IntArray:
    """Return joined texts with new ones as the last, without the older half if there are too many.

    Args:
        tokens: int32[n]: the joined texts.
        new: The new texts.
        max_tokens: If the texts have more tokens than this in total, only the newest ones are
            returned, which have at most half as many; in any case the last one.
    """
    tokens = np.append(tokens, join_texts(new))
    if np.count_nonzero(tokens != SEPARATOR) <= max_tokens:
        return tokens
    texts = split_texts(tokens)
    first = len(texts) - 1
    n_tokens = len(texts[first])
    while first > 0 and n_tokens + len(texts[first - 1]) <= max_tokens // 2:
        first -= 1
        n_tokens += len(texts[first])
    return join_texts(texts[first:])


# --- files


def read_tokens(path: Path) -> IntArray:
    """Return the joined texts in a file, the latest last: int32[n].

    A file that is missing or damaged counts as empty.
    """
    arrays = load_arrays(path, "tokens")
    return arrays[0] if arrays is not None else _NOTHING


def read_texts(path: Path) -> list[IntArray]:
    """Return the texts in a file, int32[n] each; see `read_tokens`."""
    return split_texts(read_tokens(path))


def store_texts(
    path: Path,
    new: Iterable[IntArray],
    max_tokens: int,
) -> None:
    """Add texts to a file as the last ones, if possible; those that it has already are left out.

    If the file cannot be written, or another process keeps it locked, it stays as it is.

    Args:
        path: The file. All files in its folder have the same lock.
        new: The new texts.
        max_tokens: When the texts have more tokens than this, the older half is removed.
    """
    lock_error = OutputError(f"{path}: another process is writing to it")
    lock = locked(path.with_name("lock"), lock_error, _WAIT_S)
    with contextlib.suppress(OSError, OutputError), lock:
        tokens = read_tokens(path)
        known = {text.tobytes() for text in split_texts(tokens)}
        # By their bytes, so that a text that is there twice is added once.
        unknown = {text.tobytes(): text for text in new if text.tobytes() not in known}
        if unknown:
            save_arrays(path, tokens=append_texts(tokens, [*unknown.values()], max_tokens))


def save_arrays(path: Path, **arrays: IntArray) -> None:
    """Write named arrays to a file, which is replaced atomically.

    Raises:
        OSError: If the file cannot be written.
    """
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    replace_bytes(path, file.getvalue())


def load_arrays(path: Path, *names: str) -> list[IntArray] | None:
    """Read arrays by name, int32[n] each, from a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = [file[name] for name in names]
    except FILE_DAMAGE:
        return None
    if any(array.dtype != np.int32 or array.ndim != 1 for array in arrays):
        return None
    return arrays
