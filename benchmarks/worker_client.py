"""The client of `benchmarks/engine_worker.py`: starts an engine's process, and sends requests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specgen.errors import SpecgenError

#: The prompt of a warm-up.
WARM_UP_PROMPT = "Count from one to twenty."
#: How long a process may take to end after its stdin was closed.
_EXIT_TIMEOUT_S = 10.0
_TOP = Path(__file__).resolve().parents[1]
_SCRIPT = Path(__file__).with_name("engine_worker.py")


class WorkerError(SpecgenError):
    """An engine's process ended, or could not be started."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How to start the process of an engine."""

    #: The engine's name in `engine_worker.py`.
    engine: str
    #: The Python of the environment in which the engine is installed.
    python: Path = Path(sys.executable)
    #: The folder from which specgen is imported; None if it is installed or not needed.
    checkout: Path | None = _TOP
    #: The file of a control group to which the process first writes its id; None for no group.
    group: Path | None = None

    @property
    def arguments(self) -> list[str]:
        """The command line of the process."""
        arguments = [str(self.python), str(_SCRIPT), self.engine]
        if self.group is None:
            return arguments
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self.group), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        variables = os.environ.copy()
        variables.pop("PYTHONPATH", None)
        if self.checkout is not None:
            variables["PYTHONPATH"] = str(self.checkout)
        return variables


class EngineWorker:
    """A running process that answers prompts. `running_worker` starts it."""

    def __init__(
        self,
        engine: str,
        process: subprocess.Popen[str],
        log: TextIO,
        settings: Mapping[str, Any],
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._engine = engine
        self._process = process
        self._requests = process.stdin
        self._answers = process.stdout
        self._log = log
        #: The engine's description of itself.
        self.about = self._ask(settings)

    def warm_up(self, tokens: Sequence[int] = ()) -> None:
        """Generate a few tokens, so that the weights are in memory and the cores are awake.

        Args:
            tokens: The tokens of a prompt, for engines other than specgen.

        Raises:
            WorkerError: If the process ended.
        """
        self._ask({"prompt": WARM_UP_PROMPT, "tokens": list(tokens), "is_warm_up": True})

    def answer(self, prompt: str, tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Return the figures of an answer, or an object with an `error`.

        Args:
            prompt: The prompt without the chat template, for specgen.
            tokens: The prompt's tokens, for other engines.

        Raises:
            WorkerError: If the process ended.
        """
        return self._ask({"prompt": prompt, "tokens": list(tokens), "is_warm_up": False})

    def _ask(self, value: Mapping[str, Any]) -> dict[str, Any]:
        line = ""
        with contextlib.suppress(OSError):  # the process may have ended
            self._requests.write(json.dumps(value) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(f"{self._engine} ended with {code}: {self._last_log_line()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_log_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


@contextlib.contextmanager
def running_worker(command: WorkerCommand, settings: Mapping[str, Any]) -> Iterator[EngineWorker]:
    """Start an engine's process with its model loaded, and end it afterwards.

    Raises:
        WorkerError: If the process cannot be started, or ends while it loads.
    """
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        try:
            process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=command.environment,
                encoding="utf-8",
                # Ctrl-C should reach only the benchmark, which then ends its workers.
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(f"{command.python} cannot be run: {error.strerror}") from error
        stack.callback(_end, process)
        yield EngineWorker(command.engine, process, log, settings)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process by closing its stdin, or kill it if that does not help."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # it may have ended already
        process.stdin.close()
    try:
        process.wait(timeout=_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
