"""Drafts that learn from kept answers: which are used or dropped, and when training ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.models.files import identify, learning_folder
from specgen.session.engine import Engine
from specgen.session.kept_answers import (
    ANSWERS,
    KeptAnswer,
    Learnt,
    keep_answer,
    learnt_weights,
    read_answers,
    read_learnt,
    write_learnt,
)
from specgen.session.session import Session
from specgen.system.files import locked
from specgen.train import online_learning
from specgen.train.online_learning import NEW_ANSWERS, Learner, Lesson, learn
from specgen.train.target_text import N_COLUMNS, kept_texts
from specgen.train.training_loop import Budget
from tests.helpers import sessions
from tests.helpers.cli import Specgen
from tests.helpers.common import ROOT
from tests.helpers.heads import counting, prompts
from tests.helpers.tiny import write_respelled_model, write_with_other_scales
from tests.helpers.workers import wait_for
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

CONFIG = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "target.gguf", CONFIG)
    # A draft that is wrong where it need not be: there is something to learn.
    write_with_other_scales(folder / "target.gguf", folder / "draft.gguf", 0.5)
    write_respelled_model(folder / "respelled.gguf", CONFIG)
    return folder


def opened(models: Path, learning: Path | None) -> Session:
    choices: dict[str, Any] = {"n_tokens": 48, "ignore_eos": True, "learning": learning}
    return sessions.opened(models / "target.gguf", "draft", n_draft=3, **choices)


@pytest.fixture(scope="module")
def answered(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answered")
    with opened(models, folder) as loaded, Engine(loaded, n_parallel=4) as engine:
        sessions.answers(engine, prompts(40))
    assert len(read_answers(folder)) == 40
    return folder


@pytest.fixture
def folder(answered: Path, tmp_path: Path) -> Path:
    """A folder with 40 answers of the target."""
    return Path(shutil.copytree(answered, tmp_path / "learning"))


# --- texts


def test_every_token_of_an_answer_is_learnt_once(models: Path) -> None:
    answers = [
        KeptAnswer(tuple(range(3, 3 + n_prompt)), tuple(i % 97 + 3 for i in range(n_answer)))
        for n_prompt, n_answer in ((5, 20), (90, 400), (10, 1500))
    ]
    with contextlib.closing(LlamaModel(models / "target.gguf")) as model:
        for answer in answers:
            found = kept_texts(model, model, [answer])
            assert sum((each.answer_tokens for each in found), ()) == answer.answer
            whole = (*answer.prompt, *answer.answer)
            for each in found:
                tokens = (*each.prompt_tokens, *each.answer_tokens)
                assert len(tokens) <= N_COLUMNS
                assert any(whole[i : i + len(tokens)] == tokens for i in range(len(whole)))
        assert kept_texts(model, model, [KeptAnswer((1,), (10**6,))]) == []
        judging = kept_texts(model, model, answers[:1], answers[1:])
        assert [each.is_held_back for each in judging] == [False] + [True] * (len(judging) - 1)


def test_a_draft_with_another_vocabulary_reads_its_own_prompt_and_tokens(models: Path) -> None:
    target = LlamaModel(models / "target.gguf")
    draft = LlamaModel(models / "respelled.gguf")
    with contextlib.closing(target), contextlib.closing(draft):
        said = b"the cat is in the else"
        tokens = target.vocabulary.tokenize(said.decode(), add_special=False, parse_special=False)
        own_digest = draft.vocabulary.digest()
        for digest, before in ((own_digest, b""), ("another", b"\x05\x06")):
            answer = KeptAnswer((5, 6), tuple(tokens), (7, 8, 9), digest)
            (own,) = kept_texts(target, draft, [answer])
            assert (own.prompt_tokens == (7, 8, 9)) == (digest == own_digest)
            assert b"".join(map(draft.vocabulary.token_bytes, own.answer_tokens)) == before + said


# --- lessons


def lesson(
    models: Path,
    folder: Path,
    *,
    rate: float = 0.01,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Any:
    """Return the result of a lesson, or None if it was interrupted."""
    pytest.importorskip("jax")
    budget = Budget(counting(), math.inf, is_interrupted)
    return learn(folder, models / "target.gguf", models / "draft.gguf", budget, rate=rate)


def names(folder: Path) -> list[str]:
    """The files of what was learnt."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".gguf", ".new"))


def test_what_is_better_on_the_latest_answers_is_used(models: Path, folder: Path) -> None:
    draft = models / "draft.gguf"
    found = lesson(models, folder)
    assert found.outcome == "new"
    assert found.agreement_new > found.agreement_as_it_came
    assert found.agreement_in_use is None
    assert "now uses what it learnt from 30 answers" in found.text
    learnt = read_learnt(folder, draft)
    assert names(folder) == [learnt.weights]
    assert (learnt.n_answers, learnt.last_number) == (30, 40)
    # The next lesson continues from there, and the weights that were in use are deleted.
    again = lesson(models, folder)
    assert again.agreement_in_use == pytest.approx(found.agreement_new)
    assert again.outcome in ("new", "kept")
    assert names(folder) == [read_learnt(folder, draft).weights]
    answers = []
    for learning in (None, folder):
        with opened(models, learning) as loaded:
            answers.append(sessions.answered(loaded, prompts(41)[-1], chat=True))
    assert answers[0].text == answers[1].text
    assert answers[0].n_accepted < answers[1].n_accepted


@pytest.mark.parametrize(
    ("is_in_use", "outcome", "text"),
    [
        (False, "kept", "learnt nothing better from 30 answers, and keeps its weights"),
        (True, "none", "uses its original weights again"),
    ],
)
def test_what_is_worse_is_dropped(
    models: Path, folder: Path, is_in_use: bool, outcome: str, text: str
) -> None:
    draft = models / "draft.gguf"
    if is_in_use:
        write_tiny_model(folder / "bad.gguf", CONFIG.draft(1.5))
        write_learnt(folder, draft, Learnt("bad.gguf", n_answers=9))
    found = lesson(models, folder, rate=0.0)
    assert found.outcome == outcome
    assert not is_in_use or found.agreement_in_use < found.agreement_as_it_came
    assert names(folder) == []
    assert learnt_weights(folder, draft) is None
    assert read_learnt(folder, draft).last_number == 40
    assert text in found.text


def test_damaged_weights_and_what_a_killed_lesson_left_end_no_lesson(
    models: Path, folder: Path
) -> None:
    in_the_making = f"{ANSWERS}.abc.new"
    for name in ("weights.gguf.abc.new", "not-in-use.gguf", in_the_making):
        (folder / name).touch()
    (folder / "w.gguf").write_bytes((models / "draft.gguf").read_bytes()[:2000])
    write_learnt(folder, models / "draft.gguf", Learnt("w.gguf"))
    found = lesson(models, folder)
    assert (found.outcome, found.agreement_in_use) == ("new", None)
    learnt = read_learnt(folder, models / "draft.gguf").weights
    assert names(folder) == sorted([in_the_making, learnt])


def test_a_lesson_that_does_not_come_to_its_end_changes_nothing(models: Path, folder: Path) -> None:
    def forget() -> bool:
        (folder / ANSWERS).unlink(missing_ok=True)
        keep_answer(folder, KeptAnswer((1, 2), tuple(range(20))))
        return False

    with pytest.raises(UsageError, match="too few answers are kept for target.gguf .*: 0"):
        lesson(models, folder.with_name("none"))
    with (
        locked(folder / "learning.lock", UsageError("held")),
        pytest.raises(UsageError, match="another process is already learning"),
    ):
        lesson(models, folder)
    looks = iter([False] * 3)
    assert lesson(models, folder, is_interrupted=lambda: next(looks, True)) is None
    with pytest.raises(UsageError, match="deleted while the draft learnt"):
        lesson(models, folder, is_interrupted=forget)
    assert names(folder) == []
    assert read_learnt(folder, models / "draft.gguf") == Learnt()


# --- beside answers


def in_use(session: Session) -> Path | None:
    """The weights that the draft learnt and drafts from."""
    assert session.draft is not None
    return session.draft.learnt


#: A process that learns, and what it does after it was asked.
_CHILD = """
import json, sys
from pathlib import Path
sys.path.insert(0, {root!r})
asked = json.loads(sys.argv[1])
folder = Path(asked["folder"])
{does}
"""
_SAYS = """
from specgen.session.kept_answers import Learnt, write_learnt
(folder / "w.gguf").write_bytes(Path(asked["target"]).read_bytes())
write_learnt(folder, Path(asked["draft"]), Learnt("w.gguf", last_number=10, n_answers=9))
print(json.dumps(dict(n_answers=9, n_judging=3, agreement_as_it_came=0.5,
    agreement_in_use=None, agreement_new=0.6, outcome="new", n_steps=3, seconds=1.0)))
"""
_NOTES = """
while said := sys.stdin.buffer.read(1):
    with (folder / "said").open("ab") as file:
        file.write(said)
"""


Learning = Callable[[str], AbstractContextManager[tuple[Engine, Learner, list[str], Session]]]


@pytest.fixture
def learning(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Learning:
    @contextlib.contextmanager
    def begun(does: str) -> Iterator[tuple[Engine, Learner, list[str], Session]]:
        code = _CHILD.format(root=str(ROOT), does=does)
        monkeypatch.setattr(online_learning, "check_library", lambda: None)
        said: list[str] = []
        with (
            opened(models, tmp_path / "learning") as loaded,
            Engine(loaded) as engine,
            Learner(loaded, engine, said.append, (sys.executable, "-c", code)) as learner,
        ):
            yield engine, learner, said, loaded

    return begun


def lessons() -> Any:
    """Counts the processes that begin while this context lasts."""
    return mock.patch.object(subprocess, "Popen", wraps=subprocess.Popen)


def is_told(learner: Learner, said: list[str]) -> bool:
    learner.after_answers()
    return bool(said)


def test_a_lesson_begins_when_there_are_enough_answers_and_its_draft_is_used(
    learning: Learning, tmp_path: Path
) -> None:
    with learning(_SAYS) as (engine, learner, said, loaded), lessons() as begun:
        for text in prompts(NEW_ANSWERS):
            learner.before_answers()
            sessions.answers(engine, [text])
        begun.assert_not_called()
        learner.after_answers()
        begun.assert_called_once()
        wait_for(lambda: is_told(learner, said))
        assert in_use(loaded) == tmp_path / "learning" / "w.gguf"
        assert "draft.gguf now uses what it learnt from 9 answers" in said[0]
        answer = engine.insert("abc")
        finished = sessions.finished(list(engine.stream(answer)))
        assert finished.acceptance_rate == 1.0  # it is the target itself
        learner.after_answers()
        begun.assert_called_once()


def test_a_lesson_waits_while_an_answer_is_in_the_making(learning: Learning, folder: Path) -> None:
    with learning(_NOTES) as (_, learner, _, _):
        for _ in range(2):
            learner.before_answers()
            learner.before_answers()
            learner.after_answers()
            learner.after_answers()
        said = folder / "said"
        wait_for(lambda: said.exists() and said.read_bytes() == b"-+-+")


@pytest.mark.usefixtures("folder")
def test_a_lesson_that_fails_ends_learning_and_nothing_else(learning: Learning) -> None:
    with learning("sys.exit('no memory')") as (engine, learner, said, _), lessons() as begun:
        wait_for(lambda: is_told(learner, said))
        assert said == ["learning has ended: no memory"]
        learner.after_answers()
        begun.assert_called_once()
        assert sessions.answers(engine, ["abc"])


def test_what_is_learnt_or_forgotten_elsewhere_counts_too(
    learning: Learning, models: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "learning"
    draft = models / "draft.gguf"
    with learning(_NOTES) as (engine, learner, _, loaded):
        learner.after_answers()
        folder.mkdir()
        engine.insert("abc")
        engine.step()
        write_tiny_model(folder / "w.gguf", CONFIG)
        write_learnt(folder, draft, Learnt("w.gguf"))
        assert not engine.reload_draft()  # not while an answer is in the making
        assert in_use(loaded) is None
        list(engine.run())
        learner.before_answers()
        assert in_use(loaded) == folder / "w.gguf"
        shutil.rmtree(folder)
        learner.before_answers()
        learner.after_answers()
        assert in_use(loaded) is None
        assert sessions.answers(engine, ["abc"])


@pytest.mark.parametrize(("minutes", "closes"), [(1e-6, False), (10.0, True)])
def test_the_process_that_learns_ends_by_itself_or_with_its_input(
    models: Path, folder: Path, minutes: float, closes: bool
) -> None:
    """One of its threads waits for input, which would abort the interpreter at its usual end.

    Its input also closes when the command that started it is killed.
    """
    pytest.importorskip("jax")
    paths = {"folder": folder, "target": models / "target.gguf", "draft": models / "draft.gguf"}
    task = json.dumps(paths | {"minutes": minutes}, default=str)
    command = (*online_learning.COMMAND, task)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if closes:
            child.stdin.close()
        said = child.stdout.read()
        assert child.wait() == int(closes)
    assert said == b"" if closes else Lesson(**json.loads(said)).n_steps > 0


def test_a_servers_draft_learns_between_its_answers(models: Path, tmp_path: Path) -> None:
    """Several requests come at once, and each lesson brings other weights."""
    pytest.importorskip("starlette")
    from tests.helpers.server import FIXED, running

    options = sessions.options_of(models / "target.gguf", "draft", drafting=FIXED, n_tokens=24)
    with Session(options, time.perf_counter) as loaded, Engine(loaded) as engine:
        plain = sessions.answers(engine, prompts(4))
    told: list[str] = []

    def before_answers() -> None:
        told.append("before")

    def after_answers() -> None:
        told.append("after")
        name = f"w{len(told)}.gguf"
        write_tiny_model(tmp_path / name, CONFIG.draft(0.1 * len(told)))
        write_learnt(tmp_path, models / "draft.gguf", Learnt(name))
        assert server.engine.reload_draft()

    def ask(text: str) -> Any:
        messages = [{"role": "user", "content": text}]
        response = server.post("/v1/chat/completions", messages=messages)
        return response.json()["choices"][0]["message"]["content"]

    taught = Session(replace(options, learning=tmp_path), time.perf_counter)
    with running(taught, before_answers=before_answers, after_answers=after_answers) as server:
        with ThreadPoolExecutor(3) as pool:
            said = [ask(prompts(4)[0]), *pool.map(ask, prompts(4)[1:])]
        with server.engine.stepping:  # not while the draft is loaded again
            assert in_use(taught) is not None
    assert said == plain
    assert told[:2] == ["before", "after"]
    assert told.count("after") >= 2
    assert len(read_answers(tmp_path)) == 4


# --- the command line


def data_of(target: Path) -> Path:
    identity = identify(target)
    assert identity is not None
    return learning_folder(Path(os.environ["SPECGEN_DATA"]), identity)


def test_commands_keep_learn_and_forget(specgen: Specgen, models: Path, folder: Path) -> None:
    target = models / "target.gguf"
    both = ("-m", target, "-md", models / "draft.gguf")

    def answer(*learn: str) -> str:
        found = specgen("run", *both, "-t", "1", "-n", "40", "--ignore-eos", *learn, "abc")
        assert found.code == 0
        said.add(found.out)
        return found.err

    said: set[str] = set()
    answer()
    assert not data_of(target).exists()
    answer("--learn")
    assert len(read_answers(data_of(target))) == 1
    few = specgen("draft", "learn", *both)
    assert few.code == 2
    assert "too few" in few.err or "needs jax" in few.err
    pytest.importorskip("jax")
    shutil.copytree(folder, data_of(target), dirs_exist_ok=True)
    learnt = specgen("draft", "learn", *both, "--json")
    assert learnt.code == 0, learnt.err
    assert '"outcome": "new"' in learnt.out
    assert "draft.gguf drafts with what it learnt from 30 answers" in answer("--learn")
    assert "learnt" not in answer()
    assert len(said) == 1
    gone = specgen("draft", "forget", "-m", target)
    assert gone.code == 0
    assert "kept answers: 41; weights learnt from them: 1; lookup texts: 1;" in gone.out
    assert not data_of(target).exists()
    assert not list(Path(os.environ["SPECGEN_CACHE"]).glob("texts/*/*"))
    nothing = specgen("draft", "forget")
    assert (nothing.code, nothing.err) == (0, "")
    assert nothing.out.startswith("deleted: kept answers: 0;")


def test_everything_is_forgotten_unless_a_target_is_named(
    specgen: Specgen, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECGEN_LEARN", "1")
    other = write_tiny_model(tmp_path / "other.gguf", CONFIG.draft(0.3))
    for target, *options in ((models / "target.gguf",), (other,), (other, "--no-learn")):
        own = ("-m", target, "-md", "ngram", "-t", "1", "-n", "20", "--ignore-eos", *options)
        assert specgen("run", *own, "abc").code == 0
    assert len(read_answers(data_of(other))) == 1
    gone = specgen("draft", "forget")
    assert "kept answers: 2; weights learnt from them: 0; lookup texts: 2;" in gone.out
    assert not list(Path(os.environ["SPECGEN_DATA"]).glob("learning/*"))
