"""What specgen draws, against a reference that shares no line with its samplers, verifiers and statistics:
logits of llama-cpp-python's `Llama`, samplers in NumPy after llama.cpp's documents, all texts of three
tokens enumerated, and SciPy's test."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import Llama
from numpy.typing import NDArray
from scipy import stats

from specgen.options import SamplerOptions
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts.continued import of_tokens
from specgen.session.session import Session
from tests.helpers.sessions import folder_with, options_of
from tests.tiny import TinyConfig

#: Probability that a correct specgen fails, of each test, were its seeds drawn anew.
LEVEL = 1e-5
#: A total variation distance that is found with this probability.
DEVIATION, POWER = 0.08, 0.99
N_DRAWS = 7_000
N_AT_ONCE = 500
#: Draws that a cell has to have on average; rarer texts share one.
N_EXPECTED = 8.0
N_TOKENS = 3
N_PROMPT = 60
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 5, 0.95, 0.05


TARGET = TinyConfig(logit_scale=2.0, n_ctx_train=512)
models = folder_with(target=TARGET, draft=TARGET.draft(0.1))


def distribution(logits: NDArray[np.float32]) -> dict[int, float]:
    """The tokens that top-k, top-p and min-p keep, and their probabilities at the temperature."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")[:TOP_K]
    kept = logits[order].astype(np.float64)
    probabilities = np.exp(kept - kept.max())
    probabilities /= probabilities.sum()
    n = int(np.searchsorted(np.cumsum(probabilities), TOP_P)) + 1
    kept = kept[:n]
    kept = kept[np.exp(kept - kept.max()) >= MIN_P]
    weights = np.exp((kept - kept.max()) / TEMPERATURE)
    weights /= weights.sum()
    return dict(zip(order[: len(kept)].tolist(), weights.tolist(), strict=True))


@pytest.fixture(scope="module")
def llama(models: Path) -> Iterator[Llama]:
    opened = Llama(
        str(models / "target.gguf"),
        n_ctx=256,
        n_threads=1,
        logits_all=True,
        verbose=False,
        type_k=0,
        type_v=0,
    )
    yield opened
    opened.close()


def logits_after(llama: Llama, tokens: Sequence[int]) -> NDArray[np.float32]:
    llama.reset()  # type: ignore[no-untyped-call]
    llama.eval(tokens)
    row: NDArray[np.float32] = llama.scores[llama.n_tokens - 1]
    return row


@pytest.fixture(scope="module")
def prompt(llama: Llama) -> tuple[int, ...]:
    """A text of the model's own, and behind it a token that stands in it already, after which the model
    is likely to say two tokens again: n-grams propose the second of them."""
    text = [1, 40, 90, 70]
    while len(text) < N_PROMPT:
        text.append(int(np.argmax(logits_after(llama, text))))

    def repeats(place: int) -> float:
        one, two = text[place + 1 : place + 3]
        begun = [*text, text[place]]
        first = distribution(logits_after(llama, begun)).get(one, 0.0)
        return first * distribution(logits_after(llama, [*begun, one])).get(two, 0.0)

    again = max(range(4, N_PROMPT - 2), key=repeats)
    return (*text, text[again])


@pytest.fixture(scope="module")
def expected(llama: Llama, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """The probability of each text of three tokens behind the prompt."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(N_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in found.items():
            after = distribution(logits_after(llama, [*prompt, *text]))
            longer |= {(*text, token): probability * each for token, each in after.items()}
        found = longer
    assert len(found) > 30
    return found


@pytest.mark.parametrize(
    ("draft", "policy"),
    [("none", "cost"), ("ngram", "fixed"), ("draft", "fixed"), ("draft", "cost")],
)
def test_draws_fit_the_reference(
    models: Path,
    prompt: tuple[int, ...],
    expected: dict[tuple[int, ...], float],
    draft: str,
    policy: str,
) -> None:
    options = options_of(
        models / "target.gguf",
        draft,
        n_tokens=N_TOKENS,
        sampler=SamplerOptions(temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P, min_p=MIN_P),
        drafting={"policy": policy, "max_tokens": None, "ngram_min": 1},
    )
    counted: collections.Counter[tuple[int, ...]] = collections.Counter()
    n_accepted = 0
    with Session(options, time.perf_counter) as loaded:
        begun = of_tokens(loaded.prompts, prompt)
        calibrate(loaded)
        with Engine(loaded, n_parallel=8, n_ctx=128) as engine:
            for start in range(0, N_DRAWS, N_AT_ONCE):
                answers = [
                    engine.insert(begun, sampling=replace(options.sampler, seed=start + number))
                    for number in range(N_AT_ONCE)
                ]
                collections.deque(engine.run(), maxlen=0)
                for answer in answers:
                    assert answer.finished is not None
                    counted[answer.finished.token_ids] += 1
                    n_accepted += answer.finished.n_accepted
    assert n_accepted > 0 or draft == "none" or policy == "cost"
    assert not set(counted) - set(expected), "a text that the target never says"
    check_fit(counted, expected)


def check_fit(
    counted: collections.Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> None:
    n = sum(counted.values())
    large = [text for text, probability in expected.items() if n * probability >= N_EXPECTED]
    rest = 1.0 - sum(expected[text] for text in large)
    probabilities = np.array([*(expected[text] for text in large), max(rest, 0.0)])
    counts = np.array([counted[text] for text in large], dtype=float)
    counts = np.append(counts, n - counts.sum())
    if probabilities[-1] * n < N_EXPECTED:  # too rare to be a cell
        counts[0] += counts[-1]
        probabilities[0] += probabilities[-1]
        counts, probabilities = counts[:-1], probabilities[:-1]
    n_cells = len(counts)
    # A distance d in total variation makes a chi-squared distance of 4 d^2 at least.
    critical = stats.chi2.isf(LEVEL, n_cells - 1)
    assert stats.ncx2.sf(critical, n_cells - 1, 4.0 * n * DEVIATION**2) >= POWER
    tested = stats.power_divergence(counts, n * probabilities, lambda_="log-likelihood")
    assert tested.pvalue >= LEVEL
