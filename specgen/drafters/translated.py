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
    """Stands between a drafter and the loop: tells the drafter the text in its own tokens, and
    the loop the drafts in the target's.

    `shaper` is the one by which `inner` drafts. With a `BeginningShaper`, drafts are translated as
    strings, and it is told what a draft must begin with, where the text ends in the middle of a
    token. Else they are translated token by token, with the distributions that they were drawn
    from; `inner` then does best to draft shared tokens only (`SharedShaper`).

    It serves one text, whose tokens `text` follows. `holds_back` allows to take tokens at its end
    back: not worth it for a model whose cache does not easily give up what it holds.
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
        #: The last draft as the inner drafter made it, what it begins with, and how many
        #: tokens of the text the inner drafter has seen.
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
        # What is held back is drafted again before anything else is.
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
        """How many of the draft's tokens at the end of the text to take back, since longer
        ones may stand in their place: those of half a character, and a last one of white
        space, where vocabularies differ most. (To ask about every last token gains nothing
        more where the target's tokens are the longer ones, and costs a decode a round.)"""
        n_bytes = n_unfinished(self._text.last_bytes(_BEFORE))
        for n_tokens in range(1, _MAX_HELD_BACK + 1):
            ending = self._text.ending(n_tokens)
            if len(ending) >= n_bytes:
                is_open = n_bytes > 0 or ending.isspace()
                lexicon = self._translation.draft_lexicon
                return n_tokens if is_open and len(lexicon.beginning_with(ending)) > 1 else 0
        return 0
