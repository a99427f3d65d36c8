"""Trying a draft on recorded answers: what it would draft, and what that would gain."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from specgen.measure.draft_trial import (
    Baseline,
    Replay,
    TrialAnswer,
    agreeing_path,
    replay,
    summarise,
)
from specgen.method.answer_stats import AnswerStats
from specgen.method.draft import Draft
from specgen.method.drafter import Drafter
from specgen.options import DraftOptions, GenerationOptions
from tests.helpers.fake_backend import FakeVocabulary, noisy, random_language
from tests.helpers.fake_generations import (
    N_VOCAB,
    Clock,
    NoDrafter,
    Setup,
    model_drafter,
    ngram_drafter,
    plain_answer,
)

LANGUAGE = random_language(N_VOCAB, seed=7)
#: A batch of n rows takes 8 + 2 n seconds, so a token by itself takes 10.
BASELINE = Baseline((), (), 256, {rows: 8.0 + 2.0 * rows for rows in (1, 2, 3, 5)})


def replayed(setup: Setup, clock: Callable[[], float] | None = None) -> Replay:
    answer = TrialAnswer("", plain_answer(setup))
    generation = setup.generation()
    result = replay(generation, answer, BASELINE, clock or Clock())
    assert tuple(generation.tokens[generation.n_prompt :]) == answer.tokens
    assert generation.is_finished
    return result


def drafters() -> dict[str, Callable[[], Drafter]]:
    vocabulary = FakeVocabulary.letters(N_VOCAB)
    return {
        "itself": lambda: model_drafter(LANGUAGE, vocabulary)[0],
        "close": lambda: model_drafter(noisy(LANGUAGE, 1.0), vocabulary)[0],
        "far": lambda: model_drafter(random_language(N_VOCAB, seed=8), vocabulary)[0],
        "ngram": ngram_drafter,
        "nothing": NoDrafter,
    }


@pytest.mark.parametrize("name", ["itself", "close", "far", "ngram", "nothing"])
@pytest.mark.parametrize(
    "drafting",
    [
        DraftOptions(policy="fixed", max_tokens=4, p_min=0.0),
        DraftOptions(policy="fixed", max_tokens=3, p_min=0.3),
        DraftOptions(policy="fixed", max_tokens=4, p_min=0.2, min_tokens=2),
    ],
)
@pytest.mark.parametrize("max_tokens", [40, 2])
def test_a_replay_drafts_and_accepts_like_a_real_run(
    name: str, drafting: DraftOptions, max_tokens: int
) -> None:
    setup = Setup(drafting=drafting, options=GenerationOptions(max_tokens=max_tokens))
    setup.drafter = drafters()[name]()
    real, _ = setup.run()
    setup.drafter = drafters()[name]()
    found = replayed(setup)
    stats = real.stats
    assert found.stats.n_rounds == stats.n_rounds
    assert found.stats.n_drafted == stats.n_drafted
    assert found.stats.n_accepted == stats.n_accepted
    assert found.n_tokens == stats.n_round_tokens


def test_an_answer_that_ends_by_itself_is_replayed_to_its_end() -> None:
    vocabulary = FakeVocabulary.letters(N_VOCAB, ends=[2])
    for seed in range(20):
        setup = Setup(language=random_language(N_VOCAB, seed=seed), vocabulary=vocabulary)
        if len(answer := plain_answer(setup)) < 40:
            break
    else:
        pytest.fail("no answer ends by itself")
    assert vocabulary.is_end(answer[-1])
    setup.drafter = model_drafter(setup.language, vocabulary)[0]
    real, _ = setup.run()
    setup.drafter = model_drafter(setup.language, vocabulary)[0]
    assert replayed(setup).stats.n_accepted == real.stats.n_accepted


def test_the_cost_of_a_round_is_that_of_the_batch_and_of_drafting() -> None:
    # Each proposal takes a second of this clock; the first is the decode of the prompt.
    itself = replayed(
        Setup(drafter=drafters()["itself"](), options=GenerationOptions(max_tokens=11))
    )
    # 10 tokens after the prompt's: rounds of 4 + 1 of them.
    assert (itself.n_tokens, itself.stats.n_rounds, itself.stats.n_drafted) == (10, 2, 8)
    assert (itself.start_s, itself.stats.draft_s) == (1.0, 2.0)
    assert itself.stats.target_s == 2 * 18.0
    assert itself.token_s == 10.0
    assert itself.speedup == pytest.approx(100 / 38)


# --- trees


def test_of_a_tree_the_branch_that_the_answer_follows_is_accepted() -> None:
    #    5      7
    #   6 8    9
    tokens, parents = (5, 6, 7, 8, 9), (-1, 0, -1, 0, 2)
    n = len(tokens)
    tree = Draft(tokens, parents, ("tree",) * n, (None,) * n, (None,) * n)
    assert agreeing_path(tree, (5, 8, 1)) == (0, 3)
    assert agreeing_path(tree, (7, 9)) == (2, 4)
    assert agreeing_path(tree, (7,)) == (2,)
    assert agreeing_path(tree, (6, 5)) == ()
    assert agreeing_path(tree, ()) == ()


# --- figures


def test_figures_are_reported_for_each_kind_of_task() -> None:
    replays = [a_replay(30, 10, 5.0, 25.0, kind) for kind in ("code", "prose", "code")]
    kinds = summarise(replays).kinds
    assert {kind: of.n_answers for kind, of in kinds.items()} == {"code": 2, "prose": 1}
    assert not summarise(replays[:1]).kinds


def a_replay(
    n_tokens: int, n_rounds: int, draft_s: float, target_s: float, kind: str = ""
) -> Replay:
    stats = AnswerStats(n_rounds=n_rounds, n_drafted=3 * n_rounds, n_accepted=n_tokens - n_rounds)
    stats.draft_s, stats.target_s = draft_s, target_s
    stats.drafted_by_depth.update(dict.fromkeys(range(3), n_rounds))
    return Replay(n_tokens, stats, 5.0, 2.0, kind)


def test_the_speedup_is_the_mean_over_answers_and_other_figures_are_ratios_of_sums() -> None:
    figures = summarise([a_replay(30, 10, 5.0, 25.0), a_replay(10, 10, 5.0, 20.0)])
    assert figures.speedup == pytest.approx(math.sqrt(2.0 * 0.8))
    assert figures.worst_speedup == pytest.approx(20 / 25)
    assert figures.gain == "1.3 times as fast as without drafts (0.8 to 2.0 in 2 answers)"
    assert figures.tokens_per_s == pytest.approx(40 / 55)
    assert figures.acceptance_rate == pytest.approx(20 / 60)
    assert figures.mean_accepted_length == pytest.approx(2.0)
    assert figures.draft_token_s == pytest.approx(10 / 60)
    assert figures.start_s == 5.0
