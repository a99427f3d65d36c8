"""The draft that was saved for a target by `specgen draft find --save` or `specgen draft make`.

The file drafts.json in the configuration folder is written by specgen; people may read and repair it. A
target is identified by the name and the size of its file, so that it may be moved.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.errors import OutputError, UsageError
from specgen.models.files import FileIdentity
from specgen.models.folders import saved_drafts_file
from specgen.options import DraftSource
from specgen.system.atomic_files import replace_text

_DRAFTS = "drafts"
_FIGURES = ("speedup", "worst_speedup", "tokens_per_s", "acceptance_rate", "draft_token_s")


@dataclass(frozen=True, slots=True)
class SavedDraft:
    """A draft that was chosen by measuring, with the measurements; None if there are none.

    `speedup` is over plain decoding, `worst_speedup` is that of the worst prompt, and `draft_token_s` the
    seconds that drafting a token takes.
    """

    draft: DraftSource
    date: datetime.date | None = None
    speedup: float | None = None
    worst_speedup: float | None = None
    tokens_per_s: float | None = None
    acceptance_rate: float | None = None
    draft_token_s: float | None = None


def saved_draft(target: FileIdentity, file: Path | None = None) -> SavedDraft | None:
    """Return the draft that was saved for a target; None if there is none.

    `file` defaults to drafts.json in the configuration folder and need not exist. Unknown fields are
    ignored, and missing figures are None. Raise `UsageError` if the file cannot be read or does not name
    the draft.
    """
    path = file or saved_drafts_file()
    entry = _entries(_read(path), path).get(_key(target))
    if entry is None:
        return None
    draft = entry.get("draft") if isinstance(entry, dict) else None
    if not isinstance(draft, str) or not draft:
        raise _damaged(path, f'{_DRAFTS} "{_key(target)}": draft: is no path, "ngram" or "none"')
    figures = {name: _figure(entry.get(name)) for name in _FIGURES}
    return SavedDraft(_source(draft), _date(entry.get("date")), **figures)


def save_draft(target: FileIdentity, saved: SavedDraft, file: Path | None = None) -> Path:
    """Save a draft for a target, replacing an earlier one; return the file.

    The file is replaced whole, so that no reader ever sees half of it. Raise `UsageError` if the
    present file is damaged, `OutputError` if it cannot be written.
    """
    path = file or saved_drafts_file()
    document = _read(path)
    figures = {name: getattr(saved, name) for name in _FIGURES}
    document[_DRAFTS] = {
        **_entries(document, path),
        _key(target): {
            "draft": str(saved.draft.absolute()) if isinstance(saved.draft, Path) else saved.draft,
            "date": saved.date.isoformat() if saved.date is not None else None,
            **{name: figure for name, figure in figures.items() if figure is not None},
        },
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}",
            hint="set SPECGEN_CONFIG to another folder",
        ) from error
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too
        raise _damaged(path, f"is not JSON: {error}", separator=" ") from error
    if not isinstance(document, dict):
        raise _damaged(path, "is not a JSON object", separator=" ")
    return document


def _entries(document: dict[str, Any], path: Path) -> dict[str, Any]:
    entries = document.get(_DRAFTS, {})
    if not isinstance(entries, dict):
        raise _damaged(path, f"{_DRAFTS}: is not an object")
    return entries


def _damaged(path: Path, problem: str, separator: str = ": ") -> UsageError:
    return UsageError(f"{path}{separator}{problem}", hint=f"correct {path}, or move it away")


def _key(target: FileIdentity) -> str:
    return f"{target.name}, {target.size_bytes} bytes"


def _source(text: str) -> DraftSource:
    if text == "ngram":
        return "ngram"
    return "none" if text == "none" else Path(text)


def _figure(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _date(value: object) -> datetime.date | None:
    with contextlib.suppress(ValueError):
        return datetime.date.fromisoformat(value) if isinstance(value, str) else None
    return None
