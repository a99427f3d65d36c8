"""The wheels, in an environment without a compiler, caches or llama-cpp-python.

`make dist` builds them. The wheel for ARM is tested on an ARM machine, or with an emulated Python
whose path is in ARM_PYTHON (docs/platforms.md). Missing wheels are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import build_wheel
from scripts.build_peers import BuildError
from specgen import __version__
from specgen.system.llama_build import REQUIRED_VERSION
from tests.helpers.common import ROOT

MACHINES = ("x86_64", "aarch64")
#: Where pip finds the dependencies, and what the emulator is told.
_KEPT = ("PIP_", "SSL_", "REQUESTS_", "http_", "https_", "HTTP_", "HTTPS_", "no_proxy", "QEMU_")
#: A program that writes the tiny model of the self-test to the file it is given.
_TINY = (
    "import sys, pathlib, specgen.measure.diagnosis as diagnosis; "
    "diagnosis.write_tiny_model(pathlib.Path(sys.argv[1]))"
)

#: Runs a program of an environment with the wheel, and returns what is on its standard output.
Run = Callable[..., str]


def python_for(machine: str) -> str | None:
    if machine == platform.machine():
        return sys.executable
    return os.environ.get("ARM_PYTHON") if machine == "aarch64" else None


def wheel_for(machine: str) -> Path:
    return ROOT / "dist" / f"specgen_gguf-{__version__}-py3-none-manylinux_2_28_{machine}.whl"


@pytest.fixture(scope="module")
def run_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Returns what runs programs of the wheel for a machine."""

    @functools.cache
    def run_on(machine: str) -> Run:
        python, wheel = python_for(machine), wheel_for(machine)
        if python is None or not wheel.is_file():
            pytest.skip("make dist builds the wheel; ARM_PYTHON names an emulated Python for ARM")
        folder = tmp_path_factory.mktemp("clean")
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
        programs = folder / "venv" / "bin"
        # On PATH are the programs of the environment only.
        environment = {**kept, "HOME": str(folder / "home"), "PATH": str(programs)}

        def run(program: str, *arguments: str) -> str:
            ended = subprocess.run(
                [programs / program, *arguments],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        assert run("python", "-c", "import platform; print(platform.machine())").strip() == machine
        run("python", "-m", "pip", "install", "--quiet", "--no-cache-dir", f"{wheel}[server]")
        run("python", "-c", _TINY, "tiny.gguf")
        return run

    return run_on


@pytest.fixture(params=MACHINES)
def run(request: pytest.FixtureRequest, run_on: Callable[[str], Run]) -> Run:
    return run_on(request.param)


def answer(run: Run, draft: str) -> tuple[str, str]:
    """The kernels that computed, and the text."""
    arguments = ("-m", "tiny.gguf", "--temp", "0", "-n", "12", "--json", "--draft", draft, "Hello")
    events = [json.loads(line) for line in run("specgen", "run", *arguments).splitlines()]
    pieces = [piece["text"] for event in events for piece in event.get("pieces", ())]
    return events[0]["kernels"], "".join(pieces)


def test_it_uses_the_bundled_llama_cpp_and_kernels(run: Run) -> None:
    installed = run("python", "-m", "pip", "list", "--format", "json")
    assert "llama-cpp-python" not in {
        each["name"].replace("_", "-") for each in json.loads(installed)
    }
    kernels, plain = answer(run, "none")
    assert kernels.startswith("specgen ")
    assert answer(run, "ngram") == (kernels, plain)
    assert plain


def test_the_wheel_for_arm_gives_the_same_text(run_on: Callable[[str], Run]) -> None:
    (x86, text), (arm, arm_text) = (answer(run_on(machine), "ngram") for machine in MACHINES)
    assert arm == "specgen neon-dotprod" != x86
    assert arm_text == text


def test_doctor_finds_nothing_wrong(run: Run) -> None:
    report = json.loads(run("specgen", "doctor", "--json"))
    assert report["healthy"]
    assert report["build"]["version"] == REQUIRED_VERSION
    assert report["kernels"]["computes"] == "specgen"


def test_workers_know_their_protocol(run: Run) -> None:
    program = "from specgen.system.worker_probe import own_protocol; print(own_protocol())"
    assert run("python", "-c", program).strip().count(".") == 2
    assert "RPC" in run(
        "python", "-c", "from specgen.llama.rpc import load_rpc; print('RPC', load_rpc())"
    )


def test_the_licences_of_bundled_software_are_included(run: Run) -> None:
    program = (
        "import pathlib, specgen.llama as s; b = pathlib.Path(s.__file__).parent / 'bundled'; "
        "print(*(path.read_text() for path in sorted(b.glob('LICENSE*'))))"
    )
    assert run("python", "-c", program).count("MIT License") == 2


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_that_wait_leave_their_cores_to_other_programs(machine: str) -> None:
    if not wheel_for(machine).is_file():
        pytest.skip("make dist builds the wheel")
    with zipfile.ZipFile(wheel_for(machine)) as wheel:
        variants = [name for name in wheel.namelist() if "/libggml-cpu-" in name]
        assert variants
        assert all(b"usleep" in wheel.read(name) for name in variants)


def test_another_barrier_of_llama_cpp_is_not_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ggml-cpu.c"
    file.write_text(f"void ggml_barrier() {{\n{build_wheel._SPINS}}}\n", encoding="utf-8")  # noqa: SLF001
    for _ in range(2):
        build_wheel.sleep_at_barriers(file)
        assert file.read_text(encoding="utf-8").count("usleep") == 1
    file.write_text("void ggml_barrier() {}\n", encoding="utf-8")
    with pytest.raises(BuildError):
        build_wheel.sleep_at_barriers(file)
