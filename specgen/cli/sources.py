"""From what the user names (files, models, pairs) to files on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specgen.errors import UsageError

if TYPE_CHECKING:
    from specgen.models import Registry

#: Fetches a model of the registry, given its name; returns its path.
Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a run."""

    target: Path
    draft: Path | Literal["ngram", "none"]


def resolve(
    target: str | None, draft: str | None, pair: str | None, registry: Registry, fetch: Fetch
) -> Sources:
    """Find the target and the draft, fetching what is named and not on disk.

    Without a target it is the named or the default pair's; without a draft it is the pair's,
    or n-grams for a target given by itself. Raises `UsageError`, `UnknownModelError`,
    `FetchError`.
    """
    if target is not None and pair is not None:
        raise UsageError(
            f"--target {target} and --pair {pair} exclude each other",
            hint="a pair has a target already; --draft replaces its draft",
        )
    if target is None:
        chosen = registry.pair(pair or registry.default_pair)
        target = chosen.target
        draft = draft if draft is not None else chosen.draft
    if draft is None:
        draft = "ngram"
    target_path = _find(target, registry, fetch)
    if draft == "ngram":
        return Sources(target_path, "ngram")
    if draft == "none":
        return Sources(target_path, "none")
    return Sources(target_path, _find(draft, registry, fetch))


def _find(name: str, registry: Registry, fetch: Fetch) -> Path:
    """A model file: a path if it is one or looks like one, a model's name otherwise."""
    path = Path(name).expanduser()
    separators = [os.sep, os.altsep or os.sep]
    looks_like_path = name.endswith(".gguf") or any(separator in name for separator in separators)
    if name not in registry.models and (looks_like_path or path.exists()):
        return path
    return fetch(registry.model(name).name)
