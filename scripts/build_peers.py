"""Build llama.cpp's own programs for speculative decoding, for `benchmarks/peers.py`.

Their source is the one that the installed llama-cpp-python was built from: the source distribution
of that version, from the package index. Its CMake project is configured as pip does it (with
CMAKE_ARGS, made safe by scripts/cmake_args.py), with llama.cpp's examples enabled. So the programs
and specgen run the same code from the same compiler::

    python -m scripts.build_peers [FOLDER]

`pip download` is not used, because it runs the package's build system to get metadata.

llama.cpp's other programs are not needed: `llama-speculative` is an older example whose output is
biased above temperature 0, and plain decoding can be measured with `llama-speculative-simple`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from scripts import cmake_args
from specgen.errors import FetchError, SpecgenError
from specgen.models.network_errors import INDEX_VARIABLE
from specgen.models.pypi import IndexFile, files_of, index_url, normalized
from specgen.models.transfer import download_file
from specgen.system.progress import ProgressView

PACKAGE = "llama-cpp-python"
PROGRAMS = ("llama-speculative-simple", "llama-lookup")
#: The file in the folder of the programs that records what they were built from.
STAMP = "peers.json"
#: CMake definitions in addition to the project's own. With the last one, the programs find their
#: libraries in their own folder.
SETTINGS = (
    "-DLLAMA_BUILD_EXAMPLES=ON",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
)


class BuildError(Exception):
    """The programs cannot be built. The message gives the reason in one line."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Build llama.cpp's programs for speculative decoding."
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(sys.prefix) / "peers", help="where to build"
    )
    parser.add_argument(
        "--source", type=Path, help=f"an unpacked {PACKAGE} of the installed version"
    )
    arguments = parser.parse_args(argv)
    try:
        build(arguments.folder.resolve(), arguments.source)
    except BuildError as error:
        sys.exit(str(error))
    except SpecgenError as error:
        sys.exit(f"{error.message}\nhint: {error.hint}" if error.hint else error.message)
    except KeyboardInterrupt:
        say("interrupted; compiled files are kept for the next time")
        sys.exit(130)


def build(folder: Path, source: Path | None = None) -> None:
    """Build the programs into `folder`, unless they are there.

    Raises:
        BuildError: They cannot be built.
        FetchError: Their source cannot be downloaded.
    """
    version = installed_version()
    settings = cmake_settings(os.environ)
    if is_built(folder, version, settings if os.environ.get("CMAKE_ARGS") else None):
        say(f"{folder} has the programs of {PACKAGE} {version}")
        return
    if shutil.which("cmake") is None:
        raise BuildError("cmake is needed to build llama.cpp's programs, but cannot be found")
    # This folder is kept if the build fails, so that the next build resumes from there.
    work = folder / f"build-{version}"
    work.mkdir(parents=True, exist_ok=True)
    root = source.resolve() if source else fetch(version, work)
    if not (root / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file():
        raise BuildError(f"{root} is not an unpacked {PACKAGE}: there is no vendor/llama.cpp")
    say(f"building {', '.join(PROGRAMS)} of {PACKAGE} {version}, which takes some minutes")
    say(f"with {' '.join(settings)}")
    compile_programs(root, work / "cmake", settings)
    install(work / "cmake", folder)
    stamp = {"version": version, "settings": settings}
    (folder / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    say(f"{folder / 'bin'} has {', '.join(PROGRAMS)}")


def installed_version() -> str:
    """The version of the installed llama-cpp-python, without a local suffix such as +cu124."""
    try:
        return importlib.metadata.version(PACKAGE).partition("+")[0]
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(f"{PACKAGE} is not installed: run make install") from error


def cmake_settings(environment: Mapping[str, str]) -> list[str]:
    """The definitions for CMake: those that scripts/cmake_args.py gives pip's build, and ours."""
    arguments = cmake_args.split_definitions(environment.get("CMAKE_ARGS", ""))
    if cmake_args.is_gcc(cmake_args.compiler(arguments, environment.get("CXX"))):
        arguments = cmake_args.with_flag(arguments, environment.get("CXXFLAGS"))
    return ["-DCMAKE_BUILD_TYPE=Release", *arguments, *SETTINGS]


def is_built(folder: Path, version: str, settings: Sequence[str] | None) -> bool:
    """Whether `folder` has the programs of a version, built with `settings` (None: with any)."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(stamp, dict) or stamp.get("version") != version:
        return False
    if settings is not None and stamp.get("settings") != list(settings):
        return False
    return all(find(folder / "bin", name) is not None for name in PROGRAMS)


def find(folder: Path, program: str) -> Path | None:
    """Find a program in a folder or below: some CMake generators use a folder per build type."""
    names = {program, f"{program}.exe"}
    return next((path for path in folder.rglob(f"{program}*") if path.name in names), None)


def fetch(version: str, work: Path) -> Path:
    """Download and unpack the source distribution of a version; return the unpacked folder.

    Raises:
        BuildError: It cannot be unpacked.
        FetchError: It cannot be downloaded.
    """
    root = work / archive_name(version).removesuffix(".tar.gz")
    if root.is_dir():
        return root
    archive = download(version, work)
    unpack(archive, root)
    archive.unlink()
    return root


def archive_name(version: str) -> str:
    """The file name of the source distribution."""
    return f"{PACKAGE.replace('-', '_')}-{version}.tar.gz"


def download(version: str, work: Path) -> Path:
    """Download the source distribution into a folder; return the file. Raises `FetchError`."""
    archive = work / archive_name(version)
    file = find_source(files_of(PACKAGE), version)
    if file is None or file.sha256 is None:
        raise FetchError(
            f"{index_url()} has no source distribution of {PACKAGE} {version} with a SHA-256",
            f"set {INDEX_VARIABLE} to use another index",
        )
    say(f"downloading {file.name}")
    with contextlib.closing(ProgressView(sys.stderr, kind="bytes")) as progress:
        show = partial(progress.show, file.name)
        download_file(
            file.url, archive, file.sha256, lambda done, total, _is_check: show(done, total)
        )
    return archive


def find_source(files: Sequence[IndexFile], version: str) -> IndexFile | None:
    """Find the source distribution of a version among the files of an index."""
    wanted = normalized(f"{PACKAGE}-{version}")
    for file in files:
        stem = file.name.removesuffix(".tar.gz")
        if stem != file.name and normalized(stem) == wanted:
            return file
    return None


def unpack(archive: Path, root: Path) -> None:
    """Unpack the folder named like `root` from an archive to `root`, completely or not at all."""
    parts = root.with_name("unpacking")
    shutil.rmtree(parts, ignore_errors=True)
    try:
        with tarfile.open(archive) as file:
            if hasattr(tarfile, "data_filter"):
                file.extractall(parts, filter="data")
            else:  # early releases of Python 3.10 and 3.11
                file.extractall(parts)
        (parts / root.name).rename(root)
    except (tarfile.TarError, EOFError, OSError) as error:
        archive.unlink()
        raise BuildError(f"{archive.name} cannot be unpacked: {error}") from error
    shutil.rmtree(parts, ignore_errors=True)


def compile_programs(root: Path, folder: Path, settings: Sequence[str]) -> None:
    """Configure and compile in `folder`, on all cores unless the environment says otherwise."""
    environment = dict(os.environ)
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    targets = ["--config", "Release", "--target", *PROGRAMS]
    run(["cmake", "-S", str(root), "-B", str(folder), *settings], environment)
    run(["cmake", "--build", str(folder), *targets], environment)


def install(built: Path, folder: Path) -> None:
    """Check that the programs run, and copy them with their libraries to `folder`/bin."""
    programs = [find(built / "bin", name) for name in PROGRAMS]
    for name, program in zip(PROGRAMS, programs, strict=True):
        if program is None:
            raise BuildError(f"llama.cpp was built, but there is no {name} in {built / 'bin'}")
        run([str(program), "--version"])
    assert programs[0] is not None
    shutil.rmtree(folder / "bin", ignore_errors=True)
    shutil.copytree(programs[0].parent, folder / "bin", symlinks=True)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command with its output on stderr. Raises `BuildError` if it fails."""
    sys.stderr.flush()
    result = subprocess.run(command, stdout=sys.stderr, env=environment, check=False)
    if result.returncode:
        shown = " ".join(command[:3])
        raise BuildError(f"`{shown} ...` failed ({result.returncode}); its output is above")


def say(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
