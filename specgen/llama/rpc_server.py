"""Offer this machine's devices to other machines, through llama.cpp's RPC backend."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specgen.llama.library import device_of, native_devices
from specgen.llama.rpc import load_rpc, rpc_procedure
from specgen.system.machine import Device

_POINTER: Any = ctypes.c_void_p
_GET_MEMORY = ctypes.CFUNCTYPE(None, _POINTER, *2 * (ctypes.POINTER(ctypes.c_size_t),))
#: The callbacks of limits, kept for as long as GGML may call them.
_limits: list[Any] = []


class _DeviceStruct(ctypes.Structure):
    """The beginning of GGML's `ggml_backend_device`: pointers to functions."""

    _fields_ = (("name", _POINTER), ("description", _POINTER), ("memory", _POINTER))


def offered_devices(memory_bytes: int | None) -> dict[int, Device]:
    """Return the GPUs, or else the CPU, by native pointers; clients see `memory_bytes` of each at most."""
    load_rpc()
    found = {handle: device_of(handle) for handle in native_devices()}
    gpus = [handle for handle, each in found.items() if each.kind not in ("cpu", "accelerator")]
    chosen = gpus or [handle for handle, each in found.items() if each.kind == "cpu"]
    for handle in chosen if memory_bytes is not None else ():
        _limit_memory(handle, memory_bytes or 0)
    return {handle: device_of(handle) for handle in chosen}


def serve_devices(
    endpoint: str, devices: Collection[int], n_threads: int, cache: Path | None
) -> None:
    """Compute for clients, one after the other; return only if llama.cpp gives up. `cache` keeps tensors."""
    types = (*2 * (ctypes.c_char_p,), *2 * (ctypes.c_size_t,), _POINTER)
    start = rpc_procedure(b"ggml_backend_rpc_start_server", None, *types)
    folder = None if cache is None else os.fsencode(cache)
    start(endpoint.encode(), folder, n_threads, len(devices), (_POINTER * len(devices))(*devices))


def _limit_memory(device: int, limit: int) -> None:
    struct = _DeviceStruct.from_address(device)
    own = ctypes.cast(struct.memory, _GET_MEMORY)

    def tell(asked: int, free: Any, total: Any) -> None:
        own(asked, free, total)
        free[0], total[0] = min(limit, free[0]), min(limit, total[0])

    _limits.append(_GET_MEMORY(tell))
    struct.memory = ctypes.cast(_limits[-1], _POINTER).value
