"""Lines of batches, sessions that answer them, and their results."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specgen.options import ContextOptions, GenerationOptions, SessionOptions
from specgen.serve.batch.lines import BatchLine, read_lines
from specgen.serve.batch.on_ray import ActorJob
from specgen.serve.batch.runner import Prompting
from specgen.serve.formats.parsed_request import Defaults
from specgen.session.session import Session

PROMPTING = Prompting(None, None, datetime(2026, 1, 1, tzinfo=timezone.utc))
SETTINGS = {"target": "t.gguf"}
#: The seconds after which a test gives up waiting.
PATIENCE_S = 120.0


def lines_of(*rows: str | bytes | Mapping[str, Any]) -> list[BatchLine]:
    texts = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
    raw = b"\n".join(text.encode() if isinstance(text, str) else text for text in texts)
    return read_lines(raw, "in", Defaults(generation=GenerationOptions(max_tokens=20)))


class Collected:
    """Collects results by custom_id. Each must come only once."""

    def __init__(self) -> None:
        self.records: dict[str, Mapping[str, Any]] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        assert record["custom_id"] not in self.records
        self.records[record["custom_id"]] = record

    def text(self, custom_id: str) -> str:
        return text_of(self.records[custom_id])


def text_of(record: Mapping[str, Any]) -> str:
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    (choice,) = record["response"]["body"]["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def records(path: Path) -> dict[str, Mapping[str, Any]]:
    """The results in a file by custom_id. Each must be there only once."""
    collected = Collected()
    for raw in path.read_bytes().splitlines():
        collected.write(json.loads(raw, parse_constant=pytest.fail))
    return collected.records


def answers(path: Path) -> dict[str, str]:
    """The texts in a file of results by custom_id. None of them may be an error."""
    return {custom_id: text_of(record) for custom_id, record in records(path).items()}


def n_results(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_results(out: Path, n: int, process: subprocess.Popen[Any]) -> None:
    """Wait until a running command has written this many results, or has ended successfully."""
    until = time.monotonic() + PATIENCE_S
    while n_results(out) < n and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.002)
    assert not process.poll(), process.communicate()


def open_tiny(path: Path) -> Session:
    options = SessionOptions(
        path,
        draft="ngram",
        target_context=ContextOptions(n_threads=1),
        generation=GenerationOptions(max_tokens=20),
    )
    return Session(options, time.perf_counter)


def actor_job(path: Path) -> ActorJob:
    files = {str(path): path.stat().st_size}
    return ActorJob(partial(open_tiny, path), PROMPTING, SETTINGS, 2, files)
