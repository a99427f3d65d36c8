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
            add_special: Whether to put a beginning-of-text token first, if `add_bos` is True.
            parse_special: Whether names of control tokens in the text become these tokens.
        """

    def tokenize_inside(
        self,
        text: str,
        *,
        parse_special: bool,
    ) -> list[int]:
        """Tokenize a text as a part in the middle of a longer text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for control tokens."""

    def token_text(self, token_id: int) -> str:
        """Return a token's entry in the token table, for comparisons and messages."""

    def special_tokens(self) -> dict[str, int]:
        """Return the tokens that begin a text (bos), end a text (eos) and end a turn (eot).

        The token is -1 if the model does not have one.
        """

    def is_end(self, token_id: int) -> bool:
        """Return whether a token ends a text."""

    def end_tokens(self) -> Sequence[int]:
        """Return all tokens that end a text."""
