"""The best that could be reached, against trying everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.foresight import (
    DrafterForesight,
    best_schedule,
    groups_of,
    main,
)
from specgen.measure.bench import entries_of
from specgen.options import (
    DraftOptions,
    SessionOptions,
)
from tests.helpers.fake_backend import random_language
from tests.helpers.fake_generations import (
    N_VOCAB,
)

LANGUAGE = random_language(N_VOCAB, seed=7)
N_MAX = 4
SECONDS = st.floats(0.01, 10.0)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[int, list[float], list[DrafterForesight]]:
    """A number of tokens, the costs of batches, and what some drafters could do."""
    n_tokens = draw(st.integers(0, 7))
    lengths = st.lists(st.integers(0, N_MAX), min_size=n_tokens, max_size=n_tokens).map(tuple)
    drafters = st.builds(DrafterForesight, lengths, SECONDS, SECONDS)
    rows_s = draw(st.lists(SECONDS, min_size=N_MAX + 1, max_size=N_MAX + 1))
    return n_tokens, rows_s, draw(st.lists(drafters, max_size=3))


def least_s(
    place: int, n_tokens: int, rows_s: list[float], drafters: list[DrafterForesight]
) -> float:
    """By trying everything."""
    if place == n_tokens:
        return 0.0
    ways = [rows_s[0] + least_s(place + 1, n_tokens, rows_s, drafters)]
    for drafter in drafters:
        for k in range(1, drafter.accepted[place] + 1):
            if place + k + 1 <= n_tokens:
                rest_s = least_s(place + k + 1, n_tokens, rows_s, drafters)
                ways.append(drafter.first_s + (k - 1) * drafter.next_s + rows_s[k] + rest_s)
    return min(ways)


@given(tasks())
def test_no_way_is_quicker(task: tuple[int, list[float], list[DrafterForesight]]) -> None:
    n_tokens, rows_s, drafters = task
    way = best_schedule(n_tokens, lambda n_rows: rows_s[n_rows - 1], drafters)
    assert way.seconds == pytest.approx(least_s(0, n_tokens, rows_s, drafters))
    place, seconds = 0, 0.0
    for step in way.steps:
        seconds += rows_s[step.n_drafted]
        if step.drafter is not None:
            drafter = drafters[step.drafter]
            assert 1 <= step.n_drafted <= drafter.accepted[place]
            seconds += drafter.seconds(step.n_drafted)
        else:
            assert step.n_drafted == 0
        place += step.n_drafted + 1
    assert place == n_tokens
    assert seconds == pytest.approx(way.seconds)


def test_the_script_reaches_no_more_than_the_best_and_no_less_than_plain_decoding(
    tiny_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, prompts = tmp_path / "out.json", tmp_path / "prompts.txt"
    prompts.write_text(
        "def add(a, b): return a + b # and the sum is\nOnce upon a time\n" + "too long " * 900
    )
    draft, bad = tiny_models / "draft.gguf", tiny_models / "bad.gguf"
    monkeypatch.setattr("sys.argv", [
        "foresight.py", "-m", str(tiny_models / "target.gguf"), "--draft", str(draft), "--draft", str(bad),
        "--draft-max", "4", "--policy", "fixed", "--prompts", str(prompts), "-n", "20", "--json", str(file),
    ])  # fmt: skip
    main()
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        "plain", "draft.gguf", "bad.gguf",
    ]  # fmt: skip
    document = json.loads(file.read_text(encoding="utf-8"))
    (foresight,) = document["foresight"]
    assert list(foresight["batch_s"]) == ["1", "2", "3", "4", "5"]
    assert set(foresight["drafters"]) == {"draft.gguf", "bad.gguf"}
    groups = {(each["prompt"], *each["drafters"]): each for each in foresight["best"]}
    names = [("draft.gguf",), ("bad.gguf",), ("draft.gguf", "bad.gguf")]
    assert set(groups) == {(prompt, *group) for prompt in (1, 2) for group in names}
    assert all(each["speedup"] >= 0.999 for each in groups.values())
    for prompt in (1, 2):
        both = groups[prompt, "draft.gguf", "bad.gguf"]
        assert both["best_s"] <= groups[prompt, "draft.gguf"]["best_s"] * 1.001
        assert both["n_tokens"] == 19
    reached = {each["contender"]: each["foresight_reached"] for each in document["figures"]}
    assert reached["plain"] is None
    assert reached["draft.gguf"] > 0.0


def test_drafts_with_a_draft_of_their_own_are_left_out() -> None:
    drafts = {Path("t.gguf"): [(Path("a.gguf"),), (Path("b.gguf"), Path("c.gguf"))]}

    def groups(*, ngrams: bool) -> list[tuple[str, ...]]:
        drafting = DraftOptions(policy="fixed", ngrams=ngrams)
        base = SessionOptions(Path("t.gguf"), "none", drafting=drafting)
        return groups_of(entries_of(base, drafts, [drafting.policy], [drafting.tree]))

    assert groups(ngrams=False) == [("a.gguf",)]
    assert groups(ngrams=True) == [("a.gguf", "ngram")]
