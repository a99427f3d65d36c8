"""Greedy text with drafts equals plain text, with every drafter and wherever the answer ends. Also
log-probabilities.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt
import pytest

from specgen.drafters.autoregressive import ModelDrafter
from specgen.errors import BackendError
from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    NoticeEvent,
    Piece,
    PrefillEvent,
    VerifiedEvent,
)
from specgen.method.answer_loop import AnswerLoop
from specgen.method.backend import Batch
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Ask, Drafter, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions, VerifierName
from specgen.system.arrays import Hidden, Logits
from specgen.system.files import as_json
from specgen.text.sampling.distribution import Distribution
from tests.helpers.common import UNFILTERED
from tests.helpers.fake_backend import (
    FakeBackend,
    FakeVocabulary,
    Language,
    noisy,
    random_language,
)
from tests.helpers.fake_generations import (
    GREEDY,
    N_VOCAB,
    PROMPT,
    Clock,
    DeafDrafter,
    FailingDrafter,
    NoDrafter,
    NonsenseDrafter,
    Setup,
    model_drafter,
)
from tests.helpers.fake_grammar import FakeGrammar
from tests.helpers.sessions import finished
from tests.registry import DRAFTERS as DRAFTER_CASES
from tests.registry import ON_FAKES, VERIFIERS, Text

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)

#: Draft models of every quality, and everything else that drafts.
QUALITIES = {
    "perfect": LANGUAGE,
    "good": noisy(LANGUAGE, 1.5),
    "bad": random_language(N_VOCAB, seed=8),
    # It drafts what the target finds least likely.
    "adversarial": lambda text: -LANGUAGE(text),
}
DRAFTERS = [*QUALITIES, *(name for name in ON_FAKES if name != "model")]


def drafter(
    kind: str, vocabulary: FakeVocabulary = LETTERS, sampler: SamplerOptions = GREEDY
) -> Callable[[TextState], Drafter | Cascade]:
    """A drafter that is sometimes right. Random trees use the target's language."""
    language = QUALITIES.get(kind, LANGUAGE if "random" in kind else QUALITIES["good"])
    make = ON_FAKES.get(kind, ON_FAKES["model"])
    return lambda state: make(Text(state, language, vocabulary, sampler))


def good() -> ModelDrafter:
    return model_drafter(QUALITIES["good"], LETTERS)[0]


@pytest.mark.parametrize("n_draft", range(17))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_equals_plain_text(kind: str, n_draft: int) -> None:
    plain, _ = Setup().run()
    setup = Setup(
        drafter=drafter(kind), drafting=DraftOptions(policy="fixed", max_tokens=n_draft, p_min=0.0)
    )
    fast, events = setup.run()
    assert fast.tokens == plain.tokens
    assert fast.text.text == plain.text.text
    assert fast.finish_reason == "length"
    assert not any(isinstance(event, NoticeEvent) for event in events)
    # The cache holds the text without its last token, and nothing else.
    assert setup.target.text(0) == tuple(fast.tokens[:-1])
    assert all(setup.target.length(branch) == 0 for branch in range(1, 8))
    if kind == "perfect" and n_draft > 1:
        assert finished(events).mean_accepted_length == pytest.approx(n_draft + 1, rel=0.35)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_equals_plain_text_with_every_verifier(
    kind: str, verifier: VerifierName
) -> None:
    plain, _ = Setup().run()
    fast, events = Setup(drafter=drafter(kind), verifier=VERIFIERS[verifier].make()).run()
    assert fast.tokens == plain.tokens
    assert (finished(events).n_drafted > 0) == (kind != "nothing")


@pytest.mark.parametrize("max_tokens", range(25))
@pytest.mark.parametrize("kind", ["perfect", "good", "random tree", "tree of guesses"])
def test_the_token_limit_is_exact_at_every_position(kind: str, max_tokens: int) -> None:
    options = GenerationOptions(max_tokens=max_tokens)
    plain, _ = Setup(options=options).run()
    fast, events = Setup(options=options, drafter=drafter(kind)).run()
    assert len(plain.answer) == max_tokens
    assert fast.tokens == plain.tokens
    assert finished(events).finish_reason == "length"
    assert finished(events).n_tokens == max_tokens


@pytest.mark.parametrize("end_token", range(N_VOCAB))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_end_of_text_inside_a_draft_ends_the_answer(kind: str, end_token: int) -> None:
    vocabulary = FakeVocabulary.letters(N_VOCAB, ends=[end_token])
    options = GenerationOptions(max_tokens=60)
    plain, _ = Setup(vocabulary=vocabulary, options=options).run()
    fast, events = Setup(
        vocabulary=vocabulary, options=options, drafter=drafter(kind, vocabulary)
    ).run()
    assert fast.answer == plain.answer
    assert fast.finish_reason == plain.finish_reason
    assert end_token not in fast.answer
    if plain.finish_reason == "stop":
        assert finished(events).stopped_by == vocabulary.token_text(end_token)


@pytest.mark.parametrize("start", range(2, 24))
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["perfect", "good", "ngram", "random tree"])
def test_a_stop_string_is_exact_at_every_position(kind: str, start: int, length: int) -> None:
    text = Setup().run()[0].text.text
    stop = text[start : start + length]
    options = GenerationOptions(max_tokens=40, stop=("never", stop))
    plain, _ = Setup(options=options).run()
    fast, events = Setup(options=options, drafter=drafter(kind)).run()
    assert plain.text.text == text[: text.index(stop)]
    assert fast.text.text == plain.text.text
    assert fast.tokens == plain.tokens
    assert finished(events).finish_reason == "stop"
    assert finished(events).stopped_by == stop


@pytest.mark.parametrize("n_ctx", range(len(PROMPT), len(PROMPT) + 14))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_context_ends_where_it_does_without_a_draft(kind: str, n_ctx: int) -> None:
    options = GenerationOptions(max_tokens=-1)
    plain, _ = Setup(options=options, n_ctx=n_ctx).run()
    fast, events = Setup(options=options, n_ctx=n_ctx, drafter=drafter(kind)).run()
    # The last cell can be decoded, and what follows it is known.
    assert len(plain.tokens) == n_ctx + 1
    assert fast.tokens == plain.tokens
    assert finished(events).finish_reason == "context"


@pytest.mark.parametrize("n_batch", [1, 2, 3, 5, 64])
def test_long_prompts_are_decoded_in_batches(n_batch: int) -> None:
    prompt = [i * i % N_VOCAB for i in range(41)]
    plain, _ = Setup(prompt=prompt).run()
    slow, backend = model_drafter(LANGUAGE, LETTERS, n_batch=n_batch)
    fast, _ = Setup(prompt=prompt, n_batch=n_batch, drafter=slow).run()
    assert fast.tokens == plain.tokens
    assert backend.n_decodes >= -(-len(prompt) // n_batch)


@pytest.mark.parametrize("n_batch", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [name for name, case in DRAFTER_CASES.items() if case.watched])
def test_draft_models_may_decode_small_batches(kind: str, n_batch: int) -> None:
    def open_backend(vocabulary: FakeVocabulary, language: Language) -> FakeBackend:
        return FakeBackend(vocabulary, language, n_ctx=256, n_batch=n_batch, n_sequences=1)

    def make(state: TextState) -> Drafter | Cascade:
        return ON_FAKES[kind](Text(state, QUALITIES["good"], LETTERS, open_backend=open_backend))

    plain, _ = Setup().run()
    fast, events = Setup(drafter=make).run()
    assert fast.tokens == plain.tokens
    assert finished(events).n_drafted > 0
    assert not any(isinstance(event, NoticeEvent) for event in events)


@pytest.mark.parametrize("n_batch", [1, 7, 40, 41, 64])
def test_a_prefill_in_parts_reports_its_progress(n_batch: int) -> None:
    prompt = [i * i % N_VOCAB for i in range(41)]
    _, events = Setup(prompt=prompt, n_batch=n_batch).run()
    told = [event for event in events if isinstance(event, PrefillEvent)]
    assert [event.n_prefilled for event in told] == list(range(n_batch, 41, n_batch))
    assert all(event.n_prompt_tokens == 41 for event in told)
    # Each piece takes the same time, so the estimate is proportional to what is left.
    spent_s = [event.left_s / (41 - event.n_prefilled) * event.n_prefilled for event in told]
    assert spent_s == pytest.approx(
        [spent_s[0] * (i + 1) for i in range(len(told))] if told else []
    )
    first = next(i for i, event in enumerate(events) if isinstance(event, CommittedEvent))
    assert all(events.index(event) < first for event in told)


def test_a_failing_drafter_ends_drafting_but_not_the_answer() -> None:
    plain, _ = Setup().run()
    for error in (BackendError("no more room"), ZeroDivisionError("a bug")):
        fast, events = Setup(drafter=FailingDrafter(good(), 3, error)).run()
        assert fast.tokens == plain.tokens
        notices = [event for event in events if isinstance(event, NoticeEvent)]
        assert len(notices) == 1
        assert str(error) in notices[0].message
        assert "Traceback" in notices[0].detail
        n_drafts = sum(isinstance(event, DraftedEvent) for event in events)
        assert n_drafts == 3


class FullBackend(FakeBackend):
    """A backend that cannot decode anything."""

    def decode(self, batch: Batch) -> Logits:
        raise BackendError("no more room")


class TidyDrafter(NoDrafter):
    """Asks for a decode, and tidies up after it, whether it succeeds or not."""

    name = "tidy"

    def __init__(self, backend: FakeBackend, error: Exception | None) -> None:
        self.has_asked = False
        self.n_tidied = 0
        self._backend = backend
        self._error = error

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        self.has_asked = True
        try:
            yield Ask(self._backend, Batch.of([1], 0, 1), CostTable())
        finally:
            self._backend.remove(0)
            self.n_tidied += 1
            if self._error is not None:
                raise self._error
        return NO_DRAFT


@pytest.mark.parametrize("error", [None, ZeroDivisionError("while tidying up")])
def test_a_drafter_tidies_up_at_once_after_a_failed_decode(error: Exception | None) -> None:
    plain, _ = Setup().run()
    drafter = TidyDrafter(FullBackend(LETTERS, LANGUAGE), error)
    gc.disable()  # which may free the drafter's generator at any time
    try:
        fast, events = Setup(drafter=drafter).run()
    finally:
        gc.enable()
    assert fast.tokens == plain.tokens
    (notice,) = [event for event in events if isinstance(event, NoticeEvent)]
    assert "no more room" in notice.message
    assert drafter.n_tidied == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError("while tidying up")])
def test_a_drafter_tidies_up_after_an_interruption(error: Exception | None) -> None:
    drafter = TidyDrafter(FakeBackend(LETTERS, LANGUAGE), error)
    # Interrupted as soon as the drafter has asked for its first decode.
    _, events = Setup(drafter=drafter).run(lambda: drafter.has_asked)
    assert finished(events).finish_reason == "interrupted"
    assert drafter.n_tidied == 1


#: What a faulty drafter may return, by a part of the notice about it.
NONSENSE: dict[str, Callable[[Draft, int], object]] = {
    "nonsense: [None], 4 at most": lambda _draft, _n_max: None,
    "[1, 12], 4 at most": lambda _draft, _n_max: Draft.chain([1, N_VOCAB], "model"),
    "[-1], 4 at most": lambda _draft, _n_max: Draft.chain([-1], "model"),
    "[2.5], 4 at most": lambda _draft, _n_max: Draft.chain(cast(list[int], [2.5]), "model"),
    "['a'], 4 at most": lambda _draft, _n_max: Draft.chain(cast(list[int], ["a"]), "model"),
    "[1, 1, 1, 1, 1], 4 at most": lambda _draft, n_max: Draft.chain([1] * (n_max + 1), "model"),
    "parents come first": lambda _draft, _n_max: Draft(
        (1, 2), (1, 0), ("a",) * 2, (None,) * 2, (None,) * 2
    ),
    "needs 2 of each of its fields": lambda _draft, _n_max: Draft((1, 2), (-1,), (), (), ()),
    "2 branches, 1 at most": lambda _draft, _n_max: Draft(
        (1, 2), (-1, -1), ("a",) * 2, (None,) * 2, (None,) * 2
    ),
    "token 1, which its distribution does not have": lambda _draft, _n_max: Draft.chain(
        [1], "model", distributions=[Distribution.certain(2)]
    ),
}


@pytest.mark.parametrize("said", [*NONSENSE, "observed a round"])
def test_a_drafter_with_a_bug_ends_drafting_and_not_the_answer(said: str) -> None:
    wrong = NONSENSE.get(said)
    drafter = DeafDrafter(good()) if wrong is None else NonsenseDrafter(good(), 2, wrong)
    plain, _ = Setup().run()
    fast, events = Setup(drafter=drafter, n_branches=1).run()
    assert fast.tokens == plain.tokens
    notices = [event for event in events if isinstance(event, NoticeEvent)]
    assert len(notices) == 1
    assert said in notices[0].message
    assert sum(isinstance(event, DraftedEvent) for event in events) == (1 if wrong is None else 2)


class HiddenBackend(FakeBackend):
    """A backend whose hidden states are all the same."""

    def decode_hidden(self, batch: Batch, *, all_rows: bool = False) -> tuple[Logits, Hidden]:
        n_rows = len(batch) if all_rows else sum(batch.wants_logits)
        return self.decode(batch), np.zeros((n_rows, 1), np.float32)


class FailingSink:
    """Takes hidden states `n_good` times, and then raises an error."""

    reads_all_rows: ClassVar[bool] = True

    def __init__(self, n_good: int) -> None:
        self._n_good = n_good

    def keep_states(self, rows: Hidden, text: Sequence[int], n_decoded: int) -> None:
        if self._n_good == 0:
            raise ZeroDivisionError("no states, please")
        self._n_good -= 1


class FailingLastSink(FailingSink):
    reads_all_rows: ClassVar[bool] = False


@pytest.mark.parametrize("sink", [FailingSink, FailingLastSink])
@pytest.mark.parametrize("n_good", range(4))
def test_a_failure_to_take_hidden_states_ends_drafting_and_not_the_answer(
    n_good: int, sink: type[FailingSink]
) -> None:
    plain, _ = Setup().run()
    answer = Setup(drafter=good()).generation()
    answer.hidden_states = sink(n_good)
    events = list(AnswerLoop(HiddenBackend(LETTERS, LANGUAGE), Clock()).run(answer))
    assert answer.tokens == plain.tokens
    (notice,) = [event for event in events if isinstance(event, NoticeEvent)]
    assert "no states, please" in notice.message
    n_drafts = sum(isinstance(event, DraftedEvent) for event in events)
    # Only a drafter that reads all rows gets some in the prefill.
    assert n_drafts == (n_good if sink.reads_all_rows else n_good + 1)


def test_numbers_of_numpy_become_pythons() -> None:
    """Events are written as JSON, which has no others."""

    def numpy_draft(draft: Draft, _n_max: int) -> Draft:
        return replace(
            draft,
            tokens=tuple(np.array(draft.tokens)),
            parents=tuple(np.array(draft.parents)),
            probabilities=cast(tuple[float, ...], (np.float32(0.5),) * len(draft)),
        )

    _, events = Setup(drafter=NonsenseDrafter(good(), 0, numpy_draft)).run()
    assert finished(events).n_accepted > 0
    for event in events:
        json.dumps(as_json(event))


@pytest.mark.parametrize("after", range(8))
def test_an_interruption_keeps_the_text_so_far(after: int) -> None:
    plain, _ = Setup().run()
    calls = iter(range(1000))
    fast, events = Setup(drafter=drafter("good")).run(lambda: next(calls) >= after)
    assert finished(events).finish_reason == "interrupted"
    assert len(fast.tokens) < len(plain.tokens)
    assert plain.tokens[: len(fast.tokens)] == fast.tokens
    assert (finished(events).n_tokens == 0) == (after <= 1)  # asked in the decode, too


@pytest.mark.parametrize("after", range(12))
def test_an_interruption_releases_text_that_was_held_back(after: int) -> None:
    text = Setup().run()[0].text.text
    options = GenerationOptions(max_tokens=40, stop=(text[5:9] + "?",))
    calls = iter(range(1000))
    fast, events = Setup(options=options).run(lambda: next(calls) >= after)
    shown = "".join(event.text for event in events if isinstance(event, CommittedEvent))
    assert shown == fast.text.text == text[: fast.n_answer]


def test_events_tell_the_answer_and_account_for_every_token() -> None:
    for kind in DRAFTERS:
        generation, events = Setup(drafter=drafter(kind)).run()
        summary = finished(events)
        committed = [event for event in events if isinstance(event, CommittedEvent)]
        assert "".join(event.text for event in committed) == summary.text
        assert [p.token_id for event in committed for p in event.pieces] == generation.answer
        assert summary.token_ids == tuple(generation.answer)
        assert [event.round for event in committed] == list(range(summary.n_rounds + 1))
        assert committed[-1].n_tokens == summary.n_tokens
        drafted = [event for event in events if isinstance(event, DraftedEvent)]
        verified = [event for event in events if isinstance(event, VerifiedEvent)]
        assert sum(len(event.nodes) for event in drafted) == summary.n_drafted
        accepted = sum(p.kind == "accepted" for event in committed for p in event.pieces)
        assert accepted == summary.n_accepted
        assert sum(summary.accepted_by_depth) == summary.n_accepted
        assert sum(summary.drafted_by_depth) <= sum(summary.drafted_by_rank) == summary.n_drafted
        assert sum(summary.rounds_by_tokens) == summary.n_rounds
        for draft_event, verdict in zip(drafted, verified, strict=True):
            lost = {node for branch in verdict.rejected for node in branch.nodes}
            assert lost | set(verdict.accepted) == set(range(len(draft_event.nodes)))
            assert not lost & set(verdict.accepted)
        assert summary.wall_s == pytest.approx(summary.draft_s + summary.target_s + summary.loop_s)


# --- log-probabilities: the raw model's, whatever drafts, samplers and grammars do

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


#: Two choices, then two tokens that are forced.
GRAMMAR = FakeGrammar(
    {0: dict.fromkeys(range(9), 1), 1: dict.fromkeys(range(9), 2), 2: {10: 3}, 3: {9: 0}}
)


def pieces_of(
    kind: str | None,
    sampler: SamplerOptions,
    *,
    logprobs: int | None = 3,
    grammar: FakeGrammar | None = None,
) -> list[Piece]:
    setup = Setup(
        drafter=None if kind is None else drafter(kind, sampler=sampler),
        sampler=sampler,
        grammar=grammar.start if grammar else None,
        options=GenerationOptions(max_tokens=40, logprobs=logprobs),
    )
    _, events = setup.run()
    return [p for event in events if isinstance(event, CommittedEvent) for p in event.pieces]


@pytest.mark.parametrize(
    "sampler", [SamplerOptions(), UNFILTERED, SHAPED, replace(SHAPED, temperature=0)]
)
@pytest.mark.parametrize("kind", [None, "perfect", "good", "ngram", "random tree"])
@pytest.mark.parametrize("constrained", [False, True])
def test_every_token_has_the_log_probability_of_the_raw_model(
    kind: str | None, sampler: SamplerOptions, constrained: bool
) -> None:
    pieces = pieces_of(kind, sampler, grammar=GRAMMAR if constrained else None)
    text = list(PROMPT)
    state = GRAMMAR.start if constrained else None
    kinds = set()
    for piece in pieces:
        expected = log_softmax(LANGUAGE(tuple(text)))
        text.append(piece.token_id)
        kinds.add(piece.kind)
        is_only_token = state is not None and state.forced() is not None
        state = state and state.after(piece.token_id)
        if is_only_token:  # even if it was drafted
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
    if kind in ("good", "random tree") and sampler != SHAPED:
        assert kinds >= {"accepted", "corrected"}
    if kind == "perfect" and sampler.temperature == 0:
        assert kinds >= {"accepted", "bonus"}
    if kind is None or not constrained:
        assert ("forced" in kinds) == constrained


def test_the_requested_number_of_alternatives_is_reported() -> None:
    for n in (0, 1, N_VOCAB, 100):
        for piece in pieces_of("good", UNFILTERED, logprobs=n):
            assert piece.logprob is not None
            others = [other.token_id for other in piece.top_logprobs]
            assert piece.token_id in others
            assert len(others) == min(n, N_VOCAB) or others.index(piece.token_id) == n
    for piece in pieces_of("good", UNFILTERED, logprobs=None):
        assert (piece.logprob, piece.top_logprobs) == (None, ())
