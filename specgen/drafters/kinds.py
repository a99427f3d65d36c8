"""All kinds of drafts. The first kind that matches the value of `--draft` opens it.

Kinds are imported only when needed. To add one, write a module in this folder with a `KIND`, which
is a `DraftKind` (`interface.py`), and add an entry to `KINDS` below. Other packages can add kinds
as entry points of the group `GROUP`.
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
    from importlib.metadata import EntryPoint

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
    #: The word after `--draft` that selects it; empty if only files do.
    word: str = ""
    #: The GGUF architecture that only such drafts have; empty if there is none.
    architecture: str = ""


KINDS = (
    KindEntry("ngram", word="ngram"),
    KindEntry("heads", word="heads"),
    KindEntry("mtp", word="mtp"),
    KindEntry("eagle3", architecture="eagle3"),
    KindEntry("dflash", architecture="dflash"),
    KindEntry("gemma4", architecture="gemma4-assistant"),
)
#: The words after `--draft` that select kinds of this package.
WORDS = tuple(kind.word for kind in KINDS if kind.word)
#: The name of the kind that accepts any file (a stand-alone model). It is tried last, after the
#: kinds of other packages.
ANY_FILE = "model"
#: The entry point group in which other packages register a `DraftKind`.
GROUP = "specgen.drafts"


def kinds() -> Iterator[DraftKind]:
    """Yield the kinds in the order in which they are tried; each is imported when it is reached."""
    for entry in KINDS:
        yield _import_kind(entry.module)
    yield from _kinds_of_packages()
    yield _import_kind("standalone")


def find_kind(source: DraftSource) -> DraftKind | None:
    """Return the first kind that matches the value of `--draft`; None if none does."""
    for kind in kinds():
        if kind.matches(source):
            return kind
    return None


def is_word(name: str) -> bool:
    """Return whether a value of `--draft` is a word that selects a kind, and not a model."""
    return name in WORDS or any(kind.matches(name) for kind in _kinds_of_packages())


def refuse_draft(path: Path) -> None:
    """Refuse a file that can only be a draft where a complete model is needed.

    Raises:
        ModelFileError: If the file is a draft that was trained for one target.
    """
    from specgen.llama.gguf_file import architecture_of

    architecture = architecture_of(path)
    draft_architectures = {kind.architecture for kind in KINDS if kind.architecture}
    if architecture in draft_architectures:
        raise ModelFileError(
            f"{path}: a draft of one target ({architecture}), and not a whole model",
            hint="give it as --draft, and the model that it was made for as -m",
        )


def open_draft(source: DraftSource, setup: DraftSetup) -> LoadedDraft | None:
    """Load a draft.

    Args:
        source: The value of `--draft`: a file or a word.
        setup: The target and the options.

    Returns:
        The loaded draft; None if the source is "none".

    Raises:
        UsageError: If no kind matches the source, or it cannot do what the options ask for.
        ModelFileError: If the file cannot be used.
        PairError: If it cannot draft for the target.
    """
    if source == "none":
        return None
    kind = find_kind(source)
    if kind is None:
        raise UsageError(f"--draft {source}: there is no such draft")
    if setup.further_drafts and kind.name != ANY_FILE:
        raise UsageError(
            f"--draft {source} cannot have a draft of its own; leave out the next --draft",
            hint="only a draft model takes one",
        )
    return kind.open(source, setup)


def _import_kind(module: str) -> DraftKind:
    kind: DraftKind = import_module(f"specgen.drafters.{module}").KIND
    return kind


@cache
def _kinds_of_packages() -> tuple[DraftKind, ...]:
    """Return the kinds of other packages.

    Raises:
        UsageError: If one of them cannot be imported.
    """
    from importlib.metadata import entry_points

    return tuple(map(_load_kind, entry_points(group=GROUP)))


def _load_kind(point: EntryPoint) -> DraftKind:
    try:
        kind: DraftKind = point.load()
    except Exception as error:  # whatever another package raises
        package = point.dist.name if point.dist is not None else point.module
        raise UsageError(
            f"the kind of draft {point.name!r} cannot be imported: {error!r}",
            hint=f"update or uninstall the package {package}",
        ) from error
    return kind
