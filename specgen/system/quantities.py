"""Numbers with units, and speed-ups in words, for people to read."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "1 line", "2 lines"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def three_digits(value: float) -> str:
    """Return a number with three digits, or more if it is 1000 or larger."""
    # From 9.995 on, two decimals would be rounded to "10.00", which has four digits.
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def human_bytes(n_bytes: int) -> str:
    """Return a size to three digits in decimal units: 1117320768 is "1.12 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    amount = n_bytes / 1000
    unit = 0
    # From 999.5 on, an amount would be rounded to "1000", which has four digits.
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount /= 1000
        unit += 1
    return f"{three_digits(amount)} {_UNITS[unit]}"


def seconds_text(value: float, whole: float | None = None) -> str:
    """Return a duration, in milliseconds if it is below a second.

    Args:
        value: The duration, in seconds.
        whole: The duration that it is a part of. Both are shown in the same unit, so that they can
            be compared, unless the part would be shown as zero.
    """
    if max(value, whole or 0.0) < 0.9995 or value < 0.005:
        return f"{value * 1000:.0f} ms"
    return f"{three_digits(value)} s"


def duration(seconds: float) -> str:
    """Return a duration in words, rounded to seconds, minutes or tenths of hours."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"


def rough_seconds(seconds: float) -> str:
    """Return an estimated duration with few digits: "40 ms", "1.2 s", "6 s", "14 s"."""
    if seconds < 0.1:
        return seconds_text(seconds)
    if seconds >= 9.95:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s".replace(".0 s", " s")


def times_text(low: float, high: float) -> str:
    """Return a range of factors ("1.2 to 1.4"), or one number if both ends are shown the same."""
    first = f"{low:.1f}"
    last = f"{high:.1f}"
    return first if first == last else f"{first} to {last}"


def is_gain(speedup: float) -> bool:
    """Return whether a speed-up, rounded as it is shown, is above 1.0: less would be noise."""
    return round(speedup, 1) > 1.0


def speedup_text(
    low: float,
    high: float,
    spread: str = "",
) -> str:
    """Return a speed-up in words: "1.5 to 2.0 times as fast as without drafts".

    If it may be noise (see `is_gain`), the words are "about as fast as" or "slower than".

    Args:
        low: The lowest speed-up.
        high: The highest speed-up.
        spread: Details that are added in parentheses.
    """
    times = times_text(low, high)
    details = []
    if is_gain(low):
        text = f"{times} times as fast as without drafts"
    else:
        comparison = "about as fast as" if round(high, 1) >= 1.0 else "slower than"
        text = f"{comparison} without drafts"
        if times != "1.0":
            details.append(f"{times} times")
    if spread:
        details.append(spread)
    if details:
        text += f" ({'; '.join(details)})"
    return text


def rough_speedup_text(speedup: float, why: str) -> str:
    """Return a rough speed-up in words, with the reason why it is rough in parentheses."""
    text = speedup_text(speedup, speedup, why)
    return f"about {text}" if is_gain(speedup) else text


def measured_speedup(
    speedup: float,
    worst: float,
    best: float,
    n_answers: int,
) -> str:
    """Return a measured mean speed-up, with its range over the answers."""
    spread = f"{times_text(worst, best)} in {counted(n_answers, 'answer')}"
    return speedup_text(speedup, speedup, spread)
