"""Build the kernels for ARM on an x86-64 machine, and compare them with AVX2 in an emulator.

`make arm` runs it. It needs a compiler for AArch64 Linux ($ARM_CXX, or aarch64-linux-gnu-g++) and
QEMU's emulator of programs (qemu-aarch64 or qemu-aarch64-static), but not llama.cpp: it runs the
kernels' own tests (kernels/tests).
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
    TESTS,
    BuildError,
    compile_library,
    compiler,
    run,
)

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
PACKAGES = "on Debian: g++-aarch64-linux-gnu and qemu-user"
#: Where the library and the test programs are built.
FOLDER = ROOT / "build" / "arm"


@dataclass(frozen=True, slots=True)
class Tools:
    """The commands that the comparison needs."""

    #: The compiler for this machine.
    native: tuple[str, ...]
    #: The compiler for ARM.
    cross: tuple[str, ...]
    #: Runs a program that was compiled for ARM.
    emulator: tuple[str, ...]


class MissingToolError(Exception):
    """The comparison cannot run on this machine. The message gives the reason in one line."""


def find_tools(environment: Mapping[str, str]) -> Tools:
    """Return the commands to use. Raises `MissingToolError`."""
    cpu_features = Path("/proc/cpuinfo")
    if not cpu_features.is_file() or "avx2" not in cpu_features.read_text(encoding="utf-8"):
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
    """Compile `bits-avx2`, `bits-arm`, `attention-avx2` and `attention-arm` into a folder.

    Raises:
        BuildError: A program cannot be compiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = ROOT / SOURCES
    commands = []
    for name, command, file in (
        ("avx2", tools.native, "avx2.cpp"),
        ("arm", tools.cross, "neon_dotprod.cpp"),
    ):
        instructions = INSTRUCTION_FLAGS[file].flags
        start = [*command, *COMMON_FLAGS, *instructions, f"-I{sources}", "-static", "-pthread"]
        bits = [
            os.fspath(sources / TESTS / "bits_test.cpp"),
            os.fspath(sources / "instruction_sets" / file),
            f"-DSET={Path(file).stem}_set",
        ]
        attention = [os.fspath(sources / TESTS / "attention_test.cpp")]
        commands.append([*start, *bits, "-o", os.fspath(folder / f"bits-{name}")])
        commands.append([*start, *attention, "-o", os.fspath(folder / f"attention-{name}")])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))


def bits_of(command: Sequence[str]) -> dict[str, str]:
    """Return what a test program prints about each operator, by the operator's name.

    Raises:
        BuildError: The program fails.
    """
    lines = run(command).splitlines()
    return dict(line.split(" ", 1) for line in lines if line)


def compare(tools: Tools, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Run the compiled tests.

    Returns:
        The results of AVX2 by operator, and the operators whose results on ARM differ.
    """
    with_avx2: dict[str, str] = {}
    with_arm: dict[str, str] = {}
    for program, options in (("bits", []), ("attention", ["--bits"])):
        with_avx2 |= bits_of([os.fspath(folder / f"{program}-avx2"), *options])
        with_arm |= bits_of([*tools.emulator, os.fspath(folder / f"{program}-arm"), *options])
    names = sorted(with_avx2.keys() | with_arm.keys())
    return with_avx2, [name for name in names if with_avx2.get(name) != with_arm.get(name)]


def main() -> None:
    """Build the library and the tests for ARM, compare their results, and check attention."""
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
        results, different = compare(tools, FOLDER)
    except BuildError as error:
        sys.exit(f"{error.output}{error}")
    if different:
        sys.exit(f"results differ from those with AVX2: {', '.join(different)}")
    print(f"{len(results)} results are bit-identical to AVX2; now checking attention", flush=True)
    checks = [*tools.emulator, os.fspath(FOLDER / "attention-arm")]
    sys.exit(subprocess.run(checks, check=False).returncode)


if __name__ == "__main__":
    main()
