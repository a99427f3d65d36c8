"""Builds the kernels for ARM on an x86-64 machine and compares them with AVX2, in an emulator
(`make arm`).

It needs a compiler for AArch64 Linux ($ARM_CXX, or aarch64-linux-gnu-g++) and QEMU's emulator of
programs (qemu-aarch64 or qemu-aarch64-static). No llama.cpp is needed: the kernels' own tests run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.build_kernels import (
    ARM,
    COMMON_FLAGS,
    INSTRUCTION_FLAGS,
    ROOT,
    SOURCES,
    BuildError,
    compile_library,
    compiler,
    run,
)

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
PACKAGES = "on Debian: g++-aarch64-linux-gnu and qemu-user"
FOLDER = ROOT / "build" / "arm"


@dataclass(frozen=True, slots=True)
class Tools:
    """The commands that compile for this machine and for ARM, and that run a program for ARM."""

    native: tuple[str, ...]
    cross: tuple[str, ...]
    emulator: tuple[str, ...]


class MissingToolError(Exception):
    """The comparison cannot run here; the message says why, in a line."""


def find_tools(environment: Mapping[str, str]) -> Tools:
    """Find the tools. Raise `MissingToolError`."""
    features = Path("/proc/cpuinfo")
    if not features.is_file() or "avx2" not in features.read_text(encoding="utf-8"):
        raise MissingToolError("kernels for ARM are compared with AVX2, which this machine lacks")
    cross = shlex.split(environment.get("ARM_CXX", "")) or [COMPILER]
    if shutil.which(cross[0]) is None:
        raise MissingToolError(f"there is no compiler for ARM: {cross[0]} ({PACKAGES})")
    emulator = next((name for name in EMULATORS if shutil.which(name)), None)
    if emulator is None:
        raise MissingToolError(f"there is no emulator of ARM: {EMULATORS[0]} ({PACKAGES})")
    try:
        native = compiler(environment)
    except BuildError as error:
        raise MissingToolError(str(error)) from error
    return Tools(tuple(native), tuple(cross), (emulator, "-cpu", "max"))


def build_tests(tools: Tools, folder: Path) -> None:
    """Compile the programs `bits-avx2`, `bits-arm`, `attention-avx2` and `attention-arm` into a
    folder. Raise `BuildError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tests = ROOT / SOURCES / "tests"
    commands = []
    for name, command, file in (
        ("avx2", tools.native, "avx2.cpp"),
        ("arm", tools.cross, "neon_dotprod.cpp"),
    ):
        flags = [*COMMON_FLAGS, *INSTRUCTION_FLAGS[file].flags, "-static", "-pthread"]
        bits = [os.fspath(tests / "bits_test.cpp"), os.fspath(ROOT / SOURCES / file)]
        bits.append(f"-DSET={Path(file).stem}_set")
        attention = [os.fspath(tests / "attention_test.cpp")]
        commands.append([*command, *flags, *bits, "-o", os.fspath(folder / f"bits-{name}")])
        commands.append(
            [*command, *flags, *attention, "-o", os.fspath(folder / f"attention-{name}")]
        )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))


def bits_of(command: Sequence[str]) -> dict[str, str]:
    """Return what a test program prints about each operator, by name. Raise `BuildError` if it
    fails.
    """
    lines = run(command).splitlines()
    return dict(line.split(" ", 1) for line in lines if line)


def compare(tools: Tools, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Run the built tests. Return what each operator gave with AVX2, and the operators that gave
    something else on ARM.
    """
    expected: dict[str, str] = {}
    found: dict[str, str] = {}
    for program, option in (("bits", []), ("attention", ["--bits"])):
        expected |= bits_of([os.fspath(folder / f"{program}-avx2"), *option])
        found |= bits_of([*tools.emulator, os.fspath(folder / f"{program}-arm"), *option])
    names = sorted(expected.keys() | found.keys())
    return expected, [name for name in names if expected.get(name) != found.get(name)]


def main() -> None:
    try:
        tools = find_tools(os.environ)
    except MissingToolError as missing:
        print(f"skipped: {missing}", file=sys.stderr)
        return
    try:
        library = FOLDER / "libspecgen-kernels.so"
        compile_library(ROOT, library, {"CXX": shlex.join(tools.cross)}, force=False, platform=ARM)
        print(f"built {library.relative_to(ROOT)}", flush=True)
        build_tests(tools, FOLDER)
        expected, different = compare(tools, FOLDER)
    except BuildError as error:
        sys.exit(f"{error.output}{error}")
    if different:
        sys.exit(f"other bits than with AVX2: {', '.join(different)}")
    print(f"{len(expected)} results have the bits of AVX2; now attention's own checks", flush=True)
    checks = [*tools.emulator, os.fspath(FOLDER / "attention-arm")]
    sys.exit(subprocess.run(checks, check=False).returncode)


if __name__ == "__main__":
    main()
