"""The models as the user names them: files, names of the registry, pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the user named; None where nothing was."""

    target: str | None
    draft: str | None
    pair: str | None
    #: What drafts for the draft, what for that one, and so on.
    helpers: tuple[str, ...] = ()


def staged(target: str | None, drafts: Sequence[str], pair: str | None) -> ModelChoice:
    """The models, `drafts` being what drafts for the target, what drafts for that, and so on.
    Raises `UsageError`."""
    if "none" in drafts and len(drafts) > 1:
        raise UsageError("--draft none drafts nothing, so it goes with no other --draft")
    if "ngram" in drafts[:-1]:
        raise UsageError("--draft ngram needs no draft of its own: give it last, after the models")
    return ModelChoice(target, drafts[0] if drafts else None, pair, tuple(drafts[1:]))
