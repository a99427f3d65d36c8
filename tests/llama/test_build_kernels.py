"""scripts/build_kernels.py compiles the kernels if it can, only once, and never breaks the
installation.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scripts import build_kernels
from scripts.build_kernels import LIBRARY, PLATFORMS, SOURCES, BuildError, fingerprint, plan
from tests.helpers.common import ROOT

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="compilers as scripts"),
    pytest.mark.slow,
]

#: A compiler that records how it is called and creates an empty output. It does not know the flag
#: `refused`, and cannot compile a file that contains the word `error`.
COMPILER = """#!{python}
import sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
if "--version" in arguments:
    print({version!r})
    sys.exit()
if {refused!r} in arguments:
    sys.exit("unrecognized option")
for argument in arguments:
    if argument.endswith(".cpp") and "error" in open(argument).read():
        sys.exit(argument + ":1: error: nonsense")
if "-o" in arguments:
    open(arguments[arguments.index("-o") + 1], "w").close()
"""

#: For x86-64, whatever this machine is.
build = partial(build_kernels.build, platform=build_kernels.X86)


class Compiler:
    """A compiler that compiles nothing."""

    def __init__(self, folder: Path, *, refused: str = "", version: str = "1.0") -> None:
        folder.mkdir(exist_ok=True)
        self._log = folder / "log"
        self.path = folder / "compiler"
        script = COMPILER.format(
            python=sys.executable, log=str(self._log), refused=refused, version=version
        )
        self.path.write_text(script)
        self.path.chmod(0o755)
        self.environment = {"CXX": str(self.path)}

    def commands(self) -> list[list[str]]:
        """Return the commands that compiled or linked since the last call of this method."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        calls = [words for words in map(str.split, lines) if "-o" in words]
        # Without those that only test whether it knows some flags.
        return [words for words in calls if not any(word.endswith("nothing.cpp") for word in words)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The source of a library."""
    folder = tmp_path / "source"
    names = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "amx_int8", "neon_dotprod")
    files = {f"instruction_sets/{name}.cpp": f"int {name};\n" for name in names}
    files["ggml/attach.cpp"] = "int attach;\n"
    files["vectors/vector.h"] = "int vector;\n"
    files["tests/some_test.cpp"] = "int not_compiled;\n"
    for path, text in files.items():
        file = folder / SOURCES / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path / "compiler")


def test_nothing_is_compiled_twice(source: Path, compiler: Compiler, tmp_path: Path) -> None:
    header = source / SOURCES / "vectors" / "vector.h"
    stamp = (source / LIBRARY).with_name(build_kernels.STAMP)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: header.write_text("int other;\n"),
        lambda: Compiler(tmp_path / "compiler", version="2.0"),
        (source / LIBRARY).unlink,
        lambda: stamp.write_text("nonsense"),
    ]
    for change in changes:
        change()
        for n_commands in (7, 0):
            build(source, compiler.environment)
            assert len(compiler.commands()) == n_commands
    build(source, compiler.environment, force=True)
    assert len(compiler.commands()) == 7


def test_other_flags_make_another_library(source: Path, compiler: Compiler) -> None:
    command = [str(compiler.path)]
    folder = source / SOURCES
    steps = plan(command, [Path("ggml/attach.cpp")], build_kernels.X86)
    other_steps = [replace(step, flags=("-O1",)) for step in steps]
    assert fingerprint(folder, command, steps) == fingerprint(folder, command, steps)
    assert fingerprint(folder, command, steps) != fingerprint(folder, command, other_steps)


def test_a_file_is_left_out_if_the_compiler_does_not_know_its_flags(
    source: Path, tmp_path: Path
) -> None:
    compiler = Compiler(tmp_path / "compiler", refused="-mavxvnni")
    build(source, compiler.environment)
    compiled = compiled_files(compiler.commands())
    assert "avx_vnni.cpp" not in compiled
    assert "-DWITHOUT_AVX_VNNI" in compiled["attach.cpp"]
    assert "-DWITHOUT_AVX512_VNNI" not in compiled["attach.cpp"]


def compiled_files(commands: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return the commands that compiled, by the name of the file."""
    by_name = {}
    for words in commands:
        for word in words:
            if word.endswith(".cpp"):
                by_name[Path(word).name] = words
    return by_name


def test_a_failure_is_reported_and_leaves_no_older_library(
    source: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    build(source, compiler.environment)
    (source / SOURCES / "ggml" / "attach.cpp").write_text("error\n")
    capsys.readouterr()
    assert build(source, compiler.environment) is None
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "attach.cpp:1: error: nonsense" in printed.err
    last = printed.err.splitlines()[-1]
    assert last.startswith("the kernels are not built: ")
    assert "could not build attach.cpp" in last
    assert last.endswith("specgen works without them")
    assert list((source / LIBRARY).parent.iterdir()) == []


def test_without_a_compiler_there_are_no_kernels(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert build(source, {}) is None
    assert build(source, {"CXX": "nothing -x"}) is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "there is no C++ compiler" in lines[0]
    assert "nothing" in lines[1]
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(source, {build_kernels.VARIABLE: "required"})
    with pytest.raises(BuildError, match="it can be auto, off, required"):
        build(source, {build_kernels.VARIABLE: "perhaps"})


# --- the wheel ------------------------------------------------------------------------------


def wheel_of(source: Path, folder: Path) -> tuple[str, set[str], str]:
    """Build a wheel from a source. Return its name, its files and its tags."""
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        names = set(wheel.namelist())
        about = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        return Path(built).name, names, wheel.read(about).decode()


@pytest.fixture
def package(source: Path) -> Path:
    """A source that can be built in the way of this project."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "models.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, source / name)
    (source / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "build_kernels.py", source / "scripts")
    (source / "specgen").mkdir()
    shutil.copy(ROOT / "specgen" / "__init__.py", source / "specgen")
    (source / ".gitignore").write_text("/specgen/llama/*.so\n/specgen/llama/*.json\n")
    return source


@pytest.mark.skipif(sysconfig.get_platform() not in PLATFORMS, reason="no kernels here")
@pytest.mark.parametrize("outcome", ["built", "off", "failed"])
def test_a_wheel_with_kernels_is_tagged_for_this_platform(
    package: Path,
    tmp_path: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
) -> None:
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.delenv(build_kernels.VARIABLE, raising=False)
    # What an earlier build left is not packed.
    build_kernels.build(package, compiler.environment)
    if outcome == "off":
        monkeypatch.setenv(build_kernels.VARIABLE, "off")
    if outcome == "failed":
        for name in ("avx2.cpp", "neon_dotprod.cpp"):
            (package / SOURCES / "instruction_sets" / name).write_text("error\n")
    name, files, about = wheel_of(package, tmp_path / "wheels")
    has_kernels = outcome == "built"
    assert (LIBRARY in files) == has_kernels
    platform = sysconfig.get_platform().replace("-", "_")
    tag = f"py3-none-{platform}" if has_kernels else "py3-none-any"
    assert name.endswith(f"-{tag}.whl")
    assert f"Tag: {tag}" in about
    assert f"Root-Is-Purelib: {str(not has_kernels).lower()}" in about
