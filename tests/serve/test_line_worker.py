"""Lines that come as they come, answered as a batch answers them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import BackendError
from specgen.serve.batch.line_worker import Answered, LineWorker
from specgen.serve.batch.lines import Line
from specgen.serve.batch.runner import Batch
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from tests.helpers.batch import (
    PATIENCE_S,
    PROMPTING,
    SETTINGS,
    Collected,
    lines_of,
    open_tiny,
    text_of,
    worker_job,
)


def ask_all(worker: LineWorker, lines: Sequence[Line]) -> dict[str, Answered]:
    replies = {line.custom_id: worker.ask(line) for line in lines}
    return {name: reply.result(PATIENCE_S) for name, reply in replies.items()}


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def watch_inserts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, int]]:
    """The requests of all engines from now on, each with the number of those that were open then, itself
    included."""
    found: list[tuple[Request, int]] = []
    plain = Engine.insert

    def watched(engine: Engine, prompt: str | Prompt, **options: Any) -> Request:
        request = plain(engine, prompt, **options)
        found.append((request, 1 + sum(not other.is_done for other, _ in found)))
        return request

    monkeypatch.setattr(Engine, "insert", watched)
    return found


ROWS: list[Mapping[str, Any]] = [
    {"prompt": "a cat", "max_tokens": 150, "ignore_eos": True},
    *({"prompt": f"the cat {n}", "seed": n, "temperature": 0.8} for n in range(5)),
    *({"prompt": f"a dog {n}"} for n in range(6)),
    {"prompt": "long", "max_tokens": 700, "ignore_eos": True},
    {"prompt": 7},
    {"prompt": "x " * 2000},
]


@pytest.mark.parametrize("knows_largest", [True, False])
def test_a_worker_answers_as_a_batch_does(
    target: Path, knows_largest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of all sizes, those that cannot be read or answered among them; most of them come while one
    is in the making."""
    lines = lines_of(*ROWS)
    plain = Collected()
    with open_tiny(target) as session:
        batch = Batch(session, PROMPTING, plain, SETTINGS, wall_clock=lambda: 0.0)
        tasks = batch.prepare(lines)
        n_ctx = max(task.n_ctx for task in tasks)
        with Engine(session, n_parallel=2, n_ctx=n_ctx) as engine:
            batch.run(engine, tasks)
    failures: list[str] = []
    job = worker_job(target, largest=lines[-3:-2] if knows_largest else ())
    inserted = watch_inserts(monkeypatch)
    with LineWorker(job, failures.append) as worker:
        long = worker.ask(lines[0])
        wait_until(lambda: bool(inserted))
        answered = ask_all(worker, lines[1:])
        answered["1"] = long.result(PATIENCE_S)
        assert ask_all(worker, lines[:3]).keys() == {"1", "2", "3"}
    assert not failures
    for custom_id, record in plain.records.items():
        found = answered[custom_id].record
        assert found["error"] == record["error"]
        assert found["specgen"] == record["specgen"]
        if record["error"] is None:
            assert text_of(found) == text_of(record)
    assert {answered[name].record["error"]["code"] for name in ("14", "15")} == {
        "invalid_request",
        "invalid_prompt",
    }
    assert sum(each.n_drafted for each in answered.values()) > 0


def test_who_asks_for_a_line_in_the_making_gets_its_answer(target: Path) -> None:
    (line,) = lines_of({"prompt": "a", "max_tokens": 300, "ignore_eos": True})
    with LineWorker(worker_job(target), print) as worker:
        one, other = worker.ask(line), worker.ask(line)
        assert one.result(PATIENCE_S) is other.result(PATIENCE_S)


def test_a_worker_whose_engine_fails_says_so_and_answers_nobody(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Batch, *_: Any) -> None:
        raise BackendError("the device is gone")

    monkeypatch.setattr(Batch, "run", broken)
    failures: list[str] = []
    with LineWorker(worker_job(target), failures.append) as worker:
        reply = worker.ask(lines_of("a")[0])
        with pytest.raises(BackendError, match="the device is gone"):
            reply.result(PATIENCE_S)
        assert failures == ["the device is gone"]
        with pytest.raises(BackendError, match="has ended"):
            worker.ask(lines_of("b")[0])


def test_a_worker_can_be_ended_in_the_middle(target: Path) -> None:
    lines = lines_of(*({"prompt": f"{n}", "max_tokens": 900, "ignore_eos": True} for n in range(9)))
    with LineWorker(worker_job(target), print) as worker:
        replies = [worker.ask(line) for line in lines]
    for reply in replies:
        with contextlib.suppress(BackendError):
            reply.result(PATIENCE_S)
