"""The checks of `specgen verify`: they find what is wrong, and nothing where nothing is.

Level of the sampled checks here: 1e-5 for each of three tests, in each of the some 20 runs
without a bug. They would fail by chance with a probability below 1e-3; the seeds are fixed.
"""

from __future__ import annotations

import contextlib
import math
import time
import tracemalloc
from collections import Counter, abc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specgen.method.loop
from specgen.errors import PromptError
from specgen.llama import LlamaBackend
from specgen.measure.proof import (
    BUGS,
    N_AT_ONCE,
    Difference,
    DraftingPlan,
    GreedyResult,
    PlainAnswers,
    ProofReport,
    SampledPlan,
    SampledResult,
    UncheckedPrompt,
    check_greedy,
    check_sampled,
    evenly_chosen,
    read_prompts,
    room,
    to_json_object,
    ways_to_draft,
)
from specgen.measure.proof.exact import Exact
from specgen.measure.proof.memo_backend import MemoBackend
from specgen.measure.proof.rows import movement
from specgen.method.backend import Backend, Batch
from specgen.method.draft import Branches, Draft, keep_path
from specgen.options import (
    DraftOptions,
    DraftSource,
    GenerationOptions,
    Grammar,
    SamplerOptions,
    SessionOptions,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.sequence import Sequence
from specgen.text.text_state import Shaper, TextState
from tests.helpers.common import EXACT
from tests.helpers.virtual_time import VirtualTime
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import Architecture

PROMPT = "".join(map(chr, range(32, 127))) + " the cat is in the else for with that it be not self"
PROMPTS = tuple(PROMPT[start:] for start in (0, 9, 30, 60))
#: Of the target's logits, of the draft's noise, and the seed of the weights: 40 to 85 % accepted.
PAIRS = ((3.0, 0.05, 0), (4.0, 0.05, 1), (3.0, 0.1, 2))
#: As `specgen run` drafts by default. N-grams of one token: tiny models repeat nothing longer.
BY_COST = DraftOptions(ngram_min=1)
#: Those that an answer alone shows.
SINGLE_BUGS = [bug.name for bug in BUGS.values() if not bug.needs_several]
NGRAM_BUGS = [name for name in SINGLE_BUGS if not BUGS[name].needs_draws]
#: Architectures with a sliding window: its cells alone, and beside a recurrent state.
WINDOWED: tuple[Architecture, ...] = ("gemma3", "lfm2")
#: At temperature 0 only one token is likely enough.
GREEDY_BUGS = [name for name in NGRAM_BUGS if name != "lenient"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    for number, (logit_scale, noise, seed) in enumerate(PAIRS):
        config = TinyConfig(logit_scale=logit_scale, seed=seed, unprintable_scale=0.0)
        write_tiny_model(folder / f"target {number}.gguf", config)
        write_tiny_model(folder / f"draft {number}.gguf", config.draft(noise))
    large = TinyConfig(logit_scale=2.0, n_vocab=20000, unprintable_scale=1.0)
    write_tiny_model(folder / "target large.gguf", large)
    write_tiny_model(folder / "draft large.gguf", large.draft(0.05))
    ends = TinyConfig(logit_scale=2.5, control_scale=1.0, unprintable_scale=0.0)
    write_tiny_model(folder / "target ends.gguf", ends)
    write_tiny_model(folder / "draft ends.gguf", ends.draft(0.05))
    for architecture in WINDOWED:
        window = TinyConfig(architecture=architecture, sliding_window=8, unprintable_scale=0.0)
        write_tiny_model(folder / f"target {architecture}.gguf", window)
        write_tiny_model(folder / f"draft {architecture}.gguf", TinyConfig(seed=5))
    return folder


def opened(
    models: Path,
    pair: object = 0,
    *,
    ngram: bool = False,
    drafting: DraftOptions | None = None,
    grammar: str | None = None,
    max_tokens: int = 40,
    clock: Callable[[], float] = time.perf_counter,
    **sampler: object,
) -> Session:
    draft: DraftSource = "ngram" if ngram else models / f"draft {pair}.gguf"
    if drafting is None:
        # N-grams of one token: tiny models repeat nothing longer.
        drafting = (
            DraftOptions(policy="fixed", ngram_min=1) if ngram else DraftOptions(policy="fixed")
        )
    options = SessionOptions(
        target=models / f"target {pair}.gguf",
        draft=draft,
        sampler=SamplerOptions(**{"temperature": 0.8, "seed": 0, **sampler}),  # type: ignore[arg-type]
        drafting=drafting,
        generation=GenerationOptions(
            max_tokens=max_tokens, grammar=None if grammar is None else Grammar("gbnf", grammar)
        ),
        target_context=EXACT,
        draft_context=EXACT,
    )
    return Session(options, clock)


def sampled(
    loaded: Session, bug: str | None = None, seed: int = 1, **plan: object
) -> SampledResult:
    prompt = loaded.prompts.of_text(PROMPT, chat=False)
    wanted = replace(SampledPlan(), **plan)  # type: ignore[arg-type]
    result = check_sampled(loaded, prompt, wanted, seed=seed, bug=BUGS[bug] if bug else None)
    assert result is not None
    return result


def greedy(loaded: Session, bug: str | None = None) -> list[GreedyResult]:
    prompts = [loaded.prompts.of_text(prompt, chat=False) for prompt in PROMPTS]
    return list(check_greedy(loaded, prompts, bug=BUGS[bug] if bug else None))


def at_once(
    loaded: Session, bug: str | None = None, way: DraftingPlan | None = None
) -> list[GreedyResult]:
    prompts = [loaded.prompts.of_text(prompt, chat=False) for prompt in PROMPTS]
    planted = BUGS[bug] if bug else None
    return list(check_greedy(loaded, prompts, n_at_once=N_AT_ONCE, bug=planted, way=way))


# --- known bugs


@pytest.mark.parametrize("pair", [0, 2])
@pytest.mark.parametrize("bug", SINGLE_BUGS)
def test_a_known_bug_fails_the_default_plan(models: Path, bug: str, pair: int) -> None:
    with opened(models, pair) as loaded:
        # At a place or another of the default three: where the truncated lists of target and
        # draft happen to hold the same tokens, subtracting them by index is right.
        results = (sampled(loaded, bug, seed=seed) for seed in (1, 2, 3))
        result = next(result for result in results if not result.fits)
    # Not by a hair: other seeds and other machines find it too.
    assert min(depth.test.p_value for depth in result.depths) < 1e-6
    assert not result.rows.is_defect, "the bug is not in the cache"


@pytest.mark.parametrize("pair", range(len(PAIRS)))
@pytest.mark.parametrize("verifier", ["auto", "residual"])
def test_without_a_bug_the_default_plan_passes(models: Path, pair: int, verifier: str) -> None:
    with opened(models, pair, drafting=DraftOptions(policy="fixed", verifier=verifier)) as loaded:  # type: ignore[arg-type]
        result = sampled(loaded, seed=pair + 1)
    assert not result.is_defect
    assert result.is_tested
    assert 0.4 <= result.n_accepted / result.n_drafted <= 0.9
    assert max(depth.detectable for depth in result.depths) <= SampledPlan().deviation
    assert result.n_draws < 10_000, "it takes a user's time"


@pytest.mark.parametrize("bug", [None, *NGRAM_BUGS])
def test_n_gram_drafts_show_the_bugs_that_need_no_draws(models: Path, bug: str | None) -> None:
    with opened(models, 2, ngram=True) as loaded:
        result = sampled(loaded, bug)
    assert result.is_tested
    assert result.is_defect == (bug is not None)


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("bug", [None, *GREEDY_BUGS])
def test_greedy_texts_show_the_bugs_that_need_no_draws(
    models: Path, bug: str | None, ngram: bool
) -> None:
    drafting = DraftOptions(policy="fixed", p_min=0.0, ngram_min=1)
    with opened(models, 1, ngram=ngram, temperature=0.0, drafting=drafting) as loaded:
        results = greedy(loaded, bug)
    assert all(result.n_drafted for result in results)
    assert any(result.is_defect for result in results) == (bug is not None)
    if bug is None:
        assert all(result.difference is None for result in results)
        assert all(result.n_rows == result.n_tokens for result in results)


# --- several answers at once


@pytest.mark.parametrize("bug", [None, *GREEDY_BUGS])
def test_answers_at_once_show_bugs_too(models: Path, bug: str | None) -> None:
    with opened(models, 1, drafting=BY_COST, temperature=0.0) as loaded:
        results = at_once(loaded, bug, ways_to_draft(BY_COST)[-1])
    assert len(results) == len(PROMPTS) > N_AT_ONCE
    assert all(result.n_drafted and result.n_at_once == N_AT_ONCE for result in results)
    assert any(result.is_defect for result in results) == (bug is not None)
    if bug is None:
        assert all(result.n_rows == result.n_tokens for result in results)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_answers_at_once_with_a_sliding_window_pass(models: Path, architecture: str) -> None:
    with opened(models, architecture, drafting=BY_COST, temperature=0.0) as loaded:
        results = at_once(loaded, way=ways_to_draft(BY_COST)[-1])
    assert all(result.n_drafted and not result.is_defect for result in results)


@pytest.mark.parametrize("bug", [bug.name for bug in BUGS.values() if bug.needs_several])
def test_some_bugs_show_in_answers_at_once_only(models: Path, bug: str) -> None:
    way = ways_to_draft(BY_COST)[-1]
    with opened(models, "lfm2", drafting=BY_COST, temperature=0.0) as loaded:
        assert any(result.is_defect for result in at_once(loaded, bug, way))
        loaded.change_drafting(way.drafting)
        assert not any(result.is_defect for result in greedy(loaded, bug))


def test_a_rollback_of_another_answer_is_a_defect(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rejected tokens of the answer before are dropped, not its own: an answer alone is right."""
    dropped: list[Branches] = []

    def keep_other(backend: Backend, slot: Branches, draft: Draft, path: abc.Sequence[int]) -> None:
        keep_path(backend, slot, draft, path)
        if len(path) < len(draft) and dropped and dropped[-1] != slot:
            position = backend.length(dropped[-1].first) - 1
            if position > 1:
                backend.remove(dropped[-1].first, position)
                batch = Batch()
                batch.add(draft.tokens[-1], position, (dropped[-1].first,), False)
                backend.decode(batch)
        dropped.append(slot)

    monkeypatch.setattr(specgen.method.loop, "keep_path", keep_other)
    with opened(models, 1, drafting=BY_COST, temperature=0.0) as loaded:
        way = ways_to_draft(BY_COST)[-1]
        assert any(result.is_defect for result in at_once(loaded, way=way))
        dropped.clear()
        loaded.change_drafting(way.drafting)
        assert not any(result.is_defect for result in greedy(loaded))


@pytest.mark.parametrize("n_at_once", [1, N_AT_ONCE])
def test_answers_without_a_limit_go_on_until_the_context_is_full(
    models: Path, n_at_once: int
) -> None:
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=drafting, temperature=0.0, max_tokens=-1) as loaded:
        small = replace(
            loaded.options,
            target_context=replace(loaded.options.target_context, n_ctx=256),
            generation=replace(loaded.options.generation, ignore_eos=True),
        )
    with Session(small, time.perf_counter) as loaded:
        prompt = loaded.prompts.of_text(PROMPTS[0], chat=False)
        results = list(check_greedy(loaded, [prompt], n_at_once=n_at_once))
    assert not any(result.is_defect for result in results)
    assert max(result.n_tokens for result in results) >= 256 - len(prompt.tokens)
    assert min(result.n_drafted for result in results) > 0


def test_few_prompts_are_repeated_and_short_ones_lengthened(models: Path) -> None:
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, "lfm2", drafting=drafting, temperature=0.0) as loaded:
        asked: list[Prompt] = []
        submit = Engine.insert

        def noted(engine: Engine, prompt: Prompt, **more: Any) -> Request:
            asked.append(prompt)
            return submit(engine, prompt, **more)

        prompt = loaded.prompts.of_text("the cat", chat=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "insert", noted)
            results = list(check_greedy(loaded, [prompt], n_at_once=N_AT_ONCE))
    assert [result.prompt for result in results] == [1] * N_AT_ONCE
    assert [each.tokens[8:] for each in asked] == [prompt.tokens] * N_AT_ONCE


# --- as `specgen run` drafts by default: costs decide, and n-grams draft beside the model


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Rows are cheap, and a drafted token takes a third of the target's: model and n-grams both
    pay, and a model stops early enough for n-grams to go on."""

    def seconds(name: str, n_rows: int) -> float:
        return (0.03 if name.startswith("draft") else 0.1) * (1.0 + 0.03 * (n_rows - 1))

    return VirtualTime(monkeypatch, seconds)


@pytest.mark.parametrize("pair", range(len(PAIRS)))
@pytest.mark.parametrize("seed", [-1, 0])
def test_what_runs_by_default_fits(models: Path, costs: VirtualTime, pair: int, seed: int) -> None:
    """Without a seed a chain is drawn; with one, drafts are matched, and trees."""
    with opened(models, pair, drafting=BY_COST, clock=costs, seed=seed) as loaded:
        assert loaded.settings.verifier == ("auto" if seed < 0 else "match")
        result = sampled(loaded)
    assert result.way == "cost"
    assert not result.is_defect
    assert result.is_tested
    assert set(result.drafted_by) == {"model", "ngram"}
    assert sum(result.drafted_by.values()) == result.n_drafted
    assert max(depth.detectable for depth in result.depths) <= SampledPlan().deviation


#: A policy that drops what it paid for soon lets the model draft no more.
HIDES_ITSELF = "picky-policy"


@pytest.mark.parametrize("bug", [name for name in SINGLE_BUGS if name != HIDES_ITSELF])
def test_a_known_bug_shows_in_what_runs_by_default(
    models: Path, costs: VirtualTime, bug: str
) -> None:
    def results() -> Iterator[SampledResult]:
        for pair in range(len(PAIRS)):
            with opened(models, pair, drafting=BY_COST, clock=costs, seed=-1) as loaded:
                yield from (sampled(loaded, bug, seed=seed) for seed in (1, 2, 3))

    result = next(result for result in results() if not result.fits)
    assert min(depth.test.p_value for depth in result.depths) < 1e-6


@pytest.mark.parametrize("bug", [None, *SINGLE_BUGS])
def test_drafts_by_turns_show_every_bug(models: Path, bug: str | None) -> None:
    """Whatever costs say, the model draws, and n-grams go on behind it."""
    results = []
    for pair in range(len(PAIRS)):
        with opened(models, pair, seed=-1) as loaded:
            _, forced = ways_to_draft(BY_COST)
            prompt = loaded.prompts.of_text(PROMPT, chat=False)
            planted = BUGS[bug] if bug else None
            result = check_sampled(loaded, prompt, SampledPlan(), seed=1, bug=planted, way=forced)
        assert result is not None
        assert result.way == "forced"
        assert set(result.drafted_by) == {"model", "ngram"}
        assert min(result.drafted_by.values()) > 0.1 * result.n_drafted
        results.append(result)
        if result.is_defect:
            break
    assert results[-1].is_defect == (bug is not None)
    if bug is not None:
        assert min(depth.test.p_value for depth in results[-1].depths) < 1e-6


@pytest.mark.parametrize("bug", [None, *GREEDY_BUGS])
def test_greedy_texts_show_bugs_in_what_runs_by_default(
    models: Path, costs: VirtualTime, bug: str | None
) -> None:
    with opened(models, 1, drafting=BY_COST, clock=costs, temperature=0.0, seed=-1) as loaded:
        results = greedy(loaded, bug)
    assert {result.way for result in results} == {"cost"}
    assert any(result.is_defect for result in results) == (bug is not None)
    if bug is None:
        drafted_by = Counter[str]()
        for result in results:
            drafted_by.update(result.drafted_by)
        assert set(drafted_by) == {"model", "ngram"}
        assert all(result.n_rows == result.n_tokens for result in results)


def test_every_stage_of_a_staged_draft_takes_part(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"target 1.gguf": 0.1, "draft 1.gguf": 0.04, "draft 0.gguf": 0.001}
    clock = VirtualTime(monkeypatch, lambda name, n: seconds[name] * (1.0 + 0.03 * (n - 1)))
    with opened(models, 1, drafting=BY_COST, temperature=0.0) as loaded:
        staged = replace(loaded.options, helpers=(models / "draft 0.gguf",))
    used: list[str] = []
    with Session(staged, clock) as loaded:
        contexts = loaded.draft_contexts

        @contextlib.contextmanager
        def noted(n_ctx: int, **more: Any) -> Iterator[tuple[LlamaBackend, ...]]:
            with contexts(n_ctx, **more) as backends:
                yield backends
                used.extend(b.model.name for b in backends if b.decode_s > 0.0)

        loaded.draft_contexts = noted  # type: ignore[method-assign]
        assert not any(result.is_defect for result in greedy(loaded))
        prompt = loaded.prompts.of_text(PROMPT, chat=False)
        check_sampled(loaded, prompt, SampledPlan(n_draws=200), seed=0)
    # The sampled check opens the helpers' contexts only.
    assert used == ["draft 1.gguf", "draft 0.gguf", "draft 0.gguf"]


def test_two_ways_to_draft_are_compared_with_one_plain_answer(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_plain = 0
    sequence = DrafterFactory.sequence

    def counted(self: DrafterFactory, *rest: Any, **more: Any) -> Sequence:
        nonlocal n_plain
        n_plain += bool(more.get("plain"))
        return sequence(self, *rest, **more)

    monkeypatch.setattr(DrafterFactory, "sequence", counted)
    answers = PlainAnswers()
    fixed = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=fixed, temperature=0.0) as loaded:
        prompts = [loaded.prompts.of_text(prompt, chat=False) for prompt in PROMPTS]
        for length in (2, 5):
            loaded.change_drafting(replace(fixed, max_tokens=length))
            results = list(check_greedy(loaded, prompts, answers=answers))
            assert all(result.n_drafted and not result.is_defect for result in results)
        assert n_plain == len(PROMPTS)
        # What there is no memory for is decoded again.
        list(check_greedy(loaded, prompts, answers=PlainAnswers(1)))
        assert n_plain == 2 * len(PROMPTS)


# --- a cache that holds what was refused


@pytest.fixture
def dirty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """After tokens are dropped, the last that was kept is another one: the cells of a text that
    was refused."""
    remove = LlamaBackend.remove

    def leave(backend: LlamaBackend, sequence: int, start: int = 0) -> None:
        if not 1 < start < backend.length(sequence):
            remove(backend, sequence, start)
            return
        remove(backend, sequence, start - 1)
        batch = Batch()
        batch.add(70, start - 1, (sequence,), False)
        backend.decode(batch)

    monkeypatch.setattr(LlamaBackend, "remove", leave)


@pytest.mark.usefixtures("dirty_cache")
def test_a_cache_that_keeps_what_was_refused_is_a_defect(models: Path) -> None:
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=drafting, temperature=0.0) as loaded:
        results = greedy(loaded)
    assert min(result.moved_by for result in results) > 0.02
    assert all(result.is_moved for result in results)
    differences = [result.difference for result in results if result.difference is not None]
    assert differences
    assert all(difference.is_defect for difference in differences)
    with opened(models, 1, drafting=drafting) as loaded:
        result = sampled(loaded, n_draws=300)
    assert result.rows.is_defect
    assert result.is_defect


def test_a_wrong_branch_that_is_kept_is_a_defect(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_wrong(backend: Backend, slot: Branches, draft: Draft, path: abc.Sequence[int]) -> None:
        keep_path(backend, slot, draft, path)
        if len(path) < len(draft):
            position = backend.length(slot.first) - 1
            backend.remove(slot.first, position)
            batch = Batch()
            batch.add(draft.tokens[-1], position, (slot.first,), False)
            backend.decode(batch)

    monkeypatch.setattr(specgen.method.loop, "keep_path", keep_wrong)
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=drafting, temperature=0.0) as loaded:
        assert all(result.is_defect for result in greedy(loaded))
    with opened(models, 1, drafting=drafting) as loaded:
        # The rows are those of the wrong text, so the draws do not fit.
        assert not sampled(loaded).fits


# --- near-ties


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Rows that depend on whether they are computed in a batch, by so much."""
    decode = LlamaBackend.decode

    def set_(scale: float) -> None:
        def rounded(backend: LlamaBackend, batch: Batch) -> Logits:
            logits = decode(backend, batch)
            if len(batch) > 1:
                wanted = [p for p, w in zip(batch.positions, batch.wants_logits, strict=True) if w]
                for row, position in zip(logits, wanted, strict=True):
                    noise = np.random.default_rng(position).normal(size=len(row))
                    np.add(row, scale * noise, out=row, casting="same_kind")
            return logits

        monkeypatch.setattr(LlamaBackend, "decode", rounded)

    return set_


def test_rounding_in_batches_is_no_defect(models: Path, rounding: Callable[[float], None]) -> None:
    rounding(0.05)
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=drafting, temperature=0.0, max_tokens=100) as loaded:
        results = greedy(loaded)
    differences = [result.difference for result in results if result.difference is not None]
    assert differences
    assert not any(result.is_defect for result in results)
    for difference in differences:
        assert difference.was_chosen
        assert 0.0 < difference.gap < 0.5
        assert difference.moved_by == pytest.approx(difference.batches_move, rel=0.3)
        assert difference.moved_by == pytest.approx(0.05 / 3.0, rel=0.3)  # the logits' spread is 3
        assert difference.plain.plain_logit > difference.speculative.plain_logit
        assert difference.plain.speculative_logit <= difference.speculative.speculative_logit
    with opened(models, 1, drafting=drafting) as loaded:
        result = sampled(loaded, n_draws=300)
    assert not result.rows.is_defect
    assert result.rows.moved_by == pytest.approx(result.rows.batches_move, rel=0.3)


@pytest.mark.usefixtures("dirty_cache")
def test_a_dirty_cache_is_a_defect_beside_rounding_too(
    models: Path, rounding: Callable[[float], None]
) -> None:
    rounding(0.05)
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, 1, drafting=drafting, temperature=0.0) as loaded:
        assert any(result.is_defect for result in greedy(loaded))


def test_movement_ignores_what_is_added_to_all_logits_alike() -> None:
    row = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert movement(row, row + np.float32(3.0)) < 1e-6
    assert movement(row, row + np.float32(0.1) * row[::-1]) == pytest.approx(0.1, rel=0.1)


# --- the exact distribution


class Exactly:
    """`Exact` of a session after the prompt, and its brute-force counterpart."""

    def __init__(
        self, loaded: Session, cache: Backend, prompt: abc.Sequence[int], depth: int
    ) -> None:
        self.memo = MemoBackend(cache)
        self.state: TextState = TextState(prompt, loaded.settings.grammar)
        self.shaper = Shaper(loaded.settings.sampler, self.state)
        self.exact = Exact(self.memo, self.shaper, self.state, depth)
        self._prompt, self._depth, self._cache = prompt, depth, cache

    def brute_force(self) -> dict[tuple[int, ...], float]:
        probabilities: dict[tuple[int, ...], float] = {}

        def follow(prefix: tuple[int, ...], prob: float) -> None:
            if len(prefix) == self._depth or (prefix and self._cache.vocabulary.is_end(prefix[-1])):
                probabilities[prefix] = prob
                return
            self._cache.remove(0)
            batch = Batch()
            for position, token in enumerate([*self._prompt, *prefix]):
                batch.add(token, position, (0,), False)
            batch.wants_logits[-1] = True
            step = self.shaper.distribution(self._cache.decode(batch)[-1], prefix)
            for token, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
                follow((*prefix, token), prob * p)

        follow((), 1.0)
        return probabilities


@pytest.fixture
def exactly(models: Path) -> Iterator[Callable[..., Exactly]]:
    sessions = []

    def make(
        depth: int, pair: object = 0, grammar: str | None = None, **sampler: object
    ) -> Exactly:
        loaded = opened(models, pair, grammar=grammar, **sampler)  # type: ignore[arg-type]
        prompt = loaded.prompts.of_text("the cat", chat=False).tokens
        contexts = loaded.contexts(256, drafts=False)
        target, _ = contexts.__enter__()
        sessions.append((loaded, contexts))
        return Exactly(loaded, target, prompt, depth)

    yield make
    for loaded, contexts in sessions:
        contexts.__exit__(None, None, None)
        loaded.close()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_exact_cells_are_those_of_brute_force(exactly: Callable[..., Exactly], depth: int) -> None:
    one = exactly(depth, top_k=3, top_p=1.0, min_p=0.0)
    cells = one.exact.cells()
    assert cells.probs.sum() == pytest.approx(1.0)
    collected: Counter[tuple[int, ...]] = Counter()
    for outcome, prob in one.brute_force().items():
        number = cells.find(one.exact.cell(outcome))
        assert number is not None
        collected[cells.outcomes[number]] += prob  # type: ignore[assignment]
    for outcome, prob in zip(cells.outcomes, cells.probs, strict=True):
        assert collected[outcome] == pytest.approx(prob, rel=1e-4)


def test_cells_of_unlikely_tokens_hold_the_rest(exactly: Callable[..., Exactly]) -> None:
    one = exactly(2, top_k=0, top_p=1.0, min_p=0.0)
    cells = one.exact.cells()
    shared = [outcome for outcome in cells.outcomes if -1 in outcome]
    assert (-1,) in shared
    first = one.shaper.distribution(one.exact.row(()))
    unlikely = first.probs < 1e-4
    assert cells.probs[cells.outcomes.index((-1,))] == pytest.approx(first.probs[unlikely].sum())
    for token, is_unlikely in zip(first.token_ids.tolist(), unlikely.tolist(), strict=True):
        assert (one.exact.cell((token, 65)) == (-1,)) == is_unlikely
    assert cells.probs.sum() == pytest.approx(1.0)


def test_texts_that_end_are_cells_of_their_own(exactly: Callable[..., Exactly]) -> None:
    one = exactly(3, "ends", top_k=4, top_p=1.0, min_p=0.0)
    is_end = one.memo.vocabulary.is_end
    end = next(token for token in range(one.memo.n_vocab) if is_end(token))
    one = exactly(3, "ends", top_k=4, top_p=1.0, min_p=0.0, logit_bias=((end, 9.0),))
    cells = one.exact.cells()
    short = [outcome for outcome in cells.outcomes if is_end(outcome[-1])]
    assert {len(outcome) for outcome in short} >= {1, 2}
    assert not any(is_end(token) for outcome in cells.outcomes for token in outcome[:-1])
    assert cells.probs.sum() == pytest.approx(1.0)


def test_what_a_grammar_forces_is_certain(exactly: Callable[..., Exactly]) -> None:
    one = exactly(3, grammar='root ::= [ab] "-" [cd] "."', top_p=1.0, min_p=0.0)
    texts = [
        "".join(one.memo.vocabulary.token_text(token) for token in outcome)
        for outcome in one.exact.cells().outcomes
    ]
    assert sorted(texts) == ["a-c", "a-d", "b-c", "b-d"]
    # No row was needed for the mark.
    assert one.memo.n_rows_remembered == 3


def test_a_large_vocabulary_without_truncation_takes_little_memory(models: Path) -> None:
    drafting = DraftOptions(policy="fixed", p_min=0.0)
    with opened(models, "large", drafting=drafting, top_k=0, top_p=1.0, min_p=0.0) as loaded:
        tracemalloc.start()
        result = sampled(loaded, n_draws=1000, depth=2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert not result.is_defect
    assert peak < 600e6


# --- places


def test_a_place_where_only_one_thing_can_be_said_tests_nothing(models: Path) -> None:
    with opened(models, 1, top_k=1) as loaded:
        result = sampled(loaded, n_draws=200)
    assert result.fits
    assert not result.is_tested
    assert all(depth.test.n_cells == 1 for depth in result.depths)
    assert all(depth.detectable == 1.0 for depth in result.depths)


def test_where_nothing_is_drafted_there_is_no_place(models: Path) -> None:
    drafting = DraftOptions(policy="fixed", ngram_min=30, ngram_max=30)
    with opened(models, 1, ngram=True, drafting=drafting) as loaded:
        prompt = loaded.prompts.of_text(PROMPT, chat=False)
        assert check_sampled(loaded, prompt, SampledPlan(), seed=0) is None


def test_interrupted_checks_end_without_a_result(models: Path) -> None:
    with opened(models, 1) as loaded:
        prompt = loaded.prompts.of_text(PROMPT, chat=False)
        assert (
            check_sampled(loaded, prompt, SampledPlan(), seed=0, interrupted=lambda: True) is None
        )
        for n in (1, N_AT_ONCE):
            stopped = check_greedy(loaded, [prompt], n_at_once=n, interrupted=lambda: True)
            assert list(stopped) == []
            assert list(check_greedy(loaded, [], n_at_once=n)) == []


# --- prompts and reports


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n', encoding="utf-8")
    assert read_prompts(file) == ["a", "b"]
    for content in ("x", '{"prompt": ""}', '{"turns": []}', "[1]", '{"prompt": 3}', ""):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(PromptError):
            read_prompts(file)


def test_prompts_are_spread_evenly() -> None:
    assert evenly_chosen("abcdef", 3) == ["a", "c", "e"]
    assert evenly_chosen("ab", 5) == ["a", "b"]


def test_the_check_says_how_much_room_it_needs() -> None:
    assert room(SampledPlan(depth=4)) == room(SampledPlan(depth=1)) + 3


def test_verdicts() -> None:
    equal = GreedyResult(1, 5, 3, 2, 5, 0.0, 0.0, None)
    report = ProofReport(
        "t",
        "d",
        "auto",
        3,
        SamplerOptions(logit_bias=((1, -math.inf),)),
        None,
        "greedy",
        (equal, replace(equal, n_at_once=3)),
        (),
    )
    assert report.verdict == "lossless"
    assert replace(report, greedy=(equal,)).undrafted == ["several answers at once"]
    assert replace(report, check="both").undrafted == ["sampled"]
    costs = tuple(replace(each, way="cost") for each in report.greedy)
    forced = tuple(replace(each, way="forced") for each in report.greedy)
    unforced = tuple(replace(each, n_drafted=0) for each in forced)
    assert replace(report, greedy=costs + forced).verdict == "lossless"
    assert replace(report, greedy=costs + unforced).verdict == "nothing drafted"
    undrafted = tuple(replace(each, n_drafted=0) for each in costs)
    assert replace(report, greedy=undrafted + forced).verdict == "lossless"
    assert replace(report, is_interrupted=True).verdict == "interrupted"
    assert replace(report, greedy=(replace(equal, n_drafted=0),)).verdict == "nothing drafted"
    assert replace(report, greedy=(replace(equal, moved_by=1.0),)).verdict == "defect"
    skipping = to_json_object(replace(report, skipped=(UncheckedPrompt(2, "too long"),)))
    assert skipping["skipped"] == [{"prompt": 2, "reason": "too long"}]
    assert skipping["sampler"]["logit_bias"] == [[1, None]]
    assert skipping["greedy"][0]["is_defect"] is False


def test_a_difference_needs_a_choice_of_the_target() -> None:
    from specgen.measure.proof import Choice

    choice = Choice(1, "a", 2.0, 2.0)
    near = Difference(0, choice, choice, True, 0.01, 0.02, 0.01, 2)
    assert not near.is_defect
    assert replace(near, was_chosen=False).is_defect
    # A batch that takes the other token too excuses no row that moved further.
    assert replace(near, moved_by=0.5).is_defect
