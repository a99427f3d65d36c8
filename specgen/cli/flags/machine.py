"""The options of the machine: contexts, threads, kernels, GPU layers, workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from typer import Option

from specgen.cli.flags.groups import group, panel
from specgen.errors import UsageError
from specgen.options import ContextOptions, Contexts, KernelChoice, KernelOptions, Workers

#: llama.cpp's own limit.
_MOST_WORKERS = 16

_MACHINE = panel(
    "Machine",
    n_ctx=Option(
        "--ctx-size",
        "-c",
        min=0,
        help="Context size in tokens; 0 is the size that the model was trained with.",
        show_default="what prompt and answer need; 4096 at most in chat, and in fim what is read in 5 s",
    ),
    n_batch=Option("--batch-size", "-b", min=1, max=8192, help="Prompt tokens to decode at once."),
    n_threads=Option(
        "--threads",
        "-t",
        min=1,
        max=1024,
        help="Threads for decoding.",
        show_default="what `specgen tune` found best, or physical cores",
    ),
    n_threads_batch=Option(
        "--threads-batch",
        "-tb",
        min=1,
        max=1024,
        help="Threads for batches: prompts and verification.",
        show_default="same as --threads",
    ),
    kernels=Option(
        "--kernels",
        envvar="SPECGEN_KERNELS",
        help="Whose code computes on the CPU. specgen: its own kernels, which make the rows of a batch "
        "cheap; auto: these, if they were built and pass their test.",
    ),
    packed_cache=Option(
        "--packed-cache",
        envvar="SPECGEN_PACKED_CACHE",
        help="Keep the weights on the disk as specgen's kernels read them, so that the next command starts at "
        "once: auto (if the disk has room), or off.",
    ),
    n_gpu_layers=Option(
        "--gpu-layers",
        "-ngl",
        min=-1,
        help="Layers of the target to keep on the GPU; -1 is all of them.",
    ),
    n_gpu_layers_draft=Option(
        "--gpu-layers-draft",
        "-ngld",
        min=-1,
        help="Layers of the draft to keep on the GPU; -1 is all of them.",
    ),
    flash_attention=Option("--flash-attn", "-fa", help="Flash attention."),
    cache_type_k=Option("--cache-type-k", "-ctk", help="Type of the cached keys."),
    cache_type_v=Option("--cache-type-v", "-ctv", help="Type of the cached values."),
    rpc=Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread the target's layers over these machines, each running `specgen worker`; the draft "
        "stays here.",
    ),
    tensor_split=Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,...",
        help="With --rpc: the share of the target for each worker's device, for example 3,1.",
        show_default="by their free memory",
    ),
    output_here=Option(
        "--output-here",
        help="With --rpc: keep the output matrix on this machine. The network then carries hidden states "
        "instead of logits, which are some 20 to 100 times as large.",
    ),
    rpc_timeout=Option(
        "--rpc-timeout",
        metavar="SECONDS",
        min=0.1,
        help="With --rpc: give up when a worker is silent for longer, in one decode or while one tensor is "
        "sent.",
    ),
)
KERNELS = _MACHINE["kernels"]


@group(ContextOptions, _MACHINE)
def machine(
    *,
    kernels: KernelChoice = "auto",
    packed_cache: Literal["auto", "off"] = "auto",
    n_gpu_layers: int = ContextOptions().n_gpu_layers,
    n_gpu_layers_draft: int = ContextOptions().n_gpu_layers,
    rpc: str | None = None,
    tensor_split: str | None = None,
    output_here: bool = False,
    rpc_timeout: float = Workers(()).timeout_s,
    **others: Any,
) -> Contexts:
    """Return the options of both contexts, and the kernels. The draft is always on this machine."""
    workers = workers_of(rpc, tensor_split, output_here=output_here, timeout_s=rpc_timeout)
    target = ContextOptions(n_gpu_layers=n_gpu_layers, workers=workers, **others)
    draft = replace(target, n_gpu_layers=n_gpu_layers_draft, workers=None)
    return Contexts(target, draft, KernelOptions(kernels, packed_cache))


def workers_of(
    rpc: str | None, tensor_split: str | None, *, output_here: bool, timeout_s: float
) -> Workers | None:
    """Return the workers that were named; None if there are none. Raise `UsageError`."""
    if rpc is not None:
        return Workers(endpoints_of(rpc), _shares(tensor_split), output_here, timeout_s)
    if tensor_split is not None:
        raise UsageError("--tensor-split needs --rpc: it splits the target over workers")
    if output_here:
        raise UsageError("--output-here needs --rpc: without workers all matrices are here")
    return None


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
