"""Pages of one file each: a replay, in which an answer grows round by round as it did, and a benchmark."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from specgen.system.files import write_errors

#: Where a page lies: the package, and the file in it. The server's page saves replays as well.
REPLAY, BENCH = ("specgen.serve.server", "page/replay.html"), ("specgen.render", "bench.html")


def write_page(path: Path, template: tuple[str, str], data: object) -> None:
    """Write a page with its data: for `REPLAY` the events of a generation. Raise `OutputError`."""
    page = files(template[0]).joinpath(template[1]).read_text(encoding="utf-8")
    # Nothing in a script may look like the beginning of a tag.
    text = json.dumps(data).replace("<", "\\u003c")
    with write_errors(path):
        path.write_text(page.replace("DATA_HERE", text, 1), encoding="utf-8")
