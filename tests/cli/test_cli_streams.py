"""The process of the command: standard streams that are closed, and Ctrl-C at bad moments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import ended
from tests.helpers.common import ROOT

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs POSIX descriptors and signals"),
    pytest.mark.usefixtures("tested_kernels"),
]
#: Sends Ctrl-C to its own process when this module is imported.
_INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
class Interrupting:
    @staticmethod
    def find_spec(name, *_):
        if name == "specgen.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting)
from specgen.__main__ import main
main()
"""


def shell(command: str, models: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a command of a shell, in which ``specgen`` and ``$MODELS`` are known."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MODELS": str(models)}
    python = f'specgen() {{ "{sys.executable}" -m specgen "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", python + command],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )


RUN = "specgen run -m $MODELS/target.gguf -md $MODELS/draft.gguf -t 1 -n 8 -fa off -q hello"


def test_closed_streams(tiny_models: Path) -> None:
    whole = shell(RUN, tiny_models)
    assert whole.returncode == 0
    assert whole.stdout
    # Daemons and cron close what they do not need: that is no reason not to answer.
    for closed in ("2>&-", "<&- 2>&-"):
        done = shell(f"{RUN} {closed}", tiny_models)
        assert (done.returncode, done.stdout, done.stderr) == (0, whole.stdout, b"")
    for closed in (">&- <&-",):
        done = shell(f"{RUN} {closed}", tiny_models)
        assert done.returncode == 10
        assert done.stderr == b"error: the output could not be written: standard output is closed\n"
    assert shell(f"{RUN} >&- 2>&-", tiny_models).returncode == 10


def test_other_commands_without_standard_output(tiny_models: Path) -> None:
    line = b"error: the output could not be written: "
    for command in ("specgen models list", "specgen --version", "specgen run --help"):
        done = shell(f"{command} >&-", tiny_models)
        assert done.returncode == 10
        assert done.stderr == line + b"standard output is closed\n"
    if Path("/dev/full").exists():
        for command in ("specgen --version", RUN, f"{RUN} --json"):
            done = shell(f"{command} >/dev/full", tiny_models)
            assert done.returncode == 10
            full = line + b"No space left on device\nhint: make room on the disk\n"
            assert done.stderr == full


def test_what_is_read_from_a_closed_stream_is_empty(tiny_models: Path) -> None:
    done = shell(RUN.replace("hello", "-") + " <&-", tiny_models)
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: the prompt is empty\n")


def test_ctrl_c_during_imports_is_quiet() -> None:
    done = ended(code=_INTERRUPTED_IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
