"""`specgen race`: two independent answers, and their comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.measure.race import Race, RacedAnswer, run_race
from specgen.options import ContextOptions, PrefixOptions, SamplerOptions
from specgen.session import weights_memory
from specgen.system.files import as_json
from tests.helpers.events import Script
from tests.helpers.races import raced, short_race
from tests.helpers.sessions import opened

#: Texts of the tiny target repeat themselves.
PROMPT = "def add(a, b): return a + b # and the sum is the sum is"


def race_of(target: Path, draft: str, **changes: Any) -> Race:
    """A race on a tiny target."""
    with opened(target, draft, prefixes=PrefixOptions("off"), **changes) as session:
        return run_race(session, session.prompts.of_text(PROMPT))


# --- the answers


@pytest.mark.parametrize("draft", ["draft", "ngram"])
def test_both_answers_have_their_own_prefill_and_one_has_drafts(
    tiny_models: Path, draft: str
) -> None:
    race = race_of(tiny_models / "target.gguf", draft, drafting={"ngram_min": 1})
    plain, drafted = race.answers
    assert plain.prompt.text == drafted.prompt.text
    assert (plain.prompt.draft, drafted.prompt.draft.removesuffix(".gguf")) == ("none", draft)
    assert plain.finished.n_drafted == 0 < drafted.finished.n_drafted
    for answer in race.answers:
        assert answer.finished.n_cached_tokens == 0
        assert answer.prompt.time_s == 0.0 < answer.seconds
    assert race.verdict.endswith(" times as fast, identical text")
    assert [each.finish_reason for each in race.figures] == ["length", "length"]


def test_both_are_warmed_up_and_then_run_one_after_the_other(tiny_models: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    with opened(tiny_models / "target.gguf", "draft", n_tokens=5) as session:
        prompt = session.prompts.of_text(PROMPT)
        run_race(session, prompt, progress=lambda *step: steps.append(step))
    names = [name for name, _, _ in steps]
    assert [*dict.fromkeys(names)] == ["warming up", "without drafts", "with drafts"]
    assert names.count("warming up") == 2
    plain = [step for step in steps if step[0] == "without drafts"]
    assert plain == [("without drafts", n, 5) for n in range(1, 6)]


def test_its_own_target_does_not_count_as_used_memory(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ContextOptions(weights_memory="all")
    with opened(tiny_models / "target.gguf", "draft", target_context=context) as session:
        # What is left once the session has loaded it.
        monkeypatch.setattr(weights_memory, "available_memory_bytes", lambda: 1000)
        assert len(run_race(session, session.prompts.of_text(PROMPT)).answers) == 2


def test_a_seed_gives_the_same_text(tiny_models: Path) -> None:
    sampler = SamplerOptions(temperature=1.0, seed=3)
    drafting = {"verifier": "match"}
    race = race_of(tiny_models / "target.gguf", "draft", sampler=sampler, drafting=drafting)
    assert race.verdict.endswith(", identical text")
    assert not race.is_greedy


@pytest.mark.parametrize("n_answers", [0, 1, 2])
def test_an_interruption_keeps_the_text_so_far_in_a_race(tiny_models: Path, n_answers: int) -> None:
    n_begun = 0

    def count(name: str, n_tokens: int, _: int) -> None:
        nonlocal n_begun
        if name != "warming up" and n_tokens == 1:
            n_begun += 1

    with opened(tiny_models / "target.gguf", "draft") as session:
        prompt = session.prompts.of_text(PROMPT)
        race = run_race(session, prompt, progress=count, interrupted=lambda: n_begun >= n_answers)
    assert len(race.answers) == n_answers
    assert race.is_interrupted
    assert race.verdict == "interrupted"
    assert race.speedup is None
    assert [each.speedup for each in race.figures] == [None] * n_answers
    if race.answers:
        assert race.answers[-1].finished.finish_reason == "interrupted"
        assert 0 < race.answers[-1].finished.n_tokens < 40
    assert race.to_json_object()["is_interrupted"]


# --- the verdict


def test_the_same_text_is_compared_by_the_time_of_the_whole_answer() -> None:
    race = short_race()
    assert race.speedup == 1.5
    assert race.verdict == "1.5 times as fast, identical text"
    assert race.difference == ""
    assert [each.speedup for each in race.figures] == [1.0, race.speedup]


def test_a_slowdown_is_reported() -> None:
    slow = Script(round_s=0.2).prompt().plain("The").plain(" cat").finish()
    plain = Script(draft="none").prompt().plain("The").plain(" cat").finish()
    assert raced(plain, slow).verdict == "0.5 times as fast, identical text"


@pytest.mark.parametrize(
    ("temperature", "verdict", "has_difference"),
    [(0.0, "but the texts differ from token 2 on", True), (0.8, "same distribution", False)],
)
def test_other_texts_are_compared_by_their_speed(
    temperature: float, verdict: str, has_difference: bool
) -> None:
    plain = Script(draft="none").prompt(temperature=temperature).plain("The").plain(" cat")
    drafted = Script().prompt(temperature=temperature).round(["The", " dog"], 2, " sat")
    race = raced(plain.finish(), drafted.finish())
    # 3 tokens in 0.1 s and not 2 in 0.2 s.
    race = with_tokens(race, (1, 2), (1, 3, 4))
    assert race.verdict == f"3.0 times as fast after the first token, {verdict}"
    assert race.n_same_tokens == 1
    assert bool(race.difference) is has_difference
    if has_difference:
        assert race.difference.startswith(
            "token 2 is ' cat' without drafts, and ' dog' with them: `specgen verify`"
        )


@pytest.mark.parametrize(
    ("changes", "is_greedy"),
    [
        ({}, True),
        ({"temperature": 0.8}, False),
        ({"dynatemp_range": 0.5}, False),
        ({"samplers": ("top_k",)}, False),
        ({"xtc_probability": 0.5}, False),
    ],
)
def test_only_greedy_answers_have_to_be_the_same(changes: dict[str, Any], is_greedy: bool) -> None:
    race = raced(Script(draft="none").prompt().finish(), Script().prompt().finish())
    for answer in race.answers:
        answer.prompt.sampler.update(as_json(SamplerOptions(**changes)))
    assert race.is_greedy is is_greedy


def test_texts_differ_where_one_of_them_ends() -> None:
    plain = Script(draft="none").prompt().plain("The").plain(" cat").finish()
    drafted = Script().prompt().plain("The").finish()
    race = with_tokens(raced(plain, drafted), (1, 2), (1,))
    assert race.difference.startswith("token 2 is ' cat' without drafts, and the end with them")


def test_an_answer_without_tokens_has_no_speed() -> None:
    race = raced(Script(draft="none").prompt().finish(), Script().prompt().finish())
    assert race.speedup is None
    assert race.verdict == "too short to compare the speed, identical text"


def with_tokens(race: Race, *tokens: tuple[int, ...]) -> Race:
    """The race with other numbers of its answers' tokens."""
    answers = []
    for answer, token_ids in zip(race.answers, tokens, strict=True):
        *events, finished = answer.events
        assert isinstance(finished, FinishedEvent)
        answers.append(RacedAnswer((*events, replace(finished, token_ids=token_ids))))
    return Race(tuple(answers))
