"""Answers that are kept for drafts to learn from: complete, limited, and readable by their user
only.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import NoticeEvent
from specgen.session.engine import generate
from specgen.session.kept_answers import (
    ANSWERS,
    MAX_PROMPT_TOKENS,
    KeptAnswer,
    Learnt,
    keep_answer,
    last_number,
    learnt_weights,
    read_answers,
    read_learnt,
    state_file,
    write_learnt,
)
from specgen.session.session import Session
from tests.helpers import sessions
from tests.helpers.cli import spawn

ANSWER = KeptAnswer((1, 2, 3), tuple(range(10, 30)), (7, 8), "digest")


def test_answers_are_read_as_they_were_kept_and_numbered(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "target"
    assert read_answers(folder) == []
    assert last_number(folder) == 0
    for _ in range(2):
        keep_answer(folder, ANSWER)
        keep_answer(folder, replace(ANSWER, draft_prompt=None, draft_vocabulary=None))
    without = KeptAnswer(ANSWER.prompt, ANSWER.answer)
    assert read_answers(folder) == [
        replace(each, number=number) for number, each in enumerate([ANSWER, without] * 2, 1)
    ]
    assert last_number(folder) == 4


def test_the_end_of_a_long_prompt_is_kept_and_no_short_answer(tmp_path: Path) -> None:
    keep_answer(tmp_path, KeptAnswer(tuple(range(5000)), tuple(range(20))))
    keep_answer(tmp_path, KeptAnswer((1,), (2, 3)))
    (answer,) = read_answers(tmp_path)
    assert answer.prompt == tuple(range(5000 - MAX_PROMPT_TOKENS, 5000))


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX rights")
def test_nobody_else_may_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "learning"
    before = os.umask(0)
    try:
        for _ in range(20):  # it is written anew too
            keep_answer(folder, ANSWER, max_bytes=300)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / ANSWERS).stat().st_mode) == 0o600


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    for _ in range(100):
        keep_answer(tmp_path, ANSWER, max_bytes=2000)
        assert (tmp_path / ANSWERS).stat().st_size <= 2000
    numbers = [answer.number for answer in read_answers(tmp_path)]
    assert numbers == list(range(numbers[0], 101))
    assert len(numbers) > 3


def test_half_a_line_and_a_damaged_one_lose_no_other(tmp_path: Path) -> None:
    keep_answer(tmp_path, ANSWER)
    file = tmp_path / ANSWERS
    with file.open("ab") as opened:
        opened.write(b'{"number": "x"}\n[1]\n\xff\n{"number": 2, "prompt": [1')
    assert [answer.number for answer in read_answers(tmp_path)] == [1]
    keep_answer(tmp_path, ANSWER)
    assert [answer.number for answer in read_answers(tmp_path)] == [1, 2]


_ADD = """
import sys
from pathlib import Path
from specgen.session.kept_answers import KeptAnswer, keep_answer
for number in range(60):
    keep_answer(Path(sys.argv[1]), KeptAnswer((int(sys.argv[2]), number), tuple(range(200))))
"""


def test_two_processes_keep_all_answers_of_both(tmp_path: Path) -> None:
    children = [spawn(tmp_path, str(name), code=_ADD) for name in range(2)]
    for child in children:
        child.communicate(timeout=60)
    assert [child.returncode for child in children] == [0, 0]
    answers = read_answers(tmp_path)
    assert [answer.number for answer in answers] == list(range(1, 121))
    assert {answer.prompt for answer in answers} == {
        (name, number) for name in range(2) for number in range(60)
    }


# --- sessions


def opened(models: Path, learning: Path | None) -> Session:
    choices: dict[str, Any] = {"n_tokens": 20, "ignore_eos": True, "learning": learning}
    return sessions.opened(models / "target.gguf", "draft", **choices)


def test_a_session_keeps_its_answers_and_continues_if_it_cannot(
    tiny_models: Path, tmp_path: Path
) -> None:
    with opened(tiny_models, tmp_path / "kept") as loaded:
        prompt = loaded.prompts.of_text("a cat")
        finished = sessions.finished(list(generate(loaded, prompt)))
    (answer,) = read_answers(tmp_path / "kept")
    assert (answer.prompt, answer.answer) == (prompt.tokens, finished.token_ids)
    (tmp_path / "file").touch()
    with opened(tiny_models, tmp_path / "file" / "kept") as loaded:
        events = list(generate(loaded, prompt))
    notices = [event.message for event in events if isinstance(event, NoticeEvent)]
    assert any("the answer is not kept" in message for message in notices)
    assert sessions.finished(events).text == finished.text


def test_nothing_is_kept_by_default(tiny_models: Path, tmp_path: Path) -> None:
    with opened(tiny_models, None) as loaded:
        sessions.answered(loaded, "a cat")
    assert not list(tmp_path.iterdir())
    assert not Path(os.environ["SPECGEN_DATA"]).exists()


# --- what was learnt


def taught(folder: Path, draft: Path, weights: Path) -> None:
    """Let a draft have learnt the weights in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w.gguf").write_bytes(weights.read_bytes())
    write_learnt(folder, draft, Learnt("w.gguf", n_answers=12))


@pytest.mark.parametrize("damage", ["state", "weights", "gone", "elsewhere"])
def test_a_damaged_learnt_draft_is_not_used(tiny_models: Path, tmp_path: Path, damage: str) -> None:
    draft = tiny_models / "draft.gguf"
    taught(tmp_path, draft, tiny_models / "bad.gguf")
    if damage == "state":
        state_file(tmp_path, draft).write_text('{"weights": 3}')
    elif damage == "weights":
        (tmp_path / "w.gguf").write_bytes(draft.read_bytes()[:1000])
    elif damage == "gone":
        (tmp_path / "w.gguf").unlink()
    else:
        write_learnt(tmp_path, draft, Learnt(f"../{tmp_path.name}/w.gguf"))
    with opened(tiny_models, tmp_path) as loaded:
        assert loaded.draft is not None
        assert loaded.draft.learnt is None
        assert sessions.answered(loaded, "a cat").n_accepted > 0


def test_another_file_with_a_drafts_name_does_not_get_its_training(tmp_path: Path) -> None:
    draft = tmp_path / "d.gguf"
    draft.write_bytes(b"one")
    taught(tmp_path / "learning", draft, draft)
    assert learnt_weights(tmp_path / "learning", draft) is not None
    draft.write_bytes(b"another")
    assert learnt_weights(tmp_path / "learning", draft) is None
    assert read_learnt(tmp_path / "learning", draft) == Learnt()
    assert learnt_weights(None, draft) is None
