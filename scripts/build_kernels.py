"""Builds the library of kernels, `specgen/llama/libspecgen-kernels.so`, from `kernels/*.cpp`.

The build of the package does so (hatch_build.py), and this program::

    python -m scripts.build_kernels [--force]

scripts/arm_kernels.py builds it for ARM on another machine.

It needs a C++ compiler ($CXX, c++, g++ or clang++) and the standard library only, no llama.cpp.
Every source file is compiled with flags of its own, all at the same time. Nothing is compiled
where sources, flags and compiler are those of the library that is there.

specgen works without the library. So where it cannot be built (another system, another
processor, no compiler, an error), a line on stderr says why, and everything else is installed.
SPECGEN_KERNELS_BUILD=off skips the build, =required makes a failure fatal.
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
#: Below the root of the source: what is compiled, and what it becomes.
SOURCES = "kernels"
LIBRARY = "specgen/llama/libspecgen-kernels.so"
#: What the library was built from, beside it.
STAMP = "libspecgen-kernels.json"

VARIABLE = "SPECGEN_KERNELS_BUILD"
MODES = ("auto", "off", "required")
#: As `sysconfig.get_platform` names it: a 32-bit Python on a 64-bit system is another platform.
X86, ARM = "linux-x86_64", "linux-aarch64"
PLATFORMS = (X86, ARM)

COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
)
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-ldl", "-pthread")


@dataclass(frozen=True, slots=True)
class InstructionFlags:
    """The flags of a source file whose code is for one instruction set only."""

    flags: tuple[str, ...]
    #: Defined for the other files where a compiler does not know the flags, so that this file is
    #: left out; None: the library cannot do without the file.
    macro_without: str | None = None
    #: The platform that the file is for.
    platform: str = X86


#: By file name. A file that is not listed gets the common flags alone.
INSTRUCTION_FLAGS: Mapping[str, InstructionFlags] = {
    "avx2.cpp": InstructionFlags(("-mavx2", "-mfma", "-mf16c")),
    "avx_vnni.cpp": InstructionFlags(
        ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), "WITHOUT_AVX_VNNI"
    ),
    "avx512_vnni.cpp": InstructionFlags(
        ("-march=skylake-avx512", "-mavx512vnni", "-mprefer-vector-width=512"),
        "WITHOUT_AVX512_VNNI",
    ),
    "amx_int8.cpp": InstructionFlags(
        (
            *("-march=skylake-avx512", "-mavx512vnni", "-mprefer-vector-width=512"),
            *("-mamx-tile", "-mamx-int8"),
        ),
        "WITHOUT_AMX_INT8",
    ),
    "neon_dotprod.cpp": InstructionFlags(("-march=armv8.2-a+dotprod",), platform=ARM),
}


class BuildError(Exception):
    """The library cannot be built; the message says why, in a line."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        #: What the compiler said.
        self.output = output


@dataclass(frozen=True, slots=True)
class Step:
    """One source file and the flags that it is compiled with."""

    source: Path
    flags: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> None:
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


def build(root: Path, environment: Mapping[str, str], *, force: bool = False) -> Path | None:
    """Build the library below `root`, if it is not there. Returns its path, or None where it was
    skipped or failed, after a line on stderr; where it failed, no older library is left. Raises
    `BuildError` if it fails and is required.
    """
    library = root / LIBRARY
    mode = environment.get(VARIABLE, "").strip().lower() or "auto"
    if mode not in MODES:
        raise BuildError(f"{VARIABLE} is {mode!r}; it can be {', '.join(MODES)}")
    if mode == "off":
        say(f"the kernels are not built: {VARIABLE} is off")
        return None
    try:
        compile_library(root, library, environment, force=force)
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
    """Compile and link for a platform (None: this one), unless the library there is what would come
    out. Raises `BuildError`.
    """
    platform = platform or sysconfig.get_platform()
    folder = root / SOURCES
    sources = sorted(folder.glob("*.cpp"))
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
    # Beside the library: renaming is then one step, whoever else has the old one open.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as work:
        objects = [Path(work) / f"{step.source.stem}.o" for step in steps]
        commands = [
            [*command, *step.flags, "-c", os.fspath(step.source), "-o", os.fspath(made)]
            for step, made in zip(steps, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, commands))
        linked = Path(work) / library.name
        run([*command, *map(os.fspath, objects), *LINK_FLAGS, "-o", os.fspath(linked)])
        linked.replace(library)
    library.with_name(STAMP).write_text(json.dumps({"built from": stamp}) + "\n", encoding="utf-8")


def compiler(environment: Mapping[str, str]) -> list[str]:
    """The command of the C++ compiler. Raises `BuildError` if there is none."""
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
    """What to compile for a platform, and how: without the files whose flags the compiler does not
    know.
    """
    plain = InstructionFlags((), platform=platform)
    own = {source: INSTRUCTION_FLAGS.get(source.name, plain) for source in sources}
    own = {source: extra for source, extra in own.items() if extra.platform == platform}
    compiled, macros = [], []
    for source, extra in own.items():
        if extra.macro_without is not None and not knows(command, extra.flags):
            macros.append(f"-D{extra.macro_without}")
        else:
            compiled.append(source)
    return [Step(source, (*COMMON_FLAGS, *own[source].flags, *macros)) for source in compiled]


def knows(command: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether a compiler takes these flags."""
    with tempfile.TemporaryDirectory() as work:
        # Not -fsyntax-only: zig fails where nothing is written.
        nothing, made = Path(work) / "nothing.cpp", Path(work) / "nothing.o"
        nothing.touch()
        try:
            run([*command, *flags, "-c", os.fspath(nothing), "-o", os.fspath(made)])
        except BuildError:
            return False
    return True


def fingerprint(folder: Path, command: Sequence[str], steps: Sequence[Step]) -> str:
    """Everything that decides what comes out, as a hash: sources, flags, and the compiler."""
    everything = hashlib.sha256()
    about = [list(command), compiler_version(command), list(LINK_FLAGS)]
    about += [[step.source.name, *step.flags] for step in steps]
    everything.update(json.dumps(about).encode())
    for path in sorted(path for path in folder.iterdir() if path.suffix in {".cpp", ".h"}):
        content = path.read_bytes()
        everything.update(f"\n{path.name} {len(content)}\n".encode())
        everything.update(content)
    return everything.hexdigest()


def compiler_version(command: Sequence[str]) -> str:
    try:
        return run([*command, "--version"])
    except BuildError:
        return ""


def read_stamp(library: Path) -> str | None:
    """The fingerprint of the library that is there; None if nobody knows."""
    try:
        stamp = json.loads(library.with_name(STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    built_from = stamp.get("built from") if isinstance(stamp, dict) else None
    return built_from if isinstance(built_from, str) else None


def remove(library: Path) -> None:
    """Remove a library that is not what would be built now."""
    for path in (library, library.with_name(STAMP)):
        path.unlink(missing_ok=True)


def run(command: Sequence[str]) -> str:
    """What a command says on stdout. Raises `BuildError` if it fails."""
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
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
