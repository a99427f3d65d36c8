"""The checks of `specgen verify`, and the joint samples of tests: they find every bug, and report
none where there is none.

The level of the sampled checks is 1e-5 for each test, in about 30 runs without a bug. With new
seeds, some test would fail by chance with a probability below 1e-3; the seeds are fixed.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specgen.method.loop
from specgen.errors import BackendError
from specgen.llama import LlamaBackend
from specgen.measure.exactness import sampled_check
from specgen.measure.exactness.finished_answers import N_AT_ONCE
from specgen.measure.exactness.greedy_check import GreedyResult, check_greedy
from specgen.measure.exactness.near_ties import Difference, movement
from specgen.measure.exactness.report import VerifyReport
from specgen.measure.exactness.sampled_check import (
    SAMPLES_PER_SEARCH,
    SampledResult,
    check_sampled,
)
from specgen.measure.exactness.verification import run_checks
from specgen.measure.exactness.visible_places import Place, find_places
from specgen.measure.exactness.ways_to_draft import ways_to_draft
from specgen.measure.goodness_of_fit import GTest
from specgen.method.backend import Backend, Batch
from specgen.method.draft import Branches, Draft, keep_path
from specgen.options import DraftOptions, GenerationOptions, Grammar, SamplerOptions
from specgen.session.session import Session
from specgen.system.arrays import Logits
from tests.helpers.bugs import BUGS, lose_bonus, plant
from tests.helpers.heads import make_heads
from tests.helpers.joint_draws import JointDraws, draw_with_models
from tests.helpers.sessions import options_of
from tests.helpers.virtual_time import VirtualTime
from tests.tiny import TinyConfig, write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = "".join(map(chr, range(32, 127))) + " the cat is in the else for with that it be not self"
PROMPTS = tuple(PROMPT[start:] for start in (0, 9, 30, 60))
#: The scale of the target's logits, the draft's noise, and the seed: 40% to 85% are accepted.
PAIRS = ((3.0, 0.05, 0), (4.0, 0.05, 1), (3.0, 0.1, 2))
LEVEL = 1e-5
FIXED = DraftOptions(policy="fixed", ngram_min=1)
EAGER = DraftOptions(policy="fixed", p_min=0.0, ngram_min=1)
#: As `specgen run` drafts by default. N-grams of one token: tiny models repeat nothing longer.
BY_COST = DraftOptions(ngram_min=1)
#: At temperature 0 only one token is likely enough for a lenient verifier.
GREEDY_BUGS = [name for name, bug in BUGS.items() if not bug.needs_draws and name != "lenient"]
#: The next token is never a bonus token, which comes after a whole draft.
NEXT_TOKEN_BUGS = [name for name in BUGS if name != "stale-bonus"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    for number, (logit_scale, noise, seed) in enumerate(PAIRS):
        config = TinyConfig(logit_scale=logit_scale, seed=seed, unprintable_scale=0.0)
        write_tiny_model(folder / f"target {number}.gguf", config)
        write_tiny_model(folder / f"draft {number}.gguf", config.draft(noise))
    return folder


def opened(
    models: Path,
    pair: object = 0,
    drafting: DraftOptions = FIXED,
    *,
    ngram: bool = False,
    grammar: str | None = None,
    max_tokens: int = 40,
    clock: Callable[[], float] = time.perf_counter,
    draft: Path | None = None,
    **sampler: Any,
) -> Session:
    rules = None if grammar is None else Grammar("gbnf", grammar)
    options = options_of(
        models / f"target {pair}.gguf",
        draft or ("ngram" if ngram else f"draft {pair}"),
        sampler=SamplerOptions(**{"temperature": 0.8, "seed": 0, **sampler}),
        drafting=drafting,
        generation=GenerationOptions(max_tokens=max_tokens, grammar=rules),
    )
    return Session(options, clock)


def greedy(session: Session, *, n_at_once: int = 1) -> list[GreedyResult]:
    prompts = {n: session.prompts.of_text(text, chat=False) for n, text in enumerate(PROMPTS)}
    return list(check_greedy(session, prompts, n_at_once=n_at_once))


def sampled(session: Session, n_samples: int = 500, seed: int = 1) -> SampledResult:
    prompts = {1: session.prompts.of_text(PROMPT, chat=False)}
    result = check_sampled(session, prompts, n_samples, LEVEL, seed=seed)
    assert result is not None
    return result


def drawn_jointly(session: Session, seed: int = 1) -> JointDraws:
    prompt = session.prompts.of_text(PROMPT, chat=False)
    drawn = draw_with_models(session, prompt, 3, 4000, seed)
    assert drawn is not None
    return drawn


# --- known bugs


def build_in(monkeypatch: pytest.MonkeyPatch, bug: str | None) -> None:
    if bug == "skipped bonus":
        lose_bonus(monkeypatch)
    elif bug is not None:
        plant(monkeypatch, bug)


@pytest.mark.parametrize("pair", [0, 2])
@pytest.mark.parametrize("bug", [None, *BUGS, "skipped bonus"])
def test_joint_samples_reveal_every_planted_bug(
    models: Path, monkeypatch: pytest.MonkeyPatch, bug: str | None, pair: int
) -> None:
    build_in(monkeypatch, bug)
    with opened(models, pair, top_k=5) as loaded:
        draws = (drawn_jointly(loaded, seed) for seed in (1, 2, 3))
        if bug is not None:
            # Not by a hair: other seeds and other machines find it too.
            assert any(min(fit.test.p_value for fit in each.fits) < 1e-6 for each in draws)
            return
        found = next(draws)
    assert all(fit.test.p_value > LEVEL and not fit.n_impossible for fit in found.fits)
    assert 0.2 <= found.n_accepted / found.n_drafted <= 0.95
    assert max(fit.detectable(LEVEL) for fit in found.fits) <= 0.1


@pytest.mark.parametrize("bug", [None, *NEXT_TOKEN_BUGS])
def test_draws_of_the_next_token_show_bugs(
    models: Path, monkeypatch: pytest.MonkeyPatch, bug: str | None
) -> None:
    build_in(monkeypatch, bug)
    found = []
    for pair in range(len(PAIRS)):
        with opened(models, pair, EAGER) as loaded:
            found.append(sampled(loaded))
        if found[-1].is_defect:
            break
    assert any(each.n_drafted and each.test.n_cells > 1 for each in found)
    assert any(each.is_defect for each in found) == (bug is not None)


@pytest.mark.parametrize("n_at_once", [1, N_AT_ONCE])
@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("bug", [None, "skipped bonus", *GREEDY_BUGS])
def test_greedy_texts_reveal_the_bugs_that_need_no_samples(
    models: Path, monkeypatch: pytest.MonkeyPatch, bug: str | None, ngram: bool, n_at_once: int
) -> None:
    build_in(monkeypatch, bug)
    with opened(models, 1, EAGER, ngram=ngram, temperature=0.0) as loaded:
        results = greedy(loaded, n_at_once=n_at_once)
    assert len(results) == len(PROMPTS) > N_AT_ONCE
    assert all(result.n_drafted for result in results)
    assert any(result.is_defect for result in results) == (bug is not None)
    assert bug or all(result.difference is None for result in results)


# --- a cache with rejected tokens


@pytest.mark.parametrize("of_another", [False, True])
def test_a_wrong_branch_that_is_kept_is_a_defect(
    models: Path, monkeypatch: pytest.MonkeyPatch, of_another: bool
) -> None:
    """The last token of this answer's cache, or of another one's, becomes a rejected one."""
    kept: list[Branches] = []

    def keep_wrong(backend: Backend, slot: Branches, draft: Draft, path: abc.Sequence[int]) -> None:
        keep_path(backend, slot, draft, path)
        wrong = slot if not of_another else next((s for s in kept[::-1] if s != slot), None)
        kept.append(slot)
        if len(path) < len(draft) and wrong is not None:
            position = backend.length(wrong.first) - 1
            if position > 1:
                backend.remove(wrong.first, position)
                batch = Batch()
                batch.add(draft.tokens[-1], position, (wrong.first,), False)
                backend.decode(batch)

    monkeypatch.setattr(specgen.method.loop, "keep_path", keep_wrong)
    with opened(models, 1, EAGER, temperature=0.0) as loaded:
        assert any(result.is_defect for result in greedy(loaded, n_at_once=N_AT_ONCE))
        kept.clear()  # the next context has no other slot
        assert any(result.is_defect for result in greedy(loaded)) != of_another


# --- as `specgen run` drafts by default: costs decide, and n-grams draft beside the model


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Rows are cheap, and a drafted token takes a third of the time of the target's.

    So model and n-grams both pay, and the model stops early enough for n-grams to continue.
    """

    def seconds(name: str, n_rows: int) -> float:
        return (0.03 if name.startswith("draft") else 0.1) * (1.0 + 0.03 * (n_rows - 1))

    return VirtualTime(monkeypatch, seconds)


@pytest.mark.parametrize("pair", [0, 2])
@pytest.mark.parametrize("seed", [-1, 0])
def test_the_default_settings_fit_the_exact_distribution(
    models: Path, costs: VirtualTime, pair: int, seed: int
) -> None:
    """Without a seed a chain is sampled. With a seed, drafts are trees that are matched."""
    with opened(models, pair, BY_COST, clock=costs, seed=seed, top_k=5) as loaded:
        assert loaded.settings.verifier == ("auto" if seed < 0 else "match")
        result = sampled(loaded)
    assert result.n_drafted > 0
    assert not result.is_defect


@pytest.mark.parametrize("bug", [None, *GREEDY_BUGS])
def test_greedy_texts_show_bugs_in_the_default_settings(
    models: Path, costs: VirtualTime, monkeypatch: pytest.MonkeyPatch, bug: str | None
) -> None:
    build_in(monkeypatch, bug)
    with opened(models, 1, BY_COST, clock=costs, temperature=0.0, seed=-1) as loaded:
        results = greedy(loaded)
    assert {result.way for result in results} == {"cost"}
    assert any(result.is_defect for result in results) == (bug is not None)


# --- near-ties


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that depend on whether they are computed in a batch."""
    decode = LlamaBackend.decode

    def rounded(backend: LlamaBackend, batch: Batch) -> Logits:
        logits = decode(backend, batch)
        if len(batch) > 1:
            wanted = [p for p, w in zip(batch.positions, batch.wants_logits, strict=True) if w]
            for row, position in zip(logits, wanted, strict=True):
                noise = np.random.default_rng(position).normal(size=len(row))
                np.add(row, 0.05 * noise, out=row, casting="same_kind")
        return logits

    monkeypatch.setattr(LlamaBackend, "decode", rounded)


@pytest.mark.usefixtures("rounding")
def test_rounding_in_batches_is_not_a_defect_but_a_bug_is_still_found(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(models, 1, EAGER, temperature=0.0, max_tokens=100) as loaded:
        results = greedy(loaded)
        differences = [result.difference for result in results if result.difference is not None]
        assert differences
        assert not any(result.is_defect for result in results)
        for difference in differences:
            assert 0.0 < difference.gap < 0.5
            assert difference.allowed > 0.0
        plant(monkeypatch, "wrong-row")
        assert any(result.is_defect for result in greedy(loaded))


@pytest.mark.parametrize("top_p", [0.95, 0.01])
def test_a_near_tie_is_one_even_if_the_sampler_keeps_only_one_token(
    models: Path, monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    decode = LlamaBackend.decode
    rng = np.random.default_rng(0)

    def rounded(backend: LlamaBackend, batch: Batch) -> Logits:
        logits = decode(backend, batch)
        if len(batch) > 1:  # in another way each time, so that plain decoding does not repeat it
            noise = rng.normal(size=logits.shape)
            np.add(logits, 0.05 * noise, out=logits, casting="same_kind")
        return logits

    monkeypatch.setattr(LlamaBackend, "decode", rounded)
    with opened(models, 1, EAGER, temperature=0.0, max_tokens=100, top_p=top_p) as loaded:
        results = greedy(loaded)
    assert any(result.difference is not None for result in results)
    assert not any(result.is_defect for result in results)


@pytest.mark.parametrize("n_at_once", [1, N_AT_ONCE])
def test_an_answer_that_fails_in_its_last_round_is_an_error(
    models: Path, monkeypatch: pytest.MonkeyPatch, n_at_once: int
) -> None:
    """It fails without an event, and no request comes after it."""
    decode = LlamaBackend.decode

    def broken(backend: LlamaBackend, batch: Batch) -> Logits:
        logits = decode(backend, batch)
        if sum(batch.wants_logits) > 1 and max(batch.positions) > n_prompt + 10:
            logits[:] = np.nan
        return logits

    with opened(models, 1, EAGER, temperature=0.0) as loaded:
        prompts = {1: loaded.prompts.of_text(PROMPT, chat=False)}
        n_prompt = len(prompts[1].tokens)
        monkeypatch.setattr(LlamaBackend, "decode", broken)
        with pytest.raises(BackendError, match="largest logit is nan"):
            list(check_greedy(loaded, prompts, n_at_once=n_at_once))


def test_movement_ignores_a_constant_added_to_all_logits() -> None:
    row = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    assert movement(row, row + np.float32(3.0)) < 1e-6
    assert movement(row, row + np.float32(0.1) * row[::-1]) == pytest.approx(0.1, rel=0.1)


# --- limits, positions and reports


@pytest.mark.parametrize("n_at_once", [1, N_AT_ONCE])
def test_answers_without_a_limit_continue_until_the_context_is_full(
    models: Path, n_at_once: int
) -> None:
    with opened(models, 1, EAGER, temperature=0.0, max_tokens=-1) as loaded:
        small = replace(
            loaded.options,
            target_context=replace(loaded.options.target_context, n_ctx=256),
            generation=replace(loaded.options.generation, ignore_eos=True),
        )
    with Session(small, time.perf_counter) as loaded:
        prompt = loaded.prompts.of_text(PROMPTS[0], chat=False)
        results = list(check_greedy(loaded, {1: prompt}, n_at_once=n_at_once))
    assert [result.prompt for result in results] == [1] * n_at_once, "few prompts are repeated"
    assert not any(result.is_defect for result in results)
    assert max(result.n_tokens for result in results) >= 256 - len(prompt.tokens)
    assert min(result.n_drafted for result in results) > 0


def test_draws_in_a_grammar_fit(models: Path) -> None:
    with opened(models, 0, EAGER, grammar="root ::= [a-h] [a-h] [a-h] [a-h]+") as loaded:
        result = sampled(loaded, n_samples=150)
    assert (result.n_answer, result.n_impossible, result.is_defect) == (1, 0, False)
    assert result.n_drafted > 0
    assert result.test.n_cells > 1


def test_draws_of_decoder_heads_fit(models: Path, tmp_path: Path) -> None:
    """They draft nothing for the first two tokens of an answer."""
    make_heads(models / "target 1.gguf", tmp_path / "heads.gguf", tmp_path / "text", 1.0)
    with opened(models, 1, EAGER, draft=tmp_path / "heads.gguf") as loaded:
        result = sampled(loaded, n_samples=150)
    assert result.n_drafted > 0
    assert not result.is_defect


def test_samples_are_taken_where_something_is_drafted(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text before the first place has no n-gram that occurred before."""

    def with_undrafted_place(session: Session, *arguments: Any) -> list[Place]:
        places = list(find_places(session, *arguments))
        new_tokens = session.target.vocabulary.tokenize("é", add_special=False, parse_special=False)
        return [*places, replace(places[0], answer=tuple(new_tokens), visibility=1.0)]

    monkeypatch.setattr(sampled_check, "find_places", with_undrafted_place)
    with opened(models, 0, EAGER, ngram=True) as loaded:
        result = sampled(loaded, n_samples=150)
    assert result.n_samples == 150
    assert result.n_drafted > 0
    assert not result.is_defect


def test_an_interruption_keeps_the_samples_so_far(models: Path) -> None:
    n_done = 0

    def count(done: int, _total: int) -> None:
        nonlocal n_done
        n_done = done

    with opened(models, 0, EAGER) as loaded:
        prompts = {1: loaded.prompts.of_text(PROMPT, chat=False)}
        result = check_sampled(
            loaded,
            prompts,
            10_000,
            LEVEL,
            progress=count,
            interrupted=lambda: n_done >= SAMPLES_PER_SEARCH + 100,
        )
    assert result is not None
    assert 100 <= result.n_samples < 200
    assert result.n_samples == n_done - SAMPLES_PER_SEARCH
    assert not result.is_defect


def test_the_verdict_follows_from_the_results() -> None:
    equal = GreedyResult(1, "fixed", 1, 5, 3, 2)
    at_once = replace(equal, n_at_once=3)
    place = SampledResult(1, "fixed", 9, 3, 100, 0, 50, 20, 1e-4, GTest(1.0, 2, 0.5, 0))
    report = VerifyReport("t", "d", "auto", 3, SamplerOptions(), "both", (equal, at_once), (place,))

    def verdict(**changes: object) -> str:
        return replace(report, **changes).verdict  # type: ignore[arg-type]

    undrafted, costly = replace(equal, n_drafted=0), replace(equal, way="cost", n_drafted=0)
    assert verdict() == "lossless"
    assert verdict(sampled=()) == verdict(greedy=(undrafted, at_once)) == "nothing drafted"
    assert verdict(greedy=(costly, replace(equal, way="forced"), at_once)) == "lossless"
    assert verdict(sampled=(), is_interrupted=True) == "interrupted"
    wrong = replace(equal, difference=Difference(0, "a", "", float("inf"), 0.0))
    assert verdict(greedy=(wrong,)) == "defect"
    assert verdict(sampled=(replace(place, test=GTest(99.0, 2, 1e-9, 0)),)) == "defect"
    found = replace(report, greedy=(wrong,), skipped=(2,)).to_json_object()
    assert found["skipped"] == [2]
    assert found["greedy"][0]["is_defect"] is True
    assert found["greedy"][0]["difference"]["gap"] == "inf"
    assert found["sampled"][0]["test"]["n_cells"] == 2


def test_a_second_interruption_keeps_the_results_so_far(models: Path) -> None:
    def interrupt(name: str, _done: int, _total: int) -> None:
        if "at once" in name:
            raise KeyboardInterrupt

    with opened(models, max_tokens=12, temperature=0.0) as session:
        report = run_checks(
            session,
            {1: session.prompts.of_text(PROMPT, chat=False)},
            ways_to_draft(EAGER),
            check="both",
            sampling=SamplerOptions(temperature=0.8, seed=0),
            n_samples=120,
            progress=interrupt,
            interrupted=lambda: False,
        )
    assert len(report.greedy) == 1
    assert report.verdict == "interrupted"


def test_all_checks_share_one_progress(models: Path) -> None:
    shown: list[tuple[str, int, int]] = []
    with opened(models, max_tokens=12, temperature=0.0) as session:
        prompts = {n: session.prompts.of_text(text, chat=False) for n, text in enumerate(PROMPTS)}
        run_checks(
            session,
            prompts,
            ways_to_draft(EAGER),
            check="both",
            sampling=SamplerOptions(temperature=0.8, seed=0),
            n_samples=120,
            progress=lambda *step: shown.append(step),
            interrupted=lambda: False,
        )
    done = [step[1] for step in shown]
    totals = {step[2] for step in shown}
    assert done == sorted(done)
    assert totals == {done[-1]}
    assert list(dict.fromkeys(name for name, _, _ in shown)) == [
        "greedy, plain decoding",
        "greedy, --policy fixed",
        f"greedy, {N_AT_ONCE} answers at once",
        "sampled, --policy fixed",
    ]
