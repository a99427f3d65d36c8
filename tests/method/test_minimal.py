"""The minimal program has the real loop's greedy text, and samples from the target's distribution.

Tokens that it samples are compared with the target's exact joint distribution of the next tokens,
by G-tests. Their false-alarm levels sum to `OVERALL_LEVEL`: were the seeds drawn anew, a correct
program would fail somewhere with that probability. The seeds are fixed, so what passes goes on
passing. Each test finds a total variation distance of `DEVIATION` with probability 0.99.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from specgen.examples.minimal import MAX_TOKENS, generate, main
from specgen.llama import LlamaBackend, LlamaModel
from specgen.method.backend import Backend
from specgen.options import ContextOptions, DraftOptions, GenerationOptions
from specgen.system.arrays import Logits
from tests.helpers import sessions
from tests.helpers.common import EXACT
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, Language, noisy, random_language
from tests.helpers.fake_generations import N_VOCAB, PROMPT, Setup, model_drafter
from tests.helpers.goodness_of_fit import Cell, fits_of
from tests.helpers.joint_draws import MemoBackend
from tests.helpers.sessions import write_pairs
from tests.registry import CACHES

OVERALL_LEVEL = 1e-4
DEVIATION = 0.08
N_DRAWS = 4000

LANGUAGE = random_language(N_VOCAB, seed=7)
#: What the draft model on the fake backend says.
DRAFTS = {
    "perfect": LANGUAGE,
    "good": noisy(LANGUAGE, 1.5),
    "bad": random_language(N_VOCAB, seed=8),
}
TINY_PROMPT = "the cat is in"


# --- the fake backend: text --------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What one text begins with, and what may end it."""

    prompt: Sequence[int] = PROMPT
    end_token: int | None = None
    max_tokens: int = 40
    n_ctx: int = 256
    n_batch: int = 64

    @property
    def vocabulary(self) -> FakeVocabulary:
        ends = [] if self.end_token is None else [self.end_token]
        return FakeVocabulary.letters(N_VOCAB, ends)

    def backend(self, language: Language, *, recurrent: bool = False) -> FakeBackend:
        return FakeBackend(
            self.vocabulary,
            language,
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_sequences=1,
            recurrent=recurrent,
        )


LIMITS = {
    "number of tokens": Limits(),
    "no token": Limits(max_tokens=0),
    "one token": Limits(max_tokens=1),
    "prompt of one token": Limits(prompt=PROMPT[:1]),
    "prompt in batches": Limits(n_batch=2),
    "full context": Limits(n_ctx=30, max_tokens=99),
    "prompt fills the context": Limits(n_ctx=len(PROMPT)),
    **{f"end of text {token}": Limits(end_token=token) for token in range(N_VOCAB)},
}


def real_answer(limits: Limits, draft: Language, n_draft: int) -> list[int]:
    """The answer of the real loop, drafted by the same model."""
    setup = Setup(
        language=LANGUAGE,
        vocabulary=limits.vocabulary,
        drafter=model_drafter(draft, limits.vocabulary)[0],
        drafting=DraftOptions(policy="fixed", max_tokens=n_draft, p_min=0.0),
        options=GenerationOptions(max_tokens=limits.max_tokens),
        prompt=limits.prompt,
        n_ctx=limits.n_ctx,
        n_batch=limits.n_batch,
    )
    answer, _ = setup.run()
    return answer.answer


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("n_draft", [1, 2, 5])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", LIMITS)
def test_greedy_text_is_that_of_the_real_loop(
    name: str, draft: str, n_draft: int, recurrent: bool
) -> None:
    limits = LIMITS[name]
    target = limits.backend(LANGUAGE, recurrent=recurrent)
    drafting = limits.backend(DRAFTS[draft], recurrent=recurrent)
    rng = np.random.default_rng(0)
    tokens = generate(
        target, drafting, limits.prompt, rng, n_draft=n_draft, max_tokens=limits.max_tokens
    )
    assert list(tokens) == real_answer(limits, DRAFTS[draft], n_draft)


def test_no_model_decodes_a_token_twice_when_all_drafts_are_accepted() -> None:
    n_rounds = 8
    limits = Limits(max_tokens=5 * n_rounds)
    target, draft = limits.backend(LANGUAGE), limits.backend(LANGUAGE)
    tokens = generate(
        target, draft, PROMPT, np.random.default_rng(0), n_draft=4, max_tokens=limits.max_tokens
    )
    text = [*PROMPT, *tokens]
    assert (target.n_decodes, draft.n_decodes) == (1 + n_rounds, 1 + 4 * n_rounds)
    assert target.decoded == text[:-1]
    # The last drafted token is decoded by the draft in the next round, with the bonus token.
    assert draft.decoded == text[:-2]


# --- the fake backend: distributions -----------------------------------------------------------

#: On the fake backend: the number of drafted tokens, and the temperature.
FAKE_SAMPLED = [(n_draft, temperature) for n_draft in (1, 2, 3) for temperature in (1.0, 1.5)]
FAKE_DEPTH = 3
#: On tiny models: the number of drafted tokens, and the draft model.
TINY_SAMPLED = [(n_draft, draft) for n_draft in (1, 2) for draft in ("draft", "bad")]
TINY_DEPTH = 2
TINY_TEMPERATURE = 2.0
N_TESTS = len(FAKE_SAMPLED) * FAKE_DEPTH + len(TINY_SAMPLED) * TINY_DEPTH
LEVEL = OVERALL_LEVEL / N_TESTS  # Bonferroni


def drawn_cells(
    target: Backend,
    draft: Backend,
    prompt: Sequence[int],
    depth: int,
    n_draft: int,
    temperature: float,
) -> Counter[Cell]:
    """How often each continuation of `depth` tokens was sampled, or a shorter one that ended."""
    rng = np.random.default_rng(5)
    end_token = min(target.vocabulary.end_tokens(), default=-1)
    drawn: Counter[Cell] = Counter()
    for _ in range(N_DRAWS):
        target.remove(0)
        draft.remove(0)
        tokens = generate(
            target, draft, prompt, rng, temperature=temperature, n_draft=n_draft, max_tokens=9
        )
        cell = tuple(islice(tokens, depth))
        drawn[cell if len(cell) == depth else (*cell, end_token)] += 1
    return drawn


def exact_cells(
    logits_after: Callable[[Cell], Logits],
    is_end: Callable[[int], bool],
    depth: int,
    temperature: float,
) -> dict[Cell, float]:
    """The probability of each continuation of `depth` tokens, and of shorter ones to their end."""
    cells: dict[Cell, float] = {(): 1.0}
    for n in range(depth):
        longer: dict[Cell, float] = {}
        for cell, prob in cells.items():
            if len(cell) < n or (cell and is_end(cell[-1])):
                longer[cell] = prob
                continue
            probs = special.softmax(logits_after(cell).astype(np.float64) / temperature)
            for token in np.flatnonzero(probs).tolist():
                longer[(*cell, token)] = prob * float(probs[token])
        cells = longer
    return cells


def check_fits(drawn: Counter[Cell], exact: dict[Cell, float], depth: int) -> None:
    for fit in fits_of(drawn, exact, depth):
        assert fit.test.p_value > LEVEL, fit
        assert fit.detectable(LEVEL) <= DEVIATION
    assert fit.test.n_cells >= 10


@pytest.mark.parametrize(("n_draft", "temperature"), FAKE_SAMPLED)
def test_sampled_text_has_the_targets_distribution(n_draft: int, temperature: float) -> None:
    most_likely = int(LANGUAGE(PROMPT).argmax())
    limits = Limits(end_token=int(LANGUAGE((*PROMPT, most_likely)).argmax()))
    target = limits.backend(LANGUAGE)
    drawn = drawn_cells(
        target, limits.backend(DRAFTS["good"]), PROMPT, FAKE_DEPTH, n_draft, temperature
    )
    exact = exact_cells(
        lambda cell: LANGUAGE((*PROMPT, *cell)), target.vocabulary.is_end, FAKE_DEPTH, temperature
    )
    check_fits(drawn, exact, FAKE_DEPTH)


# --- tiny models -------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path, n_ctx: int = 512) -> Iterator[LlamaBackend]:
    with contextlib.closing(LlamaModel(path)) as model:
        made = LlamaBackend(model, EXACT, n_ctx=n_ctx, clock=time.perf_counter, n_outputs=5)
        with contextlib.closing(made):
            yield made


def tokenized(backend: LlamaBackend) -> list[int]:
    return backend.vocabulary.tokenize(TINY_PROMPT, add_special=True, parse_special=False)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), n_ctx_train=512)


@pytest.mark.parametrize("n_ctx", [64, 512])
@pytest.mark.parametrize("cache", CACHES)
def test_greedy_text_of_models_is_that_of_the_real_loop(
    pairs: Path, cache: str, n_ctx: int
) -> None:
    files = pairs / f"{cache}.gguf", pairs / f"{cache} draft.gguf"
    with sessions.opened(*files, context=replace(EXACT, n_ctx=n_ctx), n_tokens=100) as session:
        expected = sessions.answered(session, TINY_PROMPT)
    assert expected.n_accepted > 0
    assert expected.finish_reason == ("context" if n_ctx == 64 else "length")
    with opened(files[0], n_ctx) as target, opened(files[1], n_ctx) as draft:
        prompt = tokenized(target)
        tokens = generate(target, draft, prompt, np.random.default_rng(0), max_tokens=100)
        assert tuple(tokens) == expected.token_ids


@pytest.mark.parametrize(("n_draft", "draft"), TINY_SAMPLED)
def test_sampled_text_has_the_distribution_of_a_model(
    tiny_models: Path, n_draft: int, draft: str
) -> None:
    with (
        opened(tiny_models / "target.gguf") as target,
        opened(tiny_models / f"{draft}.gguf") as drafting,
    ):
        # Rows of logits are remembered, so that thousands of draws cost a few hundred decodes.
        known = MemoBackend(target)
        prompt = tokenized(target)
        drawn = drawn_cells(
            known, MemoBackend(drafting), prompt, TINY_DEPTH, n_draft, TINY_TEMPERATURE
        )
        exact = exact_cells(
            lambda cell: known.row((*prompt, *cell))[0],
            target.vocabulary.is_end,
            TINY_DEPTH,
            TINY_TEMPERATURE,
        )
    check_fits(drawn, exact, TINY_DEPTH)


# --- the program -------------------------------------------------------------------------------


def test_the_program_writes_the_text_of_the_real_loop(
    tiny_models: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    target, draft = tiny_models / "target.gguf", tiny_models / "draft.gguf"
    main([str(target), str(draft), TINY_PROMPT])
    written = capsysbinary.readouterr().out
    with sessions.opened(target, context=ContextOptions(), n_tokens=MAX_TOKENS) as session:
        expected = sessions.answered(session, TINY_PROMPT)
        pieces = map(session.target.vocabulary.token_bytes, expected.token_ids)
        assert written == b"".join(pieces) + b"\n"


def test_the_program_repeats_itself_with_a_seed(
    tiny_models: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    files = [str(tiny_models / "target.gguf"), str(tiny_models / "draft.gguf")]
    texts = []
    for seed in ("1", "1", "2"):
        main([*files, TINY_PROMPT, "--temperature", "1", "--seed", seed])
        texts.append(capsysbinary.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("other", "error: other.gguf and target.gguf differ in their vocabularies"),
        ("nothing", "error: .*no such file"),
    ],
)
def test_the_program_refuses_in_one_line(tiny_models: Path, draft: str, why: str) -> None:
    files = [str(tiny_models / "target.gguf"), str(tiny_models / f"{draft}.gguf")]
    with pytest.raises(SystemExit, match=why) as refused:
        main([*files, TINY_PROMPT])
    assert "\n" not in str(refused.value)
