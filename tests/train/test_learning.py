"""Drafts learn from kept answers: what is taken, what is dropped, and what ends the process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from specgen.errors import UsageError
from specgen.events import FinishedEvent
from specgen.llama import LlamaModel
from specgen.models.files import identify, learning_folder
from specgen.session.engine import Engine, generate
from specgen.session.kept_answers import (
    ANSWERS,
    KeptAnswer,
    KeptAnswers,
    Learnt,
    learnt_weights,
    read_answers,
    read_learnt,
    write_learnt,
)
from specgen.session.session import Session
from specgen.train import online_learning
from specgen.train.online_learning import NEW_ANSWERS, Learner, Lesson, learn
from specgen.train.target_text import N_COLUMNS, kept_texts
from specgen.train.training_loop import Budget
from tests.helpers import sessions
from tests.helpers.cli import Specgen
from tests.helpers.common import ROOT
from tests.helpers.heads import counting, prompts
from tests.helpers.tiny import write_respelled_model, write_with_other_scales
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


def opened(models: Path, learning: Path | None, n_tokens: int = 48) -> Session:
    choices: dict[str, Any] = {"n_tokens": n_tokens, "ignore_eos": True, "learning": learning}
    return sessions.opened(models / "target.gguf", "draft", n_draft=3, **choices)


@pytest.fixture(scope="module")
def answered(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 answers of the target."""
    folder = tmp_path_factory.mktemp("answered")
    with opened(models, folder) as loaded, Engine(loaded, n_parallel=4) as engine:
        engine.answers(prompts(40))
    assert len(read_answers(folder)) == 40
    return folder


@pytest.fixture
def folder(answered: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    (tmp_path / "learning").mkdir()
    (tmp_path / "learning" / ANSWERS).write_bytes((answered / ANSWERS).read_bytes())
    return tmp_path / "learning"


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
    target, draft = LlamaModel(models / "target.gguf"), LlamaModel(models / "respelled.gguf")
    with contextlib.closing(target), contextlib.closing(draft):
        said = b"the cat is in the else"
        tokens = target.vocabulary.tokenize(said.decode(), add_special=False, parse_special=False)
        digest = draft.vocabulary.digest()
        answer = KeptAnswer((5, 6), tuple(tokens), (7, 8, 9), digest)
        (own,) = kept_texts(target, draft, [answer])
        assert own.prompt_tokens == (7, 8, 9)
        assert b"".join(map(draft.vocabulary.token_bytes, own.answer_tokens)) == said
        other = KeptAnswer((5, 6), tuple(tokens), (7, 8, 9), "another")
        (own,) = kept_texts(target, draft, [other])
        assert own.prompt_tokens != (7, 8, 9)


# --- lessons


def lesson(
    models: Path,
    folder: Path,
    *,
    rate: float = 0.01,
    stop_after: int = 10**9,
    meanwhile: Callable[[], None] = lambda: None,
) -> Lesson | None:
    pytest.importorskip("jax")
    n_steps = 0

    def progress(done: int, _total: int) -> None:
        nonlocal n_steps
        n_steps = done
        meanwhile()

    budget = Budget(counting(), math.inf, lambda: n_steps >= stop_after, progress)
    return learn(folder, models / "target.gguf", models / "draft.gguf", budget, rate=rate)


def names(folder: Path) -> list[str]:
    """The files of what was learnt."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".gguf", ".new"))


def test_what_is_better_on_the_latest_answers_is_used(models: Path, folder: Path) -> None:
    found = lesson(models, folder)
    assert found is not None
    assert found.outcome == "new"
    assert found.agreement_new > found.agreement_as_it_came
    assert found.agreement_in_use is None
    assert "drafts with what it learnt from 30 answers" in found.text
    draft = models / "draft.gguf"
    learnt = read_learnt(folder, draft)
    assert names(folder) == [learnt.weights]
    assert (learnt.n_answers, learnt.last_number) == (30, 40)
    # The next lesson goes on from there, and what was in use goes.
    again = lesson(models, folder)
    assert again is not None
    assert again.agreement_in_use == pytest.approx(found.agreement_new)
    assert again.outcome in ("new", "kept")
    learnt = read_learnt(folder, draft)
    assert names(folder) == [learnt.weights]
    texts, accepted = [], []
    for learning in (None, folder):
        with opened(models, learning) as loaded:
            *_, finished = generate(loaded, loaded.prompts.of_text(prompts(41)[-1]))
        assert isinstance(finished, FinishedEvent)
        texts.append(finished.text)
        accepted.append(finished.n_accepted)
    assert texts[0] == texts[1]
    assert accepted[1] > accepted[0]


def test_what_is_not_better_is_dropped(models: Path, folder: Path) -> None:
    found = lesson(models, folder, rate=0.0)
    assert found is not None
    assert found.outcome == "kept"
    assert names(folder) == []
    assert learnt_weights(folder, models / "draft.gguf") is None
    assert read_learnt(folder, models / "draft.gguf").last_number == 40
    assert "learnt nothing better from 30 answers: that is dropped" in found.text


def test_what_does_worse_than_the_draft_as_it_came_goes_back(models: Path, folder: Path) -> None:
    write_tiny_model(folder / "bad.gguf", CONFIG.draft(1.5))
    write_learnt(folder, models / "draft.gguf", Learnt("bad.gguf", n_answers=9))
    found = lesson(models, folder, rate=0.0)
    assert found is not None
    assert found.outcome == "none"
    assert found.agreement_in_use is not None
    assert found.agreement_in_use < found.agreement_as_it_came
    assert names(folder) == []
    assert learnt_weights(folder, models / "draft.gguf") is None
    assert "drafts as it came again" in found.text


def test_an_interrupted_lesson_changes_nothing(models: Path, folder: Path) -> None:
    assert lesson(models, folder, stop_after=3) is None
    assert names(folder) == []
    assert read_learnt(folder, models / "draft.gguf") == Learnt()


def test_what_is_forgotten_while_it_is_learnt_is_not_kept(models: Path, folder: Path) -> None:
    def forget() -> None:
        (folder / ANSWERS).unlink(missing_ok=True)
        KeptAnswers(folder).add(KeptAnswer((1, 2), tuple(range(20))))

    with pytest.raises(UsageError, match="deleted while the draft learnt"):
        lesson(models, folder, meanwhile=forget)
    assert names(folder) == []


def test_damaged_weights_and_what_a_killed_lesson_left_end_no_lesson(
    models: Path, folder: Path
) -> None:
    (folder / "weights.gguf.abc.new").touch()
    (folder / "draft-123.gguf").touch()  # nothing says that it is in use
    (folder / f"{ANSWERS}.abc.new").touch()  # which may be in the making now
    (folder / "w.gguf").write_bytes((models / "draft.gguf").read_bytes()[:2000])
    write_learnt(folder, models / "draft.gguf", Learnt("w.gguf"))
    found = lesson(models, folder)
    assert found is not None
    assert (found.outcome, found.agreement_in_use) == ("new", None)
    learnt = read_learnt(folder, models / "draft.gguf").weights
    assert names(folder) == sorted([f"{ANSWERS}.abc.new", learnt])


def test_a_lesson_needs_answers_and_is_alone(models: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="0 answers are kept for target.gguf: too few"):
        lesson(models, folder.with_name("none"))
    from specgen.system.files import locked

    with (
        locked(folder / "learning.lock", UsageError("held")),
        pytest.raises(UsageError, match="another process learns"),
    ):
        lesson(models, folder)


# --- beside answers


def in_use(session: Session) -> Path | None:
    """The weights that the draft learnt and drafts from."""
    assert session.draft is not None
    return session.draft.learnt


def test_a_draft_is_loaded_again_between_answers_only(models: Path, tmp_path: Path) -> None:
    with opened(models, tmp_path) as loaded:
        plain = [
            event.text
            for text in prompts(3)
            for event in generate(loaded, loaded.prompts.of_text(text))
            if isinstance(event, FinishedEvent)
        ]
    with opened(models, tmp_path) as loaded, Engine(loaded) as engine:
        first = engine.insert(prompts(3)[0])
        engine.step()
        write_tiny_model(tmp_path / "w.gguf", CONFIG.draft(0.01))
        write_learnt(tmp_path, models / "draft.gguf", Learnt("w.gguf", n_answers=3))
        assert not engine.reload_draft()
        assert in_use(loaded) is None
        list(engine.run())
        assert engine.reload_draft()
        assert in_use(loaded) == tmp_path / "w.gguf"
        second = engine.insert(prompts(3)[1])
        list(engine.run())
        write_learnt(tmp_path, models / "draft.gguf", Learnt())
        assert engine.reload_draft()
        assert in_use(loaded) is None
        third = engine.insert(prompts(3)[2])
        list(engine.run())
    assert [first.text, second.text, third.text] == plain


#: What a process that learns says at its end, after it was asked.
_CHILD = """
import json, sys
sys.path.insert(0, {root!r})
asked = json.loads(sys.stdin.buffer.readline())
{does}
"""
_SAYS = """
from pathlib import Path
from types import SimpleNamespace
from specgen.session.kept_answers import Learnt, write_learnt
folder, draft = Path(asked["folder"]), Path(asked["draft"])
(folder / "w.gguf").write_bytes(Path(asked["target"]).read_bytes())
write_learnt(folder, draft, Learnt("w.gguf", last_number=10, n_answers=9))
print(json.dumps(dict(n_answers=9, n_judging=3, n_judged_tokens=99, agreement_as_it_came=0.5,
    agreement_in_use=None, agreement_new=0.6, outcome="new", n_steps=3, seconds=1.0)))
"""
_WAITS = "sys.stdin.buffer.read()"


@contextlib.contextmanager
def learning(
    models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> Iterator[tuple[Engine, Learner, list[str], Session]]:
    monkeypatch.setattr(online_learning, "check_library", lambda: None)
    code = _CHILD.format(root=str(ROOT), does=does)
    monkeypatch.setattr(online_learning, "COMMAND", (sys.executable, "-c", code))
    said: list[str] = []
    with (
        opened(models, folder) as loaded,
        Engine(loaded) as engine,
        Learner(loaded, engine, said.append) as learner,
    ):
        yield engine, learner, said, loaded


def until(happened: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
    for _ in range(3000):
        look()
        if happened():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def test_a_lesson_begins_when_there_are_enough_answers_and_its_draft_is_used(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(models, tmp_path, monkeypatch, _SAYS) as (engine, learner, said, loaded):
        for text in prompts(NEW_ANSWERS):
            learner.between_answers(begins=True)
            assert not learner.is_learning
            engine.answers([text])
        learner.between_answers()
        assert learner.is_learning
        until(lambda: bool(said), learner.between_answers)
        assert loaded.draft is not None
        assert loaded.draft.learnt == tmp_path / "w.gguf"
        assert "draft.gguf drafts with what it learnt from 9 answers from now on" in said[0]
        answer = engine.insert("abc")
        *_, finished = engine.stream(answer)
        assert isinstance(finished, FinishedEvent)
        assert finished.acceptance_rate == 1.0  # it is the target itself
        learner.between_answers()
        assert not learner.is_learning


#: What a process that learns does: it says in a file what it is told.
_NOTES = """
from pathlib import Path
from types import SimpleNamespace
while said := sys.stdin.buffer.read(1):
    with (Path(asked["folder"]) / "said").open("ab") as file:
        file.write(said)
"""


def test_a_lesson_waits_while_an_answer_is_in_the_making(
    models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(models, folder, monkeypatch, _NOTES) as (_, learner, _, _):
        for _ in range(2):
            learner.between_answers(begins=True)
            learner.between_answers(begins=True)
            learner.between_answers()
            learner.between_answers()
        said = folder / "said"
        until(lambda: said.exists() and said.read_bytes() == b"-+-+")


def test_a_lessons_clock_stands_still_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, is_read = 10.0, threading.Event()

    def clock() -> float:
        found = now_s
        is_read.set()
        return found

    reader, writer = os.pipe()
    with (
        os.fdopen(writer, "wb", buffering=0) as pipe,
        os.fdopen(reader, "rb", buffering=0) as stdin,
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
        ended: list[int] = []
        monkeypatch.setattr(os, "_exit", ended.append)
        pauses = online_learning.Pauses()
        pauses.listen()
        monkeypatch.setattr(online_learning, "time", SimpleNamespace(monotonic=clock))
        assert not pauses.wait()
        is_read.clear()
        pipe.write(online_learning.PAUSE)
        until(lambda: pauses.is_paused)
        waiting = threading.Thread(target=pauses.wait)
        waiting.start()
        assert is_read.wait(60.0)
        now_s = 15.0
        pipe.write(online_learning.GO)
        waiting.join()
        assert pauses.clock() == 10.0
        pipe.close()
        until(lambda: bool(ended))


def test_a_lesson_that_fails_ends_learning_and_nothing_else(
    models: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = "sys.exit('no memory')"
    with learning(models, folder, monkeypatch, does) as (engine, learner, said, _):
        until(lambda: bool(said), learner.between_answers)
        assert said == ["learning has ended: no memory"]
        learner.between_answers()
        assert not learner.is_learning
        assert engine.answers(["abc"])


def test_what_is_learnt_or_forgotten_elsewhere_counts_too(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(models, tmp_path, monkeypatch, _WAITS) as (engine, learner, said, loaded):
        learner.between_answers()
        assert said == []
        write_tiny_model(tmp_path / "w.gguf", CONFIG)
        write_learnt(tmp_path, models / "draft.gguf", Learnt("w.gguf"))
        learner.between_answers(begins=True)
        assert in_use(loaded) == tmp_path / "w.gguf"
        shutil.rmtree(tmp_path)
        learner.between_answers(begins=True)
        learner.between_answers()
        assert in_use(loaded) is None
        assert engine.answers(["abc"])
    assert said == [
        "draft.gguf drafts with what it learnt elsewhere from now on",
        "draft.gguf drafts as it came again: what it learnt was deleted",
    ]


def task(models: Path, folder: Path, minutes: float) -> str:
    """What the process that learns is asked for."""
    paths = {"folder": folder, "target": models / "target.gguf", "draft": models / "draft.gguf"}
    return json.dumps(paths | {"minutes": minutes}, default=str)


_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "specgen.train.online_learning"],
    stdin=subprocess.PIPE, start_new_session=True)
child.stdin.write(sys.argv[1].encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
child.wait()
"""


def test_the_process_that_learns_ends_well_while_its_input_is_open(
    models: Path, folder: Path
) -> None:
    """A thread of it waits for input, at which the interpreter aborts at its usual end."""
    pytest.importorskip("jax")
    command, pipe = online_learning.COMMAND, subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(task(models, folder, 1e-6).encode() + b"\n")
        child.stdin.flush()
        said = child.stdout.read()
        assert child.wait() == 0
    assert Lesson(**json.loads(said)).n_steps > 0


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_the_process_that_learns_ends_when_its_command_is_killed(
    models: Path, folder: Path
) -> None:
    pytest.importorskip("jax")
    command = [sys.executable, "-c", _PARENT, task(models, folder, 10.0)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)

    def is_gone() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    until(is_gone)


def test_a_servers_draft_learns_between_its_answers(models: Path, tmp_path: Path) -> None:
    """Several requests come at once; each lesson brings other weights."""
    pytest.importorskip("starlette")
    from concurrent.futures import ThreadPoolExecutor

    from tests.helpers.server import FIXED, running

    options = sessions.options_of(models / "target.gguf", "draft", drafting=FIXED, n_tokens=24)
    with Session(options, time.perf_counter) as loaded, Engine(loaded) as engine:
        plain = engine.answers(prompts(4))
    told: list[bool] = []

    def between_answers(begins: bool) -> None:
        told.append(begins)
        if not begins:
            name = f"w{len(told)}.gguf"
            write_tiny_model(tmp_path / name, CONFIG.draft(0.1 * len(told)))
            write_learnt(tmp_path, models / "draft.gguf", Learnt(name))
            assert server.engine.reload_draft()

    taught = Session(replace(options, learning=tmp_path), time.perf_counter)
    with running(taught, between_answers=between_answers) as server:

        def ask(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            response = server.post("/v1/chat/completions", messages=messages)
            content: str = response.json()["choices"][0]["message"]["content"]
            return content

        with ThreadPoolExecutor(3) as pool:
            said = [ask(prompts(4)[0]), *pool.map(ask, prompts(4)[1:])]
        with server.engine.stepping:  # not while the draft is loaded again
            assert in_use(taught) is not None
    assert said == plain
    assert told[:2] == [True, False]
    assert told.count(False) >= 2
    assert len(read_answers(tmp_path)) == 4


# --- the command line


def data_of(target: Path) -> Path:
    identity = identify(target)
    assert identity is not None
    return learning_folder(Path(os.environ["SPECGEN_DATA"]), identity)


def test_commands_keep_learn_and_forget(specgen: Specgen, models: Path, folder: Path) -> None:
    target, draft = models / "target.gguf", models / "draft.gguf"
    own = ("-m", target, "-md", draft, "-t", "1", "-n", "40", "--ignore-eos")
    plain = specgen("run", *own, "abc")
    assert plain.code == 0
    assert not data_of(target).exists()
    kept = specgen("run", *own, "--learn", "abc")
    assert (kept.code, kept.out) == (0, plain.out)
    assert len(read_answers(data_of(target))) == 1
    few = specgen("draft", "learn", "-m", target, "-md", draft)
    assert few.code == 2
    assert "too few" in few.err or "needs jax" in few.err
    pytest.importorskip("jax")
    (data_of(target) / ANSWERS).write_bytes((folder / ANSWERS).read_bytes())
    learnt = specgen("draft", "learn", "-m", target, "-md", draft, "--json")
    assert learnt.code == 0, learnt.err
    assert '"outcome": "new"' in learnt.out
    used = specgen("run", *own, "--learn", "abc")
    assert (used.code, used.out) == (0, plain.out)
    assert "draft.gguf drafts with what it learnt from 30 answers" in used.err
    without = specgen("run", *own, "abc")
    assert (without.code, without.out) == (0, plain.out)
    assert "learnt" not in without.err
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
    other = write_tiny_model(tmp_path / "other.gguf", CONFIG.draft(0.3))
    for target in (models / "target.gguf", other):
        own = ("-m", target, "-md", "ngram", "-t", "1", "-n", "20", "--ignore-eos", "--learn")
        assert specgen("run", *own, "abc").code == 0
    monkeypatch.setenv("SPECGEN_LEARN", "1")
    command = ("run", "-m", other, "-md", "ngram", "-t", "1", "-n", "20", "--ignore-eos")
    assert specgen(*command, "abc").code == 0
    assert specgen(*command, "--no-learn", "abc").code == 0
    assert len(read_answers(data_of(other))) == 2
    gone = specgen("draft", "forget")
    assert "kept answers: 3; weights learnt from them: 0; lookup texts: 2;" in gone.out
    assert not list(Path(os.environ["SPECGEN_DATA"]).glob("learning/*"))


def test_a_server_learns_across_requests_or_not_at_all(specgen: Specgen, models: Path) -> None:
    refused = specgen("serve", "-m", models / "target.gguf", "--learn")
    assert refused.code == 2
    assert "add --learn-across-requests" in refused.err
