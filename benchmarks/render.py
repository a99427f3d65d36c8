"""CPU time of the live view per round.

    python benchmarks/render.py --columns 100 --rows 30

Sends invented rounds (three drafted tokens, none to three of them accepted) to the live view,
which writes to the null device, and times each round. The terminal's own work is not included.
Answers of several lengths show that the cost of a round does not grow with the text. "one line" is
text without line feeds. "one word" has no spaces either, which is the case in which most rows are
redrawn.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import rich.console

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    DraftNode,
    Event,
    Piece,
    RejectedBranch,
    TokenKind,
    VerifiedEvent,
)
from specgen.options import Show
from specgen.render.live import LiveRenderer

WORDS = ["the", "model", "of", "a", "draft", "target", "token", "text", "is", "and", "in", "two"]
#: Kinds of text: what separates words, and the probability of a line feed instead of a word.
TEXTS = {"prose": (" ", 0.02), "one line": (" ", 0.0), "one word": ("", 0.0)}
N_DRAFTED = 3
#: The rounds at the start that are not counted.
N_WARM_UP = 20


def main() -> int:
    arguments = parse_arguments()
    shows: tuple[Show, ...] = get_args(Show)
    cases = [
        {
            "text": text,
            "show": show,
            "n_rounds": n_rounds,
            **measure(show, list(rounds(n_rounds, space, line_feed)), arguments),
        }
        for text, (space, line_feed) in TEXTS.items()
        for show in shows
        for n_rounds in arguments.rounds
    ]
    print(
        json.dumps(
            {
                "benchmark": "render",
                "python": platform.python_version(),
                "machine": platform.machine(),
                "columns": arguments.columns,
                "rows": arguments.rows,
                "cases": cases,
            }
        )
    )
    return 0


def measure(
    show: Show, events: list[tuple[Event, ...]], arguments: argparse.Namespace
) -> dict[str, float]:
    """CPU microseconds per round: the median, the 99th percentile and the maximum."""
    times_us = []
    with Path(os.devnull).open("w", encoding="utf-8") as output:
        console = rich.console.Console(
            file=output,
            force_terminal=True,
            color_system="truecolor",
            width=arguments.columns,
            height=arguments.rows,
        )
        with LiveRenderer(console, show) as renderer:
            for round_events in events:
                started_ns = time.process_time_ns()
                for event in round_events:
                    renderer.handle(event)
                times_us.append((time.process_time_ns() - started_ns) / 1000)
    times_us = sorted(times_us[N_WARM_UP:])
    return {
        "median_us": round(statistics.median(times_us), 1),
        "p99_us": round(times_us[int(0.99 * len(times_us))], 1),
        "max_us": round(times_us[-1], 1),
    }


def rounds(n_rounds: int, space: str, line_feed: float) -> Iterator[tuple[Event, ...]]:
    """The events of each round."""
    rng = random.Random(1)
    n_tokens = 0
    for number in range(1, n_rounds + N_WARM_UP + 1):
        n_accepted = rng.randint(0, N_DRAFTED)
        drafted = [
            "\n" if rng.random() < line_feed else space + rng.choice(WORDS)
            for _ in range(N_DRAFTED)
        ]
        nodes = tuple(
            DraftNode(index, text, index - 1, "model", 0.5) for index, text in enumerate(drafted)
        )
        accepted = tuple(range(n_accepted))
        rejected: tuple[RejectedBranch, ...] = ()
        if n_accepted < N_DRAFTED:
            branch = tuple(range(n_accepted, N_DRAFTED))
            rejected = (RejectedBranch(branch, "".join(drafted[n_accepted:])),)
        own: TokenKind = "corrected" if rejected else "bonus"
        pieces = (
            *(Piece(index, drafted[index], "accepted", "model") for index in accepted),
            Piece(99, space + rng.choice(WORDS), own, "target"),
        )
        n_tokens += len(pieces)
        text = "".join(piece.text for piece in pieces)
        time_s = number * 0.1
        yield (
            DraftedEvent(0, time_s, number, nodes),
            VerifiedEvent(0, time_s, number, accepted, rejected, 99, own),
            CommittedEvent(0, time_s, number, pieces, text, n_tokens),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--columns", type=int, default=100, help="width of the window")
    parser.add_argument("--rows", type=int, default=30, help="height of the window")
    parser.add_argument("--rounds", type=int, nargs="+", default=[100, 10_000], help="of an answer")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
