"""``specgen batch --ray``: a Ray cluster answers the lines of a batch."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.options import Contexts, DraftSource, KernelOptions, SessionOptions

if TYPE_CHECKING:
    from specgen.serve.batch.on_ray import ActorJob, Cluster, RayBatch
    from specgen.serve.batch.results import Write
    from specgen.serve.batch.runner import Prompting
    from specgen.session.files import DraftChoice
    from specgen.session.session import Session


@dataclass(frozen=True, slots=True)
class BatchWork:
    """How lines are answered, on any node. `settings` decide the answers; `parallel` is the number of answers
    generated at once, and None takes the fastest number."""

    options: SessionOptions
    drafts: Sequence[DraftChoice]
    kernels: KernelOptions
    prompting: Prompting
    settings: Mapping[str, Any]
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


@contextlib.contextmanager
def ray_batch(
    cluster: Cluster, work: BatchWork, write: Write, *, verbose: bool
) -> Iterator[RayBatch]:
    """Connect to a cluster that is to do the work."""
    from specgen.serve.batch.on_ray import RayBatch, connected

    with connected(cluster, verbose=verbose) as ray:
        yield RayBatch(ray, cluster, _actor_job(work, cluster), write)


def open_on_node(
    options: SessionOptions, drafts: Sequence[DraftChoice], kernels: KernelOptions
) -> Session:
    """Load the models in an actor. Files that are made, and what is learnt, stay on the node."""
    from specgen.cli.model_loading import load, use_kernels
    from specgen.models import cache_folder

    quiet = Output(quiet=True)
    use_kernels(kernels, quiet)
    return load(replace(options, cache=cache_folder()), quiet, drafts)


def _actor_job(work: BatchWork, cluster: Cluster) -> ActorJob:
    """Return what an actor does. It has another working folder, so paths are absolute, and as many threads as it
    has CPUs, unless it has all of its node's. A draft that nobody named may be missing on a node."""
    from specgen.serve.batch.on_ray import ActorJob, n_bytes_of

    drafts = tuple(replace(each, draft=_absolute(each.draft)) for each in work.drafts)
    options, drafting = work.options, work.options.drafting
    lookup_files = tuple(path.absolute() for path in drafting.lookup_files)
    options = replace(
        options,
        target=options.target.absolute(),
        draft=_absolute(options.draft),
        helpers=tuple(map(_absolute, options.helpers)),
        drafting=replace(drafting, lookup_files=lookup_files),
    )
    if cluster.cpus_per_worker is not None:
        n_threads = max(1, int(cluster.cpus_per_worker))
        contexts = {
            name: replace(context, n_threads=n_threads)
            for name in ("target_context", "draft_context")
            if (context := getattr(options, name)).n_threads is None
        }
        options = replace(options, **contexts)
    named = {options.target, options.draft, *options.helpers, *lookup_files}
    named = (named - {each.draft for each in drafts if each.why}) | {
        each.draft for each in drafts if not each.why
    }
    sizes = {str(path): n_bytes_of(path) for path in named if isinstance(path, Path)}
    return ActorJob(
        partial(open_on_node, options, drafts, work.kernels),
        work.prompting,
        work.settings,
        work.parallel,
        {path: n_bytes for path, n_bytes in sorted(sizes.items()) if n_bytes is not None},
    )


def _absolute(source: DraftSource) -> DraftSource:
    return source.absolute() if isinstance(source, Path) else source
