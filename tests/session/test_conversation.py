"""Conversations: their changes, their size, the file that stores them, and thoughts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.errors import PromptError
from specgen.session.conversation import (
    Chat,
    Conversation,
    Turn,
    read_conversation,
    save_conversation,
)
from specgen.session.engine import Engine
from specgen.session.prompts.thoughts import ThoughtReader, split_thought
from tests.helpers.common import NOW
from tests.helpers.sessions import opened


def test_a_conversation_is_continued_and_private(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    made = Conversation("s", "text", (Turn("a", "é\n"), Turn("b")))
    save_conversation(file, Conversation())
    save_conversation(file, made)
    assert read_conversation(file) == made
    assert list(tmp_path.iterdir()) == [file]
    if os.name != "nt":
        assert file.stat().st_mode & 0o077 == 0
        device = tmp_path / "device"
        device.symlink_to(os.devnull)
        save_conversation(device, made)
        link = tmp_path / "link"
        link.symlink_to(file)
        save_conversation(link, Conversation())
        assert device.is_symlink()
        assert link.is_symlink()
        assert read_conversation(file) == Conversation()
    assert made.asking("c").turns == (Turn("a", "é\n"), Turn("c"))


@pytest.mark.parametrize(
    "damage", [b"", b"3", b"[" * 9000, b'{"turns": [{"question": 1}]}', b'{"change": "x"}', b"\xff"]
)
def test_a_file_that_is_not_a_conversation_is_reported_and_left_alone(
    tmp_path: Path, damage: bytes
) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(damage)
    with pytest.raises(PromptError, match="not a conversation"):
        read_conversation(file)
    assert file.read_bytes() == damage


_THOUGHTS = [
    "[THINK]why < not[/THINK]so < it",
    "<seed:think>why < not</seed:think>\nso < it",
    "<|channel>thought\nwhy < not<channel|>so < it",
    "<|START_THINKING|>why < not<|END_THINKING|><|START_RESPONSE|>so < it<|END_RESPONSE|>",
    "<|START_RESPONSE|>so < it<|END_RESPONSE|>",
    (
        "<|channel|>analysis<|message|>why < not<|end|>"
        "<|start|>assistant<|channel|>final<|message|>so < it"
    ),
    "<|channel|>final<|message|>so < it",
    (
        "<|channel|>analysis<|message|>why < not<|end|>"
        "<|channel|>final <|constrain|>json<|message|>so < it"
    ),
    "<|channel>thought\nwhy < not<channel|>so < it<|channel>thought\n<channel|><channel|>",
    "<|open|>think<|sep|>why < not<|open|>response<|sep|>so < it<|close|>response<|sep|>",  # no end
    "so < it",
]
#: Texts that may become a mark with any name, the last of which does not.
_NAMED_MARKS = [
    "<|eom|>to=to=self<|message|>",
    "<|start|>assistant to=user<|message|>so to=be=to=self<|message|>",
    "<|eom|>to=be < it",
]


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

    @pytest.mark.parametrize("text", _NAMED_MARKS)
    def test_a_mark_with_a_name_is_found_however_the_text_is_cut(self, text: str) -> None:
        whole = ThoughtReader.read(text)
        for end in range(1, len(text)):
            reader = ThoughtReader()
            parts = [reader.feed(text[:end]), reader.feed(text[end:]), reader.finish()]
            assert tuple(map("".join, zip(*parts, strict=True))) == whole, text[:end]

    def test_a_thought_that_the_template_begins(self) -> None:
        assert ThoughtReader("<|assistant|>\n<think>\n").is_open
        assert not ThoughtReader("<think></think>").is_open
        assert split_thought("x<think>", " why \n</think>so") == ("why", "so")
        assert split_thought("x", "so") == ("", "so")
        assert split_thought("x", "<think>why") == ("why", "")

    @pytest.mark.parametrize("text", _THOUGHTS)
    def test_each_family_has_its_own_marks(self, text: str) -> None:
        for size in (1, 3, 1000):
            reader, found = ThoughtReader(), ["", ""]
            pieces = [text[n : n + size] for n in range(0, len(text), size)]
            for thought, answer in [*map(reader.feed, pieces), reader.finish()]:
                found = [found[0] + thought, found[1] + answer]
            assert [each.strip() for each in found] == [
                "why < not" if "why" in text else "",
                "so < it",
            ]


@pytest.mark.parametrize("draft", ["draft", "respelled"])
def test_neither_target_nor_draft_decodes_earlier_turns_again(
    chat_models: Path, draft: str
) -> None:
    asked = opened(chat_models / "target.gguf", draft, drafting={"ngram_min": 1})
    with asked as loaded, Engine(loaded, n_ctx=2048) as engine:
        talk = Chat(loaded, engine, Conversation(), now=NOW)
        (backend,) = engine.draft_caches
        for turn in range(6):
            n_rows = backend.n_decoded_rows
            list(talk.ask(f"number {turn} is the cat"))
            finished, n_message = talk.answers[-1], 40  # with its template's marks
            # The last answer may be spelled in other tokens when it is read in the template.
            assert finished.n_prompt_tokens - finished.n_cached_tokens <= 40 + n_message
            # A draft reads what was said, and decodes what it proposes.
            assert backend.n_decoded_rows - n_rows <= 2 * (40 + n_message)
        assert talk.answers[-1].n_prompt_tokens > 300
