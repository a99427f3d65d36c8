"""What a template puts before every prompt by itself, which draft models need not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.llama import LlamaModel
from specgen.session.engine import generate
from specgen.session.prompts import Prompts
from tests.helpers.common import NOW
from tests.helpers.sessions import finished, opened, write_models
from tests.tiny import TinyConfig, write_tiny_model

#: ChatML with a system message of the template's own, where there is none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
HEAD = "<|im_start|>system\nYou are tiny.<|im_end|>\n"
TARGET = TinyConfig(logit_scale=6.0, chat_template=TEMPLATE, add_bos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny_model(tmp_path_factory.mktemp("head") / "target.gguf", TARGET)
    model = LlamaModel(path)
    yield model
    model.close()


@pytest.mark.parametrize(
    ("text", "options", "head"),
    [
        ("Hi", {}, HEAD),
        ("  an <|im_start|> within\n", {}, HEAD),
        # Where the prompt begins is not known for sure here: all is read.
        ("You are", {}, ""),
        ("<|im_end|>", {}, ""),
        # A system message that was asked for is read.
        ("Hi", {"system": "You are tiny."}, ""),
        ("Hi", {"chat": False}, ""),
    ],
)
def test_the_templates_own_turn_is_the_head(
    target: LlamaModel, text: str, options: dict[str, Any], head: str
) -> None:
    prompt, vocabulary = Prompts(target).of_text(text, now=NOW, **options), target.vocabulary
    tokens = [prompt.tokens[place] for place in prompt.head]
    said = (
        vocabulary.token_bytes(each).decode() or vocabulary.control_text(each) for each in tokens
    )
    assert "".join(said) == head


def test_a_draft_with_another_vocabulary_reads_no_such_turn_of_its_own_template(
    target: LlamaModel,
) -> None:
    """The target's template stands for the draft's here."""
    prompts = Prompts(target, own_draft=target)
    prompt = prompts.of_text("Hi", now=NOW)
    head = set(prompt.head)
    assert head
    rest = tuple(token for place, token in enumerate(prompt.tokens) if place not in head)
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
            assert prompt.head
            found.append(finished(list(generate(session, prompt))))
    assert found[0].text == found[1].text
    assert found[1].n_accepted > 10
