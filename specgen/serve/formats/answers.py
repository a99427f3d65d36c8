"""One answer of a model, split into its thoughts, its content and its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from specgen.events import FinishedEvent
from specgen.serve.formats.delta import Delta
from specgen.serve.formats.parsed_request import ParsedRequest
from specgen.serve.formats.tool_calls.calls_in_thoughts import CallsInThoughts
from specgen.serve.formats.tool_calls.parser import ToolCallParser
from specgen.session.prompts.thoughts import ThoughtReader


class Answer:
    """One answer to a rendered prompt, in deltas: its thinking block, its content, and its calls.

    Args:
        request: The request that is answered.
        prompt: The text of the prompt, which may end with the opening tag of a thinking block.
    """

    def __init__(self, request: ParsedRequest, prompt: str = "") -> None:
        self._request = request
        #: Splits off the thinking block; None if it stays in the content.
        self._thoughts: ThoughtReader | None = None
        #: Splits off calls; None if there are no tools.
        self._calls: ToolCallParser | None = None
        #: Finds calls in the thinking block; None once it is over.
        self._calls_in_thoughts: CallsInThoughts | None = None
        if request.splits_reasoning:
            self._thoughts = ThoughtReader(prompt)
        tools = request.tools
        if tools is not None and request.call_form is not None:
            one_only = not tools.is_parallel
            self._calls_in_thoughts = CallsInThoughts(
                request.call_form, tools.callable, one_only=one_only
            )
            self._calls = ToolCallParser(
                request.call_form,
                tools.callable,
                one_only=one_only,
                calls_only=tools.must_call,
            )
        #: The white space at the end of the thoughts so far, which is dropped if no more follow.
        self._space_after_thought = ""
        #: Its thoughts, content and calls, in order; the text of a call is its arguments.
        self.blocks: list[Delta] = []
        #: The number of tokens in the thinking block.
        self.n_reasoning_tokens = 0
        #: The event at its end; None before.
        self.finished: FinishedEvent | None = None

    def feed(self, tokens: Sequence[str]) -> list[Delta]:
        """Add the texts of tokens, and return the deltas that are certain now.

        The tokens in the thinking block are counted, including those of its tags.
        """
        if self._thoughts is None:
            return self._add_pieces("", "".join(tokens))
        thought = ""
        answer = ""
        for token in tokens:
            was_past = self._thoughts.is_past
            was_open = self._thoughts.is_open
            new_thought, new_answer = self._thoughts.feed(token)
            thought += new_thought
            answer += new_answer
            if was_past:  # the thoughts had ended before this token
                continue
            if self._thoughts.is_past and not was_open:
                # What looked like the beginning of an opening tag was not one.
                self.n_reasoning_tokens = 0
            else:
                self.n_reasoning_tokens += 1
        return self._add_pieces(thought, answer)

    def finish(self, event: FinishedEvent) -> list[Delta]:
        """End the answer, and return the remaining deltas.

        The arguments of a call that was cut off are never marked as complete.
        """
        self.finished = event
        deltas: list[Delta] = []
        # If the answer ends where a thinking block might still begin, it has no thoughts.
        max_reasoning_tokens = 0
        if self._thoughts is not None:
            if self._thoughts.is_open or self._thoughts.is_past:
                # `feed` also counts a token that ends the answer, but `n_tokens` does not.
                max_reasoning_tokens = event.n_tokens
            deltas += self._add_pieces(*self._thoughts.finish())
        self.n_reasoning_tokens = min(self.n_reasoning_tokens, max_reasoning_tokens)
        if self._calls is not None:
            is_cut = event.finish_reason != "stop" or self.stop_string is not None
            call_deltas: list[Delta] = []
            if self._calls_in_thoughts is not None:
                call_deltas += self._calls_in_thoughts.finish(is_cut=is_cut)
            call_deltas += self._calls.finish(is_cut=is_cut)
            deltas += self._add_to_blocks(call_deltas)
        return deltas

    def _add_pieces(self, thought: str, answer: str) -> list[Delta]:
        """Add a piece of the thinking block and a piece of the text after it; return the deltas."""
        if self._calls_in_thoughts is not None and self._thoughts is not None:
            is_over = self._thoughts.is_past
            thought = self._calls_in_thoughts.feed(thought, is_over=is_over)
            if is_over:
                self._calls_in_thoughts = None
        deltas: list[Delta] = []
        if thought:
            deltas.append(Delta("thought", thought))
        if self._calls is not None:
            deltas += self._calls.feed(answer)
        elif answer:
            deltas.append(Delta("content", answer))
        return self._add_to_blocks(deltas)

    def _add_to_blocks(self, deltas: list[Delta]) -> list[Delta]:
        """Add deltas to the blocks, and return them without white space around the thoughts."""
        added: list[Delta] = []
        for delta in deltas:
            if delta.kind == "thought":
                text = self._without_outer_space(delta.text)
                if not text:
                    continue
                delta = replace(delta, text=text)  # noqa: PLW2901
            if self.blocks and delta.continues(self.blocks[-1]):
                self.blocks[-1] = self.blocks[-1].with_more(delta)
            else:
                self.blocks.append(delta)
            added.append(delta)
        return added

    def _without_outer_space(self, thought: str) -> str:
        """Return the next piece of the thoughts without white space at their beginning and end.

        Chat templates have line breaks there. Models that do not think write nothing else.
        """
        thought = self._space_after_thought + thought
        if not self.blocks:
            thought = thought.lstrip()
        text = thought.rstrip()
        self._space_after_thought = thought[len(text) :]
        return text

    def text(self, kind: Literal["thought", "content"]) -> str:
        """Return all of the thoughts, or all of the content."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Delta]:
        """The complete calls; a call that was cut off is left out, since nobody can use it."""
        return [block for block in self.blocks if block.kind == "call" and block.is_end]

    @property
    def stop_string(self) -> str | None:
        """The stop text of the request that ended the answer; None if none did."""
        if self.finished is None or self.finished.stopped_by not in self._request.generation.stop:
            return None
        return self.finished.stopped_by

    @property
    def finish_reason(self) -> Literal["length", "stop", "tool_calls"]:
        """Why the answer ended, in OpenAI's words."""
        if self.finished is None or self.finished.finish_reason != "stop":
            return "length"
        if self.calls:
            return "tool_calls"
        return "stop"
