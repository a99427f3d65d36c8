"""Folders that cannot be written, memory that runs out, caches that vanish: the result is an answer
or a one-line error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import MemoryLimitError
from specgen.options import ContextOptions, DraftOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine, generate
from specgen.session.measurement_store import MeasurementStore
from specgen.session.session import Session
from tests.helpers.cli import ended
from tests.helpers.sessions import answers, options_of

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
SHORT = ("-t", "1", "-n", "12")
#: Bytes of address space: Python, llama.cpp and a tiny model have room in it.
LIMITED = """
import resource, sys
limit = 3 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from specgen.cli.app import main
main(sys.argv[1:])
"""
#: Root may write anywhere. Without its capabilities, it is an ordinary user after an exec.
WITHOUT_CAPABILITIES = """
import ctypes, os, sys
drop = 24  # PR_CAPBSET_DROP
if os.geteuid() == 0:
    for capability in range(64):
        ctypes.CDLL(None).prctl(drop, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

#: What is measured is kept only where other programs, other tests among them, leave the machine
#: alone.
ON_AN_IDLE_MACHINE = """
import sys
from specgen.cli.app import main
from specgen.system import machine
machine.share_of_others = lambda *_: 0.0
main(sys.argv[1:])
"""


def run(
    arguments: Sequence[str | Path], *, code: str, **env: str
) -> subprocess.CompletedProcess[str]:
    return ended(*arguments, code=code, stdin=f"{PROMPT}\n", env=env)


@pytest.fixture
def read_only(tmp_path: Path) -> dict[str, str]:
    """Folders that this process's children may not write to; skipped if they may all the same."""
    if sys.platform != "linux":
        pytest.skip("rights are dropped as on Linux")
    folders = {}
    for name in ("cache", "config", "data"):
        folder = tmp_path / name
        folder.mkdir()
        folder.chmod(0o555)
        folders[f"SPECGEN_{name.upper()}"] = str(folder)
    probe = run(
        ["-c", f"open({str(tmp_path / 'cache' / 'file')!r}, 'w')"], code=WITHOUT_CAPABILITIES
    )
    if "PermissionError" not in probe.stderr:
        pytest.skip("this user may write anywhere")
    return folders


@pytest.mark.parametrize(
    "command",
    [
        ("run", PROMPT),
        ("run", "--lookup-store", PROMPT),
        ("tune", "-N", "1"),
        ("draft", "find", "-N", "1"),
        ("bench", "-N", "1"),
        ("chat",),
        ("batch", "-", "-"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_folders_that_cannot_be_written_cost_no_answer(
    read_only: dict[str, str], tiny_models: Path, command: tuple[str, ...]
) -> None:
    target = tiny_models / "chat.gguf"
    arguments: list[str | Path] = ["-m", "specgen", *command, "-m", target, *SHORT]
    result = run(arguments, code=WITHOUT_CAPABILITIES, **read_only)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (("draft", "find", "--save", "-N", "1"), "SPECGEN_CONFIG"),
        (("draft", "data"), "SPECGEN_CACHE"),
    ],
)
def test_a_required_file_that_cannot_be_written_is_a_one_line_error(
    read_only: dict[str, str], tiny_models: Path, command: tuple[str, ...], variable: str
) -> None:
    target = tiny_models / "target.gguf"
    arguments: list[str | Path] = ["-c", ON_AN_IDLE_MACHINE, *command, "-q", "-m", target, *SHORT]
    result = run(arguments, code=WITHOUT_CAPABILITIES, **read_only)
    assert result.returncode == 10, result.stderr
    errors = [line for line in result.stderr.splitlines() if not line.startswith("hint: ")]
    assert len(errors) == 1
    assert read_only[variable] in errors[0]


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on address space")
@pytest.mark.parametrize(
    "command", [("run",), ("chat",), ("batch", "-", "-"), ("tune",), ("serve", "--port", "0")]
)
def test_running_out_of_memory_is_a_one_line_error(
    tiny_models: Path, command: tuple[str, ...]
) -> None:
    model = ("-m", tiny_models / "chat.gguf", "-md", "ngram")
    arguments: list[str | Path] = [*command, *model, "-t", "1"]
    if command == ("run",):  # the limit itself leaves room for a model
        small = run([*arguments, "-n", "4", "-c", "256"], code=LIMITED)
        assert small.returncode == 0, small.stderr
    result = run([*arguments, "-c", "30000000"], code=LIMITED)
    assert result.returncode == MemoryLimitError.exit_code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("fault", ["gone", "a file", "garbage"])
def test_a_cache_that_vanishes_while_it_is_in_use_changes_nothing(
    tiny_models: Path, tmp_path: Path, fault: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    context = ContextOptions(n_threads=1)
    more: dict[str, Any] = {"drafting": DraftOptions(lookup_store=True), "cache": cache}
    options = options_of(tiny_models / "target.gguf", "draft", context=context, **more)
    measurements = MeasurementStore(cache / "learnt.json")
    with Session(options, time.perf_counter, measurements) as loaded, Engine(loaded) as engine:
        calibrate(loaded)
        (before,) = answers(engine, [PROMPT])
        measurements.save()
        files = [path for path in cache.rglob("*") if path.is_file()]
        assert files
        if fault == "garbage":
            for path in files:
                path.write_bytes(b"\xff\x00garbage")
        else:
            shutil.rmtree(cache)
            if fault == "a file":
                cache.write_text("no folder")
        (after,) = answers(engine, [PROMPT])
        measurements.save()
    assert after == before
    with Session(options, time.perf_counter, MeasurementStore(cache / "learnt.json")) as loaded:
        *_, again = generate(loaded, loaded.prompts.of_text(PROMPT))
    assert getattr(again, "text", None) == before
