"""The parts of a batch: its lines, results that survive any failure, and Ray actors that die. Most
tests need no Ray.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import BackendError, ModelFileError, OutputError, SpecgenError
from specgen.options import GenerationOptions, SamplerOptions
from specgen.render.tables import batch_summary
from specgen.serve.batch.lines import (
    OWN,
    BatchLine,
    LineError,
    continued,
    notes_on,
    read_lines,
    read_results,
)
from specgen.serve.batch.on_ray import ActorJob, Cluster, Placement, RayBatch, connected, place
from specgen.serve.batch.runner import BatchRun, BatchStats
from specgen.serve.formats.parsed_request import Defaults, ParsedRequest
from specgen.system.files import to_line
from tests.helpers.batch import (
    PATIENCE_S,
    PROMPTING,
    SETTINGS,
    Collected,
    actor_job,
    lines_of,
    open_tiny,
)
from tests.helpers.cli import Specgen

DEFAULTS = SamplerOptions(), GenerationOptions(max_tokens=5)


def request_of(line: BatchLine) -> ParsedRequest:
    assert isinstance(line.request, ParsedRequest), line.request
    return line.request


class TestLines:
    @pytest.mark.parametrize(
        ("line", "code", "word"),
        [
            (b"caf\xe9", "invalid_utf8", "0xe9"),
            (b"a\0b", "invalid_text", "NUL"),
            ("{broken", "invalid_json", "line 1 column 2"),
            ('{"seed": ' + "1" * 5000 + "}", "invalid_json", "number out of range"),
            ({"prompt": 3}, "invalid_request", "prompt: 3 is not a text"),
            ({"promt": "x"}, "invalid_request", "unknown field: promt (did you mean prompt?)"),
            ({"mesages": []}, "invalid_request", "mesages (did you mean messages?)"),
            ({"a": 1, "b": 2, "model": ""}, "invalid_request", "missing; unknown fields: a, b"),
            ({"seed": 1}, "invalid_request", "prompt: it is missing"),
            ({"custom_id": [1], "prompt": "x"}, "invalid_request", "custom_id"),
            ({"custom_id": "\ud800", "prompt": "x"}, "invalid_json", "hex escape"),
            ({"url": "/v1/embeddings", "body": {}}, "invalid_request", "url"),
            ({"body": {}}, "invalid_request", "url: it is missing"),
            ({"url": "/v1/completions", "method": "GET", "body": {}}, "invalid_request", "method"),
            ({"url": "/v1/completions", "body": {}, "model": 1}, "invalid_request", "model"),
            ({"url": "/v1/completions", "body": {"prompt": "x", "n": 3}}, "invalid_request", "n"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_bad_line_is_an_error_and_the_others_are_answered(
        self, line: str | bytes | dict[str, Any], code: str, word: str
    ) -> None:
        first, bad, last = lines_of("a", line, "b")
        assert (request_of(first).text, request_of(last).text) == ("a", "b")
        assert isinstance(bad.request, LineError)
        assert bad.request.code == code
        assert word in bad.request.message
        assert "\n" not in bad.request.message

    @pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
    def test_lines_in_utf_16_are_those_in_utf_8(self, codec: str) -> None:
        text = 'the café\r\n\r\n{"prompt": "é"}\r\n'
        defaults = Defaults(*DEFAULTS)
        assert read_lines(text.encode(codec), "a.txt", defaults) == read_lines(
            text.encode(), "a.txt", defaults
        )

    def test_mistakes_are_noted_with_their_first_line(self) -> None:
        lines = lines_of(
            {"prompt": "a"}, *3 * [{"prompt": "b", "max_token": 3, "user": "me"}], {"promt": "c"}
        )
        ignored, wrong = notes_on(lines)
        assert ignored == (
            "line 2 and 2 others: max_token: ignored, since specgen has no such field "
            "(did you mean max_tokens?)"
        )
        assert wrong == (
            "line 5: not answered: prompt: it is missing; unknown field: promt "
            "(did you mean prompt?)"
        )


def record(custom_id: str, digest: str = "d", *, fails: bool = False, **own: Any) -> dict[str, Any]:
    error = {"code": "failed", "message": "no"} if fails else None
    own = {"request": digest, "settings": SETTINGS, **own}
    return {"custom_id": custom_id, "response": None if fails else {}, "error": error, OWN: own}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def append(out: Path, *records: dict[str, Any]) -> None:
    with continued(out) as (_, write):
        for each in records:
            write(each)


class TestResults:
    def test_cut_anywhere_no_whole_line_is_lost_and_no_half_one_stays(self, out: Path) -> None:
        lines = [to_line(record(name)) for name in ("a", "é", "c")]
        whole = b"".join(lines)
        ends = [len(b"".join(lines[:n])) for n in range(4)]
        for n in range(len(whole) + 1):
            out.write_bytes(whole[:n])
            # A line whose end alone is missing is whole.
            n_whole = sum(end - 1 <= n for end in ends[1:])
            assert len(read_results(out).digests) == n_whole, n
            append(out, record("z"))
            kept = [json.loads(raw)["custom_id"] for raw in out.read_bytes().splitlines()]
            assert kept == [*["a", "é", "c"][:n_whole], "z"]

    @pytest.mark.parametrize(
        "damage",
        ["{}", "3", "broken", json.dumps({**record("b"), OWN: {}}), json.dumps(record("a"))],
    )
    def test_damage_before_the_end_is_an_error(self, out: Path, damage: str) -> None:
        out.write_bytes(to_line(record("a")) + damage.encode() + b"\n" + to_line(record("c")))
        before = out.read_bytes()
        with pytest.raises(OutputError, match="line 2 is not a result"):
            read_results(out)
        assert out.read_bytes() == before

    def test_a_full_disk_does_not_destroy_existing_results(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append(out, record("a"))
        before, write = out.read_bytes(), os.write

        def half(descriptor: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return int(write(descriptor, data[: len(data) // 2]))

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(OutputError, match="No space left"):
            append(out, record("b"))
        assert out.read_bytes() == before


def test_the_summary_mentions_drafts_and_caches_if_there_were_any() -> None:
    stats = BatchStats(n_lines=3, n_answers=2, n_errors=1, n_tokens=100, n_prompt_tokens=40)
    told = "2 answers, 100 tokens in all, 400 ms: 250.0 tokens/s, 4 at once"
    assert batch_summary(stats, 0.4, "4 at once") == told
    told = "2 answers, 100 tokens in all, 50 s: 2.0 tokens/s, 4 at once"
    assert batch_summary(stats, 50.0, "4 at once") == told
    stats.n_positions, stats.n_accepted, stats.n_cached_tokens = 50, 20, 10
    told += ", 40% of the draft accepted, 25% of the prompts from the cache"
    assert batch_summary(stats, 50.0, "4 at once") == told


# --- Ray

# --- where actors go


@pytest.mark.parametrize(
    ("nodes", "asked", "found"),
    [
        ([(8, 0), (8, 0)], (None, None), (2, 8, 0)),
        ([(0, 0), (8, 0)], (None, None), (1, 8, 0)),
        ([(8, 0), (16, 0)], (4, None), (6, 4, 0)),
        ([(32, 4), (64, 0)], (None, None), (1, 32, 4)),
        ([(32, 4), (32, 4)], (None, 1), (8, 8, 1)),
        ([(32, 4)], (2, 0.5), (8, 2, 0.5)),
        ([(20, 1)], (None, 0.2), (5, 4, 0.2)),
        ([(1, 0)], (0.1, None), (10, 0.1, 0)),
        ([(6, 1)], (None, 0.33333), (3, 2, 0.3333)),
    ],
)
def test_each_node_like_the_largest_has_an_actor_unless_told_otherwise(
    nodes: Any, asked: Any, found: tuple[int, float, float]
) -> None:
    assert place(nodes, *asked) == Placement(*found)


def test_resources_that_no_node_has_are_reported() -> None:
    for nodes, asked, said in (
        ([], (None, None), "has 1 CPUs and 0 GPUs for an actor; nodes have none"),
        ([(8, 1)], (9, 2), "has 9 CPUs and 2 GPUs for an actor; nodes have 8 CPUs and 1 GPUs"),
        ([(4, 2), (8, 0)], (8, 2), "nodes have 8 CPUs and 0 GPUs; 4 CPUs and 2 GPUs"),
    ):
        with pytest.raises(BackendError, match=said):
            place(nodes, *asked)


# --- the driver, with a Ray whose actors are in this process


class FakeRayError(Exception):
    """As Ray's: `cause` is the exception of a task."""

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """The functions of Ray that the driver calls. A line with the text "die" ends its actor."""

    def __init__(self) -> None:
        self.exceptions = type("exceptions", (), {"RayError": FakeRayError})
        self.n_cpus = {"head": 0.0, "a": 1.0, "b": 1.0}
        self.is_up = True
        self.portions: list[list[str]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": n}} for n in self.n_cpus.values()]

    def remote(self, actor: type) -> Any:
        factory = type(
            "Factory", (), {"remote": lambda _self, *given: FakeActor(self, actor, *given)}
        )
        return type("Options", (), {"options": lambda _self, **_options: factory()})()

    def wait(self, refs: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout < 1.0
        return list(refs[-1:]), list(refs[:-1])

    def get(self, ref: Any) -> Any:
        try:
            return ref() if callable(ref) else ref
        except SpecgenError as error:
            raise FakeRayError(error) from None

    def shutdown(self) -> None:
        self.is_up = False


class FakeActor:
    """A handle of an actor; what a method's `remote` returns is a ref, or a stream of refs."""

    def __init__(self, ray: FakeRay, kind: type, *given: Any) -> None:
        self._actor = kind(*given)
        self._ray = ray
        self.ready = self.answer = self

    def options(self, **options: Any) -> FakeActor:
        assert options == {"num_returns": "streaming"}
        return self

    def remote(self, lines: Sequence[BatchLine] | None = None) -> Any:
        return partial(self._actor.ready) if lines is None else self._stream(lines)

    def _stream(self, lines: Sequence[BatchLine]) -> Iterator[Any]:
        self._ray.portions.append([line.custom_id for line in lines])
        for said in self._actor.answer(pickle.loads(pickle.dumps(lines))):
            sys.stdout.write("chatter\n")
            yield pickle.loads(pickle.dumps(said))
            if any("die" in str(line.request) for line in lines):
                yield lambda: (_ for _ in ()).throw(FakeRayError())
                return


def run(
    ray: FakeRay,
    job: ActorJob,
    lines: Sequence[BatchLine],
    interrupted: Callable[[Collected], bool] = lambda _results: False,
    *,
    patience_s: float = PATIENCE_S,
    verbose: bool = False,
    results: Collected | None = None,
) -> tuple[RayBatch, Collected]:
    results, cluster = results or Collected(), Cluster("local", patience_s=patience_s)
    ray.is_up = True
    with connected(cluster, verbose=verbose, ray=ray):
        batch = RayBatch(ray, cluster, job, results.write)
        for _ in batch.run(lines, lambda: interrupted(results)):
            pass
    assert not ray.is_up
    return batch, results


def test_actors_answer_as_a_batch_does(target: Path) -> None:
    """Lines of all sizes, including invalid lines and lines that cannot be answered."""
    rows: list[dict[str, Any]] = [
        *({"prompt": f"the cat {n}", "seed": n, "temperature": 0.8} for n in range(50)),
        *({"prompt": "long", "max_tokens": n, "ignore_eos": True} for n in (150, 700)),
        *({"prompt": prompt} for prompt in (7, "x " * 2000)),
    ]
    lines, plain, ray = lines_of(*rows), Collected(), FakeRay()
    with open_tiny(target) as session:
        here = BatchRun(
            session, PROMPTING, plain.write, SETTINGS, parallel=2, wall_clock=lambda: 0.0
        )
        for _ in here.run(lines):
            pass
    batch, results = run(ray, actor_job(target), lines)
    assert results.records.keys() == plain.records.keys()
    for name, record in plain.records.items():
        assert results.records[name]["error"] == record["error"]
        assert results.records[name]["specgen"] == record["specgen"]
        if record["error"] is None:
            assert results.text(name) == plain.text(name)
    for name in ("n_lines", "n_answers", "n_errors", "n_tokens", "n_prompt_tokens"):
        assert getattr(batch.stats, name) == getattr(here.stats, name)
    assert batch.stats.n_positions > 0
    assert (batch.n_actors, batch.where) == (2, "2 Ray actors")
    assert len(ray.portions) > 4  # so that a fast actor gets more
    assert {name for portion in ray.portions for name in portion} == results.records.keys()


def test_lines_of_an_actor_that_ended_are_for_the_next_run(target: Path) -> None:
    lines = lines_of(*(f"line {n}" if n != 3 else "die" for n in range(40)))
    results = Collected()
    with pytest.raises(BackendError, match="of 40 lines have no answer, since their actors ended"):
        run(FakeRay(), actor_job(target), lines, results=results)
    # The other actor goes on.
    left = {line.custom_id: line for line in lines if line.custom_id not in results.records}
    assert 0 < len(left) <= 10
    del left["4"]  # it would end another actor
    run(FakeRay(), actor_job(target), list(left.values()), results=results)
    assert len(results.records) == 39


def test_an_actor_that_cannot_start_ends_the_batch_with_its_error(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ActorJob(partial(open_tiny, target), PROMPTING, SETTINGS, 2, {"m.gguf": 7})
    with pytest.raises(ModelFileError, match=r"the Ray node .*: there is no file m\.gguf"):
        run(FakeRay(), job, lines_of("a"))
    ray = FakeRay()

    def get(_ref: Any) -> Any:
        raise FakeRayError(ImportError("No module named 'specgen'"))

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(BackendError, match="specgen is not installed"):
        run(ray, actor_job(target), lines_of("a"))
    assert not ray.is_up


def test_a_batch_ends_without_free_cpus_and_after_an_interruption(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, ray = lines_of(*map(str, range(40))), FakeRay()
    _, results = run(ray, actor_job(target), lines, lambda results: len(results.records) >= 3)
    assert 3 <= len(results.records) < 40
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: ([], refs))
    with pytest.raises(BackendError, match="no actor has started within"):
        run(ray, actor_job(target), lines, patience_s=0.01)


# --- the command line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray", "ray://h:1"), "--ray ray://h:1: not the address"),
        (("--ray", "somewhere"), "not the address"),
        (("--ray", "local", "--rpc", "h:1"), "--ray and --rpc cannot be used together"),
        (("--gpus-per-worker", "1"), "go with --ray"),
        (("--ray", "local", "--gpus-per-worker", "1.5"), "Ray can split only a single GPU"),
        (("--ray", "local"), "hint: pip install 'specgen-gguf[ray]'\n"),
    ],
)
def test_an_invalid_cluster_is_rejected(
    specgen: Specgen,
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    said: str,
) -> None:
    found = None if "pip install" in said else object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)
    (tmp_path / "in").write_text("a\n")
    result = specgen("batch", tmp_path / "in", tmp_path / "out", "-m", target, *options)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert not (tmp_path / "out").exists()
