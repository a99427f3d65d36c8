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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from specgen.errors import BackendError, ModelFileError, SpecgenError
from specgen.serve.batch.line_worker import Answered, WorkerJob
from specgen.serve.batch.lines import Line
from specgen.serve.batch.on_ray import Cluster, Node, RayBatch, place
from specgen.serve.batch.results import result_of
from specgen.session.engine import Engine
from specgen.session.loaded_models import Models
from specgen.session.prompts import Prompt
from specgen.session.request import Request
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
    ("nodes", "asked", "n_actors", "cpus", "gpus"),
    [
        ([node("a", 8), node("b", 8)], (None, None), 2, 8, 0),
        ([node("head", 2), node("a", 8), node("b", 8)], (None, None), 2, 8, 0),
        ([node("head", 0), node("a", 8)], (None, None), 1, 8, 0),
        ([node("a", 8), node("b", 16)], (4, None), 6, 4, 0),
        ([node("a", 32, 4), node("b", 64)], (None, None), 1, 32, 4),
        ([node("a", 32, 4), node("b", 32, 4)], (None, 1), 8, 8, 1),
        ([node("a", 32, 4)], (None, 0), 1, 32, 0),
        ([node("a", 32, 4)], (2, 0.5), 8, 2, 0.5),
        ([node("a", 100)] * 3, (1, None), 300, 1, 0),
    ],
)
def test_each_node_like_the_largest_has_an_actor_unless_told_otherwise(
    nodes: list[Node],
    asked: tuple[float | None, float | None],
    n_actors: int,
    cpus: float,
    gpus: float,
) -> None:
    found = place(nodes, *asked)
    assert (found.n_actors, found.cpus, found.gpus) == (n_actors, cpus, gpus)


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        ([], (None, None), "no Ray node has 1 CPU: the largest has 0 CPUs"),
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
        place(nodes, *asked)


# --- the driver, with a Ray that answers at once


class FakeRayError(Exception):
    """As Ray's: `cause` is the exception of a task."""

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """The functions of Ray that the driver calls. `answer` gets a line, and says what comes of it; `start`
    what comes of an actor's start. It is its own class of actors, and every method of them."""

    def __init__(
        self, answer: Callable[[Line], Any], start: Callable[[], None] = lambda: None
    ) -> None:
        self.exceptions = type("exceptions", (), {"RayError": FakeRayError})
        self._answer, self._start = answer, start
        self.n_cpus = {"head": 0.0, "a": 1.0, "b": 1.0}
        self.n_open = self.most_open = 0
        self.killed: list[FakeActor] = []
        self.is_up = True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeID": name, "NodeManagerAddress": name, "Resources": {"CPU": n}}
            for name, n in self.n_cpus.items()
        ]

    def remote(self, _actor: type) -> FakeRay:
        return self

    def options(self, **_options: Any) -> Any:
        return type("Factory", (), {"remote": lambda _self, *_: FakeActor(self)})()

    def start(self) -> None:
        self._start()

    def take(self, line: Line) -> Any:
        self.n_open -= 1
        return self._answer(line)

    def wait(self, refs: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout < 1.0
        self.most_open = max(self.most_open, self.n_open)
        return list(refs[-1:]), list(refs[:-1])

    def get(self, ref: Any) -> Any:
        try:
            return ref()
        except SpecgenError as error:
            raise FakeRayError(error) from None

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def available_resources(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self.is_up = False


class FakeActor:
    """A handle of an actor; what a method's `remote` returns is a ref."""

    def __init__(self, ray: FakeRay) -> None:
        self._ray = ray
        self.ready = self.answer = self

    def remote(self, line: Line | None = None) -> Any:
        if line is None:
            return partial(self._ray.start)
        self._ray.n_open += 1
        return partial(self._ray.take, line)


def answered(line: Line, where: str = "") -> tuple[str, Answered]:
    body = {"usage": {"completion_tokens": 2, "prompt_tokens": 3}, "choices": [{"text": "x"}]}
    return where, Answered(result_of(line, SETTINGS, {"body": body}, None), n_drafted=4)


def run(
    ray: FakeRay,
    lines: Sequence[Line],
    interrupted: Callable[[Collected], bool] = lambda _results: False,
    cluster: Cluster = Cluster("local"),  # noqa: B008 - a frozen value
) -> tuple[RayBatch, Collected, list[str]]:
    job = WorkerJob(print, PROMPTING, SETTINGS, 2)  # type: ignore[arg-type]
    results, notes = Collected(), list[str]()
    with RayBatch(cluster, job, results, note=notes.append, ray=ray) as batch:
        batch.run(lines, lambda: interrupted(results))
    assert not ray.is_up
    return batch, results, notes


def test_every_line_has_one_result_and_actors_without_lines_end() -> None:
    ray = FakeRay(answered)
    batch, results, notes = run(ray, lines_of("a", "b", "c", '{"prompt": 3}', "e", "f"))
    assert results.records.keys() == {"1", "2", "3", "4", "5", "6"}
    assert results.records["4"]["error"]["code"] == "invalid_request"
    tally = batch.tally
    assert (tally.n_lines, tally.n_answers, tally.n_errors) == (6, 5, 1)
    assert (tally.n_tokens, tally.n_prompt_tokens, tally.n_drafted) == (10, 15, 20)
    assert (batch.n_actors, len(ray.killed), notes) == (2, 1, [])


def test_no_more_lines_are_given_than_are_answered_at_once() -> None:
    ray = FakeRay(answered)
    run(ray, lines_of(*"abcdefghij"))
    assert ray.most_open == 4  # two for each actor


def test_a_line_that_ends_its_actors_is_asked_again_alone_and_then_an_error() -> None:
    open_at_the_end: list[int] = []

    def answer(line: Line) -> Any:
        if line.custom_id == "3":
            open_at_the_end.append(ray.n_open)
            raise FakeRayError
        return answered(line)

    ray = FakeRay(answer)
    batch, results, _ = run(ray, lines_of(*"abcdefgh"))
    assert len(results.records) == 8
    assert "given up" in results.records["3"]["error"]["message"]
    assert (batch.tally.n_answers, batch.tally.n_errors) == (7, 1)
    assert len(open_at_the_end) == 2
    assert open_at_the_end[1] == 0


def test_a_line_lost_beside_another_is_answered_in_the_end() -> None:
    n_asked: dict[str, int] = {}

    def answer(line: Line) -> Any:
        n_asked[line.custom_id] = n_asked.get(line.custom_id, 0) + 1
        if line.custom_id == "2" and n_asked["2"] == 1:
            raise FakeRayError
        return answered(line, "b (7)" if line.custom_id == "2" else "")

    batch, results, notes = run(FakeRay(answer), lines_of(*"abcd"))
    assert (batch.tally.n_answers, batch.tally.n_errors) == (4, 0)
    assert (len(results.records), n_asked["2"]) == (4, 2)
    assert notes == ["an actor was started again, on b (7)"]


def test_actors_that_do_nothing_but_die_end_the_batch() -> None:
    n_asked = 0

    def answer(line: Line) -> Any:
        nonlocal n_asked
        n_asked += 1
        raise FakeRayError

    with pytest.raises(BackendError, match="their actors ended"):
        run(FakeRay(answer), lines_of(*map(str, range(100))))
    assert n_asked < 50


def test_an_actor_that_cannot_start_ends_the_batch_with_its_error() -> None:
    def start() -> None:
        raise ModelFileError("the Ray node a: there is no file m.gguf", "put it there")

    ray = FakeRay(answered, start)
    with pytest.raises(ModelFileError, match="no file") as caught:
        run(ray, lines_of("a"))
    assert caught.value.hint == "put it there"
    assert not ray.is_up


def test_a_node_without_specgen_is_named() -> None:
    def start() -> None:
        raise BackendError("No module named 'specgen'")

    ray = FakeRay(answered, start)
    ray.get = lambda ref: ref()  # type: ignore[method-assign]
    ray.exceptions.RayError = BackendError  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match="specgen is not installed"):
        run(ray, lines_of("a"))


def test_no_free_cpus_end_the_batch_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(answered)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.setattr("specgen.serve.batch.on_ray.NODES_S", 0.0)
    with pytest.raises(BackendError, match="no actor has started within .*: 0 of 2 CPUs are free"):
        run(ray, lines_of("a"), cluster=Cluster("local", patience_s=0.01))


def test_a_lost_node_is_noted_and_without_any_the_batch_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specgen.serve.batch.on_ray.NODES_S", 0.0)
    ray = FakeRay(answered)

    def lose(results: Collected) -> bool:
        ray.n_cpus.pop("b", None)
        if len(results.records) > 2:
            ray.n_cpus.pop("a", None)
        return False

    notes: list[str] = []
    job = WorkerJob(print, PROMPTING, SETTINGS, 2)  # type: ignore[arg-type]
    results = Collected()
    with (
        pytest.raises(BackendError, match="no Ray node has 1 CPU"),
        RayBatch(Cluster("local"), job, results, note=notes.append, ray=ray) as batch,
    ):
        batch.run(lines_of(*"abcdefghij"), lambda: lose(results))
    assert notes == [f"the Ray node {name} is gone; others get its lines" for name in "ba"]
    assert results.records


def test_an_interruption_keeps_what_is_done() -> None:
    ray = FakeRay(answered)
    _, results, _ = run(ray, lines_of(*"abcdefgh"), lambda results: len(results.records) == 3)
    assert len(results.records) == 3


@pytest.mark.parametrize("verbose", [False, True])
def test_what_ray_prints_is_shown_with_verbose_only_and_is_no_result(
    capsys: pytest.CaptureFixture[str], *, verbose: bool
) -> None:
    def answer(line: Line) -> Any:
        sys.stdout.write("chatter\n")
        return answered(line)

    job = WorkerJob(print, PROMPTING, SETTINGS, 2)  # type: ignore[arg-type]
    with RayBatch(
        Cluster("local"), job, Collected(), verbose=verbose, ray=FakeRay(answer)
    ) as batch:
        batch.run(lines_of("a"))
    sys.stdout.write("result\n")
    out, err = capsys.readouterr()
    assert (out, err) == ("result\n", "chatter\n" if verbose else "")


def test_smaller_nodes_are_noted() -> None:
    ray = FakeRay(answered)
    ray.n_cpus["a"] = 4.0
    batch, _, (note,) = run(ray, lines_of("a", "b"))
    assert batch.n_actors == 1
    assert note.startswith("b: fewer than 4 CPUs, so no actor there")


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
        "error: --ray needs ray, which is not installed\nhint: pip install 'specgen-gguf[ray]'\n"
    )


# --- real clusters

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or os.name == "nt",
    reason="specgen-gguf[ray] is not installed",
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
    return open_tiny(path)


@needs_ray
def test_a_line_that_kills_actors_is_an_error_and_the_others_are_answered(
    cluster: tuple[str, list[int]], target: Path
) -> None:
    lines = lines_of(*(f"line {n}" if n != 7 else "die" for n in range(16)))
    worker = WorkerJob(partial(open_and_die, target), PROMPTING, SETTINGS, 2, tuple(lines[:1]))
    results, notes = Collected(), list[str]()
    with RayBatch(Cluster(cluster[0]), worker, results, note=notes.append) as batch:
        batch.run(lines)
    assert len(results.records) == 16
    failed = [record for record in results.records.values() if record["error"] is not None]
    assert [record["custom_id"] for record in failed] == ["8"]
    assert "given up after 6 attempts" in failed[0]["error"]["message"]
    assert any("an actor was started again" in note for note in notes)


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
    assert f"there is no file {path}" in result.err


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
        if "ray::Actor" in " ".join([child.name(), *child.cmdline()])
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


def test_one_module_imports_ray() -> None:
    importers = {module for module, path in modules().items() if "ray" in imported(path)}
    assert importers == {"specgen.serve.batch.on_ray"}


def test_what_actors_get_and_return_can_be_sent_to_another_process(target: Path) -> None:
    lines = lines_of("a", {"messages": [{"role": "user", "content": "b"}], "stop": ["x"]})
    job, again = pickle.loads(pickle.dumps((worker_job(target, largest=lines), lines)))
    assert again == lines
    assert job.largest == tuple(lines)
    error = pickle.loads(pickle.dumps(ModelFileError("no file", "put it")))
    assert (type(error), error.message, error.hint) == (ModelFileError, "no file", "put it")
