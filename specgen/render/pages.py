"""Pages of one file each: a replay, in which an answer grows round by round as it did, and a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from specgen.events import Event, to_json_object
from specgen.system.files import write_errors


def write_replay(path: Path, events: Sequence[Event]) -> None:
    """Write the page of one generation. Raise `OutputError`."""
    # It lies with the server's page, which saves replays as well.
    _write(path, "specgen.serve.server", "page/replay.html", [*map(to_json_object, events)])


def write_bench_page(path: Path, document: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Write the page of what `specgen bench` measured. Raise `OutputError`."""
    _write(path, "specgen.render", "bench.html", {**document, "notes": notes})


def _write(path: Path, package: str, template: str, data: object) -> None:
    page = files(package).joinpath(template).read_text(encoding="utf-8")
    # Nothing in a script may look like the beginning of a tag.
    text = json.dumps(data).replace("<", "\\u003c")
    with write_errors(path):
        path.write_text(page.replace("DATA_HERE", text, 1), encoding="utf-8")
