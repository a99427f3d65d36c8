"""`specgen race` on tiny models: its output and its files, but no speeds."""

from __future__ import annotations

import json
import os
import re
import signal
import xml.etree.ElementTree as ET
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from specgen.events import CommittedEvent, Event
from specgen.models.files import identify
from specgen.session import engine
from specgen.session.saved_drafts import SavedDraft, save_draft
from specgen.system.folders import cache_folder, prefixes_folder
from tests.helpers.cli import Result, Specgen, complaint, models_of, rest_of, spawn, tiny_names

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"
#: Quick, and enough for a test of the command line.
SHORT = ("-t", "1", "-fa", "off", "-n", "20")
IDENTICAL = r"\d+\.\d times as fast, identical text"


@pytest.fixture
def race(specgen: Specgen, tiny_models: Path) -> Specgen:
    """Runs `specgen race` for the tiny target; files may be given by their tiny names."""

    def run(*arguments: str | Path, prompt: str = PROMPT) -> Result:
        named = tiny_names(tiny_models, arguments)
        return specgen("race", "-m", tiny_models / "target.gguf", *SHORT, *named, prompt)

    return run


def notes(result: Result) -> list[str]:
    return [line.removeprefix("note: ") for line in result.err.splitlines()]


@pytest.mark.parametrize(("draft", "name"), [("draft", "draft.gguf"), ("ngram", "ngram")])
def test_in_a_pipe_each_answer_is_a_line(race: Specgen, draft: str, name: str) -> None:
    result = race("-md", draft, "--ngram-min", "1")
    assert result.code == 0, result.err
    headings, *rows = (line.split("\t") for line in result.out.splitlines())
    assert headings == [
        *("draft", "tokens", "seconds", "first_token_s", "tokens_per_s", "acceptance_rate"),
        "speedup",
    ]
    assert [row[:2] for row in rows] == [["none", "20"], [name, "20"]]
    assert rows[0][5:] == ["", "1.00"]  # nothing was drafted
    assert rows[1][5] != ""
    conditions, verdict = notes(result)
    assert conditions.startswith("first without drafts, then with them, ")
    assert re.fullmatch(IDENTICAL, verdict)
    assert race("-md", draft, "--quiet").err == ""


def test_json_has_both_answers(race: Specgen) -> None:
    found: dict[str, Any] = json.loads(race("-md", "draft", "--json").out)
    assert re.fullmatch(IDENTICAL, found["verdict"])
    assert found["is_same_text"]
    assert (found["n_same_tokens"], found["is_interrupted"]) == (20, False)
    plain, drafted = found["answers"]
    assert plain["text"] == drafted["text"] != ""
    assert [each["finish_reason"] for each in (plain, drafted)] == ["length", "length"]
    assert plain["speedup"] == 1.0
    assert drafted["speedup"] == pytest.approx(plain["seconds"] / drafted["seconds"])


def test_without_a_draft_one_is_chosen(race: Specgen) -> None:
    result = race()
    assert result.code == 0
    assert result.out.splitlines()[2].startswith("ngram\t")
    assert notes(result)[0].startswith("drafting with n-grams")


def test_nothing_is_kept(race: Specgen, tmp_path: Path) -> None:
    prompt = f"{PROMPT} " * 8
    for _ in range(2):
        assert race("-md", "draft", "-c", "1024", prompt=prompt).code == 0
    folder = prefixes_folder(cache_folder())
    assert not folder.exists() or not any(folder.iterdir())


def test_the_picture_and_the_page_are_files(race: Specgen, tmp_path: Path) -> None:
    svg = tmp_path / "race.svg"
    html = tmp_path / "race.html"
    # An earlier picture is replaced, not overwritten: it is whole until the new one is.
    svg.write_text("an earlier picture", encoding="utf-8")
    earlier = tmp_path / "earlier.svg"
    earlier.hardlink_to(svg)
    result = race("-md", "draft", "--svg", svg, "--html", html)
    assert result.code == 0
    assert earlier.read_text(encoding="utf-8") == "an earlier picture"
    texts = [each.text or "" for each in ET.parse(svg).iter()]
    assert "target.gguf: a replay at true speed" in texts
    assert any(re.fullmatch(IDENTICAL, text) for text in texts)
    data = re.search(r'id="events">(.*?)</script>', html.read_text("utf-8"), re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert re.fullmatch(IDENTICAL, found["verdict"])
    assert [events[0]["draft"] for events in found["answers"]] == ["none", "draft.gguf"]
    assert [events[0]["time_s"] for events in found["answers"]] == [0.0, 0.0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_the_result_is_shown_even_if_a_file_cannot_be_written(race: Specgen) -> None:
    result = race("-md", "draft", "--svg", "/dev/full")
    assert result.code == 10
    assert len(result.out.splitlines()) == 3
    assert "/dev/full: cannot be written" in result.err


# --- on a terminal


@pytest.mark.usefixtures("tested_kernels")
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_gets_the_replay_if_it_can_show_it(tiny_models: Path, term: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    arguments = ["race", *models_of(tiny_models), *SHORT, "--quiet", PROMPT]
    with spawn(*arguments, stdout=theirs, env={"TERM": term}) as process:
        os.close(theirs)
        shown = rest_of(ours).decode()
        assert process.wait() == 0
    os.close(ours)
    last = shown.splitlines()[-1].removeprefix("\x1b[?25h")
    assert re.fullmatch(IDENTICAL, last)
    if term == "dumb":
        assert "\x1b" not in shown
        assert [line.split(":")[0] for line in shown.splitlines()[:-1]] == [
            *("without drafts", "drafts from draft.gguf")
        ]
    else:
        assert "replay" in shown
        assert shown.index("\x1b[?25h") > shown.index("\x1b[?25l")


# --- what goes wrong


def test_a_draft_and_a_prompt_are_required(
    race: Specgen, specgen: Specgen, tiny_models: Path, tmp_path: Path
) -> None:
    target = tiny_models / "target.gguf"
    for arguments, message in (
        (("-md", "none"), "--draft none drafts nothing, so there is nothing to race"),
        (("--draft-max", "0"), "--draft-max 0 drafts nothing, so there is nothing to race"),
        (("--svg", tmp_path), "--svg"),
        (("--html", tmp_path / "missing" / "x.html"), "--html"),
        (("--prefix-store", "all"), "No such option"),
        (("--lookup-store",), "No such option"),
    ):
        assert message in complaint(race(*arguments), 2)
    assert "the prompt is empty" in complaint(specgen("race", "-m", target, "-p", ""), 3)
    identity = identify(target)
    assert identity is not None
    save_draft(identity, SavedDraft("none"))
    assert "found best for target.gguf: there is nothing to race" in complaint(race(), 2)
    assert race("-md", "ngram").code == 0


@pytest.mark.parametrize("n_answers", [1, 2])
def test_an_interrupted_race_shows_what_is_known(
    race: Specgen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_answers: int
) -> None:
    generate = engine.generate
    n_generated = 0

    def interrupted_events(*arguments: Any, **more: Any) -> Generator[Event, None, None]:
        nonlocal n_generated
        n_generated += 1
        for event in generate(*arguments, **more):
            is_first = isinstance(event, CommittedEvent) and event.n_tokens == 1
            if is_first and n_generated == 2 + n_answers:  # after the two of the warm-up
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(engine, "generate", interrupted_events)
    svg = tmp_path / "race.svg"
    result = race("-md", "draft", "--svg", svg)
    assert result.code == 130
    assert notes(result)[-1] == "interrupted: not everything was measured"
    rows = [line.split("\t") for line in result.out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["none", "draft.gguf"][:n_answers]
    assert [row[-1] for row in rows] == [""] * n_answers
    assert int(rows[-1][1]) < 20
    assert not svg.exists()
