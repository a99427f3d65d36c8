"""The unit in which an answer is passed on: a part of a thought, of the content or of a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to an answer."""

    #: The part of the answer that the text is added to. A ``call`` begins a call, and ``arguments``
    #: are added to the last call.
    kind: Literal["thought", "content", "call", "arguments"]
    #: The text to add; a piece of JSON in the case of arguments.
    text: str
    #: The name of the called function, in a ``call``.
    name: str = ""
    #: The id of the call, in a ``call``.
    identity: str = ""
    #: The number of calls before the one that this belongs to.
    number: int = 0
    #: Whether this completes the arguments. Those of a call that was cut off never are complete.
    is_end: bool = False

    def continues(self, block: Delta) -> bool:
        """Return whether this delta is added to a block, rather than beginning the next block."""
        if self.kind == "arguments":
            return True
        return self.kind == block.kind and self.kind != "call"

    def with_more(self, delta: Delta) -> Delta:
        """Return this block with the text of a delta that continues it."""
        return replace(self, text=self.text + delta.text, is_end=delta.is_end)
