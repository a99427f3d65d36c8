"""The weights that a draft model learnt from kept answers.

A small JSON file for each draft, beside the answers, names the weights to draft from. It is replaced
whole, after those weights are on the disk. So even if the learning process is killed, others find
complete weights, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from specgen.system.atomic_files import replace_text


@dataclass(frozen=True, slots=True)
class Learnt:
    """The result of a draft's learning."""

    #: The name of a model file in the folder, with the weights; empty if the original weights are better.
    weights: str = ""
    #: The number of the last answer when it learnt, and the number of all answers that it learnt from.
    last_number: int = 0
    n_answers: int = 0
    #: The agreement of the draft with the target on the latest answers, as a share of their positions:
    #: with the original weights, and with the learnt ones.
    agreement_before: float = 0.0
    agreement_after: float = 0.0


def state_file(folder: Path, draft: Path) -> Path:
    """Return the path of the JSON file about a draft model's learning, in the folder of a target. A draft
    file of the same name and another size is another draft."""
    n_bytes = 0
    with contextlib.suppress(OSError):
        n_bytes = draft.stat().st_size
    digest = hashlib.sha256(os.fsencode(f"{draft.name}\0{n_bytes}")).hexdigest()[:12]
    return folder / f"{draft.stem}-{digest}.json"


def read_learnt(folder: Path, draft: Path) -> Learnt:
    """Return the weights that a draft model learnt; the default values if the file is missing or
    damaged."""
    return read_state(state_file(folder, draft))


def read_state(path: Path) -> Learnt:
    """Return the contents of such a file; the default values if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = Learnt(**json.loads(path.read_text("utf-8")))
        kinds = {str: str, int: int, float: float | int}
        fields = asdict(found)
        defaults = asdict(Learnt())
        if all(isinstance(fields[name], kinds[type(defaults[name])]) for name in defaults):
            return found
    return Learnt()


def write_learnt(folder: Path, draft: Path, learnt: Learnt) -> None:
    """Write the weights that a draft model learnt to its file. Raise `OSError`."""
    replace_text(state_file(folder, draft), json.dumps(asdict(learnt)) + "\n")


def learnt_weights(folder: Path | None, draft: Path) -> Path | None:
    """Return the path of the weights that a draft model learnt; None if there are none."""
    if folder is None:
        return None
    name = read_learnt(folder, draft).weights
    if not name or Path(name).name != name:
        return None
    path = folder / name
    return path if path.is_file() else None


__all__ = ["Learnt", "learnt_weights", "read_learnt", "read_state", "state_file", "write_learnt"]
