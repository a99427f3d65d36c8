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
    held back; if other text follows, it was a thought.

    Args:
        form: The form of the model's calls.
        functions: The functions that may be called.
        one_only: Whether everything after the first call is left out.
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
        #: The text that is held back, since it may be calls.
        self._held = ""
        #: What the parser has made of that text.
        self._held_deltas: list[Delta] = []

    def _new_parser(self) -> ToolCallParser:
        return ToolCallParser(self._form, self._functions, is_beginning=False)

    def feed(self, text: str, *, is_over: bool) -> str:
        """Read more of the thoughts, and return the text that is certainly a thought by now.

        Args:
            text: The next piece of the thinking block.
            is_over: Whether the model has ended its thoughts, so that they have no calls.
        """
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
        """Hold a character back, and return the held text that turns out to be a thought."""
        self._held += character
        self._held_deltas += self._parser.feed(character)
        # Text before the first call is a thought.
        thought = ""
        while self._held_deltas and self._held_deltas[0].kind != "call":
            thought += self._held_deltas.pop(0).text
        # If text follows the calls, everything that was held back is a thought.
        if any(delta.kind == "content" and delta.text.strip() for delta in self._held_deltas):
            thought = self._held
            self._parser = self._new_parser()
            self._held_deltas = []
        self._held = self._held[len(thought) :]
        return thought

    def finish(self, *, is_cut: bool) -> list[Delta]:
        """Return the calls at the end of an answer that ends within its thoughts.

        Args:
            is_cut: Whether the answer was cut off. Its last call may be incomplete then.

        Returns:
            The calls. If there are none, or the answer was cut off, the text that was held back is
            returned as a thought instead.
        """
        deltas = self._held_deltas + self._parser.finish()
        calls = [delta for delta in deltas if delta.kind != "content"]
        if self._one_only:
            calls = [delta for delta in calls if delta.number == 0]
        if calls and not is_cut:
            return calls
        if self._held:
            return [Delta("thought", self._held)]
        return []
