"""The options of the machine: contexts, threads, kernels, GPU layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from specgen.cli.flags import workers as remote
from specgen.options import CacheType, ContextOptions, Contexts, FlashAttention, KernelChoice

_DEFAULT = ContextOptions()
_MACHINE = "Machine"


Kernels = Annotated[
    KernelChoice,
    typer.Option(
        "--kernels",
        envvar="SPECGEN_KERNELS",
        help="Whose code computes on the CPU: specgen (its own kernels, which make the rows of a batch "
        "cheap), llama.cpp, or auto (specgen's kernels, if they were built and pass their test).",
        rich_help_panel=_MACHINE,
    ),
]


def machine(
    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size",
            "-c",
            min=0,
            help="Context size in tokens; 0 is the size that the model was trained with.",
            show_default="what prompt and answer need; 4096 at most in chat and fim",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_ctx,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            "-b",
            min=1,
            max=8192,
            help="Prompt tokens to decode at once.",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_batch,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            "-t",
            min=1,
            max=1024,
            help="Threads for decoding.",
            show_default="what `specgen tune` found best, or physical cores",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_threads,
    threads_batch: Annotated[
        int | None,
        typer.Option(
            "--threads-batch",
            "-tb",
            min=1,
            max=1024,
            help="Threads for batches: prompts and verification.",
            show_default="same as --threads",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_threads_batch,
    kernels: Kernels = "auto",
    gpu_layers: Annotated[
        int,
        typer.Option(
            "--gpu-layers",
            "-ngl",
            min=-1,
            help="Layers of the target to keep on the GPU; -1 is all of them.",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_gpu_layers,
    gpu_layers_draft: Annotated[
        int,
        typer.Option(
            "--gpu-layers-draft",
            "-ngld",
            min=-1,
            help="Layers of the draft to keep on the GPU; -1 is all of them.",
            rich_help_panel=_MACHINE,
        ),
    ] = _DEFAULT.n_gpu_layers,
    flash_attn: Annotated[
        FlashAttention,
        typer.Option("--flash-attn", "-fa", help="Flash attention.", rich_help_panel=_MACHINE),
    ] = _DEFAULT.flash_attention,
    cache_type_k: Annotated[
        CacheType,
        typer.Option(
            "--cache-type-k", "-ctk", help="Type of the cached keys.", rich_help_panel=_MACHINE
        ),
    ] = _DEFAULT.cache_type_k,
    cache_type_v: Annotated[
        CacheType,
        typer.Option(
            "--cache-type-v", "-ctv", help="Type of the cached values.", rich_help_panel=_MACHINE
        ),
    ] = _DEFAULT.cache_type_v,
    rpc: remote.Rpc = None,
    tensor_split: remote.TensorSplit = None,
    output_here: remote.OutputHere = False,
    rpc_timeout: remote.RpcTimeout = remote.TIMEOUT_S,
) -> Contexts:
    """Return the options of both contexts, and the kernels. The draft is always on this machine."""
    workers = remote.workers(rpc, tensor_split, output_here=output_here, timeout_s=rpc_timeout)

    def context(n_gpu_layers: int) -> ContextOptions:
        return ContextOptions(
            n_ctx=ctx_size,
            n_batch=batch_size,
            n_threads=threads,
            n_threads_batch=threads_batch,
            n_gpu_layers=n_gpu_layers,
            flash_attention=flash_attn,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
        )

    target = replace(context(gpu_layers), workers=workers)
    return Contexts(target, context(gpu_layers_draft), kernels)
