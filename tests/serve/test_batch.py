"""The parts of a batch: its lines, the order of its prompts, and results that survive any end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import OutputError
from specgen.options import GenerationOptions, SamplerOptions
from specgen.render.tables import batch_summary
from specgen.serve.batch.lines import OWN, Line, LineError, continued, read_results
from specgen.serve.batch.runner import Tally
from specgen.serve.formats.request import Request
from specgen.system.files import to_line
from tests.helpers.batch import lines_of

DEFAULTS = SamplerOptions(), GenerationOptions(max_tokens=5)


def request_of(line: Line) -> Request:
    assert isinstance(line.request, Request), line.request
    return line.request


class TestLines:
    @pytest.mark.parametrize(
        ("line", "code", "word"),
        [
            (b"caf\xe9", "invalid_utf8", "0xe9"),
            ("{broken", "invalid_json", "line 1 column 2"),
            ('{"seed": ' + "1" * 5000 + "}", "invalid_json", "number out of range"),
            ({"prompt": 3}, "invalid_request", "prompt: 3 is not a text"),
            ({"custom_id": [1], "prompt": "x"}, "invalid_request", "custom_id"),
            ({"custom_id": "\ud800", "prompt": "x"}, "invalid_json", "hex escape"),
            ({"url": "/v1/embeddings", "body": {}}, "invalid_request", "url"),
            ({"body": {}}, "invalid_request", "url: it is missing; give one of /v1/"),
            ({"url": "/v1/completions", "method": "GET", "body": {}}, "invalid_request", "method"),
            ({"url": "/v1/completions", "body": {}, "model": 1}, "invalid_request", "model"),
            ({"url": "/v1/completions", "body": {"prompt": "x", "n": 3}}, "invalid_request", "n"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_a_bad_line_is_an_error_and_the_others_go_on(
        self, line: str | bytes | dict[str, Any], code: str, word: str
    ) -> None:
        first, bad, last = lines_of("a", line, "b")
        assert (request_of(first).text, request_of(last).text) == ("a", "b")
        assert isinstance(bad.request, LineError)
        assert bad.request.code == code
        assert word in bad.request.message
        assert "\n" not in bad.request.message


SETTINGS = {"target": "a.gguf", "temperature": 0.5}


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

    def test_a_full_disk_takes_nothing_that_was_there(
        self, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append(out, record("a"))
        before, write = out.read_bytes(), __import__("os").write

        def half(descriptor: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return int(write(descriptor, data[: len(data) // 2]))

        monkeypatch.setattr("specgen.system.files.os.write", half)
        with pytest.raises(OutputError, match="No space left"):
            append(out, record("b"))
        assert out.read_bytes() == before


def test_the_summary_tells_of_drafts_and_caches_where_there_were_any() -> None:
    tally = Tally(n_lines=3, n_answers=2, n_errors=1, n_tokens=100, n_prompt_tokens=40)
    told = "2 answers of 100 tokens, 5 s: 20.0 tokens/s, 4 at once"
    assert batch_summary(tally, 5.0, "4 at once") == told
    tally.n_drafted, tally.n_accepted, tally.n_cached_tokens = 50, 20, 10
    told += ", 40% of the draft accepted, 25% of the prompts from the cache"
    assert batch_summary(tally, 5.0, "4 at once") == told
