"""Log-probabilities: the raw model's, whatever drafts, samplers and grammars do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from specgen.events import CommittedEvent, Event, Piece
from specgen.method.verify import Verifier
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions
from specgen.system.arrays import Logits
from specgen.text.text_state import TextState
from tests.helpers.common import UNFILTERED
from tests.helpers.fake_backend import FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import (
    N_VOCAB,
    PROMPT,
    Setup,
    TreeDrafter,
    model_drafter,
    ngram_drafter,
)
from tests.helpers.fake_grammar import FakeGrammar

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)
#: Samplers that leave little of the raw model's opinion.
SHAPED = SamplerOptions(
    temperature=0.7,
    top_k=3,
    repeat_penalty=1.5,
    frequency_penalty=0.5,
    dry_multiplier=0.8,
    dry_allowed_length=1,
    logit_bias=((2, 3.0), (4, -math.inf)),
)


def log_softmax(row: Logits) -> npt.NDArray[np.float64]:
    """From the definition, in float64."""
    exact = row.astype(np.float64)
    shifted = exact - exact.max()
    with np.errstate(divide="ignore"):
        result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def pieces_of(events: Sequence[Event]) -> list[Piece]:
    return [p for event in events if isinstance(event, CommittedEvent) for p in event.pieces]


DRAFTERS: dict[str, Callable[[TextState, SamplerOptions], object]] = {
    "perfect": lambda state, own: model_drafter(LANGUAGE, LETTERS, own, state=state)[0],
    "good": lambda state, own: model_drafter(noisy(LANGUAGE, 1.5), LETTERS, own, state=state)[0],
    "ngram": lambda state, own: ngram_drafter(),
    "tree": lambda state, own: TreeDrafter(LANGUAGE, 4, 0.7, np.random.default_rng(5)),
}
#: Two choices, then two tokens that are forced.
GRAMMAR = FakeGrammar(
    {0: dict.fromkeys(range(9), 1), 1: dict.fromkeys(range(9), 2), 2: {10: 3}, 3: {9: 0}}
)


def run(
    kind: str | None,
    sampler: SamplerOptions,
    *,
    logprobs: int | None = 3,
    grammar: FakeGrammar | None = None,
    verifier: Verifier | None = None,
) -> list[Piece]:
    make = DRAFTERS[kind] if kind else None
    setup = Setup(
        drafter=None if make is None else lambda state: make(state, sampler),  # type: ignore[arg-type,return-value]
        sampler=sampler,
        grammar=grammar.start if grammar else None,
        drafting=DraftOptions(policy="fixed", max_tokens=4, p_min=0.0),
        options=GenerationOptions(max_tokens=40, logprobs=logprobs),
        verifier=verifier,
    )
    return pieces_of(setup.run()[1])


@pytest.mark.parametrize(
    "sampler", [SamplerOptions(), UNFILTERED, SHAPED, replace(SHAPED, temperature=0)]
)
@pytest.mark.parametrize("kind", [None, *DRAFTERS])
@pytest.mark.parametrize("constrained", [False, True])
def test_every_token_has_the_raw_models(
    kind: str | None, sampler: SamplerOptions, constrained: bool
) -> None:
    pieces = run(kind, sampler, grammar=GRAMMAR if constrained else None)
    text = list(PROMPT)
    kinds = set()
    for piece in pieces:
        expected = log_softmax(LANGUAGE(tuple(text)))
        text.append(piece.token_id)
        kinds.add(piece.kind)
        if piece.kind == "forced":
            assert (piece.logprob, piece.top_logprobs) == (None, ())
            continue
        assert piece.logprob == pytest.approx(expected[piece.token_id], abs=1e-5)
        top = (-expected).argsort(kind="stable")[:3].tolist()
        expected_tokens = top if piece.token_id in top else [*top, piece.token_id]
        assert [other.token_id for other in piece.top_logprobs] == expected_tokens
        for other in piece.top_logprobs:
            assert other.logprob == pytest.approx(expected[other.token_id], abs=1e-5)
            assert other.text == LETTERS.token_text(other.token_id)
    assert len(pieces) == 40
    assert kinds >= {"plain"}
    if kind in ("good", "tree") and sampler != SHAPED:
        assert kinds >= {"accepted", "corrected"}
    if kind == "perfect" and sampler.temperature == 0:
        assert kinds >= {"accepted", "bonus"}
    if kind is None or not constrained:
        assert ("forced" in kinds) == constrained


def test_how_many_are_told_is_as_asked() -> None:
    for n in (0, 1, N_VOCAB, 100):
        for piece in run("good", UNFILTERED, logprobs=n):
            assert piece.logprob is not None
            others = [other.token_id for other in piece.top_logprobs]
            assert piece.token_id in others
            assert len(others) == min(n, N_VOCAB) or others.index(piece.token_id) == n
    for piece in run("good", UNFILTERED, logprobs=None):
        assert (piece.logprob, piece.top_logprobs) == (None, ())
