"""Builds and packages: the flags of llama.cpp's build, the Makefile, the wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specgen import __version__
from tests.helpers.common import ROOT, posix

KERNELS = "specgen/llama/libspecgen-kernels.so"


def compiler(folder: Path, *macros: str) -> str:
    """A compiler that only prints its macros."""
    path = folder / "compiler"
    lines = "".join(f"echo '#define {macro} 1'\n" for macro in macros)
    path.write_text(f"#!/bin/sh\n{lines}")
    path.chmod(0o755)
    return str(path)


def merged(cmake_args_variable: str | None = None, **environment: str) -> list[str]:
    """The arguments that the script prints, as scikit-build-core takes them apart."""
    clean = {k: v for k, v in os.environ.items() if k not in {"CMAKE_ARGS", "CXX", "CXXFLAGS"}}
    if cmake_args_variable is not None:
        clean["CMAKE_ARGS"] = cmake_args_variable
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts" / "cmake_args.py"],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(answer.stdout)


@posix
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["-DCMAKE_CXX_FLAGS=-fno-dse"]),
        ("-DGGML_CUDA=on", ["-DGGML_CUDA=on", "-DCMAKE_CXX_FLAGS=-fno-dse"]),
        ("-DCMAKE_CXX_FLAGS='-O2 -g'", ["-DCMAKE_CXX_FLAGS=-O2 -g -fno-dse"]),
        ("-D CMAKE_CXX_FLAGS:STRING=-g -DX=1", ["-DX=1", "-DCMAKE_CXX_FLAGS=-g -fno-dse"]),
        ("-DCMAKE_CXX_FLAGS=-fno-dse", ["-DCMAKE_CXX_FLAGS=-fno-dse"]),
    ],
)
def test_gcc_gets_the_flag_beside_the_users_own(
    tmp_path: Path, given: str | None, expected: list[str]
) -> None:
    *flags, images, included = merged(given, CXX=compiler(tmp_path, "__GNUC__"))
    assert flags == expected
    assert images == "-DLLAVA_BUILD=OFF"
    assert Path(included.partition("=")[2]) == ROOT / "scripts/only_llama.cmake"


@posix
def test_other_compilers_do_not_get_the_flag_and_a_missing_one_is_named(tmp_path: Path) -> None:
    clang = compiler(tmp_path, "__GNUC__", "__clang__")
    own = "-DLLAVA_BUILD=on -DGGML_METAL=on"  # all is built for who asks for it
    assert merged(own, CXX=clang) == own.split()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        merged(CXX=str(tmp_path / "nothing"))
    assert "no C++ compiler" in caught.value.stderr
    assert "hint: " in caught.value.stderr


# --- the Makefile ---------------------------------------------------------------------------


# --- the packages ---------------------------------------------------------------------------


def built(builder: type[Any], root: Path, folder: Path) -> str:
    """A package. Compiling kernels takes a while, and is tested with compilers that are quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECGEN_KERNELS_BUILD", "off")
        (made,) = builder(str(root)).build(directory=str(folder), versions=["standard"])
    return str(made)


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    made = built(WheelBuilder, ROOT, tmp_path)
    with zipfile.ZipFile(made) as wheel:
        names = set(wheel.namelist())
        about = f"specgen_gguf-{__version__}.dist-info"
        metadata = wheel.read(f"{about}/METADATA").decode()
        entry_points = wheel.read(f"{about}/entry_points.txt").decode()
        assert wheel.read("specgen/models.toml") == (ROOT / "models.toml").read_bytes()
    page = (ROOT / "specgen/serve/server/page").rglob("*")
    files = [*(ROOT / "specgen").rglob("*.py"), *(file for file in page if file.is_file())]
    assert {file.relative_to(ROOT).as_posix() for file in files} <= names
    assert "specgen/py.typed" in names
    vendor = "specgen/serve/server/page/vendor"
    licences = [f"{vendor}/{file.name}" for file in (ROOT / vendor).glob("LICENSE-*")]
    assert f"{vendor}/LICENSE-marked" in licences
    for licence in ("LICENSE", *licences):
        assert f"{about}/licenses/{licence}" in names
    assert "specgen = specgen.__main__:main" in entry_points
    # The release's uploader refuses a later one.
    assert metadata.startswith("Metadata-Version: 2.4\n")
    assert "\nRequires-Python: >=3.10\n" in metadata
    assert {name.split("/")[0] for name in names} == {"specgen", about}
    assert KERNELS not in names
    assert made.endswith("-py3-none-any.whl")


def test_a_wheel_can_be_built_from_the_source_distribution(tmp_path: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    with tarfile.open(built(SdistBuilder, ROOT, tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        if hasattr(tarfile, "data_filter"):  # the first releases of Python 3.10 and 3.11 lack it
            sdist.extraction_filter = tarfile.data_filter
        sdist.extractall(tmp_path / "unpacked")
    # What the build, and tests of the documents, read is there.
    needed = {
        *("models.toml", "pyproject.toml", "Makefile", "hatch_build.py", "LICENSE"),
        *("README.md", "CONTRIBUTING.md", "BENCHMARKS.md", "scripts/build_kernels.py"),
    }
    assert needed <= names
    assert "benchmarks/results/server-15.json" in names
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.cpp")}
    assert sources <= names
    assert KERNELS not in names
    assert not any(name.startswith((".ci", ".git")) and name != ".gitignore" for name in names)
    unpacked = tmp_path / "unpacked" / f"specgen_gguf-{__version__}"
    with zipfile.ZipFile(built(WheelBuilder, unpacked, tmp_path)) as wheel:
        assert "specgen/models.toml" in wheel.namelist()
