"""Texts that follow a grammar, also with penalties: they are the same with and without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import NoTokenAllowedError
from specgen.events import CommittedEvent, DraftedEvent, Event, FinishedEvent, NoticeEvent
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Backend
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import Drafter
from specgen.method.text_state import TextState
from specgen.method.verifiers import MatchVerifier
from specgen.options import DraftOptions, GenerationOptions, Grammar, SamplerOptions, VerifierName
from specgen.text.sampling.distribution import Distribution
from tests.helpers.common import EXACT, UNFILTERED
from tests.helpers.fake_backend import FakeVocabulary, Language, noisy, random_language
from tests.helpers.fake_generations import (
    PROMPT,
    Clock,
    NoDrafter,
    Setup,
    Timed,
    model_drafter,
    ngram_drafter,
)
from tests.helpers.fake_grammar import FakeGrammar
from tests.helpers.goodness_of_fit import LEVEL, Cell, p_value
from tests.helpers.sessions import answered, finished, opened, write_models
from tests.registry import CACHES, ON_FAKES, VERIFIERS, Text
from tests.tiny import Architecture, TinyConfig

N_VOCAB = 12
#: Token 10 and 11 end a text.
ENDS = (10, 11)
LETTERS = FakeVocabulary.letters(N_VOCAB, ends=ENDS)
LANGUAGE = random_language(N_VOCAB, seed=7)
AGAINST_REPETITION: dict[str, Any] = {
    "repeat_penalty": 1.6,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repeat_last_n": 7,
    "dry_multiplier": 0.9,
    "dry_allowed_length": 1,
    "dry_last_n": -1,
}
Rules: TypeAlias = dict[int, dict[int, int]]


def run_of(tokens: Sequence[int], first: int, last: int) -> Rules:
    """Rules that force these tokens, from one state to another; between them 1000, 1001, ..."""
    states = [first, *(1000 * first + 1000 + i for i in range(len(tokens) - 1)), last]
    return {
        state: {token: after}
        for state, token, after in zip(states, tokens, states[1:], strict=False)
    }


def grammar(rules: Rules, *may_end: int) -> FakeGrammar:
    return FakeGrammar(rules, may_end=frozenset(may_end), end_tokens=ENDS)


def words(first: int, n: int) -> Rules:
    """Any tokens but 9 to 11, from one state to the one that is `n` further on."""
    return {state: dict.fromkeys(range(9), state + 1) for state in range(first, first + n)}


def digits(n: int) -> list[int]:
    return [i * i % 9 for i in range(n)]


#: A choice, a run that is forced, and so on: the shape of JSON with long keys.
def rounds_of(n_forced: int) -> FakeGrammar:
    choice = {0: dict.fromkeys(range(6), 1), 1: dict.fromkeys(range(3, 9), 2)}
    return grammar({**choice, **run_of(digits(n_forced), 2, 0)})


GRAMMARS: dict[str, Callable[[], FakeGrammar]] = {
    "choices": lambda: grammar({0: dict.fromkeys(range(5), 1), 1: dict.fromkeys(range(4, 9), 0)}),
    "single forced": lambda: rounds_of(1),
    "short runs": lambda: rounds_of(3),
    "runs longer than what rides along": lambda: rounds_of(18),
    "runs longer than a batch": lambda: rounds_of(21),
    "long run at the start": lambda: grammar(
        {**run_of(digits(30), 0, 5), 5: dict.fromkeys(range(9), 5)}
    ),
    "may end": lambda: grammar({**words(0, 1), 1: dict.fromkeys(range(5), 0)}, 0),
    "forced end": lambda: grammar({**words(0, 6), **run_of(digits(4), 6, 7)}, 7),
    "one choice and the end": lambda: grammar(words(0, 1), 1),
}


def model(language: Language, sampler: SamplerOptions | None = None) -> DrafterOf:
    return lambda state, own: model_drafter(language, LETTERS, sampler or own, state=state)[0]


class DrafterOf(Protocol):
    """Makes a drafter for a text that is sampled with the target's options."""

    def __call__(self, state: TextState, own: SamplerOptions) -> Drafter | Cascade: ...


def registered(name: str) -> DrafterOf:
    """A drafter of the registry, whose model is often right."""
    make = ON_FAKES[name]
    language = noisy(LANGUAGE, 1.5)
    return lambda state, own: make(Text(state, language, LETTERS, own))


DRAFTERS: dict[str, DrafterOf] = {
    "perfect": model(LANGUAGE),
    "good": model(noisy(LANGUAGE, 1.5)),
    "greedy": model(noisy(LANGUAGE, 1.5), SamplerOptions()),
    "bad": model(random_language(N_VOCAB, seed=8)),
    "ngram": lambda state, own: ngram_drafter(),
    "ngram or good": registered("ngram and model"),
    "tree": registered("random tree"),
    "staged by a model": registered("staged by a model"),
    "tree of guesses": registered("tree of guesses"),
}


@dataclass
class Run:
    setup: Setup
    generation: AnswerState
    events: list[Event]

    @property
    def summary(self) -> FinishedEvent:
        return finished(self.events)


def setup_of(
    rules: FakeGrammar | None,
    drafter: str | DrafterOf | None,
    sampler: SamplerOptions,
    **changes: Any,
) -> Setup:
    make = DRAFTERS[drafter] if isinstance(drafter, str) else drafter
    return Setup(
        vocabulary=LETTERS,
        drafter=None if make is None else lambda state: make(state, sampler),
        sampler=sampler,
        grammar=None if rules is None else rules.start,
        **changes,
    )


def run(
    rules: FakeGrammar | None,
    drafter: str | DrafterOf | None = None,
    sampler: SamplerOptions | None = None,
    *,
    n_draft: int = 5,
    max_tokens: int = 60,
    stop: tuple[str, ...] = (),
    interrupted: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> Run:
    setup = setup_of(
        rules,
        drafter,
        sampler or SamplerOptions(),
        drafting=DraftOptions(policy="fixed", max_tokens=n_draft, p_min=0.0),
        options=GenerationOptions(max_tokens=max_tokens, stop=stop),
        **{"n_batch": 20, **changes},
    )
    done = Run(setup, *setup.run(interrupted))
    check(done)
    return done


def check(done: Run) -> None:
    """What holds for every run."""
    generation = done.generation
    summary = done.summary
    target = done.setup.target
    answer = generation.tokens[generation.n_prompt :]
    committed = [event for event in done.events if isinstance(event, CommittedEvent)]
    pieces = [piece for event in committed for piece in event.pieces]
    if generation.finish_reason == "interrupted":  # its last piece may be reported twice
        pieces = pieces[: len(answer)]
    assert [piece.token_id for piece in pieces] == answer
    assert "".join(event.text for event in committed) == summary.text
    assert not any(isinstance(event, NoticeEvent) for event in done.events)
    # The grammar allows the text, and whatever is reported of a draft.
    state = TextState(done.setup.prompt, done.setup.grammar)
    for event in done.events:
        if isinstance(event, DraftedEvent):
            texts: dict[int, tuple[int, ...]] = {ROOT: ()}
            for index, node in enumerate(event.nodes):
                texts[index] = (*texts[node.parent], node.token_id)
                state.grammar(texts[index])  # raises ValueError if not
        elif isinstance(event, CommittedEvent):
            for piece in event.pieces:
                if len(state.tokens) == len(generation.tokens):
                    break
                forced = state.forced()
                if piece.kind == "forced":
                    assert piece.token_id == forced
                assert (piece.origin == "grammar") == (piece.kind == "forced")
                assert (piece.origin == "target") == (piece.kind in ("plain", "corrected", "bonus"))
                if forced is not None:  # no model was asked alone
                    assert piece.token_id == forced
                    assert piece.kind != "plain"
                state.commit(piece.token_id)
    kinds = [piece.kind for piece in pieces]
    assert summary.n_forced == generation.stats.n_forced == kinds.count("forced")
    assert summary.n_accepted == kinds.count("accepted")
    if summary.n_rounds:
        n_start = sum(len(event.pieces) for event in committed if event.round == 0)
        n_asked = sum(kind != "forced" for kind in kinds[n_start:])
        assert summary.mean_accepted_length == pytest.approx(n_asked / summary.n_rounds)
    # No row is decoded twice: what the cache holds, and what was refused.
    length = target.length(0)
    assert target.n_decoded_rows == length + summary.n_drafted - summary.n_accepted
    assert target.text(0) == tuple(generation.tokens[:length])
    assert all(target.length(branch) == 0 for branch in range(1, 8))
    assert summary.wall_s == pytest.approx(summary.draft_s + summary.target_s + summary.loop_s)


def oracle(rules: FakeGrammar, *, max_tokens: int = 60) -> list[int]:
    """The answer at temperature 0, from the definition; without the token that ends it."""
    state = 0
    text = list(PROMPT)
    answer: list[int] = []
    while len(answer) < max_tokens:
        allowed = rules.rules.get(state, {})
        row = LANGUAGE(tuple(text))
        token = max(allowed, key=lambda token: float(row[token]))
        if token in ENDS:
            break
        text.append(token)
        answer.append(token)
        state = allowed[token]
    return answer


def outcome(done: Run) -> tuple[object, ...]:
    ends = (done.summary.finish_reason, done.summary.stopped_by)
    return done.generation.tokens, done.summary.text, ends


# --- the same text


@pytest.mark.parametrize(
    ("sampler", "n_draft"), [(SamplerOptions(), 1), (SamplerOptions(), 5), (UNFILTERED, 5)]
)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_seeds_text_is_the_constrained_plain_text(
    name: str, kind: str, sampler: SamplerOptions, n_draft: int
) -> None:
    rules, is_greedy = GRAMMARS[name](), sampler.temperature == 0.0
    for seed in range(1 if is_greedy else 2):
        plain = run(rules, None, sampler, seed=seed)
        verifier = None if is_greedy else MatchVerifier()
        fast = run(rules, kind, sampler, n_draft=n_draft, seed=seed, verifier=verifier)
        assert outcome(fast) == outcome(plain)
        if is_greedy:
            assert plain.generation.answer == oracle(rules)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", ["good", "bad", "tree"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_verifier_stays_within_the_grammar(
    name: str, kind: str, verifier: VerifierName
) -> None:
    for seed in range(3):
        run(GRAMMARS[name](), kind, UNFILTERED, seed=seed, verifier=VERIFIERS[verifier].make())


def test_perfect_drafts_are_accepted_as_a_whole_whatever_is_forced() -> None:
    """A draft model equal to the target loses nothing to forced tokens between the rounds."""
    for name in ("choices", "short runs", "runs longer than a batch"):
        done = run(GRAMMARS[name](), "perfect")
        assert done.summary.n_drafted > 10
        assert done.summary.acceptance_rate == 1.0


@st.composite
def automata(draw: st.DrawFn) -> FakeGrammar:
    """Any automaton without dead ends: few choices, so that much is forced."""
    n_states = draw(st.integers(1, 6))
    states = st.integers(0, n_states - 1)
    rules = {
        state: draw(st.dictionaries(st.integers(0, 9), states, min_size=0, max_size=3))
        for state in range(n_states)
    }
    may_end = draw(st.frozensets(states)) | {state for state in rules if not rules[state]}
    return FakeGrammar(rules, may_end=may_end, end_tokens=ENDS)


@settings(max_examples=150)
@given(
    rules=automata(),
    kind=st.sampled_from(sorted(DRAFTERS)),
    n_draft=st.integers(1, 9),
    n=st.integers(0, 40),
    n_batch=st.integers(1, 30),
    n_ctx=st.integers(len(PROMPT), 60),
    penalties=st.sampled_from([{}, AGAINST_REPETITION]),
)
def test_any_automaton_gives_the_constrained_plain_text(
    rules: FakeGrammar,
    kind: str,
    n_draft: int,
    n: int,
    n_batch: int,
    n_ctx: int,
    penalties: dict[str, Any],
) -> None:
    limits: dict[str, Any] = {"max_tokens": n, "n_batch": n_batch, "n_ctx": n_ctx}
    for sampler in (SamplerOptions(), UNFILTERED):
        options = replace(sampler, **penalties)
        plain = run(rules, None, options, **limits)
        fast = run(rules, kind, options, n_draft=n_draft, verifier=MatchVerifier(), **limits)
        assert outcome(fast) == outcome(plain)
        if n and not penalties and sampler is not UNFILTERED and n_ctx == 60:
            assert plain.generation.answer == oracle(rules, max_tokens=n)


# --- forced tokens


def test_a_text_that_is_all_forced_needs_no_decode() -> None:
    for n in (1, 5, 40):
        rules = grammar(run_of(digits(n), 0, 5), 5)
        for kind in (None, "good", "tree"):
            done = run(rules, kind)
            assert done.generation.answer == digits(n)
            assert (done.summary.finish_reason, done.summary.stopped_by) == ("stop", "k")
            assert done.setup.target.n_decodes == 0
            assert done.summary.n_forced == n + 1
            assert done.summary.n_rounds == 0
            assert done.summary.tokens_per_s is None
            assert done.summary.time_to_first_token_s is not None


@pytest.mark.parametrize("n_forced", [1, 2, 15, 16, 17, 19, 20, 21, 45])
@pytest.mark.parametrize("kind", [None, "perfect", "bad", "tree"])
def test_what_is_forced_is_decoded_with_what_follows(kind: str | None, n_forced: int) -> None:
    done = run(rounds_of(n_forced), kind, max_tokens=3 * (n_forced + 2))
    # At most one more decode a round for what does not ride along.
    n_rounds = done.summary.n_rounds
    n_batches = -(-n_forced // 20)
    assert done.setup.target.n_decodes <= 1 + n_rounds * (1 + n_batches * (n_forced >= 15))
    if n_forced + 5 <= 16:
        assert done.setup.target.n_decodes == 1 + n_rounds


@pytest.mark.parametrize("start", range(24))
@pytest.mark.parametrize("kind", [None, "perfect", "tree"])
def test_a_stop_string_in_forced_text_is_exact(kind: str | None, start: int) -> None:
    for rules in (rounds_of(9), grammar(run_of(digits(40), 0, 5), 5)):
        text = run(rules).summary.text
        stop = text[start : start + 3]
        done = run(rules, kind, stop=("never", stop))
        assert done.summary.text == text[: text.index(stop)]
        assert (done.summary.finish_reason, done.summary.stopped_by) == ("stop", stop)


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("kind", [None, "good"])
def test_an_interruption_keeps_what_was_forced(kind: str | None, after: int) -> None:
    """Also the text that was held back, as it might have become a stop string."""
    for rules in (rounds_of(4), GRAMMARS["long run at the start"]()):
        whole = run(rules)
        calls = iter(range(1000))
        held = whole.summary.text[27:30] + "?"
        done = run(rules, kind, stop=(held,), interrupted=lambda: next(calls) >= after)  # noqa: B023
        assert done.summary.finish_reason == "interrupted"
        n = len(done.generation.answer)
        assert whole.generation.answer[:n] == done.generation.answer
        assert done.summary.text == whole.summary.text[:n]
        if after == 0:
            assert n == (30 if rules.rules[0].keys() == {0} else 0)


def test_the_speed_does_not_count_what_was_forced_before_the_prompt_was_decoded() -> None:
    done = run(GRAMMARS["long run at the start"](), None, max_tokens=34)
    stats = done.generation.stats
    assert stats.n_start_tokens == 31
    assert stats.time_to_first_token_s is not None
    assert stats.time_to_first_token_s < stats.start_s
    expected = 3 / (stats.wall_s - stats.start_s)
    assert done.summary.tokens_per_s == pytest.approx(expected)


def timed(
    kind: str | None, n_forced: int, costs: CostTable, n_batch: int
) -> tuple[AnswerState, FinishedEvent]:
    """An answer with forced text, whose decodes take the time of a cost table and nothing else."""
    setup = setup_of(
        rounds_of(n_forced),
        kind,
        SamplerOptions(),
        drafting=DraftOptions(policy="fixed", max_tokens=4, p_min=0.0),
        options=GenerationOptions(max_tokens=120),
        n_batch=n_batch,
    )
    backend = Timed(setup.backend(), costs)
    loop = AnswerLoop(cast(Backend, backend), lambda: backend.decode_s)
    generation = setup.generation()
    for _ in loop.run(generation):
        pass
    return generation, loop.finish(generation, costs)


#: A row costs a tenth of what the first one does.
LINEAR = {n: 0.9 + 0.1 * n for n in range(1, 65)}


@pytest.mark.parametrize("n_forced", [1, 2, 3, 8])
def test_the_estimated_speed_up_does_not_count_what_plain_decoding_gets_for_free(
    n_forced: int,
) -> None:
    costs = CostTable(LINEAR)
    _, plain = timed(None, n_forced, costs, 64)
    _, fast = timed("good", n_forced, costs, 64)
    assert plain.token_ids == fast.token_ids
    assert plain.tokens_per_s is not None
    assert fast.tokens_per_s is not None
    assert fast.n_accepted > 0
    assert fast.plain_tokens_per_s == pytest.approx(plain.tokens_per_s, rel=0.05)
    actual = fast.tokens_per_s / plain.tokens_per_s
    assert fast.estimated_speedup == pytest.approx(actual, rel=0.05)
    assert fast.estimated_whole_speedup == pytest.approx(plain.wall_s / fast.wall_s, rel=0.05)


@pytest.mark.parametrize("n_forced", [3, 18, 45])
@pytest.mark.parametrize("kind", [None, "good"])
def test_the_targets_time_includes_forced_text_that_is_decoded_separately(
    kind: str | None, n_forced: int
) -> None:
    generation, summary = timed(kind, n_forced, CostTable(LINEAR), 20)
    assert summary.target_s == pytest.approx(generation.stats.wall_s)
    assert summary.loop_s == pytest.approx(0.0, abs=1e-6)


class UniformDrafter(NoDrafter):
    """Samples a token from all of them, also those that the grammar forbids, without a decode."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        source = Distribution(np.arange(N_VOCAB), np.full(N_VOCAB, 1.0 / N_VOCAB))
        return Draft.chain([source.sample(self._rng)], "uniform", distributions=[source])


@pytest.mark.parametrize("is_free", [True, False])
def test_a_sampled_draft_is_not_cut_by_the_grammar(is_free: bool) -> None:
    """A forbidden token that is left out, instead of rejected, would bias the next one."""
    row = (0.3 * LANGUAGE((1,))).astype(np.float32)
    drafters = iter(range(1000))

    def cascade(state: TextState) -> Cascade:
        drafter = UniformDrafter(next(drafters))
        if is_free:
            return Cascade(free=drafter, text_state=state)
        return Cascade(model=drafter, text_state=state)

    def second_token(seed: int) -> Cell:
        setup = Setup(
            language=lambda _text: row,
            drafter=cascade,
            sampler=UNFILTERED,
            grammar=grammar({0: dict.fromkeys(range(4), 0)}).start,
            seed=seed,
            options=GenerationOptions(max_tokens=3),
        )
        return (setup.run()[0].answer[1],)

    counts = Counter(second_token(seed) for seed in range(1000))
    probs = np.exp(row[:4].astype(np.float64))
    probs /= probs.sum()
    assert p_value(counts, {(token,): probs.item(token) for token in range(4)}) > LEVEL


# --- dead ends


@pytest.mark.parametrize("depth", range(9))
@pytest.mark.parametrize("kind", [None, *DRAFTERS])
def test_a_dead_end_is_an_error_and_nothing_wrong_is_reported(kind: str | None, depth: int) -> None:
    """After some choices nothing is allowed any more."""
    whole = run(grammar(words(0, depth), depth))
    setup = setup_of(grammar({**words(0, depth), depth: {}}), kind, SamplerOptions())
    loop = AnswerLoop(setup.backend(), Clock())
    generation = setup.generation()
    events: list[Event] = []
    with pytest.raises(NoTokenAllowedError, match="the grammar allows no token here"):
        events.extend(loop.run(generation))
    assert not any(isinstance(event, NoticeEvent) for event in events)
    shown = "".join(event.text for event in events if isinstance(event, CommittedEvent))
    assert generation.answer == whole.generation.answer[:depth]
    assert shown == generation.text.text == whole.summary.text[:depth]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_dead_end_that_only_the_draft_reaches_does_no_harm(verifier: VerifierName) -> None:
    """The draft prefers token 8, after which nothing may come; the target never chooses it."""

    def preferring(by: float) -> Language:
        return lambda text: LANGUAGE(text) + by * np.eye(N_VOCAB, dtype=np.float32)[8]

    rules = grammar({0: {**dict.fromkeys(range(8), 0), 8: 1}, 1: {}})
    for sampler in (SamplerOptions(), UNFILTERED):
        for drafter in (model(preferring(6.0)), DRAFTERS["tree"]):
            own = VERIFIERS[verifier].make()
            done = run(rules, drafter, sampler, language=preferring(-60.0), verifier=own)
            assert 8 not in done.generation.answer
            assert done.summary.n_drafted > 20


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_dead_end_beyond_the_end_of_an_answer_does_no_harm(verifier: VerifierName) -> None:
    """The draft goes on after a stop string, to where nothing is allowed any more."""
    whole = run(grammar(words(0, 9), 9))
    for end in range(1, 8):
        rules = grammar({**words(0, end + 1), end + 1: {}})
        stop = (whole.summary.text[end - 1 : end],)
        if stop[0] in whole.summary.text[: end - 1]:
            continue
        own = VERIFIERS[verifier].make()
        done = run(rules, "perfect", stop=stop, n_draft=9, verifier=own)
        assert done.generation.answer == whole.generation.answer[:end]
        assert (done.summary.finish_reason, done.summary.stopped_by) == ("stop", *stop)


# --- on tiny models of every kind of cache


@pytest.mark.parametrize("architecture", CACHES.values())
def test_long_forced_runs_on_tiny_models(tmp_path: Path, architecture: Architecture) -> None:
    """Forced text is longer than what rides along with a draft, and than a batch.

    Rejected tokens right after it are dropped from the cache, in each of its ways.
    """
    config = TinyConfig(architecture=architecture, logit_scale=3.0, unprintable_scale=0.0)
    write_models(tmp_path, {"target": config, "draft": config.draft(0.1)})
    gbnf = 'root ::= "{{" ([a-e] [a-e ] [a-e] "(0123456789)(0123456789)" | [x-z] [x-z] "#~#~# ")+'
    options: dict[str, Any] = {
        "context": replace(EXACT, n_batch=16),
        "drafting": {"ngram_min": 1, "verifier": "match"},
        "generation": GenerationOptions(max_tokens=150, grammar=Grammar("gbnf", gbnf)),
    }
    texts: dict[str, FinishedEvent] = {}
    for temperature in (0.0, 1.0):
        sampler = SamplerOptions(temperature=temperature, top_p=1.0, min_p=0.0, seed=4)
        for draft in ("none", "ngram", "draft"):
            with opened(tmp_path / "target.gguf", draft, sampler=sampler, **options) as loaded:
                texts[draft] = answered(loaded, "a")
        for other in texts.values():
            assert other.token_ids == texts["none"].token_ids
        assert texts["none"].n_forced > 40
        assert texts["ngram"].n_drafted > 0
