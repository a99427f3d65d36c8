"""Control tokens of two vocabularies, and which of them mean the same."""

from __future__ import annotations

from specgen.backend.base import Vocabulary


class ControlTokens:
    """Maps control tokens from one vocabulary to another: by name if the other has a token of the
    same name, else by role. Tokens without a counterpart are left out; they never become text.

    In the middle of a text the only roles are those of ends: of a turn, or of a text. (Each tokenizer
    decides how a text begins.)
    """

    def __init__(self, source: Vocabulary, destination: Vocabulary) -> None:
        self._source = source
        self._destination = destination
        self._known: dict[int, int | None] = {}

    def find(self, token: int) -> int | None:
        """The other vocabulary's token for a control token of the first; None if there is none."""
        if token not in self._known:
            named = self._by_name(token)
            self._known[token] = self._by_role(token) if named is None else named
        return self._known[token]

    def _by_name(self, token: int) -> int | None:
        name = self._source.token_text(token)
        found = self._destination.tokenize(name, add_special=False, parse_special=True)
        if len(found) == 1 and not self._destination.token_bytes(found[0]):
            is_end = self._destination.is_end(found[0])
            return found[0] if is_end == self._source.is_end(token) else None
        return None

    def _by_role(self, token: int) -> int | None:
        if not self._source.is_end(token):
            return None
        own, theirs = self._source.special_tokens(), self._destination.special_tokens()
        # An end of turn and an end of text replace each other where a vocabulary has only one.
        roles = ("eos", "eot") if token == own["eos"] != own["eot"] else ("eot", "eos")
        candidates = [theirs[role] for role in roles if theirs[role] >= 0]
        return next(iter((*candidates, *self._destination.end_tokens())), None)
