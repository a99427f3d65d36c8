"""The version, features and devices of this build of llama.cpp, for `specgen doctor`."""

from __future__ import annotations

import ctypes

from specgen.backend.build import Build, Device
from specgen.backend.llama.library import ggml_function, llama_cpp

_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator", 4: "meta"}


def build() -> Build:
    """Return the version and features of this build of llama.cpp, and the devices that it finds."""
    return Build(
        version=llama_cpp.__version__,
        llama_version=llama_cpp.llama_version().decode("utf-8", "replace"),
        system_info=llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip(" |\n"),
        gpu_offload=has_gpu(),
        devices=_devices(),
    )


def has_gpu() -> bool:
    """Return whether layers can be kept on a GPU of this machine."""
    offloads = bool(llama_cpp.llama_supports_gpu_offload())
    # With the RPC backend loaded, `llama_supports_gpu_offload` is true on any machine.
    if offloads and llama_cpp.llama_supports_rpc():
        return any("gpu" in device.kind for device in _devices())
    return offloads


def _devices() -> tuple[Device, ...]:
    """Return GGML's devices; none if the functions of GGML cannot be found in this
    llama-cpp-python."""
    try:
        count = ggml_function("ggml_backend_dev_count", ctypes.c_size_t)
        get = ggml_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name = ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        text = ggml_function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
        kind = ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        size_p = ctypes.POINTER(ctypes.c_size_t)
        memory = ggml_function("ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)
    except (AttributeError, ImportError, OSError, RuntimeError):
        return ()
    found = []
    for device in [get(index) for index in range(count())]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                name=name(device).decode("utf-8", "replace"),
                kind=_DEVICE_KINDS.get(kind(device), "other"),
                description=text(device).decode("utf-8", "replace"),
                memory_bytes=total.value,
                free_bytes=free.value,
            )
        )
    return tuple(found)
