"""Models with learned positions: no command decodes beyond the last one, with any -c."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

import specgen as api
from specgen.errors import BackendError, PromptError
from specgen.llama import LlamaBackend, LlamaModel
from tests.cli.test_cli_serve import listening
from tests.helpers.cli import Specgen, complaint, models_of
from tests.helpers.common import EXACT
from tests.helpers.rows import batch_of
from tests.helpers.server import PATIENCE_S
from tests.helpers.sessions import folder_with
from tests.tiny import CHATML_TEMPLATE, TinyConfig

N_POSITIONS = 64
SHORT = "the cat is in the house"
LONG = "the cat is in the house of " * 20
NOTICE = "has learned only 64 positions, so the context has 64 tokens and not 512"

_LEARNED = TinyConfig(
    architecture="gpt2",
    n_ctx_train=N_POSITIONS,
    logit_scale=6.0,
    unprintable_scale=0.0,
    chat_template=CHATML_TEMPLATE,
)
models = folder_with(
    learned=_LEARNED,
    draft=_LEARNED.draft(0.05),
    rotary=TinyConfig(logit_scale=6.0, unprintable_scale=0.0, chat_template=CHATML_TEMPLATE),
    bert=TinyConfig(architecture="bert", n_ctx_train=N_POSITIONS),
)
pytestmark = pytest.mark.usefixtures("tested_kernels")


def options(models: Path, target: str, draft: str) -> list[str]:
    return [*models_of(models, target, draft), "-c", "512", "-n", "-1", "-t", "1"]


@pytest.mark.parametrize("draft", ["draft", "ngram", "none"])
def test_an_answer_ends_where_the_positions_end(models: Path, specgen: Specgen, draft: str) -> None:
    result = specgen("run", *options(models, "learned", draft), "--ignore-eos", SHORT)
    assert result.code == 0, result.err
    assert NOTICE in result.err
    own_size = [*models_of(models, "learned", "none"), "-n", "-1", "-t", "1"]
    assert result.out == specgen("run", *own_size, "--ignore-eos", SHORT).out


def test_a_longer_prompt_is_refused(models: Path, specgen: Specgen) -> None:
    refusal = complaint(specgen("run", *options(models, "learned", "draft"), LONG), 3)
    assert "has learned only 64 positions: use a shorter prompt" in refusal
    assert "--ctx-size" not in refusal


@pytest.mark.parametrize("prompt", [SHORT, LONG])
def test_a_draft_reads_no_more_than_its_positions(
    models: Path, specgen: Specgen, prompt: str
) -> None:
    texts = []
    for draft in ("draft", "none"):
        arguments = [*options(models, "rotary", draft), "-n", "100", "--ignore-eos"]
        result = specgen("run", *arguments, prompt)
        assert result.code == 0, result.err
        texts.append(result.out)
    assert texts[0] == texts[1]


def test_a_batch_answers_what_fits(models: Path, specgen: Specgen, tmp_path: Path) -> None:
    questions = tmp_path / "in.jsonl"
    answers = tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": prompt, "chat": False}) for prompt in (LONG, SHORT)]
    questions.write_text("\n".join(lines))
    result = specgen("batch", *options(models, "learned", "draft"), questions, answers)
    assert result.code == 12, result.err
    refused, answered = map(json.loads, answers.read_text().splitlines())
    assert "has learned only 64 positions" in refused["error"]["message"]
    assert answered["response"]["status_code"] == 200


def test_a_server_survives_long_prompts_and_texts(models: Path) -> None:
    with listening(*options(models, "learned", "draft"), "--parallel", "2") as (process, url):
        for prompt, status in ((LONG, 400), (SHORT, 200), (LONG, 400), (SHORT, 200)):
            body = {"prompt": prompt, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == status, answer.text
        assert process.poll() is None


def test_embeddings_are_of_what_fits(models: Path) -> None:
    with listening("-m", str(models / "bert.gguf"), "-c", "512") as (process, url):
        for text, status in ((LONG, 400), (SHORT, 200)):
            answer = httpx.post(f"{url}/v1/embeddings", json={"input": text}, timeout=PATIENCE_S)
            assert answer.status_code == status, answer.text
        process.terminate()
        assert process.stderr is not None
        assert "so a text may have at most 64 tokens, not 512" in process.stderr.read()


def test_the_python_interface_is_limited_too(models: Path) -> None:
    with api.load(models / "learned.gguf", "none", n_ctx=512) as model:
        with pytest.raises(PromptError, match="the context has 64"):
            model.generate(LONG, chat=False)
        request = model.generate(SHORT, chat=False, ignore_eos=True, max_tokens=-1)
        assert request.finished is not None
        assert request.finished.n_prompt_tokens + request.finished.n_tokens == N_POSITIONS + 1


def test_a_decode_beyond_them_is_an_error(models: Path) -> None:
    model = LlamaModel(models / "learned.gguf", n_gpu_layers=0)
    backend = LlamaBackend(model, EXACT, n_ctx=256, clock=lambda: 0.0)
    with pytest.raises(BackendError, match="it has learned only 64 positions"):
        backend.decode(batch_of([1], N_POSITIONS))
    backend.close()
    model.close()
