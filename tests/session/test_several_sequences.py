"""Several sequences that share a target do not affect one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.interface import CacheSlot
from specgen.errors import BackendError, NoTokenAllowedError
from specgen.events import NoticeEvent
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Backend, Batch
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.drafter import Ask, Drafter, Drafting, ready
from specgen.method.policy import CostAwarePolicy, RoundPlan
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, GenerationOptions
from specgen.system.arrays import Logits
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import (
    N_VOCAB,
    Clock,
    DeafDrafter,
    NoDrafter,
    NonsenseDrafter,
    Setup,
    Timed,
    draft_request,
    model_drafter,
    ngram_drafter,
    read_prompt,
)
from tests.helpers.fake_grammar import FailingState, FakeGrammar

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)


def started(loop: AnswerLoop, setups: Sequence[Setup]) -> list[AnswerState]:
    generations = [setup.generation(index) for index, setup in enumerate(setups)]
    for generation in generations:
        read_prompt(loop, generation)
    return generations


def finish(loop: AnswerLoop, generations: Sequence[AnswerState]) -> None:
    while not all(generation.is_finished for generation in generations):
        loop.round(generations)


def finished(setups: Sequence[Setup]) -> list[AnswerState]:
    """Answers that were made at once."""
    loop = AnswerLoop(setups[0].backend(len(setups)), Clock())
    generations = started(loop, setups)
    finish(loop, generations)
    return generations


# --- what a batch costs each of them


@given(
    n_drafted=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    own_s=st.floats(0.001, 1.0),
    row_s=st.floats(0.0, 1.0),
)
def test_the_shares_of_a_batch_are_all_of_it(
    n_drafted: list[int], own_s: float, row_s: float
) -> None:
    table = CostTable({n: own_s + row_s * n for n in range(1, 60)})
    table.n_sharing = len(n_drafted)
    n_rows = len(n_drafted) + sum(n_drafted)
    parts = [table.share_of_batch(n, n_rows) for n in n_drafted]
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) > 0.0
    # Who drafts more pays more.
    assert [parts[i] for i in np.argsort(n_drafted, kind="stable")] == sorted(parts)


class AlwaysRight(NoDrafter):
    """Drafts what the target will generate, in no time."""

    name = "ngram"

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        text = tuple(context)
        for _ in range(min(plan.n_max, 4)):
            text = (*text, int(LANGUAGE(text).argmax()))
        tokens = text[len(context) :]
        return ready(Draft.chain(tokens, self.name, [0.95] * len(tokens)))


@pytest.mark.parametrize("n_sequences", [1, 2, 4, 8])
def test_a_drafter_that_is_always_right_is_followed_beside_others(n_sequences: int) -> None:
    """Rows are expensive: alone, a batch of five takes as long as 1.6 tokens. If each sequence were
    charged with the whole batch, drafting would seem to lose, and the drafter would be put aside.
    """
    table = {n: 0.85 + 0.15 * n for n in range(1, 60)}

    def seconds(drafters: Cascade | None) -> tuple[float, list[AnswerState], list[float | None]]:
        setup = Setup(
            drafter=drafters,
            policy=lambda options: CostAwarePolicy(options, CostTable(table)),
            drafting=DraftOptions(policy="cost"),
            options=GenerationOptions(max_tokens=120),
            n_batch=100,
        )
        target = Timed(setup.backend(n_sequences), CostTable(table))
        loop = AnswerLoop(cast(Backend, target), lambda: target.decode_s)
        generations = started(loop, [setup] * n_sequences)
        before_s = target.decode_s
        finish(loop, generations)
        after_s = target.decode_s
        ends = [loop.finish(generation, target.costs) for generation in generations]
        assert target.decode_s == after_s
        gains = [end.estimated_speedup for end in ends]
        return after_s - before_s, generations, gains

    plain_s, plain, no_gains = seconds(None)
    drafted_s, drafted, gains = seconds(Cascade(AlwaysRight()))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    for generation in drafted:
        assert generation.stats.n_accepted > 60
    assert drafted_s < 0.8 * plain_s
    # The estimated gain is that of drafting, not that of sharing batches.
    assert gains == [pytest.approx(plain_s / drafted_s, rel=0.01)] * n_sequences
    assert no_gains == [None] * n_sequences


# --- shared batches


class Counted(FakeBackend):
    """Counts its decodes, and the rows of each."""

    n_rows: list[int]

    def decode(self, batch: Batch) -> Logits:
        self.n_rows.append(len(batch))
        return super().decode(batch)


def chain_drafters(
    backend: FakeBackend, n: int, costs: CostTable | None = None
) -> list[ModelDrafter]:
    slots = [CacheSlot(number, n) for number in range(n)]
    requests = [draft_request(slot=slot, costs=costs or CostTable()) for slot in slots]
    return [ModelDrafter(backend, each, n_shared_tokens=N_VOCAB) for each in requests]


@pytest.mark.parametrize("n_sequences", [1, 2, 5])
@pytest.mark.parametrize("n_outputs", [2, 8])
def test_drafts_of_several_texts_are_decoded_side_by_side(n_sequences: int, n_outputs: int) -> None:
    prompts = [(3, 1, 4), (1, 5, 9, 2), (6,), (5, 3, 5), (8, 9)][:n_sequences]
    cache = Counted(LETTERS, noisy(LANGUAGE, 0.7), n_ctx=600, n_sequences=n_sequences)
    cache.n_rows, cache.n_outputs = [], n_outputs
    pairs = zip(prompts, chain_drafters(cache, n_sequences), strict=True)
    setups = [Setup(prompt=prompt, drafter=drafter, n_batch=100) for prompt, drafter in pairs]
    loop = AnswerLoop(setups[0].backend(n_sequences), Clock())
    generations = started(loop, setups)
    loop.round(generations)  # in which they read the prompts
    cache.n_rows.clear()
    loop.round(generations)
    # Each of the four drafted tokens takes a batch, with a row or two for each text.
    n_batches = 4 * -(-n_sequences // n_outputs)
    assert len(cache.n_rows) == n_batches
    assert 4 * n_sequences <= sum(cache.n_rows) <= 5 * n_sequences
    finish(loop, generations)
    for generation, setup in zip(generations, setups, strict=True):
        alone = Setup(prompt=setup.prompt).run()[0]
        assert generation.tokens == alone.tokens
        assert generation.stats.n_accepted > 0


def test_a_draft_cache_that_fails_ends_the_drafting_of_those_who_asked() -> None:
    class Failing(FakeBackend):
        n_left: int

        def decode(self, batch: Batch) -> Logits:
            self.n_left -= 1
            if self.n_left < 0:
                raise BackendError("no room in the cache")
            return super().decode(batch)

    failing = Failing(LETTERS, noisy(LANGUAGE, 0.7), n_ctx=600, n_sequences=2)
    failing.n_left = 9
    sound = FakeBackend(LETTERS, noisy(LANGUAGE, 0.7), n_ctx=600, n_sequences=1)
    drafters = [*chain_drafters(failing, 2), *chain_drafters(sound, 1)]
    pairs = zip([(3, 1, 4), (1, 5, 9, 2), (6,)], drafters, strict=True)
    setups = [Setup(prompt=prompt, drafter=drafter, n_batch=100) for prompt, drafter in pairs]
    loop = AnswerLoop(setups[0].backend(3), Clock())
    generations = started(loop, setups)
    notices = []
    while not all(generation.is_finished for generation in generations):
        notices += [e for e in loop.round(generations) if isinstance(e, NoticeEvent)]
    assert {notice.sequence for notice in notices} == {0, 1}
    assert all("no room in the cache" in notice.message for notice in notices)
    assert all("Traceback" in str(notice.detail) for notice in notices)
    assert [generation.cascade is None for generation in generations] == [True, True, False]
    for generation, setup in zip(generations, setups, strict=True):
        assert generation.tokens == Setup(prompt=setup.prompt).run()[0].tokens


# --- what ends one of them


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("depth", [2, 5])
def test_a_dead_end_in_a_grammar_ends_only_its_own_answer(place: int, depth: int) -> None:
    dead = FakeGrammar({i: dict.fromkeys(range(N_VOCAB), i + 1) for i in range(depth)})
    setups = [
        Setup(
            prompt=prompt,
            grammar=dead.start if number == place else None,
            drafter=model_drafter(LANGUAGE, LETTERS)[0],
            options=GenerationOptions(max_tokens=24),
        )
        for number, prompt in enumerate([(3, 1, 4), (1, 5, 9, 2), (6,)])
    ]
    generations = finished(setups)
    for number, (generation, setup) in enumerate(zip(generations, setups, strict=True)):
        alone = Setup(prompt=setup.prompt, options=setup.options).run()[0]
        if number == place:
            assert isinstance(generation.failure, NoTokenAllowedError)
            assert generation.finish_reason is None
            # What its last round accepted is missing, and nothing else.
            assert 0 < len(generation.answer) <= depth
            assert generation.tokens == alone.tokens[: len(generation.tokens)]
        else:
            assert generation.failure is None
            assert generation.tokens == alone.tokens
            assert generation.finish_reason == "length"


@pytest.mark.parametrize("drafter", [None, "model", "ngram"])
@pytest.mark.parametrize("fails_in", ["allows", "after", "forced"])
@pytest.mark.parametrize("n_followed", [2, 3, 7])
def test_a_grammar_that_fails_ends_only_its_own_answer(
    n_followed: int, fails_in: Literal["allows", "after", "forced"], drafter: str | None
) -> None:
    makers: dict[str | None, Callable[[TextState], Drafter] | None] = {
        None: None,
        "model": lambda state: model_drafter(LANGUAGE, LETTERS, state=state)[0],
        "ngram": lambda _state: ngram_drafter(),
    }
    free = FakeGrammar({0: dict.fromkeys(range(N_VOCAB), 0)})
    setups = [
        Setup(
            prompt=prompt,
            grammar=FailingState(free.start, n_followed, fails_in) if number == 1 else None,
            drafter=makers[drafter],
            options=GenerationOptions(max_tokens=24),
        )
        for number, prompt in enumerate([(3, 1, 4), (1, 5, 9, 2), (6,)])
    ]
    first, failed, last = finished(setups)
    assert "any further" in str(failed.failure)
    assert len(failed.answer) <= n_followed
    for generation, setup in ((first, setups[0]), (last, setups[2])):
        alone = Setup(prompt=setup.prompt, options=setup.options).run()[0]
        assert generation.failure is None
        assert generation.tokens == alone.tokens


@pytest.mark.parametrize("n_forced", [1, 4])
def test_a_grammar_that_fails_in_forced_text_does_not_end_the_round_beside_it(
    n_forced: int,
) -> None:
    forced = FakeGrammar({state: {5: state + 1} for state in range(9)})
    options = GenerationOptions(max_tokens=24)
    setups = [
        Setup(options=options),
        Setup(options=options, grammar=FailingState(forced.start, n_forced, "forced")),
    ]
    loop = AnswerLoop(setups[0].backend(2), Clock())
    running, failing = (setup.generation(index) for index, setup in enumerate(setups))
    read_prompt(loop, running)
    loop.round([running], partial(loop.decode_alongside, failing, CostTable(), 0))
    assert "any further" in str(failing.failure)
    finish(loop, [running])
    assert running.tokens == Setup(options=options).run()[0].tokens


class PlainErrorDrafter(NoDrafter):
    """Raises an error before it makes a generator."""

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        raise ZeroDivisionError("a bug")


class AskingDrafter(NoDrafter):
    """Asks for something that is not a decode."""

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        yield cast(Ask, "a decode, please")
        return NO_DRAFT


class WordyDrafter(NoDrafter):
    """Gives its confidence in words, which the policy cannot learn from."""

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        return Draft.chain([1], "wordy", step_confidences=cast(list[float], ["quite sure"]))


@pytest.mark.parametrize("wrong", [PlainErrorDrafter, AskingDrafter, WordyDrafter])
def test_a_drafter_that_breaks_its_interface_affects_no_other_answer(
    wrong: type[NoDrafter],
) -> None:
    flat = CostTable(dict.fromkeys(range(1, 18), 1.0))
    setups = [
        Setup(drafter=each, policy=lambda options: CostAwarePolicy(options, flat))
        for each in (model_drafter(LANGUAGE, LETTERS)[0], wrong())
    ]
    generations = finished(setups)
    plain, _ = Setup().run()
    assert [generation.tokens for generation in generations] == [plain.tokens] * 2
    assert [generation.why_undrafted for generation in generations] == ["off", "failed"]


def test_a_faulty_drafter_affects_no_other_answer() -> None:
    """A token that does not exist, in the batch of all, would fail them all."""
    good, other, third = (model_drafter(LANGUAGE, LETTERS)[0] for _ in range(3))
    loud = NonsenseDrafter(other, 1, lambda _draft, _n: Draft.chain([99], "a"))
    drafters: list[Drafter] = [good, loud, DeafDrafter(third)]
    setups = [Setup(drafter=each) for each in drafters]
    generations = finished(setups)
    plain, _ = Setup().run()
    assert [generation.tokens for generation in generations] == [plain.tokens] * 3
    assert [generation.cascade is None for generation in generations] == [False, True, True]
