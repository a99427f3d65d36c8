"""Lossless in every mode: drafter x verifier x samplers x kind of cache, on tiny models.

Greedy text is compared in all combinations. What judges drafts is the same code whatever the cache,
so sampled text is drawn with all drafters, verifiers and samplers on one cache, and on the others
with the verifiers in turn. Drafts from the target's hidden states draw one token, through the
engine. Drafts in another vocabulary, and one that learnt, take part in what they could break.

At temperature 0 the text must be plain decoding's. Above, draws must fit the target's exact joint
distribution of the next three tokens (G-tests); with matching, a seed's text must also be plain
decoding's. False-alarm levels sum to `OVERALL_LEVEL` over the matrix: a correct specgen would fail
somewhere in it with that probability, were the seeds drawn anew. They are fixed, so what passes
goes on passing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, get_args

import pytest

from specgen.events import FinishedEvent
from specgen.measure.exactness.greedy_check import check_greedy
from specgen.measure.exactness.sampled_check import check_sampled
from specgen.options import (
    GenerationOptions,
    Grammar,
    SamplerOptions,
    TranslateMode,
    VerifierName,
)
from specgen.session.engine import Engine, generate
from specgen.session.kept_answers import Learnt, write_learnt
from specgen.session.session import Session
from tests.helpers import sessions
from tests.helpers.gemma4_assistant import write_assistant, write_gemma4
from tests.helpers.heads import make_heads
from tests.helpers.joint_draws import draw_with_models
from tests.helpers.mtp import MtpArchitecture, write_mtp_model
from tests.helpers.tiny import write_respelled_model
from tests.registry import ARCHITECTURES, CACHES, DRAFTERS, JUDGES, ON_TINY
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyDflash, TinyEagle, write_tiny_dflash, write_tiny_eagle

OVERALL_LEVEL = 1e-3
DEPTH = 3
N_DRAWS = 1200
#: Draws of one token through the engine.
N_DRAWS_OF_ONE = 400
#: A total variation distance that so many draws find with probability 0.99 in each test.
DEVIATION = 0.15
#: A tiny model repeats all of its tokens, so a match of one token makes an n-gram.
PROMPT = "".join(map(chr, range(32, 127))) + " the cat is in the else for with that it be not self"
#: Two or three letters, a mark that is forced after three, and so on.
GRAMMAR = """
root ::= word word word word word word word word+ "."
word ::= [a-h] [a-h] ([a-h] "-" | "," | ";")
"""

VERIFIERS = tuple(JUDGES)
#: The mask token of parallel drafts: one that no text has.
MASK = "3"
FLAT = SamplerOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)
AGAINST_REPETITION = {
    "repeat_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "dry_multiplier": 0.6,
    "dry_allowed_length": 1,
}
GREEDY = {
    "greedy": SamplerOptions(),
    "greedy, penalties": SamplerOptions(**AGAINST_REPETITION),  # type: ignore[arg-type]
    "greedy, typical": SamplerOptions(typical_p=0.4, top_k=12, logit_bias=((70, 1.5),)),
    "greedy, grammar": SamplerOptions(),
}
SAMPLED = {
    "top-k": FLAT,
    "default chain": SamplerOptions(temperature=0.8, top_k=5),
    "penalties": replace(FLAT, **AGAINST_REPETITION),  # type: ignore[arg-type]
    "others": replace(FLAT, typical_p=0.8, top_n_sigma=2.0, dynatemp_range=0.5, temperature=0.9),
    "XTC": replace(FLAT, xtc_probability=0.5, xtc_threshold=0.12),
    "grammar": FLAT,
}


def has_heads(cache: str) -> bool:
    """Whether decoder heads can draft for models with this kind of cache."""
    return not ARCHITECTURES[CACHES[cache]].has_state


def drafters(cache: str) -> tuple[str, ...]:
    """What drafts in the target's own vocabulary for a model with this kind of cache."""
    cases = {name: DRAFTERS[name] for name in ON_TINY}
    return tuple(
        ON_TINY[name]
        for name, case in cases.items()
        if case.translated == "off" and (has_heads(cache) or not case.heads)
    )


#: A target by its kind of cache or its architecture, what drafts for it, and how drafts are
#: translated.
Case: TypeAlias = tuple[str, str, TranslateMode]
DRAFTED: list[Case] = [(cache, drafter, "off") for cache in CACHES for drafter in drafters(cache)]
#: The cache on which every verifier meets every sampler.
BROADEST = "attention"
OWN = [
    (case, verifier, name)
    for shift, cache in enumerate(CACHES)
    for case in DRAFTED
    for turn, name in enumerate(SAMPLED, shift)
    for number, verifier in enumerate(VERIFIERS)
    if case[0] == cache and (cache == BROADEST or number == turn % len(VERIFIERS))
]
#: How drafts in another vocabulary are translated, and what judges them: those that are
#: translated as text were chosen without chance, whoever drafted them.
TRANSLATED: dict[TranslateMode, tuple[VerifierName, ...]] = {
    case.translated: VERIFIERS if case.draws else ("match",)
    for case in DRAFTERS.values()
    if case.translated != "off"
}
#: How drafts are translated that know of no grammar: none of them is left in one.
UNAWARE = [
    case.translated for case in DRAFTERS.values() if case.translated != "off" and not case.grammar
]
#: The byte-level target with a SentencePiece draft is on every cache; this is the reverse.
REVERSED = "attention, reversed"
TRANSLATED_SAMPLED = [
    ((BROADEST, "respelled", translate), verifier, samplers)
    for translate, verifiers in TRANSLATED.items()
    for verifier in verifiers
    for samplers in SAMPLED
    if samplers != "grammar" or translate not in UNAWARE
] + [
    ((cache, "respelled", translate), verifiers[-1], "top-k")
    for translate, verifiers in TRANSLATED.items()
    for cache in (*(cache for cache in CACHES if cache != BROADEST), REVERSED)
]
#: A draft that learnt other weights, and what judges it.
LEARNT: Case = (BROADEST, "learnt", "off")
LEARNT_SAMPLED = [
    *((LEARNT, verifier, "top-k") for verifier in VERIFIERS),
    (LEARNT, "block", "grammar"),
]
#: What drafts from hidden states or the target's cache, and for which targets.
FROM_STATES: list[Case] = [
    ("glm4moe", "mtp", "off"),
    ("qwen35", "mtp", "off"),
    ("mimo2", "mtp", "off"),
    ("llama", "eagle", "off"),
    ("llama", "dflash", "off"),
    ("gemma4", "assistant", "off"),
]
STATES_SAMPLED = [
    (case, VERIFIERS[(number + shift) % len(VERIFIERS)], samplers)
    for shift, case in enumerate(FROM_STATES)
    for number, samplers in enumerate(SAMPLED)
]
ALL_SAMPLED = [*OWN, *TRANSLATED_SAMPLED, *LEARNT_SAMPLED, *STATES_SAMPLED]
ALL_GREEDY = [
    (case, verifier) for case in (*DRAFTED, LEARNT, *FROM_STATES) for verifier in VERIFIERS
] + [
    ((cache, "respelled", translate), "auto")
    for cache in (*CACHES, REVERSED)
    for translate in TRANSLATED
]
N_TESTS = len(ALL_SAMPLED) * DEPTH
LEVEL = OVERALL_LEVEL / N_TESTS  # Bonferroni


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in CACHES.items():
        config = TinyConfig(architecture=architecture, logit_scale=2.0, unprintable_scale=0.0)
        write_tiny_model(folder / f"{name}.gguf", config)
        write_tiny_model(folder / f"{name} draft.gguf", config.draft(0.1))
        write_respelled_model(folder / f"{name} respelled.gguf", config.draft(0.05))
        if has_heads(name):
            make_heads(folder / f"{name}.gguf", folder / f"{name} heads.gguf", folder / name)
        if name == BROADEST:
            let_learn(folder, config.draft(0.3))
        if name == "attention":
            write_respelled_model(folder / f"{REVERSED}.gguf", config)
            write_tiny_model(folder / f"{REVERSED} respelled.gguf", config.draft(0.05))
    for mtp in get_args(MtpArchitecture):
        write_mtp_model(folder / f"{mtp}.gguf", mtp, of_state=0.3, logit_scale=3.0)
    config = TinyConfig(n_layer=4, logit_scale=2.0, unprintable_scale=0.0)
    write_tiny_model(folder / "llama.gguf", config)
    write_tiny_eagle(folder / "llama eagle.gguf", config, TinyEagle())
    write_tiny_dflash(folder / "llama dflash.gguf", config, TinyDflash())
    write_gemma4(folder / "gemma4.gguf")
    write_assistant(folder / "gemma4 assistant.gguf")
    return folder


def let_learn(folder: Path, config: TinyConfig) -> None:
    """Let the draft for the broadest cache have learnt other weights, at random."""
    (folder / "learning").mkdir(exist_ok=True)
    write_tiny_model(folder / "learning" / "w.gguf", config)
    write_learnt(folder / "learning", folder / f"{BROADEST} draft.gguf", Learnt("w.gguf"))


def loaded(
    models: Path, case: Case, verifier: VerifierName, samplers: str, seed: int = 0
) -> Session:
    cache, drafter, translate = case
    has_learnt = drafter == "learnt"
    # A parallel draft is the same file, read with a mask token.
    name = "draft" if has_learnt or drafter == "parallel" else drafter
    grammar = Grammar("gbnf", GRAMMAR) if "grammar" in samplers else None
    mask = MASK if drafter == "parallel" else "off"
    opened = sessions.opened(
        models / f"{cache}.gguf",
        drafter if drafter in ("ngram", "none", "mtp") else f"{cache} {name}",
        n_draft=3,
        drafting={
            "ngram_min": 1,
            "ngram_max": 3,
            "verifier": verifier,
            "translate": translate,
            "mask": mask,
        },
        sampler=replace(GREEDY.get(samplers) or SAMPLED[samplers], seed=seed),
        generation=GenerationOptions(max_tokens=40, grammar=grammar),
        learning=models / "learning" if has_learnt else None,
    )
    made = opened.draft
    assert (made is not None and made.learnt is not None) == has_learnt
    reads_rows = made is not None and made.reads_all_rows
    assert reads_rows == (case in FROM_STATES)
    return opened


def name_of(value: Case | str) -> str:
    return value if isinstance(value, str) else " ".join(value)


@pytest.mark.parametrize(("case", "verifier"), ALL_GREEDY, ids=name_of)
@pytest.mark.parametrize("samplers", GREEDY)
def test_greedy_text_is_that_of_plain_decoding(
    models: Path, case: Case, verifier: VerifierName, samplers: str
) -> None:
    with loaded(models, case, verifier, samplers) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        (result,) = check_greedy(opened, {1: prompt})
    assert result.difference is None
    *_, translate = case
    if samplers != "greedy, grammar" or translate not in UNAWARE:
        assert result.n_drafted > 0
    if samplers == "greedy" and translate != "off":
        assert result.n_accepted > 0


def check_draws(session: Session) -> int:
    """The next tokens after the prompt are distributed as the target's; how many drafted ones were
    accepted.
    """
    prompt = session.prompts.of_text(PROMPT, chat=False)
    if session.draft is not None and session.draft.reads_all_rows:
        result = check_sampled(session, {1: prompt}, N_DRAWS_OF_ONE, LEVEL, seed=5)
        assert result is not None
        assert not result.is_defect, result
        assert result.n_drafted > 0
        return result.n_accepted
    drawn = draw_with_models(session, prompt, DEPTH, N_DRAWS, seed=5)
    assert drawn is not None
    assert all(fit.test.p_value > LEVEL for fit in drawn.fits), [fit.test for fit in drawn.fits]
    assert drawn.n_drafted > N_DRAWS / 2
    assert drawn.fits[-1].test.n_cells >= 5
    assert max(fit.detectable(LEVEL) for fit in drawn.fits) <= DEVIATION
    return drawn.n_accepted


def said(session: Session) -> FinishedEvent:
    """The text of a session after the prompt."""
    *_, last = generate(session, session.prompts.of_text(PROMPT, chat=False))
    assert isinstance(last, FinishedEvent)
    return last


@pytest.mark.parametrize(
    ("drafter", "translate", "samplers", "same"),
    [
        ("draft", "off", "top-k", "block"),
        ("draft", "off", "greedy", "match"),
        ("ngram", "off", "top-k", "match"),
        ("respelled", "auto", "top-k", "match"),
    ],
)
def test_auto_judges_as_the_verifier_for_that_kind_of_draft(
    models: Path, drafter: str, translate: TranslateMode, samplers: str, same: VerifierName
) -> None:
    for seed in range(5):
        ends = []
        for name in ("auto", same):
            case: Case = (BROADEST, drafter, translate)
            with loaded(models, case, name, samplers, seed) as opened:
                ends.append(said(opened))
        auto, other = ends
        assert auto.n_drafted > 0
        assert auto.token_ids == other.token_ids
        assert auto.drafted_by_depth == other.drafted_by_depth
        assert auto.accepted_by_depth == other.accepted_by_depth


def test_every_verifier_meets_every_cache_and_sampler() -> None:
    met = {(verifier, each) for case, verifier, name in OWN for each in (case[0], name)}
    assert met == set(itertools.product(VERIFIERS, (*CACHES, *SAMPLED)))
    others = {(case, name) for case, _, name in OWN if case[0] != BROADEST}
    drafted = [case for case in DRAFTED if case[0] != BROADEST]
    assert others == set(itertools.product(drafted, SAMPLED))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "verifier", "samplers"), ALL_SAMPLED, ids=name_of)
def test_sampled_text_fits_the_targets_distribution(
    models: Path, case: Case, verifier: VerifierName, samplers: str
) -> None:
    with loaded(models, case, verifier, samplers) as opened:
        n_accepted = check_draws(opened)
    assert n_accepted > 0 or case[2] == "off"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*DRAFTED, *((BROADEST, "respelled", mode) for mode in TRANSLATED), *FROM_STATES],
    ids=name_of,
)
@pytest.mark.parametrize("samplers", SAMPLED)
def test_matching_keeps_a_seeds_text(models: Path, case: Case, samplers: str) -> None:
    for seed in range(2):
        with loaded(models, case, "match", samplers, seed) as opened:
            fast = said(opened)
            opened.change_draft("none")
            plain = said(opened)
        assert fast.n_drafted > 0 or case not in FROM_STATES
        assert fast.token_ids == plain.token_ids


# --- drafts that learnt


@pytest.mark.parametrize("samplers", ["greedy", *SAMPLED])
def test_a_draft_that_learns_between_answers_keeps_a_seeds_text(
    models: Path, samplers: str
) -> None:
    """The target's cache holds the beginning, the draft's nothing."""
    with loaded(models, (BROADEST, "none", "off"), "match", samplers, 3) as opened:
        plain = said(opened)
    with loaded(models, LEARNT, "match", samplers, 3) as opened, Engine(opened) as engine:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        found = []
        for noise in (0.3, 0.05, 0.6):
            let_learn(models, TinyConfig(logit_scale=2.0, unprintable_scale=0.0).draft(noise))
            assert engine.reload_draft()
            answer = engine.insert(prompt)
            list(engine.run())
            assert answer.finished is not None
            found.append(answer.finished)
    assert [each.token_ids for each in found] == [plain.token_ids] * 3
    assert len({each.n_accepted for each in found}) > 1
