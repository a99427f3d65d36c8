"""The summary that is printed after an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specgen.events import FinishedEvent, PromptEvent, undrafted_text
from specgen.render.rows import LEGEND, clean_line, styles_on
from specgen.render.streams import say
from specgen.system.machine import ROUGH, busy_text, is_busy
from specgen.system.quantities import (
    counted,
    rough_speedup_text,
    seconds_text,
    speedup_text,
    three_digits,
    times_text,
)

#: The characters of the histogram, by height.
_BARS = "▁▂▃▄▅▆▇█"
#: If a larger share of the rounds drafted nothing, the summary gives the reasons.
_MAX_UNDRAFTED_SHARE = 0.25
#: Speed-ups that differ by at most this much count as equal.
_NOISE = 0.03
#: The speed is only shown for answers of at least this many tokens.
_MIN_TIMED_TOKENS = 8
#: The first line only mentions the prefill, or the startup, if it took longer than this.
_LONG_S = 1.0


def print_summary(
    console: Console,
    finished: FinishedEvent,
    prompt: PromptEvent | None = None,
    *,
    whole: bool = True,
    show_legend: bool = False,
) -> None:
    """Print the summary of an answer.

    Args:
        console: The console to print on.
        finished: The figures of the answer.
        prompt: The answer's first event, which has the names of the draft and of the kernels.
        whole: Whether to print all figures, and not only the first line.
        show_legend: Whether to explain the colours of the tokens.
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
    """Return one line in plain words: the answer's length, its speed and its speed-up.

    "120 tokens in 4.40 s: 0.70 s to the first token, then 32.2 tokens/s; 1.4 to 1.6 times as fast
    as without drafts".

    Args:
        finished: The figures of the answer.
        draft: The draft's name; "none" for plain decoding, None if unknown.
    """
    length = counted(finished.n_tokens, "token")
    if finished.finish_reason != "stop":
        length += f" ({_why_it_ended(finished)})"
    line = _joined(": ", f"{length} in {seconds_text(finished.wall_s)}", _speed(finished))
    gain = ""
    if draft != "none" and finished.n_rounds:
        gain = _speedup_clause(finished)
    before = ""
    if finished.loading_s + finished.packing_s + finished.measuring_s > _LONG_S:
        before = f"before that: {_startup_times(finished)}"
    return _joined("; ", line, gain, before)


def _speedup_clause(finished: FinishedEvent) -> str:
    """Return the speed-up in words; empty if it is not known."""
    speedup = _whole_speedup(finished)
    speedups = _speedup_range(finished)
    if speedup is None or speedups is None:
        return "" if finished.n_drafted else "nothing was drafted"
    if finished.estimate_is_rough:
        return rough_speedup_text(speedup, ROUGH)
    return speedup_text(*speedups)


def summary_items(
    finished: FinishedEvent,
    draft: str | None = None,
    kernels: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Return the figures that are not in the first line, each with its label.

    Args:
        finished: The figures of the answer.
        draft: The draft's name; "none" for plain decoding, None if unknown.
        kernels: The name of the kernels; None if unknown.
    """
    items = {"answer": _answer_text(finished), "prompt": _prompt_text(finished)}
    if finished.n_drafted:
        items["drafts"] = _drafts_text(finished)
        items["a round"] = _histogram(finished.rounds_by_tokens)
    n_undrafted = sum(each.n_rounds for each in finished.undrafted)
    if draft != "none" and n_undrafted > _MAX_UNDRAFTED_SHARE * finished.n_rounds:
        items["reasons"] = undrafted_text(finished.undrafted, finished.n_rounds)
    items["before"] = _startup_times(finished)
    items["time"] = _time_shares(finished)
    if kernels is not None and kernels != "llama.cpp":  # llama.cpp's are not worth mentioning
        items["kernels"] = kernels
    items["gain"] = _speedup_details(finished, draft) or ""
    if finished.finish_reason == "stop":  # other reasons are in the first line
        items["end"] = _why_it_ended(finished)
    return ((label, text) for label, text in items.items() if text)


def _joined(separator: str, *texts: str) -> str:
    """Join the texts that are not empty."""
    return separator.join(filter(None, texts))


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
    n_positions = finished.n_positions
    parts = []
    if finished.acceptance_rate is not None:
        parts.append(f"acceptance rate {finished.acceptance_rate:.0%}")
    parts.append(f"{finished.n_accepted} of {counted(n_positions, 'token')} accepted")
    if n_positions < finished.n_drafted:
        parts.append(f"{finished.n_drafted} with all branches")
    return ", ".join(parts)


def _histogram(rounds_by_tokens: Sequence[int]) -> str:
    """Return a histogram of the number of tokens that rounds added.

    Args:
        rounds_by_tokens: The number of rounds that added one token, two tokens and so on.
    """
    n_all_rounds = sum(rounds_by_tokens)
    bars = []
    for n_tokens, n_rounds in enumerate(rounds_by_tokens, 1):
        if n_rounds:
            share = n_rounds / n_all_rounds
            bar = _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]
            bars.append(f"{n_tokens} {bar} {share:.0%}")
    return f"tokens added: {'  '.join(bars)}"


def _startup_times(finished: FinishedEvent) -> str:
    """Return how long loading and measuring took before the answer; empty if they took no time."""
    if finished.loading_s + finished.packing_s + finished.measuring_s == 0.0:
        return ""
    loading = "loading and packing" if finished.packing_s else "loading"
    times_s = {
        "starting": finished.starting_s,
        loading: finished.loading_s + finished.packing_s,
        "measuring what drafting costs": finished.measuring_s,
    }
    total_s = sum(times_s.values())
    parts = [
        f"{name} {seconds_text(time_s, total_s)}" for name, time_s in times_s.items() if time_s > 0
    ]
    return ", ".join(parts)


def _time_shares(finished: FinishedEvent) -> str:
    """Return how the answer's time was divided between the prefill, the models and specgen."""
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
    """Return the time to the first token, and the speed after it.

    For a short answer, whose speed would be chance, it is only the prefill, if that took long.
    """
    speed = finished.tokens_per_s
    first_s = finished.time_to_first_token_s
    if not speed or first_s is None or finished.n_tokens < _MIN_TIMED_TOKENS:
        if finished.prompt_s <= _LONG_S:
            return ""
        return f"{seconds_text(finished.prompt_s)} of it for prefill"
    # If a grammar forces the first tokens, the prefill comes after them.
    first_s = max(first_s, finished.prompt_s)
    first = f"{seconds_text(first_s, finished.wall_s)} to the first token"
    return f"{first}, then {three_digits(speed)} tokens/s"


def _whole_speedup(finished: FinishedEvent) -> float | None:
    """Return the estimated speed-up of the whole answer; None if it is unknown.

    Drafts do not make the prefill faster, so if its share is large, the speed-up of the whole
    answer is clearly smaller than that of the decoding.
    """
    speedup = finished.estimated_speedup
    whole_speedup = finished.estimated_whole_speedup
    if speedup is None or whole_speedup is None or abs(whole_speedup - speedup) <= _NOISE:
        return speedup
    return whole_speedup


def _speedup_range(finished: FinishedEvent) -> tuple[float, float] | None:
    """Return the lower and upper bound of the whole answer's speed-up; None if it is unknown.

    The event has bounds for the decoding only.
    """
    speedup = finished.estimated_speedup
    whole_speedup = _whole_speedup(finished)
    if speedup is None or whole_speedup is None:
        return None
    low, high = finished.estimated_speedup_range or (speedup, speedup)
    if whole_speedup == speedup:
        return low, high
    # The whole speed-up is the plain time divided by the actual time. Part of the plain time is the
    # prefill, which stays the same; the rest is proportional to the speed-up of decoding.
    prefill_part = finished.prompt_s / finished.wall_s
    decoding_part = whole_speedup - prefill_part
    return (
        prefill_part + decoding_part * low / speedup,
        prefill_part + decoding_part * high / speedup,
    )


def _speedup_details(finished: FinishedEvent, draft: str | None) -> str | None:
    """Return details about the speed-up, and advice if drafts made the answer slower.

    Args:
        finished: The figures of the answer.
        draft: The draft's name; None if unknown.
    """
    speedups = _speedup_range(finished)
    if speedups is None:
        return finished.estimate  # why there is no estimate
    parts = []
    if finished.others_share is not None and is_busy(finished.others_share):
        parts.append(busy_text(finished.others_share))
    decoding_speedups = finished.estimated_speedup_range or speedups
    if decoding_speedups != speedups:
        parts.append(f"after the first token {times_text(*decoding_speedups)} times")
    if finished.plain_tokens_per_s is not None:
        parts.append(f"{three_digits(finished.plain_tokens_per_s)} tokens/s without drafts")
    if finished.estimate:
        parts.append(f"estimated {finished.estimate}")
    if speedup_text(*speedups).startswith("slower") and not finished.estimate_is_rough:
        ngrams = "" if draft == "ngram" else ", `--draft ngram`"
        parts.append(f"try `--draft none`{ngrams} or a smaller `--draft-max`")
    return ", ".join(parts)


def _why_it_ended(finished: FinishedEvent) -> str:
    """Return why the answer ended, in words."""
    if finished.finish_reason == "length":
        return "cut off: raise -n for more"
    if finished.finish_reason == "context":
        return "the context is full: raise -c for more"
    if finished.finish_reason != "stop":
        return "interrupted"
    if finished.ends_grammar:
        return "end of the grammar"
    if finished.stopped_by is None:
        return "the model ended the text"
    return f"stopped at {clean_line(finished.stopped_by)!r}"
