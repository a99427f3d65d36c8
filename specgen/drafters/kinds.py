"""All kinds of drafts: the first that matches a source opens it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from specgen.drafters.kind import DraftKind, DraftSetup, LoadedDraft
from specgen.errors import UsageError
from specgen.options import DraftSource

#: Modules with a `KIND` each, in `specgen.drafters`. Any file may be a model: it comes after those of other packages.
KINDS = ("ngram", "heads", "mtp", "eagle3", "dflash", "gemma4")
ANY_FILE = "model"
#: The entry points of other packages, each with a `DraftKind`.
GROUP = "specgen.drafts"


def kinds() -> Iterator[DraftKind]:
    """Yield the kinds in their order. Each is imported only when those before it do not match."""
    for name in KINDS:
        yield _own(name)
    yield from _others()
    yield _own(ANY_FILE)


def find_kind(source: DraftSource) -> DraftKind | None:
    """Return the kind of a source; None for a word that is none."""
    return next((kind for kind in kinds() if kind.matches(source)), None)


def is_word(name: str) -> bool:
    """Return whether another package has a draft of this name."""
    return any(kind.matches(name) for kind in _others())


def open_draft(source: DraftSource, setup: DraftSetup) -> LoadedDraft | None:
    """Load a draft; None for "none". Raise what `DraftKind.open` raises."""
    if source == "none":
        return None
    kind = find_kind(source)
    if kind is None:
        raise UsageError(f"--draft {source}: there is no such draft")
    if setup.helpers and kind.name != ANY_FILE:
        raise UsageError(
            f"--draft {source} takes no draft of its own; leave out the next --draft",
            hint="only a draft model takes one",
        )
    return kind.open(source, setup)


def _own(name: str) -> DraftKind:
    kind: DraftKind = import_module(f"specgen.drafters.{name}").KIND
    return kind


@cache
def _others() -> tuple[DraftKind, ...]:
    return tuple(point.load() for point in entry_points(group=GROUP))
