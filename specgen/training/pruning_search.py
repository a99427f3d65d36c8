"""Search for the blocks to leave out of a target, by Bayesian optimisation.

As in Draft & Verify (Zhang et al., arXiv:2309.08168, section 3.3), the search maximises the expected speed,
and a Gaussian process chooses the next set to judge. Two things differ from the paper. Each block is first
left out alone: if blocks did harm independently, agreements would multiply, so the process learns only how sets
differ from that product. And the covariance of two sets depends on the number of blocks in which they differ.
(docs/lab-notes/training.md compares this with greedy and with random search.)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.errors import ModelFileError, OutputError
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    locked,
    take_lines,
    to_line,
    write_errors,
)

#: Blocks of a model, by their numbers.
Blocks: TypeAlias = frozenset[int]
#: The share of positions at which the model without some blocks has the whole model's likeliest token.
Agreement: TypeAlias = Callable[[Blocks], float]
#: The expected speed-up, by the number of left-out blocks and the agreement.
Speedup: TypeAlias = Callable[[int, float], float]
_Floats: TypeAlias = NDArray[np.float64]

#: The length scale of the process, in blocks by which two sets differ, and its noise as a variance: an
#: agreement is measured on some hundred positions only.
_LENGTH = 4.0
_NOISE = 0.02
#: Candidates of a step: the number of best sets, of random neighbours of each, and of other random sets.
_N_BEST, _N_NEAR, _N_FAR = 8, 60, 100
#: Random sets that are judged before the process chooses, and the number of judgements without an improvement
#: after which the search ends.
N_FIRST = 8
_PATIENCE = 60
#: The lowest agreement that is used, so that its logarithm is finite.
_LEAST = 0.01
#: The points at which expectations over a normal distribution are taken, and their weights.
_DEVIATIONS = np.linspace(-2.0, 2.0, 9)
_WEIGHTS = np.exp(-0.5 * _DEVIATIONS**2) / np.exp(-0.5 * _DEVIATIONS**2).sum()
_GRID = np.linspace(0.0, 1.0, 101)


class Evaluations:
    """An `Agreement` that judges each set of blocks once and keeps the results in a file.

    `key` identifies the model and texts of the judgements; lines with another key are ignored.
    """

    def __init__(
        self, agreement: Agreement, file: AppendedFile, key: str, known: dict[Blocks, float]
    ) -> None:
        self._agreement = agreement
        self._file = file
        self._key = key
        #: The results so far.
        self.known = known

    @staticmethod
    @contextlib.contextmanager
    def opened(path: Path, key: str, agreement: Agreement) -> Iterator[Evaluations]:
        """Open the results in a file, which one process at a time may use. Raises `OutputError`,
        `ModelFileError`."""
        busy = OutputError(f"{path}: another process is at it", "wait until it is done")
        with locked(path.with_name(f"{path.name}.lock"), busy):
            known, n_bytes = _read(path, key)
            with AppendedFile.opened(path) as file:
                file.cut(n_bytes)
                yield Evaluations(agreement, file, key, known)

    def __call__(self, left_out: Blocks) -> float:
        if left_out not in self.known:
            found = self._agreement(left_out)
            self.known[left_out] = found
            line = {"key": self._key, "left_out": sorted(left_out), "agreement": found}
            self._file.append(to_line(line))
        return self.known[left_out]


def _read(path: Path, key: str) -> tuple[dict[Blocks, float], int]:
    known: dict[Blocks, float] = {}

    def take(line: Any) -> None:
        if line["key"] == key:
            known[frozenset(map(int, line["left_out"]))] = float(line["agreement"])

    with write_errors(path):
        data = path.read_bytes() if path.exists() else b""
    try:
        return known, take_lines(data, take)
    except DamagedLineError as error:
        hint = f"delete {path}: it is made again"
        raise ModelFileError(f"{path}: line {error.number} is damaged", hint) from error


def search(
    agreement: Evaluations,
    speedup: Speedup,
    n_layer: int,
    *,
    is_over: Callable[[], bool],
    progress: Callable[[str, int, int], None],
    sizes: Sequence[int] | None = None,
    seed: int = 0,
) -> Blocks | None:
    """Return the judged set of blocks with the highest expected speed-up; None if none was judged.

    The search ends when `is_over` returns True, or when nothing better is found. The first block always
    stays: a model without it predicts nothing of use. At most half of the blocks are left out, unless
    `sizes` gives the allowed numbers.
    """
    rng = np.random.default_rng(seed)
    sizes = range(1, n_layer // 2 + 1) if sizes is None else sizes
    values = np.array([[speedup(n, a) for a in _GRID] for n in range(max(sizes) + 1)])

    def value(left_out: Blocks) -> float:
        found = agreement.known[left_out]
        return float(np.interp(found, _GRID, values[len(left_out)]))

    def best(n: int) -> list[Blocks]:
        allowed = [left_out for left_out in agreement.known if len(left_out) in sizes]
        return sorted(allowed, key=value, reverse=True)[:n]

    alone = np.zeros(n_layer)
    for block in range(1, n_layer):
        if is_over():
            break
        progress("judging blocks, one by one", block - 1, n_layer - 1)
        alone[block] = math.log(max(_LEAST, agreement(frozenset({block}))))
    moves = _Moves(alone, sizes, rng)
    for number in range(N_FIRST):
        if not is_over():
            progress("judging sets of blocks", number, N_FIRST)
            agreement(moves.far())
    asked, n_worse = best(1), 0
    while not is_over() and n_worse < _PATIENCE:
        progress("judging sets of blocks: without a better one", n_worse, _PATIENCE)
        near = {moves.near(left_out) for left_out in best(_N_BEST) for _ in range(_N_NEAR)}
        far = {moves.far() for _ in range(_N_FAR)}
        new = sorted((near | far) - agreement.known.keys(), key=sorted)
        if not new:
            break
        gains = _expected_gains(agreement.known, new, alone, values, value(best(1)[0]))
        agreement(new[int(np.argmax(gains))])
        n_worse = n_worse + 1 if best(1) == asked else 0
        asked = best(1)
    return next(iter(best(1)), None)


def _expected_gains(
    known: dict[Blocks, float], new: Sequence[Blocks], alone: _Floats, values: _Floats, best: float
) -> _Floats:
    """Return how much better than the best each new set is expected to be; being worse counts as 0."""
    seen, asked = _matrix(known, len(alone)), _matrix(new, len(alone))
    logs = np.log(np.maximum(_LEAST, list(known.values())))
    beyond = logs - seen @ alone
    centre, scale = beyond.mean(), beyond.std() + 1e-6
    factor = np.linalg.cholesky(_likeness(seen, seen) + _NOISE * np.eye(len(seen)))
    between = np.linalg.solve(factor, _likeness(seen, asked))
    mean = between.T @ np.linalg.solve(factor, (beyond - centre) / scale)
    deviation = np.sqrt(np.maximum(0.0, 1.0 - (between**2).sum(axis=0)))
    likely = asked @ alone + centre + scale * (mean + deviation * _DEVIATIONS[:, None])
    agreements = np.minimum(1.0, np.exp(likely))
    gains = np.zeros(len(new))
    for size in {len(left_out) for left_out in new}:
        of_size = np.array([len(left_out) == size for left_out in new])
        reached = np.interp(agreements[:, of_size], _GRID, values[size])
        gains[of_size] = _WEIGHTS @ np.maximum(0.0, reached - best)
    return gains


def _matrix(sets: Collection[Blocks], n_layer: int) -> _Floats:
    """Return sets as rows, with a 1 for each block."""
    return np.array([[block in left_out for block in range(n_layer)] for left_out in sets], float)


def _likeness(ones: _Floats, others: _Floats) -> _Floats:
    """Return the covariance of the process, by the number of blocks that differ."""
    differing = ones @ (1.0 - others.T) + (1.0 - ones) @ others.T
    return np.asarray(np.exp(-differing / _LENGTH))


class _Moves:
    """Draws sets of blocks of the sizes that are allowed."""

    def __init__(self, alone: _Floats, sizes: Sequence[int], rng: np.random.Generator) -> None:
        self._blocks = np.arange(1, len(alone))
        self._sizes = sizes
        self._rng = rng
        # Blocks that do little harm alone are left out more often.
        shares = np.exp(4.0 * alone[1:])
        self._shares = shares / shares.sum()

    def far(self) -> Blocks:
        """Draw any set."""
        size = self._rng.choice(self._sizes)
        chosen = self._rng.choice(self._blocks, size, replace=False, p=self._shares)
        return frozenset(chosen.tolist())

    def near(self, left_out: Blocks) -> Blocks:
        """Draw a set that is one or two changes away: a block more, a block less, or a block swapped."""
        found = set(left_out)
        for _ in range(self._rng.integers(1, 3)):
            kept = [block for block in self._blocks.tolist() if block not in found]
            change = self._rng.integers(3)
            if found and change != 1:
                found.remove(self._rng.choice(sorted(found)))
            if change != 0:
                found.add(int(self._rng.choice(kept)))
        return frozenset(found) if len(found) in self._sizes else left_out
