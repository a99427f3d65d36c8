"""What was learnt on this machine: what decodes cost, which drafts are accepted, how many threads
are fastest.

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
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from specgen.drafters.interface import Key
from specgen.llama import default_threads
from specgen.method.acceptance import N_BINS, AcceptanceCounts, AcceptanceRates
from specgen.method.cost_table import CostTable
from specgen.models.files import identify
from specgen.options import ContextOptions, SessionOptions
from specgen.system.files import read_object, replace_json

#: Tables by how full the context is, in tokens: below 512, 1024, 2048, ...
_SHALLOW, _N_DEPTHS = 512, 22
#: The number of entries of each kind that are kept, the latest ones.
_N_KEPT = 256
_COSTS, _CHANCES, _THREADS = "costs", "chances", "threads"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads for a single row, and for batches; llama.cpp has no room for more than 512."""

    n_single: Annotated[int, Field(strict=True, ge=1, le=512)]
    n_batch: Annotated[int, Field(strict=True, ge=1, le=512)]


def with_threads(context: ContextOptions, threads: Threads | None) -> ContextOptions:
    """Return the options with the measured threads where they name none; a named number is for
    batches too.
    """
    if threads is None or context.n_threads is not None:
        return context
    n_batch = context.n_threads_batch or threads.n_batch
    return replace(context, n_threads=threads.n_single, n_threads_batch=n_batch)


class MeasurementStore:
    """Costs, acceptance and threads, from a file if there is one. `machine` is all that decides
    costs.
    """

    def __init__(self, file: Path | None = None, machine: Mapping[str, Any] | None = None) -> None:
        self._file = file
        self._machine = dict(machine or {})
        self._known = _read(file)
        self._tables: dict[str, CostTable] = {}
        self._acceptance: dict[str, dict[str, AcceptanceRates]] = {}
        self._threads: dict[str, Threads] = {}
        #: Keys of tables that are to be removed from the file, and of tables that are not written.
        self._forgotten: set[str] = set()
        self._unkept: set[str] = set()

    def costs(
        self,
        model: Path,
        context: ContextOptions,
        n_past: int = 0,
        kind: Callable[[Mapping[int, float]], CostTable] = CostTable,
    ) -> CostTable:
        """Return the table for contexts of about `n_past` tokens. What it learns is kept."""
        depth = min(max(0, n_past // _SHALLOW).bit_length(), _N_DEPTHS - 1)
        keys = self._cost_keys(model, context)
        table = self._tables.get(keys[depth])
        if table is None:
            known = self._table(keys[depth]) or next(self._nearest(keys, depth), CostTable())
            table = self._tables[keys[depth]] = kind(known.known)
        if depth:
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
        """Leave the costs of a model's decodes in such contexts to this process: the machine had
        other work to do.
        """
        self._unkept.update(self._cost_keys(model, context))

    def threads(self, model: Path, context: ContextOptions) -> Threads | None:
        key = self._model_key(model, context)
        return self._threads.get(key) or _valid(_THREAD_COUNTS, self._known[_THREADS].get(key))

    def keep_threads(self, model: Path, context: ContextOptions, threads: Threads) -> None:
        self._threads[self._model_key(model, context)] = threads

    def acceptance(self, target: Path, draft: Key, mode: str) -> dict[str, AcceptanceRates]:
        """Return the acceptance statistics of a draft by origin; what is added is kept. `mode`
        separates cases.
        """
        name = _identity(draft) if isinstance(draft, Path) else draft
        key = _key({"target": _identity(target), "draft": name, "mode": mode})
        if key not in self._acceptance:
            kept = self._known[_CHANCES].get(key)
            self._acceptance[key] = {
                origin: AcceptanceRates(origin, _counts_of(found))
                for origin, entry in (kept if isinstance(kept, dict) else {}).items()
                if (found := _valid(_COUNTS, entry)) is not None
            }
        return self._acceptance[key]

    def save(self) -> None:
        with contextlib.suppress(OSError):  # then it is learnt again
            self.write()

    def write(self) -> None:
        """Write what was learnt to the file. Raise `OSError`; the file is then as it was."""
        if self._file is None:
            return
        document = _read(self._file)
        for key in self._forgotten:
            document[_COSTS].pop(key, None)
        new: dict[str, dict[str, Any]] = {_COSTS: {}, _CHANCES: {}, _THREADS: {}}
        for key, table in self._tables.items():
            if key not in self._unkept:
                new[_COSTS][key] = {n: round(s, 7) for n, s in table.known.items()}
        for key, by_origin in self._acceptance.items():
            judged = {o: each.counts for o, each in by_origin.items() if each.counts.n_judged.any()}
            new[_CHANCES][key] = {origin: _entry_of(counts) for origin, counts in judged.items()}
        for key, threads in self._threads.items():
            new[_THREADS][key] = asdict(threads)
        for kind, entries in document.items():
            learnt = {key: entry for key, entry in new[kind].items() if entry}
            others = {key: entry for key, entry in entries.items() if key not in learnt}
            document[kind] = dict([*others.items(), *learnt.items()][-_N_KEPT:])
        replace_json(self._file, document)

    def _table(self, key: str) -> CostTable:
        if key in self._tables:
            return self._tables[key]
        known = _valid(_SECONDS, self._known[_COSTS].get(key)) or {}
        # A batch costs at most what a larger one does: else other programs' time was counted, for
        # good.
        least_s = itertools.accumulate((known[n] for n in sorted(known, reverse=True)), min)
        return CostTable(dict(zip(sorted(known, reverse=True), least_s, strict=True)))

    def _nearest(self, keys: Sequence[str], depth: int) -> Iterator[CostTable]:
        for other in sorted(range(len(keys)), key=lambda other: abs(other - depth)):
            if other != depth and (table := self._table(keys[other])):
                yield table

    def _extend(self, table: CostTable, keys: Sequence[str], depth: int) -> None:
        """Copy the costs of larger batches from the nearest depth, scaled: a table without drafts
        lacks them.
        """
        largest = max(table.known, default=0)
        for kept in self._nearest(keys, depth):
            if max(kept.known) <= largest:
                continue
            is_known = 1 in table.known and 1 in kept.known
            pace = table.seconds(1) / kept.seconds(1) if is_known else 1.0
            for size, seconds in kept.known.items():
                if size not in table.known:
                    table.set_seconds(size, seconds * pace)
            return

    def _cost_keys(self, model: Path, context: ContextOptions) -> list[str]:
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
        """Return the key of a model's threads. Layers on a GPU need no threads, so their number is
        a part of it.
        """
        about = {"model": _identity(model), "n_gpu_layers": context.n_gpu_layers}
        return _key({**about, **_placement(context), "machine": self._machine})


class SessionCosts:
    """The cost tables of a target (None) and its drafts, by their files or words."""

    def __init__(self, options: SessionOptions, measurements: MeasurementStore) -> None:
        self._options = options
        self._measurements = measurements
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False
        #: The kind of the target's tables, which its device decides.
        self.kind: Callable[[Mapping[int, float]], CostTable] = CostTable

    def context_options(self, draft: Key | None = None) -> ContextOptions:
        model, context = self._options.target, self._options.target_context
        if isinstance(draft, Path):
            model, context = draft, self._options.draft_context
        return with_threads(context, self._measurements.threads(model, context))

    def table(self, draft: Key | None = None, n_past: int = 0) -> CostTable:
        kind = self.kind if draft is None else CostTable
        return self._measurements.costs(*self._named(draft), n_past, kind)

    def forget(self, draft: Key | None = None) -> None:
        self._measurements.forget_costs(*self._named(draft))

    def do_not_keep(self, *drafts: Key | None) -> None:
        for draft in drafts:
            self._measurements.do_not_keep_costs(*self._named(draft))

    def _named(self, draft: Key | None) -> tuple[Path, ContextOptions]:
        file = draft if isinstance(draft, Path) else self._options.target
        if isinstance(draft, str):
            file = file.with_name(f"{file.name}:{draft}")
        return file, self.context_options(draft)


def _identity(model: Path) -> str:
    """Return a model file's identity in any folder: its name and size; only the name if it is
    missing.
    """
    found = identify(model)
    return f"{found.name}:{found.size_bytes}" if found is not None else model.name


def _placement(context: ContextOptions) -> dict[str, Any]:
    """Return the workers and their layers of the model; empty if this machine alone holds all
    layers.
    """
    workers = context.workers
    return {} if workers is None else {"workers": asdict(replace(workers, timeout_s=0.0))}


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False)


# --- the file --------------------------------------------------------------------------------

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
    judged, accepted, seen = map(np.array, (entry.judged, entry.accepted, entry.seen))
    return AcceptanceCounts(judged, np.minimum(accepted, judged), seen, entry.credit)


def _entry_of(counts: AcceptanceCounts) -> dict[str, Any]:
    arrays = (counts.n_judged, counts.n_accepted, counts.n_seen)
    judged, accepted, seen = (each.round(3).tolist() for each in arrays)
    return asdict(_Counts(judged, accepted, seen, round(counts.credit, 4)))


def _valid(adapter: TypeAdapter[_Value], entry: object) -> _Value | None:
    with contextlib.suppress(ValidationError):
        return adapter.validate_python(entry)
    return None


def _read(file: Path | None) -> dict[str, dict[str, Any]]:
    found = read_object(file)
    kinds = {kind: found.get(kind) for kind in (_COSTS, _CHANCES, _THREADS)}
    return {kind: dict(value) if isinstance(value, dict) else {} for kind, value in kinds.items()}
