"""Log-probabilities: the raw model's, whatever drafts, samplers and grammars do."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specgen.events import CommittedEvent, Event, Piece, to_json_object
from specgen.method.backend import Batch
from specgen.method.verify import Verifier
from specgen.options import DraftOptions, GenerationOptions, Grammar, SamplerOptions
from specgen.session.engine import generate
from specgen.session.session import Session
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
from tests.helpers.sessions import folder_with, options_of
from tests.tiny import TinyConfig

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


# --- on the fake backend

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


# --- on tiny models

TARGET = TinyConfig(logit_scale=3.0)
TEXT = "def add(a, b): return a + b # and the sum is the sum is"


models = folder_with(target=TARGET, draft=TARGET.draft(0.03))


def answer(
    models: Path, draft: str, sampler: SamplerOptions, **generation: object
) -> tuple[list[Piece], list[npt.NDArray[np.float64]]]:
    """The pieces of an answer, and the target's log-probabilities before each, decoded anew."""
    source = {"model": "draft"}.get(draft, draft)
    options = options_of(
        models / "target.gguf",
        source,
        sampler=sampler,
        drafting={"ngram_min": 1, "verifier": "match"},
        generation=GenerationOptions(**{"max_tokens": 30, "logprobs": 5, **generation}),  # type: ignore[arg-type]
    )
    with Session(options, time.perf_counter) as loaded:
        events = list(generate(loaded, loaded.prompts.of_text(TEXT, chat=False)))
        pieces = pieces_of(events)
        prompt = loaded.prompts.of_text(TEXT, chat=False).tokens
        rows = []
        with loaded.contexts(256, drafts=False) as (target, _):
            batch = Batch()
            for position, token in enumerate(prompt):
                batch.add(token, position, (0,), position == len(prompt) - 1)
            for piece in pieces:
                rows.append(log_softmax(target.decode(batch)[-1]))
                batch = Batch()
                batch.add(piece.token_id, target.length(0), (0,), True)
    for event in events:  # no NaN, no infinity
        json.dumps(to_json_object(event), allow_nan=False)
    return pieces, rows


@pytest.mark.parametrize(
    ("sampler", "generation"),
    [
        (SamplerOptions(), {}),
        (replace(UNFILTERED, seed=3), {}),
        (replace(SHAPED, seed=3), {"ignore_eos": True}),
        (
            replace(SHAPED, seed=3),
            {"grammar": Grammar("gbnf", 'root ::= ([a-f] "--" [a-f ] | "zz")+')},
        ),
    ],
    ids=["greedy", "random", "shaped", "grammar"],
)
@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
def test_a_tiny_models_values_are_its_own(
    models: Path, draft: str, sampler: SamplerOptions, generation: dict[str, object]
) -> None:
    pieces, rows = answer(models, draft, sampler, **generation)
    n_checked = 0
    for piece, row in zip(pieces, rows, strict=True):
        if piece.kind == "forced":
            assert (piece.logprob, piece.top_logprobs) == (None, ())
            continue
        n_checked += 1
        assert piece.logprob == pytest.approx(row[piece.token_id], abs=2e-5)
        told = [other.logprob for other in piece.top_logprobs]
        assert (piece.token_id, piece.logprob) in [
            (other.token_id, other.logprob) for other in piece.top_logprobs
        ]
        if len(told) > 5:
            assert piece.top_logprobs[5].token_id == piece.token_id
        told = told[:5]
        assert told == pytest.approx(np.sort(row)[::-1][:5].tolist(), abs=2e-5)
        assert told == sorted(told, reverse=True)
    assert n_checked > 5
