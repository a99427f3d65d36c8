"""`specgen doctor` detects a build that cannot decode, and gives a hint."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from pathlib import Path

import pytest

from specgen.cli import app
from specgen.errors import BackendError, ModelFileError
from specgen.measure import diagnosis as doctor
from specgen.system.folders import cache_folder
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION, Build
from tests.helpers.cli import python
from tests.helpers.common import posix
from tests.tiny import TinyConfig, write_tiny_model

pytestmark = pytest.mark.slow


def dying(number: signal.Signals, *, task: str = "") -> list[str]:
    """A child that does its work, but kills itself where `task` is among its arguments."""
    return python(
        "import os, sys\n"
        "from specgen.measure.diagnosis import child_main\n"
        f"if {task!r} in ['', *sys.argv]: os.kill(os.getpid(), {int(number)})\n"
        "child_main(sys.argv[1:])"
    )


def run_cli(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app.main(["doctor", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


# --- a child and its end --------------------------------------------------------------------


@posix
@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (signal.SIGILL, REBUILD),
        (signal.SIGABRT, "build llama.cpp again"),
        (signal.SIGKILL, "memory"),
    ],
)
def test_signals_are_named_with_their_cure(
    number: signal.Signals, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHILD_COMMAND", dying(number))
    with pytest.raises(BackendError, match=rf"{number.name} \([a-z ]+\)") as caught:
        doctor.run_child(["build"], 60)
    assert hint in str(caught.value.hint)
    assert "\n" not in f"{caught.value.message}{caught.value.hint}"


# --- the real thing -------------------------------------------------------------------------


def test_this_build_decodes() -> None:
    tried: list[str] = []
    report = doctor.diagnose(on_check=tried.append)
    assert report.healthy, report.checks
    report.raise_first_error()
    assert tried == [check.name for check in report.checks]
    assert tried[:2] == ["loading llama.cpp", "decoding on the CPU"]
    assert report.build is not None
    assert report.build.version.startswith("0.3.")
    assert any(device.kind == "cpu" for device in report.build.devices)
    assert report.machine.cpu
    assert 0 < report.machine.available_bytes < report.machine.memory_bytes
    json_object = report.to_json_object()
    assert json.loads(json.dumps(json_object)) == json_object
    assert json_object["healthy"] is True


def test_a_model_of_the_user_is_decoded_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_model(tmp_path / "own.gguf", TinyConfig(tokenizer="spm", tensor_type="q4_1"))
    assert run_cli("--model", str(path), "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["healthy"], err) == (True, "")
    messages = {check["name"]: check["message"] for check in report["checks"]}
    assert "24 tokens" in messages["own.gguf"]
    has_kernels = report["kernels"]["computes"] == "specgen"
    assert ("rows are the same in any batch" in messages["own.gguf"]) == has_kernels


@pytest.mark.parametrize("is_model", [True, False])
def test_a_file_that_does_not_generate_is_at_fault_and_nothing_else(
    tmp_path: Path, is_model: bool
) -> None:
    path = write_tiny_model(tmp_path / "bert.gguf", TinyConfig(architecture="bert", n_ctx_train=64))
    if not is_model:
        path.write_text("hello")
    report = doctor.diagnose(path)
    assert [check.name for check in report.checks if not check.passed] == [path.name]
    with pytest.raises(ModelFileError, match=r"^bert\.gguf: (?!bert)"):
        report.raise_first_error()


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_without_llama_cpp_the_hint_says_how_to_install_it(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text(f"raise {error}('libllama.so: not found')")
    child = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from specgen.measure.diagnosis import child_main\n"
        "child_main(sys.argv[1:])"
    )
    monkeypatch.setattr(doctor, "CHILD_COMMAND", child)
    report = doctor.diagnose()
    assert report.build is None
    assert [check.passed for check in report.checks] == [False]
    with pytest.raises(BackendError, match="not found") as caught:
        report.raise_first_error()
    assert "pip install" in str(caught.value.hint)


# --- the report -----------------------------------------------------------------------------


def test_the_command_shows_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "llama-cpp-python" in out
    assert "GPU offload" in out
    assert str(cache_folder()) in out
    assert out.count("  ok  ") >= 2
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_a_long_path_is_shown_in_full_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("a" * 40) / ("b" * 40)
    monkeypatch.setenv("SPECGEN_DATA", str(folder))
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, this is a terminal
    monkeypatch.setenv("COLUMNS", "60")
    assert run_cli() == 0
    out, _ = capsys.readouterr()
    words = re.sub(r"\x1b\[[0-9;]*m", "", out).split()
    assert str(folder) in "".join(words)


def test_another_llama_cpp_python_is_named_with_the_one_that_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "places_of", lambda _build: [])
    for version, remark in (
        (REQUIRED_VERSION, ""),
        (f"{REQUIRED_VERSION}+cu124", ""),
        ("9.8.7", f": specgen is made for {REQUIRED_VERSION}; {REBUILD}"),
    ):
        build = Build(version, "0.6.0", "", gpu_offload=False, devices=())
        child = python(f"print({json.dumps(dataclasses.asdict(build))!r})")
        monkeypatch.setattr(doctor, "CHILD_COMMAND", child)
        loaded, *_ = doctor.diagnose().checks
        assert loaded.message == f"llama-cpp-python {version}{remark}"


@posix
@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_build_that_does_not_decode_exits_with_9(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHILD_COMMAND", dying(signal.SIGILL, task="decode"))
    assert run_cli(*arguments) == BackendError.exit_code == 9
    out, err = capsys.readouterr()
    assert err.startswith("error: decoding on the CPU: llama.cpp died of SIGILL")
    assert f"\nhint: {err.partition('hint: ')[2]}" in err
    assert REBUILD in err
    assert "SIGILL" in out


def test_a_missing_model_is_named_and_not_downloaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specgen.models import hub_names
    from specgen.models.registry import load_registry

    monkeypatch.setattr(hub_names, "locate", lambda _model: None)
    known = next(iter(load_registry().models))
    for model, code, hint in (
        ("no-such-model", 6, "specgen models"),
        ("missing.gguf", 4, ""),
        (known, ModelFileError.exit_code, f"specgen models pull {known}"),
    ):
        assert run_cli("--model", model) == code
        err = capsys.readouterr().err
        assert model in err
        assert hint in err
