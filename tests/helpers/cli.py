"""The command line on tiny models, in the test's own process."""

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
    code: int
    out: str
    err: str


Specgen = Callable[..., Result]


def in_process(capsys: pytest.CaptureFixture[str]) -> Specgen:
    """What runs the command line in this process."""

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            specgen.cli.app.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return Result(exit_.value.code, captured.out, captured.err)

    return run


def tiny_names(folder: Path, arguments: Sequence[str | Path]) -> list[str | Path]:
    """Arguments in which tiny models may be named without their folder."""
    paths = [folder / f"{argument}.gguf" for argument in arguments]
    return [p if p.exists() else a for p, a in zip(paths, arguments, strict=True)]


def models_of(folder: Path, target: str = "target", draft: str = "draft") -> list[str]:
    """The options that name tiny models, or a word as the draft."""
    source = draft if draft in ("ngram", "none") else str(folder / f"{draft}.gguf")
    return ["-m", str(folder / f"{target}.gguf"), "-md", source]


def spawn(
    *arguments: str | Path,
    code: str | None = None,
    env: Mapping[str, str] = MappingProxyType({}),
    **choices: Any,
) -> subprocess.Popen[Any]:
    """Start the command line in a process of its own, or a program of Python's. Unless `choices`
    say otherwise, nothing is in its standard input, and all that it prints can be read.
    """
    start = ["-m", "specgen"] if code is None else ["-c", code]
    streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive", **env}
    given = {"stdin": subprocess.DEVNULL, **streams, "cwd": ROOT, **choices}
    return subprocess.Popen([sys.executable, *start, *map(str, arguments)], env=own, **given)


def ended(
    *arguments: str | Path, stdin: str = "", timeout_s: float = 120.0, **choices: Any
) -> subprocess.CompletedProcess[str]:
    """What comes of such a process."""
    with spawn(*arguments, stdin=subprocess.PIPE, text=True, **choices) as process:
        try:
            out, err = process.communicate(stdin, timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def on_terminal(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command in a process of its own, whose standard error is a terminal; and what reads that."""
    import pty

    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "100"}
    with spawn(*arguments, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def rest_of(terminal: int) -> bytes:
    """What comes from a terminal until the other end is gone."""
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal says then
        while chunk := os.read(terminal, 65536):
            shown += chunk
    return shown


class Cli:
    """Runs the command line in this process."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Path
    ) -> None:
        self._capsys, self._monkeypatch, self.models = capsys, monkeypatch, models

    def __call__(self, *arguments: str, stdin: bytes | None = None) -> Result:
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""))
        if stdin is None:
            self._monkeypatch.setattr(stream, "isatty", lambda: True)
        self._monkeypatch.setattr(sys, "stdin", stream)
        return in_process(self._capsys)("run", *arguments)

    def model(self, name: str) -> str:
        return str(self.models / f"{name}.gguf")

    def run(self, *arguments: str, **names: str) -> Result:
        own = ["-t", "1", "-n", "30", "-fa", "off"]
        return self(*models_of(self.models, **names), *own, *arguments)


def events_of(result: Result) -> list[dict[str, Any]]:
    """The events of a --json run, each of which conforms to the schema."""
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
    """The error of a failed run: one line of what happened, at most one of what to do."""
    lines = result.err.splitlines()
    assert result.code == code, result.err
    assert result.out == ""
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    return result.err
