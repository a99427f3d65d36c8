"""Drafts in another vocabulary than the target's (Timor et al., arXiv:2502.05202, Algorithm 2). The
drafter sees the text in its own tokens. What it drafts is spelled as the target's tokenizer would
after the text so far.
"""

from __future__ import annotations

import codecs
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from specgen.method.cost_table import Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import SamplerOptions
from specgen.system.arrays import Logits, TokenArray
from specgen.text.overlap import common_prefix_length
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.raw_probabilities import likeliest
from specgen.text.vocabulary import Vocabulary

#: Bytes that are spelled again with what follows, and that a tokenizer sees before a draft:
#: tokenizers look back.
_BEFORE, _SHOWN = 48, 32
#: The most tokens that a new spelling may replace: it differs further back where a text was cut in
#: a word.
_MAX_REPLACED = 4
_MAX_HELD_BACK = 4  # tokens to take back at the end of the text
#: A prefix for texts, if the tokenizer puts a space before every text. No tokenizer merges it with
#: a letter or a space.
_ANCHOR = "\n"
_BEHIND_ALL = b"\xff" * 64  # longer than any run of this byte in a vocabulary
#: Runs of bytes that are not UTF-8, in text decoded with "surrogateescape".
_STRAY = re.compile("([\udc80-\udcff]+)")
#: Tokens, and the end of each in bytes from the start of the text. Bytes without a token may be
#: between.
Spelled: TypeAlias = list[tuple[int, int]]


def n_unfinished(data: bytes) -> int:
    """Count the bytes of an incomplete character at the end, 0 to 3, without those that start none."""
    if data[-1:].isascii():
        return 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


def counterpart(token: int, source: Vocabulary, destination: Vocabulary) -> int | None:
    """Return another vocabulary's token for a control token: that of the same name, else of the
    same role; None if there is none. In the middle of a text the only roles are those of ends: of a
    turn, or of a text.
    """
    is_end = source.is_end(token)
    named = destination.tokenize(source.token_text(token), add_special=False, parse_special=True)
    is_one_control = len(named) == 1 and not destination.token_bytes(named[0])
    if is_one_control and destination.is_end(named[0]) == is_end:
        return named[0]
    if not is_end:
        return None
    own, theirs = source.special_tokens(), destination.special_tokens()
    # An end of turn and an end of text replace each other where a vocabulary has only one.
    roles = ("eos", "eot") if token == own["eos"] != own["eot"] else ("eot", "eos")
    candidates = [theirs[role] for role in roles if theirs[role] >= 0]
    return next(iter((*candidates, *destination.end_tokens())), None)


class Lexicon:
    """The tokens of a vocabulary by their bytes, and texts spelled with them, byte for byte.
    Characters go through the vocabulary's own tokenizer, bytes that are no character are spelled
    with the longest tokens that there are.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        letter = vocabulary.tokenize("a", add_special=False, parse_special=False)
        has_space = b"".join(map(vocabulary.token_bytes, letter)) != b"a"
        self._anchor = _ANCHOR if has_space else ""

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Every token that stands for text, by its bytes; of several (that of a byte and that of a
        character, for example), the one that the tokenizer uses. Reading a whole vocabulary takes a
        tenth of a second or more.
        """
        tokens: dict[bytes, int] = {}
        for token_id in range(self.vocabulary.n_tokens):
            data = self.vocabulary.token_bytes(token_id)
            is_new = bool(data) and data not in tokens
            exact = [(token_id, len(data))]
            if is_new or (data and self._exact(data.decode(errors="replace")) == exact):
                tokens[data] = token_id
        return tokens

    def with_prefix(self, prefix: bytes) -> TokenArray:
        """Return the tokens whose bytes start with `prefix`, or equal it: int64[m], sorted by
        bytes.
        """
        keys, token_ids = self._sorted
        start = bisect_left(keys, prefix)
        return token_ids[start : bisect_left(keys, prefix + _BEHIND_ALL, start)]

    def spell(self, data: bytes) -> Spelled:
        spelled, offset = Spelled(), 0
        for number, run in enumerate(_STRAY.split(data.decode("utf-8", "surrogateescape"))):
            raw, found = run.encode("utf-8", "surrogateescape"), None
            if number % 2:
                found = self._of_bytes(raw, offset)
            elif raw:
                found = self._exact(run, offset)
            spelled += self._of_parts(run, offset) if found is None else found
            offset += len(raw)
        return spelled

    def spell_after(self, before: bytes, data: bytes) -> Spelled:
        """Return the spelling of `data` behind `before`; ends count from the start of `data`. Both
        are spelled together, but a token that reaches over the border is spelled by itself behind
        it.
        """
        if not data:
            return []
        border = len(before)
        joint = self.spell(before + data)
        spelled = [(token, end - border) for token, end in joint if end > border]
        if border and spelled and border not in [end for _, end in joint]:
            spelled[:1] = self.spell(data[: spelled[0][1]])
        return spelled

    @cached_property
    def _sorted(self) -> tuple[list[bytes], TokenArray]:
        keys = sorted(self.tokens)
        return keys, np.array([self.tokens[key] for key in keys], np.int64)

    def _of_parts(self, text: str, offset: int) -> Spelled:
        """Spell a text of which some part has no token: that is separated from the rest."""
        if len(text) <= 1:
            return self._of_bytes(text.encode(), offset)
        spelled, half = Spelled(), len(text) // 2
        for part in (text[:half], text[half:]):
            found = self._exact(part, offset)
            spelled += self._of_parts(part, offset) if found is None else found
            offset += len(part.encode())
        return spelled

    def _of_bytes(self, data: bytes, offset: int) -> Spelled:
        spelled: Spelled = []
        start = 0
        while start < len(data):
            longest = (end for end in range(len(data), start, -1) if data[start:end] in self.tokens)
            end = next(longest, None)
            if end is not None:
                spelled.append((self.tokens[data[start:end]], offset + end))
            start = end or start + 1
        return spelled

    def _exact(self, text: str, offset: int = 0) -> Spelled | None:
        """Spell a text at an offset, without what the tokenizer adds; None if the bytes are not
        those of the text.
        """
        data, vocabulary = text.encode(), self.vocabulary
        tokens = vocabulary.tokenize(self._anchor + text, add_special=False, parse_special=False)
        pieces = list(map(vocabulary.token_bytes, tokens))
        if not (found := b"".join(pieces)).endswith(data):
            return None
        end, spelled = len(data) - len(found), Spelled()  # before 0 the anchor, and what was added
        for token, piece in zip(tokens, pieces, strict=True):
            is_added = end < 0 or not (piece or spelled)
            end += len(piece)
            # A token without bytes stands for something unknown: an anchor that has no token.
            if not is_added:
                spelled.append((token, offset + end))
            elif end > 0:
                return None
        return spelled


class DraftText:
    """The target's text, spelled with the draft's vocabulary.

    Where the text went on as drafted, the tokens that the draft proposed stay, since the draft's
    cache holds them. The rest is spelled as the draft's tokenizer would spell it, together with the
    last few tokens before, which may change. No token reaches over a control token. `prompt` is the
    draft's version of the target's first `n_prompt` tokens, for example in its own chat template.
    """

    def __init__(
        self, prompt: Sequence[int], n_prompt: int, target: Vocabulary, draft: Lexicon
    ) -> None:
        self._target = target
        self._lexicon, self._draft = draft, draft.vocabulary
        #: The text in the draft's tokens, without the bytes that are held back. Read only.
        self.tokens: list[int] = list(prompt)
        #: How many of `tokens`, from the first on, have not changed since the last call of
        #: `follow`.
        self.n_unchanged = len(prompt)
        self.n_followed = n_prompt  # the target's tokens that the text has followed
        self._bytes = bytearray()
        self.ends = [0] * len(prompt)  # of `tokens`, in the bytes
        self._n_told = 0  # the number of bytes that are in tokens, or have none
        self._border = (0, len(prompt))  # the bytes and the tokens up to the last control token

    @property
    def held_back(self) -> bytes:
        return bytes(self._bytes[self._n_told :])

    def last_bytes(self, n: int) -> bytes:
        """Return at most the last n bytes of the text, from a whole character behind the last
        control token on.
        """
        start = max(self._border[0], len(self._bytes) - n)
        for _ in range(3):  # a character has no more bytes behind its first
            if start < len(self._bytes) and self._bytes[start] & 0xC0 == 0x80:
                start += 1
        return bytes(self._bytes[start:])

    def follow(self, context: Sequence[int], drafted: Draft = NO_DRAFT) -> None:
        """Add the new tokens of `context`. `drafted` is the last draft, after `tokens`, in the
        draft's own tokens.
        """
        first = max(0, len(self.tokens) - _MAX_REPLACED)
        last = self.tokens[first:]
        for token in context[self.n_followed :]:
            data = self._target.token_bytes(token)
            self._bytes += data
            if not data:
                self._tell(drafted)
                drafted, own = NO_DRAFT, counterpart(token, self._target, self._draft)
                if own is not None:
                    self.tokens.append(own)
                    self.ends.append(len(self._bytes))
                self._border = (len(self._bytes), len(self.tokens))
        self.n_followed = max(self.n_followed, len(context))
        self._tell(drafted)
        self.n_unchanged = first + common_prefix_length(last, self.tokens[first:])

    def ending(self, n_tokens: int) -> bytes:
        """Return the bytes of the last `n_tokens` tokens, if `hold_back` could take them back; else
        none.
        """
        n_left = len(self.tokens) - n_tokens
        if n_left < max(1, self._border[1]) or self._n_told < len(self._bytes):
            return b""
        spelled = b"".join(map(self._draft.token_bytes, self.tokens[n_left:]))
        is_all = self._begin(n_left) + len(spelled) == len(self._bytes)
        return spelled if is_all else b""

    def hold_back(self, n_tokens: int) -> None:
        """Take the last tokens back, so that the draft may choose longer ones in their place."""
        n_left = len(self.tokens) - n_tokens
        self._n_told = self._begin(n_left)
        del self.tokens[n_left:], self.ends[n_left:]
        self.n_unchanged = min(self.n_unchanged, n_left)

    def _begin(self, index: int) -> int:
        """Return the offset at which token `index` starts: after bytes that have no token, if there
        are any.
        """
        return self.ends[index] - len(self._draft.token_bytes(self.tokens[index]))

    def _tell(self, drafted: Draft) -> None:
        """Put all bytes into tokens: the draft's own tokens for as long as they say what the text
        does.
        """
        for token in drafted.tokens:
            data = self._draft.token_bytes(token)
            if not data or not self._bytes.startswith(data, self._n_told):
                break
            self._n_told += len(data)
            self.tokens.append(token)
            self.ends.append(self._n_told)
        if self._n_told < len(self._bytes):
            self._spell()
            self._n_told = len(self._bytes)

    def _spell(self) -> None:
        """Spell the bytes that are in no token, together with the text before them."""
        n_tokens, (border, first_token) = len(self.tokens), self._border
        first = bisect_right(self.ends, self._n_told - _BEFORE, lo=first_token)
        if first < n_tokens:
            start = self._begin(first)
        else:  # there may be many bytes that have no token
            last_end = self.ends[first - 1] if first > first_token else border
            start = max(last_end, self._n_told - _BEFORE)
        joint = self._lexicon.spell(bytes(self._bytes[start:]))
        common = [0, *[end for _, end in joint]]
        for n_kept in range(n_tokens, max(first, n_tokens - _MAX_REPLACED) - 1, -1):
            place = max(0, (self.ends[n_kept - 1] if n_kept > first_token else border) - start)
            if place in common:
                offset = start
                del self.tokens[n_kept:], self.ends[n_kept:]
                break
        else:
            before = bytes(self._bytes[start : self._n_told])
            offset, place = self._n_told, 0
            joint = self._lexicon.spell_after(before, bytes(self._bytes[self._n_told :]))
        for token, end in joint:
            if end > place:
                self.tokens.append(token)
                self.ends.append(offset + end)


class Translation:
    """Translates between two vocabularies. A translated draft has no distributions: verifiers match
    its tokens.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target, self.draft = target, draft
        self._target_lexicon, self.draft_lexicon = Lexicon(target), Lexicon(draft)

    def text(self, prompt: Sequence[int], draft_prompt: Sequence[int] | None) -> DraftText:
        """Return a text for the draft to follow. `draft_prompt` replaces the `prompt`; None
        translates it.
        """
        n_prompt = len(prompt)
        if draft_prompt is None:
            # Each tokenizer decides how a text begins.
            own, theirs = self.target.special_tokens()["bos"], self.draft.special_tokens()["bos"]
            n_prompt = int(prompt[0] == own)
            draft_prompt = [theirs] if self.draft.add_bos and theirs >= 0 else []
        return DraftText(draft_prompt, n_prompt, self.target, self.draft_lexicon)

    def translate(
        self, draft: Draft, before: bytes, held_back: bytes, looks: Sequence[float] = ()
    ) -> Draft:
        """Translate a chain behind `before`, with whose end, `held_back`, it starts; `looks` are
        those of the result.
        """
        data, end, end_chance = b"", None, None
        starts: list[tuple[int, float | None]] = []
        for token, probability in zip(draft.tokens, draft.probabilities, strict=True):
            piece = self.draft.token_bytes(token)
            if not piece:
                if self.draft.is_end(token):
                    end, end_chance = counterpart(token, self.draft, self.target), probability
                break
            # What is held back counts as the start of what follows.
            starts.append((max(0, len(data) - len(held_back)), probability))
            data += piece
        nothing = Draft.chain((), "", step_confidences=looks) if looks else NO_DRAFT
        if not data.startswith(held_back):
            return nothing
        data = data[len(held_back) :]
        # Part of a character is left out: the whole may be spelled differently. But the text may
        # have begun it.
        n_open = n_unfinished(before + data)
        if n_open <= len(data):
            data = data[: len(data) - n_open]
        tokens, chances, n_spelled = list[int](), list[float | None](), 0
        place, n_starts = 0, len(starts)
        for token, token_end in self._target_lexicon.spell_after(before, data):
            if token_end - n_spelled != len(self.target.token_bytes(token)):
                break  # bytes in between have no token
            # Of several tokens for one of the draft's, the first has its probability, the others 1.
            chance: float | None = 1.0
            while place < n_starts and starts[place][0] < token_end:
                probability, place = starts[place][1], place + 1
                chance = None if chance is None or probability is None else chance * probability
            tokens.append(token)
            chances.append(chance)
            n_spelled = token_end
        else:
            if end is not None and n_spelled == len(data) and not n_open:
                tokens.append(end)
                chances.append(end_chance)
        return (
            Draft.chain(tokens, draft.origins[0], chances, step_confidences=looks)
            if tokens
            else nothing
        )


class PrefixShaper(SamplingPipeline):
    """The draft's most likely text that starts with given bytes, since the target's text may end in
    the middle of one of the draft's tokens: a line break with the indentation of the next line, for
    example.
    """

    def __init__(self, lexicon: Lexicon, never: Sequence[int] = ()) -> None:
        bias = tuple((token, -math.inf) for token in never)
        super().__init__(Sampler(SamplerOptions(logit_bias=bias)), TextState(()))
        self._lexicon = lexicon
        #: The bytes that the draft must begin with.
        self.prefix = b""

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        if path or not self.prefix:
            return super().distribution(logits, path)
        token_ids = self._lexicon.with_prefix(self.prefix)
        return Distribution.certain(int(token_ids[logits[token_ids].argmax()]))

    def likeliest(
        self, logits: Logits, path: Sequence[int], n: int
    ) -> tuple[list[int], list[float]]:
        if path or not self.prefix:
            return super().likeliest(logits, path, n)
        token_ids = self._lexicon.with_prefix(self.prefix)
        order, chances = likeliest(logits[token_ids], n)
        return token_ids[order].tolist(), chances


class TranslatedDrafter(Drafter):
    """Translates between a drafter and the loop, for one text, which `text` holds in the drafter's
    tokens. `shaper` is that of `inner`. `holds_back` allows tokens at the end to be taken back, for
    caches that easily drop cells.
    """

    name = "model"

    def __init__(
        self,
        inner: Drafter,
        translation: Translation,
        text: DraftText,
        shaper: PrefixShaper,
        *,
        holds_back: bool = True,
    ) -> None:
        self.inner, self.text = inner, text
        self._translation, self._shaper, self._holds_back = translation, shaper, holds_back
        #: The last draft as the inner drafter made it, and how many tokens of the text it has seen.
        self.drafted = NO_DRAFT
        self._n_seen = 0

    def price(self, n_context: int) -> Price:
        n_new = n_context - self.text.n_followed
        return self.inner.price(len(self.text.tokens) + n_new)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        text = self.text
        text.follow(context, self.drafted)
        self.drafted = NO_DRAFT
        shown = text.last_bytes(_SHOWN)
        n_held_back = self._n_to_hold_back(shown) if self._holds_back else 0
        if n_held_back:
            text.hold_back(n_held_back)
        if text.n_unchanged < self._n_seen:
            self.inner.rewind(text.n_unchanged)
        self._n_seen = len(text.tokens)
        if not text.tokens:
            return NO_DRAFT
        self._shaper.prefix = held_back = text.held_back
        # The tokens that are held back are drafted again first.
        if n_held_back:
            plan = replace(plan, n_max=plan.n_max + n_held_back, n_given=n_held_back)
        self.drafted = yield from self.inner.propose(text.tokens, plan)
        looks = self.drafted.step_confidences[n_held_back:]
        draft = self._translation.translate(self.drafted, shown, held_back, looks)
        n_max = plan.n_max - n_held_back
        return draft if len(draft.tokens) <= n_max else draft.first(n_max)

    def _n_to_hold_back(self, shown: bytes) -> int:
        """Return the number of the drafter's tokens at the end of the text that longer ones may
        replace: those of an incomplete character, or a last token of white space, where
        vocabularies differ most.
        """
        n_bytes = n_unfinished(shown)
        for n_tokens in range(1, _MAX_HELD_BACK + 1):
            ending = self.text.ending(n_tokens)
            if len(ending) >= n_bytes:
                is_open = n_bytes > 0 or ending.isspace()
                lexicon = self._translation.draft_lexicon
                return n_tokens if is_open and len(lexicon.with_prefix(ending)) > 1 else 0
        return 0
