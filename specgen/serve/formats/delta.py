"""The unit in which an answer is passed on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to an answer."""

    #: What the text is added to. A ``call`` begins a call; its ``arguments`` follow.
    kind: Literal["thought", "content", "call", "arguments"]
    #: What is added; JSON in the case of arguments.
    text: str
    #: The name of the called function, where a call begins.
    name: str = ""
    #: The id of the call, where it begins.
    identity: str = ""
    #: The number of calls before this one.
    number: int = 0
    #: Whether the arguments are complete. Those of a call that was cut off never are.
    is_end: bool = False

    def continues(self, block: Delta) -> bool:
        """Return whether this continues a block, rather than beginning the next."""
        if self.kind == "arguments":
            return True
        return self.kind == block.kind and self.kind != "call"

    def with_more(self, delta: Delta) -> Delta:
        """Return this block, continued."""
        return replace(self, text=self.text + delta.text, is_end=delta.is_end)
