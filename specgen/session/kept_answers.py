"""Answers that are stored on the disk for drafts to learn from (`--learn`), and what drafts learnt.

There is a folder for each target, which only its user may read. Its ``answers.jsonl`` has one
answer per line, the latest last. For each draft that learnt, a small JSON file names the file of
its weights. It is replaced atomically once the weights are on the disk, so that even if the
learning process is killed, other processes find complete weights or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from specgen.errors import OutputError
from specgen.models.files import size_of
from specgen.system.files import locked, open_private, replace_bytes, write_errors

ANSWERS = "answers.jsonl"
#: The maximum size of a file of answers. When it grows beyond that, its older half is removed.
MAX_BYTES = 16 << 20
#: The number of tokens that are stored of a prompt: its last ones.
MAX_PROMPT_TOKENS = 512
#: The number of tokens that are stored of an answer: its first ones.
MAX_ANSWER_TOKENS = 4096
#: Shorter answers are not stored: there is nothing to learn from them.
_MIN_TOKENS = 8
#: The longest wait for another process's lock, in seconds; a write takes milliseconds.
_WAIT_S = 5.0
#: The last line, with the number of the latest answer, fits into this many bytes.
_TAIL_BYTES = 1 << 18
#: Token ids, strictly validated when they are read from JSON.
_Tokens = tuple[Annotated[int, Field(strict=True)], ...]


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer of the target."""

    #: The prompt, in tokens of the target.
    prompt: _Tokens
    #: The answer in tokens of the target, including the token that ended it.
    answer: _Tokens
    #: The prompt in tokens of the draft, if that has another vocabulary.
    draft_prompt: _Tokens | None = None
    #: The digest of the draft's vocabulary, if it is another one.
    draft_vocabulary: str | None = None
    #: The position among all answers of the target, from 1, including answers that were removed
    #: from the file. 0 before it is written.
    number: Annotated[int, Field(strict=True)] = 0


_ANSWER = TypeAdapter(KeptAnswer)


def keep_answer(
    folder: Path,
    answer: KeptAnswer,
    *,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Append an answer to the file of answers; very short answers are ignored.

    The tokens are cut to `MAX_PROMPT_TOKENS` and `MAX_ANSWER_TOKENS`.

    Args:
        folder: The target's folder, which is created if it is missing.
        answer: The answer; its `number` is assigned here.
        max_bytes: If the file becomes larger, its older half is removed.

    Raises:
        OutputError: If the file cannot be written, or another process keeps it locked.
    """
    if len(answer.answer) < _MIN_TOKENS:
        return
    make_folder(folder)
    path = folder / ANSWERS
    lock_error = OutputError(f"{path}: another process is writing to it")
    with locked(folder / f"{ANSWERS}.lock", lock_error, wait_s=_WAIT_S), write_errors(path):
        draft_prompt = answer.draft_prompt
        if draft_prompt is not None:
            draft_prompt = draft_prompt[-MAX_PROMPT_TOKENS:]
        cut_answer = replace(
            answer,
            number=last_number(folder) + 1,
            prompt=answer.prompt[-MAX_PROMPT_TOKENS:],
            answer=answer.answer[:MAX_ANSWER_TOKENS],
            draft_prompt=draft_prompt,
        )
        with open(path, "ab", opener=open_private) as file:
            # Start with a line break, in case a killed process left half a line behind.
            file.write(b"\n" + _ANSWER.dump_json(cut_answer, exclude_none=True) + b"\n")
        if path.stat().st_size > max_bytes:
            data = path.read_bytes()
            # Cut after a line break, so that the first remaining line is complete.
            start = data.find(b"\n", len(data) - max_bytes // 2) + 1
            replace_bytes(path, data[start:])


def read_answers(folder: Path) -> list[KeptAnswer]:
    """Return the answers in a target's folder, the latest last. Damaged lines are skipped.

    Raises:
        OutputError: If the file exists but cannot be read.
    """
    path = folder / ANSWERS
    try:
        return _parsed(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error


def last_number(folder: Path) -> int:
    """Return the number of the latest answer in a folder; 0 if there is none.

    Only the end of the file is read.
    """
    with contextlib.suppress(OSError), (folder / ANSWERS).open("rb") as file:
        n_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, n_bytes - _TAIL_BYTES))
        return max((answer.number for answer in _parsed(file.read())), default=0)
    return 0


def make_folder(folder: Path) -> None:
    """Make the folder of a target's answers, which only the user may read.

    Raises:
        OutputError: If it cannot be made.
    """
    with write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def _parsed(data: bytes) -> list[KeptAnswer]:
    answers: list[KeptAnswer] = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):  # an empty, damaged or half-written line
            answers.append(_ANSWER.validate_json(line))
    return answers


# --- what drafts learnt -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a draft learnt."""

    #: The name of the file with the learnt weights; empty if the original weights are used.
    weights: str = ""
    #: The number of the last answer that it learnt from.
    last_number: int = 0
    #: The number of answers that it learnt from.
    n_answers: int = 0
    #: The share of tokens of other answers on which it agreed with the target before learning.
    agreement_before: float = 0.0
    #: The same share after learning.
    agreement_after: float = 0.0


_LEARNT = TypeAdapter(Learnt)


def state_file(folder: Path, draft: Path) -> Path:
    """Return the path of the JSON file about what a draft learnt.

    Drafts with the same name but different sizes have different files.
    """
    digest = hashlib.sha256(os.fsencode(f"{draft.name}\0{size_of(draft)}")).hexdigest()[:12]
    return folder / f"{draft.stem}-{digest}.json"


def read_learnt(folder: Path, draft: Path) -> Learnt:
    """Return what a draft learnt; an empty `Learnt` if it never did."""
    return read_state(state_file(folder, draft))


def read_state(path: Path) -> Learnt:
    """Return the content of a file of `state_file`; an empty `Learnt` if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return _LEARNT.validate_json(path.read_bytes(), strict=True)
    return Learnt()


def write_learnt(folder: Path, draft: Path, learnt: Learnt) -> None:
    """Write what a draft learnt, replacing the file atomically.

    Raises:
        OSError: If it cannot be written.
    """
    replace_bytes(state_file(folder, draft), _LEARNT.dump_json(learnt) + b"\n")


def learnt_weights(folder: Path | None, draft: Path) -> Path | None:
    """Return the file with the weights that a draft learnt; None if its original ones are used.

    Args:
        folder: The target's folder; None if nothing is learnt.
        draft: The draft's file.
    """
    if folder is None:
        return None
    name = read_learnt(folder, draft).weights
    # A name with a path in it was not written by specgen.
    is_in_folder = Path(name).name == name
    path = folder / name
    return path if is_in_folder and path.is_file() else None
