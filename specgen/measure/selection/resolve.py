"""Find the files of the models and pairs that the user names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import ModelFileError, UsageError
from specgen.measure.selection.default_draft import DraftChoice, choose_drafts
from specgen.models.hub_reference import PREFIX, is_reference, looks_like_reference

if TYPE_CHECKING:
    from specgen.models import CatalogueModel, FileIdentity, Registry, SavedDraft
    from specgen.options import DraftSource

#: Fetches the model with a name in the registry or on the hub, and returns its path.
Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Disk:
    """Finds what is on this disk, without downloads: `locate` returns the file of a model, `identify` the
    identity of a file, `saved` the draft that was saved for a target, `made_heads` the decoder heads that were
    made for it, and `mtp` its MTP layers: "mtp" if it has some that can draft, or the file beside it."""

    locate: Callable[[CatalogueModel], Path | None]
    identify: Callable[[Path], FileIdentity | None]
    saved: Callable[[FileIdentity], SavedDraft | None]
    made_heads: Callable[[FileIdentity], Path | None] = lambda _target: None
    mtp: Callable[[Path], DraftSource | None] = lambda _target: None


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a run: the target, and one or more drafts in the order in which to try them. A draft
    that the user named is the only one."""

    target: Path
    drafts: tuple[DraftChoice, ...]
    #: The drafts of the draft model: the first drafts for it, the next for that one, and so on.
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
    """Find the target and the draft. Named models that are not on this disk are fetched.

    If only a pair is named, target and draft are the pair's. If neither a target nor a pair is named, the
    target is that of the default pair. For this target, and for a target that is named without a draft, the
    drafts are those of `choose_drafts`; the draft of the default pair is fetched if none is saved for its
    target. A named draft replaces all others. Raise `UsageError`, `UnknownModelError` or `FetchError`.
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
        if identity is None:  # opening the file will report what is wrong
            return Sources(target_path, (DraftChoice("ngram"),))
        saved = disk.saved(identity)
        if chosen is not None and saved is None and chosen.draft != "ngram":
            find_model(chosen.draft, registry, fetch)
        drafts = choose_drafts(identity, saved, registry, disk.locate, mtp=disk.mtp(target_path))
        return Sources(target_path, drafts)
    if draft == "mtp":  # without any, opening the draft says why
        return Sources(target_path, (DraftChoice(disk.mtp(target_path) or "mtp"),))
    words: dict[str, DraftSource] = {"ngram": "ngram", "none": "none"}
    if draft in words:
        return Sources(target_path, (DraftChoice(words[draft]),))
    if draft == "heads":
        return Sources(target_path, (DraftChoice(_made_heads(target_path, disk)),))
    found = find_model(draft, registry, fetch, others=(*words, "heads"))
    return Sources(target_path, (DraftChoice(found),))


def _made_heads(target: Path, disk: Disk) -> Path:
    """Return the file of the decoder heads that were made for a target. Raise `UsageError` if there are
    none."""
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
    except OSError:  # for example if the name is too long
        return False


def find_model(name: str, registry: Registry, fetch: Fetch, others: Iterable[str] = ()) -> Path:
    """Return the file of a model. `name` is a model on the hub if it begins with ``hf:``, a path if it
    exists or looks like one, else a model's name in the registry. `others` are words that may have been
    meant.

    Raise `UnknownModelError` or `FetchError`.
    """
    if is_reference(name):
        return fetch(name)
    path = Path(name).expanduser()
    separators = [os.sep, os.altsep or os.sep]
    looks_like_path = name.endswith(".gguf") or any(separator in name for separator in separators)
    if name and name not in registry.models and (looks_like_path or _exists(path)):
        if looks_like_reference(name) and not _exists(path):
            raise ModelFileError(f"{name}: no such file", f"a model on the hub is {PREFIX}{name}")
        return path
    return fetch(registry.model(name, others).name)
