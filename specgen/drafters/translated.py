"""A drafter whose vocabulary is not the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specgen.calibration.cost_table import Price
from specgen.core.draft import NO_DRAFT, ROOT
from specgen.drafters.base import Drafter, Drafting
from specgen.drafters.translation import BeginningShaper, DraftText, SharedShaper, Translation
from specgen.drafters.translation.unicode import n_unfinished
from specgen.drafters.wrapped import WrappedDrafter
from specgen.policy import Decided, Policy, RoundReport

#: Bytes of the text before a draft that the target's tokenizer is shown with it.
_BEFORE = 32
#: The most tokens to take back at the end of the text.
_MAX_HELD_BACK = 4


class TranslatedDrafter(WrappedDrafter):
    """Translates between a drafter and the loop: the drafter sees the text in its own tokens, and the
    loop gets the drafts in the target's tokens.

    `shaper` is the shaper of `inner`. With a `BeginningShaper`, drafts are translated as strings;
    where the text ends in the middle of a token, the shaper is given the bytes that a draft must
    begin with. Otherwise drafts are translated token by token, with the distributions that they
    were drawn from; `inner` should then draft shared tokens only (`SharedShaper`).

    It serves one text, which `text` holds in the drafter's tokens. `holds_back` allows tokens at
    the end of the text to be taken back, which is not worth it for a model whose cache cannot
    easily drop cells.
    """

    def __init__(
        self,
        inner: Drafter,
        translation: Translation,
        text: DraftText,
        shaper: BeginningShaper | SharedShaper | None,
        *,
        holds_back: bool = True,
    ) -> None:
        super().__init__(inner)
        self._translation = translation
        self._text = text
        self._beginning = shaper if isinstance(shaper, BeginningShaper) else None
        self._shared = shaper if isinstance(shaper, SharedShaper) else None
        self._holds_back = holds_back and self._beginning is not None
        #: The last draft as the inner drafter made it, the bytes of the text that it begins with, and
        #: how many tokens of the text the inner drafter has seen.
        self._drafted = NO_DRAFT
        self._held_back = b""
        self._n_seen = 0

    def price(self, n_context: int) -> Price:
        n_new = n_context - self._text.n_followed
        return self._inner.price(len(self._text.tokens) + n_new)

    def drafting(
        self, context: Sequence[int], n_max: int, policy: Policy, n_drafted: int = 0
    ) -> Drafting:
        if policy.prospect(self.name, self.price(len(context))) <= 0.0:
            return NO_DRAFT
        text = self._text
        text.follow(context, self._drafted)
        self._drafted = NO_DRAFT
        n_held_back = self._n_to_hold_back() if self._holds_back else 0
        if n_held_back:
            text.hold_back(n_held_back)
        if text.n_unchanged < self._n_seen:
            self._inner.rewind(text.n_unchanged)
        self._n_seen = len(text.tokens)
        if not text.tokens:
            return NO_DRAFT
        self._held_back = text.held_back
        if self._beginning is None:
            if self._shared is not None:
                self._shared.before = context[len(context) - n_drafted :]
            self._drafted = yield from super().drafting(text.tokens, n_max, Decided(policy))
            return self._translation.shared.translate(self._drafted)
        self._beginning.beginning = self._held_back
        # The tokens that are held back are drafted again first.
        behind = Decided(policy, n_own=n_held_back)
        self._drafted = yield from super().drafting(text.tokens, n_max + n_held_back, behind)
        return self._translation.strings.translate(
            self._drafted, text.last_bytes(_BEFORE), self._held_back
        ).first(n_max)

    def observe(self, report: RoundReport) -> None:
        """Tell the inner drafter which of its own tokens were accepted whole."""
        if not len(report.draft):
            self._inner.observe(report)
            return
        target, draft = self._translation.target, self._translation.draft
        accepted = [report.draft.tokens[node] for node in report.path]
        data = self._held_back + b"".join(map(target.token_bytes, accepted))
        is_ended = bool(accepted) and target.is_end(accepted[-1])
        path: list[int] = []
        children = list(self._drafted.children(ROOT))
        while children:
            child = children.pop(0)
            piece = draft.token_bytes(self._drafted.tokens[child])
            if data.startswith(piece) if piece else is_ended and not data:
                data = data[len(piece) :]
                path.append(child)
                children = list(self._drafted.children(child))
        self._inner.observe(replace(report, draft=self._drafted, path=tuple(path)))

    def rewind(self, n_tokens: int) -> None:
        self._text.rewind(n_tokens)
        self._inner.rewind(len(self._text.tokens))
        self._drafted = NO_DRAFT

    def _n_to_hold_back(self) -> int:
        """How many of the drafter's tokens at the end of the text to take back, because longer
        tokens may take their place: the tokens of an incomplete character, or a last token of
        white space, where vocabularies differ most. (Taking back every last token gains nothing
        more where the target's tokens are the longer ones, and costs a decode a round.)"""
        n_bytes = n_unfinished(self._text.last_bytes(_BEFORE))
        for n_tokens in range(1, _MAX_HELD_BACK + 1):
            ending = self._text.ending(n_tokens)
            if len(ending) >= n_bytes:
                is_open = n_bytes > 0 or ending.isspace()
                lexicon = self._translation.draft_lexicon
                return n_tokens if is_open and len(lexicon.beginning_with(ending)) > 1 else 0
        return 0
