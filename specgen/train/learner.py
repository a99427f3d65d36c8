"""Lets the draft of a chat or a server learn between answers, in a separate process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from specgen.errors import OutputError, SpecgenError, UsageError
from specgen.llama import default_threads
from specgen.session.engine import Engine
from specgen.session.kept_answers import last_number, learnt_weights, read_learnt
from specgen.session.session import Session
from specgen.train.online_learning import GO, PAUSE, Lesson
from specgen.train.training_loop import check_library

#: The number of new answers that starts a lesson.
NEW_ANSWERS = 10
#: How long a lesson may take.
_MINUTES = 10.0
#: The process may use the processor's cores, divided by this.
_CORES_SHARE = 4
#: Seconds that the process has to end after it was told to.
_END_S = 5.0
COMMAND = (sys.executable, "-m", "specgen.train.online_learning")


class Learner:
    """Starts a lesson when there are enough new answers, and gives its result to the engine's draft.

    The lesson pauses after its present step while an answer is generated. Use the learner as a context
    manager; its exit ends the learning process. Without kept answers or a draft model it does nothing.
    `tell` gets a sentence for each change.
    """

    def __init__(self, session: Session, engine: Engine, tell: Callable[[str], None]) -> None:
        self._loaded, self._engine, self._tell = session, engine, tell
        self._child: subprocess.Popen[bytes] | None = None
        #: The file of the process's standard error.
        self._errors: IO[bytes] = io.BytesIO()
        self._is_running = True
        #: The number of the kept answer from which on the next lesson may begin.
        self._not_before = 0
        #: The sentence about a lesson's result, until the draft is reloaded.
        self._news: str | None = None
        folder, own = session.options.learning, session.draft
        draft = own.learns if own is not None else None
        self._is_on = folder is not None and draft is not None
        if folder is None or draft is None:
            if folder is not None and own is not None and not own.is_free:
                tell(f"answers are kept, and not learnt from: {own.name} cannot learn")
            return
        self._folder, self._draft = folder, draft
        #: The learnt weights that the draft was loaded with.
        self._in_use = learnt_weights(folder, draft)
        try:
            check_library()
        except UsageError as error:
            self._is_on = False
            tell(f"answers are kept, and not learnt from: {error.message} ({error.hint})")

    def __enter__(self) -> Learner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_learning(self) -> bool:
        return self._child is not None

    def between_answers(self, *, begins: bool = False) -> None:
        """Start, pause, continue or finish a lesson. The thread that steps the engine calls this while no
        answer is being generated: after an answer, and before one with `begins`, which pauses the lesson."""
        if not self._is_on:
            return
        try:
            if self._child is not None:
                if self._child.poll() is not None:
                    self._end_lesson(self._child)
            elif self._n_new >= NEW_ANSWERS and last_number(self._folder) >= self._not_before:
                self._start_lesson()
            if self._child is None:
                self._reload_draft()
            elif begins == self._is_running:
                self._is_running = not begins
                self._send(GO if self._is_running else PAUSE)
        except (SpecgenError, OSError, ValueError, TypeError) as error:  # not the answers end
            self._is_on = False
            self._tell(f"learning has ended: {error}")

    def _reload_draft(self) -> None:
        """Reload the draft if it learnt something, here or in another process, or if what it learnt was
        deleted."""
        learnt = learnt_weights(self._folder, self._draft)
        if learnt != self._in_use and self._engine.reload_draft():
            self._in_use = learnt
            change = "drafts with what it learnt elsewhere from now on"
            if learnt is None:
                change = "drafts as it came again: what it learnt was deleted"
            self._tell(self._news or f"{self._draft.name} {change}")
            self._news = None

    def _send(self, data: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: the next call notices
            self._child.stdin.write(data)
            self._child.stdin.flush()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
        self._last_words(child)

    @property
    def _n_new(self) -> int:
        last = last_number(self._folder)
        seen = read_learnt(self._folder, self._draft).last_number
        return last - seen if last >= seen else last  # smaller if the file was deleted

    def _start_lesson(self) -> None:
        n_threads = max(1, default_threads() // _CORES_SHARE)
        asked = {
            "folder": self._folder,
            "target": self._loaded.options.target,
            "draft": self._draft,
        }
        line = json.dumps(asked | {"minutes": _MINUTES}, default=os.fspath)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call
        self._child = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C ends the answer, not the lesson
            env=os.environ | {"NPROC": str(n_threads), "OMP_NUM_THREADS": str(n_threads)},
        )
        self._send(line.encode() + b"\n")
        self._is_running = True

    def _end_lesson(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        result, words = self._last_words(child)
        if child.returncode == UsageError.exit_code:  # for example, another process learns
            self._not_before = last_number(self._folder) + NEW_ANSWERS
            self._tell(f"{self._draft.name} has not learnt: {words}")
            return
        if child.returncode != 0:
            raise OutputError(words or f"its process ended with code {child.returncode}")
        lesson = Lesson(**json.loads(result))
        text = f"{self._draft.name} {lesson.text}"
        if lesson.outcome == "kept":
            self._tell(text)
        else:
            self._news = text

    def _last_words(self, child: subprocess.Popen[bytes]) -> tuple[bytes, str]:
        """Return what a process that has ended wrote, and its last complaint. Close its files."""
        result, _ = child.communicate()
        with self._errors as errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
        return result, lines[-1] if lines else ""
