"""A crash in native code is reported in one line, with an exit code."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from specgen.cli import app
from specgen.errors import BackendError, MemoryLimitError
from specgen.llama import file_check
from specgen.llama.native_failures import summarize_assertion
from specgen.system.files import KeptResults
from specgen.system.folders import cache_folder
from tests.helpers.cli import ended
from tests.helpers.tiny import with_a_token_twice

TRUNCATED = """
import mmap, sys
from specgen.llama.native_failures import report_native_failures
report_native_failures(sys.stdout.flush)
print("what was said so far")
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    mapped[5000]
"""
#: A context of GGML for which there is no memory.
NO_MEMORY = """
import ctypes, resource
from specgen.llama.library import ggml
from specgen.llama.native_failures import report_native_failures
report_native_failures()
class Parameters(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]
limit = 2**36
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
ggml("ggml_init", ctypes.c_void_p, Parameters)(Parameters(2 * limit, None, False))
"""


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_failed_assertion_is_one_line(tmp_path: Path, tiny_models: Path, role: str) -> None:
    damaged = with_a_token_twice(tmp_path / "twice.gguf")
    # Wrongly: it would be refused otherwise.
    kept = KeptResults(cache_folder() / file_check.FILE_NAME)
    kept.add({file_check.checked_key(damaged): True})
    target = damaged if role == "target" else tiny_models / "target.gguf"
    draft = damaged if role == "draft" else "none"
    command = ("run", "-m", target, "-md", draft, "-n", "4", "abc")
    result = ended(*command)
    assert result.returncode == BackendError.exit_code
    assert result.stdout == ""
    message, hint = result.stderr.splitlines()
    assert message.startswith("error: llama.cpp gave up at ")
    assert hint.startswith("hint: ")
    assert "GGML_ASSERT" not in result.stderr
    assert "GGML_ASSERT" in ended(*command, "-v").stderr


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="a signal of Unix")
def test_a_file_that_became_shorter_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mapped").write_bytes(bytes(8192))
    result = ended(tmp_path / "mapped", code=TRUNCATED)
    assert result.returncode == BackendError.exit_code
    assert result.stdout == "what was said so far\n"
    message, hint = result.stderr.splitlines()
    assert message == "error: a file became shorter while it was read: a model, most likely"
    assert hint.startswith("hint: ")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on address space")
def test_memory_that_runs_out_in_native_code_is_one_line() -> None:
    result = ended(code=NO_MEMORY)
    assert result.returncode == MemoryLimitError.exit_code
    message, hint = result.stderr.splitlines()
    assert message.startswith("error: there is not enough memory: ")
    assert "damaged" not in hint


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("a.so: failed to map segment from shared object")]
)
def test_memory_that_runs_out_in_python_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    with pytest.raises(SystemExit) as end:
        app.main([])
    assert end.value.code == MemoryLimitError.exit_code
    message, _hint = capsys.readouterr().err.splitlines()
    assert message == "error: there is not enough memory"


def test_the_message_names_the_place_and_no_path() -> None:
    message = "/somewhere/src/llama-vocab.cpp:12: GGML_ASSERT(a == b) failed\n"
    assert summarize_assertion(message) == "llama.cpp gave up at llama-vocab.cpp:12"
    assert summarize_assertion("no place\nat all") == "llama.cpp gave up"
