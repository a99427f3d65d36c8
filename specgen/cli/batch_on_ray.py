"""``specgen batch --ray``: a Ray cluster answers the lines of a batch."""

from __future__ import annotations

import datetime
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.output import Output
from specgen.cli.process import Interrupt
from specgen.errors import UsageError
from specgen.options import Contexts, DraftSource, KernelOptions, SessionOptions

if TYPE_CHECKING:
    from specgen.serve.batch.lines import Line
    from specgen.serve.batch.on_ray import Cluster
    from specgen.serve.batch.results import Results
    from specgen.session.files import DraftChoice
    from specgen.session.loaded_models import Models

#: The number of longest lines that are tokenized to find out how large the caches have to be.
_N_LARGEST = 8
#: Bytes of a prompt's text for a token, approximately.
_BYTES_IN_TOKEN = 4


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The settings that decide how lines are answered, on any node: those of `session_options` and of the
    command line. `parallel` is the number of answers generated at once; None takes the fastest number."""

    options: SessionOptions
    drafts: Sequence[DraftChoice]
    kernels: KernelOptions
    chat: bool | None
    system: str | None
    parallel: int | None


def ray_cluster(
    address: str | None,
    machine: Contexts,
    per_worker: tuple[float | None, float | None],
    *,
    patience_s: float,
) -> Cluster | None:
    """Return the cluster of these options; None without one. Raise `UsageError` if Ray is not installed, the
    address is invalid, or other options exclude it."""
    if address is None:
        if per_worker != (None, None):
            raise UsageError("--cpus-per-worker and --gpus-per-worker go with --ray")
        return None
    if machine.target.workers is not None:
        raise UsageError("--ray and --rpc exclude each other")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "--ray needs ray, which is not installed", hint="pip install 'specgen-gguf[ray]'"
        )
    host, _, port = address.rpartition(":")
    if address not in {"local", "auto"} and not (host and "/" not in host and port.isdigit()):
        raise UsageError(
            f"--ray {address}: not the address of a cluster",
            hint="give HOST:PORT as `ray start --head` prints it, or auto, or local",
        )
    from specgen.serve.batch.on_ray import Cluster

    return Cluster(address, *per_worker, patience_s)


def open_on_node(
    options: SessionOptions, drafts: Sequence[DraftChoice], kernels: KernelOptions
) -> Models:
    """Load the models in an actor. Files that are made, and what is learnt, stay on the node."""
    from specgen.cli.model_loading import load, use_kernels
    from specgen.models import cache_folder

    quiet = Output(quiet=True)
    use_kernels(kernels, quiet)
    return load(replace(options, cache=cache_folder()), quiet, drafts)


def answer_on_ray(
    cluster: Cluster,
    work: BatchWork,
    lines: Sequence[Line],
    results: Results,
    settings: Mapping[str, Any],
    output: Output,
) -> int:
    """Get the lines answered; return the exit code."""
    from specgen.render.progress_bars import batch_progress, batch_summary
    from specgen.render.text import counted
    from specgen.serve.batch.line_worker import WorkerJob
    from specgen.serve.batch.on_ray import RayBatch
    from specgen.serve.batch.runner import Prompting

    options = _with_threads(_absolute(work.options), cluster)
    drafts = tuple(replace(each, draft=_absolute_path(each.draft)) for each in work.drafts)
    worker = WorkerJob(
        partial(open_on_node, options, drafts, work.kernels),
        Prompting(work.chat, work.system, datetime.datetime.now().astimezone()),
        settings,
        work.parallel,
        _largest(lines),
    )
    batch = RayBatch(
        cluster,
        worker,
        results,
        files=_files(options, drafts),
        note=output.note,
        verbose=output.verbose > 0,
    )
    started = time.perf_counter()
    is_silent = output.quiet or output.verbose > 0
    with batch, Interrupt() as stop, batch_progress(sys.stderr, quiet=is_silent) as report:
        try:
            batch.run(lines, stop, report)
        finally:
            if batch.tally.n_answers:
                seconds = time.perf_counter() - started
                where = counted(batch.n_actors, "Ray actor")
                output.note(batch_summary(batch.tally, seconds, where))
    return stop.exit_code


def _absolute(options: SessionOptions) -> SessionOptions:
    """Return the same options with absolute paths, since an actor has another working folder."""
    drafting = options.drafting
    lookup_files = tuple(path.absolute() for path in drafting.lookup_files)
    return replace(
        options,
        target=options.target.absolute(),
        draft=_absolute_path(options.draft),
        helpers=tuple(map(_absolute_path, options.helpers)),
        drafting=replace(drafting, lookup_files=lookup_files),
    )


def _absolute_path(source: DraftSource) -> DraftSource:
    return source.absolute() if isinstance(source, Path) else source


def _with_threads(options: SessionOptions, cluster: Cluster) -> SessionOptions:
    """Return the same options with as many threads as an actor has CPUs, unless it has all of its node's."""
    if cluster.cpus_per_worker is None:
        return options
    n_threads = max(1, int(cluster.cpus_per_worker))
    contexts = {
        name: replace(context, n_threads=n_threads)
        for name in ("target_context", "draft_context")
        if (context := getattr(options, name)).n_threads is None
    }
    return replace(options, **contexts)


def _files(options: SessionOptions, drafts: Sequence[DraftChoice]) -> dict[str, int]:
    """Return the files that each node must have, with their sizes here. A draft that nobody named may be
    missing: then another one drafts."""
    from specgen.serve.batch.on_ray import n_bytes_of

    chosen = {draft.draft for draft in drafts if draft.why}
    named = [draft.draft for draft in drafts if not draft.why]
    paths = {options.target, options.draft, *options.helpers, *named} - chosen
    paths |= set(options.drafting.lookup_files)
    sizes = {str(path): n_bytes_of(path) for path in paths if isinstance(path, Path)}
    return {path: n_bytes for path, n_bytes in sorted(sizes.items()) if n_bytes is not None}


def _largest(lines: Sequence[Line]) -> tuple[Line, ...]:
    from specgen.serve.batch.lines import LineError

    def size(line: Line) -> tuple[bool, float]:
        """Estimate the tokens of prompt and answer; answers without a limit are the largest."""
        assert not isinstance(line.request, LineError)
        n_answer = line.request.generation.max_tokens
        return n_answer < 0, len(repr(line.fields)) / _BYTES_IN_TOKEN + n_answer

    readable = [line for line in lines if not isinstance(line.request, LineError)]
    return tuple(sorted(readable, key=size, reverse=True)[:_N_LARGEST])
