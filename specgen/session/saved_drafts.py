"""The drafts that `specgen draft find --save` and `specgen draft make` saved for targets.

They are stored in drafts.json in the configuration folder, which people may edit by hand. A target
is identified by the name and the size of its file, so that it can be moved to another folder.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from specgen.drafters.kinds import is_word
from specgen.errors import UsageError
from specgen.models.files import FileIdentity
from specgen.options import DraftSource
from specgen.system.files import correction_hint, named_path, replace_json, write_errors
from specgen.system.folders import config_folder
from specgen.system.quantities import measured_speedup


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """A draft that was chosen by measuring."""

    #: A file, or a word; ``none`` if no draft was faster than plain decoding.
    draft: DraftSource
    #: When it was measured.
    date: datetime.date | None = None
    #: The speed-up over plain decoding, of all answers together.
    speedup: FiniteFloat | None = None
    #: The speed-up of the answer with the lowest one.
    worst_speedup: FiniteFloat | None = None
    #: The speed-up of the answer with the highest one.
    best_speedup: FiniteFloat | None = None
    #: The number of answers that were measured.
    n_answers: int = 0

    @property
    def gain(self) -> str:
        """The measured speed-up in words; empty unless all three speed-ups are known."""
        if self.speedup is None or self.worst_speedup is None or self.best_speedup is None:
            return ""
        return measured_speedup(self.speedup, self.worst_speedup, self.best_speedup, self.n_answers)


_SAVED = TypeAdapter(SavedDraft)


def saved_drafts_file() -> Path:
    """Return the path of drafts.json, which may not exist."""
    return config_folder() / "drafts.json"


def saved_draft(target: FileIdentity) -> SavedDraft | None:
    """Return the draft that was saved for a target; None if there is none.

    Raises:
        UsageError: If drafts.json is damaged.
    """
    key = _key(target)
    entry = _read()["drafts"].get(key)
    if entry is None:
        return None
    draft = entry.get("draft") if isinstance(entry, dict) else None
    if not isinstance(draft, str) or not draft:
        raise _damaged(f'"{key}": draft: is neither a path nor a word for --draft')
    source = draft if draft == "none" or is_word(draft) else Path(draft)
    try:
        return _SAVED.validate_python({**entry, "draft": source})
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(f'"{key}": {first["loc"][0]}: {first["msg"]}') from error


def save_draft(target: FileIdentity, saved: SavedDraft) -> None:
    """Save a draft for a target, replacing an earlier one.

    Raises:
        UsageError: If drafts.json is damaged.
        OutputError: If drafts.json cannot be written.
    """
    path = saved_drafts_file()
    document = _read()
    values = _SAVED.dump_python(saved, mode="json", exclude_none=True)
    if isinstance(saved.draft, Path):
        values["draft"] = str(saved.draft.absolute())
    document["drafts"][_key(target)] = values
    with write_errors(path, "set SPECGEN_CONFIG to another folder"):
        replace_json(path, document)


def _read() -> dict[str, Any]:
    """Return the content of drafts.json, which always has an object named "drafts"."""
    path = saved_drafts_file()
    document: object = {}
    try:
        if named_path(path):
            document = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also if it is not UTF-8
        raise _damaged(f"is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.setdefault("drafts", {}), dict):
        raise _damaged("is not a JSON object with an object named drafts")
    return document


def _damaged(problem: str) -> UsageError:
    path = saved_drafts_file()
    return UsageError(f"{path}: {problem}", correction_hint(path))


def _key(target: FileIdentity) -> str:
    return f"{target.name}, {target.size_bytes} bytes"
