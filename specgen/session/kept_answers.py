"""Answers that are kept on this disk for drafts to learn from (`--learn`), and what drafts learnt.

A folder for each target, which only its user may read, holds ``answers.jsonl``, the latest answer
last. For each draft that learnt, a small JSON file names its weights. It is replaced whole, after
the weights are on the disk: even if the learning process is killed, others find complete weights,
or none.
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
#: The most bytes of a file of answers; if it grows beyond that, its older half is removed.
MAX_BYTES = 16 << 20
#: How many of the last tokens of a prompt are kept.
MAX_PROMPT_TOKENS = 512
#: How many of the first tokens of an answer are kept.
MAX_ANSWER_TOKENS = 4096
#: Shorter answers teach nothing.
_LEAST_TOKENS = 8
#: The longest wait for another process's lock, in seconds; a write takes milliseconds.
_WAIT_S = 5.0
#: The last line, with its answer's number, fits into this many bytes at the end of the file.
_TAIL_BYTES = 1 << 18
#: Token ids, of a line of JSON too.
_Tokens = tuple[Annotated[int, Field(strict=True)], ...]


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer of the target."""

    #: Tokens of the target; the answer includes the token that ended it.
    prompt: _Tokens
    answer: _Tokens
    #: The prompt in the tokens of a draft with another vocabulary, and that vocabulary's digest.
    draft_prompt: _Tokens | None = None
    draft_vocabulary: str | None = None
    #: Its number, from 1; answers that were removed count too. 0 before it is written.
    number: Annotated[int, Field(strict=True)] = 0


_ANSWER = TypeAdapter(KeptAnswer)


def keep_answer(
    folder: Path,
    answer: KeptAnswer,
    *,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Append an answer to the file in a folder, if it is not very short. Raise `OutputError`."""
    if len(answer.answer) < _LEAST_TOKENS:
        return
    make_folder(folder)
    path = folder / ANSWERS
    held = OutputError(f"{path}: another process is writing to it")
    with locked(folder / f"{ANSWERS}.lock", held, wait_s=_WAIT_S), write_errors(path):
        draft_prompt = answer.draft_prompt
        kept = replace(
            answer,
            number=last_number(folder) + 1,
            prompt=answer.prompt[-MAX_PROMPT_TOKENS:],
            answer=answer.answer[:MAX_ANSWER_TOKENS],
            draft_prompt=draft_prompt and draft_prompt[-MAX_PROMPT_TOKENS:],
        )
        with open(path, "ab", opener=open_private) as file:
            # The line break before it ends a line that a killed process may have left half written.
            file.write(b"\n" + _ANSWER.dump_json(kept, exclude_none=True) + b"\n")
        if path.stat().st_size > max_bytes:
            data = path.read_bytes()
            start = data.find(b"\n", len(data) - max_bytes // 2) + 1
            replace_bytes(path, data[start:])


def read_answers(folder: Path) -> list[KeptAnswer]:
    """Return the answers in a folder, the latest last. Raise `OutputError`."""
    path = folder / ANSWERS
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}") from error


def last_number(folder: Path) -> int:
    """Return the number of the latest answer in a folder; 0 if there is none."""
    with contextlib.suppress(OSError), (folder / ANSWERS).open("rb") as file:
        n_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, n_bytes - _TAIL_BYTES))
        return max((answer.number for answer in _parsed(file.read())), default=0)
    return 0


def make_folder(folder: Path) -> None:
    """Make the folder of a target's answers, readable for its user only. Raise `OutputError`."""
    with write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def _parsed(data: bytes) -> list[KeptAnswer]:
    answers: list[KeptAnswer] = []
    for line in data.split(b"\n"):  # one by one, so that a damaged line costs no other
        with contextlib.suppress(ValueError):
            answers.append(_ANSWER.validate_json(line))
    return answers


# --- what drafts learnt -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a draft learnt."""

    #: The name of the file with its weights; empty for the original ones.
    weights: str = ""
    #: The number of the last answer, and how many it learnt from.
    last_number: int = 0
    n_answers: int = 0
    #: Its agreement with the latest answers, before and after.
    agreement_before: float = 0.0
    agreement_after: float = 0.0


_LEARNT = TypeAdapter(Learnt)


def state_file(folder: Path, draft: Path) -> Path:
    """Return the file about what a draft learnt.

    A draft of the same name and another size is another draft.
    """
    digest = hashlib.sha256(os.fsencode(f"{draft.name}\0{size_of(draft)}")).hexdigest()[:12]
    return folder / f"{draft.stem}-{digest}.json"


def read_learnt(folder: Path, draft: Path) -> Learnt:
    """Return what a draft learnt; nothing if it never did."""
    return read_state(state_file(folder, draft))


def read_state(path: Path) -> Learnt:
    """Return what a file of `state_file` says; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return _LEARNT.validate_json(path.read_bytes(), strict=True)
    return Learnt()


def write_learnt(
    folder: Path,
    draft: Path,
    learnt: Learnt,
) -> None:
    """Write what a draft learnt. Raise `OSError`."""
    replace_bytes(state_file(folder, draft), _LEARNT.dump_json(learnt) + b"\n")


def learnt_weights(folder: Path | None, draft: Path) -> Path | None:
    """Return the file of the weights that a draft learnt; None for the original ones."""
    if folder is None:
        return None
    name = read_learnt(folder, draft).weights
    is_in_folder = Path(name).name == name
    path = folder / name
    return path if is_in_folder and path.is_file() else None
