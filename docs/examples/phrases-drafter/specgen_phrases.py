"""A drafter of phrases: where the text ends with the beginning of a phrase, it drafts the rest.

`specgen run --draft phrases:FILE` reads a file with a phrase on each line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.drafters.interface import DraftKind, DraftRequest, DraftSetup, LoadedDraft
from specgen.method.cost_table import FREE, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Drafter, Drafting, ready
from specgen.method.policy import RoundPlan, RoundResult
from specgen.options import DraftSource

#: How likely a token of a phrase is, before acceptance is known.
CONFIDENCE = 0.7


class PhraseDrafter(Drafter):
    """Drafts the rest of the phrase whose beginning is the longest ending of the text."""

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._phrases = phrases

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        for n in range(max(map(len, self._phrases), default=0) - 1, 0, -1):
            for phrase in self._phrases:
                if list(phrase[:n]) == list(context[-n:]) and n < len(phrase):
                    rest = phrase[n : n + plan.n_max]
                    return ready(Draft.chain(rest, self.name, [CONFIDENCE] * len(rest)))
        return ready(NO_DRAFT)

    def observe(self, result: RoundResult) -> None:
        """Learn nothing."""

    def rewind(self, n_tokens: int) -> None:
        """Forget nothing: the text is not kept."""


class LoadedPhrases(LoadedDraft):
    """Phrases in a target's tokens. It decodes nothing, and draws nothing at random."""

    is_free = True
    can_draw = False
    origin = "phrases"

    def __init__(self, phrases: Sequence[str], setup: DraftSetup) -> None:
        super().__init__(name="phrases", key="phrases")
        tokenize = setup.target.vocabulary.tokenize
        self._phrases = [tokenize(each, add_special=False, parse_special=False) for each in phrases]

    def drafter(self, request: DraftRequest) -> Drafter:
        return PhraseDrafter(self._phrases)


def _open(source: DraftSource, setup: DraftSetup) -> LoadedPhrases:
    lines = Path(str(source).removeprefix("phrases:")).read_text("utf-8").splitlines()
    return LoadedPhrases([line for line in lines if line], setup)


KIND = DraftKind(
    "phrases",
    matches=lambda source: isinstance(source, str) and source.startswith("phrases:"),
    open=_open,
)
