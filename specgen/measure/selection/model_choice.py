"""The models as the user names them: files, names in the registry, pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that the user named; None for those that were not named."""

    target: str | None
    draft: str | None
    pair: str | None
    #: The drafts of the draft: the first drafts for the draft model, the next for that one, and so on.
    helpers: tuple[str, ...] = ()


def staged(target: str | None, drafts: Sequence[str], pair: str | None) -> ModelChoice:
    """Return the models. The first of `drafts` drafts for the target, the next one for the first, and so
    on. Raise `UsageError` if the drafts cannot be combined."""
    if "none" in drafts and len(drafts) > 1:
        raise UsageError("--draft none drafts nothing, so it goes with no other --draft")
    if "ngram" in drafts[:-1]:
        raise UsageError("--draft ngram needs no draft of its own: give it last, after the models")
    return ModelChoice(target, drafts[0] if drafts else None, pair, tuple(drafts[1:]))
