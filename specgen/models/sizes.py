"""Sizes in bytes as text: 1.1 GB."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def human_bytes(n_bytes: int) -> str:
    """Return a size to three digits in decimal units: 1117320768 is "1.12 GB"."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    amount = float(n_bytes)
    unit = 0
    # 999.5 and more would be rounded to the four digits of "1000".
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount /= 1000
        unit += 1
    n_decimals = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
    return f"{amount:.{n_decimals}f} {_UNITS[unit]}"
