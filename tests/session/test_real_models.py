"""Small real models: real text, real tokenizers, quantised weights, and a draft with another
vocabulary.

SmolLM2 has byte-level BPE with 49 thousand tokens, Gemma 3 SentencePiece with 262 thousand: one
splits words that the other has whole, and Chinese, Arabic and emoji into bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specgen.measure.exactness.greedy_check import check_greedy
from specgen.measure.exactness.sampled_check import check_sampled
from specgen.options import ContextOptions, SamplerOptions
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from tests.helpers.common import NOW
from tests.helpers.sessions import answered, opened

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPTS = (
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
    "Write the numbers from one to twenty, a comma between them.",
    "用中文数到十,再加一个表情 😀",
    "for i in range(10):\n\tprint(i)\n",
)
LOG = "".join(
    f"{hour:02}:{minute:02} door {(hour * 7 + minute) % 5} "
    f"{'opened' if minute % 20 else 'closed'}\n"
    for hour in range(6, 17)
    for minute in range(0, 60, 10)
)


def alike(target: Path, draft: str) -> Session:
    """A target with n-grams, itself or nothing as its draft. With flash attention and this
    quantisation a row rounds alike in batches of every size, on the processors that we know.
    """
    context = ContextOptions(flash_attention="on", n_threads=1)
    source = target if draft == "itself" else draft
    return opened(target, source, context=context, n_tokens=48, drafting={"ngram_min": 1})


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_greedy_answers_are_those_of_plain_decoding(smollm2: Path, draft: str) -> None:
    with alike(smollm2, draft) as loaded:
        prompts = [loaded.prompts.of_text(prompt, chat=True, now=NOW) for prompt in PROMPTS]
        results = list(check_greedy(loaded, dict(enumerate(prompts, 1))))
    assert sum(result.n_accepted for result in results) > 0
    for result in results:
        assert not result.is_defect, result.difference


def test_a_draft_decodes_a_system_message_that_the_user_set(smollm2: Path) -> None:
    with alike(smollm2, "itself") as loaded:
        chat: dict[str, Any] = {"chat": True, "system": "You are a helpful assistant.", "now": NOW}
        found = answered(loaded, PROMPTS[0], **chat)
    assert found.acceptance_rate is not None
    assert found.acceptance_rate > 0.9


@pytest.mark.parametrize("draft", ["ngram", "itself"])
def test_text_beyond_a_sliding_window_is_that_of_plain_decoding(gemma3: Path, draft: str) -> None:
    with alike(gemma3, draft) as loaded:
        prompt = loaded.prompts.of_text(LOG, chat=False)
        assert len(prompt.tokens) > 600, "longer than the window of 512 tokens"
        (result,) = check_greedy(loaded, {1: prompt})
    assert result.n_drafted > 0
    assert result.n_accepted > 0
    # Batches move this model's logits, so that a near-tie may part the texts; nothing else may.
    assert result.difference is None or not result.difference.is_defect, result.difference


# --- a draft with another vocabulary

TEXTS = {
    "prose": "The sea is salty because",
    "code with tabs": (
        "def total(values):\n\tresult = 0\n\tfor value in values:\n\t\tif value:\n\t\t\t"
    ),
    "Chinese": "请用中文回答：海水为什么是咸的？海水之所以是咸的，是因为",
    "Arabic": "لماذا البحر مالح؟ البحر مالح لأن",
    "emoji": "Count with me: 🍎 🍎🍎 🍎🍎🍎 🍎🍎🍎🍎 then families: 👨‍👩‍👧 👨‍👩‍👧‍👦 👩🏽‍🚀 and",
    "mixed": "Naïve façade — “quotes”…\r\n\r\n  1.\t½ × ∑ᵢ xᵢ = ",
}
#: Half a character, bytes that no text has, and an overlong form.
STRAY = b"caf\xe9 na\xefve \xff\xfe \xe4\xb8 \xf0\x9f\x8d \xc0\xaf and"


def translated(target: Path, draft: Path, temperature: float = 0.0) -> Session:
    sampler, context = SamplerOptions(temperature=temperature), ContextOptions(n_threads=1)
    return opened(target, draft, context=context, n_draft=3, n_tokens=16, sampler=sampler)


def stray_prompt(session: Session) -> Prompt:
    """Bytes that are not UTF-8, in tokens of single bytes, as a model may generate them."""
    vocabulary = session.target.vocabulary
    by_bytes = {vocabulary.token_bytes(token): token for token in range(vocabulary.n_tokens)}
    pieces = [bytes((byte,)) for byte in STRAY]
    return Prompt("", tuple(by_bytes[piece] for piece in pieces if piece in by_bytes))


@pytest.mark.parametrize("target", ["smollm2", "gemma3"])
def test_greedy_text_with_a_translated_draft_is_that_of_plain_decoding(
    target: str, smollm2: Path, gemma3: Path
) -> None:
    with translated(*((smollm2, gemma3) if target == "smollm2" else (gemma3, smollm2))) as loaded:
        prompts = [loaded.prompts.of_text(text, chat=False) for text in TEXTS.values()]
        results = list(check_greedy(loaded, dict(enumerate([*prompts, stray_prompt(loaded)]))))
    assert len(results) == len(TEXTS) + 1
    assert sum(result.n_accepted for result in results) > 20
    for name, result in zip((*TEXTS, "stray bytes"), results, strict=True):
        assert result.n_drafted > 0, name
        assert not result.is_defect, (name, result.difference)


def test_sampled_text_is_distributed_as_the_targets(smollm2: Path, gemma3: Path) -> None:
    # A correct specgen would fail here once in a hundred thousand times, were the seeds drawn anew.
    with translated(smollm2, gemma3, temperature=0.8) as loaded:
        prompt = loaded.prompts.of_text(TEXTS["prose"])
        result = check_sampled(loaded, {1: prompt}, 800, 1e-5, seed=3)
    assert result is not None
    assert not result.is_defect, result.test
    assert result.n_accepted > 0
