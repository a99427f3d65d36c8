"""The wheel for x86-64 Linux, in an environment that has nothing: no compiler, no caches, no llama-cpp-python.

`make dist` builds the wheel. Without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from specgen import __version__
from specgen.system.llama_build import REQUIRED_VERSION
from tests.helpers.common import ROOT

WHEEL = ROOT / "dist" / f"specgen_gguf-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
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
        [
            json.loads(line)
            for line in run("specgen", "run", *arguments, "--draft", draft).splitlines()
        ]
        for draft in ("none", "ngram")
    )
    assert plain[0]["kernels"].startswith("specgen ")
    texts = [
        "".join(piece["text"] for event in events for piece in event.get("pieces", ()))
        for events in (plain, drafted)
    ]
    assert texts[0]
    assert texts[0] == texts[1]


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
