"""The interface between specgen and the tokens of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a model, as text."""

    @property
    def n_tokens(self) -> int:
        """The number of tokens."""

    @property
    def add_bos(self) -> bool:
        """Whether a text starts with a beginning-of-text token."""

    def tokenize(
        self,
        text: str,
        *,
        add_special: bool,
        parse_special: bool,
    ) -> list[int]:
        """Tokenize a whole text.

        Args:
            text: The text.
            add_special: Put a beginning-of-text token first, if `add_bos`.
            parse_special: Read the names of control tokens as these tokens.
        """

    def tokenize_inside(self, text: str, *, parse_special: bool) -> list[int]:
        """Tokenize a text that is in the middle of another one."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text; none for control tokens."""

    def token_text(self, token_id: int) -> str:
        """Return the token's entry in the token table, for comparisons and messages."""

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that begin a text (bos), end it (eos) and end a turn (eot).

        A token that the model does not have is -1.
        """

    def is_end(self, token_id: int) -> bool:
        """Return whether the token ends a text."""

    def end_tokens(self) -> Sequence[int]:
        """Return all tokens that end a text."""
