"""The weights that a draft model learnt from kept answers, in a file.

A small JSON file beside the answers says for each draft which weights it drafts from. It is replaced
whole, and the weights that it names are on the disk before: whatever ends the process that learns,
a session finds weights that go together, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from specgen.atomic import replace_text


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is known of a draft's learning. The name is of a file in the folder; it is empty
    where the draft does better with the weights that it came with."""

    #: The weights, as a model file.
    weights: str = ""
    #: Number of the last answer that was there when it learnt, and how many it learnt from in all.
    last_number: int = 0
    n_answers: int = 0
    #: At which share of the places of the latest answers the draft said what the target said,
    #: without what it learnt, and with it.
    agreement_before: float = 0.0
    agreement_after: float = 0.0


def state_file(folder: Path, draft: Path) -> Path:
    """The file that says what a draft model learnt, in the folder of a target. Another file of the
    draft's name is another draft."""
    n_bytes = 0
    with contextlib.suppress(OSError):
        n_bytes = draft.stat().st_size
    digest = hashlib.sha256(os.fsencode(f"{draft.name}\0{n_bytes}")).hexdigest()[:12]
    return folder / f"{draft.stem}-{digest}.json"


def read_learnt(folder: Path, draft: Path) -> Learnt:
    """What a draft model learnt; nothing if that is not there, or damaged."""
    return read_state(state_file(folder, draft))


def read_state(path: Path) -> Learnt:
    """What a file says that was learnt; nothing if it is not there, or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = Learnt(**json.loads(path.read_text("utf-8")))
        kinds = {str: str, int: int, float: float | int}
        fields = asdict(found)
        defaults = asdict(Learnt())
        if all(isinstance(fields[name], kinds[type(defaults[name])]) for name in defaults):
            return found
    return Learnt()


def write_learnt(folder: Path, draft: Path, learnt: Learnt) -> None:
    """Keep what a draft model learnt. Raises `OSError`."""
    replace_text(state_file(folder, draft), json.dumps(asdict(learnt)) + "\n")


def learnt_weights(folder: Path | None, draft: Path) -> Path | None:
    """The file of the weights that a draft model learnt; None where there is none."""
    if folder is None:
        return None
    name = read_learnt(folder, draft).weights
    if not name or Path(name).name != name:
        return None
    path = folder / name
    return path if path.is_file() else None


__all__ = ["Learnt", "learnt_weights", "read_learnt", "read_state", "state_file", "write_learnt"]
