"""Why a round drafts what it drafts, or why it drafts nothing: a closed list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

#: Why a round drafts, or why it drafts nothing. The list is closed: `REASONS` explains each.
ReasonName: TypeAlias = Literal[
    "found",
    "model",
    "found and model",
    "trial",
    "fixed",
    "off",
    "costs unknown",
    "plain decode",
    "no room",
    "nothing found",
    "prefill",
    "row cost",
    "acceptance",
    "put aside",
    "unsure",
    "grammar",
    "failed",
]

REASONS: Final[Mapping[ReasonName, str]] = MappingProxyType(
    {
        "found": "tokens found in earlier text are worth their rows in the target's batch",
        "model": "the draft model is expected to save time",
        "found and model": "the draft model goes on behind tokens found in earlier text",
        "trial": "the draft model is tried again, to see whether it pays by now",
        "fixed": "the draft length does not depend on costs",
        "off": "nothing drafts for this answer",
        "costs unknown": "the cost of the target's decodes is not known yet",
        "plain decode": "a decode without a draft keeps the cost of a token up to date",
        "no room": "the answer, the context or the batch has no room for a draft",
        "nothing found": "no earlier text continues from here",
        "prefill": "the draft model would have to read the text first, and that may not pay off",
        "row cost": "even a draft that is always right would save nothing at these costs",
        "acceptance": "too few drafted tokens are expected to be accepted",
        "put aside": "the drafter lost time in this answer and waits",
        "unsure": "the drafter was too unsure of its first token",
        "grammar": "the grammar allows none of the drafted tokens",
        "failed": "the drafter failed",
    }
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a round drafts what it drafts. `text` is the reason with its numbers."""

    name: ReasonName
    text: str = ""

    def __str__(self) -> str:
        return self.text or REASONS[self.name]
