"""The target's text in the tokens of a draft with another vocabulary, as it grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specgen.drafters.lexicon import Lexicon, counterpart
from specgen.method.draft import NO_DRAFT, Draft
from specgen.text.overlap import common_prefix_length
from specgen.text.vocabulary import Vocabulary

#: New bytes are spelled together with this many bytes before them, since a token depends on what
#: precedes it.
_BYTES_BEFORE = 48
#: The most tokens that a new spelling may replace. It differs further back only where the text was
#: cut in a word.
_MAX_REPLACED = 4


class DraftText:
    """The target's text, spelled with the draft's vocabulary.

    Where the text went on as drafted, the tokens that the draft proposed stay, since the draft's
    cache holds them. The rest is spelled as the draft's tokenizer would spell it, together with the
    last few tokens before, which may change. No token spans a control token.

    Example:
        The draft's tokens are "hello", " w", "or" and "orld". The end of the text is spelled again
        as it grows:

        - "hello wor" has the `tokens` "hello", " w", "or" with the `ends` 5, 7, 9.
        - "hello world" has "hello", " w", "orld" with 5, 7, 11. Two tokens are unchanged.

    Args:
        prompt: The draft's version of the target's first `n_prompt` tokens, for example in its own
            chat template.
        n_prompt: See `prompt`.
        target: The target's vocabulary.
        lexicon: That of the draft.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        n_prompt: int,
        target: Vocabulary,
        lexicon: Lexicon,
    ) -> None:
        self._target = target
        self._lexicon = lexicon
        self._draft = lexicon.vocabulary
        #: The text in the draft's tokens, without the bytes that are held back. Read only.
        self.tokens: list[int] = list(prompt)
        #: Where each of `tokens` ends in `data`. The prompt has no bytes.
        self.ends = [0] * len(prompt)
        #: How many of `tokens`, from the first on, have not changed in the last call of `follow`.
        self.n_unchanged = len(prompt)
        #: The number of the target's tokens that the text has followed.
        self.n_followed = n_prompt
        #: The bytes of the text after the prompt. Read only.
        self.data = bytearray()
        #: How many of the bytes are spelled: they are in tokens, or no token has them.
        self._n_spelled = 0
        #: How many bytes and tokens precede the end of the last control token. They stay.
        self._n_fixed_bytes = 0
        self._n_fixed_tokens = len(prompt)

    @property
    def held_back(self) -> bytes:
        """The last bytes, which are in no token: the draft is to begin with them."""
        return bytes(self.data[self._n_spelled :])

    def last_bytes(self, n: int) -> bytes:
        """Return at most the last n bytes, not before the last control token.

        They begin with a whole character.
        """
        start = max(self._n_fixed_bytes, len(self.data) - n)
        for _ in range(3):  # a character has no more bytes after its first
            if start < len(self.data) and self.data[start] & 0xC0 == 0x80:
                start += 1
        return bytes(self.data[start:])

    def follow(self, context: Sequence[int], drafted: Draft = NO_DRAFT) -> None:
        """Add the new tokens of the target's text.

        Args:
            context: The target's text.
            drafted: What the draft proposed after `tokens`, in its own tokens.
        """
        first = max(0, len(self.tokens) - _MAX_REPLACED)
        tokens_before = self.tokens[first:]
        for token in context[self.n_followed :]:
            data = self._target.token_bytes(token)
            if data:
                self.data += data
            else:
                self._spell_new_bytes(drafted)
                drafted = NO_DRAFT
                self._add_control_token(token)
        self.n_followed = max(self.n_followed, len(context))
        self._spell_new_bytes(drafted)
        self.n_unchanged = first + common_prefix_length(tokens_before, self.tokens[first:])

    def ending(self, n_tokens: int) -> bytes:
        """Return the bytes of the last tokens, if `hold_back` can take them back; else none."""
        n_left = len(self.tokens) - n_tokens
        if n_left < max(1, self._n_fixed_tokens) or self._n_spelled < len(self.data):
            return b""
        spelled = b"".join(map(self._draft.token_bytes, self.tokens[n_left:]))
        has_all_bytes = self._start_of(n_left) + len(spelled) == len(self.data)
        return spelled if has_all_bytes else b""

    def hold_back(self, n_tokens: int) -> None:
        """Take the last tokens back, so that the draft may choose longer ones in their place."""
        n_left = len(self.tokens) - n_tokens
        self._n_spelled = self._start_of(n_left)
        self._drop_tokens(n_left)
        self.n_unchanged = min(self.n_unchanged, n_left)

    def _start_of(self, index: int) -> int:
        """Return where token `index` starts. There may be bytes before it that no token has."""
        return self.ends[index] - len(self._draft.token_bytes(self.tokens[index]))

    def _end_of(self, n_tokens: int) -> int:
        """Return where the first `n_tokens` tokens end, but not before the last control token."""
        return self.ends[n_tokens - 1] if n_tokens > self._n_fixed_tokens else self._n_fixed_bytes

    def _add(self, token: int, end: int) -> None:
        self.tokens.append(token)
        self.ends.append(end)

    def _drop_tokens(self, n_left: int) -> None:
        del self.tokens[n_left:]
        del self.ends[n_left:]

    def _add_control_token(self, token: int) -> None:
        own = counterpart(token, self._target, self._draft)
        if own is not None:
            self._add(own, len(self.data))
        self._n_fixed_bytes = len(self.data)
        self._n_fixed_tokens = len(self.tokens)

    def _spell_new_bytes(self, drafted: Draft) -> None:
        """Put all bytes into tokens: into those that the draft proposed as far as they agree."""
        for token in drafted.tokens:
            data = self._draft.token_bytes(token)
            if not data or not self.data.startswith(data, self._n_spelled):
                break
            self._n_spelled += len(data)
            self._add(token, self._n_spelled)
        if self._n_spelled < len(self.data):
            self._spell_with_last_tokens()
            self._n_spelled = len(self.data)

    def _spell_with_last_tokens(self) -> None:
        """Spell the new bytes together with the tokens before them, the last of which may change.

        As many tokens as possible are kept: up to a place where a token of the new spelling ends,
        too. If there is no such place nearby, the new bytes are spelled on their own.
        """
        first, start = self._where_to_spell_from()
        joint = self._lexicon.spell(bytes(self.data[start:]))
        joint_ends = {0, *(end for _, end in joint)}
        n_tokens = len(self.tokens)
        n_least = max(first, n_tokens - _MAX_REPLACED)
        for n_kept in range(n_tokens, n_least - 1, -1):
            place = max(0, self._end_of(n_kept) - start)
            if place in joint_ends:
                self._drop_tokens(n_kept)
                for token, end in joint:
                    if end > place:
                        self._add(token, start + end)
                return
        before = bytes(self.data[start : self._n_spelled])
        new = bytes(self.data[self._n_spelled :])
        for token, end in self._lexicon.spell_after(before, new):
            self._add(token, self._n_spelled + end)

    def _where_to_spell_from(self) -> tuple[int, int]:
        """Return the first token that is spelled again, and the byte at which it starts."""
        border = self._n_spelled - _BYTES_BEFORE
        first = bisect_right(self.ends, border, lo=self._n_fixed_tokens)
        if first < len(self.tokens):
            return first, self._start_of(first)
        # There may be many bytes after the last token that no token has.
        return first, max(self._end_of(first), border)
