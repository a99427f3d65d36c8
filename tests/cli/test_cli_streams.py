"""The process of a command: closed streams, Ctrl-C at bad moments, and drafters that hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from tests.helpers.cli import ended, models_of, on_terminal, rest_of, spawn
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
    """Run a command of a shell that knows ``specgen`` and ``$MODELS``."""
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


def test_only_a_closed_standard_output_is_an_error(tiny_models: Path) -> None:
    whole = shell(RUN, tiny_models)
    assert whole.returncode == 0
    assert whole.stdout
    # Daemons and cron close what they do not need, and logs fill disks: the answer goes on.
    for closed in ("2>&-", "<&- 2>&-", "2>/dev/full"):
        done = shell(f"{RUN.replace('-q', '')} {closed}", tiny_models)
        assert (done.returncode, done.stdout, done.stderr) == (0, whole.stdout, b"")
    done = shell(f"{RUN} >&- <&-", tiny_models)
    assert done.returncode == 10
    assert done.stderr == b"error: the output could not be written: standard output is closed\n"
    assert shell(f"{RUN} >&- 2>&-", tiny_models).returncode == 10


def test_every_command_needs_standard_output(tiny_models: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor", "models list", "config", "run --help"])
def test_every_command_ends_quietly_if_nobody_reads_its_output(command: str) -> None:
    with spawn(*command.split()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_a_closed_standard_input_is_read_as_empty(tiny_models: Path) -> None:
    done = shell(RUN.replace("hello", "-") + " <&-", tiny_models)
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: the prompt is empty\n")


def test_standard_input_that_does_not_end_is_awaited_with_a_note(tiny_models: Path) -> None:
    target = str(tiny_models / "target.gguf")
    options = ["-m", target, "-md", "none", "-t", "1", "-n", "5"]
    with spawn("run", *options, "-", stdin=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert "waiting for the end of standard input" in process.stderr.readline()
            process.communicate("why?", timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0


def test_ctrl_c_during_imports_is_quiet() -> None:
    done = ended(code=_INTERRUPTED_IMPORT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# --- a drafter that never returns: the first Ctrl-C waits for the round, a second one ends it

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
EXACT = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-n", "40", "-q")
#: Hangs in its fourth draft, and writes to the descriptor that is named first for as long.
HANGS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
from specgen.drafters.ngram import SuffixDrafter
from specgen.__main__ import main
descriptor, drafts, propose = int(sys.argv.pop(1)), [], SuffixDrafter.propose
def hang(*arguments, **options):
    drafts.append(1)
    while len(drafts) > 3:
        os.write(descriptor, b".")
        time.sleep(0.01)
    return propose(*arguments, **options)
SuffixDrafter.propose = hang
main()
"""


def interrupted_twice(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command whose drafter hangs."""
    reader, writer = os.pipe()
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "text": True, "pass_fds": [writer]}
    with spawn(str(writer), *arguments, code=HANGS, **streams) as process:
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write(PROMPT + "\n")
        process.stdin.close()
        process.stdin = None
        try:
            assert os.read(reader, 1) == b"."
            process.send_signal(signal.SIGINT)
            os.read(reader, 2**16)  # what was written before
            for _ in range(5):  # it still hangs
                assert os.read(reader, 1) == b"."
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(reader)
    return process.returncode, out, err


def test_a_second_ctrl_c_ends_an_answer_whose_drafter_hangs(tiny_models: Path) -> None:
    options = ["-m", str(tiny_models / "target.gguf"), "-md", "ngram", "--policy", "fixed", *EXACT]
    code, out, err = interrupted_twice(["run", *options, PROMPT])
    assert code == 130
    assert "Traceback" not in err
    plain = ended("run", *options, PROMPT, stdin=f"{PROMPT}\n").stdout
    shown = out.rstrip("\n\ufffd")
    assert shown
    assert plain.startswith(shown)
    assert len(shown) < len(plain) - 1


def test_with_nohup_an_answer_goes_on_after_the_terminal_was_closed(tiny_models: Path) -> None:
    arguments = ["run", *models_of(tiny_models, draft="none"), "--ignore-eos", "-n", "300", PROMPT]

    def ignore_hangups() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    with spawn(*arguments, preexec_fn=ignore_hangups, bufsize=0) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.read(1)
            process.send_signal(signal.SIGHUP)
            rest, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert first + rest == ended(*arguments).stdout.encode()


def test_the_name_of_a_model_cannot_control_the_terminal(tiny_models: Path, tmp_path: Path) -> None:
    model = tmp_path / "a\x1b[31mb.gguf"
    model.symlink_to(tiny_models / "target.gguf")
    for path in (model, tmp_path / "no\x1b[31mb.gguf"):
        with on_terminal(["run", "-m", str(path), "-md", "none", "-n", "1", "hi"]) as (_, terminal):
            shown = rest_of(terminal)
        assert b"\x1b[31mb" not in shown
        assert "\N{SYMBOL FOR ESCAPE}[31mb".encode() in shown
    options = ("-md", "ngram", "--check", "greedy", "-n", "8")
    report = ended("verify", "-m", str(model), *options).stdout
    assert "\N{SYMBOL FOR ESCAPE}[31mb" in report
    assert "\x1b" not in report


def test_a_message_with_wide_characters_is_broken_between_words() -> None:
    words = ["千问模型"] * 15
    name = f"{' '.join(words)}.gguf"
    with on_terminal(["run", "-m", name, "hi"]) as (process, terminal):
        lines = rest_of(terminal).decode().splitlines()
        assert process.wait(60) == 4
    assert all(cell_len(line) <= 100 for line in lines)
    assert " ".join(lines).startswith(f"error: {name}: no such file")
