"""`specgen batch --ray`: lines answered by actors that die, on nodes that go; most of it needs no Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from specgen.engine.engine import Engine
from specgen.engine.loaded_models import Models
from specgen.engine.prompts import Prompt
from specgen.engine.request import Request
from specgen.errors import BackendError, ModelFileError
from specgen.serving.batch import on_ray, ray_actor
from specgen.serving.batch.line_worker import WorkerJob
from specgen.serving.batch.on_ray import RayBatch
from specgen.serving.batch.placement import Node, place
from specgen.serving.batch.ray_actor import ActorRegistry
from specgen.serving.batch.ray_job import RayJob
from specgen.serving.batch.results import result_of
from tests.helpers.batch import (
    PATIENCE_S,
    PROMPTING,
    SETTINGS,
    Collected,
    answers,
    greedy_and_seeded,
    lines_of,
    open_tiny,
    wait_for_results,
    worker_job,
)
from tests.helpers.cli import Specgen
from tests.helpers.common import ROOT
from tests.project.test_layers import imported, modules

# --- where actors go


def node(name: str, n_cpus: float, n_gpus: float = 0.0) -> Node:
    return Node(name, name, n_cpus, n_gpus)


@pytest.mark.parametrize(
    ("nodes", "asked", "n_actors", "cpus", "gpus", "on"),
    [
        ([node("a", 8), node("b", 8)], (None, None), 2, 8, 0, "ab"),
        ([node("head", 2), node("a", 8), node("b", 8)], (None, None), 2, 8, 0, "ab"),
        ([node("head", 0), node("a", 8)], (None, None), 1, 8, 0, "a"),
        ([node("a", 8), node("b", 16)], (4, None), 6, 4, 0, "ab"),
        ([node("a", 32, 4), node("b", 64)], (None, None), 1, 32, 4, "a"),
        ([node("a", 32, 4), node("b", 32, 4)], (None, 1), 8, 8, 1, "ab"),
        ([node("a", 32, 4)], (None, 0), 1, 32, 0, "a"),
        ([node("a", 32, 4)], (2, 0.5), 8, 2, 0.5, "a"),
        ([node("a", 100)] * 3, (1, None), 40, 1, 0, "aaa"),
    ],
)
def test_each_node_like_the_largest_has_an_actor_unless_told_otherwise(
    nodes: list[Node],
    asked: tuple[float | None, float | None],
    n_actors: int,
    cpus: float,
    gpus: float,
    on: str,
) -> None:
    found = place(nodes, 40, *asked)
    assert (found.n_actors, found.cpus, found.gpus) == (n_actors, cpus, gpus)
    assert "".join(node.name for node in found.nodes) == on
    idle = {node.name for node in nodes if node.n_cpus} - {node.name for node in found.nodes}
    assert len(found.notes) == bool(idle)
    assert all(name in found.notes[0] for name in idle)


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        ([], (None, None), "has no node"),
        ([node("head", 0)], (None, None), "no Ray node has 1 CPU: the largest has 0 CPUs"),
        ([node("a", 8)], (9, None), "no Ray node has 9 CPUs: the largest has 8 CPUs"),
        ([node("a", 8)], (None, 1), "no Ray node has 1 CPU and 1 GPU"),
        ([node("a", 8, 1)], (None, 2), "the largest has 8 CPUs and 1 GPU"),
    ],
)
def test_what_no_node_has_is_told(
    nodes: list[Node], asked: tuple[float | None, float | None], said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        place(nodes, 40, *asked)


# --- what the actors tell


def test_the_desk_counts_attempts_and_knows_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("specgen.serving.batch.ray_actor.time.monotonic", lambda: now)
    desk = ActorRegistry({"a": 2})
    desk.begin(["a", "b"])
    desk.begin(["b"])
    assert desk.n_attempts(["a", "b", "c"]) == [3, 2, 0]
    assert desk.state()["silent_s"] is None
    desk.beat("x", "node", False, 0)
    assert (desk.state()["silent_s"], desk.state()["n_ready"]) == (0.0, 0)
    desk.beat("x", "node", True, 3)
    desk.beat("y", "node", True, 0)
    now = 107.0
    desk.beat("y", "node", True, 0)  # has nothing to do: who waits for lines waits for x
    state = desk.state()
    assert (state["silent_s"], state["n_ready"], state["starts"]) == (7.0, 2, ["node", "node"])
    assert state["n_attempts"] == {"a": 3, "b": 2}


# --- the driver, with a child that plays Ray


#: Reads the job; `script` is Python that says what happens, with `say` and `answer`.
FAKE = """
import json, os, pickle, sys, threading, time
from specgen.serving.batch.results import result_of
job = pickle.load(sys.stdin.buffer)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
def say(kind, **fields):
    print(json.dumps({"kind": kind, **fields}), flush=True)
def answer(line):
    body = {"usage": {"completion_tokens": 2, "prompt_tokens": 3}, "choices": [{"text": line.custom_id}]}
    record = result_of(line, job.worker.settings, {"body": body}, None)
    say("result", record=record, n_drafted=4, n_accepted=1, n_cached_tokens=0)
def placed():
    say("placed", n_actors=2, n_nodes=2, cpus=1, gpus=0, notes=["a note"])
"""


def fake_batch(script: str, *, verbose: bool = False) -> tuple[RayBatch, Collected, list[str]]:
    job = RayJob("local", WorkerJob(print, PROMPTING, SETTINGS, 1), ())  # type: ignore[arg-type]
    results, notes = Collected(), list[str]()
    command = (sys.executable, "-c", f"{FAKE}{script}\nos._exit(0)")
    batch = RayBatch(job, results, note=notes.append, verbose=verbose, command=command)
    return batch, results, notes


def test_what_a_pass_leaves_is_asked_for_in_the_next_and_doubles_are_dropped(
    tmp_path: Path,
) -> None:
    batch, results, notes = fake_batch(f"""
placed()
with open({str(tmp_path / "asked")!r}, "a") as file:
    print([line.custom_id for line in job.lines], job.n_attempts, file=file)
answer(job.lines[0]); answer(job.lines[0]); answer(job.lines[1])
say("note", text="something")
say("end", n_attempts={{"3": 1}})
""")
    seen: list[int] = []
    batch.run(lines_of("a", "b", "c", '{"prompt": 3}', "e"), report=lambda t: seen.append(t.n_done))
    assert (tmp_path / "asked").read_text().splitlines() == [
        "['1', '2', '3', '5'] {}",
        "['3', '5'] {'3': 1}",
    ]
    assert results.records.keys() == {"1", "2", "3", "4", "5"}
    assert results.records["4"]["error"]["code"] == "invalid_request"
    assert notes == ["a note", "something", "something"]
    tally = batch.tally
    assert (tally.n_answers, tally.n_errors, tally.n_tokens, tally.n_drafted) == (4, 1, 8, 16)
    assert seen[-1] == 5


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("placed(); say('end', n_attempts={})", BackendError, "without an answer to the last 2"),
        ("placed(); os._exit(3)", BackendError, "Ray has ended: exit code 3"),
        (
            "print('[2026 E 1] rpc.h:2: The head is gone.', file=sys.stderr); os._exit(1)",
            BackendError,
            "Ray has ended: The head is gone.",
        ),
        (
            "say('error', **{'class': 'ModelFileError', 'message': 'no file', 'hint': 'put it'})",
            ModelFileError,
            "no file",
        ),
    ],
)
def test_the_end_of_ray_is_an_error_and_what_is_done_stays(
    script: str, error: type[Exception], said: str
) -> None:
    batch, results, _ = fake_batch(f"if len(job.lines) == 3: answer(job.lines[0])\n{script}")
    with pytest.raises(error, match=said):
        batch.run(lines_of("a", "b", "c"))
    assert results.records.keys() == {"1"}


def test_an_address_that_says_nothing_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "CONNECT_S", 0.3)
    batch, _, _ = fake_batch("time.sleep(600)")
    with pytest.raises(BackendError, match="has not connected"):
        batch.run(lines_of("a"))


def test_an_interruption_ends_the_child_at_once() -> None:
    batch, results, _ = fake_batch("placed(); answer(job.lines[0]); time.sleep(600)")
    batch.run(lines_of("a", "b"), interrupted=lambda: bool(results.records))
    assert results.records.keys() == {"1"}


def test_what_ray_prints_is_shown_with_verbose_only(capfd: pytest.CaptureFixture[str]) -> None:
    script = "print('chatter', file=sys.stderr); [answer(x) for x in job.lines]; say('end', n_attempts={})"
    for verbose in (False, True):
        fake_batch(script, verbose=verbose)[0].run(lines_of("a"))
        out, err = capfd.readouterr()
        assert (out, err.strip()) == ("", "chatter" if verbose else "")


# --- the command line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray", "ray://h:1"), "--ray ray://h:1: not the address"),
        (("--ray", "somewhere"), "not the address"),
        (("--ray", "local", "--rpc", "h:1"), "--ray and --rpc exclude each other"),
        (("--gpus-per-worker", "1"), "go with --ray"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    specgen: Specgen,
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    (tmp_path / "in").write_text("a\n")
    result = specgen("batch", tmp_path / "in", tmp_path / "out", "-m", target, *options)
    assert result.code == 2
    assert said in result.err
    assert not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named(
    specgen: Specgen,
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (tmp_path / "in").write_text("a\n")
    result = specgen("batch", tmp_path / "in", "-", "-m", target, "--ray", "local")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "error: --ray needs ray, which is not installed\nhint: pip install 'specgen[ray]'\n"
    )


# --- real clusters

needs_ray = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow")) or os.name == "nt",
    reason="specgen[ray] is not installed",
)

#: A head without CPUs and two nodes with one CPU each; says its address, and the raylets' process ids.
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, include_dashboard=False))
nodes = [cluster.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(2)]
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
print("CLUSTER", json.dumps([cluster.address, raylets]), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, list[int]]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        cwd="/",
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        address, raylets = next(
            json.loads(line.removeprefix("CLUSTER "))
            for line in process.stdout
            if line.startswith("CLUSTER ")
        )
        yield address, raylets
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        process.communicate()


def open_and_die(path: Path) -> Models:
    """In an actor: a session that ends the process at a line that says so."""
    plain = Engine.insert

    def insert(engine: Engine, prompt: str | Prompt, **options: Any) -> Request:
        request = plain(engine, prompt, **options)
        if "die" in request.prompt.text:
            engine.step()
            os.kill(os.getpid(), signal.SIGKILL)
        return request

    Engine.insert = insert  # type: ignore[assignment, method-assign]
    ray_actor.MOST_ATTEMPTS, ray_actor.N_TOGETHER = 2, 1
    return open_tiny(path)


@needs_ray
def test_a_line_that_kills_actors_is_an_error_and_the_others_are_answered(
    cluster: tuple[str, list[int]], target: Path
) -> None:
    lines = lines_of(*(f"line {n}" if n != 7 else "die" for n in range(16)))
    worker = WorkerJob(partial(open_and_die, target), PROMPTING, SETTINGS, 2, tuple(lines[:1]))
    results, notes = Collected(), list[str]()
    batch = RayBatch(RayJob(cluster[0], worker, ()), results, note=notes.append)
    batch.run(lines)
    assert len(results.records) == 16
    failed = [record for record in results.records.values() if record["error"] is not None]
    assert [record["custom_id"] for record in failed] == ["8"]
    assert "given up after 2 attempts" in failed[0]["error"]["message"]
    assert any("an actor is started again" in note for note in notes)


@needs_ray
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs /proc")
def test_a_model_that_a_node_does_not_have_is_told(
    cluster: tuple[str, list[int]],
    target: Path,
    tmp_path: Path,
    specgen: Specgen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in").write_text("a\n")
    monkeypatch.chdir(target.parent)
    path = Path("/proc/self/cwd") / target.name
    result = specgen(
        "batch", tmp_path / "in", tmp_path / "out", "-m", path, "-md", "none", "--ray", cluster[0]
    )
    assert result.code == ModelFileError.exit_code, result.err
    assert f"has no file {path}" in result.err


@needs_ray
def test_answers_are_those_of_one_machine_though_actor_node_and_driver_are_killed(
    cluster: tuple[str, list[int]], target: Path, tmp_path: Path, specgen: Specgen
) -> None:
    """Greedy lines and lines with a seed; nothing is lost, and nothing doubled."""
    address, raylets = cluster
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = greedy_and_seeded(60, n_tokens=300)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["-m", str(target), "-md", "none", "-t", "1", "-np", "2"]
    local = specgen("batch", source, tmp_path / "local.jsonl", *own)
    assert local.code == 0, local.err
    command = [sys.executable, "-m", "specgen", "batch", str(source), str(out), *own]
    driver = subprocess.Popen(
        [*command, "--ray", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    wait_for_results(out, 4, driver)
    (actor,) = (
        child
        for child in psutil.Process(raylets[0]).children()
        if "MapWorker" in child.name() or "MapWorker" in " ".join(child.cmdline())
    )
    actor.kill()
    wait_for_results(out, 12, driver)
    driver.kill()
    stdout, _ = driver.communicate()
    assert stdout == ""
    n_before = out.read_bytes().count(b"\n")
    assert n_before < 60
    driver = subprocess.Popen(
        [*command, "--ray", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_results(out, n_before + 4, driver)
    os.kill(raylets[1], signal.SIGKILL)
    stdout, stderr = driver.communicate(timeout=PATIENCE_S)
    assert (driver.returncode, stdout) == (0, ""), stderr
    assert f"has results for {n_before} of 60 lines" in stderr
    assert answers(out) == answers(tmp_path / "local.jsonl")
    assert {line.split(":")[0] for line in stderr.splitlines() if "lines," not in line} == {"note"}


def test_two_modules_import_ray() -> None:
    importers = {
        module for module, path in modules().items() if {"ray", "ray.data"} & imported(path)
    }
    assert importers == {"specgen.serving.batch.ray_actor", "specgen.serving.batch.ray_job"}


def test_a_job_can_be_sent_to_another_process(target: Path) -> None:
    lines = lines_of("a", {"messages": [{"role": "user", "content": "b"}], "stop": ["x"]})
    job = RayJob("auto", worker_job(target, largest=lines), tuple(lines))
    again = pickle.loads(pickle.dumps(job))
    assert again.lines == job.lines
    assert result_of(again.lines[0], SETTINGS, None, None)["custom_id"] == "1"
