"""What was learnt on this machine: what decodes cost, which drafts are accepted, and with how
many threads a model is fastest.

It is kept in one JSON file. Each process reads the file once, corrects the entries that it used, and
writes these into the file as it is by then. If two processes correct the same entry, the later one
wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from specgen.method.acceptance import (
    N_BINS,
    AcceptanceCounts,
    AcceptanceRates,
    GainPrior,
)
from specgen.method.cost_table import CostTable
from specgen.options import ContextOptions
from specgen.session.calibration.threads import Threads
from specgen.session.calibration.timing import MIN_SIZES
from specgen.system.arrays import ProbArray
from specgen.system.atomic_files import replace_text

#: Tables by how full the context is, in tokens: below 512, 1024, 2048, ...
_SHALLOW = 512
_N_DEPTHS = 22
#: The number of entries of each kind that are kept, the latest ones.
_N_KEPT = 256

#: The numbers of texts at once for which a drafter's gains are kept separately.
_AT_ONCE = tuple(str(2**n) for n in range(1, 9))
#: llama.cpp has no room for more threads, so larger numbers in the file make no sense.
_MAX_THREADS = 512

_COSTS, _CHANCES, _THREADS = "costs", "chances", "threads"
#: By the first key of a model's tables: how often in succession its costs were measured on a busy
#: machine (`n`), and how many further processes use the last of these costs (`left`).
_BUSY = "busy"
#: The most processes that use costs of a busy machine before they are measured again.
_MOST_REUSED = 63


class Memory:
    """Measured costs, acceptance statistics and threads, from a file. Without a file nothing is
    known, and nothing is kept.

    `machine` is everything about the machine and the build of llama.cpp that decides what a
    decode costs, as JSON values.
    """

    def __init__(self, file: Path | None = None, machine: Mapping[str, Any] | None = None) -> None:
        self._file = file
        self._machine = dict(machine or {})
        self._known = _read(file)
        self._tables: dict[str, CostTable] = {}
        self._acceptance: dict[str, dict[str, AcceptanceRates]] = {}
        self._threads: dict[str, Threads] = {}
        #: Keys of tables that are to be removed from the file.
        self._forgotten: set[str] = set()
        #: By the first of them, the keys of tables that were measured on a busy machine.
        self._passing: dict[str, list[str]] = {}
        #: First keys of tables in use that an earlier process measured on a busy machine.
        self._reused: set[str] = set()
        #: The counts of `_BUSY` that this process changed.
        self._counted: dict[str, tuple[int, int]] = {}

    def costs(self, model: Path, context: ContextOptions, n_past: int, n_threads: int) -> CostTable:
        """Return the cost table of a model's decodes in contexts with these options and about `n_past`
        tokens; empty if nothing is known. What the table learns is kept. `n_threads` is the number of
        threads if the options name none."""
        depth = _depth(n_past)
        keys = self._cost_keys(model, context, n_threads)
        if keys[0] in self._known[_BUSY] and keys[0] not in self._reused:
            self._reused.add(keys[0])
            if _busy_counts(self._known[_BUSY][keys[0]])[1] == 0:  # measure again
                for key in keys:
                    self._known[_COSTS].pop(key, None)
        if keys[depth] not in self._tables:
            self._tables[keys[depth]] = CostTable(self._kept_seconds(keys, depth))
        table = self._tables[keys[depth]]
        if depth:
            self._extend(table, keys, depth)
        return table

    def forget_costs(self, model: Path, context: ContextOptions, n_threads: int) -> None:
        """Forget the costs of a model's decodes in such contexts, so that they are measured again: the
        machine may have had other work to do. No table of them may be in use."""
        for key in self._cost_keys(model, context, n_threads):
            self._tables.pop(key, None)
            self._known[_COSTS].pop(key, None)
            self._forgotten.add(key)
            self._passing.pop(key, None)

    def keep_no_costs(self, model: Path, context: ContextOptions, n_threads: int) -> None:
        """Do not keep the present costs of a model's decodes in such contexts, so that the next process
        measures them again: the machine had other work to do. If it had so the last n times too, the next
        2^n - 1 processes use these costs: on a machine that is always busy, few processes measure."""
        keys = self._cost_keys(model, context, n_threads)
        self._passing[keys[0]] = keys

    def threads(self, model: Path, context: ContextOptions) -> Threads | None:
        """Return the numbers of threads with which a model is fastest; None if they were not
        measured."""
        key = self._model_key(model, context)
        return self._threads.get(key) or _kept_threads(self._known[_THREADS].get(key))

    def keep_threads(self, model: Path, context: ContextOptions, threads: Threads) -> None:
        """Store the numbers of threads for a model."""
        self._threads[self._model_key(model, context)] = threads

    def acceptance(self, target: Path, draft: Path | str, mode: str) -> dict[str, AcceptanceRates]:
        """Return the acceptance statistics of the drafts of `draft` for `target`, by origin; origins that
        are added to the result are kept. `mode` separates cases whose acceptance rates differ."""
        name = _identity(draft) if isinstance(draft, Path) else draft
        key = _key({"target": _identity(target), "draft": name, "mode": mode})
        if key not in self._acceptance:
            kept = self._known[_CHANCES].get(key, {})
            self._acceptance[key] = {
                origin: AcceptanceRates(origin, counts)
                for origin, counts in _all_counts(kept).items()
            }
        return self._acceptance[key]

    def save(self) -> None:
        """Write what was learnt to the file. A file that cannot be written stays as it is, and the rest
        is learnt again."""
        with contextlib.suppress(OSError):
            self.write()

    def write(self) -> None:
        """Write what was learnt to the file. Raise `OSError`; the file is then as it was."""
        if self._file is None:
            return
        document = _read(self._file)
        passing = self._count_busy(document[_BUSY])
        for key in self._forgotten | passing:
            document[_COSTS].pop(key, None)
        for key, table in self._tables.items():
            if table and key not in passing:
                document[_COSTS].pop(key, None)
                document[_COSTS][key] = {str(n): round(s, 7) for n, s in table.known.items()}
        for key, by_origin in self._acceptance.items():
            counted = {o: _to_json(c.counts) for o, c in by_origin.items() if c.n_judged}
            if counted:
                document[_CHANCES].pop(key, None)
                document[_CHANCES][key] = counted
        for key, threads in self._threads.items():
            document[_THREADS].pop(key, None)
            document[_THREADS][key] = dataclasses.asdict(threads)
        for kind, entries in document.items():
            document[kind] = dict(list(entries.items())[-_N_KEPT:])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def _count_busy(self, counts: dict[str, Any]) -> set[str]:
        """Count this process's measurements on a busy machine in `counts`, and its use of earlier ones, each
        once; return the keys of the tables that are not kept."""
        for first in (self._passing.keys() | self._reused) - self._counted.keys():
            n, left = _busy_counts(counts.get(first))
            if first in self._passing:
                left, n = min(2**n - 1, _MOST_REUSED), min(n + 1, _MOST_REUSED)
            elif left and first not in self._forgotten:
                left -= 1
            elif len(self._tables.get(first, CostTable()).known) >= MIN_SIZES:
                n = left = 0  # measured anew, on an idle machine
            self._counted[first] = n, left
        for first, (n, left) in self._counted.items():
            counts.pop(first, None)
            if n:
                counts[first] = {"n": n, "left": left}
        once = (keys for first, keys in self._passing.items() if self._counted[first] == (1, 0))
        return set(itertools.chain.from_iterable(once))

    def _kept_seconds(self, keys: Sequence[str], depth: int) -> dict[int, float]:
        """Return the seconds that are kept for a depth, or for the nearest depth with a table."""
        for other in sorted(range(len(keys)), key=lambda other: abs(other - depth)):
            if keys[other] in self._tables and other != depth:
                return self._tables[keys[other]].known
            seconds = _seconds(self._known[_COSTS].get(keys[other]))
            if seconds:
                return seconds
        return {}

    def _extend(self, table: CostTable, keys: Sequence[str], depth: int) -> None:
        """Copy the costs of larger batches from the nearest depth that has them, scaled to this table. A
        table that was made without drafts knows small batches only. It expects larger ones to cost in
        proportion to their rows, so that no draft would ever pay."""
        largest = max(table.known, default=0)
        for other in sorted(range(len(keys)), key=lambda other: abs(other - depth)):
            if other == depth:
                continue
            kept = self._tables.get(keys[other]) or CostTable(
                _seconds(self._known[_COSTS].get(keys[other]))
            )
            known = kept.known
            if not known or max(known) <= largest:
                continue
            pace = table.seconds(1) / kept.seconds(1) if table.knows(1) and kept.knows(1) else 1.0
            for size, seconds in known.items():
                if not table.knows(size):
                    table.start(size, seconds * pace)
            return

    def _cost_keys(self, model: Path, context: ContextOptions, n_threads: int) -> list[str]:
        """Return the keys of a model's tables, by depth."""
        about = {"model": _identity(model), "context": _settings(context, n_threads)}
        return [
            _key({**about, "depth": depth, "machine": self._machine}) for depth in range(_N_DEPTHS)
        ]

    def _model_key(self, model: Path, context: ContextOptions) -> str:
        """Return the key of a model's threads. Layers on a GPU need no threads, so the
        key includes the number of these layers."""
        about = {"model": _identity(model), "n_gpu_layers": context.n_gpu_layers}
        about |= _placement(context)
        return _key({**about, "machine": self._machine})


def _depth(n_past: int) -> int:
    return min(max(0, n_past // _SHALLOW).bit_length(), _N_DEPTHS - 1)


def _identity(model: Path) -> str:
    """Return the identity of a model file in any folder: its name and size; only the name if it is
    missing."""
    try:
        return f"{model.name}:{model.stat().st_size}"
    except OSError:
        return model.name


def _settings(context: ContextOptions, n_threads: int) -> dict[str, Any]:
    """Return the options of a context that decide what a decode costs."""
    n_threads = context.n_threads or n_threads
    return _placement(context) | {
        "n_threads": n_threads,
        "n_threads_batch": context.n_threads_batch or n_threads,
        "n_gpu_layers": context.n_gpu_layers,
        "flash_attention": context.flash_attention,
        "cache_type_k": context.cache_type_k,
        "cache_type_v": context.cache_type_v,
    }


def _placement(context: ContextOptions) -> dict[str, Any]:
    """Return the workers and their layers of the model; empty if this machine alone holds all layers."""
    workers = context.workers
    if workers is None:
        return {}
    return {
        "workers": workers.endpoints,
        "tensor_split": workers.tensor_split,
        "output_here": workers.output_here,
    }


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False)


# --- the file --------------------------------------------------------------------------------


def _read(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the contents of the file by kind; empty if it is missing, not readable, or makes no
    sense."""
    document: object = None
    if file is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            document = json.loads(file.read_text(encoding="utf-8"), parse_int=_whole)
    found = document if isinstance(document, dict) else {}
    kinds = {kind: found.get(kind) for kind in (_COSTS, _CHANCES, _THREADS, _BUSY)}
    return {kind: dict(value) if isinstance(value, dict) else {} for kind, value in kinds.items()}


def _whole(digits: str) -> int | float:
    """Return a whole number. One of many digits becomes a float, perhaps infinity, since it might be too
    large to become one later."""
    return int(digits) if len(digits) < 16 else float(digits)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(entry: object) -> dict[int, float]:
    """Return a table's seconds by rows; empty if anything in it makes no sense."""
    if not isinstance(entry, dict):
        return {}
    found: dict[int, float] = {}
    for size, seconds in entry.items():
        if not (isinstance(size, str) and size.isascii() and size.isdigit() and len(size) < 7):
            return {}
        is_time = _is_number(seconds) and math.isfinite(seconds) and seconds > 0.0
        if not is_time or int(size) < 1:
            return {}
        found[int(size)] = float(seconds)
    return found


def _busy_counts(entry: object) -> tuple[int, int]:
    """Return how often costs were measured on a busy machine, and how many processes may still use them;
    zeros if these counts make no sense."""
    counts = [entry.get(name) for name in ("n", "left")] if isinstance(entry, dict) else []
    sound = [n for n in counts if type(n) is int and 0 <= n <= _MOST_REUSED]
    return (sound[0], sound[1]) if len(sound) == 2 else (0, 0)


def _kept_threads(entry: object) -> Threads | None:
    """Return the numbers of threads; None if they make no sense."""
    if not isinstance(entry, dict):
        return None
    numbers = [entry.get(name) for name in ("n_single", "n_batch")]
    counts = [n for n in numbers if type(n) is int and 1 <= n <= _MAX_THREADS]
    return Threads(*counts) if len(counts) == len(numbers) else None


def _all_counts(entry: object) -> dict[str, AcceptanceCounts]:
    if not isinstance(entry, dict):
        return {}
    found = {origin: _counts(value) for origin, value in entry.items()}
    return {origin: counts for origin, counts in found.items() if counts is not None}


def _counts(value: object) -> AcceptanceCounts | None:
    if not isinstance(value, dict):
        return None
    judged, accepted, seen = (_numbers(value.get(name)) for name in ("judged", "accepted", "seen"))
    if judged is None or accepted is None or seen is None or np.any(accepted > judged + 1e-6):
        return None
    beside = value.get("gains_beside")
    gains_beside = {
        int(n): _gains(gains)
        for n, gains in (beside.items() if isinstance(beside, dict) else ())
        if n in _AT_ONCE
    }
    return AcceptanceCounts(judged, accepted, seen, _gains(value.get("gains")), gains_beside)


def _gains(value: object) -> GainPrior:
    """Return the gains of texts; empty if they were not kept or make no sense."""
    if not isinstance(value, list) or len(value) != len(dataclasses.fields(GainPrior)):
        return GainPrior()
    if not all(_is_number(number) and math.isfinite(number) for number in value):
        return GainPrior()
    gains = GainPrior(*map(float, value))
    return GainPrior() if gains.n < 0.0 else gains


def _numbers(value: object) -> ProbArray | None:
    if not isinstance(value, list) or len(value) != N_BINS:
        return None
    if not all(map(_is_number, value)):
        return None
    numbers = np.array(value, np.float64)
    return numbers if np.all(np.isfinite(numbers) & (numbers >= 0.0)) else None


def _rounded(gains: GainPrior) -> list[float]:
    return [round(number, 4) for number in dataclasses.astuple(gains)]


def _to_json(counts: AcceptanceCounts) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if counts.gains.start is not None:
        known["gains"] = _rounded(counts.gains)
    beside = {
        str(n): _rounded(gains)
        for n, gains in counts.gains_beside.items()
        if gains.start is not None
    }
    if beside:
        known["gains_beside"] = beside
    return known | {
        "judged": [round(number, 3) for number in counts.n_judged.tolist()],
        "accepted": [round(number, 3) for number in counts.n_accepted.tolist()],
        "seen": [round(number, 3) for number in counts.n_seen.tolist()],
    }
