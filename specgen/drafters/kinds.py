"""All kinds of drafts: the first one that matches a source opens it.

No kind is imported before it is needed. A new kind is a module in this folder with a `KIND`, which
is a `DraftKind` (`interface.py`), and an entry in `KINDS` below. A kind of another package is an
entry point of the group `GROUP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.errors import ModelFileError, UsageError
from specgen.options import DraftSource

if TYPE_CHECKING:
    from specgen.drafters.interface import (
        DraftKind,
        DraftSetup,
        LoadedDraft,
    )


@dataclass(frozen=True, slots=True)
class KindEntry:
    """What is known about a kind before its module is imported."""

    #: The module in `specgen.drafters`, which has a `KIND`.
    module: str
    #: The word after `--draft` that selects it.
    word: str = ""
    #: The GGUF architecture that only such drafts have.
    architecture: str = ""


KINDS = (
    KindEntry("ngram", word="ngram"),
    KindEntry("heads", word="heads"),
    KindEntry("mtp", word="mtp"),
    KindEntry("eagle3", architecture="eagle3"),
    KindEntry("dflash", architecture="dflash"),
    KindEntry("gemma4", architecture="gemma4-assistant"),
)
WORDS = tuple(kind.word for kind in KINDS if kind.word)
#: The name of the kind that takes any file: it is tried after the kinds of other packages.
ANY_FILE = "model"
#: The group of the entry points of other packages, each with a `DraftKind`.
GROUP = "specgen.drafts"


def kinds() -> Iterator[DraftKind]:
    """Yield the kinds in their order. Each is imported only if those before it do not match."""
    for entry in KINDS:
        yield _import_kind(entry.module)
    yield from _kinds_of_packages()
    yield _import_kind("standalone")


def find_kind(source: DraftSource) -> DraftKind | None:
    """Return the kind of a source; None if there is none."""
    for kind in kinds():
        if kind.matches(source):
            return kind
    return None


def is_word(name: str) -> bool:
    """Return whether a word after `--draft` names a kind."""
    return name in WORDS or any(kind.matches(name) for kind in _kinds_of_packages())


def refuse_draft(path: Path) -> None:
    """Raise `ModelFileError` if a file is a draft for one target instead of a whole model."""
    from specgen.llama.gguf_file import architecture_of

    architecture = architecture_of(path)
    if any(architecture and kind.architecture == architecture for kind in KINDS):
        raise ModelFileError(
            f"{path}: a draft of one target ({architecture}), and not a whole model",
            hint="give it as --draft, and the model that it was made for as -m",
        )


def open_draft(source: DraftSource, setup: DraftSetup) -> LoadedDraft | None:
    """Load a draft; return None for "none". Raise what `DraftKind.open` raises."""
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


def _import_kind(module: str) -> DraftKind:
    kind: DraftKind = import_module(f"specgen.drafters.{module}").KIND
    return kind


@cache
def _kinds_of_packages() -> tuple[DraftKind, ...]:
    from importlib.metadata import entry_points

    return tuple(point.load() for point in entry_points(group=GROUP))
