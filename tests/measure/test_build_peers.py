"""scripts/build_peers.py: the right source, checked, and built once."""

from __future__ import annotations

import importlib.metadata
import io
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import build_peers, cmake_args
from specgen.models.download import INDEX_VARIABLE
from tests.helpers.common import posix
from tests.helpers.fetch import Resource, WebServer, index_page, sha256, web_server

VERSION = "1.2.3"
NAME = f"llama_cpp_python-{VERSION}"
PAGE = "/simple/llama-cpp-python/"
#: Notes how it is called; in place of a build, it writes programs that note the same.
CMAKE = f"""#!{sys.executable}
import os, sys
with open({{log!r}}, "a") as log:
    print(os.environ["CMAKE_BUILD_PARALLEL_LEVEL"], *sys.argv[1:], file=log)
print("compiling")
if "--build" in sys.argv:
    folder = os.path.join(sys.argv[sys.argv.index("--build") + 1], "bin")
    os.makedirs(folder)
    for name in sys.argv[sys.argv.index("--target") + 1 :]:
        with open(os.path.join(folder, name), "w") as program:
            program.write("#!/bin/sh\\nexit {{code}}\\n")
        os.chmod(program.name, 0o755)
    open(os.path.join(folder, "libllama.so"), "w").close()
"""


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: f"{VERSION}+cu124")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    with web_server() as server:
        monkeypatch.setenv(INDEX_VARIABLE, f"{server.url}/simple")
        yield server


def archive_of(*members: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            archive.addfile(tarfile.TarInfo(member))
    return buffer.getvalue()


def publish(server: WebServer, content: bytes) -> None:
    server.resources[f"/{NAME}.tar.gz"] = Resource(content)
    server.resources[PAGE] = index_page({f"/{NAME}.tar.gz": sha256(content)})


def source_folder(folder: Path) -> Path:
    (folder / "vendor" / "llama.cpp").mkdir(parents=True)
    (folder / "vendor" / "llama.cpp" / "CMakeLists.txt").touch()
    return folder


def make_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """A cmake that builds at once; the file that it notes its arguments in."""
    folder, log = tmp_path / "tools", tmp_path / "cmake.log"
    folder.mkdir()
    (folder / "cmake").write_text(CMAKE.format(log=str(log), code=code), encoding="utf-8")
    (folder / "cmake").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL", raising=False)
    monkeypatch.setattr(cmake_args, "is_gcc", lambda _command: True)
    return log


def test_the_source_is_fetched_and_unpacked_once(server: WebServer, tmp_path: Path) -> None:
    publish(server, archive_of(f"{NAME}/vendor/llama.cpp/CMakeLists.txt"))
    root = build_peers.fetch(VERSION, tmp_path)
    assert root == tmp_path / NAME
    assert (root / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert build_peers.fetch(VERSION, tmp_path) == root
    assert len(server.starts(PAGE)) == 1


@posix
def test_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cmake, folder = make_cmake(tmp_path, monkeypatch), tmp_path / "peers"
    build_peers.build(folder, source_folder(tmp_path / "source"))
    configured, built = cmake.read_text(encoding="utf-8").splitlines()
    work, jobs = folder / f"build-{VERSION}" / "cmake", os.cpu_count()
    assert configured.startswith(f"{jobs} -S {tmp_path / 'source'} -B {work} -DCMAKE_BUILD")
    assert built == (
        f"{jobs} --build {work} --config Release --target llama-speculative-simple llama-lookup"
    )
    names = sorted(path.name for path in (folder / "bin").iterdir())
    assert names == ["libllama.so", "llama-lookup", "llama-speculative-simple"]
    assert not work.parent.exists()
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert "compiling" in stderr
    assert f"of llama-cpp-python {VERSION}, which takes some minutes" in stderr


def test_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cmake(tmp_path, monkeypatch)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit) as caught:
        build_peers.main([str(tmp_path / "peers"), "--source", str(empty)])
    assert str(caught.value) == (
        f"{empty} is not an unpacked llama-cpp-python: there is no vendor/llama.cpp"
    )
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(SystemExit, match="^cmake is needed .* cannot be found$"):
        build_peers.main([str(tmp_path / "peers")])
