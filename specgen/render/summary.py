"""The summary after an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specgen.events import FinishedEvent, undrafted_text
from specgen.render.marks import FAINT, legend
from specgen.render.streams import say
from specgen.render.text import clean_line, counted
from specgen.system.machine import busy_text, is_busy
from specgen.system.progress import duration, seconds_text, three_digits
from specgen.text.tally import is_impossible

if TYPE_CHECKING:
    from specgen.serve.batch.runner import Tally

_BARS = "▁▂▃▄▅▆▇█"
#: Above this share of rounds that drafted nothing, the summary says why.
_LITTLE = 0.25
#: Speed-ups that differ by at most this count as equal.
_NOISE = 0.03


def print_summary(
    console: Console,
    finished: FinishedEvent,
    *,
    draft: str | None = None,
    kernels: str | None = None,
    show_legend: bool = False,
) -> None:
    """Print the summary: on a terminal in two columns; elsewhere a line for each item, so that it can be
    searched. `draft` and `kernels` are those of the prompt's event."""
    items = list(summary_items(finished, draft=draft, kernels=kernels))
    if show_legend and finished.n_drafted:
        items.append(("legend", legend()))
    if not console.is_terminal:
        for label, text in items:
            say(console, Text.assemble(f"{label}: ", text))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style=FAINT, no_wrap=True)
    table.add_column()
    for item in items:
        table.add_row(*item)
    say(console, Text())
    say(console, table)


def summary_items(
    finished: FinishedEvent, *, draft: str | None = None, kernels: str | None = None
) -> Iterator[tuple[str, Text]]:
    """Return (label, text) for all known figures."""
    yield "answer", Text(", ".join(_answer(finished)))
    if finished.tokens_per_s is not None or finished.time_to_first_token_s is not None:
        yield "speed", Text(", ".join(_speed(finished)))
    if finished.n_cached_tokens:
        n_all = counted(finished.n_prompt_tokens, "token")
        yield "prompt", Text(f"{n_all}, {finished.n_cached_tokens} of them not read again")
    if finished.n_drafted:
        rate = finished.acceptance_rate
        share = "" if rate is None else f"acceptance rate {rate:.0%}, "
        n_drafted = counted(finished.n_drafted, "token")
        yield "drafts", Text(f"{share}{finished.n_accepted} of {n_drafted} accepted")
        yield "by depth", Text(_shares(finished.accepted_by_depth, finished.drafted_by_depth))
        if len(finished.drafted_by_rank) > 1:  # second guesses for a position beside the first ones
            yield "by guess", Text(_shares(finished.accepted_by_rank, finished.drafted_by_rank))
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
    yield "end", Text(_end(finished))


def _answer(finished: FinishedEvent) -> Iterator[str]:
    yield counted(finished.n_tokens, "token")
    yield counted(finished.n_rounds, "round")
    if finished.mean_accepted_length is not None:
        yield f"{finished.mean_accepted_length:.2f} tokens per pass of the target"
    if finished.n_forced:
        yield f"{finished.n_forced} forced by the grammar"


def _speed(finished: FinishedEvent) -> Iterator[str]:
    if finished.tokens_per_s is not None:
        yield f"{three_digits(finished.tokens_per_s)} tokens/s"
    if finished.time_to_first_token_s is not None:
        prompt = counted(finished.n_prompt_tokens, "prompt token")
        yield f"first token after {seconds_text(finished.time_to_first_token_s)} ({prompt})"


def _shares(n_accepted: Sequence[int], n_drafted: Sequence[int]) -> str:
    # Depths at which nothing was ever accepted may be missing at the end.
    counts = zip_longest(n_accepted, n_drafted, fillvalue=0)
    shares = [accepted / drafted if drafted else 0.0 for accepted, drafted in counts]
    numbers = " ".join(f"{share:.0%}" for share in shares)
    bars = "".join(_BARS[min(7, int(share * 8))] for share in shares)
    return f"{bars}  {numbers}"


def _time(finished: FinishedEvent) -> Iterator[str]:
    yield seconds_text(finished.wall_s)
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
    """Return between which two numbers the gain over plain decoding is, and advice if it is a loss. A gain that may
    be none is not called one, and on a busy machine nothing is known."""
    if finished.others_share is not None and is_busy(finished.others_share):
        return Text(f"not known, since the machine was busy: {busy_text(finished.others_share)}")
    speedup = finished.estimated_speedup or 0.0
    low, high = finished.estimated_speedup_range or (speedup, speedup)
    whole = finished.estimated_whole_speedup
    details = []
    # Reading a long prompt takes the same time with drafts and without.
    if whole is not None and abs(whole - speedup) > _NOISE:
        details.append(f"{_between(low, high)} times after the first token")
        prompt = finished.prompt_s / finished.wall_s
        low, high = (prompt + (whole - prompt) * each / speedup for each in (low, high))
    if finished.plain_tokens_per_s is not None:
        details.append(f"{three_digits(finished.plain_tokens_per_s)} tokens/s plain")
    if finished.estimate:
        details.append(f"estimated {finished.estimate}")
    about = f" ({', '.join(details)})" if details else ""
    if is_impossible(speedup, finished.mean_accepted_length):
        length = f"{finished.mean_accepted_length:.2f} tokens per pass"
        about += f"; {length} allow no more: the machine's speed changed meanwhile"
    times = _between(low, high)
    if round(low, 1) > 1.0:
        return Text(f"{times} times as fast as plain decoding{about}")
    if round(high, 1) >= 1.0:
        return Text(f"about as fast as plain decoding: {times} times{about}")
    others = "" if draft == "ngram" else ", `--draft ngram`"
    slower = f"drafting made this slower: {times} times the speed of plain decoding"
    advice = f"try `--draft none`{others} or a smaller `--draft-max`"
    return Text.assemble((slower, "bold"), f"{about}; {advice}")


def _between(low: float, high: float) -> str:
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def _end(finished: FinishedEvent) -> str:
    if finished.finish_reason != "stop":
        ends = {"length": "reached --max-tokens", "context": "the context is full"}
        return ends.get(finished.finish_reason, "interrupted")
    if finished.ends_grammar:
        return "end of the grammar"
    if finished.stopped_by is None:
        return "the model ended the text"
    return f"stopped at {clean_line(finished.stopped_by)!r}"


def totals(n_answers: int, answers: Sequence[FinishedEvent | Tally]) -> list[str]:
    """Return the figures of several answers in words."""

    def whole(name: str) -> int:
        return sum(getattr(each, name) for each in answers)

    found = [f"{counted(n_answers, 'answer')} of {counted(whole('n_tokens'), 'token')}"]
    if n_drafted := whole("n_drafted"):
        found.append(f"{whole('n_accepted') / n_drafted:.0%} of the draft accepted")
    if n_cached := whole("n_cached_tokens"):
        found.append(f"{n_cached / whole('n_prompt_tokens'):.0%} of the prompts from the cache")
    return found


def batch_summary(tally: Tally, seconds: float, where: str) -> str:
    """Return a sentence about a finished batch. `where` says how many answers were generated at once, or by
    whom."""
    answers, *others = totals(tally.n_answers, [tally])
    speed = f"{duration(seconds)}: {tally.n_tokens / seconds:.1f} tokens/s"
    return ", ".join((answers, speed, where, *others))
