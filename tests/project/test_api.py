"""The Python interface: everything that programs which import specgen rely on."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import re
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specgen
from specgen.api import AnswerDefaults
from specgen.errors import BackendError, ModelFileError, PromptError, UsageError
from specgen.events import CommittedEvent, FinishedEvent
from specgen.method.backend import Batch
from specgen.options import GenerationOptions, SamplerOptions
from specgen.session.prompts.template import ToolCall
from tests.helpers.cli import ended
from tests.helpers.sessions import folder_with
from tests.tiny import TinyConfig
from tests.tiny.config import CHATML_TEMPLATE

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
PROMPT = "the cat is in the"
OPTIONS = (SamplerOptions, GenerationOptions)
#: The package, for calls that a type checker would reject.
untyped: Any = specgen
N = 12


TARGET = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE, n_ctx_train=2048)
files = folder_with(target=TARGET, draft=TARGET.draft(0.02))


@pytest.fixture
def model(files: Path) -> Iterator[specgen.Model]:
    with specgen.load(files / "target.gguf", files / "draft.gguf", n_ctx=256, n_parallel=3) as made:
        yield made


@pytest.fixture
def shared(files: Path) -> Iterator[specgen.Model]:
    """A model for invalid requests, which do not change it."""
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:
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
        # A type checker knows that, too: otherwise mypy would call the comment unused.
        specgen.nothing_like_that  # type: ignore[attr-defined]  # noqa: B018


def test_an_answer_is_that_of_the_target_alone(files: Path, model: specgen.Model) -> None:
    answer = model.generate(PROMPT, max_tokens=N)
    assert answer.text == plain(files)
    assert answer.summary.n_tokens == N
    assert answer.summary.finish_reason == "length"
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


# --- options by name ------------------------------------------------------------------------------


def test_every_option_of_an_answer_can_be_given_by_its_name() -> None:
    names = {each.name for kind in OPTIONS for each in dataclasses.fields(kind) if each.metadata}
    objects = {"sampling", "generation", "grammar", "json_schema"}
    assert AnswerDefaults.__annotations__.keys() == names | objects


def test_an_option_means_the_same_by_any_name_and_in_an_object(model: specgen.Model) -> None:
    greedy = model.generate(PROMPT, max_tokens=N).text
    # Only with top_k does this temperature give the likeliest tokens.
    assert model.generate(PROMPT, max_tokens=N, temperature=2.0, top_k=1).text == greedy
    hot = SamplerOptions(temperature=2.0, seed=5, repeat_penalty=1.5)
    short = GenerationOptions(max_tokens=N, stop=("zzz",))
    ways: list[dict[str, Any]] = [
        {"sampling": hot, "generation": short},
        {"sampling": hot, "max_tokens": N, "stop": "zzz"},
        {"sampling": hot, "generation": short, "temperature": 2.0, "max_tokens": N},
        {
            "sampling": SamplerOptions(temperature=2.0, seed=5),
            "repeat_penalty": 1.5,
            "n_predict": N,
        },
        {"temperature": 2.0, "seed": 5, "repeat_penalty": 1.5, "max_tokens": N, "top_k": None},
        {"temp": 2.0, "seed": np.int64(5), "repetition_penalty": np.float32(1.5), "n_predict": N},
    ]
    (text,) = {model.generate(PROMPT, **way).text for way in ways}
    assert text != greedy


@pytest.mark.parametrize(
    "samplers",
    ["top-k;temp", "kt", ["top_k", "temperature"], ("top-k", "temp"), ["topk;temp"]],
)
def test_samplers_have_the_same_names_alone_and_in_a_list(samplers: Any) -> None:
    assert SamplerOptions(samplers=samplers).samplers == ("top_k", "temperature")


def test_texts_in_lists_are_taken_as_they_are() -> None:
    assert SamplerOptions(dry_breakers=("\\n", "none")).dry_breakers == ("\\n", "none")
    assert GenerationOptions(stop=("\\n",)).stop == ("\\n",)


def test_the_defaults_of_answers_are_given_to_load_by_name(files: Path) -> None:
    target = files / "target.gguf"
    with untyped.load(target, "none", n_ctx=0, n_predict=3, top_k=1, temp=2.0) as made:
        assert made.engine.n_ctx == TARGET.n_ctx_train
        answer = made.generate(PROMPT)
        assert answer.finished is not None
        assert answer.finished.n_tokens == 3
        assert plain(files).startswith(answer.text)


def test_log_probabilities_are_on_the_result(model: specgen.Model) -> None:
    answer = model.generate(PROMPT, max_tokens=N, logprobs=2)
    assert answer.finished is not None
    assert "".join(piece.text for piece in answer.logprobs) == answer.text
    for token, piece in zip(answer.finished.token_ids, answer.logprobs, strict=True):
        likeliest, second, *_ = piece.top_logprobs
        assert likeliest.token_id == token == piece.token_id
        assert piece.logprob == likeliest.logprob > second.logprob
    assert model.generate(PROMPT, max_tokens=N).logprobs == []


def test_a_request_is_shown_in_one_line(model: specgen.Model) -> None:
    waiting = model.submit("a\nb " * 30, max_tokens=40)
    shown = [repr(waiting), repr(model.generate("a\nb " * 30, max_tokens=40))]
    list(model.engine.run())
    shown.append(repr(waiting))
    for each in shown:
        assert "\n" not in each
        assert len(each) < 200
    assert "(waiting)" in shown[0]
    assert "40 tokens" in shown[1]
    assert shown[2].split(": ", 1)[1] == shown[1].split(": ", 1)[1]


# --- conversations --------------------------------------------------------------------------------


def test_messages_are_also_objects_of_openais_api(model: specgen.Model) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    objects: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    messages = [
        specgen.Message("system", "be brief"),
        specgen.Message("user", "hi"),
        specgen.Message("assistant", "", (ToolCall("1", "f", {"a": 1}),)),
        specgen.Message("tool", "7", tool_call_id="1", name="f"),
    ]
    expected = model.generate(messages, max_tokens=N)
    for given in (objects, [*messages[:3], objects[3]], iter(messages), iter(objects)):
        answer = model.generate(given, max_tokens=N)
        assert (answer.prompt, answer.text) == (expected.prompt, expected.text)
    assert '"a": 1' in expected.prompt.text


def test_a_chat_keeps_its_messages(model: specgen.Model) -> None:
    chat = model.chat(system="be brief")
    first = chat.send("hi", max_tokens=N)
    assert [(each.role, each.content) for each in chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", first.text),
    ]
    asked = [*chat.messages, specgen.Message("user", "and then?")]
    expected = model.generate(asked, max_tokens=N).text
    assert "".join(chat.stream("and then?", max_tokens=N)) == expected
    assert chat.messages == [*asked, specgen.Message("assistant", expected)]
    assert chat.send("yes?", grammar='root ::= "maybe"', temperature=2.0).text == "maybe"
    assert chat.messages[-1].content == "maybe"
    # A second conversation starts from the beginning.
    assert model.chat().messages == []


def test_a_turn_without_a_complete_answer_is_not_part_of_a_chat(model: specgen.Model) -> None:
    chat = model.chat()
    chat.send("hi", max_tokens=2)
    before = chat.messages
    for _ in chat.stream("a"):
        break
    untyped_chat: Any = chat
    wrong: Any = ({"max_token": 3}, {"temperature": -1}, {"system": "x"}, {"chat": True})
    for options in wrong:
        with pytest.raises(UsageError):
            untyped_chat.send("b", **options)
    with pytest.raises(UsageError, match="text: give a text, not None"):
        untyped_chat.send(None)
    with pytest.raises(PromptError, match="the context has 256"):
        chat.send("too long " * 300)
    assert chat.messages == before
    # A new message replaces an unanswered one, whose answer may have been generated since.
    unread = chat.stream("c", max_tokens=N)
    chat.send("d", max_tokens=2)
    assert list(unread) == [] or chat.messages[-2].content == "d"
    assert [each.content for each in chat.messages if each.role == "user"] == ["hi", "d"]
    assert model.engine.is_idle


def test_a_chat_leaves_out_its_oldest_turns_when_the_context_is_full(files: Path) -> None:
    notes: list[str] = []
    target = files / "target.gguf"
    with specgen.load(target, "none", n_ctx=256, note=notes.append) as made:
        chat = made.chat(system="be brief")
        notes.clear()
        answers = [chat.send(f"number {turn} is the cat", max_tokens=N) for turn in range(8)]
    assert all(answer.usage.total_tokens <= 256 for answer in answers)
    assert all("be brief" in answer.prompt.text for answer in answers)
    assert "number 0" not in answers[-1].prompt.text
    assert "number 7" in answers[-1].prompt.text
    assert len(chat.messages) == 1 + 2 * 8
    assert notes
    assert all("left out from here on (the system message kept)" in note for note in notes)


def test_an_answer_has_its_token_ids(model: specgen.Model) -> None:
    usage = model.generate(PROMPT, max_tokens=N).usage
    assert usage == specgen.Usage(usage.prompt_tokens, N, cached_tokens=0)
    assert usage.total_tokens == usage.prompt_tokens + N
    again = model.generate(PROMPT, max_tokens=N).usage
    assert 0 < again.cached_tokens < again.prompt_tokens == usage.prompt_tokens
    with pytest.raises(RuntimeError, match="is not done"):
        _ = model.submit(PROMPT, max_tokens=1).usage


# --- tasks ----------------------------------------------------------------------------------------


def test_tasks_get_the_same_answers(files: Path, model: specgen.Model) -> None:
    prompts = [PROMPT, "else", "a b c d", "zzz", "the", "in"]

    async def streamed(pieces: AsyncIterator[str]) -> str:
        return "".join([piece async for piece in pieces])

    async def texts() -> list[str]:
        answers = [model.agenerate(prompt, max_tokens=N) for prompt in prompts]
        streams = [streamed(model.astream(prompt, max_tokens=N)) for prompt in prompts]
        complete = [answer.text for answer in await asyncio.gather(*answers)]
        return complete + await asyncio.gather(*streams)

    async def chatted() -> list[str]:
        chat = model.chat()
        first = await chat.asend(PROMPT, max_tokens=N)
        second = await streamed(chat.astream("else", max_tokens=N))
        assert [each.content for each in chat.messages[1::2]] == [first.text, second]
        return [first.text, second]

    expected = [plain(files, prompt) for prompt in prompts]
    assert asyncio.run(texts()) == expected * 2
    assert asyncio.run(texts()) == expected * 2  # in another event loop
    same_chat = model.chat()
    assert asyncio.run(chatted()) == [
        same_chat.send(PROMPT, max_tokens=N).text,
        same_chat.send("else", max_tokens=N).text,
    ]
    assert model.engine.is_idle


def test_the_last_of_several_messages_at_once_is_answered(model: specgen.Model) -> None:
    async def send_at_once() -> None:
        chat = model.chat()
        words = ("hi", "else", "in", "the", "zzz")
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        with model.engine.stepping:  # nothing is generated meanwhile
            tasks = [asyncio.create_task(chat.asend(word, max_tokens=N)) for word in words]
            await asyncio.sleep(0)
            # The only thread comes to this after all messages, however slow the machine is.
            await loop.run_in_executor(None, lambda: None)
        answers = await asyncio.gather(*tasks)
        (complete,) = (each for each in answers if each.usage.completion_tokens)
        question, answer = chat.messages
        assert question.content in complete.prompt.text
        assert answer.content == complete.text

    asyncio.run(send_at_once())


def test_an_event_loop_keeps_running_while_an_answer_is_generated(model: specgen.Model) -> None:
    async def wait() -> str:
        # The lock lets this thread step, but no other.
        with model.engine.stepping:
            answer = asyncio.create_task(model.agenerate(PROMPT, max_tokens=N))
            _, unfinished = await asyncio.wait([answer], timeout=0.2)
            assert unfinished
            assert not model.engine.is_idle
        return (await answer).text

    assert asyncio.run(wait()) == model.generate(PROMPT, max_tokens=N).text


def test_an_answer_is_cancelled_with_its_task(files: Path, model: specgen.Model) -> None:
    async def leave(pieces: AsyncIterator[str]) -> None:
        async for _ in pieces:
            break

    async def cancel() -> str:
        other = asyncio.create_task(model.agenerate(PROMPT, max_tokens=N))
        chat = model.chat()
        for _ in range(3):
            await leave(model.astream("the"))
            await leave(chat.astream("the"))
        with model.engine.stepping:  # nothing is generated meanwhile
            answers = (model.agenerate("else"), model.agenerate("in"), chat.asend("x"))
            tasks = [asyncio.create_task(answer) for answer in answers]
            await asyncio.wait(tasks, timeout=0.1)
            # This one is cancelled while it is inserted.
            tasks.append(asyncio.create_task(model.agenerate("zzz")))
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended)
        assert chat.messages == []
        return (await other).text

    assert asyncio.run(cancel()) == plain(files)
    model.engine.step()
    assert model.engine.is_idle


def test_tasks_get_the_errors_of_their_answers(files: Path, model: specgen.Model) -> None:
    untyped_model: Any = model

    async def refused() -> None:
        for ask in (model.agenerate, model.chat().asend):
            with pytest.raises(UsageError, match="did you mean max_tokens"):
                await ask(PROMPT, max_token=3)  # type: ignore[call-arg]
        with pytest.raises(UsageError, match="give a text or messages, not 3"):
            await anext(untyped_model.astream(3))

    async def closed(made: specgen.Model) -> None:
        pieces = made.astream("else", ignore_eos=True)
        await anext(pieces)
        # It waits until the other one fills the context.
        answer = asyncio.create_task(made.agenerate(PROMPT, ignore_eos=True))
        await asyncio.sleep(0)
        made.close()
        with pytest.raises(BackendError, match="closed"):
            await answer
        with pytest.raises(BackendError, match="closed"):
            await made.agenerate(PROMPT)

    asyncio.run(refused())
    assert model.engine.is_idle
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:
        asyncio.run(closed(made))


def test_a_failed_round_ends_only_the_tasks_of_its_answers(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:

        async def ask() -> list[Any]:
            tasks = [made.agenerate(PROMPT, max_tokens=N) for _ in range(2)]
            return list(await asyncio.gather(*tasks, return_exceptions=True))

        with monkeypatch.context() as patch:
            patch.setattr(made.engine.target, "decode", failing_once(made, BackendError("lost")))
            answers = asyncio.run(ask())
    (failed,) = (each for each in answers if isinstance(each, BackendError))
    assert failed.message == "lost"
    (answer,) = (each for each in answers if each is not failed)
    assert answer.text == plain(files)


def test_editors_know_the_options_of_everything_that_answers() -> None:
    ways = ("generate", "stream", "events", "generate_all", "submit", "agenerate", "astream")
    chat_ways = ("send", "stream", "asend", "astream")
    kinds = {
        **{getattr(specgen.Model, name): "Unpack[AnswerOptions]" for name in ways},
        **{getattr(specgen.ModelChat, name): "Unpack[AnswerDefaults]" for name in chat_ways},
        specgen.load: "Unpack[AnswerDefaults]",
    }
    for function, kind in kinds.items():
        *_, options = inspect.signature(function).parameters.values()
        assert (options.kind, options.annotation) == (inspect.Parameter.VAR_KEYWORD, kind)


# --- what cannot be -------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "prompt: give a text or messages, not None"),
        (b"x", "prompt: give a text or messages, not b'x'"),
        (3, "prompt: give a text or messages, not 3"),
        ([], "the prompt is empty"),
        (["a", "b"], "messages[0]: give a message, not 'a'"),
        ({"role": "user", "content": "x"}, "prompt: give a list of messages, not {'role'"),
        (specgen.Message("user", "x"), "prompt: give a list of messages, not Message("),
        ("\ud800", "half a surrogate pair"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
        ([{"role": "usr", "content": "x"}], "messages[0].role: give one of 'assistant', "),
        ([{"content": "x"}], "messages[0].role: it is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content: give a text or a list of parts, "),
        ([{"role": "user", "contents": "x"}], "messages[0].contents: specgen has no such field"),
        ([{"role": "user", "content": [{**TEXT, "txt": 1}]}], "messages[0].content.txt: specgen"),
        ([{"role": "user", "content": [TEXT, IMAGE]}], "messages[0].content: this model reads tex"),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "messages[0].tool_calls[0].id: give"),
        (specgen.Prompt("x", ()), "the prompt is empty"),
        (specgen.Prompt("x", (10**9,)), "there is no token 1000000000"),
        (specgen.Prompt("x", (-1,)), "there is no token -1"),
        (specgen.Prompt("x", (5.5,)), "tokens: give a tuple of numbers"),  # type: ignore[arg-type]
        (specgen.Prompt("x", np.arange(2)), "tokens: give a tuple of"),  # type: ignore[arg-type]
    ],
)
def test_invalid_prompts_are_rejected(shared: specgen.Model, prompt: Any, said: str) -> None:
    with pytest.raises((UsageError, PromptError)) as error:
        shared.generate(prompt, max_tokens=1)
    assert error.value.message.startswith(said) or said in error.value.message
    assert "\n" not in error.value.message
    assert shared.engine.is_idle


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"foo": 1}, "there is no option 'foo'"),
        ({"max_token": 3}, "there is no option 'max_token' (did you mean max_tokens?)"),
        (
            {"n_threads": 3},
            "n_threads is not an option of answers: give load context=ContextOptions(",
        ),
        (
            {"draft_max": 3},
            "draft_max is not an option of answers: give load drafting=DraftOptions(max_",
        ),
        ({"n_ctx": 256}, "n_ctx is not an option of answers: give load n_ctx=..."),
        ({"kernels": "auto"}, "kernels is not an option of answers: give load kernels=..."),
        ({"temp": 1, "temperature": 1}, "temp and temperature are the same option"),
        ({"max_tokens": 2.5}, "max_tokens: give a whole number, not 2.5"),
        ({"max_tokens": True}, "max_tokens: give a number, not True"),
        ({"n_predict": -3}, "max_tokens: give -2 or more, not -3"),
        ({"max_tokens": 10**30}, "max_tokens: give 9223372036854775807 or less, not 1000"),
        ({"seed": 10**5000}, "seed: give 9223372036854775807 or less, not a number of thousands"),
        ({"temperature": -1}, "temperature: give 0 or more, not -1"),
        ({"temperature": "hot"}, "temperature: give a number, not 'hot'"),
        ({"temperature": float("nan")}, "temperature: give a finite number, not nan"),
        ({"temperature": np.arange(2)}, "temperature: give a number, not array([0, 1])"),
        ({"presence_penalty": float("inf")}, "presence_penalty: give a finite number, not inf"),
        ({"stop": ""}, "stop: a text is empty"),
        ({"stop": b"x"}, "stop: give a list, not b'x'"),
        ({"stop": ["a", 3]}, "stop[1]: give a text, not 3"),
        ({"samplers": "bogus"}, "samplers: there is no sampler 'bogus'"),
        ({"samplers": ["top_k", "bogus"]}, "samplers: there is no sampler 'bogus'"),
        ({"samplers": ["top_k", 3]}, "samplers[1]: give one of 'penalties'"),
        ({"logit_bias": {5000: 1}}, "logit_bias: there is no token 5000"),
        ({"logit_bias": {-1: 1}}, "logit_bias: there is no token -1"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias: give a bias between"),
        ({"logprobs": 101}, "logprobs: give 100 or less, not 101"),
        ({"grammar": 3}, "grammar: give a text, not 3"),
        ({"grammar": "x", "json_schema": {}}, "grammar and json_schema cannot be used together"),
        ({"json_schema": 3}, "json_schema: give an object, not 3"),
        ({"json_schema": {"enum": {1}}}, "json_schema: it is not JSON"),
        ({"ignore_eos": True, "json_schema": {}}, "ignore_eos and a grammar"),
        ({"system": b"x"}, "system: give a text, not b'x'"),
        ({"chat": 3}, "chat: give true or false, not 3"),
        ({"sampling": {}}, "sampling: give a value of the type SamplerOptions, not {}"),
        (
            {"sampling": SamplerOptions(temperature=0.5), "temp": 0.7},
            "temperature is 0.7, but 0.5 in sampling; give it once",
        ),
        (
            {"generation": GenerationOptions(max_tokens=3), "max_tokens": 4},
            "max_tokens is 4, but 3 in generation; give it once",
        ),
    ],
)
def test_invalid_options_are_rejected(shared: specgen.Model, options: Any, said: str) -> None:
    for ask in (shared.generate, shared.stream, shared.events, shared.submit):
        with pytest.raises(UsageError) as error:  # before anything is generated
            ask(PROMPT, **options)
        assert error.value.message.startswith(said)
        assert "\n" not in error.value.message
    with pytest.raises(UsageError):
        shared.generate_all([PROMPT], **options)
    assert shared.engine.is_idle


def test_several_prompts_are_all_answered_or_none(shared: specgen.Model) -> None:
    wrong: Any = ("abc", b"abc", None, {"role": "user"}, [PROMPT, None])
    for prompts in wrong:
        with pytest.raises(UsageError, match="give a "):
            shared.generate_all(prompts, max_tokens=1)
        assert shared.engine.is_idle
    answers = shared.generate_all((prompt for prompt in (PROMPT, PROMPT)), max_tokens=1)
    assert len(answers) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": None}, "target: give a text, not None"),
        ({"target": ""}, "target: give a file or a name"),
        ({"draft": 3}, "draft: give a list, not 3"),
        ({"draft": [None]}, "draft: give a text, not None"),
        ({"n_ctx": -1}, "n_ctx: give 0 or more, not -1"),
        ({"n_ctx": 2.5}, "n_ctx: give a whole number, not 2.5"),
        ({"n_parallel": 0}, "n_parallel: give 1 or more, not 0"),
        ({"kernels": "fast"}, "kernels: give one of 'auto', 'specgen' or 'llama.cpp', not 'fast'"),
        ({"context": 3}, "context: give a value of the type ContextOptions, not 3"),
        ({"note": 3}, "note: give a function, not 3"),
        ({"n_ctxx": 3}, "there is no option 'n_ctxx' (did you mean n_ctx?)"),
        ({"n_threads": 3}, "n_threads is not an option of answers: give load context="),
        ({"temperature": -1}, "temperature: give 0 or more, not -1"),
        ({"system": "x"}, "system is not an option of load: give it with a prompt"),
        (
            {"n_ctx": 256, "context": specgen.ContextOptions(n_ctx=512)},
            "n_ctx is 256, but 512 in context; give it once",
        ),
    ],
)
def test_arguments_that_load_cannot_use_are_rejected(files: Path, options: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        specgen.load(**{"target": files / "target.gguf", "draft": "none"} | options)
    assert error.value.message.startswith(said)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: untyped.SamplerOptions(top_k=-3), "top_k: give -1 or more, not -3"),
        (
            lambda: untyped.GenerationOptions(grammar="x"),
            "grammar: give a value of the type Grammar",
        ),
        (lambda: untyped.DraftOptions(ngram_min=5, ngram_max=2), "the shortest n-gram (5) is lo"),
        (lambda: untyped.DraftOptions(tree="x"), "tree: 'x' is not a shape"),
        (lambda: untyped.ContextOptions(n_threads=0), "n_threads: give 1 or more, not 0"),
        (lambda: untyped.ContextOptions(cache_type_k="q"), "cache_type_k: give one of 'f32', "),
        (lambda: untyped.SessionOptions(None), "target: give a path, not None"),
        (lambda: untyped.SessionOptions("x", sampler=3), "sampler: give a value of the type Sa"),
        (lambda: untyped.TreeShape("levels", (0,)), "TreeShape('levels', (0,)) is not a shape"),
        (lambda: untyped.TreeShape("walks", (3,)), "TreeShape('walks', (3,)) is not a shape"),
        (lambda: untyped.Message("usr", "x"), "role: give one of system, user, assistant, tool"),
        (lambda: untyped.Message("user", None), "content: give a text, not None"),
        (lambda: untyped.Session(None, time.perf_counter), "options: give a value of the type"),
        (lambda: untyped.Engine(None), "session: give a value of the type Session, not None"),
    ],
)
def test_invalid_values_of_a_class_are_rejected(make: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert error.value.message.startswith(said)


def test_an_engine_rejects_unusable_arguments(shared: specgen.Model, files: Path) -> None:
    engine: Any = shared.engine
    wrong: Any = ({"verifier": "x"}, {"n_drafted_max": -1}, {"sampling": 3}, {"generation": 3})
    for options in wrong:
        with pytest.raises(UsageError, match=f"{next(iter(options))}: give "):
            engine.insert(PROMPT, **options)
    for use in (engine.insert, engine.cancel, lambda given: next(engine.stream(given))):
        with pytest.raises(UsageError, match="not None"):
            use(None)
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as other:
        foreign = other.submit(PROMPT, max_tokens=1)
        with pytest.raises(UsageError, match="belongs to another engine"):
            list(engine.stream(foreign))
        assert not foreign.is_cancelled
    assert engine.is_idle


#: Decodes with several threads, and then in a process that was forked.
FORKING = """
import faulthandler, os, sys, specgen

def load():
    threads = specgen.ContextOptions(n_threads={n_threads}, n_threads_batch={n_threads})
    return specgen.load(sys.argv[1], "none", n_ctx=256, context=threads)

model = load()
print(model.generate("a", max_tokens=2).text, flush=True)
if os.fork() == 0:
    faulthandler.dump_traceback_later(60, exit=True)
    for find in (lambda: model, load):
        try:
            print(find().generate("a", max_tokens=2).text, flush=True)
        except specgen.BackendError as error:
            print(error.message, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_forked_process_decodes_or_says_why_it_cannot(files: Path, n_threads: int) -> None:
    """Otherwise it would wait forever for threads that only its parent has."""
    result = ended(files / "target.gguf", code=FORKING.format(n_threads=n_threads))
    text, inherited, loaded = result.stdout.splitlines()
    if n_threads == 1:
        assert inherited == loaded == text
    else:
        assert inherited == loaded
        assert "llama.cpp's threads do not survive a fork" in loaded


# --- several answers ------------------------------------------------------------------------------


def failing_once(model: specgen.Model, error: BaseException) -> Any:
    """A replacement for `decode` of the target that fails when it first decodes an answer."""
    decode = model.engine.target.decode
    errors = [error]

    def decode_or_fail(*batch: Any, **options: Any) -> Any:
        request = model.engine.slots[0].request
        if errors and request is not None and request.state == "decoding":
            raise errors.pop()
        return decode(*batch, **options)

    return decode_or_fail


def test_a_failed_round_fails_no_answers_that_wait(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:
        target = made.engine.target
        with monkeypatch.context() as patch:
            patch.setattr(target, "decode", failing_once(made, BackendError("lost")))
            first, second = made.generate_all([PROMPT, PROMPT], max_tokens=N)
        assert first.failure is not None
        with pytest.raises(BackendError, match="^lost$"):
            first.summary  # noqa: B018
        assert second.text == plain(files)
        # Another thread's answer fails while this one waits.
        other = made.submit(PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(target, "decode", failing_once(made, BackendError("lost again")))
            assert made.generate(PROMPT, max_tokens=N).text == plain(files)
        assert other.failure is not None


def test_after_ctrl_c_no_answer_is_left_in_the_queue(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with specgen.load(files / "target.gguf", "none", n_ctx=256) as made:
        with monkeypatch.context() as patch:
            patch.setattr(made.engine.target, "decode", failing_once(made, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                made.generate_all([PROMPT] * 9)
        assert made.engine.is_idle
        assert made.generate(PROMPT, max_tokens=N).text == plain(files)


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
    events.close()
    assert not model.engine.is_idle
    model.engine.step()
    assert model.engine.is_idle


def test_an_iterator_that_never_began_cancels_its_answer_too(model: specgen.Model) -> None:
    """For example, a web server whose client has gone before the first piece."""
    for ask in (model.stream, model.events, model.chat().stream):
        ask(PROMPT)
        assert model.engine.is_idle, ask
    events = model.events(PROMPT)
    events.close()
    assert model.engine.is_idle


def test_invalid_requests_raise_and_leave_the_model_usable(model: specgen.Model) -> None:
    with pytest.raises(UsageError, match="cannot be used together"):
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
    for name in ("llama_cpp", "llama_cpp.llama"):  # the page replaces the class there
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "Llama", module.Llama)
    code = "\n".join(blocks)
    namespace: dict[str, object] = {}
    exec(compile(code, str(PAGE), "exec"), namespace)
    answers = namespace["answers"]
    assert isinstance(answers, list)
    assert len({answer.text for answer in answers}) > 1


def test_the_pages_table_gives_the_same_results_as_llama_cpp_python(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    monkeypatch.chdir(files)
    names: dict[str, Any] = {
        "specgen": specgen,
        "Llama": specgen.Llama,
        "LlamaGrammar": specgen.LlamaGrammar,
        "messages": [{"role": "user", "content": "Yes or no?"}],
        "gbnf": 'root ::= "yes" | "no"',
        "person": {"type": "object", "properties": {"a": {"type": "boolean"}}},
    }

    def value(code: str) -> Any:
        """Run a cell, and return the value of an expression."""
        if re.match(r"\w+ = ", code):
            exec(code, names)
            return None
        return eval(code, names)

    n_equal = 0
    for theirs, ours in rows:
        expected = value(theirs)
        given = value(ours)
        if isinstance(expected, (str, int)):
            assert given == expected, ours
            n_equal += 1
    assert n_equal >= 5
