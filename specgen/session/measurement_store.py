"""Measurements of this machine: costs of decodes, acceptance of drafts, the fastest thread counts.

Each process reads the JSON file once. To save, it reads the file again and replaces only the
entries that it measured or refined itself, because other processes may have written meanwhile.
There is no lock: if two processes save within the same few milliseconds, one may lose what it
measured, and the next process measures it again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from specgen.drafters.interface import Key
from specgen.drafters.ngram_counts import LONGEST, MOST_OFTEN, Evidence, NgramCounts, Place
from specgen.llama import default_threads
from specgen.method.acceptance import N_BINS, AcceptanceCounts
from specgen.method.cost_table import CostTable
from specgen.models.files import identify
from specgen.options import ContextOptions, SessionOptions
from specgen.system.files import read_object, replace_json
from specgen.system.machine import wall_time_s

#: Decodes cost more in a fuller context, so each model has several cost tables, one for each length
#: class: 0 is for contexts with fewer than 512 tokens, 1 for fewer than 1024, 2 for 2048, ...
_CLASS_0_TOKENS = 512
_N_LENGTH_CLASSES = 22
#: The maximum number of entries of each kind in the file; the oldest ones are removed.
_MAX_ENTRIES = 256
#: The kinds of entries in the file, which has always called acceptance "chances".
_COSTS = "costs"
_ACCEPTANCE = "chances"
_NGRAMS = "ngrams"
_THREADS = "threads"
#: Costs that were measured on a busy machine.
_ROUGH = "rough"
_KINDS = (_COSTS, _ACCEPTANCE, _NGRAMS, _THREADS, _ROUGH)
#: Rough costs are used for this time. Then they are measured again.
_ROUGH_LIFETIME_S = 300.0
#: The costs of a target that reads weights from disk depend on the share that is read. There is a
#: table for each of this many shares.
_N_STREAMED_PARTS = 20

_Value = TypeVar("_Value")
#: Makes a cost table from the seconds of batches, by their numbers of rows.
_TableKind: TypeAlias = Callable[[Mapping[int, float]], CostTable]


@dataclass(frozen=True, slots=True)
class Threads:
    """Numbers of threads; llama.cpp supports up to 512."""

    #: Threads for a single row.
    n_single: Annotated[int, Field(strict=True, ge=1, le=512)]
    #: Threads for batches.
    n_batch: Annotated[int, Field(strict=True, ge=1, le=512)]


def with_threads(context: ContextOptions, threads: Threads | None) -> ContextOptions:
    """Return the options with the fastest thread counts filled in where the user gave none.

    Args:
        context: The options of a context.
        threads: The measured thread counts; None if nothing was measured.
    """
    # A number that the user gave for single rows also holds for batches.
    if threads is None or context.n_threads is not None:
        return context
    n_batch = context.n_threads_batch or threads.n_batch
    return replace(context, n_threads=threads.n_single, n_threads_batch=n_batch)


class MeasurementStore:
    """All measured costs, acceptance counts and thread counts, in memory and in a file."""

    def __init__(
        self,
        file: Path | None = None,
        machine: Mapping[str, Any] | None = None,
        wall_clock: Callable[[], float] = wall_time_s,
    ) -> None:
        """Read the file.

        Args:
            file: The JSON file; None stores everything for this process only.
            machine: Everything about the machine that affects what decodes cost. It is part of the
                keys, so that entries of other machines are neither used nor changed.
            wall_clock: Returns seconds since 1970.
        """
        self._file = file
        self._machine = dict(machine or {})
        self._wall_clock = wall_clock
        #: The entries of the file as it was read, by kind and key.
        self._file_entries = _read(file)
        # What this process uses and refines, by key.
        self._costs: dict[str, ModelCosts] = {}
        self._acceptance_counts: dict[str, dict[str, AcceptanceCounts]] = {}
        self._ngram_counts: dict[str, NgramCounts] = {}
        self._threads: dict[str, Threads] = {}

    def costs(self, model: Path, context: ContextOptions) -> ModelCosts:
        """Return a model's costs; whatever is added to their tables will be saved.

        Args:
            model: The model's file.
            context: The options of its context.
        """
        # Every option that affects what decodes cost.
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
        key = _key(about)
        if key not in self._costs:
            self._costs[key] = ModelCosts(about, self._file_entries, self._wall_clock)
        return self._costs[key]

    # --- threads and acceptance ---------------------------------------------------------------

    def threads(
        self,
        model: Path,
        context: ContextOptions,
    ) -> Threads | None:
        """Return the fastest thread counts for a model; None if they were not measured."""
        key = self._model_key(model, context)
        entry = self._file_entries[_THREADS].get(key)
        return self._threads.get(key) or _valid(_THREAD_COUNTS, entry)

    def keep_threads(
        self,
        model: Path,
        context: ContextOptions,
        threads: Threads,
    ) -> None:
        """Store the fastest thread counts for a model."""
        self._threads[self._model_key(model, context)] = threads

    def acceptance_counts(
        self,
        target: Path,
        draft: Key,
        mode: str,
    ) -> dict[str, AcceptanceCounts]:
        """Return how often a draft's tokens were accepted, by their origin.

        Whatever is added to the counts will be saved.

        Args:
            target: The target's file.
            draft: The draft's file, or a word.
            mode: The way of sampling; each has separate counts.
        """
        name = _identity(draft) if isinstance(draft, Path) else draft
        key = _key({"target": _identity(target), "draft": name, "mode": mode})
        if key not in self._acceptance_counts:
            entries = self._file_entries[_ACCEPTANCE].get(key)
            if not isinstance(entries, dict):
                entries = {}
            by_origin: dict[str, AcceptanceCounts] = {}
            for origin, entry in entries.items():
                counts = _valid(_COUNTS, entry)
                if counts is not None:
                    by_origin[origin] = _counts_of(counts)
            self._acceptance_counts[key] = by_origin
        return self._acceptance_counts[key]

    def ngram_counts(self, target: Path, mode: str) -> NgramCounts:
        """Return how often n-grams predicted a target's tokens.

        Whatever is added to the counts will be saved.

        Args:
            target: The target's file.
            mode: The way of sampling; each has separate counts.
        """
        key = _key({"target": _identity(target), "mode": mode})
        if key not in self._ngram_counts:
            rows = _valid(_NGRAM_ROWS, self._file_entries[_NGRAMS].get(key)) or []
            self._ngram_counts[key] = NgramCounts.restore(map(_ngram_entry, rows))
        return self._ngram_counts[key]

    # --- writing ------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the measurements to the file.

        If it cannot be written, they are lost without an error: they will be measured again.
        """
        with contextlib.suppress(OSError):
            self.write()

    def write(self) -> None:
        """Write the measurements to the file.

        Raises:
            OSError: If it cannot be written. The file is then unchanged.
        """
        if self._file is None:
            return
        document = _read(self._file)
        own_entries = self._own_entries()
        for costs in self._costs.values():
            costs.remove_from(document)
        for kind, own in own_entries.items():
            others = {key: entry for key, entry in document[kind].items() if key not in own}
            # The order in the file is that of the last change, so the first entries are the oldest.
            latest_last = [*others.items(), *own.items()]
            document[kind] = dict(latest_last[-_MAX_ENTRIES:])
        replace_json(self._file, document)

    def _own_entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries that this process measured or refined, by kind and key."""
        own: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        for costs in self._costs.values():
            kind = _ROUGH if costs.are_rough else _COSTS
            own[kind].update(costs.entries())
        for key, by_origin in self._acceptance_counts.items():
            judged = {
                origin: _entry_of(counts)
                for origin, counts in by_origin.items()
                if counts.n_judged.any()
            }
            if judged:
                own[_ACCEPTANCE][key] = judged
        for key, ngram_counts in self._ngram_counts.items():
            if ngram_counts:
                own[_NGRAMS][key] = [_ngram_row(*entry) for entry in ngram_counts.entries()]
        for key, threads in self._threads.items():
            own[_THREADS][key] = asdict(threads)
        return own

    def _model_key(self, model: Path, context: ContextOptions) -> str:
        """Return the key of a model's thread counts.

        The number of layers on a GPU is part of it, since these layers need no threads.
        """
        about = {"model": _identity(model), "n_gpu_layers": context.n_gpu_layers}
        return _key({**about, **_placement(context), "machine": self._machine})


class ModelCosts:
    """What decodes of a model cost with some options: a cost table for each length class.

    Costs that were measured on a busy machine are *rough*. They are used for some minutes only, and
    kept apart in the file.

    Args:
        about: The model, its options and the machine: the keys of its tables in the file.
        file_entries: The entries of the file as it was read, by kind and key.
        wall_clock: Returns seconds since 1970.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        file_entries: dict[str, dict[str, Any]],
        wall_clock: Callable[[], float],
    ) -> None:
        #: The keys in the file, by length class. (The file has always called it "depth".)
        self._keys = [_key({**about, "depth": number}) for number in range(_N_LENGTH_CLASSES)]
        self._file_entries = file_entries
        self._wall_clock = wall_clock
        #: The tables in use, by length class.
        self._tables: dict[int, CostTable] = {}
        #: Whether the tables are written to the file.
        self._are_kept = True
        #: Whether the entries of the file are removed when it is written.
        self._are_forgotten = False
        #: When rough costs were measured, in seconds since 1970; None if the costs are not rough.
        self._rough_since_s: float | None = None
        rough = _valid(_ROUGH_COSTS, file_entries[_ROUGH].get(self._keys[0]))
        has_others = self._keys[0] in file_entries[_COSTS]
        if rough is not None and not has_others and self._is_recent(rough.since_s):
            self._rough_since_s = rough.since_s

    def table(
        self,
        n_past: int = 0,
        kind: _TableKind = CostTable,
    ) -> CostTable:
        """Return the cost table for contexts of about `n_past` tokens.

        If nothing is known for this length class yet, it starts with the costs of the nearest one.

        Args:
            n_past: The number of tokens in the context.
            kind: Makes the table.
        """
        length_class = min(max(0, n_past // _CLASS_0_TOKENS).bit_length(), _N_LENGTH_CLASSES - 1)
        table = self._tables.get(length_class)
        if table is None:
            known = self._known(length_class) or next(self._nearest(length_class), CostTable())
            if not self.are_rough:
                table = kind(known.known)
            else:
                # A size that is set later than at the start is corrected faster by decodes.
                table = kind({})
                for size, seconds in known.known.items():
                    table.set_seconds(size, seconds)
            self._tables[length_class] = table
        if length_class > 0:
            self._extend(table, length_class)
        return table

    # --- rough costs

    def mark(self, *, are_rough: bool) -> None:
        """Note that the costs were just measured, on a busy machine or not."""
        if are_rough:
            self._rough_since_s = self._wall_clock()
            return
        self._rough_since_s = None
        self._are_kept = True
        for key in self._keys:
            self._file_entries[_ROUGH].pop(key, None)

    @property
    def are_rough(self) -> bool:
        """Whether the costs were measured on a busy machine."""
        return self._rough_since_s is not None

    @property
    def are_outdated(self) -> bool:
        """Whether the costs are rough, and old enough to be measured again."""
        return self._rough_since_s is not None and not self._is_recent(self._rough_since_s)

    def _is_recent(self, since_s: float) -> bool:
        """Return whether rough costs of a time may be used; a time in the future is an error."""
        return 0.0 <= self._wall_clock() - since_s < _ROUGH_LIFETIME_S

    # --- the file

    def forget(self) -> None:
        """Forget the costs at all lengths, so that they are measured again.

        None of the tables may be in use: what is added to them later is lost.
        """
        self._tables.clear()
        self._rough_since_s = None
        self._are_kept = True
        self._are_forgotten = True
        for key in self._keys:
            self._file_entries[_COSTS].pop(key, None)
            self._file_entries[_ROUGH].pop(key, None)

    def do_not_keep(self) -> None:
        """Do not write what decodes on a busy machine change. Rough costs are written, however."""
        self._are_kept = False

    def entries(self) -> dict[str, Any]:
        """Return the entries for the file, by key: rough costs if `are_rough`, else costs."""
        entries: dict[str, Any] = {}
        for length_class, table in self._tables.items():
            batch_s = {n_rows: round(size_s, 7) for n_rows, size_s in table.known.items()}
            key = self._keys[length_class]
            if batch_s and self._rough_since_s is not None:
                entries[key] = {"since_s": round(self._rough_since_s, 3), "batch_s": batch_s}
            elif batch_s and self._are_kept:
                entries[key] = batch_s
        return entries

    def remove_from(self, document: dict[str, dict[str, Any]]) -> None:
        """Remove the entries of the file that must not stay, or that new ones replace."""
        replaced = set() if self.are_rough else self.entries().keys()
        for key in self._keys:
            if self._are_forgotten:
                document[_COSTS].pop(key, None)
            if self._are_forgotten or key in replaced:
                document[_ROUGH].pop(key, None)

    # --- other lengths

    def _known(self, length_class: int) -> CostTable:
        """Return the table in use, or the one in the file; an empty one if there is neither."""
        if length_class in self._tables:
            return self._tables[length_class]
        key = self._keys[length_class]
        batch_s = _valid(_SECONDS, self._file_entries[_COSTS].get(key)) or {}
        if not batch_s and self.are_rough:
            rough = _valid(_ROUGH_COSTS, self._file_entries[_ROUGH].get(key))
            batch_s = rough.batch_s if rough is not None else {}
        # A batch cannot cost more than a larger one. If it seems to, it was timed while other
        # programs were running: take the cost of the larger one.
        sizes = sorted(batch_s, reverse=True)
        corrected_s = itertools.accumulate((batch_s[size] for size in sizes), min)
        return CostTable(dict(zip(sizes, corrected_s, strict=True)))

    def _nearest(self, length_class: int) -> Iterator[CostTable]:
        """Yield the tables of other length classes that are not empty, the nearest class first."""
        others = sorted(range(_N_LENGTH_CLASSES), key=lambda other: abs(other - length_class))
        for other in others:
            table = self._known(other)
            if other != length_class and table:
                yield table

    def _extend(self, table: CostTable, length_class: int) -> None:
        """Copy missing batch sizes from the nearest length class with the costs of larger batches.

        Only drafts lead to batches of several rows, so a table lacks their costs if there were no
        drafts in this length class. The copied costs are scaled with the ratio of the costs of one
        row.
        """
        largest = max(table.known, default=0)
        for other in self._nearest(length_class):
            if max(other.known) <= largest:
                continue
            scale = 1.0
            if 1 in table.known and 1 in other.known:
                scale = table.seconds(1) / other.seconds(1)
            for size, seconds in other.known.items():
                if size not in table.known:
                    table.set_seconds(size, seconds * scale)
            return


class SessionCosts:
    """The cost tables of one session's models.

    The store identifies a table by a model file and context options. Here, None stands for the
    session's target, and a key for one of its drafts; the session's options supply the rest.
    """

    def __init__(
        self,
        options: SessionOptions,
        measurements: MeasurementStore,
    ) -> None:
        self._options = options
        self._measurements = measurements
        #: The kind of the target's tables, which depends on the device that it runs on.
        self.kind: _TableKind = CostTable
        #: The share of the target's weights that each pass reads from disk.
        self.streamed_share = 0.0

    def context_options(self, draft: Key | None = None) -> ContextOptions:
        """Return the options of a model's contexts, with measured thread counts filled in."""
        model = self._options.target
        context = self._options.target_context
        if isinstance(draft, Path):
            model = draft
            context = self._options.draft_context
        return with_threads(context, self._measurements.threads(model, context))

    def of(self, draft: Key | None) -> ModelCosts:
        """Return the costs of a model; None stands for the target."""
        return self._measurements.costs(*self._file_and_options(draft))

    def table(
        self,
        draft: Key | None = None,
        n_past: int = 0,
    ) -> CostTable:
        """Return a model's table for contexts of about `n_past` tokens."""
        kind = self.kind if draft is None else CostTable
        return self.of(draft).table(n_past, kind)

    def _file_and_options(self, draft: Key | None) -> tuple[Path, ContextOptions]:
        """Return the model file and the context options that identify a model in the store."""
        file = draft if isinstance(draft, Path) else self._options.target
        if isinstance(draft, str):
            # A draft without a file belongs to its target: the name stands for both.
            file = file.with_name(f"{file.name}:{draft}")
        elif draft is None and self.streamed_share > 0.0:
            # How much is read from disk decides what a decode costs.
            n_parts = round(_N_STREAMED_PARTS * self.streamed_share)
            file = file.with_name(f"{file.name}:{n_parts} of {_N_STREAMED_PARTS} parts streamed")
        return file, self.context_options(draft)


def _identity(model: Path) -> str:
    """Return a name for a model file that stays the same if the file is moved.

    It consists of the file's name and size; a file that does not exist has no size.
    """
    identity = identify(model)
    if identity is None:
        return model.name
    return f"{identity.name}:{identity.size_bytes}"


def _placement(context: ContextOptions) -> dict[str, Any]:
    """Return which workers hold which layers; empty if this machine holds all of them."""
    if context.workers is None:
        return {}
    # The timeout has no influence on costs.
    return {"workers": asdict(replace(context.workers, timeout_s=0.0))}


def _key(about: Mapping[str, Any]) -> str:
    return json.dumps(about, sort_keys=True, ensure_ascii=False)


# --- the file ---------------------------------------------------------------------------------

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Bins = Annotated[
    list[Annotated[_Number, Field(ge=0.0, le=1e12)]], Field(min_length=N_BINS, max_length=N_BINS)
]
_Seconds = dict[Annotated[int, Field(ge=1, le=10**6)], Annotated[_Number, Field(gt=0.0)]]
_SECONDS = TypeAdapter(_Seconds)
_THREAD_COUNTS = TypeAdapter(Threads)


@dataclass(frozen=True, slots=True)
class _RoughCosts:
    """Costs that were measured on a busy machine."""

    #: When they were measured, in seconds since 1970.
    since_s: _Number
    #: The seconds of batches, by the number of rows.
    batch_s: _Seconds


_ROUGH_COSTS = TypeAdapter(_RoughCosts)


@dataclass(frozen=True, slots=True)
class _Counts:
    """The counts of `AcceptanceCounts` as JSON values."""

    #: `AcceptanceCounts.n_judged`.
    judged: _Bins
    #: `AcceptanceCounts.n_accepted`.
    accepted: _Bins
    #: `AcceptanceCounts.n_seen`.
    seen: _Bins
    #: `AcceptanceCounts.credit`.
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


#: The number of continuations, or of those that came next.
_Total = Annotated[_Number, Field(ge=0.0, le=1e12)]
#: The counts of one kind of n-gram match: the fields of its `Evidence`, its tries and its hits.
_NgramRow: TypeAlias = tuple[
    Place,
    Annotated[int, Field(ge=1, le=LONGEST)],
    Annotated[int, Field(ge=1, le=MOST_OFTEN)],
    bool,
    _Total,
    _Total,
]
_NGRAM_ROWS = TypeAdapter(list[_NgramRow])


def _ngram_entry(row: _NgramRow) -> tuple[Evidence, float, float]:
    place, length, n_followed, is_unanimous, n_tries, n_hits = row
    evidence = Evidence(place, length, n_followed, is_unanimous)
    return evidence, n_tries, n_hits


def _ngram_row(
    evidence: Evidence,
    n_tries: float,
    n_hits: float,
) -> list[Any]:
    return [*evidence, round(n_tries, 3), round(n_hits, 3)]


def _valid(adapter: TypeAdapter[_Value], entry: object) -> _Value | None:
    """Return an entry of the file as its type; None if it is missing or invalid."""
    with contextlib.suppress(ValidationError):
        return adapter.validate_python(entry)
    return None


def _read(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the entries of a file by kind and key; a missing or damaged file counts as empty."""
    document = read_object(file)
    entries: dict[str, dict[str, Any]] = {}
    for kind in _KINDS:
        value = document.get(kind)
        entries[kind] = dict(value) if isinstance(value, dict) else {}
    return entries
