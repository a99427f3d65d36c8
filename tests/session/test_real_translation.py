"""Drafts with another vocabulary, on two small real models.

SmolLM2 has byte-level BPE with 49 thousand tokens, Gemma 3 SentencePiece with 262 thousand: one
splits words that the other has whole, and Chinese, Arabic and emoji into bytes.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from specgen.measure.verify import check_greedy, check_sampled
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.prompts import Prompt
from specgen.session.session import Session

pytestmark = pytest.mark.real_model

TEXTS = {
    "prose": "The sea is salty because",
    "code with tabs": "def total(values):\n\tresult = 0\n\tfor value in values:\n\t\tif value:\n\t\t\t",
    "Chinese": "请用中文回答：海水为什么是咸的？海水之所以是咸的，是因为",
    "Arabic": "لماذا البحر مالح؟ البحر مالح لأن",
    "emoji": "Count with me: 🍎 🍎🍎 🍎🍎🍎 🍎🍎🍎🍎 then families: 👨‍👩‍👧 👨‍👩‍👧‍👦 👩🏽‍🚀 and",
    "mixed": "Naïve façade — “quotes”…\r\n\r\n  1.\t½ × ∑ᵢ xᵢ = ",
}
#: Half a character, bytes that no text has, and an overlong form.
STRAY = b"caf\xe9 na\xefve \xff\xfe \xe4\xb8 \xf0\x9f\x8d \xc0\xaf and"


@pytest.fixture(params=["gemma3 for smollm2", "smollm2 for gemma3"])
def pair(request: pytest.FixtureRequest, smollm2: Path, gemma3: Path) -> tuple[Path, Path]:
    """A target and a draft."""
    return (smollm2, gemma3) if request.param == "gemma3 for smollm2" else (gemma3, smollm2)


def opened(pair: tuple[Path, Path], temperature: float = 0.0) -> Session:
    context = ContextOptions(n_threads=1)
    options = SessionOptions(
        target=pair[0],
        draft=pair[1],
        sampler=SamplerOptions(temperature=temperature),
        drafting=DraftOptions(policy="fixed", max_tokens=3, p_min=0.0),
        generation=GenerationOptions(max_tokens=16),
        target_context=context,
        draft_context=context,
    )
    return Session(options, time.perf_counter)


def stray_prompt(session: Session) -> Prompt:
    """Bytes that are no UTF-8, as a model may well say them: in tokens of single bytes."""
    vocabulary = session.target.vocabulary
    by_bytes = {vocabulary.token_bytes(token): token for token in range(vocabulary.n_tokens)}
    pieces = [bytes((byte,)) for byte in STRAY]
    tokens = [by_bytes[piece] for piece in pieces if piece in by_bytes]
    return Prompt("", tuple(tokens))


def test_greedy_text_is_that_of_plain_decoding(pair: tuple[Path, Path]) -> None:
    with opened(pair) as loaded:
        prompts = [loaded.prompts.of_text(text, chat=False) for text in TEXTS.values()]
        results = list(check_greedy(loaded, dict(enumerate([*prompts, stray_prompt(loaded)]))))
    assert len(results) == len(TEXTS) + 1
    assert sum(result.n_accepted for result in results) > 20
    for name, result in zip((*TEXTS, "stray bytes"), results, strict=True):
        assert result.n_drafted > 0, name
        assert not result.is_defect, (name, result.difference)


def test_sampled_text_is_distributed_as_the_targets(smollm2: Path, gemma3: Path) -> None:
    # A correct specgen would fail here once in a hundred thousand times, were the seeds drawn anew.
    with opened((smollm2, gemma3), temperature=0.8) as loaded:
        prompt = loaded.prompts.of_text(TEXTS["prose"])
        result = check_sampled(loaded, {1: prompt}, 800, 1e-5, seed=3)
    assert result is not None
    assert not result.is_defect, result.test
    assert result.n_accepted > 0
