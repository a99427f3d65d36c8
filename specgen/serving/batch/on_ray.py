"""The lines of a batch answered by a Ray cluster: passes over the missing lines, each in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import specgen.errors
from specgen.errors import BackendError, SpecgenError
from specgen.serving.batch.lines import Line, LineError
from specgen.serving.batch.results import Results, result_of
from specgen.serving.batch.runner import Tally

if TYPE_CHECKING:
    from specgen.serving.batch.ray_job import RayJob

#: The command of a pass. (Not `-m`: then pickled classes would belong to a module named __main__.)
COMMAND = (sys.executable, "-c", "from specgen.serving.batch.ray_job import main; main()")
#: Seconds: for Ray to list its nodes; between checks for Ctrl-C; for a child to end by itself.
CONNECT_S, _LOOK_S, _END_S = 60.0, 0.2, 5.0
#: The beginning of a line in Ray's logs, and how much of such a line is shown, in characters.
_LOG_PREFIX, _N_WORDS = re.compile(r"^\[[^]]*\] \S+: "), 200
#: Ray reports nothing to others, and shows no progress bars.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}


class RayBatch:
    """Gets the lines of a batch answered, and is the only one that writes the results, as they come.

    `job` describes a pass; its lines are the missing ones. `note` gets a sentence when a node or an actor
    comes or goes. With `verbose`, Ray's output goes to standard error.
    """

    def __init__(
        self,
        job: RayJob,
        results: Results,
        *,
        note: Callable[[str], None] = lambda _text: None,
        verbose: bool = False,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._job = job
        self._results = results
        self._note = note
        self._verbose = verbose
        self._command = command
        self.tally = Tally()
        #: The number of actors; 0 while it is unknown.
        self.n_actors = 0
        self._open: dict[str, Line] = {}
        self._n_attempts: dict[str, int] = {}

    def run(
        self,
        lines: Sequence[Line],
        interrupted: Callable[[], bool] = lambda: False,
        report: Callable[[Tally], None] = lambda _tally: None,
    ) -> None:
        """Get the lines answered. After an interruption, unfinished answers are dropped; a later run asks
        for them again. Raise what a pass raises, and `OutputError`."""
        self.tally.n_lines = len(lines)
        for line in lines:
            if isinstance(line.request, LineError):
                self._write(result_of(line, self._job.worker.settings, None, line.request))
            else:
                self._open[line.custom_id] = line
        while self._open and not interrupted():
            before = len(self._open), dict(self._n_attempts)
            self._run_pass(interrupted, report)
            if (len(self._open), self._n_attempts) == before and not interrupted():
                raise BackendError(
                    f"the Ray cluster has ended without an answer to the last {len(self._open)} lines",
                    hint="start the same command again: it goes on with the missing lines",
                )

    def _run_pass(self, interrupted: Callable[[], bool], report: Callable[[Tally], None]) -> None:
        lines = tuple(self._open.values())
        job = replace(self._job, lines=lines, n_attempts=self._n_attempts)
        with _Child(self._command, pickle.dumps(job), verbose=self._verbose) as child:
            while not interrupted():
                message = child.message(_LOOK_S)
                if message is None:
                    child.check()
                elif self._take(message):
                    return
                report(self.tally)

    def _take(self, message: Mapping[str, Any]) -> bool:
        """Handle a message; return whether it is the last one."""
        kind = message["kind"]
        if kind == "result":
            self._take_result(message)
        elif kind == "note":
            self._note(message["text"])
        elif kind == "placed":
            self._take_placement(message)
        elif kind == "error":
            error: type[SpecgenError] = getattr(specgen.errors, message["class"], BackendError)
            raise error(message["message"], message["hint"])
        elif kind == "end":
            self._n_attempts |= message["n_attempts"]
            return True
        return False

    def _take_result(self, message: Mapping[str, Any]) -> None:
        record = message["record"]
        if self._open.pop(record["custom_id"], None) is None:
            return  # also made by an actor that was given up: the first result stands
        self.tally.n_drafted += message["n_drafted"]
        self.tally.n_accepted += message["n_accepted"]
        self.tally.n_cached_tokens += message["n_cached_tokens"]
        self._write(record)

    def _take_placement(self, message: Mapping[str, Any]) -> None:
        if not self.n_actors:
            for text in message["notes"]:
                self._note(text)
        self.n_actors = message["n_actors"]

    def _write(self, record: Mapping[str, Any]) -> None:
        if record["error"] is not None:
            self.tally.n_errors += 1
        else:
            usage = record["response"]["body"]["usage"]
            self.tally.n_answers += 1
            self.tally.n_tokens += usage["completion_tokens"]
            self.tally.n_prompt_tokens += usage["prompt_tokens"]
        self._results.write(record)


class _Child:
    """A process that runs a pass. At the end of the `with` block the process and Ray's actors are gone."""

    def __init__(self, command: Sequence[str], data: bytes, *, verbose: bool) -> None:
        self._words: IO[bytes] | None = None if verbose else tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={**os.environ, **_ENVIRONMENT},
            # Ctrl-C at a terminal reaches the command only: results that are on their way are still written.
            start_new_session=True,
        )
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._is_placed = False
        self._until_s = time.monotonic() + CONNECT_S
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer = threading.Thread(target=self._send, args=(data,), daemon=True)

    def __enter__(self) -> _Child:
        self._reader.start()
        self._writer.start()
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        self._writer.join(_LOOK_S)
        if self._writer.is_alive():  # the child does not read the job
            process.kill()
            self._writer.join()
        with contextlib.suppress(OSError):  # closing this pipe ends the child
            process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
        self._reader.join()
        for stream in (process.stdout, self._words):
            if stream is not None:
                stream.close()

    def message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None if there is none within `timeout_s` seconds. Raise `BackendError`
        if the process has ended without its last message."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except Empty:
            return None
        if message is None:
            raise BackendError(
                f"Ray has ended: {self._last_words()}",
                hint="start the same command again: it goes on with the missing lines; --verbose shows "
                "Ray's log",
            )
        self._is_placed = self._is_placed or message["kind"] == "placed"
        return message

    def check(self) -> None:
        """Raise `BackendError` if Ray takes too long to connect."""
        if not self._is_placed and time.monotonic() > self._until_s:
            raise BackendError(
                f"Ray has not connected within {CONNECT_S:.0f} s",
                hint="`ray status` says whether the cluster runs",
            )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            self._messages.put(json.loads(raw))
        self._messages.put(None)

    def _send(self, data: bytes) -> None:
        """Send the job. The pipe stays open, since the child ends when it closes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _last_words(self) -> str:
        code = self._process.wait()
        if self._words is None:
            return f"exit code {code}"
        self._words.seek(0)
        lines = self._words.read().decode("utf-8", "replace").strip().splitlines()
        if not lines:
            return f"exit code {code}"
        return _LOG_PREFIX.sub("", lines[-1].strip())[:_N_WORDS]


__all__ = ["COMMAND", "RayBatch"]
