"""Fetch the parts of GGML's source that specgen's own libraries are built from.

These are its headers and its RPC backend. They come from the source distribution of
llama-cpp-python and are kept in build/ (`make clean` removes them), so that `make rpc` and
`python -m scripts.check_ggml` download it only once.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from pathlib import Path

import filelock

from scripts import build_kernels, build_peers

FOLDER = Path(__file__).resolve().parent.parent / "build"
#: The folder of GGML, below the root of the source distribution.
GGML = "vendor/llama.cpp/ggml"
#: The files to unpack, below that folder.
_WANTED = re.compile(
    r"CMakeLists\.txt|(?:include|src|src/ggml-cpu)/[^/]+\.h|src/ggml-rpc/[^/]+\.(?:h|cpp)"
)
#: The lines of CMakeLists.txt that make up GGML's version.
_VERSION = re.compile(r"set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)\)")


def fetch(version: str, folder: Path = FOLDER) -> Path:
    """Download the source of a version of llama-cpp-python, unless it is there.

    Returns:
        The folder that contains the unpacked parts, as the root of the source distribution does.

    Raises:
        BuildError: The archive is not as expected.
        FetchError: It cannot be downloaded.
    """
    root = folder / build_peers.archive_name(version).removesuffix(".tar.gz")
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{root.name}.lock"):
        if not root.is_dir():
            with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
                unpacked = Path(work) / "unpacked"
                unpack(build_peers.download(version, Path(work)), unpacked)
                unpacked.rename(root)
    return root


def unpack(archive: Path, root: Path) -> None:
    """Unpack the wanted files of a source distribution. Raises `BuildError`."""
    top = archive.name.removesuffix(".tar.gz")
    try:
        with tarfile.open(archive) as file:
            for member in file:
                part = member.name.removeprefix(f"{top}/{GGML}/")
                if not member.isfile() or not _WANTED.fullmatch(part):
                    continue
                content = file.extractfile(member)
                assert content is not None
                path = root / GGML / part
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as out:
                    shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise build_kernels.BuildError(f"{archive.name} cannot be unpacked: {error}") from error
    if not root.is_dir():
        raise build_kernels.BuildError(f"{archive.name} has no {GGML}")


def ggml_version(root: Path) -> str:
    """Return the version of GGML in an unpacked source. Raises `BuildError` if it has none."""
    path = root / GGML / "CMakeLists.txt"
    try:
        numbers = _VERSION.findall(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise build_kernels.BuildError(f"{path} cannot be read: {error.strerror}") from error
    if len(numbers) != 3:
        raise build_kernels.BuildError(f"{path} does not contain the version of GGML")
    return ".".join(numbers)
