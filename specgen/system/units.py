"""Numbers with units, for people."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB", "PB")


def three_digits(value: float) -> str:
    """Return three digits, or all digits before the point if they are more."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def human_bytes(n_bytes: int) -> str:
    """Return a size to three digits in decimal units: 1117320768 is "1.12 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    amount, unit = n_bytes / 1000, 0
    while (
        amount >= 999.5 and unit < len(_UNITS) - 1
    ):  # it would be rounded to the four digits of "1000"
        amount, unit = amount / 1000, unit + 1
    return f"{three_digits(amount)} {_UNITS[unit]}"


def seconds_text(value: float) -> str:
    """Return a short time: milliseconds below a second."""
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{three_digits(value)} s"


def duration(seconds: float) -> str:
    """Return a time that people wait, in seconds, minutes or hours."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    if seconds < 5400.0:
        return f"{seconds / 60.0:.0f} min"
    return f"{seconds / 3600.0:.1f} h"
