"""The replay: a page of one file in which an answer grows round by round, as it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from specgen.events import Event, to_json_object
from specgen.system.files import write_errors


def write_replay(path: Path, events: Sequence[Event]) -> None:
    """Write the page of one generation, which needs no other file. Raise `OutputError`."""
    page = files("specgen.render").joinpath("replay.html").read_text(encoding="utf-8")
    # Nothing in a script may look like the beginning of a tag.
    told = json.dumps([to_json_object(event) for event in events]).replace("<", "\\u003c")
    with write_errors(path):
        path.write_text(page.replace("EVENTS_HERE", told, 1), encoding="utf-8")
