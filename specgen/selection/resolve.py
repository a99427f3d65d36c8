"""From what the user names (files, models, pairs) to files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import UsageError
from specgen.selection.default_draft import DraftChoice, choose_drafts

if TYPE_CHECKING:
    from specgen.catalogue import CatalogueModel, FileIdentity, Registry, SavedDraft
    from specgen.options import DraftSource

#: Fetches a model of the registry, given its name; returns its path.
Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Disk:
    """What is on this disk, without a download: `locate` a model, `identify` a file, the draft that
    was `saved` for a target, and where decoder heads lie that were made for it."""

    locate: Callable[[CatalogueModel], Path | None]
    identify: Callable[[Path], FileIdentity | None]
    saved: Callable[[FileIdentity], SavedDraft | None]
    made_heads: Callable[[FileIdentity], Path | None] = lambda _target: None


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a run: the target, and what may draft for it in the order in which it is to
    be tried, at least one. What the user named is the only one."""

    target: Path
    drafts: tuple[DraftChoice, ...]
    #: What drafts for the draft model, what for that one, and so on.
    helpers: tuple[DraftSource, ...] = ()

    @property
    def draft(self) -> DraftSource:
        """The draft to try first."""
        return self.drafts[0].draft


def resolve(
    target: str | None,
    draft: str | None,
    pair: str | None,
    registry: Registry,
    fetch: Fetch,
    disk: Disk,
) -> Sources:
    """Find the target and the draft, fetching what is named and not on disk.

    Without a target it is the named pair's, with the pair's draft. If neither is named, it is
    the default pair's, and as for a target given by itself the drafts are then those of
    `choose_drafts`, the pair's among them. Raises `UsageError`, `UnknownModelError`,
    `FetchError`.
    """
    if target is not None and pair is not None:
        raise UsageError(
            f"--target {target} and --pair {pair} exclude each other",
            hint="use one of them; with --pair, --draft replaces the pair's draft",
        )
    chosen = registry.pair(pair or registry.default_pair) if target is None else None
    if chosen is not None:
        target = chosen.target
        draft = chosen.draft if draft is None and pair is not None else draft
    assert target is not None
    target_path = find_model(target, registry, fetch)
    if draft is None:
        identity = disk.identify(target_path)
        if identity is None:  # opening it will tell what is wrong
            return Sources(target_path, (DraftChoice("ngram"),))
        saved = disk.saved(identity)
        if chosen is not None and saved is None and chosen.draft != "ngram":
            find_model(chosen.draft, registry, fetch)
        return Sources(target_path, choose_drafts(identity, saved, registry, disk.locate))
    if draft == "ngram":
        return Sources(target_path, (DraftChoice("ngram"),))
    if draft == "none":
        return Sources(target_path, (DraftChoice("none"),))
    if draft == "heads":
        return Sources(target_path, (DraftChoice(_made_heads(target_path, disk)),))
    return Sources(target_path, (DraftChoice(find_model(draft, registry, fetch)),))


def _made_heads(target: Path, disk: Disk) -> Path:
    """The decoder heads that were made for a target."""
    identity = disk.identify(target)
    path = disk.made_heads(identity) if identity is not None else None
    if path is None or not _exists(path):
        raise UsageError(
            f"--draft heads: none were made for {target.name}",
            hint=f"`specgen draft make -m {target}` makes them",
        )
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # its name is too long, for one
        return False


def find_model(name: str, registry: Registry, fetch: Fetch) -> Path:
    """A model file: a path if it is one or looks like one, a model's name otherwise.

    Raises `UnknownModelError`, `FetchError`.
    """
    path = Path(name).expanduser()
    separators = [os.sep, os.altsep or os.sep]
    looks_like_path = name.endswith(".gguf") or any(separator in name for separator in separators)
    if name and name not in registry.models and (looks_like_path or _exists(path)):
        return path
    return fetch(registry.model(name).name)
