"""The interface between specgen and the tokens of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a model, as text."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def add_bos(self) -> bool: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokenize, with `add_special` behind a bos token if `add_bos`, with `parse_special`
        control tokens by name.
        """

    def tokenize_inside(self, text: str, *, parse_special: bool) -> list[int]:
        """Tokenize a text in the middle of other text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text; empty for control tokens."""

    def token_text(self, token_id: int) -> str:
        """Return the token's entry in the token table, for comparisons and messages."""

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that begin a text (bos), end it (eos) and end a turn (eot); -1 where
        there is none.
        """

    def is_end(self, token_id: int) -> bool: ...
    def end_tokens(self) -> Sequence[int]: ...
