"""The options of the machine: contexts, threads, kernels, GPU layers, workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from typer import Option

from specgen.cli.flags.groups import group, panel
from specgen.errors import UsageError
from specgen.options import ContextOptions, Contexts, KernelOptions, Workers

#: llama.cpp's own limit.
_MOST_WORKERS = 16

kernels = group(KernelOptions)(KernelOptions)
_MACHINE = panel(
    "Machine",
    n_gpu_layers_draft=Option(
        "--gpu-layers-draft",
        "-ngld",
        min=-1,
        help="Layers of the draft on the GPU; -1 is all.",
    ),
    rpc=Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread the target's layers over these machines, which run `specgen worker`.",
    ),
    tensor_split=Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,...",
        help="With --rpc: each device's share of the target, as 3,1.",
        show_default="by their free memory",
    ),
    output_here=Option(
        "--output-here",
        help="With --rpc: keep the output matrix here, so that hidden states travel in place of logits, which "
        "are 20 to 100 times as large.",
    ),
    rpc_timeout=Option(
        "--rpc-timeout",
        metavar="SECONDS",
        min=0.1,
        help="With --rpc: give up when a worker is silent for longer.",
    ),
)


@group(ContextOptions, {"kernels": kernels}, _MACHINE)
def machine(
    *,
    kernels: KernelOptions,
    n_gpu_layers_draft: int = ContextOptions().n_gpu_layers,
    rpc: str | None = None,
    tensor_split: str | None = None,
    output_here: bool = False,
    rpc_timeout: float = Workers(()).timeout_s,
    **others: Any,
) -> Contexts:
    """Return the options of both contexts, and the kernels. The draft is always on this machine."""
    workers = None
    if rpc is not None:
        workers = Workers(endpoints_of(rpc), _shares(tensor_split), output_here, rpc_timeout)
    elif tensor_split is not None or output_here:
        option = "--output-here" if output_here else "--tensor-split"
        raise UsageError(f"{option} needs --rpc: it is about workers on other machines")
    target = ContextOptions(workers=workers, **others)
    draft = replace(target, n_gpu_layers=n_gpu_layers_draft, workers=None)
    return Contexts(target, draft, kernels)


def endpoints_of(rpc: str) -> tuple[str, ...]:
    """Return the addresses in --rpc. Raise `UsageError`."""
    from specgen.system.worker_probe import parse_endpoint

    endpoints = tuple(endpoint.strip() for endpoint in rpc.split(","))
    for endpoint in endpoints:
        parse_endpoint(endpoint)
    if len(set(endpoints)) < len(endpoints):
        raise UsageError(f"--rpc {rpc} names a worker twice")
    if len(endpoints) > _MOST_WORKERS:
        raise UsageError(f"--rpc names {len(endpoints)} workers; {_MOST_WORKERS} at most")
    return endpoints


def _shares(text: str | None) -> tuple[float, ...]:
    """Parse shares with commas between. Raise `UsageError`."""
    if text is None:
        return ()
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        shares = ()
    is_sound = all(math.isfinite(share) and share >= 0.0 for share in shares)
    if not is_sound or sum(shares) <= 0.0:
        raise UsageError(
            f"--tensor-split {text}: give a number of 0 or more for each device, for example 3,1"
        )
    return shares
