"""The summary after an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specgen.events import FinishedEvent, PromptEvent, undrafted_text
from specgen.render.rows import LEGEND, clean_line, styles_on
from specgen.render.streams import say
from specgen.system.machine import busy_text, is_busy
from specgen.system.quantities import counted, gain_text, seconds_text, three_digits, times_text

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
    prompt: PromptEvent | None = None,
    *,
    whole: bool = True,
    show_legend: bool = False,
) -> None:
    """Print one line in plain words and, if `whole`, all figures."""
    styles, draft = styles_on(console), prompt.draft if prompt is not None else None
    if console.is_terminal:
        say(console, Text())
    say(console, Text(summary_line(finished, draft)))
    if show_legend and finished.n_drafted:
        say(console, Text("  ").join(Text(mark, styles[mark]) for mark in LEGEND))
    if not whole:
        return
    kernels = prompt.kernels if prompt is not None else None
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
    """Yield by name what the first line does not say."""
    length, first_s = finished.mean_accepted_length, finished.time_to_first_token_s
    rate, n_cached = finished.acceptance_rate, finished.n_cached_tokens
    n_drafted, n_placed = finished.n_drafted, sum(finished.drafted_by_depth)
    n_undrafted = sum(each.n_rounds for each in finished.undrafted)
    says_why = draft != "none" and n_undrafted > _LITTLE * finished.n_rounds
    parts = {"prompt": finished.prompt_s, "draft": finished.draft_s}
    parts |= {"target": finished.target_s - finished.prompt_s, "specgen": finished.loop_s}
    shares = {n: part_s / finished.wall_s for n, part_s in parts.items() if part_s > 0}
    items = {
        "answer": _listed(
            counted(finished.n_rounds, "round"),
            f"{length:.2f} tokens per pass of the target" if length is not None else "",
            f"{finished.n_forced} tokens forced by the grammar" if finished.n_forced else "",
        ),
        "prompt": _listed(
            counted(finished.n_prompt_tokens, "token"),
            f"{n_cached} of them not read again" if n_cached else "",
            f"first token after {seconds_text(first_s)}" if first_s is not None else "",
        ),
        "drafts": _listed(
            f"acceptance rate {rate:.0%}" if rate is not None else "",
            f"{finished.n_accepted} of {counted(n_placed, 'token')} accepted",
            f"{n_drafted} with all branches" if n_placed < n_drafted else "",
        ),
        "a round": _histogram(finished.rounds_by_tokens),
        "reasons": undrafted_text(finished.undrafted, finished.n_rounds) if says_why else "",
        "before": _startup_times(finished),
        "time": _listed(*(f"{n} {s:.0%}" if s >= 0.01 else f"{n} <1%" for n, s in shares.items())),
        # llama.cpp's are what one expects.
        "kernels": "" if kernels in (None, "llama.cpp") else str(kernels),
        "gain": _gain(finished, draft) or "",
        "end": _end(finished) if finished.finish_reason == "stop" else "",
    }
    left_out = () if n_drafted else ("drafts", "a round")
    return ((name, text) for name, text in items.items() if text and name not in left_out)


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
    """Return between which two numbers the gain of the whole answer is, in which reading takes the
    same time.
    """
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
    """Return how the gain over plain decoding is known, and advice if it is a loss."""
    between, others_share = _speedup_range(finished), finished.others_share
    if others_share is not None and is_busy(others_share) and (between or finished.n_drafted):
        return busy_text(others_share)
    if between is None:
        return finished.estimate
    after, plain = finished.estimated_speedup_range or between, finished.plain_tokens_per_s
    is_loss = gain_text(*between).startswith("slower")
    others = "" if draft == "ngram" else ", `--draft ngram`"
    return _listed(
        f"after the first token {times_text(*after)} times" if after != between else "",
        f"{three_digits(plain)} tokens/s without drafts" if plain is not None else "",
        f"estimated {finished.estimate}" if finished.estimate else "",
        f"try `--draft none`{others} or a smaller `--draft-max`" if is_loss else "",
    )


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
