"""A draft model with another vocabulary, through llama.cpp: byte-level BPE and SentencePiece."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import PairError
from specgen.events import Event, FinishedEvent, NoticeEvent, PromptEvent
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.helpers import sessions
from tests.helpers.common import NOW
from tests.helpers.sessions import folder_with
from tests.tiny import CHATML_TEMPLATE, TinyConfig

TARGET = TinyConfig(logit_scale=6.0, unprintable_scale=0.3)
DRAFT = replace(TARGET, tokenizer="spm", seed=3)
#: A template that takes no system message, and writes turns in a way of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
)
TEXTS = {
    "English": "def add(a, b): return a + b # the sum is the sum is",
    "Chinese": "你好,世界。你好,世界。\n",
    "Arabic": "مرحبا بالعالم، مرحبا",
    "emoji": "😀🎉😀 é 👩\u200d👩\u200d👧 the",
    "tabs": "\tif x:\n\t\treturn\n\n    not\t",
    "control tokens": "a<|im_end|>\nb<|im_start|>the cat",
}


CHAT_DRAFT = replace(DRAFT, chat_template=PLAIN_TEMPLATE)
BROKEN = replace(DRAFT, chat_template="{{ raise_exception('never') }}")
models = folder_with(
    target=TARGET,
    draft=DRAFT,
    chat=replace(TARGET, chat_template=CHATML_TEMPLATE),
    **{"bpe draft": TARGET.draft(0.02), "chat draft": CHAT_DRAFT, "broken template": BROKEN},
)


def opened(
    models: Path, target: str = "target", draft: str = "draft", translate: str = "auto", **more: Any
) -> Session:
    choices = {"n_tokens": 32, "drafting": {"translate": translate}, **more}
    return sessions.opened(models / f"{target}.gguf", draft, **choices)


def run(session: Session, text: str = TEXTS["English"]) -> tuple[PromptEvent, FinishedEvent]:
    with session:
        return outcome(list(generate(session, session.prompts.of_text(text, chat=False))))


def outcome(events: list[Event]) -> tuple[PromptEvent, FinishedEvent]:
    assert isinstance(events[0], PromptEvent)
    assert not [event for event in events if isinstance(event, NoticeEvent) and event.detail]
    return events[0], sessions.finished(events)


@functools.cache
def plain(models: Path, target: str, text: str, **changes: Any) -> FinishedEvent:
    return run(opened(models, target, "none", **changes), text)[1]


# --- what opens


def test_the_other_vocabulary_may_be_refused(models: Path) -> None:
    with pytest.raises(PairError):
        opened(models, translate="off")
    with opened(models, draft="bpe draft", translate="off") as loaded:
        assert loaded.draft_name == "bpe draft.gguf"


# --- greedy text


@pytest.mark.parametrize("name", TEXTS)
def test_greedy_text_equals_plain_text(models: Path, name: str) -> None:
    text = TEXTS[name]
    for target, draft in (("target", "draft"), ("draft", "target")):
        for n_draft in (1, 3, 8, 16):
            prompt, fast = run(opened(models, target, draft, n_draft=n_draft), text)
            expected = plain(models, target, text)
            assert prompt.translated
            assert fast.token_ids == expected.token_ids
            assert fast.text == expected.text
            assert fast.finish_reason == expected.finish_reason
            assert fast.n_drafted > 0


# --- what the draft is told


@pytest.mark.parametrize(
    ("draft", "system", "expected"),
    [
        ("chat draft", None, "<s> user: Hi\n"),
        # The template takes no system message: it is at the head of the first turn.
        ("chat draft", "Be brief.", "<s> user: Be brief.\n\nHi\n"),
        # Without a template that works there are paragraphs.
        ("draft", None, "<s> Hi\n\n"),
        ("broken template", "Be brief.", "<s> Be brief.\n\nHi\n\n"),
    ],
)
def test_a_conversation_is_told_in_the_drafts_own_template(
    models: Path, draft: str, system: str | None, expected: str
) -> None:
    with opened(models, "chat", draft) as loaded:
        prompt = loaded.prompts.of_text("Hi", now=NOW, system=system)
        assert prompt.draft_tokens is not None
        assert loaded.own_vocabulary is not None
        vocabulary = loaded.own_vocabulary.vocabulary
        said = [
            vocabulary.token_bytes(token) or vocabulary.control_text(token).encode()
            for token in prompt.draft_tokens
        ]
    assert b"".join(said).decode() == expected
    assert prompt.text.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_text_that_is_continued_is_translated(models: Path) -> None:
    with opened(models, "chat", "chat draft") as loaded:
        assert loaded.prompts.of_text("Hi", chat=False).draft_tokens is None
    with opened(models, "chat", "bpe draft") as loaded:
        assert loaded.prompts.of_text("Hi", now=NOW).draft_tokens is None
