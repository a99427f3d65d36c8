"""The drafts for a target if the user names none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specgen.models import CatalogueModel, FileIdentity, Registry, SavedDraft
    from specgen.options import DraftSource

#: The general draft is for targets of at least this many times its bytes: a draft that is not much
#: quicker than its target cannot pay.
_MIN_RATIO = 4


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft, and `why` it was chosen, in a sentence; empty if the user named it. `advice` says how to
    find a better one. `is_measured` says whether its gain for this target was measured."""

    draft: DraftSource
    why: str = ""
    advice: str = ""
    is_measured: bool = False


def choose_drafts(
    target: FileIdentity,
    saved: SavedDraft | None,
    registry: Registry,
    locate: Callable[[CatalogueModel], Path | None],
    *,
    mtp: DraftSource | None = None,
) -> tuple[DraftChoice, ...]:
    """Return the possible drafts for a target without a named draft, the best first.

    The draft that was `saved` for it comes first, then its MTP layers (`mtp`: in its file, or in one beside it), then
    the first partner in the registry that `locate` finds on this disk, then the general draft if it is there and much smaller than the target, then
    n-grams. The caller uses the first that loads and is expected to be faster. N-grams and no draft always
    load, so the choices end with the first of these.
    """
    choices: list[DraftChoice] = []
    for choice in _candidates(target, saved, registry, locate, mtp):
        if choice.draft not in [earlier.draft for earlier in choices]:
            choices.append(choice)
        if choice.draft in ("ngram", "none"):
            break
    return tuple(choices)


def _candidates(
    target: FileIdentity,
    saved: SavedDraft | None,
    registry: Registry,
    locate: Callable[[CatalogueModel], Path | None],
    mtp: DraftSource | None,
) -> Iterator[DraftChoice]:
    gone, alone = "", ", as no partner is known"
    if saved is not None:
        if not isinstance(saved.draft, Path) or saved.draft.is_file():
            alone = ""
            yield _saved(target, saved)
        else:
            gone = f"{saved.draft}, saved as the draft for {target.name}, no longer exists; "
    if mtp is not None:
        alone = ""
        whose = "the target's own MTP layers"
        if isinstance(mtp, Path):
            whose = f"{mtp.name}, the target's MTP layers beside it"
        yield DraftChoice(mtp, f"{gone}drafting with {whose}")
    model = registry.recognise(target)
    for pair in registry.pairs_for(model) if model is not None else ():
        draft: DraftSource | None = "ngram"
        if pair.draft != "ngram":
            draft = locate(registry.model(pair.draft))
        if draft is not None:
            alone = ""
            where = f"since the pair {pair.name} has no draft model"
            if draft != "ngram":
                where = f"the partner of {pair.target} in the pair {pair.name}"
            yield DraftChoice(draft, f"{gone}drafting with {name_of(draft)}, {where}")
            break
    if registry.general_draft is not None:
        general = registry.model(registry.general_draft)
        is_small = _MIN_RATIO * general.size_bytes <= target.size_bytes
        path = locate(general) if is_small and general != model else None
        if path is not None:
            alone = ""
            advice = "`specgen draft find` looks for a better one"
            yield DraftChoice(
                path, f"{gone}drafting with {name_of(path)}, the general draft", advice
            )
    advice = "`specgen draft find` tries what is on this disk"
    yield DraftChoice("ngram", f"{gone}drafting with n-grams{alone}", advice)


def _saved(target: FileIdentity, saved: SavedDraft) -> DraftChoice:
    origin = f"as `specgen draft find --save` found best for {target.name}"
    if saved.draft == "none":
        return DraftChoice("none", f"not drafting, {origin}", is_measured=True)
    figure = f" (x{saved.speedup:.2f} expected)" if saved.speedup is not None else ""
    why = f"drafting with {name_of(saved.draft)}, {origin}{figure}"
    return DraftChoice(saved.draft, why, is_measured=True)


def name_of(draft: DraftSource) -> str:
    """Return the name of a draft for a table or a sentence."""
    if isinstance(draft, Path):
        return draft.name
    if draft == "mtp":
        return "MTP layers"
    return "n-grams" if draft == "ngram" else "none"
