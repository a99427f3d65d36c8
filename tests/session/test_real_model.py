"""SmolLM2-135M: real text, a real tokenizer, quantised weights."""

from __future__ import annotations

import datetime
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.events import FinishedEvent
from specgen.measure.verify import check_greedy
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SessionOptions,
)
from specgen.session.engine import generate
from specgen.session.session import Session

pytestmark = pytest.mark.real_model

NOW = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
PROMPTS = (
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "Write the numbers from one to twenty, a comma between them.",
    "用中文数到十,再加一个表情 😀",
    "for i in range(10):\n\tprint(i)\n",
)


def options(path: Path, **changes: object) -> SessionOptions:
    # With flash attention and this quantisation a row rounds alike in batches of every size,
    # on the processors that we know.
    context = ContextOptions(flash_attention="on", n_threads=1)
    plain = SessionOptions(
        target=path,
        draft="none",
        drafting=DraftOptions(policy="fixed", max_tokens=4, p_min=0.0, ngram_min=1),
        generation=GenerationOptions(max_tokens=48),
        target_context=context,
        draft_context=context,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def answer(options: SessionOptions, prompt: str, system: str | None = None) -> FinishedEvent:
    with Session(options, time.perf_counter) as loaded:
        begun = loaded.prompts.of_text(prompt, chat=True, system=system, now=NOW)
        *_, last = generate(loaded, begun)
    assert isinstance(last, FinishedEvent)
    return last


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_greedy_answers_are_those_of_plain_decoding(smollm2: Path, draft: str) -> None:
    source: DraftSource = "ngram" if draft == "ngram" else smollm2
    with Session(options(smollm2, draft=source), time.perf_counter) as loaded:
        prompts = [loaded.prompts.of_text(prompt, chat=True, now=NOW) for prompt in PROMPTS]
        results = list(check_greedy(loaded, dict(enumerate(prompts, 1))))
    assert sum(result.n_accepted for result in results) > 0
    for result in results:
        assert not result.is_defect, result.difference


def test_a_draft_reads_a_system_message_that_was_asked_for(smollm2: Path) -> None:
    itself = answer(options(smollm2, draft=smollm2), PROMPTS[0], "You are a helpful assistant.")
    assert itself.acceptance_rate is not None
    assert itself.acceptance_rate > 0.9


def test_the_answer_is_text(smollm2: Path) -> None:
    found = answer(options(smollm2, draft="ngram"), "hi")
    assert "Hello" in found.text
    assert found.finish_reason == "stop"
    assert found.stopped_by == "<|im_end|>"


LOG = "".join(
    f"{hour:02}:{minute:02} door {(hour * 7 + minute) % 5} {'opened' if minute % 20 else 'closed'}\n"
    for hour in range(6, 17)
    for minute in range(0, 60, 10)
)


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_text_beyond_a_sliding_window_is_that_of_plain_decoding(gemma3: Path, draft: str) -> None:
    source: DraftSource = "ngram" if draft == "ngram" else gemma3
    with Session(options(gemma3, draft=source), time.perf_counter) as loaded:
        prompt = loaded.prompts.of_text(LOG, chat=False)
        assert len(prompt.tokens) > 600, "longer than the window of 512 tokens"
        (result,) = check_greedy(loaded, {1: prompt})
    assert result.n_drafted > 0
    assert result.n_accepted > 0
    # Batches move this model's logits, so that a near-tie may part the texts; nothing else may.
    assert result.difference is None or not result.difference.is_defect, result.difference
