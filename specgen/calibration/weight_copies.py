"""Copies of draft models with weights in a type that is fast on this machine (Q4_0).

What a draft says is checked by the target, so its weights may be any: what counts is how soon it
says what it says. On a CPU most of that is decided by the type of its matrices. llama.cpp
rearranges Q4_0 for the instructions at hand and decodes several rows of it in hardly more time
than one, while other types, an output matrix in Q8_0 among them, are read anew for each row. (On a
machine with AVX-512, Qwen2.5-Coder 0.5B takes 19 ms a token as Q4_K_M, 13 as Q4_0 with its output
in Q8_0, 10 with all in Q4_0; four tokens 62, 33 and 17; it says what the 1.5B says at 0.852, 0.843
and 0.840 of the places of 75 answers.)

Whether a copy is quicker, and says nearly the same, is measured, once for each model on each
machine; one that is not worth it is deleted. Copies are kept in a folder, the latest ones up to a limit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specgen.arrays import Logits, ProbArray
from specgen.atomic import NEW, new_beside
from specgen.backend.base import Backend, Batch
from specgen.backend.llama import LlamaBackend, LlamaModel, build, default_threads, requantize
from specgen.calibration.memory import Memory
from specgen.calibration.timing import begin, time_batch
from specgen.errors import BackendError, MemoryLimitError, ModelFileError
from specgen.options import ContextOptions, WeightType

#: The type of a copy's matrices.
COPY_TYPE: WeightType = "q4_0"
#: Models of fewer bytes take so little time that it does not matter; for larger ones it is not for
#: a program to write as much to a disk without being asked.
_LEAST_BYTES = 32 * 2**20
_MOST_BYTES = 2 * 2**30
#: The bytes of all copies together, beyond which those go that were not used for longest.
_MOST_KEPT = 4 * 2**30
#: So many times its bytes have to be free on the disk before one is made.
_FREE = 2
#: A copy has to take less than this share of the model's own time, and to differ by no more than this
#: from what the model says, as the mean total variation distance of what may come next: it is less
#: often right. (For three copies of 0.5B models it was 0.04 to 0.09, and they said what the target says at
#: 0.001 to 0.012 fewer places of 75 answers; for one of a 135M model 0.24, and 0.057 fewer.)
_WORTH_IT = 0.85
_MOST_OTHER = 0.15
#: Rows of the batches that are timed: what a draft model mostly decodes. And how often.
_SIZES = (1, 2, 4)
_N_REPEATS = 5
#: Cells of the contexts in which they are, and the most rows whose logits are looked at together.
_N_CTX = 128
_N_OUTPUTS = 16
#: Seconds after which what was begun and left is deleted.
_STALE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model, and a copy that was made or found of it: it takes `share` of the model's own time,
    and what it says comes next differs by `distance`, in [0, 1], on average."""

    model: str
    share: float
    distance: float
    copy: Path
    took_s: float

    @property
    def is_taken(self) -> bool:
        """Whether the model drafts from it."""
        return self.share < _WORTH_IT and self.distance <= _MOST_OTHER

    @property
    def note(self) -> str:
        """What came of it, for the user."""
        return (
            f"{self.model} drafts from a copy in {COPY_TYPE.upper()}, which takes {self.share:.2f} of "
            f"its time (made and compared in {self.took_s:.0f} s, kept in the cache folder; "
            "--draft-weights own does without)"
        )


class Copies:
    """The copies in a folder (None: there are none, and none are made), and what the memory says
    of them. `tell` is told what takes seconds."""

    def __init__(
        self,
        folder: Path | None,
        memory: Memory,
        clock: Callable[[], float],
        tell: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._folder = folder
        self._memory = memory
        self._clock = clock
        self._tell = tell
        #: What is known already, by the model's path: it is asked for with every table of costs.
        self._found: dict[Path, Path | None] = {}
        #: Models whose comparison failed for a reason that may be gone the next time.
        self._postponed: set[Path] = set()

    def of(self, model: Path, context: ContextOptions) -> Path | None:
        """The copy from which a model drafts; None where it drafts from its own weights."""
        if self._folder is None:
            return None
        if model not in self._found:
            copy = None
            if self._memory.weights(model, context) == COPY_TYPE:
                copy = _copy_path(self._folder, model)
            if copy is not None and not copy.is_file():
                copy = None
            if copy is not None:
                with contextlib.suppress(OSError):  # it was used now
                    os.utime(copy)
            self._found[model] = copy
        return self._found[model]

    def context_of(self, model: Path, context: ContextOptions) -> ContextOptions:
        """The options of a model's contexts, which say if it drafts from its copy."""
        copy = self.of(model, context)
        return context if copy is None else replace(context, weights=COPY_TYPE)

    def forget(self, model: Path, context: ContextOptions) -> None:
        """Let a model be compared anew."""
        self._memory.keep_weights(model, context, None)
        self._found.pop(model, None)
        self._postponed.discard(model)

    def discard(self, model: Path) -> None:
        """Draft from the model's own weights from now on: its copy cannot be used."""
        copy = self._found.get(model)
        if copy is not None:
            _delete(copy)
        self._found[model] = None

    def compare(self, model: LlamaModel, context: ContextOptions, text: str) -> Comparison | None:
        """Find out whether a copy of a model is quicker and says much the same about a text, making
        one if there is none, and remember that; None if it is known, or not to be tried, or no copy
        can be made.

        That llama.cpp cannot make or load a copy is remembered as well. A failure for want of disk
        space or memory, or in reading or writing, is not: the next session tries again, this one
        does not."""
        folder = self._folder
        if folder is None or not self._is_new(model, context):
            return None
        path = _copy_path(folder, model.path)
        if path is None:
            return None
        started = self._clock()
        self._tell(f"comparing {model.name} with a copy in {COPY_TYPE.upper()}")
        try:
            if not path.is_file():
                _make(model, path, context)
            share, distance = self._measure(model, path, context, text)
        except (BackendError, ModelFileError):
            self._memory.keep_weights(model.path, context, "own")
            _delete(path)
            return None
        except (MemoryLimitError, OSError):
            self._postponed.add(model.path)
            return None
        found = Comparison(model.name, share, distance, path, self._clock() - started)
        self._memory.keep_weights(model.path, context, COPY_TYPE if found.is_taken else "own")
        self._found.pop(model.path, None)
        if not found.is_taken:
            _delete(path)
        return found

    def _is_new(self, model: LlamaModel, context: ContextOptions) -> bool:
        """Whether a model is worth a comparison and there was none."""
        if model.path in self._postponed:
            return False
        known = self._memory.weights(model.path, context)
        if known == "own" or (known == COPY_TYPE and self.of(model.path, context) is not None):
            return False
        if not _LEAST_BYTES <= model.size_bytes <= _MOST_BYTES:
            return False
        return context.n_gpu_layers == 0 or not build().gpu_offload  # a GPU has its own favourites

    def _measure(
        self, model: LlamaModel, path: Path, context: ContextOptions, text: str
    ) -> tuple[float, float]:
        """The share of a model's own time that its copy takes, and how much what it says differs."""
        copy = LlamaModel(model.path, weights=path, n_gpu_layers=context.n_gpu_layers)
        with contextlib.closing(copy), contextlib.ExitStack() as stack:
            backends = []
            for each in (model, copy):
                backend = LlamaBackend(
                    each, context, n_ctx=_N_CTX, clock=self._clock, n_outputs=_N_OUTPUTS
                )
                stack.callback(backend.close)
                backends.append(backend)
            own, other = backends
            return share_of_time(own, other), distance_on(own, other, text)


def _copy_path(folder: Path, model: Path) -> Path | None:
    """Where the copy of a model is, or would be: another file of the same name, or what is
    written over it, is another model. None if the model is gone."""
    try:
        about = model.stat()
    except OSError:
        return None
    name = os.fsencode(model.name)
    digest = hashlib.sha256(name + f"\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return folder / f"{model.stem}-{digest.hexdigest()[:12]}.{COPY_TYPE}.gguf"


def share_of_time(own: Backend, other: Backend, sizes: Sequence[int] = _SIZES) -> float:
    """The time of another model's small batches over that of a model's own: the geometric mean of
    some sizes, of the medians of several, by turns. Contexts are empty, and are so afterwards."""
    texts = [begin(backend) for backend in (own, other)]
    shares = []
    for size in sizes:
        times: tuple[list[float], ...] = ([], [])
        for _ in range(_N_REPEATS):
            for found, backend, text in zip(times, (own, other), texts, strict=True):
                seconds = time_batch(backend, text, size)
                if seconds is not None:
                    found.append(seconds)
        shares.append(statistics.median(times[1]) / statistics.median(times[0]))
    for backend in (own, other):
        backend.remove(0)
    return statistics.geometric_mean(shares)


def distance_on(own: Backend, other: Backend, text: str) -> float:
    """The mean total variation distance, in [0, 1], of what two models of one vocabulary say comes
    next, over the places of a text. Contexts are empty.

    A draft drawn from the one is accepted less often than one from the other by that much at most.
    """
    tokens = own.vocabulary.tokenize(text, add_special=True, parse_special=False)[: own.n_ctx]
    distances: list[float] = []
    for start in range(0, len(tokens), own.n_outputs):
        batch = Batch()
        for position, token in enumerate(tokens[start : start + own.n_outputs], start):
            batch.add(token, position, (0,), True)
        probs, others = (_softmax(backend.decode(batch)) for backend in (own, other))
        distances += (0.5 * np.abs(probs - others).sum(axis=1)).tolist()
    return statistics.fmean(distances) if distances else 0.0


def _softmax(logits: Logits) -> ProbArray:
    """Probabilities, float64[n, n_vocab], of logits, float32[n, n_vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    probs: ProbArray = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probs


def _make(model: LlamaModel, path: Path, context: ContextOptions) -> None:
    """Make the copy of a model. Raises `BackendError` if llama.cpp cannot make it, `OSError` if it
    cannot be written or there is no room for it."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with new_beside(path) as new:
        _make_room(folder, _MOST_KEPT - model.size_bytes, new.stat().st_mtime)
        _check_room(folder, _FREE * model.size_bytes)
        try:
            requantize(model.path, new, context.n_threads_batch or default_threads())
        except BackendError:
            # llama.cpp does not say whether it could not write. There was room for two copies.
            _check_room(folder, model.size_bytes)
            raise
        new.replace(path)


def _check_room(folder: Path, n_bytes: int) -> None:
    """Raise `OSError` if fewer bytes are free on a folder's disk."""
    if shutil.disk_usage(folder).free < n_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _make_room(folder: Path, most_bytes: int, now_s: float) -> None:
    """Delete what was begun and left long ago, and the copies that were not used for longest, down
    to so many bytes. It is `now_s` by the folder's clock."""
    kept = 0
    for copy, about in sorted(_files(folder), key=lambda file: -file[1].st_mtime):
        is_left = copy.suffix == NEW
        kept += 0 if is_left else about.st_size
        if now_s - about.st_mtime > _STALE_S if is_left else kept > most_bytes:
            _delete(copy)


def _delete(copy: Path) -> None:
    """Delete a copy, if it is there. One that is in use stays, on some systems."""
    with contextlib.suppress(OSError):
        copy.unlink()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        if path.suffix in (".gguf", NEW):
            with contextlib.suppress(OSError):
                yield path, path.stat()
