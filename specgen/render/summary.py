"""The summary after an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.text import Text

from specgen.engine.calibration.gain import is_impossible
from specgen.events import Event, FinishedEvent, PromptEvent, undrafted_text
from specgen.render.base import Renderer, say
from specgen.render.marks import FAINT, legend
from specgen.render.text import can_encode, clean_line, counted
from specgen.system.machine import busy_text, is_busy

_BARS = "▁▂▃▄▅▆▇█"
#: Below this width labels are above their texts.
_NARROW_COLUMNS = 40
#: Above this share of rounds that drafted nothing, the summary says why.
_LITTLE = 0.25
#: Speeds that differ by at most this share count as equal; in answers of fewer than `_N_SURE` tokens by `_ROUGH`.
_NOISE, _ROUGH, _N_SURE = 0.03, 0.05, 100


class SummaryRenderer(Renderer):
    """Prints the summary of a finished generation, on stderr.

    `show_legend` explains the colours again, if colours were shown.
    """

    def __init__(self, console: Console, *, show_legend: bool = False) -> None:
        self._console = console
        self._show_legend = show_legend
        self._prompt: PromptEvent | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, PromptEvent):
            self._prompt = event
        elif isinstance(event, FinishedEvent):
            print_summary(
                self._console,
                event,
                draft=self._prompt.draft if self._prompt else None,
                kernels=self._prompt.kernels if self._prompt else None,
                show_legend=self._show_legend,
            )


def print_summary(
    console: Console,
    finished: FinishedEvent,
    *,
    draft: str | None = None,
    kernels: str | None = None,
    show_legend: bool = False,
) -> None:
    """Print the summary.

    On a terminal it has two columns; elsewhere a line for each item, so that it can be searched. `draft` is
    the name of the drafter, `kernels` of what computed, both from the prompt's event.
    """
    items = list(summary_items(finished, draft=draft, kernels=kernels, encoding=console.encoding))
    if show_legend and finished.n_drafted:
        items.append(("legend", legend()))
    if not console.is_terminal:
        for label, text in items:
            say(console, Text.assemble(f"{label}: ", text))
        return
    narrow = console.width < _NARROW_COLUMNS
    indent = 0 if narrow else 2 + max(len(label) for label, _ in items)
    say(console, Text())
    for label, text in items:
        if narrow:
            say(console, Text(label, FAINT))
        heading = Text(label.ljust(indent), FAINT) if indent else Text()
        for line in text.wrap(console, console.width - indent):
            line.rstrip()
            say(console, Text.assemble(heading, line))
            heading = Text(" " * indent)


def summary_items(
    finished: FinishedEvent,
    *,
    draft: str | None = None,
    kernels: str | None = None,
    encoding: str = "utf-8",
) -> Iterator[tuple[str, Text]]:
    """Return (label, text) for all known figures."""
    yield "answer", Text(", ".join(_answer(finished)))
    if finished.tokens_per_s is not None or finished.time_to_first_token_s is not None:
        yield "speed", Text(", ".join(_speed(finished)))
    if finished.n_drafted:
        yield "drafts", Text(", ".join(_drafts(finished)))
        yield "by depth", Text(by_depth(finished, encoding))
        if len(finished.drafted_by_rank) > 1:
            yield "by guess", Text(by_rank(finished, encoding))
    elif finished.n_rounds and draft not in (None, "none"):
        yield "drafts", Text("nothing was drafted")
    n_undrafted = sum(each.n_rounds for each in finished.undrafted)
    if draft != "none" and n_undrafted > _LITTLE * finished.n_rounds:
        yield "reasons", Text(undrafted_text(finished.undrafted, finished.n_rounds))
    if finished.wall_s > 0:
        yield "time", Text(", ".join(_time(finished)))
    if kernels not in (None, "llama.cpp"):  # those of our own: the others are what one expects
        yield "kernels", Text(kernels)
    if finished.estimated_speedup is not None:
        yield "gain", _gain(finished, draft)
    yield "end", Text(_end(finished, encoding))


def _answer(finished: FinishedEvent) -> Iterator[str]:
    yield counted(finished.n_tokens, "token")
    yield counted(finished.n_rounds, "round")
    if finished.mean_accepted_length is not None:
        yield f"{finished.mean_accepted_length:.2f} tokens per pass of the target"
    if finished.n_forced:
        yield f"{finished.n_forced} forced by the grammar"


def _speed(finished: FinishedEvent) -> Iterator[str]:
    if finished.tokens_per_s is not None:
        yield f"{_figure(finished.tokens_per_s)} tokens/s"
    if finished.time_to_first_token_s is not None:
        prompt = counted(finished.n_prompt_tokens, "prompt token")
        yield f"first token after {_seconds(finished.time_to_first_token_s)} ({prompt})"


def _drafts(finished: FinishedEvent) -> Iterator[str]:
    if finished.acceptance_rate is not None:
        yield f"acceptance rate {finished.acceptance_rate:.0%}"
    yield f"{finished.n_accepted} of {counted(finished.n_drafted, 'token')} accepted"


def by_depth(finished: FinishedEvent, encoding: str = "utf-8") -> str:
    """Return the acceptance rate at each depth of the drafts, as bars and numbers."""
    return _shares(finished.accepted_by_depth, finished.drafted_by_depth, encoding)


def by_rank(finished: FinishedEvent, encoding: str = "utf-8") -> str:
    """Return the acceptance rates of first guesses for a position, of second guesses beside them, and so
    on."""
    return _shares(finished.accepted_by_rank, finished.drafted_by_rank, encoding)


def _shares(n_accepted: Sequence[int], n_drafted: Sequence[int], encoding: str) -> str:
    # Depths at which nothing was ever accepted may be missing at the end.
    counts = zip_longest(n_accepted, n_drafted, fillvalue=0)
    shares = [accepted / drafted if drafted else 0.0 for accepted, drafted in counts]
    numbers = " ".join(f"{share:.0%}" for share in shares)
    bars = "".join(_BARS[min(7, int(share * 8))] for share in shares)
    return f"{bars}  {numbers}" if can_encode(bars, encoding) else numbers


def _time(finished: FinishedEvent) -> Iterator[str]:
    yield _seconds(finished.wall_s)
    for name, part_s in (
        ("prompt", finished.prompt_s),
        ("draft", finished.draft_s),
        ("target", finished.target_s - finished.prompt_s),
        ("specgen", finished.loop_s),
    ):
        if part_s > 0:
            share = part_s / finished.wall_s
            yield f"{name} {share:.0%}" if share >= 0.01 else f"{name} under 1%"


def _gain(finished: FinishedEvent, draft: str | None) -> Text:
    """Return how drafting compares with plain decoding, and advice if it is slower."""
    speedup = round(finished.estimated_speedup or 0.0, 2)
    whole = finished.estimated_whole_speedup
    details = []
    # Reading a long prompt takes the same time with drafts and without.
    if whole is not None and abs(whole - speedup) > _NOISE:
        details.append(f"{speedup:.2f} times after the first token")
        speedup = round(whole, 2)
    if finished.plain_tokens_per_s is not None:
        details.append(f"{_figure(finished.plain_tokens_per_s)} tokens/s plain")
    if finished.estimate:
        details.append(f"estimated {finished.estimate}")
    about = f" ({', '.join(details)})" if details else ""
    if is_impossible(finished.estimated_speedup or 0.0, finished.mean_accepted_length):
        length = f"{finished.mean_accepted_length:.2f} tokens per pass"
        about += f"; {length} allow no more: the machine's speed changed meanwhile"
    if finished.others_share is not None and is_busy(finished.others_share):
        about += f"; the machine was busy: {busy_text(finished.others_share)}"
    # Few tokens say no more than this.
    is_rough = finished.n_tokens < _N_SURE
    times = f"about {speedup:.1f}" if is_rough else f"{speedup:.2f}"
    if speedup > 1 + (_ROUGH if is_rough else _NOISE):
        return Text(f"{times} times as fast as plain decoding{about}")
    if speedup >= 1 - (_ROUGH if is_rough else _NOISE):
        return Text(f"about as fast as plain decoding: {times.removeprefix('about ')} times{about}")
    advice = ["`--draft none`", "`--draft ngram`", "a smaller `--draft-max`"]
    if draft == "ngram":
        del advice[1]
    slower = f"drafting made this slower: {times} times the speed of plain decoding"
    return Text.assemble((slower, "bold"), f"{about}; try {_either(advice)}")


def _end(finished: FinishedEvent, encoding: str) -> str:
    if finished.finish_reason == "stop":
        if finished.ends_grammar:
            return "end of the grammar"
        if finished.stopped_by is None:
            return "the model ended the text"
        return f"stopped at {clean_line(finished.stopped_by, encoding)!r}"
    if finished.finish_reason == "length":
        return "reached --max-tokens"
    if finished.finish_reason == "context":
        return "the context is full"
    return "interrupted"


def _either(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


def _figure(value: float) -> str:
    """Return three digits, or all digits before the point if they are more."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{_figure(value)} s"


__all__ = ["SummaryRenderer", "by_depth", "by_rank", "print_summary", "summary_items"]
