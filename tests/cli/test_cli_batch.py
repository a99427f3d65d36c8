"""`specgen batch`: each line is answered once, as `specgen run` would answer it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specgen.llama import model
from specgen.serve.batch import lines as batch_lines
from specgen.serve.batch.runner import Prompting
from specgen.serve.formats.parsed_request import ParsedRequest, RequestKind
from specgen.serve.formats.single_request import read_request
from tests.helpers.batch import answers, records, text_of, wait_for_results
from tests.helpers.cli import Result, Specgen, models_of, spawn

pytestmark = pytest.mark.slow

PROMPTS = [
    "the cat is in the",
    "a dog",
    "the cat is on the mat and",
    "one two three one two three one",
    "x",
    "the cat is in the house of",
]


def options(models: Path, **names: str) -> list[str]:
    return [*models_of(models, **names), "-n", "16"]


class Batch:
    """Runs commands in this process, with the tiny models.

    `answer` writes a file of lines and runs a batch; `again` runs one with the same file.
    """

    def __init__(self, run: Specgen, models: Path, folder: Path) -> None:
        self._run, self._models = run, models
        self.source, self.out = folder / "in.jsonl", folder / "out.jsonl"

    def __call__(self, name: str, *arguments: str | Path, **names: str) -> Result:
        return self._run(name, *options(self._models, **names), *arguments)

    def again(self, *arguments: str, code: int = 0, **names: str) -> Result:
        done = self("batch", self.source, self.out, *arguments, **names)
        assert (done.code, done.out) == (code, ""), done.err
        return done

    def answer(
        self, lines: Sequence[str | dict[str, Any]], *arguments: str, code: int = 0, **names: str
    ) -> Result:
        write(self.source, *lines)
        return self.again(*arguments, code=code, **names)


@pytest.fixture
def batch(specgen: Specgen, chat_models: Path, tmp_path: Path) -> Batch:
    return Batch(specgen, chat_models, tmp_path)


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("parallel", ["1", "8", None])
@pytest.mark.parametrize("draft", ["draft", "ngram", "none"])
def test_answers_are_those_of_run(batch: Batch, parallel: str | None, draft: str) -> None:
    lines: list[str | dict[str, Any]] = [*PROMPTS]
    lines += [{"prompt": PROMPTS[0], "temperature": 0.8, "seed": seed} for seed in (1, 2)]
    done = batch.answer(lines, *(["-np", parallel] if parallel else []), draft=draft)
    assert " at once" in done.err
    asked: list[tuple[str, ...]] = [(prompt,) for prompt in PROMPTS]
    asked += [(PROMPTS[0], "--temp", "0.8", "--seed", str(seed)) for seed in (1, 2)]
    alone = [batch("run", "-q", *each, draft=draft).out for each in asked]
    assert answers(batch.out) == {str(n): text for n, text in enumerate(alone, start=1)}


def test_a_prompt_is_echoed_if_it_is_wanted(batch: Batch) -> None:
    plain = {"prompt": PROMPTS[0], "max_tokens": 5}
    bodies: dict[str, dict[str, Any]] = {
        "plain": plain,
        "echo": {**plain, "echo": True},
        "likely": {**plain, "echo": True, "logprobs": 1},
    }
    url = "/v1/completions"
    batch.answer([{"custom_id": name, "url": url, "body": body} for name, body in bodies.items()])
    found = records(batch.out)
    text = PROMPTS[0] + text_of(found["plain"])
    assert text_of(found["echo"]) == text
    assert text_of(found["likely"]) == text
    body = found["likely"]["response"]["body"]
    n_tokens = body["usage"]["total_tokens"]
    assert len(body["choices"][0]["logprobs"]["tokens"]) == n_tokens


def test_a_line_controls_its_drafts(batch: Batch) -> None:
    prompt = {"prompt": PROMPTS[3], "max_tokens": 16}
    batch.answer([prompt, {**prompt, "speculative": {"draft": False}}], "--policy", "fixed")
    drafted, plain = (
        records(batch.out)[name]["response"]["body"]["speculative"] for name in ("1", "2")
    )
    assert drafted["n_drafted"] > 0
    assert plain["draft"] is False
    assert plain["n_drafted"] == 0


def test_requests_in_openais_form_are_answered(batch: Batch) -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPTS[0]}]
    chat = {"messages": turns, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "model": "x"}
    raw = {"prompt": PROMPTS[1], "max_tokens": 7, "logprobs": 1}
    form = {**chat, "response_format": {"type": "json_object"}}
    url = "/v1/chat/completions"
    lines: list[str | dict[str, Any]] = [
        {"custom_id": "chat", "method": "POST", "url": url, "body": chat},
        {"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": raw},
        {"custom_id": "form", "url": url, "body": form},
    ]
    batch.answer(lines, "-np", "3")
    found = records(batch.out)
    body = found["chat"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 9
    assert body["choices"][0]["finish_reason"] == "length"
    content = body["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 9
    own = batch("run", PROMPTS[0], "-q", "-n", "9", "--system", "be brief")
    assert text_of(found["chat"]) == own.out
    body = found["raw"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 7
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 7
    assert text_of(found["raw"]) == batch("run", PROMPTS[1], "-q", "-n", "7", "--raw").out
    assert text_of(found["form"]).startswith("{")


def test_lines_that_begin_alike_share_the_cache(batch: Batch) -> None:
    beginnings = [
        " ".join(["the cat is in the house"] * 10),
        " ".join(["a dog is on the mat"] * 10),
    ]
    batch.answer([f"{beginnings[n % 2]} number {n}" for n in range(6)], "-np", "1", "-n", "4")
    found = [each["response"]["body"] for each in records(batch.out).values()]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in found]
    # The first line with each beginning prefills it; only the template's prefix is cached then.
    assert sorted(n > 50 for n in cached) == [False, False, True, True, True, True]
    assert list(records(batch.out)) == ["1", "3", "5", "2", "4", "6"]
    together = answers(batch.out)
    batch.out.unlink()
    batch.again("-np", "4", "-n", "4", draft="none")
    assert answers(batch.out) == together


def test_a_second_run_answers_only_missing_lines(batch: Batch) -> None:
    batch.answer(PROMPTS, "-np", "2")
    whole = batch.out.read_bytes().splitlines(keepends=True)
    batch.out.write_bytes(b"".join(whole[:3]) + whole[3][:100])
    again = batch.again("-np", "2")
    assert "the last result is incomplete and was dropped" in again.err
    assert "has results for 3 of 6 lines" in again.err
    assert batch.out.read_bytes().splitlines(keepends=True)[:3] == whole[:3]
    assert len(records(batch.out)) == 6
    assert "has results for 6 of 6 lines" in batch.again("-np", "2").err


def test_results_of_other_settings_are_refused(batch: Batch) -> None:
    batch.answer(PROMPTS[:2], "-np", "2")
    before = batch.out.read_bytes()
    refused = batch.again("--temp", "0.5", code=2)
    assert "temperature as by default (now 0.5)" in refused.err
    other = batch.again(target="plain", draft="none", code=2)
    assert 'target "target.gguf" (now "plain.gguf")' in other.err
    gone = batch.answer(PROMPTS[:1], code=2)
    assert "a result for '2', which nothing asks for" in gone.err
    changed = batch.answer([PROMPTS[0], "x"], code=2)
    assert "a result for '2', but line 2 now asks something else" in changed.err
    assert batch.out.read_bytes() == before
    batch.answer([*PROMPTS[:2], "more"], "--temp", "0.5", "--allow-mixed", "-np", "1")
    assert batch.out.read_bytes().startswith(before)
    assert len(records(batch.out)) == 3
    mixed = batch.again(code=2)  # a later result that was allowed to be of other settings
    assert "temperature 0.5 (now as by default)" in mixed.err
    # The draft does not change the answers, so it is not one of the settings.
    batch.out.write_bytes(before)
    batch.answer(PROMPTS[:2], draft="none")


def test_lines_that_fail_are_errors_in_the_results(batch: Batch) -> None:
    long = " ".join(["the cat is in the house"] * 400)
    bias = {"prompt": "x", "logit_bias": {"100000": 1}}
    grammar = {"prompt": "x", "grammar": "root ::= nothing"}
    write(batch.source, PROMPTS[0], "{broken", long, bias, grammar, PROMPTS[1])
    with batch.source.open("ab") as file:
        file.write(b"caf\xe9\n")
    done = batch.again("-np", "2", code=12)
    assert done.err.splitlines()[-2].startswith("error: 5 of 7 lines could not be answered")
    found = records(batch.out)
    codes = {name: each["error"]["code"] for name, each in found.items() if each["error"]}
    numbers = {"2": "json", "3": "prompt", "4": "request", "5": "request", "7": "utf8"}
    assert codes == {name: f"invalid_{what}" for name, what in numbers.items()}
    assert "2048" in found["3"]["error"]["message"]
    assert "there is no token 100000" in found["4"]["error"]["message"]
    assert all(text_of(found[name]) for name in "16")
    # They are not answered again, unless --retry-errors asks for it.
    batch.again("-np", "2", code=12)
    assert records(batch.out) == found


def test_a_bug_in_one_line_does_not_affect_the_others(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_prompt = Prompting.prompt

    def read(kind: RequestKind, body: dict[str, Any], *defaults: Any) -> Any:
        return 1 / 0 if "seed" in body else read_request(kind, body, *defaults)

    def prompt(self: Prompting, loaded: Any, asked: ParsedRequest) -> Any:
        return 1 / 0 if asked.text == "a dog" else make_prompt(self, loaded, asked)

    monkeypatch.setattr(Prompting, "prompt", prompt)
    monkeypatch.setattr(batch_lines, "read_request", read)
    done = batch.answer([PROMPTS[0], {"prompt": "x", "seed": 3}, "a dog"], "-np", "2", code=12)
    assert "2 of 3 lines could not be answered: lines 2, 3; " in done.err
    found = records(batch.out)
    assert text_of(found["1"])
    for name in "23":
        message = found[name]["error"]["message"]
        assert message == "specgen failed: ZeroDivisionError: division by zero"
    assert found["3"]["error"]["code"] == "bug"


def test_numbers_as_ids_do_not_collide_and_equal_requests_have_different_ids(
    batch: Batch,
) -> None:
    same, blank, text = {"prompt": PROMPTS[0]}, "", f"  {PROMPTS[0]}\r"
    ids = [{"custom_id": each, **same} for each in (3, "line 3")]
    batch.answer([*ids, same, same, blank, text])
    found = records(batch.out)
    assert sorted(found) == ["3", "4", "6", "line 3", "line line 3"]
    assert len({each["id"] for each in found.values()}) == 5
    assert len({each["response"]["request_id"] for each in found.values()}) == 5
    assert len({each["response"]["body"]["id"] for each in found.values()}) == 5
    assert len(set(answers(batch.out).values())) == 1


def test_a_corrected_line_is_answered_with_retry_errors(batch: Batch) -> None:
    wrong = batch.answer([{"promt": "x"}, PROMPTS[1]], code=12)
    assert "line 1: not answered: prompt: it is missing; unknown field: promt" in wrong.err
    refused = batch.answer([{"prompt": "x"}, PROMPTS[1]], code=2)
    assert "--retry-errors" in refused.err
    assert "--allow-mixed" not in refused.err
    batch.again("--retry-errors")
    assert text_of(records(batch.out)["1"])


def test_from_standard_input_to_standard_output(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\na dog\n")))
    done = batch("batch", "-", "-", "-np", "2", "-q")
    assert (done.code, done.err) == (0, "")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert sorted(each["custom_id"] for each in found) == ["1", "2"]
    assert batch("batch", "-", "-", "--retry-errors").code == 2


@pytest.mark.parametrize(
    ("source", "out", "code", "words"),
    [
        ("missing.jsonl", "out.jsonl", 3, "missing.jsonl: cannot be read"),
        ("empty.jsonl", "out.jsonl", 3, "empty.jsonl has no line"),
        ("twice.jsonl", "out.jsonl", 3, "custom_id 'a' is on lines 1 and 2"),
        ("good.jsonl", "missing/out.jsonl", 10, "there is no folder"),
        ("good.jsonl", "", 10, "a folder, not a file"),
        ("good.jsonl", "good.jsonl", 10, "line 1 is not a result"),
        ("good.jsonl", "/dev/full", 10, "/dev/full: a device, not a file"),
        ("/dev/zero", "out.jsonl", 3, "/dev/zero: a device, not a file"),
    ],
)
def test_bad_files_are_refused_and_left_alone(
    batch: Batch, tmp_path: Path, source: str, out: str, code: int, words: str
) -> None:
    write(tmp_path / "empty.jsonl")
    write(tmp_path / "good.jsonl", "x", "y")
    same = {"custom_id": "a", "prompt": "x"}
    write(tmp_path / "twice.jsonl", same, same)
    done = batch("batch", tmp_path / source, tmp_path / out, "-np", "2")
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert len(done.err.splitlines()) <= 2
    assert (tmp_path / "good.jsonl").read_text(encoding="utf-8") == "x\ny\n"


# --- processes that end before their time ------------------------------------------------------


def child(chat_models: Path, source: Path, out: Path) -> subprocess.Popen[bytes]:
    own = ("-np", "3", "-t", "1", *options(chat_models), "-n", "40")
    return spawn("batch", source, out, *own)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("tested_kernels")
def test_a_signal_ends_it_without_partial_results(
    chat_models: Path, tmp_path: Path, number: int, code: int
) -> None:
    prompts = [f"{PROMPTS[index % 6]} {index}" for index in range(400)]
    source, out = write(tmp_path / "in.jsonl", *prompts), tmp_path / "out.jsonl"
    process = child(chat_models, source, out)
    wait_for_results(out, 4, process)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code, errors
    assert b"Traceback" not in errors
    found = records(out)
    assert 4 <= len(found) < 400
    for each in found.values():
        body = each["response"]["body"]
        assert body["choices"][0]["finish_reason"] == "stop" or (
            body["usage"]["completion_tokens"] == 40
        )


@pytest.mark.usefixtures("tested_kernels")
def test_two_processes_do_not_write_to_one_file(batch: Batch, chat_models: Path) -> None:
    write(batch.source, *(f"{PROMPTS[0]} {index}" for index in range(400)))
    process = child(chat_models, batch.source, batch.out)
    try:
        wait_for_results(batch.out, 1, process)
        assert "another specgen batch is writing to it" in batch.again(code=10).err
    finally:
        process.kill()
        process.communicate()
    batch.again("-n", "40", "-np", "4")


@pytest.mark.parametrize("draft", ["none", "draft"])
def test_a_model_of_one_sequence_makes_one_answer_at_a_time(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    """There are architectures whose sequences llama.cpp cannot compute together."""
    monkeypatch.setattr(model, "ONE_SEQUENCE", frozenset({"llama"}))
    result = batch.answer(PROMPTS, "--parallel", "2", draft=draft, code=2)
    assert "target.gguf: llama.cpp computes several sequences of this architecture" in result.err
    assert "--parallel 1" in result.err
    result = batch.again(draft=draft)
    assert "(llama) incorrectly: answers are generated one at a time" in result.err
    assert "1 at once" in result.err
    assert len(answers(batch.out)) == len(PROMPTS)
