"""The prompts of draft models: without the turn that a template adds by default, and in their own
template if they have another vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import PairError
from specgen.events import FinishedEvent
from specgen.llama import LlamaModel
from specgen.session.engine import generate
from specgen.session.prompts import Prompts
from tests.helpers.common import NOW
from tests.helpers.sessions import answered, finished, folder_with, opened, write_models
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

#: ChatML with a system message of the template's own, where there is none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "<|im_start|>assistant\n"
)
SKIPPED = "<|im_start|>system\nYou are tiny.<|im_end|>\n"
TARGET = TinyConfig(logit_scale=6.0, chat_template=TEMPLATE, add_bos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny_model(tmp_path_factory.mktemp("skipped") / "target.gguf", TARGET)
    model = LlamaModel(path)
    yield model
    model.close()


@pytest.mark.parametrize(
    ("text", "options", "skipped"),
    [
        ("Hi", {}, SKIPPED),
        ("  an <|im_start|> within\n", {}, SKIPPED),
        # Where the prompt begins is not known for sure here: all is read.
        ("You are", {}, ""),
        ("<|im_end|>", {}, ""),
        # A system message that was asked for is read.
        ("Hi", {"system": "You are tiny."}, ""),
        ("Hi", {"chat": False}, ""),
    ],
)
def test_the_templates_own_turn_is_skipped(
    target: LlamaModel, text: str, options: dict[str, Any], skipped: str
) -> None:
    prompt, vocabulary = Prompts(target).of_text(text, now=NOW, **options), target.vocabulary
    tokens = [prompt.tokens[place] for place in prompt.skipped_prefix]
    said = (
        vocabulary.token_bytes(each).decode() or vocabulary.control_text(each) for each in tokens
    )
    assert "".join(said) == skipped


def test_a_draft_with_another_vocabulary_skips_the_default_turn_of_its_own_template(
    target: LlamaModel,
) -> None:
    """The target's template is used as the draft's here."""
    prompts = Prompts(target, translated_draft=target)
    prompt = prompts.of_text("Hi", now=NOW)
    skipped = set(prompt.skipped_prefix)
    assert skipped
    rest = tuple(token for place, token in enumerate(prompt.tokens) if place not in skipped)
    assert prompt.draft_tokens == rest
    asked = prompts.of_text("Hi", now=NOW, system="You are tiny.")
    assert asked.draft_tokens == asked.tokens


def test_a_draft_does_not_read_it_and_the_text_is_the_same(tmp_path: Path) -> None:
    write_models(tmp_path, {"target": TARGET, "draft": TARGET.draft(0.02)})
    found: list[FinishedEvent] = []
    for draft in ("none", "draft"):
        choices: dict[str, Any] = {"drafting": {"ngrams": False}, "ignore_eos": True}
        with opened(tmp_path / "target.gguf", draft, **choices) as session:
            prompt = session.prompts.of_text("Hi", now=NOW)
            assert prompt.skipped_prefix
            found.append(finished(list(generate(session, prompt))))
    assert found[0].text == found[1].text
    assert found[1].n_accepted > 10


# --- drafts with another vocabulary

#: A template that takes no system message, and writes turns in a way of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
)
PLAIN = TinyConfig(logit_scale=6.0, unprintable_scale=0.3)
OTHER = replace(PLAIN, tokenizer="spm", seed=3)
models = folder_with(
    target=replace(PLAIN, chat_template=CHATML_TEMPLATE),
    draft=OTHER,
    **{
        "bpe draft": PLAIN.draft(0.02),
        "chat draft": replace(OTHER, chat_template=PLAIN_TEMPLATE),
        "broken template": replace(OTHER, chat_template="{{ raise_exception('never') }}"),
    },
)


@pytest.mark.parametrize(
    ("draft", "system", "expected"),
    [
        ("chat draft", None, "<s> user: Hi\n"),
        # The template takes no system message: it is at the skipped of the first turn.
        ("chat draft", "Be brief.", "<s> user: Be brief.\n\nHi\n"),
        # Without a template that works there are paragraphs.
        ("draft", None, "<s> Hi\n\n"),
        ("broken template", "Be brief.", "<s> Be brief.\n\nHi\n\n"),
    ],
)
def test_a_conversation_is_given_to_the_draft_in_its_own_template(
    models: Path, draft: str, system: str | None, expected: str
) -> None:
    with opened(models / "target.gguf", draft) as session:
        prompt = session.prompts.of_text("Hi", now=NOW, system=system)
        assert prompt.draft_tokens is not None
        assert session.translated_draft is not None
        vocabulary = session.translated_draft.vocabulary
        said = [
            vocabulary.token_bytes(token) or vocabulary.control_text(token).encode()
            for token in prompt.draft_tokens
        ]
        # Text that is continued is translated.
        assert session.prompts.of_text("Hi", chat=False).draft_tokens is None
    assert b"".join(said).decode() == expected
    assert prompt.text.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")


def test_a_draft_with_the_targets_vocabulary_reads_the_targets_prompt(models: Path) -> None:
    with opened(models / "target.gguf", "bpe draft", drafting={"translate": "off"}) as session:
        assert session.prompts.of_text("Hi", now=NOW).draft_tokens is None
    with pytest.raises(PairError):
        opened(models / "target.gguf", "draft", drafting={"translate": "off"})


@pytest.mark.parametrize(("target", "draft"), [("target", "draft"), ("draft", "target")])
def test_a_text_of_any_script_is_as_without_a_draft(models: Path, target: str, draft: str) -> None:
    """Byte-level BPE and SentencePiece, through llama.cpp."""
    for text in (
        "你好,世界。你好,世界。\n",
        "مرحبا بالعالم، 😀🎉😀 é",
        "\tif x:\n\t\treturn\n\n    a<|im_end|>\nb",
    ):
        found = []
        for name in ("none", draft):
            with opened(models / f"{target}.gguf", name) as session:
                found.append(answered(session, text))
        plain, fast = found
        assert (fast.token_ids, fast.text) == (plain.token_ids, plain.text)
        assert fast.n_drafted > 0
