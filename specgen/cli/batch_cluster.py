"""``specgen batch --ray``: a cluster answers the lines."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.options import Contexts, DraftSource, KernelOptions, SessionOptions

if TYPE_CHECKING:
    from specgen.serve.batch.on_ray import ActorJob, Cluster
    from specgen.session.files import DraftChoice
    from specgen.session.session import Session


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
) -> Session:
    """Load the models in an actor. Files that are made, and what is learnt, stay on the node."""
    from specgen.cli.model_loading import load, use_kernels
    from specgen.models import cache_folder

    quiet = Output(quiet=True)
    use_kernels(kernels, quiet)
    return load(replace(options, cache=cache_folder()), quiet, drafts)


def actor_job(
    options: SessionOptions,
    drafts: Sequence[DraftChoice],
    kernels: KernelOptions,
    cpus_per_worker: float | None,
    **how: Any,
) -> ActorJob:
    """Return what an actor does; `how` are the other fields of `ActorJob`. It has another working folder, so paths
    are absolute, and as many threads as it has CPUs, unless it has all of its node's. A draft that nobody named
    may be missing on a node."""
    from specgen.serve.batch.on_ray import ActorJob, n_bytes_of

    drafts = tuple(replace(each, draft=_absolute(each.draft)) for each in drafts)
    lookup_files = tuple(path.absolute() for path in options.drafting.lookup_files)
    options = replace(
        options,
        target=options.target.absolute(),
        draft=_absolute(options.draft),
        helpers=tuple(map(_absolute, options.helpers)),
        drafting=replace(options.drafting, lookup_files=lookup_files),
    )
    if cpus_per_worker is not None:
        n_threads = max(1, int(cpus_per_worker))
        for name in ("target_context", "draft_context"):
            context = getattr(options, name)
            threads = context.n_threads or n_threads
            options = replace(options, **{name: replace(context, n_threads=threads)})
    found = {each.draft for each in drafts if each.why}
    named = {options.target, options.draft, *options.helpers, *lookup_files} - found
    named |= {each.draft for each in drafts} - found
    sizes = {str(path): n_bytes_of(path) for path in named if isinstance(path, Path)}
    return ActorJob(
        partial(open_on_node, options, drafts, kernels),
        files={path: n_bytes for path, n_bytes in sizes.items() if n_bytes is not None},
        **how,
    )


def _absolute(source: DraftSource) -> DraftSource:
    return source.absolute() if isinstance(source, Path) else source
