"""Make a model's text safe for a terminal.

A model may write anything, escape sequences included. `Cleaner` lets through what prints and replaces the rest
by visible signs.
"""

from __future__ import annotations

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _signs() -> dict[int, str]:
    signs = {code: chr(0x2400 + code) for code in range(0x20)}  # U+2400 is the sign of NUL
    signs[0x7F] = "\N{SYMBOL FOR DELETE}"
    signs |= dict.fromkeys(range(0x80, 0xA0), _REPLACEMENT)  # C1, CSI among them
    # Overrides of the writing direction would reorder the text on the screen.
    signs |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT)
    signs |= dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
    signs |= {0x2028: "\n", 0x2029: "\n"}
    del signs[ord("\n")], signs[ord("\t")]
    return signs


_SIGNS = _signs()


class Cleaner:
    """Replaces characters that a terminal would obey, or UTF-8 cannot express, in a stream of text.

    Line feeds and tabs pass; CR LF and the Unicode line and paragraph separators become line feeds. Control
    characters become their signs (U+2400 and up) or U+FFFD.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the clean text; a carriage return at the end waits for the next piece."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        if self._held:
            text = text[:-1]
        return _translated(text.replace("\r\n", "\n"))

    def finish(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return _translated(held)


def _translated(text: str) -> str:
    return (
        text if text.isprintable() else text.translate(_SIGNS)
    )  # which is slow, and rarely needed


def clean(text: str) -> str:
    """Return a whole text, cleaned."""
    cleaner = Cleaner()
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str) -> str:
    """Return a text cleaned for where it must not break the line."""
    newline = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
    return clean(text).replace("\n", newline).replace("\t", "    ")


def counted(number: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
