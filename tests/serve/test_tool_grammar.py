"""Grammars of calls, with tiny models that write at random what the grammar allows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.events import FinishedEvent
from specgen.options import GenerationOptions, SamplerOptions, SessionOptions
from specgen.serve.formats.openai import read_request
from specgen.serve.formats.request import Request, with_call_form
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.helpers.formats import written
from tests.helpers.templates import FAMILIES
from tests.tiny import TinyConfig, write_tiny_model

#: Templates by the marks of their calls, which are control tokens of the model.
TEMPLATES = {
    "Hermes": (FAMILIES["Hermes"], ("<tool_call>", "</tool_call>")),
    "Llama": (FAMILIES["Llama"], ("<|python_tag|>",)),
    "Mistral": (FAMILIES["Mistral"], ("[TOOL_CALLS]",)),
    "Granite": (FAMILIES["Granite"], ("<|tool_call|>",)),
    "not control": (FAMILIES["Hermes"], ()),
    "Kimi": (FAMILIES["Kimi"], ("<|section|>", "<|one|>", "<|args|>", "<|/one|>", "<|/section|>")),
    **{name: (FAMILIES[name], ()) for name in ("Command", "Apertus", "Devstral", "GLM", "LFM")},
    **{name: (FAMILIES[name], ()) for name in ("Qwen-Coder", "MiniMax", "DeepSeek")},
}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}


def request(template: str, **body: Any) -> Request:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
        for name in ("weather", "heat")
    ]
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **body}
    read = read_request("chat", asked, SamplerOptions(), GenerationOptions(max_tokens=400))
    return with_call_form(read, template)


def answers(
    folder: Path, asked: Request, controls: tuple[str, ...], n: int = 3
) -> list[FinishedEvent]:
    """Answers of a model that chooses at random."""
    config = TinyConfig(
        logit_scale=1.0, control_scale=1.0, n_ctx_train=2048, control_tokens=controls
    )
    target = write_tiny_model(folder / "target.gguf", config)
    found: list[FinishedEvent] = []
    for seed in range(n):
        sampler = SamplerOptions(temperature=1.0, seed=seed)
        options = SessionOptions(
            target=target, draft="ngram", sampler=sampler, generation=asked.generation
        )
        with Session(options, lambda: 0.0) as loaded:
            *_, last = generate(loaded, loaded.prompts.of_text("the cat"))
        assert isinstance(last, FinishedEvent)
        found.append(last)
    return found


def said(asked: Request, text: str) -> dict[str, Any]:
    message: dict[str, Any] = written(asked, text)[1]["choices"][0]["message"]
    return message


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_that_has_to_be_a_call_is_one(tmp_path: Path, name: str) -> None:
    template, controls = TEMPLATES[name]
    asked = request(template, tool_choice="required", parallel_tool_calls=False)
    for answer in answers(tmp_path, asked, controls):
        message = said(asked, answer.text)
        assert message["content"] is None, answer.text
        (call,) = message["tool_calls"]
        assert call["function"]["name"] in ("weather", "heat")
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["unit"] in ("C", "F")
        assert isinstance(arguments["exact"], bool)
        assert answer.finish_reason == "stop"


def test_several_calls_in_an_answer(tmp_path: Path) -> None:
    template, controls = TEMPLATES["Mistral"]
    asked = request(template, tool_choice="required")
    asked = replace(asked, generation=replace(asked.generation, max_tokens=2000))
    texts = [answer.text for answer in answers(tmp_path, asked, controls, n=12)]
    assert any(text.count('"name"') > 1 for text in texts)
    for text in texts:
        assert len(said(asked, text)["tool_calls"]) == text.count('"name"')


def test_an_answer_is_a_call_or_follows_its_own_grammar(tmp_path: Path) -> None:
    template, controls = TEMPLATES["Hermes"]
    schema = {"enum": ["yes", "no"]}
    asked = request(template, json_schema=schema, parallel_tool_calls=False)
    for answer in answers(tmp_path, asked, controls):
        message = said(asked, answer.text)
        assert message.get("tool_calls") or message["content"] in ('"yes"', '"no"')
