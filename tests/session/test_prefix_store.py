"""Shared prefixes and prompt caches outlive the process and change no text. Text that was seen only
once is not stored on disk.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specgen.errors import UsageError
from specgen.events import FinishedEvent, NoticeEvent
from specgen.options import PrefixOptions, SamplerOptions
from specgen.session import prefix_store, seen_prompts
from specgen.session.engine import Engine, generate
from specgen.session.prefix_store import MIN_TOKENS, stored
from specgen.session.prompts.chat import Tools
from specgen.session.prompts.template import Message
from specgen.session.saved_text import RestoreResult, SavedText
from specgen.session.seen_prompts import BLOCK
from specgen.session.session import Session
from specgen.text.overlap import common_prefix_length
from tests.helpers.cli import Specgen, spawn
from tests.helpers.cli import ended as ended_process
from tests.helpers.common import EXACT, NOW
from tests.helpers.mtp import MtpArchitecture, write_mtp_model
from tests.helpers.sessions import answers, finished, opened, write_models, write_pairs
from tests.registry import CACHES
from tests.tiny import TinyConfig
from tests.tiny.config import CHATML_TEMPLATE

SYSTEM = "the cat is in the else for with that it be not self " * 56
CONTEXT = replace(EXACT, n_ctx=1280, n_batch=128)
MTP: tuple[MtpArchitecture, ...] = ("glm4moe", "qwen35")
QUESTIONS = ("cat and more", "self is it", "not in the end", "with that")
TOOLS: Tools = ({"type": "function", "function": {"name": "read", "parameters": {}}},)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("models"), n_ctx_train=2048)
    for name, architecture in CACHES.items():
        window = 64 if name == "sliding window" else 0
        config = TinyConfig(architecture=architecture, n_ctx_train=2048, sliding_window=window)
        chat = replace(config, chat_template=CHATML_TEMPLATE)
        write_models(folder, {name: config, f"{name} chat": chat})
    for mtp in MTP:
        write_mtp_model(folder / f"{mtp}.gguf", mtp, n_ctx_train=2048)
    return folder


@pytest.fixture(autouse=True)
def _loading_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that loading is as quick as decoding, because tiny models decode as quickly as they
    load.
    """
    monkeypatch.setattr(prefix_store, "BYTES_PER_S", np.inf)


def session_on(target: Path, cache: Path | None, kept: Any = "shared", **more: Any) -> Session:
    """A session as of another process."""
    choices = {"n_draft": 3, "n_tokens": 12, "ignore_eos": True, "context": CONTEXT, **more}
    size = choices.pop("max_bytes", None)
    prefixes = PrefixOptions(kept, size) if cache is not None else None
    drafting = {"ngrams": False}
    return opened(target, drafting=drafting, cache=cache, prefixes=prefixes, **choices)


def answered(
    target: Path, cache: Path | None, *prompts: str, n_parallel: int = 1, **choices: Any
) -> list[FinishedEvent]:
    """The answers of one process, one after the other."""
    ended = []
    with (
        session_on(target, cache, **choices) as session,
        Engine(session, n_parallel=n_parallel) as engine,
    ):
        for prompt in prompts:
            request = engine.insert(session.prompts.of_text(prompt, chat=False))
            ended.append(finished(list(engine.stream(request))))
    return ended


def asked(question: str) -> str:
    return SYSTEM + question


def talked(
    engine: Engine, session: Session, *turns: str, system: str = SYSTEM, tools: Tools = ()
) -> FinishedEvent:
    """The answer in a conversation with a system message; every other turn is the model's."""
    messages = [Message("system", system)]
    for n, text in enumerate(turns):
        messages.append(Message("assistant" if n % 2 else "user", text))
    request = engine.insert(session.prompts.of_messages(messages, now=NOW, tools=tools))
    return finished(list(engine.stream(request)))


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cache", CACHES)
def test_a_prefix_shared_by_two_prompts_is_not_decoded_again(
    models: Path, tmp_path: Path, cache: str, temperature: float, drafted: bool
) -> None:
    target = models / f"{cache}.gguf"
    choices: dict[str, Any] = {
        "draft": f"{cache} draft" if drafted else "none",
        "sampler": SamplerOptions(temperature=temperature, seed=3),
    }
    ended = [answered(target, tmp_path, asked(each), **choices)[0] for each in QUESTIONS]
    plain = [answered(target, None, asked(each), **choices)[0] for each in QUESTIONS]
    assert [each.token_ids for each in ended] == [each.token_ids for each in plain]
    n_cached = [each.n_cached_tokens for each in ended]
    assert n_cached[:2] == [0, 0]
    assert min(n_cached[2:]) >= MIN_TOKENS


@pytest.mark.parametrize("architecture", MTP)
def test_mtp_layers_draft_after_a_restored_prefix(
    models: Path, tmp_path: Path, architecture: str
) -> None:
    target = models / f"{architecture}.gguf"
    ended = [answered(target, tmp_path, asked(each), draft="mtp")[0] for each in QUESTIONS]
    plain = [answered(target, None, asked(each), draft="mtp")[0] for each in QUESTIONS]
    assert [each.token_ids for each in ended] == [each.token_ids for each in plain]
    assert ended[-1].n_cached_tokens >= MIN_TOKENS
    assert ended[-1].n_drafted > 0


@pytest.mark.parametrize("cache", CACHES)
def test_slots_load_prefixes_beside_one_another(models: Path, tmp_path: Path, cache: str) -> None:
    target, draft = models / f"{cache}.gguf", f"{cache} draft"
    for question in QUESTIONS[:2]:
        answered(target, tmp_path, asked(question), draft=draft)
    prompts = [asked(each) for each in QUESTIONS]
    with (
        session_on(target, tmp_path, draft=draft) as session,
        Engine(session, n_parallel=2) as engine,
    ):
        texts = answers(engine, [session.prompts.of_text(each, chat=False) for each in prompts])
    assert texts == [answered(target, None, each)[0].text for each in prompts]


def test_a_longer_entry_serves_a_shorter_and_an_edited_prompt(models: Path, tmp_path: Path) -> None:
    target, text = models / "attention.gguf", asked("and more")
    answered(target, tmp_path, SYSTEM, kept="all")
    n = answered(target, tmp_path, text, kept="all")[0].n_prompt_tokens
    assert len(stored(tmp_path / "prefixes")) == 1  # the longer one has all of the other
    half = len(SYSTEM) * 9 // 10
    for changed in (text[:half], text[:half] + "self" + text[half:], text + " cat" * 30):
        ended = answered(target, tmp_path, changed, kept="all")[0]
        assert min(n, ended.n_prompt_tokens) * 0.8 < ended.n_cached_tokens
        assert ended.token_ids == answered(target, None, changed)[0].token_ids
    assert answered(target, tmp_path, asked("and more"), kept="off")[0].n_cached_tokens == 0


@pytest.mark.parametrize("cache", ["sliding window", "recurrent"])
def test_a_model_that_cannot_roll_back_uses_complete_entries_only(
    models: Path, tmp_path: Path, cache: str
) -> None:
    target = models / f"{cache}.gguf"
    context = replace(CONTEXT, n_ctx=2048)
    for text in (SYSTEM * 2, SYSTEM + "self " * 40, SYSTEM + "cat"):
        ended = answered(target, tmp_path, text, kept="all", context=context)[0]
        assert ended.token_ids == answered(target, None, text, context=context)[0].token_ids
    again = answered(target, tmp_path, SYSTEM + "cat", kept="all")[0]
    assert again.n_cached_tokens >= MIN_TOKENS


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_a_turn_with_a_rewritten_history_decodes_only_what_is_new(
    models: Path, cache: str, drafted: bool
) -> None:
    target = models / f"{cache} chat.gguf"
    draft = f"{cache} draft" if drafted else "none"
    with session_on(target, None, draft=draft) as session, Engine(session) as engine:
        first = talked(engine, session, "cat and more")
        second = talked(engine, session, "cat and more", "not what it said", "self")
        third = talked(engine, session, "cat and more", "not what it said", "self", "is", "for")
    with session_on(target, None) as session, Engine(session) as engine:
        assert talked(engine, session, "cat and more").token_ids == first.token_ids
    turns = ("cat and more", "not what it said", "self")
    for ended, told in ((second, turns), (third, (*turns, "is", "for"))):
        with session_on(target, None) as session, Engine(session) as engine:
            assert talked(engine, session, *told).token_ids == ended.token_ids
    assert first.n_prompt_tokens - 20 < second.n_cached_tokens < third.n_cached_tokens


@pytest.mark.parametrize("cache", CACHES)
def test_a_conversation_goes_back_to_an_earlier_turn(models: Path, cache: str) -> None:
    target = models / f"{cache} chat.gguf"
    long = "not what it said " * 20
    with session_on(target, None) as session, Engine(session) as engine:
        first = talked(engine, session, "cat and more")
        talked(engine, session, "cat and more", long, "self")
        changed = talked(engine, session, "cat and more", "else", "self", "is", "for")
    with session_on(target, None) as session, Engine(session) as engine:
        alone = talked(engine, session, "cat and more", "else", "self", "is", "for")
    assert changed.token_ids == alone.token_ids
    assert changed.n_cached_tokens > first.n_prompt_tokens - 20


# --- what is stored


def test_neither_conversations_nor_prompts_seen_once_are_stored(
    models: Path, tmp_path: Path
) -> None:
    target = models / "attention chat.gguf"
    letter = "I am not the else that it be, with self in the for " * 4
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        secret = session.prompts.of_text(letter, chat=False).tokens
        for turns in (
            (letter,),
            (letter, "<think>it is</think> so", "and more"),
            (letter, "so", "and more", "in", "self"),  # the template drops what was thought
            (letter, "else", "with"),
        ):
            talked(engine, session, *turns)
    folder = tmp_path / "prefixes"
    assert stored(folder) == []
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        talked(engine, session, "another question")
    (entry,) = stored(folder)
    runs = {np.array(secret[n : n + 8], "<i4").tobytes() for n in range(len(secret) - 8)}
    for path in folder.iterdir():
        data = path.read_bytes()
        assert not any(run in data for run in runs), path
        assert path.stat().st_mode & 0o077 == 0
    assert folder.stat().st_mode & 0o077 == 0
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        assert talked(engine, session, "a third one").n_cached_tokens >= MIN_TOKENS
    assert stored(folder) == [entry]


def test_the_same_prompt_again_counts_from_another_process_only(
    models: Path, tmp_path: Path
) -> None:
    target = models / "attention.gguf"
    answered(target, tmp_path, SYSTEM, SYSTEM)
    assert stored(tmp_path / "prefixes") == []
    answered(target, tmp_path, SYSTEM)
    last = answered(target, tmp_path, SYSTEM)[0]
    assert last.n_cached_tokens == last.n_prompt_tokens - 1


def test_in_one_process_the_second_prompt_is_stored(models: Path, tmp_path: Path) -> None:
    target = models / "attention.gguf"
    ended = answered(target, tmp_path, *map(asked, QUESTIONS), n_parallel=2)
    plain = answered(target, None, *map(asked, QUESTIONS), n_parallel=2)
    assert [each.token_ids for each in ended] == [each.token_ids for each in plain]
    assert [each.n_cached_tokens for each in ended[2:]] == [
        each.n_cached_tokens for each in plain[2:]
    ]
    assert len(stored(tmp_path / "prefixes")) == 1
    assert answered(target, tmp_path, asked("it"))[0].n_cached_tokens >= MIN_TOKENS


def test_the_least_recently_used_goes_first(models: Path, tmp_path: Path) -> None:
    target, folder = models / "attention.gguf", tmp_path / "prefixes"
    texts = [f"{name} " + SYSTEM for name in ("cat", "self", "not")]
    answered(target, tmp_path, texts[0], kept="all")
    (first,) = stored(folder)
    room = first.stat().st_size * 5 // 2
    answered(target, tmp_path, texts[1], kept="all", max_bytes=room)
    os.utime(first, (2**31, 2**31))
    answered(target, tmp_path, texts[2], kept="all", max_bytes=room)
    assert first in stored(folder)
    assert len(stored(folder)) == 2
    answered(target, tmp_path, "for " + SYSTEM, kept="all", max_bytes=1000)
    assert len(stored(folder)) == 2  # there is no room for it, so nothing is deleted for it


@pytest.mark.parametrize("cache", CACHES)
def test_an_agents_instructions_are_stored_when_they_are_first_seen(
    models: Path, tmp_path: Path, cache: str
) -> None:
    target = models / f"{cache} chat.gguf"
    ended = []
    for question in QUESTIONS[:3]:
        with session_on(target, tmp_path) as session, Engine(session) as engine:
            ended.append(talked(engine, session, question, tools=TOOLS))
        with session_on(target, None) as session, Engine(session) as engine:
            alone = talked(engine, session, question, tools=TOOLS)
        assert ended[-1].token_ids == alone.token_ids
    assert ended[0].n_cached_tokens == 0
    assert all(each.n_cached_tokens > each.n_prompt_tokens - BLOCK for each in ended[1:])
    assert len(stored(tmp_path / "prefixes")) == 1


def test_instructions_that_differ_each_time_are_not_stored_forever(
    models: Path, tmp_path: Path
) -> None:
    target, folder = models / "attention chat.gguf", tmp_path / "prefixes"
    starts = ("cat", "self", "not", "for", "with", "be", "it", "else")
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        for start in starts:
            talked(engine, session, "more", system=f"{start} {SYSTEM}", tools=TOOLS)
    n_first = len(stored(folder))
    assert 0 < n_first < len(starts)
    # What two prompts share is still stored.
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        for start in starts:
            talked(engine, session, "more", system=f"that {start} {SYSTEM}", tools=TOOLS)
        for question in QUESTIONS[:2]:
            talked(engine, session, question, system=f"that else {SYSTEM}", tools=TOOLS)
    assert len(stored(folder)) == 2 * n_first + 1


@pytest.mark.parametrize("n_words", [40, 150, 230])
def test_all_that_two_prompts_share_is_stored(models: Path, tmp_path: Path, n_words: int) -> None:
    target = models / "attention.gguf"
    shared = SYSTEM + "self " * n_words
    prompts = [shared + question for question in ("cat and more", "not in", "be it")]
    with session_on(target, None) as session:
        tokens = [session.prompts.of_text(each, chat=False).tokens for each in prompts]
    n_shared = common_prefix_length(tokens[2], tokens[0])
    ended = [answered(target, tmp_path, each)[0] for each in prompts]
    assert ended[2].n_cached_tokens > n_shared - BLOCK


@pytest.mark.parametrize("cache", ["sliding window", "recurrent"])
def test_a_model_that_cannot_go_back_also_stores_the_shared_beginning_of_a_message(
    models: Path, tmp_path: Path, cache: str
) -> None:
    target = models / f"{cache} chat.gguf"
    document = "self and it " * 100
    ended = []
    for question in QUESTIONS[:3]:
        with session_on(target, tmp_path) as session, Engine(session) as engine:
            ended.append(talked(engine, session, document + question))
        with session_on(target, None) as session, Engine(session) as engine:
            alone = talked(engine, session, document + question)
        assert ended[-1].token_ids == alone.token_ids
    assert ended[-1].n_cached_tokens > ended[-1].n_prompt_tokens - 3 * BLOCK
    # Another message needs an entry that ends before it.
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        assert talked(engine, session, "not a document").n_cached_tokens >= MIN_TOKENS


def test_a_conversation_with_changed_turns_does_not_displace_other_prompts(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_prompts, "N_PROMPTS", 2)
    target = models / "attention chat.gguf"
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        talked(engine, session, "more", system=f"cat {SYSTEM}")
        for answer in ("is", "be", "not", "for"):
            talked(engine, session, "self is it", answer, "and more")
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        talked(engine, session, "with that", system=f"cat {SYSTEM}")
    assert len(stored(tmp_path / "prefixes")) == 1


def test_an_entry_that_is_also_in_memory_counts_as_used(models: Path, tmp_path: Path) -> None:
    target = models / "attention.gguf"
    answered(target, tmp_path, SYSTEM, kept="all")
    (entry,) = stored(tmp_path / "prefixes")
    with session_on(target, tmp_path) as session, Engine(session) as engine:
        for question in QUESTIONS[:2]:
            os.utime(entry, (1, 1))
            answers(engine, [session.prompts.of_text(asked(question), chat=False)])
            assert entry.stat().st_mtime > 1


# --- what goes wrong


@pytest.mark.parametrize("change", ["damage", "cut", "foreign", "old", "settings", "model"])
def test_entries_that_do_not_fit_are_not_used(models: Path, tmp_path: Path, change: str) -> None:
    target, context = models / "attention.gguf", CONTEXT
    answered(target, tmp_path, SYSTEM, kept="all")
    (entry,) = stored(tmp_path / "prefixes")
    data = entry.read_bytes()
    damaged = {
        "damage": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "cut": data[:-1],
        "foreign": b"\xff\xfe a text\n",
        "old": data.replace(b"specgen text", b"specgen else", 1),
    }
    if change in damaged:
        entry.write_bytes(damaged[change])
    elif change == "settings":
        context = replace(CONTEXT, cache_type_k="f16")
    else:
        target = models / "attention draft.gguf"
    ended = answered(target, tmp_path, SYSTEM, context=context)[0]
    assert ended.n_cached_tokens == 0
    assert ended.token_ids == answered(target, None, SYSTEM, context=context)[0].token_ids
    assert entry.exists() == (change not in damaged)


@pytest.mark.parametrize("problem", ["no folder", "full", "read-only", "gone", "evicted", "seen"])
def test_a_store_that_cannot_be_used_changes_nothing(
    models: Path, tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = models / "attention.gguf", tmp_path / "prefixes"
    restore = SavedText.restore

    def failing(*_: Any) -> bool:
        raise OSError(errno.ENOSPC if problem == "full" else errno.EROFS, "no room, or no right")

    def evicted(saved: SavedText, *where: Any) -> RestoreResult:
        saved.path.unlink()  # as another process might, after the search
        return restore(saved, *where)

    if problem == "no folder":
        folder.write_text("a file")
    elif problem in ("full", "read-only"):
        monkeypatch.setattr(prefix_store, "write_text", failing)
        if problem == "read-only":
            monkeypatch.setattr(seen_prompts, "replace_bytes", failing)
    elif problem == "evicted":
        monkeypatch.setattr(SavedText, "restore", evicted)
    elif problem == "seen":  # damaged, and written anew each time
        monkeypatch.setattr(seen_prompts, "MAX_BYTES", 1)
        folder.mkdir()
        (folder / "seen.jsonl").write_bytes(b'{"name": 1}\n\xff\n[]\n{"name": "torn", "ke')
    for question in QUESTIONS[:3]:
        ended = answered(target, tmp_path, asked(question))[0]
        assert ended.token_ids == answered(target, None, asked(question))[0].token_ids
        assert (ended.n_cached_tokens > 0) == (problem == "seen" and question == QUESTIONS[2])
        if problem == "gone" and folder.exists():
            shutil.rmtree(folder)
    assert bool(stored(folder)) == (problem == "seen")


def test_a_model_that_is_replaced_while_in_use_keeps_its_own_entries(
    models: Path, tmp_path: Path
) -> None:
    """What is stored belongs to the file that was loaded, and not to the one that has its name by
    then.
    """
    target, other = tmp_path / "target.gguf", tmp_path / "other.gguf"
    shutil.copy(models / "attention.gguf", target)
    shutil.copy(models / "attention draft.gguf", other)
    with session_on(target, tmp_path, kept="all") as session:
        other.replace(target)
        with Engine(session) as engine:
            answers(engine, [session.prompts.of_text(SYSTEM, chat=False)])
    assert len(stored(tmp_path / "prefixes")) == 1
    ended = answered(target, tmp_path, SYSTEM)[0]
    assert ended.n_cached_tokens == 0
    assert ended.token_ids == answered(target, None, SYSTEM)[0].token_ids


_KILLED = """
import os, signal, sys
from pathlib import Path
from specgen.session import prefix_store, saved_text
from tests.session.test_prefix_store import answered
n_left = int(sys.argv[3])
def die():
    global n_left
    n_left -= 1
    if n_left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return False
write = prefix_store.write_text
def dying(path, *values):
    done = write(path, *values[:-1], die)
    die()
    return done
prefix_store.write_text, saved_text.CHUNK = dying, 1 << 14
prefix_store.BYTES_PER_S = float("inf")
answered(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4], kept="all")
"""


@pytest.mark.parametrize("n_pieces", [0, 1, 3])
def test_a_kill_while_a_prefix_is_written_leaves_nothing_that_is_read(
    models: Path, tmp_path: Path, n_pieces: int
) -> None:
    target = models / "attention.gguf"
    killed = ended_process(str(target), str(tmp_path), str(n_pieces), SYSTEM, code=_KILLED)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "prefixes"
    (left,) = folder.iterdir()
    assert stored(folder) == []
    os.utime(left, (0, 0))
    ended = [answered(target, tmp_path, SYSTEM, kept="all")[0] for _ in range(2)]
    assert [each.n_cached_tokens > 0 for each in ended] == [False, True]
    assert not left.exists()


_ASKING = """
import sys
from pathlib import Path
from specgen.session import prefix_store
from tests.session.test_prefix_store import answered, asked
prefix_store.BYTES_PER_S = float("inf")
for n in range(8):
    text, target = asked(f"{sys.argv[3]} {n}"), Path(sys.argv[1])
    ended = answered(target, Path(sys.argv[2]), text)[0]
    assert ended.token_ids == answered(target, None, text)[0].token_ids
print(ended.n_cached_tokens)
"""


def test_two_processes_store_and_load_at_once(models: Path, tmp_path: Path) -> None:
    target = models / "attention.gguf"
    with (
        spawn(target, tmp_path, "cat", code=_ASKING) as one,
        spawn(target, tmp_path, "self", code=_ASKING) as other,
    ):
        said = [each.communicate(timeout=120) for each in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], said
    assert min(int(out) for out, _ in said) >= MIN_TOKENS


def test_the_command_line_shows_and_clears_the_store(models: Path, specgen: Specgen) -> None:
    command = ("run", "-m", models / "attention.gguf", "--draft", "none", "--raw", "-n", "4", "-v")
    first = specgen(*command, "--prefix-store", "all", SYSTEM)
    assert "stored a prefix" in first.err
    second = specgen(*command, SYSTEM)
    assert "tokens were loaded" in second.err
    assert first.out == second.out
    assert "prompt prefixes" in specgen("models", "list").out
    assert specgen("models", "clear").code == 0
    assert "prompt prefixes" not in specgen("models", "list").out
    wrong = specgen(*command, "--prefix-store-size", "many", SYSTEM)
    assert wrong.code == 2
    assert "'many' is not a size: give one like 500M or 20G" in wrong.err


# --- the file that the user names: the text that a context held when a process ended

PROMPT = "the cat is in the else for with that it be not self " * 4
OTHER = "was made with another model or other settings: it will be replaced"


def kept_in(file: Path, target: Path, **choices: Any) -> tuple[FinishedEvent, list[str]]:
    """The answer of a new session with this file, and its notices."""
    with session_on(target, None, prompt_cache=file, **choices) as session:
        events = list(generate(session, session.prompts.of_text(PROMPT, chat=False)))
    return finished(events), [event.message for event in events if isinstance(event, NoticeEvent)]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_from_the_store_gives_the_same_text(
    models: Path, tmp_path: Path, cache: str, temperature: float, drafted: bool
) -> None:
    target, file = models / f"{cache}.gguf", tmp_path / "kept"
    choices: dict[str, Any] = {
        "draft": f"{cache} draft" if drafted else "none",
        "sampler": SamplerOptions(temperature=temperature, seed=3),
    }
    expected = answered(target, None, PROMPT, **choices)[0]
    first, notices = kept_in(file, target, **choices)
    second = kept_in(file, target, **choices)[0]
    assert expected.token_ids == first.token_ids == second.token_ids
    if notices:
        assert "recurrent state" in notices[0]
        assert not file.exists()
    else:
        assert first.n_cached_tokens == 0
        assert second.n_cached_tokens == second.n_prompt_tokens - 1


@pytest.mark.parametrize("change", ["model", "damage"])
def test_entries_that_do_not_fit_are_replaced(models: Path, tmp_path: Path, change: str) -> None:
    target, file = models / "attention.gguf", tmp_path / "kept"
    kept_in(file, target)
    if change == "model":
        target = models / "attention draft.gguf"
    else:
        file.write_bytes(file.read_bytes()[:-1])
    last, notices = kept_in(file, target)
    assert last.n_cached_tokens == 0
    assert last.token_ids == answered(target, None, PROMPT)[0].token_ids
    why = OTHER if change == "model" else "is damaged: it will be replaced"
    assert notices == [f"{file} {why}"]
    assert kept_in(file, target)[0].n_cached_tokens > 0


@pytest.mark.parametrize("content", [b"a text\n", b'{"format": "another"}\n', b"\xff\xfe"])
def test_a_file_of_another_kind_is_refused_and_stays(
    models: Path, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "mine"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="this file is not a prompt cache"):
        kept_in(file, models / "attention.gguf")
    assert file.read_bytes() == content


def test_a_device_is_refused_before_anything_is_answered(models: Path, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.symlink_to(os.devnull)
    with pytest.raises(UsageError, match="this file is not a prompt cache"):
        kept_in(device, models / "attention.gguf")
    assert device.is_symlink()


def test_the_command_line_keeps_a_prompt(models: Path, tmp_path: Path, specgen: Specgen) -> None:
    file, target = tmp_path / "kept", models / "attention.gguf"
    command = ("run", "-m", target, "--draft", "none", "--raw", "-n", "8", "--prompt-cache", file)
    first = specgen(*command, "--json", PROMPT)
    second = specgen(*command, "--json", PROMPT)
    assert first.code == second.code == 0
    assert '"n_cached_tokens": 0' in first.out
    assert '"n_cached_tokens": 0' not in second.out
    missing = tmp_path / "no folder" / "kept"
    refused = specgen(*command[:-1], missing, PROMPT)
    assert refused.out == ""
    assert "there is no folder" in refused.err
