"""Build the C++ library of kernels, `specgen/llama/libspecgen-kernels.so`, from `kernels/`.

The build of the package calls `build` (hatch_build.py). By hand it is

    python -m scripts.build_kernels [--force]

It needs a C++ compiler ($CXX, c++, g++ or clang++) and Python's standard library, but not
llama.cpp. All source files are compiled at the same time, each with the flags of its instruction
set. If the sources, the flags and the compiler are the same as for the existing library, nothing is
compiled.

specgen works without the library. If it cannot be built (another system, another processor, no
compiler, a compiler error), a line on stderr gives the reason and the rest is installed.
SPECGEN_KERNELS_BUILD=off skips the build, and SPECGEN_KERNELS_BUILD=required makes a failure fatal.

scripts/arm_kernels.py builds the library for ARM on an x86-64 machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The folder of the sources, below the root of the project. `#include` paths start here.
SOURCES = "kernels"
#: The folder below `SOURCES` whose files do not belong to the library.
TESTS = "tests"
#: The library, below the root of the project.
LIBRARY = "specgen/llama/libspecgen-kernels.so"
#: The file next to the library that records what it was built from.
STAMP = "libspecgen-kernels.json"

#: The environment variable that decides whether to build, and its values.
VARIABLE = "SPECGEN_KERNELS_BUILD"
MODES = ("auto", "off", "required")

#: Platforms as `sysconfig.get_platform` names them. (A 32-bit Python on a 64-bit system has another
#: name, and no kernels.)
X86 = "linux-x86_64"
ARM = "linux-aarch64"
PLATFORMS = (X86, ARM)

#: `-ffp-contract=off`: a product and a sum become one instruction only where the source asks for
#: it, because a row must be rounded in the same way in every batch.
COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
)
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-ldl", "-pthread")
AVX512_FLAGS = ("-march=skylake-avx512", "-mprefer-vector-width=512")
VNNI_FLAGS = (*AVX512_FLAGS, "-mavx512vnni")


@dataclass(frozen=True, slots=True)
class InstructionFlags:
    """How to compile a source file that is written for one instruction set."""

    #: What to add to the common flags.
    flags: tuple[str, ...]
    #: A macro to define for all other files if this file is left out because the compiler does not
    #: know the flags. None: the library cannot be built without the file.
    macro_without: str | None = None
    #: The platform that has the instruction set.
    platform: str = X86


#: By file name. All other files are for every platform, and get the common flags alone.
INSTRUCTION_FLAGS: Mapping[str, InstructionFlags] = {
    "avx2.cpp": InstructionFlags(("-mavx2", "-mfma", "-mf16c")),
    "avx_vnni.cpp": InstructionFlags(
        ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), "WITHOUT_AVX_VNNI"
    ),
    "avx512.cpp": InstructionFlags(AVX512_FLAGS),
    "avx512_vnni.cpp": InstructionFlags(VNNI_FLAGS, "WITHOUT_AVX512_VNNI"),
    "amx_int8.cpp": InstructionFlags((*VNNI_FLAGS, "-mamx-tile", "-mamx-int8"), "WITHOUT_AMX_INT8"),
    "neon_dotprod.cpp": InstructionFlags(("-march=armv8.2-a+dotprod",), platform=ARM),
}


class BuildError(Exception):
    """The library cannot be built. The message gives the reason in one line."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        #: What the compiler printed.
        self.output = output


@dataclass(frozen=True, slots=True)
class Step:
    """One source file to compile."""

    #: Its path below the folder of the sources.
    source: Path
    #: The flags to compile it with.
    flags: tuple[str, ...]

    @property
    def object_name(self) -> str:
        """The name of the object file, unique among all sources."""
        return "-".join(self.source.with_suffix(".o").parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Build the library and print its path."""
    parser = argparse.ArgumentParser(description="Build specgen's library of kernels.")
    parser.add_argument("--force", action="store_true", help="compile it even if nothing changed")
    arguments = parser.parse_args(argv)
    try:
        built = build(ROOT, os.environ, force=arguments.force)
    except BuildError as error:
        sys.exit(f"{error.output}{error}")
    if built is None:
        sys.exit(1)
    print(built)


def build(
    root: Path,
    environment: Mapping[str, str],
    *,
    force: bool = False,
    platform: str | None = None,
) -> Path | None:
    """Build the library below `root`, unless it is up to date.

    Args:
        root: The root of the project.
        environment: The variables that decide whether to build, and with which compiler.
        force: Compile even if nothing changed.
        platform: The platform to compile for; None: this one.

    Returns:
        The path of the library, or None if the build was skipped or failed. A line on stderr then
        gives the reason; if the build failed, no older library is left.

    Raises:
        BuildError: The build failed and is required, or the variable has an unknown value.
    """
    library = root / LIBRARY
    mode = environment.get(VARIABLE, "").strip().lower() or "auto"
    if mode not in MODES:
        raise BuildError(f"{VARIABLE} is {mode!r}; it can be {', '.join(MODES)}")
    if mode == "off":
        say(f"the kernels are not built: {VARIABLE} is off")
        return None
    try:
        compile_library(root, library, environment, force=force, platform=platform)
    except BuildError as error:
        remove(library)
        if mode == "required":
            raise
        say(f"{error.output}the kernels are not built: {error}; specgen works without them")
        return None
    return library


def compile_library(
    root: Path,
    library: Path,
    environment: Mapping[str, str],
    *,
    force: bool,
    platform: str | None = None,
) -> None:
    """Compile and link the library, unless the existing one is up to date.

    Args:
        root: The root of the project.
        library: The library to write. The stamp is written next to it.
        environment: May name the compiler as `CXX`.
        force: Compile even if nothing changed.
        platform: The platform to compile for; None: this one.

    Raises:
        BuildError: It cannot be built.
    """
    platform = platform or sysconfig.get_platform()
    folder = root / SOURCES
    sources = files_of_library(folder, (".cpp",))
    if not sources:
        raise BuildError(f"there is no C++ file in {folder}")
    if platform not in PLATFORMS:
        raise BuildError(f"they are for {' and '.join(PLATFORMS)}, and this is {platform}")
    command = compiler(environment)
    steps = plan(command, sources, platform)
    stamp = fingerprint(folder, command, steps)
    if not force and library.is_file() and read_stamp(library) == stamp:
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    say(f"building the kernels with {shlex.join(command)}")
    # The work folder is next to the library, on the same file system. This way the finished library
    # can replace an older one atomically, even while other processes have that one open.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
        linked = compile_and_link(folder, command, steps, Path(work) / library.name)
        linked.replace(library)
    library.with_name(STAMP).write_text(json.dumps({"built from": stamp}) + "\n", encoding="utf-8")


def compile_and_link(
    folder: Path, command: Sequence[str], steps: Sequence[Step], library: Path
) -> Path:
    """Compile all files at the same time, and link them. Returns the path of the library."""
    objects = [os.fspath(library.with_name(step.object_name)) for step in steps]
    commands = []
    for step, made in zip(steps, objects, strict=True):
        source = os.fspath(folder / step.source)
        commands.append([*command, f"-I{folder}", *step.flags, "-c", source, "-o", made])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    run([*command, *objects, *LINK_FLAGS, "-o", os.fspath(library)])
    return library


def files_of_library(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the paths, below the folder of the sources, of the library's files of some types."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in paths if path.parts[0] != TESTS)


def compiler(environment: Mapping[str, str]) -> list[str]:
    """Return the command of the C++ compiler. Raises `BuildError` if there is none."""
    chosen = shlex.split(environment.get("CXX", ""))
    if chosen and shutil.which(chosen[0]) is None:
        raise BuildError(f"the compiler that CXX names cannot be found: {chosen[0]}")
    if chosen:
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return [name]
    raise BuildError("there is no C++ compiler (c++, g++ or clang++)")


def plan(command: Sequence[str], sources: Sequence[Path], platform: str) -> list[Step]:
    """Return what to compile for a platform, without files whose flags the compiler lacks."""
    for_every_cpu = InstructionFlags((), platform=platform)
    compiled: list[tuple[Path, InstructionFlags]] = []
    macros = []
    for source in sources:
        instructions = INSTRUCTION_FLAGS.get(source.name, for_every_cpu)
        if instructions.platform != platform:
            continue
        macro = instructions.macro_without
        if macro is not None and not knows(command, instructions.flags):
            macros.append(f"-D{macro}")
        else:
            compiled.append((source, instructions))
    return [
        Step(source, (*COMMON_FLAGS, *instructions.flags, *macros))
        for source, instructions in compiled
    ]


def knows(command: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether a compiler accepts these flags."""
    with tempfile.TemporaryDirectory() as work:
        # Not with -fsyntax-only, because zig's compiler fails if it writes no file.
        nothing = Path(work) / "nothing.cpp"
        made = nothing.with_suffix(".o")
        nothing.touch()
        try:
            run([*command, *flags, "-c", os.fspath(nothing), "-o", os.fspath(made)])
        except BuildError:
            return False
    return True


def fingerprint(folder: Path, command: Sequence[str], steps: Sequence[Step]) -> str:
    """Return a hash of everything that determines the result: sources, flags and compiler."""
    digest = hashlib.sha256()
    about = [list(command), compiler_version(command), list(LINK_FLAGS)]
    about += [[step.source.as_posix(), *step.flags] for step in steps]
    digest.update(json.dumps(about).encode())
    for path in files_of_library(folder, (".cpp", ".h")):
        content = (folder / path).read_bytes()
        digest.update(f"\n{path.as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def compiler_version(command: Sequence[str]) -> str:
    """Return what a compiler prints about its version; "" if it does not."""
    try:
        return run([*command, "--version"])
    except BuildError:
        return ""


def read_stamp(library: Path) -> str | None:
    """Return the fingerprint of an existing library; None if it is unknown."""
    try:
        stamp = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    built_from = stamp.get("built from") if isinstance(stamp, dict) else None
    return built_from if isinstance(built_from, str) else None


def remove(library: Path) -> None:
    """Remove a library that is out of date, and its stamp."""
    for path in (library, library.with_name(STAMP)):
        path.unlink(missing_ok=True)


def run(command: Sequence[str]) -> str:
    """Run a command and return its stdout. Raises `BuildError` if it fails."""
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be started: {error.strerror}") from error
    if ended.returncode:
        what = next((Path(word).name for word in command if word.endswith(".cpp")), "the library")
        raise BuildError(
            f"{command[0]} could not build {what} (exit code {ended.returncode})", ended.stderr
        )
    return ended.stdout


def say(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
