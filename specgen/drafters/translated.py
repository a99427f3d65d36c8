"""A drafter whose vocabulary is not the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specgen.drafters.base import WrappedDrafter
from specgen.drafters.translation import DraftText, PrefixShaper, SharedShaper, Translation
from specgen.drafters.translation.string_translation import n_unfinished
from specgen.method.cost_table import Price
from specgen.method.draft import NO_DRAFT
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan, RoundResult

#: Bytes of the text before a draft that the target's tokenizer is shown with it.
_BEFORE = 32
#: The most tokens to take back at the end of the text.
_MAX_HELD_BACK = 4


class TranslatedDrafter(WrappedDrafter):
    """Translates between a drafter and the loop: the drafter sees the text in its own tokens, and the
    loop gets the drafts in the target's tokens.

    `shaper` is the shaper of `inner`. With a `PrefixShaper`, drafts are translated as strings; where the
    text ends in the middle of a token, the shaper is given the bytes that a draft must start with.
    Otherwise drafts are translated token by token, with the distributions that they were drawn from;
    `inner` should then draft shared tokens only (`SharedShaper`).

    It serves one text, which `text` holds in the drafter's tokens. `holds_back` allows tokens at
    the end of the text to be taken back, which is not worth it for a model whose cache cannot
    easily drop cells.
    """

    def __init__(
        self,
        inner: Drafter,
        translation: Translation,
        text: DraftText,
        shaper: PrefixShaper | SharedShaper | None,
        *,
        holds_back: bool = True,
    ) -> None:
        super().__init__(inner)
        self._translation = translation
        self.text = text
        self._prefix_shaper = shaper if isinstance(shaper, PrefixShaper) else None
        self._shared = shaper if isinstance(shaper, SharedShaper) else None
        self._holds_back = holds_back and self._prefix_shaper is not None
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
        n_held_back = self._n_to_hold_back() if self._holds_back else 0
        if n_held_back:
            text.hold_back(n_held_back)
        if text.n_unchanged < self._n_seen:
            self.inner.rewind(text.n_unchanged)
        self._n_seen = len(text.tokens)
        if not text.tokens:
            return NO_DRAFT
        if self._prefix_shaper is None:
            if self._shared is not None:
                self._shared.before = context[len(context) - n_drafted :]
            self.drafted = yield from self.inner.propose(text.tokens, plan)
            draft = self._translation.shared.translate(self.drafted)
            return replace(draft, looks=self.drafted.looks)
        self._prefix_shaper.prefix = held_back = text.held_back
        # The tokens that are held back are drafted again first.
        self.drafted = yield from self.inner.propose(text.tokens, plan.after(n_held_back))
        draft = self._translation.strings.translate(
            self.drafted, text.last_bytes(_BEFORE), held_back
        ).first(plan.n_max)
        return replace(draft, looks=self.drafted.looks[n_held_back:])

    def observe(self, result: RoundResult) -> None:
        """Ignore the target's tokens: no drafter of another vocabulary learns from them."""

    def rewind(self, n_tokens: int) -> None:
        self.text.rewind(n_tokens)
        self.inner.rewind(len(self.text.tokens))
        self.drafted = NO_DRAFT

    def _n_to_hold_back(self) -> int:
        """Return the number of the drafter's tokens to take back at the end of the text, because longer
        tokens may replace them: the tokens of an incomplete character, or a last token of white space,
        where vocabularies differ most. (Taking back every last token gains nothing more where the target's
        tokens are the longer ones, and costs a decode a round.)"""
        n_bytes = n_unfinished(self.text.last_bytes(_BEFORE))
        for n_tokens in range(1, _MAX_HELD_BACK + 1):
            ending = self.text.ending(n_tokens)
            if len(ending) >= n_bytes:
                is_open = n_bytes > 0 or ending.isspace()
                lexicon = self._translation.draft_lexicon
                return n_tokens if is_open and len(lexicon.with_prefix(ending)) > 1 else 0
        return 0
