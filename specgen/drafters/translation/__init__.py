"""Drafts in another vocabulary than the target's (Timor et al., arXiv:2502.05202).

`DraftText` gives the draft the text in the draft's own tokens. `StringTranslation` and `SharedTokens`
give the target the drafts in the target's tokens, as strings or token by token. `Translation` holds
what both directions need of a pair of vocabularies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from specgen.drafters.translation.draft_text import DraftText
from specgen.drafters.translation.shared_tokens import SharedShaper, SharedTokens
from specgen.drafters.translation.string_translation import (
    ControlTokens,
    Lexicon,
    PrefixShaper,
    Speller,
    StringTranslation,
)
from specgen.method.backend import Vocabulary

__all__ = [
    "DraftText",
    "Lexicon",
    "PrefixShaper",
    "SharedShaper",
    "SharedTokens",
    "Speller",
    "StringTranslation",
    "Translation",
]


class Translation:
    """The translation between the vocabularies of a target and a draft, made once for a pair. It
    reads whole vocabularies only when they are first needed."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self.target = target
        self.draft = draft
        self.draft_lexicon = Lexicon(draft)
        self._target_lexicon = Lexicon(target)
        self._to_target = ControlTokens(draft, target)
        self._to_draft = ControlTokens(target, draft)

    @cached_property
    def shared(self) -> SharedTokens:
        """The tokens that both have."""
        return SharedTokens(
            self.target, self._target_lexicon, self.draft, self.draft_lexicon, self._to_target
        )

    @cached_property
    def strings(self) -> StringTranslation:
        """The translation of the draft's text into the target's tokens."""
        speller = Speller(self.target, self._target_lexicon)
        return StringTranslation(self.target, self.draft, self._to_target, speller)

    @cached_property
    def _draft_speller(self) -> Speller:
        return Speller(self.draft, self.draft_lexicon)

    def text(self, prompt: Sequence[int], draft_prompt: Sequence[int] | None) -> DraftText:
        """Return a text for the draft to follow. `draft_prompt` replaces the target's `prompt`, in the
        draft's tokens; None translates the prompt."""
        n_prompt = len(prompt)
        if draft_prompt is None:
            # Each tokenizer decides how a text begins.
            own, theirs = self.target.special_tokens()["bos"], self.draft.special_tokens()["bos"]
            n_prompt = int(prompt[0] == own)
            draft_prompt = [theirs] if self.draft.add_bos and theirs >= 0 else []
        return DraftText(
            draft_prompt, n_prompt, self.target, self.draft, self._to_draft, self._draft_speller
        )

    def first_token(self, token: int) -> int:
        """Return the draft's token that the text of one of the target's tokens starts with, or the
        counterpart of a control token; -1 if there is none."""
        data = self.target.token_bytes(token)
        if not data:
            counterpart = self._to_draft.find(token)
            return -1 if counterpart is None else counterpart
        spelled = self._draft_speller.spell(data)
        return spelled.tokens[0] if spelled.tokens else -1
