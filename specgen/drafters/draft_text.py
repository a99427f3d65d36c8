"""The target's text in the draft's own tokens, as it grows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specgen.drafters.spelling import Lexicon, counterpart
from specgen.method.backend import Vocabulary
from specgen.method.draft import NO_DRAFT, Draft
from specgen.text.prefix import n_common

#: Bytes of the text that are spelled again with what follows them: tokenizers look back.
_BEFORE = 48
#: The most tokens that a new spelling may replace. If the spellings differ further back, the text was
#: cut in the middle of something, and the old spelling stays.
_MAX_REPLACED = 4


@dataclass(frozen=True, slots=True)
class _Border:
    """A control token of the target. No token of the draft reaches over it.

    It is the last of `n_target` tokens and stands after `n_bytes` bytes. Before it the text had
    `n_before` of the draft's tokens; with its counterpart, if it has one, it has `n_after`.
    """

    n_target: int
    n_bytes: int
    n_before: int
    n_after: int


class DraftText:
    """The target's text, spelled with the draft's vocabulary.

    `follow` adds the tokens that were committed; its cost depends on their number, not on the
    length of the text. Where the text went on as drafted, the tokens that the draft proposed stay,
    since the draft's cache holds them. The rest is spelled as the draft's tokenizer would spell
    it, together with the last few tokens before, which may change.

    `prompt` is the draft's version of the target's first `n_prompt` tokens, for example in its own
    chat template.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        n_prompt: int,
        target: Vocabulary,
        draft: Lexicon,
    ) -> None:
        self._n_prompt = n_prompt
        self._target = target
        self._lexicon, self._draft = draft, draft.vocabulary
        #: The text in the draft's tokens, without the bytes that are held back. Read only.
        self.tokens: list[int] = list(prompt)
        #: How many of `tokens`, from the first on, have not changed since the last call of `follow`.
        self.n_unchanged = len(prompt)
        self._bytes = bytearray()
        #: The end in the bytes of each of `tokens`, and of each of the target's tokens behind the prompt.
        self.ends = [0] * len(prompt)
        self._target_ends: list[int] = []
        #: The number of bytes that are in tokens, or have none.
        self._n_told = 0
        self._borders = [_Border(0, 0, 0, len(prompt))]

    @property
    def n_followed(self) -> int:
        """The number of the target's tokens that the text has followed."""
        return self._n_prompt + len(self._target_ends)

    @property
    def held_back(self) -> bytes:
        """The end of the text that is in no token yet."""
        return bytes(self._bytes[self._n_told :])

    def last_bytes(self, n: int) -> bytes:
        """Return at most the last n bytes of the text, back to the last control token. They start with a
        whole character if the text consists of characters."""
        start = max(self._borders[-1].n_bytes, len(self._bytes) - n)
        for _ in range(3):  # a character has no more bytes behind its first
            if start < len(self._bytes) and self._bytes[start] & 0xC0 == 0x80:
                start += 1
        return bytes(self._bytes[start:])

    def follow(self, context: Sequence[int], drafted: Draft = NO_DRAFT) -> None:
        """Add the new tokens of `context`, which holds all of the target's tokens. `drafted` is the
        last draft, after `tokens`, in the draft's own tokens."""
        self.n_unchanged = len(self.tokens)
        for token in context[self._n_prompt + len(self._target_ends) :]:
            data = self._target.token_bytes(token)
            self._bytes += data
            self._target_ends.append(len(self._bytes))
            if not data:
                self._tell(drafted)
                drafted = NO_DRAFT
                self._add_control(token)
        self._tell(drafted)

    def ending(self, n_tokens: int) -> bytes:
        """Return the bytes of the last `n_tokens` tokens, if `hold_back` could take them back; else none."""
        n_left = len(self.tokens) - n_tokens
        if n_left < max(1, self._borders[-1].n_after) or self._n_told < len(self._bytes):
            return b""
        spelled = b"".join(map(self._draft.token_bytes, self.tokens[n_left:]))
        is_all = self._begin(n_left) + len(spelled) == len(self._bytes)
        return spelled if is_all else b""

    def hold_back(self, n_tokens: int) -> None:
        """Take the last tokens back, so that the draft may choose longer ones in their place."""
        n_left = len(self.tokens) - n_tokens
        self._n_told = self._begin(n_left)
        self._cut(n_left)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the target's tokens but the first `n_tokens`."""
        n_kept = max(0, n_tokens - self._n_prompt)
        if n_kept >= len(self._target_ends):
            return
        del self._target_ends[n_kept:]
        while self._borders[-1].n_target > n_kept:
            self._cut(self._borders.pop().n_before)
        n_bytes = self._target_ends[-1] if n_kept else 0
        del self._bytes[n_bytes:]
        n_left = bisect_right(self.ends, n_bytes, lo=self._borders[-1].n_after)
        is_cut = n_left < len(self.tokens)
        self._cut(n_left)
        self._n_told = self._start(n_left) if is_cut else min(self._n_told, n_bytes)

    def _start(self, index: int) -> int:
        """Return the offset at which the token before `index` ends."""
        border = self._borders[-1]
        return self.ends[index - 1] if index > border.n_after else border.n_bytes

    def _begin(self, index: int) -> int:
        """Return the offset at which token `index` starts: after the bytes before it that have no token, if
        there are any."""
        return self.ends[index] - len(self._draft.token_bytes(self.tokens[index]))

    def _add(self, token: int, end: int) -> None:
        self.tokens.append(token)
        self.ends.append(end)

    def _cut(self, n_tokens: int) -> None:
        del self.tokens[n_tokens:], self.ends[n_tokens:]
        self.n_unchanged = min(self.n_unchanged, n_tokens)

    def _add_control(self, token: int) -> None:
        n_before = len(self.tokens)
        own = counterpart(token, self._target, self._draft)
        if own is not None:
            self._add(own, len(self._bytes))
        self._borders.append(
            _Border(len(self._target_ends), len(self._bytes), n_before, len(self.tokens))
        )

    def _tell(self, drafted: Draft) -> None:
        self._take_drafted(drafted)
        if self._n_told < len(self._bytes):
            self._spell()
            self._n_told = len(self._bytes)

    def _take_drafted(self, drafted: Draft) -> None:
        """Take over the draft's own tokens for as long as their bytes are those of the text."""
        for token in drafted.tokens:
            data = self._draft.token_bytes(token)
            if not data or not self._bytes.startswith(data, self._n_told):
                return
            self._n_told += len(data)
            self._add(token, self._n_told)

    def _spell(self) -> None:
        """Spell the bytes that are in no token, together with the text before them."""
        border = self._borders[-1]
        n_tokens, n_unchanged = len(self.tokens), self.n_unchanged
        replaced: list[int] = []
        first = bisect_right(self.ends, self._n_told - _BEFORE, lo=border.n_after)
        if first < n_tokens:
            start = self._begin(first)
        else:  # there may be many bytes that have no token
            start = max(self._start(first), self._n_told - _BEFORE)
        joint = self._lexicon.spell(bytes(self._bytes[start:]))
        common = {0, *(end for _, end in joint)}
        for n_kept in range(n_tokens, max(first, n_tokens - _MAX_REPLACED) - 1, -1):
            place = max(0, self._start(n_kept) - start)
            if place in common:
                offset = start
                replaced = self.tokens[n_kept:n_unchanged]
                self._cut(n_kept)
                new = [(token, end) for token, end in joint if end > place]
                break
        else:
            before = bytes(self._bytes[start : self._n_told])
            offset = self._n_told
            new = self._lexicon.spell_after(before, bytes(self._bytes[self._n_told :]))
        for token, end in new:
            self._add(token, offset + end)
        # The same tokens may stand for other bytes, if some bytes have no token.
        self.n_unchanged += n_common(replaced, [token for token, _ in new])
