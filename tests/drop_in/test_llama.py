"""`specgen.Llama` as a replacement in programs that were written for llama-cpp-python."""

from __future__ import annotations

import importlib.util
import itertools
import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama as TheirLlama
from llama_cpp.llama_grammar import LlamaGrammar as TheirGrammar

import specgen
from specgen import Llama, LlamaGrammar
from specgen.drop_in.install import stand_in_for
from specgen.errors import (
    BackendError,
    ModelFileError,
    PromptError,
    UnknownModelError,
    UsageError,
)
from tests.helpers.cli import ended
from tests.helpers.fetch import WebServer, publish_repository
from tests.helpers.templates import FAMILIES
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "the cat is in the"
MESSAGES = [{"role": "user", "content": "the cat"}]
#: Without tokens that are not UTF-8, which llama-cpp-python drops from texts.
TARGET = TinyConfig(
    logit_scale=6.0,
    unprintable_scale=0.3,
    chat_template="{{ bos_token }}" + FAMILIES["Hermes"],
    n_ctx_train=2048,
)
PARAMETERS = {"type": "object", "properties": {"x": {"enum": ["ab", "cd"]}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "pick", "parameters": PARAMETERS}}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "target.gguf", TARGET)
    write_tiny_model(folder / "draft.gguf", TARGET.draft(0.02))
    write_tiny_model(folder / "encoder.gguf", TinyConfig(architecture="bert", n_ctx_train=64))
    return folder


def opened(files: Path, **arguments: Any) -> Llama:
    arguments = {"draft_model": files / "draft.gguf", "n_ctx": 256, **arguments}
    return Llama(str(files / "target.gguf"), verbose=False, n_threads=1, **arguments)


@pytest.fixture
def llama(files: Path) -> Iterator[Llama]:
    """A `Llama` whose answers do not depend on earlier ones."""
    with opened(files) as made:
        yield made


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


# --- the same as llama-cpp-python -----------------------------------------------------------------


def test_texts_and_facts_are_those_of_llama_cpp(files: Path) -> None:
    theirs = TheirLlama(
        str(files / "target.gguf"), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False
    )
    # Both compute with the same kernels. specgen's, where they can be used, are batch-invariant.
    with closing(theirs), opened(files) as ours:
        for name in ("n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl"):
            assert getattr(ours, name)() == getattr(theirs, name)()
        assert ours.metadata == theirs.metadata
        assert ours.context_params.n_ctx == theirs.context_params.n_ctx
        n_drafted = 0
        prompts: tuple[Any, ...] = (PROMPT, "a b c d a b c d a b", "not the cat " * 14, [5, 6, 7])
        for prompt in prompts:
            for n_tokens in (16, 0):
                wanted: Any = theirs(prompt, max_tokens=n_tokens, temperature=0.0)
                answer = ours(prompt, max_tokens=n_tokens, temperature=0.0, speculative={"max": 4})
                n_drafted += answer["speculative"]["n_drafted"]
                assert text_of(answer) == text_of(wanted)
                assert wanted["usage"].items() <= answer["usage"].items()
                assert wanted["choices"][0].items() <= answer["choices"][0].items()
                assert wanted.keys() <= answer.keys()
        wanted = theirs.create_chat_completion(MESSAGES, max_tokens=9, temperature=0.0)  # type: ignore[arg-type]
        answer = ours.create_chat_completion(MESSAGES, max_tokens=9, temperature=0.0)
        assert wanted["choices"][0]["message"].items() <= answer["choices"][0]["message"].items()
        assert wanted["usage"].items() <= answer["usage"].items()
    assert n_drafted > 0


def test_tokens_are_those_of_llama_cpp(files: Path) -> None:
    file = str(files / "target.gguf")
    theirs = TheirLlama(file, vocab_only=True, verbose=False)
    with closing(theirs), Llama(file, vocab_only=True, verbose=False) as ours:
        for text in (b"the cat", b" a <|im_start|>", b"", "é☺".encode()):
            for add_bos in (True, False):
                for special in (True, False):
                    tokens = ours.tokenize(text, add_bos, special)
                    assert tokens == theirs.tokenize(text, add_bos, special)
                    assert ours.detokenize(tokens) == theirs.detokenize(tokens)
                    shown = ours.detokenize(tokens, special=True)
                    assert shown == theirs.detokenize(tokens, special=True)
        tokenizer = ours.tokenizer()
        assert tokenizer.encode("the cat") == theirs.tokenizer().encode("the cat")
        assert tokenizer.decode(tokenizer.encode("the cat", add_bos=False)) == "the cat"
        with pytest.raises(UsageError, match="vocab_only"):
            ours("a")


def test_embeddings_are_those_of_llama_cpp(files: Path) -> None:
    file = str(files / "encoder.gguf")
    texts = ["the cat is in the house", "a dog"]
    theirs = TheirLlama(file, embedding=True, n_ctx=64, verbose=False)
    with closing(theirs), Llama(file, embedding=True, n_ctx=64, verbose=False) as ours:
        for normalize in (True, False):
            wanted = theirs.embed(texts, normalize=normalize)
            np.testing.assert_allclose(ours.embed(texts, normalize), wanted, atol=1e-3)
        answer = ours.create_embedding(texts)
        wanted_answer = theirs.create_embedding(texts)
        assert answer.keys() == wanted_answer.keys()
        assert answer["usage"] == wanted_answer["usage"]
        assert [item["index"] for item in answer["data"]] == [0, 1]
        vector, n_tokens = ours.embed("a dog", return_count=True)
        assert vector == answer["data"][1]["embedding"]
        assert n_tokens == len(ours.tokenize(b"a dog"))
        pooling: Any = theirs.pooling_type()
        assert ours.pooling_type() == pooling
        # A text that is too long is cut, or refused.
        assert ours.embed("cat " * 100, return_count=True)[1] == 64
        with pytest.raises(PromptError, match="64"):
            ours.embed("cat " * 100, truncate=False)


def test_a_pattern_names_a_model_on_the_hub(
    files: Path, hub_server: WebServer, capfd: pytest.CaptureFixture[str]
) -> None:
    content = (files / "target.gguf").read_bytes()
    names = ("tiny-q8_0.gguf", "tiny-q4_0.gguf")
    publish_repository(hub_server, "maker/tiny-GGUF", dict.fromkeys(names, content))
    for _ in range(2):  # from the hub, and from its cache
        with Llama.from_pretrained(
            "maker/tiny-GGUF", "*Q4_0.gguf", local_dir_use_symlinks="auto", verbose=False, n_ctx=64
        ) as made:
            assert made.model_path.endswith("tiny-q4_0.gguf")
            assert made.n_ctx() == 64
    assert capfd.readouterr().err == ""
    with pytest.raises(UnknownModelError, match="q5_k"):
        Llama.from_pretrained("maker/tiny-GGUF", "*q5_k.gguf")
    with pytest.raises(UsageError, match="local_dir"):
        Llama.from_pretrained("maker/tiny-GGUF", "*q4_0.gguf", local_dir="here")


# --- completions ----------------------------------------------------------------------------------


def test_a_seed_makes_the_same_text_and_answers_differ(files: Path) -> None:
    with opened(files, seed=7) as made:
        first = text_of(made(PROMPT, temperature=2.0))
        second = text_of(made(PROMPT, temperature=2.0))
        assert first != second
        made.set_seed(7)
        assert text_of(made(PROMPT, temperature=2.0)) == first
        own = [text_of(made(PROMPT, temperature=2.0, seed=1337)) for _ in range(2)]
        assert own[0] == own[1]
        copy = pickle.loads(pickle.dumps(made))
    with copy:
        assert copy.n_ctx() == 256
        assert text_of(copy(PROMPT, temperature=2.0)) == first


@pytest.mark.parametrize("grammar_class", [LlamaGrammar, TheirGrammar])
def test_grammars_of_both_classes_bind(llama: Llama, grammar_class: Any, tmp_path: Path) -> None:
    yes_or_no = 'root ::= "yes" | "no"'
    (tmp_path / "answer.gbnf").write_text(yes_or_no, encoding="utf-8")
    for grammar in (
        grammar_class.from_string(yes_or_no, verbose=False),
        grammar_class.from_file(tmp_path / "answer.gbnf", verbose=False),
        yes_or_no,
    ):
        assert text_of(llama("?", grammar=grammar)) in ("yes", "no")
    schema = grammar_class.from_json_schema(json.dumps(PARAMETERS), verbose=False)
    answer = json.loads(text_of(llama("?", grammar=schema, max_tokens=80)))
    assert answer["x"] in ("ab", "cd")


def test_biases_stops_and_log_probabilities(llama: Llama) -> None:
    (token,) = llama.tokenize(b"b", add_bos=False)[-1:]
    answer = llama(PROMPT, logit_bias={token: 100.0}, max_tokens=3, logprobs=2, echo=True)
    assert text_of(answer) == PROMPT + "bbb"
    assert answer["choices"][0]["logprobs"]["tokens"][-3:] == ["b", "b", "b"]
    plain = text_of(llama(PROMPT, temperature=0.0))
    stop = plain[4:7]
    stopped = llama(PROMPT, temperature=0.0, stop=stop)
    assert text_of(stopped) == plain[: plain.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    chat = llama.create_chat_completion(MESSAGES, logprobs=True, top_logprobs=2, max_tokens=2)
    assert len(chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_streams_are_the_whole_text_and_can_be_left(llama: Llama) -> None:
    chunks = list(llama(PROMPT, temperature=0.0, stream=True, model="mine"))
    assert "".join(map(text_of, chunks)) == text_of(llama(PROMPT, temperature=0.0))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert {chunk["model"] for chunk in chunks} == {"mine"}
    stream = llama(PROMPT, max_tokens=0, stream=True)
    next(stream)
    stream.close()
    # Two streams at the same time do not disturb each other.
    both = [
        llama.create_chat_completion(MESSAGES, stream=True, max_tokens=5, temperature=0.0)
        for _ in range(2)
    ]
    texts = ["", ""]
    # (A chunk has the tokens of a round, of which one stream may have fewer than the other.)
    for pair in itertools.zip_longest(*both):
        for number, chunk in enumerate(pair):
            if chunk is not None:
                texts[number] += chunk["choices"][0]["delta"].get("content", "")
    assert texts[0] == texts[1] != ""


def test_tools_and_forms_of_answers(llama: Llama) -> None:
    choice = {"type": "function", "function": {"name": "pick"}}
    answer = llama.create_chat_completion(MESSAGES, tools=TOOLS, tool_choice=choice)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["x"] in ("ab", "cd")
    form = {"type": "json_object", "schema": PARAMETERS}
    answer = llama.create_chat_completion(MESSAGES, response_format=form)
    assert json.loads(answer["choices"][0]["message"]["content"])["x"] in ("ab", "cd")
    completion = llama.create_chat_completion_openai_v1(MESSAGES, tools=TOOLS, tool_choice=choice)
    assert completion.choices[0].message.tool_calls[0].function.name == "pick"
    chunks = llama.create_chat_completion_openai_v1(MESSAGES, stream=True, max_tokens=2)
    assert next(chunks).choices[0].delta.role == "assistant"


def test_an_empty_prompt_continues_the_beginning_of_text(llama: Llama) -> None:
    wanted = llama([llama.token_bos()], temperature=0.0)
    assert text_of(llama("", temperature=0.0)) == text_of(wanted)


def test_a_gap_may_be_at_the_beginning_of_a_text(llama: Llama) -> None:
    # The error shows that the suffix is not ignored: this model cannot fill gaps.
    for prompt in ("", PROMPT):
        with pytest.raises(UsageError, match="fill-in-the-middle"):
            llama(prompt, suffix=" the mat", max_tokens=4)


def test_a_forgotten_llama_frees_its_model(files: Path) -> None:
    made = opened(files)
    stream = made.create_chat_completion(MESSAGES, stream=True)
    del made
    with pytest.raises(BackendError, match="closed"):
        list(stream)


# --- rejected and ignored options -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits_processor": [print]}, "logits_processor: specgen's Llama does not have it"),
        ({"stopping_criteria": [print]}, "stopping_criteria"),
        ({"mirostat_mode": 2}, "mirostat_mode"),
        ({"temprature": 1.0}, "temprature.*did you mean temperature"),
        ({"temperature": -1.0}, "temperature: give 0 or more"),
        ({"grammar": 5}, "grammar: give a LlamaGrammar"),
        ({"n": 2}, "one answer"),
        ({"prompt": ["a", "b"]}, "one answer"),
        ({"prompt": None}, "prompt: give a text or its tokens, not None"),
        ({"prompt": np.array([5, 6])}, "prompt: give a text"),
        ({"prompt": [9999]}, "no token 9999"),
        ({"prompt": "the cat " * 400}, "256"),
    ],
)
def test_unsupported_options_are_rejected(
    llama: Llama, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, PromptError), match=message):
        llama(**{"prompt": PROMPT, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_path": "lora.gguf"}, "lora_path='lora.gguf': specgen's Llama cannot honour it"),
        ({"kv_overrides": {"a": 1}}, "kv_overrides"),
        ({"rope_freq_base": 5000.0}, "rope_freq_base"),
        ({"chat_handler": print}, "chat_handler"),
        ({"chat_format": "vicuna"}, "chat_format='vicuna'"),
        ({"type_k": 99}, "type_k: 99"),
        ({"n_ctx": -1}, "n_ctx: give 0 or more"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_unsupported_ways_to_load_a_model_are_rejected(
    files: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        opened(files, **arguments)


def test_meaningless_options_are_ignored_with_one_warning(files: Path) -> None:
    # LangChain's arguments, for every model.
    langchain = {"rope_freq_base": 10_000.0, "rope_freq_scale": 1.0, "f16_kv": True, "n_parts": -1}
    with pytest.warns(RuntimeWarning) as caught:
        opened(files, n_ubatch=7, numa=True, **langchain).close()
    (warning,) = caught
    wanted = "ignores n_ubatch, numa, rope_freq_base, rope_freq_scale"
    assert wanted in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(files, logits_all=True, use_mmap=True, lora_path=None, n_ubatch=512).close()
    with opened(files) as made:
        made.set_cache(None)
        with pytest.warns(RuntimeWarning, match=r"tfs_z=0\.5"):
            made(PROMPT, tfs_z=0.5)


def test_missing_features_raise_a_clear_error(llama: Llama) -> None:
    attribute = "save_state"
    with pytest.raises(AttributeError, match="has no save_state; use llama_cpp"):
        getattr(llama, attribute)
    assert not hasattr(llama, "no_such_name")
    with pytest.raises(UsageError, match="messages: give a list of messages, not None"):
        llama.create_chat_completion(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="makes no embeddings"):
        llama.embed("a")
    with pytest.raises(ModelFileError, match="no such file"):
        Llama("/no/such/file.gguf", verbose=False)


def test_a_closed_llama_answers_nothing(files: Path) -> None:
    made = opened(files)
    made.close()
    made.close()
    with pytest.raises(BackendError, match="closed"):
        made(PROMPT)


# --- as a replacement of llama-cpp-python ---------------------------------------------------------


def test_libraries_get_it_in_the_place_of_llama_cpp(files: Path) -> None:
    code = (
        "import specgen; specgen.install_as_llama_cpp()\n"
        "from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList\n"
        "from llama_cpp.llama import Llama as again\n"
        "assert Llama is again is specgen.Llama\n"
        f"llama = Llama({str(files / 'target.gguf')!r}, verbose=False, draft_model='ngram')\n"
        "grammar = LlamaGrammar.from_string('root ::= \"yes\"', verbose=False)\n"
        "print(llama('the cat', grammar=grammar)['choices'][0]['text'])\n"
    )
    assert ended(code=code).stdout == "yes\n"


def test_a_stand_in_has_the_names_that_libraries_import(monkeypatch: pytest.MonkeyPatch) -> None:
    low_level: Any = ModuleType("bundled")
    low_level.llama_n_ctx = print
    stand_in: Any = stand_in_for(low_level)
    monkeypatch.setitem(sys.modules, "llama_cpp", stand_in)
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.name == stand_in.__name__ == "llama_cpp"
    assert stand_in.Llama is Llama
    assert stand_in.LlamaGrammar is LlamaGrammar
    assert stand_in.LogitsProcessorList([print]) == [print]
    assert stand_in.llama_n_ctx is print


def test_it_is_a_public_name() -> None:
    assert {"Llama", "LlamaGrammar", "install_as_llama_cpp"} <= {*specgen.__all__}
