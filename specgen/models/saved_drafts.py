"""The drafts that `specgen draft find --save` and `specgen draft make` saved, in drafts.json in the configuration folder,
which people may repair. A target is identified by the name and the size of its file, so that it may be moved."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from specgen.drafters.kinds import is_word
from specgen.errors import OutputError, UsageError
from specgen.models.files import FileIdentity, config_folder
from specgen.options import DraftSource
from specgen.system.files import correct, replace_text


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """A draft that was chosen by measuring, when, and its speed-up over plain decoding."""

    draft: DraftSource
    date: datetime.date | None = None
    speedup: FiniteFloat | None = None


def saved_drafts_file() -> Path:
    """Return the file of the drafts that were found best; it need not exist."""
    return config_folder() / "drafts.json"


def saved_draft(target: FileIdentity) -> SavedDraft | None:
    """Return the draft that was saved for a target. Unknown fields are ignored. Raise `UsageError` if the file cannot
    be read or is damaged."""
    entry = _read()["drafts"].get(_key(target))
    if entry is None:
        return None
    draft = entry.get("draft") if isinstance(entry, dict) else None
    if not isinstance(draft, str) or not draft:
        raise _damaged(f'"{_key(target)}": draft: is no path, and no word after --draft')
    source = draft if draft == "none" or is_word(draft) else Path(draft)
    try:
        return TypeAdapter(SavedDraft).validate_python({**entry, "draft": source})
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(f'"{_key(target)}": {first["loc"][0]}: {first["msg"]}') from error


def save_draft(target: FileIdentity, saved: SavedDraft) -> None:
    """Save a draft for a target, replacing an earlier one. Raise `UsageError` if the present file is damaged,
    `OutputError` if it cannot be written."""
    path, document = saved_drafts_file(), _read()
    values = TypeAdapter(SavedDraft).dump_python(saved, mode="json", exclude_none=True)
    if isinstance(saved.draft, Path):
        values["draft"] = str(saved.draft.absolute())
    document["drafts"][_key(target)] = values
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        hint = "set SPECGEN_CONFIG to another folder"
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}", hint
        ) from error


def _read() -> dict[str, Any]:
    path = saved_drafts_file()
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        document = {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too
        raise _damaged(f"is not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.setdefault("drafts", {}), dict):
        raise _damaged("is not a JSON object with an object named drafts")
    return document


def _damaged(problem: str) -> UsageError:
    path = saved_drafts_file()
    return UsageError(f"{path}: {problem}", correct(path))


def _key(target: FileIdentity) -> str:
    return f"{target.name}, {target.size_bytes} bytes"
