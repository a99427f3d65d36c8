"""What was measured on this machine: costs of decodes, acceptance of drafts, the fastest threads.

Each process reads the JSON file once, and writes the entries that it corrected into the file as it
is by then.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from specgen.drafters.interface import Key
from specgen.llama import default_threads
from specgen.method.acceptance import N_BINS, AcceptanceCounts, AcceptanceRates
from specgen.method.cost_table import CostTable
from specgen.models.files import identify
from specgen.options import ContextOptions, SessionOptions
from specgen.system.files import read_object, replace_json

#: Cost tables are kept by how full the context is, in tokens: below 512, 1024, 2048, ...
_SHALLOW = 512
_N_DEPTHS = 22
#: The number of entries of each kind that are kept, the latest ones.
_N_KEPT = 256
#: The kinds of entries in the file.
_COSTS = "costs"
_ACCEPTANCE = "chances"
_THREADS = "threads"

_Value = TypeVar("_Value")
#: Makes a cost table of the seconds of batches by their rows.
_TableKind: TypeAlias = Callable[[Mapping[int, float]], CostTable]


@dataclass(frozen=True, slots=True)
class Threads:
    """Numbers of threads; llama.cpp has no room for more than 512."""

    #: Threads for a single row.
    n_single: Annotated[int, Field(strict=True, ge=1, le=512)]
    #: Threads for batches.
    n_batch: Annotated[int, Field(strict=True, ge=1, le=512)]


def with_threads(context: ContextOptions, threads: Threads | None) -> ContextOptions:
    """Return the options with measured threads where they name none.

    A named number of threads is for batches, too.
    """
    if threads is None or context.n_threads is not None:
        return context
    n_batch = context.n_threads_batch or threads.n_batch
    return replace(context, n_threads=threads.n_single, n_threads_batch=n_batch)


class MeasurementStore:
    """Costs, acceptance and threads, from a file if there is one."""

    def __init__(self, file: Path | None = None, machine: Mapping[str, Any] | None = None) -> None:
        """Read the file.

        Args:
            file: The JSON file; None keeps everything for this process only.
            machine: All that decides what decodes cost. Entries of other machines are left alone.
        """
        self._file = file
        self._machine = dict(machine or {})
        #: The entries of the file as it was read, by kind and key.
        self._known = _read(file)
        # What is in use, by key.
        self._tables: dict[str, CostTable] = {}
        self._acceptance: dict[str, dict[str, AcceptanceRates]] = {}
        self._threads: dict[str, Threads] = {}
        #: Keys of tables that are to be removed from the file.
        self._forgotten: set[str] = set()
        #: Keys of tables that are not written.
        self._unkept: set[str] = set()

    # --- costs --------------------------------------------------------------------------------

    def costs(
        self,
        model: Path,
        context: ContextOptions,
        n_past: int = 0,
        kind: _TableKind = CostTable,
    ) -> CostTable:
        """Return a model's table for contexts of about `n_past` tokens; what it learns is kept.

        A new table begins with what is known of the nearest depth.
        """
        keys = self._cost_keys(model, context)
        depth = min(max(0, n_past // _SHALLOW).bit_length(), _N_DEPTHS - 1)
        table = self._tables.get(keys[depth])
        if table is None:
            known = self._table(keys[depth]) or next(self._nearest(keys, depth), CostTable())
            table = kind(known.known)
            self._tables[keys[depth]] = table
        if depth > 0:
            self._extend(table, keys, depth)
        return table

    def forget_costs(self, model: Path, context: ContextOptions) -> None:
        """Forget costs, so that they are measured again. No table of them may be in use."""
        for key in self._cost_keys(model, context):
            self._tables.pop(key, None)
            self._known[_COSTS].pop(key, None)
            self._forgotten.add(key)
            self._unkept.discard(key)

    def do_not_keep_costs(self, model: Path, context: ContextOptions) -> None:
        """Leave a model's costs to this process: the machine had other work to do."""
        self._unkept.update(self._cost_keys(model, context))

    def _table(self, key: str) -> CostTable:
        """Return the table in use, or the one in the file; an empty one if there is neither."""
        if key in self._tables:
            return self._tables[key]
        known = _valid(_SECONDS, self._known[_COSTS].get(key)) or {}
        # A batch costs at most what a larger one does: otherwise the time of other programs was
        # counted.
        sizes = sorted(known, reverse=True)
        least_s = itertools.accumulate((known[size] for size in sizes), min)
        return CostTable(dict(zip(sizes, least_s, strict=True)))

    def _nearest(self, keys: Sequence[str], depth: int) -> Iterator[CostTable]:
        """Yield the tables of other depths that know something, the nearest first."""
        for other in sorted(range(len(keys)), key=lambda other: abs(other - depth)):
            if other != depth:
                table = self._table(keys[other])
                if table:
                    yield table

    def _extend(
        self,
        table: CostTable,
        keys: Sequence[str],
        depth: int,
    ) -> None:
        """Copy the costs of larger batches from the nearest depth, scaled to this one.

        A table lacks them while answers have no drafts at this depth.
        """
        largest = max(table.known, default=0)
        for other in self._nearest(keys, depth):
            if max(other.known) <= largest:
                continue
            pace = 1.0
            if 1 in table.known and 1 in other.known:
                pace = table.seconds(1) / other.seconds(1)
            for size, seconds in other.known.items():
                if size not in table.known:
                    table.set_seconds(size, seconds * pace)
            return

    # --- threads and acceptance ---------------------------------------------------------------

    def threads(self, model: Path, context: ContextOptions) -> Threads | None:
        """Return the fastest threads for a model, if they were measured."""
        key = self._model_key(model, context)
        return self._threads.get(key) or _valid(_THREAD_COUNTS, self._known[_THREADS].get(key))

    def keep_threads(
        self,
        model: Path,
        context: ContextOptions,
        threads: Threads,
    ) -> None:
        """Store the fastest threads for a model."""
        self._threads[self._model_key(model, context)] = threads

    def acceptance(
        self,
        target: Path,
        draft: Key,
        mode: str,
    ) -> dict[str, AcceptanceRates]:
        """Return the acceptance rates of a draft by origin; what is added is kept.

        Args:
            target: The target's file.
            draft: The draft's file, or a word.
            mode: Separates cases that differ, as in the temperature.
        """
        name = _identity(draft) if isinstance(draft, Path) else draft
        key = _key({"target": _identity(target), "draft": name, "mode": mode})
        if key not in self._acceptance:
            entries = self._known[_ACCEPTANCE].get(key)
            rates: dict[str, AcceptanceRates] = {}
            for origin, entry in (entries if isinstance(entries, dict) else {}).items():
                counts = _valid(_COUNTS, entry)
                if counts is not None:
                    rates[origin] = AcceptanceRates(origin, _counts_of(counts))
            self._acceptance[key] = rates
        return self._acceptance[key]

    # --- writing ------------------------------------------------------------------------------

    def save(self) -> None:
        """Write what was learnt, if the file can be written; else it is learnt again."""
        with contextlib.suppress(OSError):
            self.write()

    def write(self) -> None:
        """Write what was learnt to the file. Raise `OSError`; the file is then as it was."""
        if self._file is None:
            return
        document = _read(self._file)
        for key in self._forgotten:
            document[_COSTS].pop(key, None)
        for kind, learnt in self._learnt().items():
            others = {key: entry for key, entry in document[kind].items() if key not in learnt}
            latest_last = [*others.items(), *learnt.items()]
            document[kind] = dict(latest_last[-_N_KEPT:])
        replace_json(self._file, document)

    def _learnt(self) -> dict[str, dict[str, Any]]:
        """Return the entries that this process learnt, by kind and key."""
        learnt: dict[str, dict[str, Any]] = {_COSTS: {}, _ACCEPTANCE: {}, _THREADS: {}}
        for key, table in self._tables.items():
            if table and key not in self._unkept:
                seconds = {n_rows: round(size_s, 7) for n_rows, size_s in table.known.items()}
                learnt[_COSTS][key] = seconds
        for key, by_origin in self._acceptance.items():
            judged = {
                origin: _entry_of(rates.counts)
                for origin, rates in by_origin.items()
                if rates.counts.n_judged.any()
            }
            if judged:
                learnt[_ACCEPTANCE][key] = judged
        for key, threads in self._threads.items():
            learnt[_THREADS][key] = asdict(threads)
        return learnt

    # --- keys ---------------------------------------------------------------------------------

    def _cost_keys(self, model: Path, context: ContextOptions) -> list[str]:
        """Return the keys of a model's cost tables, one for each depth."""
        n_threads = context.n_threads or default_threads()
        settings = _placement(context) | {
            "n_threads": n_threads,
            "n_threads_batch": context.n_threads_batch or n_threads,
            "n_gpu_layers": context.n_gpu_layers,
            "flash_attention": context.flash_attention,
            "cache_type_k": context.cache_type_k,
            "cache_type_v": context.cache_type_v,
        }
        about = {"model": _identity(model), "context": settings, "machine": self._machine}
        return [_key({**about, "depth": depth}) for depth in range(_N_DEPTHS)]

    def _model_key(self, model: Path, context: ContextOptions) -> str:
        """Return the key of a model's threads.

        Layers on a GPU need no threads, so their number is part of it.
        """
        about = {"model": _identity(model), "n_gpu_layers": context.n_gpu_layers}
        return _key({**about, **_placement(context), "machine": self._machine})


class SessionCosts:
    """The cost tables of one session's models.

    The store knows tables by model files and context options. A session names its target by None
    and its drafts by their keys, and its options decide the rest.
    """

    def __init__(self, options: SessionOptions, measurements: MeasurementStore) -> None:
        self._options = options
        self._measurements = measurements
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False
        #: The kind of the target's tables, which its device decides.
        self.kind: _TableKind = CostTable

    def context_options(self, draft: Key | None = None) -> ContextOptions:
        """Return the options of a model's contexts, with the threads that were measured."""
        model = self._options.target
        context = self._options.target_context
        if isinstance(draft, Path):
            model = draft
            context = self._options.draft_context
        return with_threads(context, self._measurements.threads(model, context))

    def table(self, draft: Key | None = None, n_past: int = 0) -> CostTable:
        """Return a model's table for contexts of about `n_past` tokens."""
        kind = self.kind if draft is None else CostTable
        return self._measurements.costs(*self._named(draft), n_past, kind)

    def forget(self, draft: Key | None = None) -> None:
        """Forget a model's costs, so that they are measured again."""
        self._measurements.forget_costs(*self._named(draft))

    def do_not_keep(self, *drafts: Key | None) -> None:
        """Leave the costs of models to this process."""
        for draft in drafts:
            self._measurements.do_not_keep_costs(*self._named(draft))

    def _named(self, draft: Key | None) -> tuple[Path, ContextOptions]:
        """Return what the store knows a model's tables by."""
        file = draft if isinstance(draft, Path) else self._options.target
        if isinstance(draft, str):
            file = file.with_name(f"{file.name}:{draft}")
        return file, self.context_options(draft)


def _identity(model: Path) -> str:
    """Return a model file's identity in any folder: its name and size, if it is there."""
    found = identify(model)
    return f"{found.name}:{found.size_bytes}" if found is not None else model.name


def _placement(context: ContextOptions) -> dict[str, Any]:
    """Return which workers hold which layers; empty if this machine alone holds all."""
    if context.workers is None:
        return {}
    return {"workers": asdict(replace(context.workers, timeout_s=0.0))}


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False)


# --- the file ---------------------------------------------------------------------------------

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Bins = Annotated[
    list[Annotated[_Number, Field(ge=0.0, le=1e12)]], Field(min_length=N_BINS, max_length=N_BINS)
]
_SECONDS = TypeAdapter(
    dict[Annotated[int, Field(ge=1, le=10**6)], Annotated[_Number, Field(gt=0.0)]]
)
_THREAD_COUNTS = TypeAdapter(Threads)


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counts of `AcceptanceCounts` as JSON values."""

    judged: _Bins
    accepted: _Bins
    seen: _Bins
    credit: _Number = 0.0


_COUNTS = TypeAdapter(_Counts)


def _counts_of(entry: _Counts) -> AcceptanceCounts:
    judged = np.array(entry.judged)
    accepted = np.minimum(np.array(entry.accepted), judged)
    return AcceptanceCounts(judged, accepted, np.array(entry.seen), entry.credit)


def _entry_of(counts: AcceptanceCounts) -> dict[str, Any]:
    return {
        "judged": counts.n_judged.round(3).tolist(),
        "accepted": counts.n_accepted.round(3).tolist(),
        "seen": counts.n_seen.round(3).tolist(),
        "credit": round(counts.credit, 4),
    }


def _valid(adapter: TypeAdapter[_Value], entry: object) -> _Value | None:
    """Return an entry of the file, or None if it is not what it should be."""
    with contextlib.suppress(ValidationError):
        return adapter.validate_python(entry)
    return None


def _read(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the entries of a file by kind and key; none of a missing or broken file."""
    found = read_object(file)
    entries: dict[str, dict[str, Any]] = {}
    for kind in (_COSTS, _ACCEPTANCE, _THREADS):
        value = found.get(kind)
        entries[kind] = dict(value) if isinstance(value, dict) else {}
    return entries
