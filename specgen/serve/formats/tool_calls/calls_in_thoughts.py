"""Calls at the end of thoughts that the model never ended."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.serve.formats.delta import Delta
from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.parser import ToolCallParser


class CallsInThoughts:
    """Finds the calls at the end of a thinking block.

    Some models call tools without ending their thoughts first. So text that looks like calls is
    held back; if anything follows it, it was a thought.
    """

    def __init__(
        self,
        form: CallForm,
        functions: Sequence[Function],
        *,
        one_only: bool = False,
    ) -> None:
        self._form = form
        self._functions = functions
        self._one_only = one_only
        self._parser = self._new_parser()
        self._first_characters = {mark[0] for mark in (form.mark, form.inner_mark) if mark}
        #: What the parser has found since the text that is held back begins.
        self._found: list[Delta] = []
        self._held = ""

    def _new_parser(self) -> ToolCallParser:
        return ToolCallParser(self._form, self._functions, is_beginning=False)

    def feed(self, text: str, *, is_over: bool) -> str:
        """Return what is certainly a thought now: everything if the thoughts are over."""
        thought = ""
        for character in text:
            if self._held or character in self._first_characters:
                thought += self._feed_parser(character)
            else:
                thought += character
        if is_over:
            thought += self._held
            self._held = ""
        return thought

    def _feed_parser(self, character: str) -> str:
        self._held += character
        self._found += self._parser.feed(character)
        # What comes before the first call is a thought.
        thought = ""
        while self._found and self._found[0].kind != "call":
            thought += self._found.pop(0).text
        # If text follows the calls, they are thoughts as well.
        if any(delta.kind == "content" and delta.text.strip() for delta in self._found):
            thought = self._held
            self._parser = self._new_parser()
            self._found = []
        self._held = self._held[len(thought) :]
        return thought

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """Return the calls at the end of an answer that ends in its thoughts, or else the rest."""
        found = [delta for delta in self._found + self._parser.finish() if delta.kind != "content"]
        if self._one_only:
            found = [delta for delta in found if delta.number == 0]
        if found and not is_cut:
            return found
        if self._held:
            return [Delta("thought", self._held)]
        return []
