"""The wheel for this machine, in an environment that has nothing: no compiler, no caches, no llama-cpp-python.

`make dist` builds the wheel. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specgen import __version__
from specgen.system.llama_build import REQUIRED_VERSION
from tests.helpers.common import ROOT


def wheel_for(machine: str) -> Path:
    return ROOT / "dist" / f"specgen_gguf-{__version__}-py3-none-manylinux_2_28_{machine}.whl"


WHEEL = wheel_for(platform.machine())
pytestmark = pytest.mark.skipif(not WHEEL.is_file(), reason="make dist builds the wheel")
#: Where pip finds the dependencies.
_NETWORK = ("PIP_", "SSL_", "REQUESTS_", "http_", "https_", "HTTP_", "HTTPS_", "no_proxy")
_TINY = "import sys, pathlib, specgen.testing.tiny as t; t.write_tiny_model(pathlib.Path(sys.argv[1]), t.TinyConfig())"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment with the wheel, and returns what is on its standard output."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    kept = {name: value for name, value in os.environ.items() if name.startswith(_NETWORK)}
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

    run("python", "-m", "pip", "install", "--quiet", "--no-cache-dir", f"{WHEEL}[server]")
    run("python", "-c", _TINY, "tiny.gguf")
    return run


def test_it_answers_with_its_own_llama_cpp_and_kernels(run: Run) -> None:
    installed = run("python", "-m", "pip", "list", "--format", "json")
    assert "llama-cpp-python" not in {
        each["name"].replace("_", "-") for each in json.loads(installed)
    }
    arguments = ("-m", "tiny.gguf", "--temp", "0", "-n", "12", "--json", "Hello")
    plain, drafted = (
        run("specgen", "run", *arguments, "--draft", draft) for draft in ("none", "ngram")
    )
    assert json.loads(plain.splitlines()[0])["kernels"].startswith("specgen ")
    assert text_of(plain) == text_of(drafted) != ""


def text_of(lines: str) -> str:
    events = map(json.loads, lines.splitlines())
    return "".join(piece["text"] for event in events for piece in event.get("pieces", ()))


@pytest.mark.skipif(
    "ARM_PYTHON" not in os.environ or not wheel_for("aarch64").is_file(),
    reason="needs a Python for ARM (ARM_PYTHON), and make dist MACHINES=aarch64",
)
def test_the_wheel_for_arm_gives_the_same_text(run: Run, tmp_path: Path) -> None:
    python = shlex.split(os.environ["ARM_PYTHON"])
    about = "import platform; print(platform.machine(), *platform.python_version_tuple()[:2])"
    machine, *version = subprocess.check_output([*python, "-c", about], text=True).split()
    assert machine == "aarch64"
    tags = [f"--platform=manylinux_2_{glibc}_aarch64" for glibc in (28, 27, 24, 17)]
    python_version = f"--python-version={'.'.join(version)}"
    run(
        *("python", "-m", "pip", "install", "--quiet", "--no-cache-dir", "--only-binary=:all:"),
        *(*tags, python_version, "--target", str(tmp_path / "site"), str(wheel_for("aarch64"))),
    )
    run("python", "-c", _TINY, str(tmp_path / "tiny.gguf"))
    arguments = (
        *("run", "-m", str(tmp_path / "tiny.gguf"), "--draft", "ngram"),
        *("--temp", "0", "-n", "12", "--json", "-t", "1", "Hello"),
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": os.defpath}
    ended = subprocess.run(
        [*python, "-m", "specgen", *arguments],
        env=environment | {n: v for n, v in os.environ.items() if n.startswith("QEMU_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[0])["kernels"] == "specgen neon-dotprod"
    assert text_of(ended.stdout) == text_of(run("specgen", *arguments)) != ""


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


def test_the_licences_of_what_it_carries_are_there(run: Run) -> None:
    program = (
        "import pathlib, specgen.llama as s; b = pathlib.Path(s.__file__).parent / 'bundled'; "
        "print(*(path.read_text() for path in sorted(b.glob('LICENSE*'))))"
    )
    assert run("python", "-c", program).count("MIT License") == 2
