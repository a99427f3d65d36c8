"""The progress of long work as lines, if standard error is a file or a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from specgen.measure.run_progress import RunStep, StepProgress, run_steps
from specgen.system import progress
from specgen.system.progress import ProgressView


class Clock:
    """A clock that tests advance."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 10.0)


# --- when there is a line


def lines_of(*steps: tuple[float, str]) -> list[str]:
    """The lines that are written when each state comes this many seconds after the one before."""
    stream, clock = io.StringIO(), Clock()
    view = ProgressView(stream, clock)
    for seconds, state in steps:
        clock.now_s += seconds
        view.show(state, 1, 2)
    view.close()
    return [line.removesuffix(": 1 of 2") for line in stream.getvalue().splitlines()]


def test_a_line_comes_after_the_interval_where_something_changed_and_at_the_end() -> None:
    steps = [(0, "a"), (9, "b"), (1, "c"), (9, "d"), (1, "c"), (20, "c"), (0, "e"), (1, "f")]
    assert lines_of(*steps) == ["c", "e", "f"]


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError("no space left")


def test_a_stream_that_cannot_be_written_does_not_end_the_work() -> None:
    clock = Clock()
    view = ProgressView(Broken(), clock)
    for n in range(2):
        view.show("a", n, 2)
        clock.now_s += 60
    view.close()


# --- downloads


def test_a_download_prints_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = ProgressView(stream, clock, "bytes")
    for done_bytes in (150, 160, 200, 350, 1000):
        progress.show("tiny", done_bytes, 1000)
        clock.now_s += 6.0
    progress.close()
    progress.close()
    progress.note("done")
    assert stream.getvalue().splitlines() == [
        "tiny: 20% (200 B of 1.00 kB)",
        "tiny: 100% (1.00 kB of 1.00 kB)",
        "done",
    ]


# --- runs of several steps


def test_a_run_has_one_estimate_of_its_remaining_time() -> None:
    stream, clock = io.StringIO(), Clock()
    view = ProgressView(stream, clock, "run")

    def work(progress: StepProgress) -> None:
        for n_done in (1, 2):
            clock.now_s += 20.0
            progress(n_done, 2)

    shares = {"plain": 10, "drafts": 20, "samples": 70}
    steps = [RunStep(name, share, work) for name, share in shares.items()]
    run_steps(steps, view.show, lambda: False)
    view.close()
    assert stream.getvalue().splitlines() == [
        "plain: 5% of the run, about 6 min left",
        "plain: 10% of the run, about 6 min left",
        "drafts: 20% of the run, about 4 min left",
        "drafts: 30% of the run, about 3 min left",
        "samples: 65% of the run, about 54 s left",
        "samples: 100% of the run",
    ]


# --- commands


def test_names_of_files_cannot_write_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    view = ProgressView(sys.stderr, clock)
    for n in range(2):
        view.show("a\x1b[31m\r\nb\udc80", n, 2)
        clock.now_s += 60
    view.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.startswith("a")
    assert line.endswith(": 1 of 2")
