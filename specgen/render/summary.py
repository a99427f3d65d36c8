"""The summary after an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specgen.events import FinishedEvent, undrafted_text
from specgen.render.rows import LEGEND, clean_line, styles_on
from specgen.render.streams import say
from specgen.system.machine import busy_text, is_busy
from specgen.system.progress import counted, gain_text, seconds_text, three_digits, times_text

_BARS = "▁▂▃▄▅▆▇█"
#: Above this share of rounds that drafted nothing, the summary says why.
_LITTLE = 0.25
#: Speed-ups that differ by at most this count as equal.
_NOISE = 0.03
#: No speed is shown for shorter answers.
_FEWEST_TIMED = 8
#: Loading, packing, measuring and reading are shown only if they took longer.
_LONG_S = 1.0


def print_summary(
    console: Console,
    finished: FinishedEvent,
    *,
    draft: str | None = None,
    kernels: str | None = None,
    whole: bool = True,
    show_legend: bool = False,
) -> None:
    """Print one line in plain words and, if `whole`, all figures; `draft` and `kernels` are those of the prompt's event."""
    styles = styles_on(console)
    if console.is_terminal:
        say(console, Text())
    say(console, Text(summary_line(finished, draft)))
    if show_legend and finished.n_drafted:
        say(console, Text("  ").join(Text(mark, styles[mark]) for mark in LEGEND))
    if not whole:
        return
    items = [(label, Text(text)) for label, text in summary_items(finished, draft, kernels)]
    if not console.is_terminal:
        for label, text in items:
            say(console, Text.assemble(f"{label}: ", text))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style=styles["faint"], no_wrap=True)
    table.add_column()
    for item in items:
        table.add_row(*item)
    say(console, table)


def summary_line(finished: FinishedEvent, draft: str | None = None) -> str:
    tokens = f"{counted(finished.n_tokens, 'token')} in {seconds_text(finished.wall_s)}"
    said = _listed(tokens, _speed(finished))
    said += "" if finished.finish_reason == "stop" else f" ({_end(finished)})"
    between = _speedup_range(finished)
    if draft != "none" and finished.n_rounds:
        if not finished.n_drafted and between is None:
            said += ", nothing was drafted"
        elif is_busy(finished.others_share):
            said += "; what drafts saved is not known, since the machine was busy"
        elif between is not None:
            said += f": {gain_text(*between)}"
    if finished.prompt_s > _LONG_S:
        said += f"; {seconds_text(finished.prompt_s)} of it reading the prompt"
    if finished.loading_s + finished.packing_s + finished.measuring_s > _LONG_S:
        said += f"; before it {_startup_times(finished)}"
    return said


def summary_items(
    finished: FinishedEvent, draft: str | None = None, kernels: str | None = None
) -> Iterator[tuple[str, str]]:
    prompt = counted(finished.n_prompt_tokens, "prompt token")
    length = f"{finished.mean_accepted_length or 0.0:.2f} tokens per pass of the target"
    length = length if finished.mean_accepted_length is not None else ""
    forced = f"{finished.n_forced} forced by the grammar" if finished.n_forced else ""
    counts = counted(finished.n_tokens, "token"), counted(finished.n_rounds, "round")
    yield "answer", _listed(*counts, length, forced)
    first = ""
    if (first_s := finished.time_to_first_token_s) is not None:
        first = f"first token after {seconds_text(first_s)} ({prompt})"
    if speed := _listed(_speed(finished), first):
        yield "speed", speed
    if finished.n_cached_tokens:
        n_all = counted(finished.n_prompt_tokens, "token")
        yield "prompt", f"{n_all}, {finished.n_cached_tokens} of them not read again"
    if finished.n_drafted:
        rate, n = finished.acceptance_rate, sum(finished.drafted_by_depth)
        share = "" if rate is None else f"acceptance rate {rate:.0%}, "
        branches = f" ({finished.n_drafted} with all branches)" if n < finished.n_drafted else ""
        yield "drafts", f"{share}{finished.n_accepted} of {counted(n, 'token')} accepted{branches}"
        yield "a round", _histogram(finished.rounds_by_tokens)
    elif finished.n_rounds and draft not in (None, "none"):
        yield "drafts", "nothing was drafted"
    n_undrafted = sum(each.n_rounds for each in finished.undrafted)
    if draft != "none" and n_undrafted > _LITTLE * finished.n_rounds:
        yield "reasons", undrafted_text(finished.undrafted, finished.n_rounds)
    if before := _startup_times(finished):
        yield "before", before
    if finished.wall_s > 0:
        parts = {"prompt": finished.prompt_s, "draft": finished.draft_s}
        parts |= {"target": finished.target_s - finished.prompt_s, "specgen": finished.loop_s}
        shares = {name: part_s / finished.wall_s for name, part_s in parts.items() if part_s > 0}
        texts = (f"{n} {s:.0%}" if s >= 0.01 else f"{n} under 1%" for n, s in shares.items())
        yield "time", _listed(seconds_text(finished.wall_s), *texts)
    if kernels not in (None, "llama.cpp"):  # those of our own: the others are what one expects
        yield "kernels", str(kernels)
    if gain := _gain(finished, draft):
        yield "gain", gain
    yield "end", _end(finished)


def _speed(finished: FinishedEvent) -> str:
    speed = finished.tokens_per_s
    return f"{three_digits(speed)} tokens/s" if speed and finished.n_tokens >= _FEWEST_TIMED else ""


def _listed(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _startup_times(finished: FinishedEvent) -> str:
    parts = {"loading": finished.loading_s, "loading and packing": finished.packing_s}
    parts |= {"measuring what drafting costs": finished.measuring_s}
    return _listed(*(f"{n} {seconds_text(s)}" for n, s in parts.items() if s > 0))


def _histogram(n_rounds: Sequence[int]) -> str:
    n_all = sum(n_rounds) or 1
    shares = [(n, of_all / n_all) for n, of_all in enumerate(n_rounds, 1) if of_all]
    parts = [f"{n} {_BARS[min(7, int(share * 8))]} {share:.0%}" for n, share in shares]
    return f"tokens added: {'  '.join(parts)}"


def _speedup_range(finished: FinishedEvent) -> tuple[float, float] | None:
    """Return between which two numbers the gain of the whole answer is, in which reading takes the same time."""
    speedup, whole = finished.estimated_speedup, finished.estimated_whole_speedup
    if speedup is None:
        return None
    low, high = finished.estimated_speedup_range or (speedup, speedup)
    if whole is None or abs(whole - speedup) <= _NOISE:
        return low, high
    prompt = finished.prompt_s / finished.wall_s
    low, high = (prompt + (whole - prompt) * each / speedup for each in (low, high))
    return low, high


def _gain(finished: FinishedEvent, draft: str | None) -> str | None:
    """Return the gain over plain decoding, how it is known, and advice if it is a loss."""
    between, others_share = _speedup_range(finished), finished.others_share
    if others_share is not None and is_busy(others_share) and (between or finished.n_drafted):
        return f"not known, since the machine was busy: {busy_text(others_share)}"
    if between is None:
        return finished.estimate
    after, plain = finished.estimated_speedup_range or between, finished.plain_tokens_per_s
    details = _listed(
        f"after the first token {times_text(*after)} times" if after != between else "",
        f"{three_digits(plain)} tokens/s without" if plain is not None else "",
        f"estimated {finished.estimate}" if finished.estimate else "",
    )
    said, about = gain_text(*between), f" ({details})" if details else ""
    if not said.startswith("slower"):
        return f"{said}{about}"
    others = "" if draft == "ngram" else ", `--draft ngram`"
    return f"{said}{about}; try `--draft none`{others} or a smaller `--draft-max`"


def _end(finished: FinishedEvent) -> str:
    if finished.finish_reason != "stop":
        ends = {
            "length": "cut off: -n allows more",
            "context": "the context is full: -c allows more",
        }
        return ends.get(finished.finish_reason, "interrupted")
    if finished.ends_grammar:
        return "end of the grammar"
    if finished.stopped_by is None:
        return "the model ended the text"
    return f"stopped at {clean_line(finished.stopped_by)!r}"
