"""Numbers with units, for people."""

from __future__ import annotations


def three_digits(value: float) -> str:
    """Return three digits, or all digits before the point if they are more."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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
