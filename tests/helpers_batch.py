"""Lines of batches, who answers them, and what comes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from specgen.batch.line_worker import WorkerJob
from specgen.batch.lines import Line, read_lines
from specgen.batch.runner import Prompting
from specgen.engine.session import Session
from specgen.options import ContextOptions, GenerationOptions, SamplerOptions, SessionOptions

PROMPTING = Prompting(None, None, datetime(2026, 1, 1, tzinfo=timezone.utc))
SETTINGS = {"target": "t.gguf"}


def lines_of(*rows: str | Mapping[str, Any]) -> list[Line]:
    data = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return read_lines(data.encode(), "in", SamplerOptions(), GenerationOptions(max_tokens=20))


class Collected:
    """Results, by custom_id; each comes once."""

    def __init__(self) -> None:
        self.records: dict[str, Mapping[str, Any]] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        assert record["custom_id"] not in self.records
        self.records[record["custom_id"]] = record

    def text(self, custom_id: str) -> str:
        return text_of(self.records[custom_id])


def text_of(record: Mapping[str, Any]) -> str:
    choice = record["response"]["body"]["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


def open_tiny(path: Path) -> Session:
    options = SessionOptions(
        path,
        draft="ngram",
        target_context=ContextOptions(n_threads=1),
        generation=GenerationOptions(max_tokens=20),
    )
    return Session(options, time.perf_counter)


def worker_job(path: Path, *, parallel: int = 2, largest: Sequence[Line] = ()) -> WorkerJob:
    return WorkerJob(partial(open_tiny, path), PROMPTING, SETTINGS, parallel, tuple(largest))
