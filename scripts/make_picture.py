"""Draw a recorded run as an SVG picture.

    specgen run --json "..." > run.jsonl
    python scripts/make_picture.py run.jsonl --output docs/images/run.svg

Reads the events that `--json` prints, from a file or from stdin, and shows them as
`--show all` does on a terminal: rejected tokens struck through in their place, then the
summary and the legend.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from specgen.events import Event, FinishedEvent, PromptEvent
from specgen.render import print_summary, read_events
from specgen.render.flow import Flow
from specgen.render.marks import RoundReader
from specgen.render.theme import row_text

#: Rich's picture asks a server for its font; without, the reader's own monospace is taken.
SVG_FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


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
            flow.feed(completed.runs(with_rejected=True))
        elif isinstance(event, PromptEvent):
            prompt = event
        elif isinstance(event, FinishedEvent):
            finished = event
    if finished is None:
        raise ValueError("the run did not finish")
    for row in flow.finish():
        console.print(row_text(row), no_wrap=True, crop=False, overflow="ignore")
    draft = prompt.draft if prompt else None
    print_summary(console, finished, draft=draft, show_legend=True)
    if title is None:
        title = f"{prompt.target} with {prompt.draft}" if prompt else "specgen run"
    svg = console.export_svg(title=title, code_format=SVG_FORMAT, unique_id="specgen")
    return svg.rstrip("\n") + "\n"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("events", nargs="?", default="-", help="JSON Lines; - is stdin")
    parser.add_argument("--output", type=Path, default=Path("docs/images/run.svg"))
    parser.add_argument("--columns", type=int, default=88, help="width of the window")
    parser.add_argument("--title", help="of the window; by default the names of the models")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
