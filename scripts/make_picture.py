"""Draw recorded answers as an animated SVG, in which each token appears when it was generated.

    specgen run --json --draft none "..." > plain.jsonl
    specgen run --json "..." > drafted.jsonl
    python scripts/make_picture.py plain.jsonl drafted.jsonl --output docs/images/run.svg

It reads the events that `--json` prints. All answers start at the same time, and rejected tokens
are struck through where they were drafted. A viewer that cannot animate, or whose user prefers
reduced motion, shows the finished answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

#: Sizes in pixels; a character is as wide as in most fonts of this size.
FONT, CHARACTER, LINE, MARGIN = 14, 8.43, 20, 16
#: How long the finished answers stay visible, in seconds of the animation.
REST_S = 4.0
STYLE = """
text {
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  fill: #e6e6e3;
  white-space: pre
}
.faint { fill: #a3a29b }
.accepted { fill: #5fce86; text-decoration: underline }
.rejected { fill: #ff9b91; text-decoration: line-through }
.corrected { fill: #f58be3 }
.bonus { fill: #5bd2e6 }
@media (prefers-reduced-motion) { * { animation: none !important } }
"""
LEGEND = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "corrected": "corrected by the target",
    "bonus": "bonus token",
}
Events = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is shown, and when it appears, in seconds from the start."""

    text: str
    kind: str
    time_s: float


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        answers = [read_events(path) for path in options.events]
        svg = draw(answers, columns=options.columns, slower=options.slower)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(svg, encoding="utf-8", newline="\n")
    return 0


def read_events(path: Path) -> Events:
    """Return the events of a finished answer. Raise `OSError`, or `ValueError` without an end."""
    found: Events = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    if not found or {found[0].get("event"), found[-1].get("event")} != {"prompt", "finished"}:
        raise ValueError(f"{path}: the run did not finish")
    return found


def tokens_of(events: Events) -> Iterator[Token]:
    rejected: list[str] = []
    for event in events:
        if event["event"] == "verified":
            rejected = [branch["text"] for branch in event["rejected"]]
        elif event["event"] == "committed":
            pieces = [
                Token(each["text"], each["kind"], event["time_s"]) for each in event["pieces"]
            ]
            n_kept = sum(each.kind == "accepted" for each in pieces)
            wrong = [
                Token(text.replace("\n", "↵"), "rejected", event["time_s"]) for text in rejected
            ]
            yield from (*pieces[:n_kept], *wrong, *pieces[n_kept:])
            rejected = []


def rows_of(tokens: Sequence[Token], columns: int) -> list[list[Token]]:
    """Break the tokens into rows, between words where possible."""
    rows: list[list[Token]] = [[]]
    width = 0
    characters = [Token(each, token.kind, token.time_s) for token in tokens for each in token.text]
    for is_space, group in itertools.groupby(characters, lambda each: each.text in " \n"):
        word = list(group)
        if not is_space and width and width + len(word) > columns:
            rows.append([])
            width = 0
        for each in word:
            if each.text == "\n" or width == columns:
                rows.append([])
                width = 0
            if each.text != "\n" and (width or not is_space or len(word) > 1):
                rows[-1].append(each)
                width += 1
    return rows


def draw(answers: Sequence[Events], *, columns: int, slower: float) -> str:
    """Return the SVG: the answers below one another, then a legend of the colours."""
    last_s = max(answer[-1]["time_s"] for answer in answers)
    whole_s = slower * last_s + REST_S
    times: dict[float, str] = {}
    drawn: list[str] = []
    y = MARGIN

    def write(text: str, kind: str, column: int, time_s: float = 0.0) -> None:
        shown = times.setdefault(time_s, f"t{len(times)}") if time_s else ""
        names = " ".join(filter(None, (kind, shown)))
        x, length = MARGIN + column * CHARACTER, len(text) * CHARACTER
        drawn.append(
            f'<text class="{names}" x="{x:.1f}" y="{y}" textLength="{length:.1f}">'
            f"{escape(text)}</text>"
        )

    for answer in answers:
        prompt, finished = answer[0], answer[-1]
        y += LINE
        drafts = "" if prompt["draft"] == "none" else f", drafts from {prompt['draft']}"
        write(f"{prompt['target']}{drafts or ', without drafts'}", "faint", 0)
        for row in rows_of(list(tokens_of(answer)), columns):
            y += LINE
            column = 0
            for (kind, time_s), group in itertools.groupby(
                row, lambda each: (each.kind, each.time_s)
            ):
                text = "".join(each.text for each in group)
                if text.strip():
                    indent = len(text) - len(text.lstrip())
                    write(text.strip(), kind, column + indent, time_s)
                column += len(text)
        y += LINE + LINE // 4
        said = f"{finished['n_tokens']} tokens in {finished['wall_s']:.1f} s"
        if answer is not answers[0]:
            said += f": {answers[0][-1]['wall_s'] / finished['wall_s']:.1f}x as fast"
        write(said, "faint", 0, finished["time_s"])
        y += LINE // 2
    y += LINE
    column = 0
    for kind, meaning in LEGEND.items():
        write(meaning, kind, column)
        column += len(meaning) + 3
    width, height = round(2 * MARGIN + columns * CHARACTER), y + MARGIN
    frames = []
    for time_s, name in times.items():
        at = 100 * slower * time_s / whole_s
        frames.append(
            f"@keyframes {name}{{0%,{at:.2f}%{{opacity:0}}{at + 0.01:.2f}%,to{{opacity:1}}}}"
            f".{name}{{animation:{name} {whole_s:.1f}s infinite}}"
        )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}{''.join(frames)}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1a1a19"/>',
        *drawn,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "events", nargs="+", type=Path, help="files of JSON Lines, one for each answer"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/images/run.svg"))
    parser.add_argument("--columns", type=int, default=92, help="width of the text, in characters")
    parser.add_argument(
        "--slower", type=float, default=2.0, help="factor by which the animation is slowed down"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
