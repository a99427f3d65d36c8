"""The Python interface: what a program that imports specgen relies on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specgen
from specgen.errors import BackendError, ModelFileError, PromptError, UsageError
from specgen.events import CommittedEvent, FinishedEvent
from specgen.method.backend import Batch
from tests.helpers.cli import ended
from tests.helpers.sessions import folder_with
from tests.tiny import TinyConfig
from tests.tiny.config import CHATML_TEMPLATE

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
PROMPT = "the cat is in the"
N = 12


TARGET = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE, n_ctx_train=2048)
files = folder_with(target=TARGET, draft=TARGET.draft(0.02))


@pytest.fixture
def model(files: Path) -> Iterator[specgen.Model]:
    with specgen.load(files / "target.gguf", files / "draft.gguf", n_ctx=256, n_parallel=3) as made:
        yield made


def plain(files: Path, prompt: str = PROMPT, **options: object) -> str:
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:
        return made.generate(prompt, max_tokens=N, **options).text  # type: ignore[arg-type]


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, specgen; print([name for name in sys.modules if name.startswith('specgen.')])"
    )
    assert ended(code=code).stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert dir(specgen) == sorted(specgen.__all__)
    for name in specgen.__all__:
        assert getattr(specgen, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_that"):
        specgen.nothing_like_that  # noqa: B018


def test_an_answer_is_that_of_the_target_alone(files: Path, model: specgen.Model) -> None:
    answer = model.generate(PROMPT, max_tokens=N)
    assert answer.text == plain(files)
    assert answer.finished is not None
    assert answer.finished.n_tokens == N
    assert "".join(model.stream(PROMPT, max_tokens=N)) == answer.text
    *_, last = model.events(PROMPT, max_tokens=N)
    assert isinstance(last, FinishedEvent)
    assert last.text == answer.text


def test_options_of_an_answer(files: Path, model: specgen.Model) -> None:
    text = plain(files)
    assert text.startswith(model.generate(PROMPT, max_tokens=3).text)
    stop = text[2:5]
    assert model.generate(PROMPT, max_tokens=N, stop=[stop]).text == text.partition(stop)[0]
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 5}
    assert model.generate(PROMPT, max_tokens=N, **drawn).text == plain(files, **drawn)
    assert model.generate(PROMPT, grammar='root ::= "maybe"').text == "maybe"
    schema = {"type": "boolean"}
    assert model.generate(PROMPT, json_schema=schema).text.strip() in ("true", "false")
    numbers = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    for seed in range(4):  # drafts go where the grammar changes scores, too
        drawn = {"temperature": 2.0, "seed": seed, "json_schema": numbers}
        assert model.generate(PROMPT, max_tokens=N, **drawn).text == plain(files, **drawn)


def test_answers_generated_together_equal_those_alone(files: Path, model: specgen.Model) -> None:
    prompts = [PROMPT, "else", "a b c d", "zzz", "the", "in"]
    expected = {prompt: plain(files, prompt) for prompt in prompts}
    answers = [answer.text for answer in model.generate_all(prompts, max_tokens=N)]
    assert answers == list(expected.values())


def test_closing_the_events_cancels_the_answer(model: specgen.Model) -> None:
    events = model.events(PROMPT)
    for event in events:
        if isinstance(event, CommittedEvent):
            break
    events.close()  # type: ignore[attr-defined]
    assert not model.engine.is_idle
    model.engine.step()
    assert model.engine.is_idle


def test_invalid_requests_raise_and_leave_the_model_usable(model: specgen.Model) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        model.generate(PROMPT, grammar="x", json_schema="{}")
    with pytest.raises(UsageError, match="need a prompt that is a text"):
        model.generate([specgen.Message("user", "x")], system="y")
    with pytest.raises(PromptError, match="the context has 256"):
        model.generate("too long " * 300)
    assert model.engine.is_idle
    assert model.generate(PROMPT, max_tokens=1).text
    with pytest.raises(ModelFileError, match="nothing.gguf"):
        specgen.load("nothing.gguf", "none")


def test_an_interrupted_round_fails_only_its_answers(
    model: specgen.Model, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    """After Ctrl-C in the middle of a round, its answers are lost, and the model is not."""
    answer = model.submit(PROMPT, max_tokens=N)
    model.engine.step()

    target = model.engine.target
    decode = target.decode

    def interrupted(batch: Batch) -> None:
        decode(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.engine.step()
    assert isinstance(answer.failure, BackendError)
    assert model.generate(PROMPT, max_tokens=N).text == plain(files)
    # After its end it answers nothing, and what waits fails.
    waiting = model.submit(PROMPT)
    model.close()
    assert isinstance(waiting.failure, BackendError)
    with pytest.raises(BackendError, match="closed"):
        model.generate(PROMPT)
    model.close()


def test_the_pages_examples_run(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 8
    monkeypatch.chdir(files)
    code = "\n".join(blocks)
    namespace: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), namespace)
    answers = namespace["answers"]
    assert isinstance(answers, list)
    assert len({answer.text for answer in answers}) > 1
