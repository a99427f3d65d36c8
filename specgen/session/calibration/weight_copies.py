"""Copies of draft models with weights in a type that is fast on this machine (Q4_0).

The target checks all drafts, so a draft model may have any weights: what counts is how fast it is. On a CPU
this mostly depends on the type of its matrices. llama.cpp rearranges Q4_0 for the instructions at hand, and
decodes several rows of it in hardly more time than one. Other types, an output matrix in Q8_0 among them,
are loaded again for each row. (On a machine with AVX-512, Qwen2.5-Coder 0.5B takes 19 ms a token as Q4_K_M,
13 as Q4_0 with its output in Q8_0, 10 with all in Q4_0; four tokens take 62, 33 and 17. It agrees with the
1.5B at 0.852, 0.843 and 0.840 of the positions of 75 answers.)

For each model and machine it is measured once whether a copy is faster and predicts nearly the same. A
copy that is not worth it is deleted. Copies are kept in a folder, the latest ones up to a limit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specgen.errors import BackendError, MemoryLimitError, ModelFileError
from specgen.llama import LlamaBackend, LlamaModel, build, default_threads, requantize
from specgen.method.backend import Backend, Batch
from specgen.options import ContextOptions, WeightType
from specgen.session.calibration.memory import Memory
from specgen.session.calibration.timing import begin, time_batch
from specgen.system.arrays import Logits, ProbArray
from specgen.system.atomic_files import NEW, new_beside

#: The type of a copy's matrices.
COPY_TYPE: WeightType = "q4_0"
#: Smaller models take so little time that it does not matter. For larger ones a program should not
#: write so many bytes to a disk without being asked.
LEAST_BYTES = 32 * 2**20
_MOST_BYTES = 2 * 2**30
#: The most bytes of all copies together; beyond, the copies that were not used for longest are deleted.
MOST_KEPT_BYTES = 4 * 2**30
#: Before a copy is made, this many times the model's bytes have to be free on the disk.
_FREE = 2
#: A copy has to take less than this share of the model's own time. The mean total variation distance
#: between the two next-token distributions may be no more than this, since a copy is less often right.
#: (For three copies of 0.5B models it was 0.04 to 0.09, and they agreed with the target at 0.001 to 0.012
#: fewer positions of 75 answers; for one of a 135M model it was 0.24, and 0.057 fewer.)
_WORTH_IT = 0.85
MOST_DISTANCE = 0.15
#: Rows of the batches that are timed, which are those that a draft model mostly decodes; and how often.
_SIZES = (1, 2, 4)
_N_REPEATS = 5
#: Cells of the contexts for the comparison, and the most rows whose logits are compared together.
_N_CTX = 128
_N_OUTPUTS = 16
#: Seconds after which an unfinished copy that was left is deleted.
_STALE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a model with its copy: the copy takes `share` of the model's own time, and its
    next-token distributions differ by `distance`, in [0, 1], on average."""

    model: str
    share: float
    distance: float
    copy: Path
    took_s: float

    @property
    def is_taken(self) -> bool:
        """Whether the model drafts from the copy."""
        return self.share < _WORTH_IT and self.distance <= MOST_DISTANCE

    @property
    def note(self) -> str:
        """The result as a message to the user."""
        return (
            f"{self.model} drafts from a copy in {COPY_TYPE.upper()}, which takes {self.share:.2f} of "
            f"its time (made and compared in {self.took_s:.0f} s, kept in the cache folder; "
            "--draft-weights own does without)"
        )


class Copies:
    """The copies in a folder, and the results of their comparisons in `memory`. With None as the folder
    there are no copies. `tell` gets a message before a step that takes seconds."""

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
        #: The known copies by the model's path, since they are asked for with every cost table.
        self._found: dict[Path, Path | None] = {}
        #: Models whose comparison failed for a reason that may be gone the next time.
        self._postponed: set[Path] = set()

    def of(self, model: Path, context: ContextOptions) -> Path | None:
        """Return the copy from which a model drafts; None if it drafts from its own weights."""
        if self._folder is None:
            return None
        if model not in self._found:
            copy = None
            if self._memory.weights(model, context) == COPY_TYPE:
                copy = _copy_path(self._folder, model)
            if copy is not None and not copy.is_file():
                copy = None
            if copy is not None:
                # It is used now, and is still the same file.
                with contextlib.suppress(OSError):
                    changed_ns = copy.stat().st_mtime_ns
                    os.utime(copy)
                    os.utime(copy, ns=(copy.stat().st_atime_ns, changed_ns))
            self._found[model] = copy
        return self._found[model]

    def context_of(self, model: Path, context: ContextOptions) -> ContextOptions:
        """Return the options of a model's contexts, with the type of weights if it drafts from its
        copy."""
        copy = self.of(model, context)
        return context if copy is None else replace(context, weights=COPY_TYPE)

    def forget(self, model: Path, context: ContextOptions) -> None:
        """Let a model be compared again."""
        self._memory.keep_weights(model, context, None)
        self._found.pop(model, None)
        self._postponed.discard(model)

    def discard(self, model: Path) -> None:
        """Delete a model's copy, which cannot be used, and draft from its own weights from now on."""
        copy = self._found.get(model)
        if copy is not None:
            _delete(copy)
        self._found[model] = None

    def compare(self, model: LlamaModel, context: ContextOptions, text: str) -> Comparison | None:
        """Measure and remember whether a copy of a model is faster and predicts a text much the same.
        The copy is made if there is none. None if the result is known, if the model is not to be
        compared, or if no copy can be made.

        If llama.cpp cannot make or load a copy, that is remembered too. A lack of disk space or memory,
        or a failure in reading or writing, is not: the next process tries again, this one does not."""
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
        """Return whether a model is worth a comparison that was not made yet."""
        if model.path in self._postponed:
            return False
        known = self._memory.weights(model.path, context)
        if known == "own" or (known == COPY_TYPE and self.of(model.path, context) is not None):
            return False
        if not LEAST_BYTES <= model.size_bytes <= _MOST_BYTES:
            return False
        return context.n_gpu_layers == 0 or not build().gpu_offload  # on a GPU other types are fast

    def _measure(
        self, model: LlamaModel, path: Path, context: ContextOptions, text: str
    ) -> tuple[float, float]:
        """Return the share of a model's own time that its copy takes, and the distance of its
        predictions."""
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
            return _share_of_time(own, other), distance_on(own, other, text)


def _copy_path(folder: Path, model: Path) -> Path | None:
    """Return where the copy of a model is, or would be; None if the model's file is gone. A file of the
    same name with another size or time is another model."""
    try:
        about = model.stat()
    except OSError:
        return None
    name = os.fsencode(model.name)
    digest = hashlib.sha256(name + f"\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return folder / f"{model.stem}-{digest.hexdigest()[:12]}.{COPY_TYPE}.gguf"


def _share_of_time(own: Backend, other: Backend) -> float:
    """Return the time of another model's small batches, divided by that of a model's own: the geometric
    mean over their sizes of the ratio of the median times. The two models take turns. Their contexts are
    empty before and afterwards."""
    texts = [begin(backend) for backend in (own, other)]
    shares = []
    for size in _SIZES:
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
    """Return the mean total variation distance, in [0, 1], between the next-token distributions of two
    models with one vocabulary, over the positions of a text. Their contexts are empty before.

    The acceptance rates of drafts that are drawn from the two differ by at most this much.
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
    """Return the probabilities, float64[n, n_vocab], of logits, float32[n, n_vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    probs: ProbArray = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probs


def _make(model: LlamaModel, path: Path, context: ContextOptions) -> None:
    """Make the copy of a model. Raise `BackendError` if llama.cpp cannot make it, and `OSError` if it
    cannot be written or there is no room for it."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with new_beside(path) as new:
        _make_room(folder, MOST_KEPT_BYTES - model.size_bytes, new.stat().st_mtime)
        _check_room(folder, _FREE * model.size_bytes)
        try:
            requantize(model.path, new, context.n_threads_batch or default_threads())
        except BackendError:
            # llama.cpp does not report whether it failed to write. There was room for two copies.
            _check_room(folder, model.size_bytes)
            raise
        new.replace(path)


def _check_room(folder: Path, n_bytes: int) -> None:
    """Raise `OSError` if fewer bytes are free on a folder's disk."""
    if shutil.disk_usage(folder).free < n_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _make_room(folder: Path, most_bytes: int, now_s: float) -> None:
    """Delete unfinished copies that were left long ago, and the copies that were not used for longest,
    down to `most_bytes`. `now_s` is the present time by the folder's clock."""
    kept = 0
    for copy, about in sorted(_files(folder), key=lambda file: -file[1].st_atime):
        is_left = copy.suffix == NEW
        kept += 0 if is_left else about.st_size
        if now_s - about.st_mtime > _STALE_S if is_left else kept > most_bytes:
            _delete(copy)


def _delete(copy: Path) -> None:
    """Delete a copy, if it exists. On some systems a copy that is in use stays."""
    with contextlib.suppress(OSError):
        copy.unlink()


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.iterdir():
        if path.suffix in (".gguf", NEW):
            with contextlib.suppress(OSError):
                yield path, path.stat()
