"""The target's text, as it grows, in the tokens of a draft with another vocabulary."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from specgen.drafters.lexicon import Lexicon, counterpart
from specgen.method.draft import NO_DRAFT, Draft
from specgen.text.overlap import common_prefix_length
from specgen.text.vocabulary import Vocabulary

#: New bytes are spelled together with this many bytes before them, since the tokens of a text
#: depend on what precedes it.
_BYTES_BEFORE = 48
#: The maximum number of tokens that a new spelling may replace. It rarely differs further back:
#: only if the earlier text was cut within a word.
_MAX_REPLACED = 4


class DraftText:
    """The target's text, spelled with the draft's vocabulary.

    To *spell* bytes is to find tokens for them. Where the text went on as drafted, the tokens that
    the draft proposed stay, since the draft's cache holds them. Other new text is spelled as the
    draft's tokenizer would spell it, together with the last few tokens, which may change. No token
    spans a control token.

    Example:
        The draft's tokens are "hello", " w", "or" and "orld". As the text grows, its end is spelled
        again:

        - "hello wor" has the `tokens` "hello", " w", "or" with the `ends` 5, 7, 9.
        - "hello world" has "hello", " w", "orld" with 5, 7, 11. Two tokens are unchanged.

    Args:
        prompt: Tokens of the draft that stand for the target's first `n_prompt` tokens, for example
            the conversation in the draft's own chat template.
        n_prompt: The number of the target's tokens that `prompt` stands for.
        target: The target's vocabulary.
        lexicon: Spells texts with the draft's vocabulary.
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
        #: Where each of `tokens` ends in `data`. Tokens of the prompt end at 0.
        self.ends = [0] * len(prompt)
        #: The number of first `tokens` that the last call of `follow` did not change.
        self.n_unchanged = len(prompt)
        #: The number of the target's tokens that were added to this text.
        self.n_followed = n_prompt
        #: The bytes of the text after the prompt. Read only.
        self.data = bytearray()
        #: The number of bytes that are spelled: either in tokens, or left out because no token has
        #: them.
        self._n_spelled = 0
        #: The number of bytes up to the last control token. Their spelling does not change.
        self._n_fixed_bytes = 0
        #: The number of tokens up to and including the last control token. They do not change.
        self._n_fixed_tokens = len(prompt)

    @property
    def held_back(self) -> bytes:
        """The last bytes, which are in none of the tokens. The draft has to begin with them."""
        return bytes(self.data[self._n_spelled :])

    def last_bytes(self, n: int) -> bytes:
        """Return the last n bytes, or fewer: none before the last control token.

        They begin with a complete character.
        """
        start = max(self._n_fixed_bytes, len(self.data) - n)
        # Skip the rest of a character: up to three bytes of the form 10xxxxxx.
        for _ in range(3):
            if start < len(self.data) and self.data[start] & 0xC0 == 0x80:
                start += 1
        return bytes(self.data[start:])

    def follow(
        self,
        context: Sequence[int],
        drafted: Draft = NO_DRAFT,
    ) -> None:
        """Add the new tokens of the target's text.

        Args:
            context: The target's text, in the target's tokens.
            drafted: The last draft, in the draft's own tokens: it followed `tokens`.
        """
        first = max(0, len(self.tokens) - _MAX_REPLACED)
        tokens_before = self.tokens[first:]
        for token in context[self.n_followed :]:
            data = self._target.token_bytes(token)
            if data:
                self.data += data
            else:  # a control token, across which nothing is spelled
                self._spell_new_bytes(drafted)
                drafted = NO_DRAFT
                self._add_control_token(token)
        self.n_followed = max(self.n_followed, len(context))
        self._spell_new_bytes(drafted)
        self.n_unchanged = first + common_prefix_length(tokens_before, self.tokens[first:])

    def steps(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
    ) -> list[tuple[int, list[int]]]:
        """Follow an answer token by token, and return what changes in `tokens`.

        Args:
            prompt: The target's prompt.
            answer: The target's tokens of the answer.

        Returns:
            For the text before each token of the answer: how many tokens are unchanged, and those
            that follow.
        """
        context = list(prompt)
        self.follow(context)
        steps = [(0, self.tokens.copy())]
        for token in answer[:-1]:
            context.append(token)
            self.follow(context)
            steps.append((self.n_unchanged, self.tokens[self.n_unchanged :]))
        return steps

    def ending(self, n_tokens: int) -> bytes:
        """Return the bytes of the last `n_tokens` tokens; empty if `hold_back` cannot remove them.

        It cannot if they include the first token or a control token, or if some of the bytes are in
        none of the tokens.
        """
        n_left = len(self.tokens) - n_tokens
        if n_left < max(1, self._n_fixed_tokens) or self._n_spelled < len(self.data):
            return b""
        spelled = b"".join(map(self._draft.token_bytes, self.tokens[n_left:]))
        has_all_bytes = self._start_of(n_left) + len(spelled) == len(self.data)
        return spelled if has_all_bytes else b""

    def hold_back(self, n_tokens: int) -> None:
        """Remove the last tokens, so that the draft may choose longer ones in their place.

        Their bytes become `held_back`.
        """
        n_left = len(self.tokens) - n_tokens
        self._n_spelled = self._start_of(n_left)
        self._drop_tokens(n_left)
        self.n_unchanged = min(self.n_unchanged, n_left)

    def _start_of(self, index: int) -> int:
        """Return the position in `data` at which token `index` starts.

        That may be after the end of the previous token, if no token has the bytes between them.
        """
        return self.ends[index] - len(self._draft.token_bytes(self.tokens[index]))

    def _end_of(self, n_tokens: int) -> int:
        """Return the position in `data` at which the first `n_tokens` tokens end.

        It is never before the last control token.
        """
        return self.ends[n_tokens - 1] if n_tokens > self._n_fixed_tokens else self._n_fixed_bytes

    def _add(self, token: int, end: int) -> None:
        self.tokens.append(token)
        self.ends.append(end)

    def _drop_tokens(self, n_left: int) -> None:
        del self.tokens[n_left:]
        del self.ends[n_left:]

    def _add_control_token(self, token: int) -> None:
        """Add the draft's counterpart of a control token of the target, if there is one."""
        own = counterpart(token, self._target, self._draft)
        if own is not None:
            self._add(own, len(self.data))
        self._n_fixed_bytes = len(self.data)
        self._n_fixed_tokens = len(self.tokens)

    def _spell_new_bytes(self, drafted: Draft) -> None:
        """Find tokens for all new bytes: first those of the last draft, as far as they agree."""
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
        """Spell the new bytes together with the last tokens, which may change.

        The last bytes, old and new, are spelled jointly. The two spellings are then connected at
        the last position where tokens of both end, so that as few old tokens as possible change. If
        there is no such position nearby, the new bytes are spelled on their own.
        """
        first, start = self._where_to_spell_from()
        joint = self._lexicon.spell(bytes(self.data[start:]))
        joint_ends = {0, *(end for _, end in joint)}
        n_tokens = len(self.tokens)
        n_kept_min = max(first, n_tokens - _MAX_REPLACED)
        for n_kept in range(n_tokens, n_kept_min - 1, -1):
            connection = max(0, self._end_of(n_kept) - start)
            if connection in joint_ends:
                self._drop_tokens(n_kept)
                for token, end in joint:
                    if end > connection:
                        self._add(token, start + end)
                return
        before = bytes(self.data[start : self._n_spelled])
        new = bytes(self.data[self._n_spelled :])
        for token, end in self._lexicon.spell_after(before, new):
            self._add(token, self._n_spelled + end)

    def _where_to_spell_from(self) -> tuple[int, int]:
        """Return the index of the first token to spell again, and its start in `data`."""
        min_start = self._n_spelled - _BYTES_BEFORE
        first = bisect_right(self.ends, min_start, lo=self._n_fixed_tokens)
        if first < len(self.tokens):
            return first, self._start_of(first)
        # No token is spelled again: all of them end early, and no token has the bytes after them.
        return first, max(self._end_of(first), min_start)
