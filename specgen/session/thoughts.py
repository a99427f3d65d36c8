"""Thinking blocks, which some models write between tags before their answer."""

from __future__ import annotations

_BEGIN, _END = "<think>", "</think>"


class ThoughtReader:
    """Separates the thinking block at the beginning of an answer from the rest, in text that comes in pieces.

    A model begins with it or has none; a tag further back is part of the answer. Some templates write the
    first tag themselves: `is_begun`.
    """

    def __init__(self, *, is_begun: bool = False) -> None:
        self._held = ""
        #: Whether the thinking block is open.
        self.is_open = is_begun
        #: Whether the text from here on is the answer.
        self.is_past = False
        self._is_space = True

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new parts of the thinking block and of the answer; empty lines between the two belong to
        neither. The beginning of a tag is held back."""
        if self.is_past:
            return "", self._answer(text)
        text, self._held = self._held + text, ""
        if not self.is_open:
            begun = text.lstrip()
            if len(begun) < len(_BEGIN) and _BEGIN.startswith(begun):
                self._held = text
                return "", ""
            if not begun.startswith(_BEGIN):
                self.is_past, self._is_space = True, False
                return "", text
            self.is_open, text = True, begun.removeprefix(_BEGIN)
        thought, end, answer = text.partition(_END)
        if end:
            self.is_open, self.is_past = False, True
            return thought, self._answer(answer)
        n_held = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held], ""

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back, in the form of `feed`."""
        held, self._held = self._held, ""
        return (held, "") if self.is_open else ("", held)

    def _answer(self, text: str) -> str:
        if self._is_space:
            text = text.lstrip()
            self._is_space = not text
        return text


def is_thinking(prompt: str) -> bool:
    """Return whether a template has opened a thinking block at the end of a prompt."""
    return prompt.rstrip().endswith(_BEGIN)


def thought_of(prompt: str, text: str) -> str:
    """Return the thinking block at the beginning of an answer to a prompt; empty if there is none."""
    reader = ThoughtReader(is_begun=is_thinking(prompt))
    return (reader.feed(text)[0] + reader.finish()[0]).strip()
