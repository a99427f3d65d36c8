"""Draw a recorded run as an SVG picture.

    specgen run --json "..." > run.jsonl
    python scripts/make_picture.py run.jsonl --output docs/images/run.svg

Reads the events that `--json` prints, from a file or from stdin, and shows them as
`--show all` does on a terminal: rejected tokens struck through in
their place, then the summary and the legend.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from specgen.events import (
    EVENT_TYPES,
    DraftNode,
    Event,
    FinishedEvent,
    Piece,
    PromptEvent,
    ReasonCount,
    RejectedBranch,
)
from specgen.render.rows import STYLES, Flow, RoundReader, Row
from specgen.render.summary import print_summary

#: Rich's picture asks a server for its font; without, the reader's own monospace is taken.
SVG_FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
_TYPES = {kind.event: kind for kind in EVENT_TYPES}
#: Fields that are lists of nested values.
_PARTS: dict[str, type[Any]] = {
    "nodes": DraftNode,
    "pieces": Piece,
    "rejected": RejectedBranch,
    "undrafted": ReasonCount,
}


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.events == "-":
            events = list(read_events(sys.stdin))
        else:
            with Path(options.events).open(encoding="utf-8") as lines:
                events = list(read_events(lines))
        svg = draw(events, columns=options.columns, title=options.title)
    except (OSError, ValueError) as error:
        print(f"error: {options.events}: {error}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(svg, encoding="utf-8", newline="\n")
    return 0


def draw(events: Iterable[Event], *, columns: int, title: str | None = None) -> str:
    """The picture of a finished run. Raises `ValueError` if the events hold none."""
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        width=columns,
        legacy_windows=False,
        _environ={},
    )
    rounds, flow = RoundReader(), Flow(columns)
    prompt: PromptEvent | None = None
    finished: FinishedEvent | None = None
    for event in events:
        completed = rounds.read(event)
        if completed is not None:
            flow.feed(completed.runs(shows_all=True))
        elif isinstance(event, PromptEvent):
            prompt = event
        elif isinstance(event, FinishedEvent):
            finished = event
    if finished is None:
        raise ValueError("the run did not finish")
    for row in flow.finish():
        console.print(row_text(row), no_wrap=True, crop=False, overflow="ignore")
    draft = prompt.draft if prompt else None
    kernels = prompt.kernels if prompt else None
    print_summary(console, finished, draft=draft, kernels=kernels, show_legend=True)
    if title is None:
        title = f"{prompt.target} with {prompt.draft}" if prompt else "specgen run"
    svg = console.export_svg(title=title, code_format=SVG_FORMAT, unique_id="specgen")
    return svg.rstrip("\n") + "\n"


def row_text(row: Row) -> Text:
    """Return a row for Rich to print."""
    text = Text(no_wrap=True, end="")
    for part, mark in row.runs():
        text.append(part, STYLES.get(mark))
    return text


def from_json_object(value: object) -> Event:
    """Return the event of an object that `to_json_object` made.

    Unknown fields are ignored. Raises `ValueError` if the value is no event, or lacks a field.
    """
    kind = _TYPES.get(str(value.get("event"))) if isinstance(value, dict) else None
    if kind is None or not isinstance(value, dict):
        raise ValueError(f"not an event: {str(value)[:80]}")
    try:
        # `nodes` is a list of values in an event, but a list of numbers in such a value.
        parts = {
            name: tuple(_build(_PARTS[name], part) for part in value[name])
            for name in _names(kind)
            if name in _PARTS and name in value
        }
        event: Event = _build(kind, value | parts)
    except TypeError as error:  # it names the fields that are missing
        raise ValueError(f"an incomplete {kind.event} event: {error}") from error
    return event


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events in JSON Lines; empty lines are skipped. Raises a `ValueError` with the line's number
    if a line is no event."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                event = from_json_object(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            yield event


def _build(kind: type[Any], value: dict[str, Any]) -> Any:
    return kind(**{name: _tuple(value[name]) for name in _names(kind) if name in value})


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("events", nargs="?", default="-", help="JSON Lines; - is stdin")
    parser.add_argument("--output", type=Path, default=Path("docs/images/run.svg"))
    parser.add_argument("--columns", type=int, default=88, help="width of the window")
    parser.add_argument("--title", help="of the window; by default the names of the models")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
