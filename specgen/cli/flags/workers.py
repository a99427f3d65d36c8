"""The options of workers (`--rpc`)."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from specgen.errors import UsageError
from specgen.options import Workers

_MACHINE = "Machine"
#: Seconds.
TIMEOUT_S = Workers(()).timeout_s
#: llama.cpp's own limit.
_MOST_WORKERS = 16

Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread the target's layers over these machines, each running `specgen worker`; the "
        "draft stays here.",
        rich_help_panel=_MACHINE,
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        "-ts",
        metavar="N,N,...",
        help="With --rpc: the share of the target for each worker's device, for example 3,1.",
        show_default="by their free memory",
        rich_help_panel=_MACHINE,
    ),
]
OutputHere = Annotated[
    bool,
    typer.Option(
        "--output-here",
        help="With --rpc: keep the output matrix on this machine. The network then carries hidden "
        "states instead of logits, which are some 20 to 100 times as large.",
        rich_help_panel=_MACHINE,
    ),
]
RpcTimeout = Annotated[
    float,
    typer.Option(
        "--rpc-timeout",
        metavar="SECONDS",
        min=0.1,
        help="With --rpc: give up when a worker is silent for longer, in one decode or while one "
        "tensor is sent.",
        rich_help_panel=_MACHINE,
    ),
]


def workers(
    rpc: str | None, tensor_split: str | None, *, output_here: bool, timeout_s: float
) -> Workers | None:
    """Return the workers that were named; None if there are none. Raises `UsageError`."""
    if rpc is None:
        if tensor_split is not None:
            raise UsageError("--tensor-split needs --rpc: it splits the target over workers")
        if output_here:
            raise UsageError("--output-here needs --rpc: without workers all matrices are here")
        return None
    return Workers(endpoints_of(rpc), _shares(tensor_split), output_here, timeout_s)


def endpoints_of(rpc: str) -> tuple[str, ...]:
    """Return the addresses in --rpc. Raises `UsageError`."""
    from specgen.backend.worker_probe import parse_endpoint

    endpoints = tuple(endpoint.strip() for endpoint in rpc.split(","))
    for endpoint in endpoints:
        parse_endpoint(endpoint)
    if len(set(endpoints)) < len(endpoints):
        raise UsageError(f"--rpc {rpc} names a worker twice")
    if len(endpoints) > _MOST_WORKERS:
        raise UsageError(f"--rpc names {len(endpoints)} workers; {_MOST_WORKERS} at most")
    return endpoints


def _shares(text: str | None) -> tuple[float, ...]:
    """Parse shares with commas between. Raises `UsageError`."""
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


__all__ = ["TIMEOUT_S", "OutputHere", "Rpc", "RpcTimeout", "TensorSplit", "endpoints_of", "workers"]
