"""A drafter of phrases: if the text ends with the beginning of a phrase, it drafts the rest.

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
from specgen.errors import UsageError

#: The assumed probability that a token of a phrase is accepted, until acceptance is measured.
CONFIDENCE = 0.7
#: The part of `--draft phrases:FILE` before the file.
PREFIX = "phrases:"


class PhraseDrafter(Drafter):
    """Drafts the rest of a phrase whose beginning is at the end of the text.

    Of several phrases, it takes the one with the longest such beginning.

    Args:
        phrases: The tokens of each phrase.
    """

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
        """Do nothing: the drafter keeps no state of the text."""

    def _rest_of_phrase(self, context: Sequence[int]) -> Sequence[int]:
        """Return the tokens after the longest beginning; empty if no phrase has begun."""
        max_length = max(map(len, self._phrases), default=0)
        for n_matched in range(max_length - 1, 0, -1):
            text_end = list(context[-n_matched:])
            for phrase in self._phrases:
                if n_matched < len(phrase) and list(phrase[:n_matched]) == text_end:
                    return phrase[n_matched:]
        return []


class LoadedPhrases(LoadedDraft):
    """The phrases of a file, in a target's tokens. Drafting from them needs no model."""

    is_free = True
    can_sample = False
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
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return LoadedPhrases([line for line in lines if line], setup)


KIND = DraftKind("phrases", matches=_matches, open=_open)
