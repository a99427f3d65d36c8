"""Libraries that replace the kernels: they can be attached to GGML, but compute nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

_SOURCE = """
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#define EXPORT extern "C" __attribute__((visibility("default")))

static const char *name(void *) { return "stand-in"; }
static size_t n_devices(void *) { return 0; }
static void *device(void *, size_t) { return nullptr; }
static void *address(void *, const char *) { return nullptr; }

// What GGML knows a backend by.
static struct {
    int version;
    const char *(*name)(void *);
    size_t (*n_devices)(void *);
    void *(*device)(void *, size_t);
    void *(*address)(void *, const char *);
    void *context;
} registry = {2, name, n_devices, device, address, nullptr};

static int enabled[2] = {1, 1};

#ifdef DIES
EXPORT void *ggml_backend_init() { abort(); }
#elif defined(PROBLEM)
EXPORT void *ggml_backend_init() { return nullptr; }
#else
EXPORT void *ggml_backend_init() { return &registry; }
#endif
#ifndef PROBLEM
#define PROBLEM ""
#endif
EXPORT const char *specgen_kernels_problem() { return PROBLEM; }
EXPORT const char *specgen_kernels_instructions() { return "avx2"; }
#ifndef BUILT_FOR
#define BUILT_FOR "0.0.0"
#endif
EXPORT const char *specgen_kernels_built_for() { return BUILT_FOR; }
EXPORT void specgen_kernels_counts(uint64_t counts[4]) {
    for (int i = 0; i < 4; i++) counts[i] = 10 * enabled[0] + enabled[1] + i;
}
#ifndef INCOMPLETE
EXPORT void specgen_kernels_serve(void) {}
EXPORT void *specgen_kernels_new_row_limit(int64_t, const int32_t *, int64_t) { return nullptr; }
EXPORT void specgen_kernels_delete_row_limit(void *) {}
EXPORT void specgen_kernels_set_row_limit(void *) {}
EXPORT uint64_t specgen_kernels_packed_size(const void *) { return 0; }
EXPORT void *specgen_kernels_open_packed(const char *) { return nullptr; }
EXPORT void specgen_kernels_limit_packed(void *, uint64_t, const char *) {}
EXPORT int specgen_kernels_finish_packed(void *) { return 0; }
EXPORT int specgen_kernels_packed_problem(const void *) { return 0; }
EXPORT int specgen_kernels_is_whole_packed(const void *) { return 0; }
EXPORT uint64_t specgen_kernels_streamed_bytes(const void *) { return 0; }
EXPORT void specgen_kernels_load_packed(void *) {}
EXPORT int specgen_kernels_used_packed(const void *) { return 0; }
EXPORT uint64_t specgen_kernels_packed_file_bytes(const void *) { return 0; }
EXPORT int specgen_kernels_write_packed(const void *, const char *) { return 0; }
EXPORT void specgen_kernels_close_packed(void *) {}
EXPORT void specgen_kernels_enable(int products, int attention) {
#ifdef PRODUCTS_DIE
    if (products) abort();
#endif
    enabled[0] = products;
    enabled[1] = attention;
}
#endif
"""


def stand_in(folder: Path, *, problem: str | None = None, macros: Collection[str] = ()) -> Path:
    """Compile a replacement, which reports `problem` if there is one. Skips without a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "stand-in.cpp", folder / "libspecgen-kernels.so"
    source.write_text(_SOURCE)
    defined = [f"-D{macro}" for macro in macros]
    if problem is not None:
        defined.append(f'-DPROBLEM="{problem}"')
    command = [compiler, *defined, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    return library
