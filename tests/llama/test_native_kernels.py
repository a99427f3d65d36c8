"""The kernels' own test programs (`kernels/tests`), which need no llama.cpp, find no errors.

`test_kernels_arm.py` runs them in an emulator of another CPU.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.build_kernels import (
    COMMON_FLAGS,
    INSTRUCTION_FLAGS,
    SOURCES,
    X86,
    BuildError,
    compiler,
    run,
)
from tests.helpers.common import ROOT

pytestmark = [
    pytest.mark.skipif(sysconfig.get_platform() != X86, reason="they are for AVX2"),
    pytest.mark.slow,
]
#: For programs with AVX2's code, which not every CPU can run.
needs_kernels = pytest.mark.usefixtures("kernels")

#: See `race_detector`.
RACE_DETECTOR = ("-fsanitize=thread", "-g")


@pytest.fixture(scope="module")
def command() -> list[str]:
    """The command of the C++ compiler."""
    try:
        return compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))


def build(command: Sequence[str], program: Path, *arguments: str) -> Path:
    """Compile a program of `kernels/tests` for AVX2, and return its path."""
    # -O1 takes a third of the time.
    flags = [*COMMON_FLAGS, "-O1", *INSTRUCTION_FLAGS["avx2.cpp"].flags, "-pthread"]
    sources = ROOT / SOURCES
    test = sources / "tests" / f"{program.name}.cpp"
    # Folders of headers among the arguments come before that of the kernels.
    run([*command, *flags, *arguments, f"-I{sources}", os.fspath(test), "-o", os.fspath(program)])
    return program


def source(name: str) -> str:
    """The path of a source file of packed weights."""
    return os.fspath(ROOT / SOURCES / "packed" / name)


@needs_kernels
def test_attention_is_right_for_all_kinds_of_shapes(command: list[str], tmp_path: Path) -> None:
    output = run([os.fspath(build(command, tmp_path / "attention_test"))])
    assert "FAIL" not in output
    assert "ok   AVX2 with halved products: NaN and infinities reach only" in output


def race_detector(command: Sequence[str], folder: Path) -> Sequence[str]:
    """The flags that find data races; none if this compiler or this system lacks them."""
    nothing = folder / "nothing.cpp"
    nothing.write_text("int main() {}\n", encoding="utf-8")
    program = os.fspath(nothing.with_suffix(""))
    try:
        run([*command, *RACE_DETECTOR, os.fspath(nothing), "-o", program])
        run([program])
    except BuildError:
        return ()
    return RACE_DETECTOR


@needs_kernels
@pytest.mark.parametrize("has_readers", [True, False])
def test_streamed_weights_are_right_at_any_moment(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_readers: bool
) -> None:
    """Also if the system has no more threads, so that page faults read them."""
    monkeypatch.setenv("SPECGEN_KERNELS_READ_DELAY_MS", "1")
    flags = race_detector(command, tmp_path) if has_readers else ()
    options = () if has_readers else ("--without-readers",)
    program = build(command, tmp_path / "stream_test", source("weight_stream.cpp"), *flags)
    output = run([os.fspath(program), os.fspath(tmp_path / "packed"), *options])
    assert output.startswith("0 of ")


@needs_kernels
def test_an_error_of_the_disk_is_reported(command: list[str], tmp_path: Path) -> None:
    files = [source("tensor_writer.cpp"), source("packed_format.cpp")]
    program = build(command, tmp_path / "writer_test", *files)
    assert run([os.fspath(program), os.fspath(tmp_path / "packed")]) == "ok\n"


def test_tiles_of_amx_give_each_column_the_bits_that_it_has_alone(
    command: list[str], tmp_path: Path
) -> None:
    """AVX-512 and AMX are emulated; `test_kernel_products.py` tests what the CPU has."""
    emulated = f"-I{ROOT / SOURCES / 'tests' / 'emulated'}"
    output = run([os.fspath(build(command, tmp_path / "amx_test", emulated))])
    checked = [line.removesuffix(" checked") for line in output.splitlines()]
    assert {"q4_0", "q8_0", "q2_k", "q4_k", "q6_k", "iq4_xs", "mxfp4"} <= {*checked}
