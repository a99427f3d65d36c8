"""What a template puts before every prompt by itself, which draft models need not read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import Event, FinishedEvent
from specgen.llama import LlamaModel
from specgen.method.policy import FixedPolicy
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.session.answer_loop import AnswerLoop
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import generate
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from tests.helpers.common import NOW
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

#: ChatML with a system message of the template's own, where there is none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
HEAD = "<|im_start|>system\nYou are tiny.<|im_end|>\n"
TARGET = TinyConfig(logit_scale=6.0, chat_template=TEMPLATE, add_bos=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    bare = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    configs = {
        "target": TARGET,
        "draft": replace(TARGET.draft(0.02), chat_template=None),
        "bos": replace(TARGET, add_bos=True),
        "bare": replace(TARGET, chat_template=bare),
        "no turns": replace(TARGET, chat_template="You are tiny. {{ messages[0].content }}"),
        "spm": replace(TARGET.draft(0.02), tokenizer="spm", n_vocab=None),
    }
    for name, config in configs.items():
        write_tiny_model(folder / f"{name}.gguf", config)
    return folder


def opened(
    models: Path, target: str = "target", draft: str = "draft", **changes: object
) -> Session:
    context = ContextOptions(n_threads=1, flash_attention="off")
    drafting = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0, ngrams=False)
    options = SessionOptions(
        target=models / f"{target}.gguf",
        draft="none" if draft == "none" else models / f"{draft}.gguf",
        drafting=drafting,
        generation=GenerationOptions(max_tokens=40, ignore_eos=True),
        target_context=context,
        draft_context=context,
    )
    return Session(dataclasses.replace(options, **changes), time.perf_counter)  # type: ignore[arg-type]


def said(model: LlamaModel, tokens: Sequence[int]) -> str:
    vocabulary = model.vocabulary
    return "".join(
        vocabulary.token_bytes(token).decode() or vocabulary.control_text(token) for token in tokens
    )


@pytest.mark.parametrize(
    ("target", "text", "options", "head"),
    [
        ("target", "Hi", {}, HEAD),
        ("target", "  an <|im_start|> within\n", {}, HEAD),
        ("bos", "Hi", {}, HEAD),  # the beginning of text is not of the head
        # Where the prompt begins is not known for sure here: all is read.
        ("target", "You are", {}, ""),
        ("target", "<|im_end|>", {}, ""),
        # These have no such turn.
        ("bare", "Hi", {}, ""),
        ("no turns", "Hi", {}, ""),
        ("draft", "Hi", {}, ""),
        # A system message that was asked for is read.
        ("target", "Hi", {"system": "You are tiny."}, ""),
        ("target", "Hi", {"chat": False}, ""),
    ],
)
def test_the_templates_own_turn_is_the_head(
    models: Path, target: str, text: str, options: dict[str, Any], head: str
) -> None:
    with opened(models, target, "none") as loaded:
        prompt = loaded.prompts.of_text(text, now=NOW, **options)
        assert said(loaded.target, [prompt.tokens[place] for place in prompt.head]) == head
        rest = prompt.without_head()
        assert not rest.head
        whole = said(loaded.target, prompt.tokens)
        assert said(loaded.target, rest.tokens) == (whole.replace(head, "", 1) if head else whole)


# --- a drafter that does not read it


def answered(session: Session, prompt: Prompt) -> tuple[tuple[int, ...], list[int]]:
    """An answer's tokens, and how many tokens the draft models' caches hold at its end."""
    with (
        session,
        session.contexts(256) as (target, drafts),
    ):
        loop = AnswerLoop(target, time.perf_counter)
        generation = DrafterFactory(session).sequence(prompt, 256, drafts, seed=1)
        loop.start(generation)
        while not generation.is_finished:
            loop.round([generation])
        n_cached = [model.length(0) for model in drafts]
        last = loop.finish(generation, estimate_gain=False)[-1]
        assert isinstance(last, FinishedEvent)
        assert not drafts or last.n_drafted
        return tuple(generation.answer), n_cached


@pytest.mark.parametrize(("tree", "temperature"), [("off", 1.0), ("2x2", 0.0)])
def test_answers_are_the_same_and_the_head_is_not_read(
    models: Path, tree: str, temperature: float
) -> None:
    sampler = SamplerOptions(temperature=temperature, seed=1)
    drafting = DraftOptions(
        policy="fixed",
        max_tokens=4,
        p_min=0.0,
        ngrams=False,
        tree=parse_tree(tree),
        verifier="match",
    )
    loaded = opened(models, sampler=sampler, drafting=drafting)
    prompt = loaded.prompts.of_text("the sum of", now=NOW)
    fast, [n_cached] = answered(loaded, prompt)
    loaded = opened(models, sampler=sampler, drafting=drafting)
    whole, [n_cached_whole] = answered(loaded, replace(prompt, head=range(0)))
    plain, _ = answered(opened(models, draft="none", sampler=sampler), prompt)
    assert fast == whole == plain
    # The last round's draft has up to four tokens.
    n_all = len(prompt.tokens) + len(plain)
    assert abs(n_cached_whole - n_all) <= 5
    assert abs(n_cached + len(prompt.head) - n_all) <= 5
    assert len(prompt.head) > 10


def test_a_drafts_own_draft_reads_what_the_draft_does(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is left out once, not once for each stage."""
    always = FixedPolicy(DraftOptions(policy="fixed", max_tokens=2, p_min=0.0))
    monkeypatch.setattr("specgen.drafters.model.CostAwarePolicy", lambda *_: always)
    plain = opened(models, draft="none")
    prompt = plain.prompts.of_text("the sum of", now=NOW)
    expected, _ = answered(plain, prompt)
    n_read = len(prompt.tokens) + len(expected) - len(prompt.head)
    for helper in ("ngram", models / "draft.gguf", models / "spm.gguf"):
        found, n_cached = answered(opened(models, helpers=(helper,)), prompt)
        assert found == expected
        assert abs(n_cached[0] - n_read) <= 5
        if helper == models / "draft.gguf":
            assert abs(n_cached[1] - n_read) <= 10


def test_a_draft_with_another_vocabulary_does_not_read_its_own_head(tmp_path: Path) -> None:
    target = write_tiny_model(
        tmp_path / "target.gguf", replace(TARGET, chat_template=CHATML_TEMPLATE)
    )
    draft = replace(TARGET.draft(0.02), tokenizer="spm", n_vocab=None, add_bos=True)
    other = write_tiny_model(tmp_path / "draft.gguf", draft)
    loaded = opened(tmp_path)
    assert (target.parent, other.name) == (tmp_path, "draft.gguf")
    prompt = loaded.prompts.of_text("the sum of", now=NOW)
    assert prompt.draft_tokens is not None
    assert loaded.draft is not None
    told = said(loaded.draft.models[0], prompt.draft_tokens)
    assert "You are tiny" not in told
    assert told.startswith("<s>")
    assert "user\nthe sum of" in told
    fast = texts(list(generate(loaded, prompt)))
    loaded.close()
    plain = opened(tmp_path, draft="none")
    assert fast == texts(list(generate(plain, prompt)))
    plain.close()


def texts(events: Sequence[Event]) -> str:
    last = events[-1]
    assert isinstance(last, FinishedEvent)
    return last.text
