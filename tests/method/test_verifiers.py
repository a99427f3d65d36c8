"""Verified text is distributed as the target's own: goodness of fit against the exact answer.

Each test draws many short generations and compares the joint distribution of their second to
fourth tokens with the one that the language defines, by a G-test at a false-alarm level of 1e-4 a
test. (The first token comes from the prompt's round, in which nothing is drafted.) The number of
draws is what finds any deviation of 0.12 (total variation, as the test pools the outcomes) with
probability 0.99, which `p_value` checks. Seeds are fixed, so a test that passes keeps passing; the
level says how likely a correct verifier would have failed when the seed was chosen (about 0.5 %
for all of them together).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from specgen.drafters.ngram import SuffixDrafter
from specgen.method.draft import Draft
from specgen.method.drafter import Drafter
from specgen.method.policy import Policy
from specgen.method.verify import ResidualVerifier, Verifier
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions, VerifierName
from specgen.session.answer_loop import AnswerLoop
from tests.helpers.exact_distributions import distribution
from tests.helpers.fake_backend import FakeVocabulary, Language, noisy, random_language
from tests.helpers.fake_generations import Clock, Setup, TreeDrafter, model_drafter
from tests.helpers.goodness_of_fit import LEVEL, p_value
from tests.registry import JUDGES

N_VOCAB = 5
#: Tokens that are tested, after the first.
N_TOKENS = 3
N_DRAWS = 1300
PROMPT = (0, 1, 0, 1, 0, 1)
LETTERS = FakeVocabulary.letters(N_VOCAB)

SAMPLERS = {
    "plain": SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "hot": SamplerOptions(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0),
    "chain": SamplerOptions(temperature=0.8, top_k=5, top_p=0.95, min_p=0.02),
}


def cached(language: Language) -> Language:
    return functools.lru_cache(maxsize=None)(language)


TARGET = cached(random_language(N_VOCAB, seed=3, scale=1.2))
DRAFTS: dict[str, Language] = {
    "perfect": TARGET,
    "good": cached(noisy(TARGET, 0.5)),
    "bad": cached(random_language(N_VOCAB, seed=4, scale=1.2)),
    "adversarial": cached(lambda text: -2 * TARGET(text)),
}


def exact(sampler: SamplerOptions) -> dict[tuple[int, ...], float]:
    """The joint distribution of the tokens after the first one."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(1 + N_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, prob in joint.items():
            step = distribution(TARGET(PROMPT + text), sampler)
            for token, p in zip(step.token_ids.tolist(), step.probs.tolist(), strict=True):
                longer[(*text, token)] = prob * p
        joint = longer
    after_first: Counter[tuple[int, ...]] = Counter()
    for text, prob in joint.items():
        after_first[text[1:]] += prob  # type: ignore[assignment]
    return dict(after_first)


def draw(
    sampler: SamplerOptions,
    make_drafter: Callable[[int], Drafter | None],
    verifier: Verifier | None = None,
    drafting: DraftOptions = DraftOptions(policy="fixed", max_tokens=2, p_min=0.0),
    policy: Callable[[DraftOptions], Policy] | None = None,
) -> Counter[tuple[int, ...]]:
    """The tokens after the first one of many answers.

    With two drafted tokens they are accepted or corrected ones, and bonus tokens.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    rng = np.random.default_rng(12)
    for draw_number in range(N_DRAWS):
        setup = Setup(
            language=TARGET,
            vocabulary=LETTERS,
            drafter=make_drafter(int(rng.integers(2**31))),
            sampler=sampler,
            drafting=drafting,
            policy=policy,
            # Room for whole drafts.
            options=GenerationOptions(max_tokens=1 + N_TOKENS + 2),
            seed=10_000 + draw_number,
            prompt=PROMPT,
            verifier=verifier,
            n_batch=128,
        )
        loop, generation = AnswerLoop(setup.backend(), Clock()), setup.generation()
        loop.start(generation)
        while len(generation.answer) < 1 + N_TOKENS:
            loop.round([generation])
        assert generation.cascade is not None, "drafting failed"
        counts[tuple(generation.answer[1 : 1 + N_TOKENS])] += 1
    return counts


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("verifier", JUDGES)
def test_deterministic_drafts_fit(verifier: VerifierName, sampler: str) -> None:
    options, judge = SAMPLERS[sampler], JUDGES[verifier]

    def tree(seed: int) -> Drafter:
        return TreeDrafter(DRAFTS["good"], 4, 0.8, np.random.default_rng(seed))

    assert p_value(draw(options, tree, judge()), exact(options)) > LEVEL
    counts = draw(options, lambda seed: SuffixDrafter(1, 3), judge())
    assert p_value(counts, exact(options)) > LEVEL


@pytest.mark.parametrize("p_min", [0.3, 0.6])
def test_stopping_where_the_draft_is_unsure_does_not_bias(p_min: float) -> None:
    options = SAMPLERS["plain"]

    def with_stop(seed: int) -> Drafter:
        return model_drafter(DRAFTS["good"], LETTERS, options, seed=seed)[0]

    drafting = DraftOptions(policy="fixed", max_tokens=3, min_tokens=2, p_min=p_min)
    assert p_value(draw(options, with_stop, drafting=drafting), exact(options)) > LEVEL


def test_residual_sampling_accepts_what_the_distributions_share() -> None:
    """The chance to accept is the sum of min(target, draft), over the text's own contexts."""
    options = SAMPLERS["plain"]
    rng = np.random.default_rng(1)
    verifier = ResidualVerifier()
    target = distribution(TARGET(PROMPT), options)
    draft = distribution(DRAFTS["good"](PROMPT), options)
    shared = float(np.minimum(target.probs, draft.probs).sum())
    n = 20_000
    n_accepted = 0
    for _ in range(n):
        chain = Draft.chain([draft.draw(rng)], "model", distributions=[draft])
        verdict = verifier.verify(chain, lambda node: target, rng)
        n_accepted += len(verdict.path)
    assert n_accepted / n == pytest.approx(shared, abs=5 * np.sqrt(0.25 / n))
