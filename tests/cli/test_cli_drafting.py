"""Options about drafts on the command line: the answer is the same with all of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from specgen.llama import LlamaBackend, build
from specgen.session import opening_notes, session
from specgen.system.folders import cache_folder, measurements_file
from tests.helpers.cli import Cli, Result, complaint, events_of, in_process, models_of
from tests.tiny import TinyConfig, write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"


@pytest.fixture
def plain(cli: Cli) -> str:
    """The answer without a draft."""
    result = cli.run(PROMPT, draft="none")
    assert result.code == 0
    return result.out


def nodes_of(result: Result, plain: str) -> list[dict[str, Any]]:
    """Check that the answer is the plain one; return the nodes of its drafts."""
    events = events_of(result)
    assert events[-1]["text"] == plain.removesuffix("\n")
    assert not [event["message"] for event in events if "failed" in event.get("message", "")]
    return [node for event in events if event["event"] == "drafted" for node in event["nodes"]]


def origins_of(result: Result, plain: str) -> set[str]:
    return {node["origin"] for node in nodes_of(result, plain)}


def stored(name: str) -> list[Path]:
    """Files in a folder of the cache."""
    return [path for path in (cache_folder() / name).rglob("*") if path.is_file()]


# --- policies


@pytest.mark.parametrize("policy", ["cost", "threshold", "fixed"])
@pytest.mark.parametrize("draft", ["draft", "bad", "ngram", "none"])
def test_every_policy_keeps_the_answer(cli: Cli, plain: str, policy: str, draft: str) -> None:
    for more in ((), ("--temp", "1", "--seed", "3", "--verifier", "match")):
        expected = cli.run(PROMPT, *more, draft="none").out
        result = cli.run(PROMPT, "--policy", policy, *more, draft=draft)
        assert (result.code, result.out) == (0, expected)
        assert "drafting failed" not in result.err


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("draft", ["draft", "ngram"])
@pytest.mark.parametrize(
    "samplers",
    ["--top-k 0 --top-p 1 --min-p 0", "--xtc-probability 0.5 --repeat-penalty 1.2"],
)
def test_with_kernels_a_seed_gives_the_text_of_plain_decoding(
    cli: Cli, samplers: str, draft: str
) -> None:
    """With the caches and the attention that users have by default."""
    for seed in "123456":
        given = [*samplers.split(), "--temp", "0.8", "--seed", seed, "--verifier", "match"]
        given += ["-fa", "auto", "-n", "24"]
        expected = cli.run(PROMPT, *given, draft="none").out
        for how in (("--policy", "cost"), ("--tree", "3,2,1"), ("--tree", "off")):
            assert cli.run(PROMPT, *given, *how, draft=draft).out == expected


def test_costs_decide_by_default(cli: Cli, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measures(*arguments: str) -> bool:
        measurements_file().unlink(missing_ok=True)
        result = cli.run(PROMPT, "--stats", *arguments)
        assert result.out == plain
        return "measuring what drafting costs" in result.err  # the summary says how long

    assert not measures()  # the tests' own SPECGEN_POLICY
    assert measures("--policy", "cost")
    monkeypatch.delenv("SPECGEN_POLICY")
    assert measures()
    assert not measures("--policy", "fixed")
    message = complaint(cli.run(PROMPT, "--policy", "fast"), 2)
    assert "--policy" in message
    assert "threshold" in message


# --- n-grams and a model


#: Answers that repeat themselves.
REPETITIVE = ("--grammar", "root ::= [ab]{60}")


@pytest.mark.parametrize("policy", ["cost", "threshold", "fixed"])
def test_ngrams_draft_together_with_a_model_on_request(cli: Cli, policy: str) -> None:
    plain = cli.run(PROMPT, *REPETITIVE, draft="none").out
    arguments = ("--json", "--policy", policy, *REPETITIVE)
    both = origins_of(cli.run(PROMPT, *arguments, "--ngrams"), plain)
    alone = origins_of(cli.run(PROMPT, *arguments, "--no-ngrams"), plain)
    assert alone <= {"model"}
    if policy != "cost":  # there, it depends on the machine who drafts
        assert "ngram" in both
        assert alone == {"model"}
        assert origins_of(cli.run(PROMPT, *arguments), plain) == alone


# --- texts to look up


@pytest.mark.parametrize("kind", ["text", "records", "folder"])
def test_texts_are_looked_up(cli: Cli, tmp_path: Path, kind: str) -> None:
    """A text that contains the answer drafts it, with any other draft."""
    readable = ("--grammar", "root ::= [a-z ]{60}", "--json")
    events = events_of(cli.run(PROMPT, *readable, draft="ngram"))
    plain = events[-1]["text"]
    whole = PROMPT + plain
    place = tmp_path / ("records.jsonl" if kind == "records" else "text.txt")
    place.write_text(json.dumps({"prompt": "", "answer": whole}) if kind == "records" else whole)
    place = tmp_path if kind == "folder" else place
    for draft, more in (("ngram", ()), ("bad", ("--ngrams",))):
        result = cli.run(PROMPT, *readable, "--lookup-file", str(place), *more, draft=draft)
        assert "lookup" in origins_of(result, plain)
        assert events_of(result)[-1]["n_rounds"] < events[-1]["n_rounds"]
    # The index of the texts is kept, and only used on request.
    assert stored("lookup")
    assert "lookup" not in origins_of(cli.run(PROMPT, *readable, draft="ngram"), plain)


def test_kept_answers_draft_later_ones(cli: Cli, plain: str) -> None:
    arguments = ("--json", "--lookup-store")
    assert origins_of(cli.run(PROMPT, "--json", draft="ngram"), plain) <= {"ngram"}
    assert not stored("texts"), "nothing is kept that nobody asked for"
    first = cli.run(PROMPT, *arguments, draft="ngram")
    assert origins_of(first, plain) <= {"ngram"}
    assert stored("texts")
    again = cli.run(PROMPT, *arguments, draft="ngram")
    assert "lookup" in origins_of(again, plain)
    assert events_of(again)[-1]["n_rounds"] < events_of(first)[-1]["n_rounds"]
    # They are only used on request, and only with the same vocabulary.
    assert "lookup" not in origins_of(cli.run(PROMPT, "--json", draft="ngram"), plain)
    other = events_of(cli.run(PROMPT, *arguments, target="other", draft="ngram"))
    assert not [e for e in other if e["event"] == "drafted" and e["nodes"][0]["origin"] == "lookup"]


def test_phrases_of_earlier_answers_are_drafted(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    specgen = in_process(capsys)
    plain = cli.run(PROMPT, *REPETITIVE, draft="none").out
    lines = tmp_path / "prompts.txt"
    lines.write_text("the cat\nabc\nsum\n")

    def are_phrases_drafted(*more: str) -> bool:
        result = cli.run(PROMPT, "--json", *REPETITIVE, *more, draft="ngram")
        return "lookup" in origins_of(result, plain)

    def answer_others(*more: str) -> None:
        models = models_of(cli.models, draft="ngram")
        result = specgen("batch", *models, "-n", "30", *REPETITIVE, *more, lines, tmp_path / "out")
        assert result.code == 0, result.err
        (tmp_path / "out").unlink()

    answer_others("--no-phrase-store")
    assert not are_phrases_drafted()
    assert not stored("phrases")
    answer_others()
    assert are_phrases_drafted()
    assert not are_phrases_drafted("--no-phrase-store")
    gone = specgen("draft", "forget", "-m", cli.model("target"))
    assert re.search(r"phrases: [1-9]", gone.out)
    assert not are_phrases_drafted()


# --- a draft for the draft


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the models that decode."""
    found: set[str] = set()
    decode = LlamaBackend.decode

    def noted(self: LlamaBackend, batch: Any) -> Any:
        found.add(self.model.name)
        return decode(self, batch)

    monkeypatch.setattr(LlamaBackend, "decode", noted)
    return found


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("helper", ["bad", "ngram", "bad ngram"])
def test_drafts_for_drafts_do_not_change_the_answer(
    cli: Cli, plain: str, temperature: str, helper: str, decoded: set[str]
) -> None:
    sampling = ("--temp", temperature, "--seed", "5")
    arguments = (*sampling, "--json", "--draft-max", "8", "--draft-p-min", "0")
    alone = events_of(cli.run(PROMPT, *arguments))
    decoded.clear()
    helpers = [name if name == "ngram" else cli.model(name) for name in helper.split()]
    more = [part for name in helpers for part in ("--draft", name)]
    staged = events_of(cli.run(PROMPT, *arguments, *more))
    drafted = [
        [[n["token_id"] for n in event["nodes"]] for event in events if event["event"] == "drafted"]
        for events in (alone, staged)
    ]
    assert drafted[0] == drafted[1]
    assert staged[-1]["text"] == alone[-1]["text"]
    words = [event["guesses"] for event in staged if event["event"] == "drafted"]
    assert all(each.startswith("the second draft guessed ") for each in words if each)
    assert any(words)
    named = {Path(name).name for name in helpers if name != "ngram"}
    assert decoded == {"target.gguf", "draft.gguf", *named}


@pytest.mark.parametrize(
    ("drafts", "code", "message"),
    [
        (("none", "ngram"), 2, "--draft none"),
        (("ngram", "draft"), 2, "--draft ngram needs no draft"),
        (("draft", "no such"), 6, "no such"),
        (("draft", "bert"), 5, "bert.gguf"),
        (("draft", "other"), 5, "cannot draft for draft.gguf"),
    ],
)
def test_wrong_drafts_for_drafts_are_refused(
    cli: Cli, drafts: tuple[str, ...], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == 5:  # another vocabulary is refused before a model is loaded
        monkeypatch.setattr(session, "LlamaModel", None)
    names = [cli.model(name) if name in ("draft", "bert", "other") else name for name in drafts]
    arguments = [part for name in names for part in ("--draft", name)]
    result = cli("-m", cli.model("target"), *arguments, PROMPT)
    assert message in complaint(result, code)


# --- options that change nothing


def test_an_option_without_effect_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*arguments: str, draft: str) -> list[str]:
        result = cli.run(PROMPT, "-n", "3", *arguments, draft=draft)
        assert result.code == 0, result.err
        said = re.compile("note: .*(no effect|swapped|slower)")
        return [line for line in result.err.splitlines() if said.match(line)]

    given = ("--tree", "3,2", "--draft-p-min", "0.1", "--lookup-file", __file__)
    named = [line.split()[1] for line in notes(*given, draft="none")]
    assert named == ["--tree", "--draft-p-min", "--lookup-file"]
    assert notes(*given, draft="draft") == notes(draft="none") == []
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [line.split()[1:3] for line in notes("-t", "3", draft="draft")] == [["-t", "3"]]
    built = dataclasses.replace(build(), gpu_offload=False)
    monkeypatch.setattr(opening_notes, "build", lambda: built)
    assert [line.split()[1] for line in notes("-ngl", "9", draft="draft")] == ["-ngl"]
    built = dataclasses.replace(built, gpu_offload=True)
    assert notes("-ngl", "9", draft="draft") == []


def test_a_draft_that_is_larger_than_its_target_is_named(cli: Cli, tmp_path: Path) -> None:
    small = str(write_tiny_model(tmp_path / "small.gguf", TinyConfig(n_layer=1)))
    large = cli.model("target")
    for target, draft, is_swapped in ((small, large, True), (large, small, False)):
        result = cli("-m", target, "-md", draft, "-t", "1", "-n", "3", PROMPT)
        assert result.code == 0, result.err
        assert ("are the two swapped?" in result.err) == is_swapped


# --- trees


def drafts_of(cli: Cli, *arguments: str, **models: str) -> list[list[dict[str, Any]]]:
    events = events_of(cli.run("--json", *arguments, PROMPT, **models))
    assert not [event for event in events if "failed" in event.get("message", "")]
    return [event["nodes"] for event in events if event["event"] == "drafted"]


def test_a_shape_is_drafted_every_round(cli: Cli) -> None:
    found = drafts_of(cli, "--tree", "2,2,1")
    assert [node["parent"] for node in found[0]] == [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
    assert len({node["token_id"] for node in found[0][:2]}) == 2
    # The tokens that are left limit its depth, not its width.
    assert {len(nodes) for nodes in found} <= {10, 6, 2}
    walks = drafts_of(cli, "--tree", "4x3", "--verifier", "spectr", "--temp", "1")
    first = [[node["n_walks"] for node in nodes if node["parent"] == -1] for nodes in walks]
    assert {sum(each) for each in first} == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tree", "3;2"), "is not a shape"),
        (("--tree", "9,9,9"), "more than 64"),
        (("--tree", "3,2,1", "--draft-max", "5"), "has 15 tokens, more than the maximum of 5"),
    ],
)
def test_impossible_shapes_are_refused(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert message in complaint(cli.run(*arguments, PROMPT), 2)


@pytest.mark.parametrize("role", ["target", "draft", "translated", "staged"])
def test_drafts_that_cannot_branch_are_chains_with_a_note(
    cli: Cli, tmp_path: Path, tiny_models: Path, role: str
) -> None:
    recurrent = TinyConfig(logit_scale=6.0, architecture="mamba")
    write_tiny_model(tmp_path / "target.gguf", recurrent)
    write_tiny_model(tmp_path / "draft.gguf", recurrent.draft(0.02))
    target, draft = tiny_models / "target.gguf", [tiny_models / "draft.gguf"]
    if role == "target":
        target, draft = tmp_path / "target.gguf", [tmp_path / "draft.gguf"]
    elif role == "draft":
        draft = [tmp_path / "draft.gguf"]
    elif role == "translated":
        draft = [tiny_models / "other.gguf"]
    else:
        draft.append(tiny_models / "bad.gguf")
    more = [argument for path in draft for argument in ("-md", str(path))]
    result = cli("-m", str(target), *more, "-t", "1", "-n", "20", "--json", "--tree", "2,2", PROMPT)
    events = events_of(result)
    notices = [event["message"] for event in events if event["event"] == "notice"]
    assert any("--tree 2,2: " in text and "chains of 2 tokens" in text for text in notices)
    assert not any("failed" in text for text in notices)
    drafted = [event for event in events if event["event"] == "drafted"]
    assert drafted
    for event in drafted:
        parents = [node["parent"] for node in event["nodes"]]
        assert parents == list(range(-1, len(parents) - 1))
        assert len(parents) <= 2
