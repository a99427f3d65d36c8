"""A drafter of phrases: where the text ends with the beginning of a phrase, it drafts the rest.

`specgen run --draft phrases:FILE` reads a file with one phrase per line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.drafters.interface import (
    FREE,
    NO_DRAFT,
    Draft,
    Drafter,
    Drafting,
    DraftKind,
    DraftRequest,
    DraftSetup,
    DraftSource,
    LoadedDraft,
    Price,
    RoundPlan,
    ready,
)

#: How likely a token of a phrase is, before acceptance is known.
CONFIDENCE = 0.7
#: What precedes the file in `--draft phrases:FILE`.
PREFIX = "phrases:"


class PhraseDrafter(Drafter):
    """Drafts the rest of a phrase: of the one whose beginning is the longest end of the text."""

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._phrases = phrases

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        tokens = self._rest_of_phrase(context)[: plan.n_max]
        if not tokens:
            return ready(NO_DRAFT)
        return ready(Draft.chain(tokens, self.name, [CONFIDENCE] * len(tokens)))

    def rewind(self, n_tokens: int) -> None:
        """Forget nothing: the text is not kept."""

    def _rest_of_phrase(self, context: Sequence[int]) -> Sequence[int]:
        longest = max(map(len, self._phrases), default=0)
        for n_begun in range(longest - 1, 0, -1):
            ending = list(context[-n_begun:])
            for phrase in self._phrases:
                if n_begun < len(phrase) and list(phrase[:n_begun]) == ending:
                    return phrase[n_begun:]
        return []


class LoadedPhrases(LoadedDraft):
    """Phrases in a target's tokens. It decodes nothing, and samples nothing at random."""

    is_free = True
    can_draw = False
    origin = "phrases"

    def __init__(self, phrases: Sequence[str], setup: DraftSetup) -> None:
        super().__init__(name="phrases", key="phrases")
        tokenize = setup.target.vocabulary.tokenize
        self._phrases = [
            tokenize(phrase, add_special=False, parse_special=False) for phrase in phrases
        ]

    def drafter(self, request: DraftRequest) -> Drafter:
        return PhraseDrafter(self._phrases)


def _matches(source: DraftSource) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def _open(source: DraftSource, setup: DraftSetup) -> LoadedPhrases:
    file = Path(str(source).removeprefix(PREFIX))
    lines = file.read_text("utf-8").splitlines()
    return LoadedPhrases([line for line in lines if line], setup)


KIND = DraftKind("phrases", matches=_matches, open=_open)
