"""Conversations: their changes, the room that they take, the file that keeps them, and thoughts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.errors import OutputError, PromptError
from specgen.options import DraftOptions, GenerationOptions, SessionOptions
from specgen.serve.chat import (
    Change,
    Chat,
    ChatLog,
    Conversation,
    Turn,
    read_conversation,
)
from specgen.session.engine import Engine
from specgen.session.prompts.template import ThoughtReader, is_thinking, thought_of
from specgen.session.session import Session
from specgen.system.json_lines import to_line
from tests.helpers.common import NOW
from tests.helpers.tiny import write_respelled_model
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model


def conversation(*changes: Change) -> Conversation:
    made = Conversation()
    for change in changes:
        made.apply(change)
    return made


def said(*texts: str) -> list[Change]:
    """Questions and answers by turns."""
    return [Change("question" if n % 2 == 0 else "answer", text) for n, text in enumerate(texts)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "chats" / "a.jsonl"


def keep(file: Path, *changes: Change) -> None:
    with ChatLog.opened(file) as (opened, made, _):
        for change in changes:
            made.apply(change)
            opened.append(change)


class TestLog:
    def test_a_conversation_goes_on(self, file: Path) -> None:
        keep(file, Change("system", "s"), *said("a", "é\n\ud800"))
        keep(file, *said("c"), Change("undo"), *said("d", "e"))
        with ChatLog.opened(file) as (_, made, is_torn):
            assert made == conversation(Change("system", "s"), *said("a", "é\n\ud800", "d", "e"))
            assert not is_torn
        if os.name != "nt":
            assert file.stat().st_mode & 0o077 == 0

    def test_cut_anywhere_whole_lines_stay(self, file: Path) -> None:
        lines = [to_line(change.line) for change in said("a", "é", "c")]
        whole = b"".join(lines)
        ends = [len(b"".join(lines[:n])) for n in range(1, 4)]
        file.parent.mkdir()
        for n in range(len(whole) + 1):
            file.write_bytes(whole[:n])
            n_whole = sum(end - 1 <= n for end in ends)
            with ChatLog.opened(file) as (opened, made, is_torn):
                assert made.changes() == tuple(said("a", "é", "c")[:n_whole])
                assert is_torn == (n not in (0, *ends, *(end - 1 for end in ends)))
                opened.append(Change("system", "x"))
            assert read_conversation(file).system == "x"
            assert file.read_bytes().count(b"\n") == n_whole + 1

    @pytest.mark.parametrize(
        "damage", [b"3", b"{}", b'{"change": "no"}', b"\xff", b'{"change": "answer"}']
    )
    def test_damage_is_told_with_its_line(self, file: Path, damage: bytes) -> None:
        keep(file, *said("a", "b"))
        before = file.read_bytes()
        file.write_bytes(before + damage + b"\n" + before)
        with pytest.raises(PromptError, match="line 3 is damaged"), ChatLog.opened(file):
            pass
        assert file.read_bytes() == before + damage + b"\n" + before

    def test_what_a_full_disk_refuses_is_written_later(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with ChatLog.opened(file) as (opened, _, _):
            opened.append(said("a")[0])
            with monkeypatch.context() as patch:

                def full(*_arguments: object) -> int:
                    raise OSError(28, "No space left on device")

                patch.setattr("specgen.system.json_lines.os.write", full)
                with pytest.raises(OutputError, match="No space left"):
                    opened.append(Change("answer", "b"))
            opened.append(Change("question", "c"))
        assert read_conversation(file).turns == (Turn("a", "b"), Turn("c"))


class TestThoughts:
    @given(
        st.lists(st.integers(1, 9)),
        st.sampled_from(["", "<think>why</think>", " \n<think>a<b</think>\n\n"]),
    )
    def test_the_pieces_do_not_matter(self, cuts: list[int], thought: str) -> None:
        text = f"{thought}the answer </think> is <think>"
        reader, place = ThoughtReader(), 0
        found = ["", ""]
        for n in [*cuts, len(text)]:
            for index, part in enumerate(reader.feed(text[place : place + n])):
                found[index] += part
            place += n
        for index, part in enumerate(reader.finish()):
            found[index] += part
        inner = thought.strip().removeprefix("<think>").removesuffix("</think>")
        assert found == [inner, "the answer </think> is <think>"]

    def test_a_thought_that_the_template_begins(self) -> None:
        assert is_thinking("<|assistant|>\n<think>\n")
        assert not is_thinking("<think></think>")
        assert thought_of("x<think>", " why \n</think>so") == "why"
        assert thought_of("x", "so") == ""
        assert thought_of("x", "<think>why") == "why"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a template, a draft with its vocabulary, and one with another."""
    folder = tmp_path_factory.mktemp("talk")
    config = TinyConfig(logit_scale=2.0, unprintable_scale=0.0, chat_template=CHATML_TEMPLATE)
    write_tiny_model(folder / "target.gguf", config)
    write_tiny_model(folder / "draft.gguf", config.draft(0.05))
    write_respelled_model(folder / "respelled.gguf", config.draft(0.05))
    return folder


@pytest.mark.parametrize("draft", ["draft", "respelled"])
def test_neither_target_nor_draft_reads_again_what_was_said(models: Path, draft: str) -> None:
    options = SessionOptions(
        models / "target.gguf",
        models / f"{draft}.gguf",
        generation=GenerationOptions(max_tokens=40),
        drafting=DraftOptions(policy="fixed", max_tokens=4, ngram_min=1),
    )
    with Session(options, time.perf_counter) as loaded, Engine(loaded, n_ctx=2048) as engine:
        talk = Chat(loaded, engine, Conversation(), now=NOW)
        (backend,) = engine.drafts
        for turn in range(6):
            n_rows = backend.n_decoded_rows
            list(talk.ask(f"number {turn} is the cat"))
            assert talk.finished is not None
            n_prompt, n_message = talk.finished.n_prompt_tokens, 40  # with its template's marks
            # The last answer may be spelled in other tokens when it is read in the template.
            assert n_prompt - talk.finished.n_cached_tokens <= 40 + n_message
            # A draft reads what was said, and decodes what it proposes.
            assert backend.n_decoded_rows - n_rows <= 2 * (40 + n_message)
        assert talk.finished is not None
        assert talk.finished.n_prompt_tokens > 300
