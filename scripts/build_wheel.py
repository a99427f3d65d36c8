"""Build the wheels for Linux, which can be installed without a compiler: `make dist`.

A wheel contains llama.cpp with its CPU backends for all processors, specgen's kernels, the RPC
backend, and the part of llama-cpp-python that declares llama.cpp's functions::

    python -m scripts.build_wheel [--machine x86_64|aarch64] [--work FOLDER] [--out FOLDER]

The compiler is the Clang in `ziglang`, a package on PyPI. It compiles for other processors, and for
an older glibc than this machine's, so that the wheel runs on every distribution since 2019. It
links the C++ library statically, and does not have GCC 12's bug with AMX (scripts/cmake_args.py).
The build takes about ten minutes, and resumes where it was interrupted.

llama.cpp is built without OpenMP and uses GGML's own threads, because a wheel must not load a
second OpenMP into a process that may already have one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import build_kernels, build_peers
from specgen.errors import SpecgenError
from specgen.system.llama_build import LIBRARY, REQUIRED_VERSION, STAMP, protocol_in

ROOT = build_kernels.ROOT
#: The oldest glibc with which a wheel runs.
GLIBC = "2.28"
#: The platform tag of a wheel.
PLATFORM = "manylinux_2_28_{machine}"
#: The processors that wheels are built for, each with the platform of its kernels.
MACHINES = {"x86_64": build_kernels.X86, "aarch64": build_kernels.ARM}
SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    # The second path is for the RPC backend, which is in another folder than the libraries that are
    # always loaded.
    "-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/bundled/lib",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_SHARED_LINKER_FLAGS=-s",
    "-DCMAKE_MODULE_LINKER_FLAGS=-s",
    "-DGGML_NATIVE=OFF",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=ON",
    "-DGGML_OPENMP=OFF",
    "-DGGML_RPC=ON",
    "-DGGML_CCACHE=OFF",
    *(
        f"-DLLAMA_{part}=OFF"
        for part in (
            "BUILD_COMMON",
            "BUILD_EXAMPLES",
            "BUILD_SERVER",
            "BUILD_TESTS",
            "BUILD_TOOLS",
            "CURL",
        )
    ),
)
#: The loop in which the threads of GGML's pool wait at a barrier, and its replacement: threads spin
#: for 30 us and then sleep, to leave the core to others, such as the thread that they wait for.
#: Yielding instead would give the core away for 3 ms.
_SPINS = """\
    while (atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed) {
        ggml_thread_cpu_relax();
    }
"""
_SLEEPS = """\
    const int64_t spins_until = ggml_time_us() + 30;
    while (atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed) {
        if (ggml_time_us() < spins_until) {
            ggml_thread_cpu_relax();
        } else {
            usleep(20);
        }
    }
"""
#: The libraries that are built, each with its name in the wheel, by which it is linked or loaded.
LIBRARIES = {
    "libggml-base.so": "libggml-base.so.0",
    "libggml.so": "libggml.so.0",
    "libllama.so": "libllama.so",
}
#: The modules of llama-cpp-python that declare llama.cpp's functions. They do not import its other
#: modules.
BINDINGS = ("_ctypes_extensions.py", "llama_cpp.py", "llama_cpp_ext.py")
#: A script that calls zig's compiler. zig has other names for processors (with underscores) and for
#: ARM's instruction sets (such as generic+v8_2a+fullfp16).
_COMPILER = """#!/bin/sh
for word do
    shift
    case "$word" in
    -march=skylake-avx512) word=-march=skylake_avx512;;
    -march=armv*)
        renamed='s/-march=armv/-mcpu=generic+v/; s/-a/a/; s/[.]/_/; s/+fp16/+fullfp16/'
        word=$(echo "$word" | sed "$renamed");;
    esac
    set -- "$@" "$word"
done
exec "{zig}" {name} {flags} "$@"
"""
#: Replaces llama-cpp-python's own `__init__.py`, which imports the whole package.
INIT = '''"""A part of llama-cpp-python (LICENSE-llama-cpp-python).

llama.cpp (LICENSE-llama.cpp) is in lib/.
"""

from .llama_cpp import *  # noqa: F403

__version__ = "{version}"
'''


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build a wheel for Linux.")
    parser.add_argument("--machine", choices=MACHINES, default="x86_64")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheel")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args(argv)
    try:
        print(build(arguments.machine, arguments.work.resolve(), arguments.out.resolve()))
    except build_kernels.BuildError as error:
        sys.exit(f"{error.output}{error}")
    except build_peers.BuildError as error:
        sys.exit(str(error))
    except SpecgenError as error:
        sys.exit(f"{error.message}\nhint: {error.hint}" if error.hint else error.message)


def build(machine: str, work: Path, out: Path) -> Path:
    """Build the wheel for a processor.

    Args:
        machine: A processor in `MACHINES`.
        work: The folder of compiled files, which are kept for the next build.
        out: The folder of the wheel.

    Returns:
        The path of the wheel.

    Raises:
        BuildError: The one of scripts/build_peers.py, or the one of scripts/build_kernels.py.
        FetchError: The source cannot be downloaded.
    """
    from hatchling.builders.wheel import WheelBuilder

    work.mkdir(parents=True, exist_ok=True)
    source = build_peers.fetch(REQUIRED_VERSION, work)
    sleep_at_barriers(source / "vendor/llama.cpp/ggml/src/ggml-cpu/ggml-cpu.c")
    work /= machine
    compilers = write_compilers(machine, work / "bin")
    compile_llama(machine, source / "vendor" / "llama.cpp", work / "cmake", compilers)
    staged = work / "staged"
    shutil.rmtree(staged, ignore_errors=True)
    stage(source, work / "cmake" / "bin", staged / "specgen" / "llama")
    kernels = work / Path(build_kernels.LIBRARY).name
    command = [os.fspath(compilers["c++"]), "-s"]
    # No instruction set may be missing in a wheel, so all flags must be supported.
    for instructions in build_kernels.INSTRUCTION_FLAGS.values():
        flags = instructions.flags
        is_needed = instructions.platform == MACHINES[machine]
        if is_needed and not build_kernels.knows(command, flags):
            raise build_peers.BuildError(f"the compiler does not know {' '.join(flags)}")
    build_kernels.compile_library(
        ROOT, kernels, {"CXX": shlex.join(command)}, force=False, platform=MACHINES[machine]
    )
    shutil.copy(kernels, staged / build_kernels.LIBRARY)
    tag = PLATFORM.format(machine=machine)
    os.environ |= {"SPECGEN_BUNDLE": os.fspath(staged), "SPECGEN_BUNDLE_PLATFORM": tag}
    builder = WheelBuilder(os.fspath(ROOT))
    (wheel,) = builder.build(directory=os.fspath(out), versions=["standard"])
    check_platform(machine, Path(wheel))
    return Path(wheel)


def sleep_at_barriers(file: Path) -> None:
    """Patch llama.cpp's source so that threads sleep at barriers instead of spinning.

    Raises:
        BuildError: The loop to replace is not in the source.
    """
    text = file.read_text(encoding="utf-8")
    if _SLEEPS in text:
        return
    if _SPINS not in text:
        raise build_peers.BuildError(f"{file.name}: the loop of ggml_barrier has changed")
    file.write_text(text.replace(_SPINS, _SLEEPS), encoding="utf-8")


def write_compilers(machine: str, folder: Path) -> dict[str, Path]:
    """Write scripts that CMake can use as compilers for a processor.

    Returns:
        The scripts by the name of zig's subcommand.

    Raises:
        BuildError: zig is not installed.
    """
    try:
        import ziglang
    except ImportError as error:
        raise build_peers.BuildError("ziglang is needed: pip install ziglang") from error
    zig = Path(ziglang.__file__).parent / "zig"
    folder.mkdir(parents=True, exist_ok=True)
    target = f"-target {machine}-linux-gnu.{GLIBC}"
    scripts = {}
    for name, flags in {"cc": target, "c++": target, "ar": "", "ranlib": ""}.items():
        scripts[name] = folder / f"zig-{name}"
        scripts[name].write_text(
            _COMPILER.format(zig=zig, name=name, flags=flags), encoding="utf-8"
        )
        scripts[name].chmod(0o755)
    return scripts


def compile_llama(machine: str, source: Path, folder: Path, compilers: dict[str, Path]) -> None:
    """Configure and compile llama.cpp for a processor in `folder`. Raises `BuildError`."""
    tools = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
    chosen = [f"-DCMAKE_{variable}={compilers[name]}" for variable, name in tools.items()]
    if machine != platform.machine():
        chosen += ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine}"]
    # Without this, llama.cpp's build would take this project's commit for its own.
    environment = {**os.environ, "GIT_DIR": os.devnull}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *SETTINGS, *chosen]
    build_peers.run(configure, environment)
    build_peers.run(["cmake", "--build", str(folder), "--target", "llama", "ggml"], environment)


def stage(source: Path, built: Path, folder: Path) -> None:
    """Copy the bundled files to `folder`, as they are in the wheel below specgen/llama."""
    bundle = folder / "bundled"
    libraries = bundle / "lib"
    libraries.mkdir(parents=True)
    for name, name_in_wheel in LIBRARIES.items():
        shutil.copy(built / name, libraries / name_in_wheel)
    for variant in built.glob("libggml-cpu-*.so"):
        shutil.copy(variant, libraries)
    for name in BINDINGS:
        text = (source / "llama_cpp" / name).read_text(encoding="utf-8")
        text = text.replace(
            "from llama_cpp._ctypes_extensions import", "from ._ctypes_extensions import"
        )
        (bundle / name).write_text(text, encoding="utf-8")
    version = REQUIRED_VERSION
    (bundle / "__init__.py").write_text(INIT.format(version=version), encoding="utf-8")
    shutil.copy(source / "LICENSE.md", bundle / "LICENSE-llama-cpp-python")
    shutil.copy(source / "vendor" / "llama.cpp" / "LICENSE", bundle / "LICENSE-llama.cpp")
    # In another folder, because it is loaded for workers only: once it is loaded, GGML reports that
    # layers can be offloaded, on every machine.
    shutil.copy(built / "libggml-rpc.so", folder / LIBRARY)
    header = source / "vendor" / "llama.cpp" / "ggml" / "include" / "ggml-rpc.h"
    stamp = {"version": version, "protocol": protocol_in(header)}
    (folder / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")


def check_platform(machine: str, wheel: Path) -> None:
    """Check with auditwheel that the wheel runs with `GLIBC` and needs no other libraries.

    Raises:
        BuildError: It needs more.
    """
    audit = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", os.fspath(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    build_peers.say(audit.stdout or audit.stderr)
    tag = PLATFORM.format(machine=machine)
    granted = re.search(
        rf'platform tag: "manylinux_2_(\d+)_{machine}"', " ".join(audit.stdout.split())
    )
    if granted is None or int(granted[1]) > int(GLIBC.partition(".")[2]):
        raise build_peers.BuildError(f"{wheel.name} does not run on {tag}")


if __name__ == "__main__":
    main()
