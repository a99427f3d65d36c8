"""A drafter that never returns: the first Ctrl-C waits for the round, which never ends, a second one ends it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import ended, spawn

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
EXACT = ("-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-n", "40", "-q")
#: Hangs in its fourth draft, and says so again and again through the descriptor that is named first.
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

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")


def interrupted_twice(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command whose drafter hangs."""
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
            os.read(reader, 2**16)  # from before
            for _ in range(5):  # it goes on hanging
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
    said = out.rstrip("\n\ufffd")
    assert said
    assert plain.startswith(said)
    assert len(said) < len(plain) - 1


def test_a_second_ctrl_c_ends_a_batch_whose_drafter_hangs(
    tiny_models: Path, tmp_path: Path
) -> None:
    results = tmp_path / "out.jsonl"
    options = ["-m", str(tiny_models / "chat.gguf"), "-md", "ngram", "--policy", "fixed", *EXACT]
    code, out, err = interrupted_twice(["batch", "-", str(results), *options])
    assert (code, out) == (130, "")
    assert "Traceback" not in err
