"""Running the command line on tiny models, in the process of the test or in another one."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import specgen.cli.app
from tests.helpers.common import ROOT


@dataclass(frozen=True)
class Result:
    """The result of a command: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str


Specgen = Callable[..., Result]


def in_process(capsys: pytest.CaptureFixture[str]) -> Specgen:
    """Return a function that runs the command line in this process."""

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            specgen.cli.app.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Result(exit_.value.code, captured.out, captured.err)

    return run


def tiny_names(folder: Path, arguments: Sequence[str | Path]) -> list[str | Path]:
    """Replace the names of tiny models in arguments by their paths."""
    replaced = []
    for argument in arguments:
        path = folder / f"{argument}.gguf"
        replaced.append(path if path.exists() else argument)
    return replaced


def models_of(folder: Path, target: str = "target", draft: str = "draft") -> list[str]:
    """Return the options for a tiny target and a draft: a tiny model, `ngram` or `none`."""
    source = draft if draft in ("ngram", "none") else str(folder / f"{draft}.gguf")
    return ["-m", str(folder / f"{target}.gguf"), "-md", source]


def python(program: str) -> list[str]:
    """The command of a Python process that runs `program`."""
    return [sys.executable, "-c", program]


def spawn(
    *arguments: str | Path,
    code: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    **choices: Any,
) -> subprocess.Popen[Any]:
    """Start the command line in a separate process.

    Args:
        arguments: The arguments of the command line.
        code: A Python program to run instead of the command line.
        env: Additional environment variables.
        choices: Arguments of `subprocess.Popen`. By default, standard input is empty, and the other
            streams are pipes.
    """
    start = ["-m", "specgen"] if code is None else ["-c", code]
    command = [sys.executable, *start, *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **env}
    defaults: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "cwd": ROOT,
    }
    return subprocess.Popen(command, env=variables, **(defaults | choices))


def ended(
    *arguments: str | Path, stdin: str = "", timeout_s: float = 120.0, **choices: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process, and return its result."""
    with spawn(*arguments, stdin=subprocess.PIPE, text=True, **choices) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def on_terminal(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the command line with a terminal as standard error.

    Yields the process, and the other end of the terminal.
    """
    import pty

    parent_end, child_end = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    with spawn(*arguments, stderr=child_end, env=environment) as process:
        os.close(child_end)
        try:
            yield process, parent_end
        finally:
            process.kill()
            os.close(parent_end)


def rest_of(terminal: int) -> bytes:
    """Read from a terminal until its other end is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # raised when it is closed
        while chunk := os.read(terminal, 65536):
            shown += chunk
    return shown


class Cli:
    """Runs `specgen run` in this process, on tiny models."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Path
    ) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        #: The folder of the models.
        self.models = models

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> Result:
        """Run the command with these arguments. Standard input is a terminal if None is given."""
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
        if stdin is None:
            self._monkeypatch.setattr(stream, "isatty", lambda: True)
        self._monkeypatch.setattr(sys, "stdin", stream)
        return in_process(self._capsys)("run", *arguments)

    def model(self, name: str) -> str:
        """Return the path of a tiny model."""
        return str(self.models / f"{name}.gguf")

    def run(self, *arguments: str, **names: str) -> Result:
        """Run the command with a short answer, and the models of `models_of`."""
        own = ["-t", "1", "-n", "30", "-fa", "off"]
        return self(*models_of(self.models, **names), *own, *arguments)


def events_of(result: Result) -> list[dict[str, Any]]:
    """Return the events of a run with --json, after validating them against the schema."""
    assert result.code == 0, result.err
    events = [json.loads(line, parse_constant=pytest.fail) for line in result.out.splitlines()]
    for event in events:
        _validator().validate(event)
    return events


@functools.cache
def _validator() -> Draft202012Validator:
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text(encoding="utf-8"))
    return Draft202012Validator(schema)


def complaint(result: Result, code: int) -> str:
    """Check that a command failed with one line for the error and at most one for a hint.

    Returns what it wrote to standard error.
    """
    lines = result.err.splitlines()
    assert result.code == code, result.err
    assert result.out == ""
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    return result.err
