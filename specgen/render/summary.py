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
#: Speed-ups that differ by at most this much count as equal.
_NOISE = 0.03
#: No speed is shown for shorter answers.
_FEWEST_TIMED = 8
#: The first line mentions the prefill and the time before it only if they took longer.
_LONG_S = 1.0


def print_summary(
    console: Console,
    finished: FinishedEvent,
    prompt: PromptEvent | None = None,
    *,
    whole: bool = True,
    show_legend: bool = False,
) -> None:
    """Print a summary.

    Args:
        console: where to print it.
        finished: the figures of the answer.
        prompt: what is known of its prompt, its draft and the kernels.
        whole: whether to print all figures after the first line.
        show_legend: whether to explain the colours of the tokens.
    """
    styles = styles_on(console)
    draft = None
    kernels = None
    if prompt is not None:
        draft = prompt.draft
        kernels = prompt.kernels
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
    """Return one line in plain words: the answer, its speed and its speed-up."""
    n_tokens = counted(finished.n_tokens, "token")
    line = _listed(f"{n_tokens} in {seconds_text(finished.wall_s)}", _speed(finished))
    if finished.finish_reason != "stop":
        line += f" ({_end(finished)})"
    if draft != "none" and finished.n_rounds:
        line += _gain_clause(finished)
    if finished.prompt_s > _LONG_S:
        line += f"; {seconds_text(finished.prompt_s)} of it reading the prompt"
    if finished.loading_s + finished.packing_s + finished.measuring_s > _LONG_S:
        line += f"; before it {_startup_times(finished)}"
    return line


def _gain_clause(finished: FinishedEvent) -> str:
    speedups = _speedup_range(finished)
    if not finished.n_drafted and speedups is None:
        return ", nothing was drafted"
    if is_busy(finished.others_share):
        return "; the speed-up is not known, since the machine was busy"
    if speedups is not None:
        return f": {gain_text(*speedups)}"
    return ""


def summary_items(
    finished: FinishedEvent,
    draft: str | None = None,
    kernels: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield the figures that the first line lacks: a label and a text each."""
    items = {"answer": _answer_text(finished), "prompt": _prompt_text(finished)}
    if finished.n_drafted:
        items["drafts"] = _drafts_text(finished)
        items["a round"] = _histogram(finished.rounds_by_tokens)
    n_undrafted = sum(each.n_rounds for each in finished.undrafted)
    if draft != "none" and n_undrafted > _LITTLE * finished.n_rounds:
        items["reasons"] = undrafted_text(finished.undrafted, finished.n_rounds)
    items["before"] = _startup_times(finished)
    items["time"] = _time_shares(finished)
    if kernels is not None and kernels != "llama.cpp":  # only those that one may not expect
        items["kernels"] = kernels
    items["gain"] = _gain(finished, draft) or ""
    if finished.finish_reason == "stop":  # otherwise it is in the first line
        items["end"] = _end(finished)
    return ((label, text) for label, text in items.items() if text)


def _listed(*texts: str) -> str:
    """Join the texts that are not empty."""
    return ", ".join(filter(None, texts))


def _answer_text(finished: FinishedEvent) -> str:
    parts = [counted(finished.n_rounds, "round")]
    if finished.mean_accepted_length is not None:
        parts.append(f"{finished.mean_accepted_length:.2f} tokens per pass of the target")
    if finished.n_forced:
        parts.append(f"{finished.n_forced} tokens forced by the grammar")
    return ", ".join(parts)


def _prompt_text(finished: FinishedEvent) -> str:
    parts = [counted(finished.n_prompt_tokens, "token")]
    if finished.n_cached_tokens:
        parts.append(f"{finished.n_cached_tokens} of them cached")
    if finished.time_to_first_token_s is not None:
        parts.append(f"first token after {seconds_text(finished.time_to_first_token_s)}")
    return ", ".join(parts)


def _drafts_text(finished: FinishedEvent) -> str:
    # Tokens along the longest branch; all branches have `n_drafted`.
    n_positions = sum(finished.drafted_by_depth)
    parts = []
    if finished.acceptance_rate is not None:
        parts.append(f"acceptance rate {finished.acceptance_rate:.0%}")
    parts.append(f"{finished.n_accepted} of {counted(n_positions, 'token')} accepted")
    if n_positions < finished.n_drafted:
        parts.append(f"{finished.n_drafted} with all branches")
    return ", ".join(parts)


def _histogram(rounds_by_tokens: Sequence[int]) -> str:
    """Return how many rounds added one token, two tokens and so on."""
    n_rounds = sum(rounds_by_tokens)
    bars = []
    for n_tokens, count in enumerate(rounds_by_tokens, 1):
        if count:
            share = count / n_rounds
            bar = _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
            bars.append(f"{n_tokens} {bar} {share:.0%}")
    return f"tokens added: {'  '.join(bars)}"


def _startup_times(finished: FinishedEvent) -> str:
    times = {
        "loading": finished.loading_s,
        "loading and packing": finished.packing_s,
        "measuring what drafting costs": finished.measuring_s,
    }
    return _listed(*(f"{name} {seconds_text(time)}" for name, time in times.items() if time > 0))


def _time_shares(finished: FinishedEvent) -> str:
    times = {
        "prompt": finished.prompt_s,
        "draft": finished.draft_s,
        "target": finished.target_s - finished.prompt_s,
        "specgen": finished.loop_s,
    }
    parts = []
    for name, time_s in times.items():
        if time_s > 0:
            share = time_s / finished.wall_s
            parts.append(f"{name} {share:.0%}" if share >= 0.01 else f"{name} <1%")
    return ", ".join(parts)


def _speed(finished: FinishedEvent) -> str:
    speed = finished.tokens_per_s
    if not speed or finished.n_tokens < _FEWEST_TIMED:
        return ""
    return f"{three_digits(speed)} tokens/s"


def _speedup_range(finished: FinishedEvent) -> tuple[float, float] | None:
    """Return the speed-up of the whole answer, at least and at most.

    The prefill is not faster with drafts. So where its share is large, the speed-up is less than
    that of decoding.
    """
    speedup = finished.estimated_speedup
    whole_speedup = finished.estimated_whole_speedup
    if speedup is None:
        return None
    low, high = finished.estimated_speedup_range or (speedup, speedup)
    if whole_speedup is None or abs(whole_speedup - speedup) <= _NOISE:
        return low, high
    prompt_share = finished.prompt_s / finished.wall_s
    decoding = whole_speedup - prompt_share
    return prompt_share + decoding * low / speedup, prompt_share + decoding * high / speedup


def _gain(finished: FinishedEvent, draft: str | None) -> str | None:
    """Return how the speed-up is known, and advice if drafts made the answer slower."""
    speedups = _speedup_range(finished)
    others_share = finished.others_share
    if others_share is not None and is_busy(others_share) and (speedups or finished.n_drafted):
        return busy_text(others_share)
    if speedups is None:
        return finished.estimate
    parts = []
    after_first = finished.estimated_speedup_range or speedups
    if after_first != speedups:
        parts.append(f"after the first token {times_text(*after_first)} times")
    if finished.plain_tokens_per_s is not None:
        parts.append(f"{three_digits(finished.plain_tokens_per_s)} tokens/s without drafts")
    if finished.estimate:
        parts.append(f"estimated {finished.estimate}")
    if gain_text(*speedups).startswith("slower"):
        ngrams = "" if draft == "ngram" else ", `--draft ngram`"
        parts.append(f"try `--draft none`{ngrams} or a smaller `--draft-max`")
    return ", ".join(parts)


def _end(finished: FinishedEvent) -> str:
    """Return why the answer ended."""
    if finished.finish_reason == "length":
        return "cut off: -n allows more"
    if finished.finish_reason == "context":
        return "the context is full: -c allows more"
    if finished.finish_reason != "stop":
        return "interrupted"
    if finished.ends_grammar:
        return "end of the grammar"
    if finished.stopped_by is None:
        return "the model ended the text"
    return f"stopped at {clean_line(finished.stopped_by)!r}"
