"""All kinds of drafts: the first that matches a source opens it. No kind is imported before it is
needed.

A new kind is a module of this folder with a `KIND`, which is a `DraftKind` (`interface.py`) and
makes drafters (`specgen/method/drafter.py`), and a line of `KINDS`; one of another package is an
entry point of `GROUP`.
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
    from specgen.drafters.interface import DraftKind, DraftSetup, LoadedDraft


@dataclass(frozen=True, slots=True)
class Listed:
    """What is known of a kind before its `module` in `specgen.drafters`, which has a `KIND`, is
    imported: the word after --draft, and the GGUF architecture that only such drafts have.
    """

    module: str
    word: str = ""
    architecture: str = ""


KINDS = (
    Listed("ngram", word="ngram"),
    Listed("heads", word="heads"),
    Listed("mtp", word="mtp"),
    Listed("eagle3", architecture="eagle3"),
    Listed("dflash", architecture="dflash"),
    Listed("gemma4", architecture="gemma4-assistant"),
)
WORDS = tuple(kind.word for kind in KINDS if kind.word)
#: Any file may be a model: it comes after the kinds of other packages.
ANY_FILE = "model"
#: The entry points of other packages, each with a `DraftKind`.
GROUP = "specgen.drafts"


def kinds() -> Iterator[DraftKind]:
    """Yield the kinds in their order. Each is imported only when those before it do not match."""
    for kind in KINDS:
        yield _own(kind.module)
    yield from _others()
    yield _own("draft_model")


def find_kind(source: DraftSource) -> DraftKind | None:
    return next((kind for kind in kinds() if kind.matches(source)), None)


def is_word(name: str) -> bool:
    return name in WORDS or any(kind.matches(name) for kind in _others())


def refuse_draft(path: Path) -> None:
    """Raise `ModelFileError` if a file holds a draft of one target, and no whole model."""
    from specgen.llama.gguf_file import architecture_of

    architecture = architecture_of(path)
    if any(architecture and kind.architecture == architecture for kind in KINDS):
        raise ModelFileError(
            f"{path}: a draft of one target ({architecture}), and not a whole model",
            hint="give it as --draft, and the model that it was made for as -m",
        )


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
    from importlib.metadata import entry_points

    return tuple(point.load() for point in entry_points(group=GROUP))
