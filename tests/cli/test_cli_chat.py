"""`specgen chat`, in pipes and at a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from specgen.errors import BackendError
from specgen.method.answer_loop import AnswerLoop
from specgen.session import conversation
from tests.helpers.cli import Result, Specgen, models_of, spawn
from tests.helpers.common import ROOT, posix
from tests.helpers.strict_templates import STRICT
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.config import CHATML_TEMPLATE

if TYPE_CHECKING:
    import pexpect

Chat = Callable[..., Result]
Terminal = Callable[..., "pexpect.spawn[str]"]

pytestmark = [pytest.mark.usefixtures("tested_kernels"), pytest.mark.slow]
#: A terminal is told to mark pastes when a message can be typed.
READY = "\x1b[?2004h"


def options(models: Path, **names: str) -> list[str]:
    return [*models_of(models, **names), "-n", "12", "-t", "1"]


@pytest.fixture
def chat(specgen: Specgen, monkeypatch: pytest.MonkeyPatch, chat_models: Path) -> Chat:
    """Runs `specgen chat` with lines in its standard input."""

    def talk(*arguments: str, lines: str | bytes = "", **names: str) -> Result:
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return specgen("chat", *options(chat_models, **names), *arguments)

    return talk


def events(result: Result, name: str) -> list[dict[str, Any]]:
    """The events of a --json run with this name."""
    found = [json.loads(line) for line in result.out.splitlines()]
    return [event for event in found if event["event"] == name]


def prompts(result: Result) -> list[str]:
    return [event["text"] for event in events(result, "prompt")]


# --- in a pipe


@pytest.mark.parametrize("draft", ["draft", "ngram"])
def test_each_line_is_a_turn_and_only_answers_are_on_stdout(chat: Chat, draft: str) -> None:
    lines = "the cat\n\nis on\nthe mat\n"
    plain = chat(lines=lines, draft="none")
    assert plain.code == 0
    assert plain.out.count("\n") == 3
    assert "\x1b" not in plain.out
    found = chat(lines=lines, draft=draft)
    assert (found.code, found.out) == (0, plain.out)


def test_a_chat_continues_after_an_empty_answer(chat: Chat, tmp_path: Path) -> None:
    """An answer that ended before its first token is kept, but Ministral's template rejects it."""
    file = tmp_path / "chat.json"
    turns = (conversation.Turn("a", ""), conversation.Turn("b", "c"))
    conversation.save_conversation(file, conversation.Conversation(turns=turns))
    found = chat(
        "--json", "--chat-template", STRICT["Ministral"], lines=f"/load {file}\nd\n", draft="none"
    )
    assert found.code == 0
    assert prompts(found) == [
        "<|user|>a\n\nb<|end|>\n<|assistant|>c<|end|>\n<|user|>d<|end|>\n<|assistant|>"
    ]


def test_the_turns_follow_the_models_template_and_decode_only_what_is_new(
    chat: Chat, specgen: Specgen, chat_models: Path, tmp_path: Path
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a house\n", encoding="utf-8")
    choices = ("--json", "--system", "be brief", "--file", str(file))
    result = chat(*choices, lines="the cat\nis on\nthe mat\n")
    texts, found = prompts(result), events(result, "finished")
    answers = [str(each["text"]) for each in found]
    end, assistant = "<|im_end|>\n", "<|im_start|>assistant\n"
    first = f"<|im_start|>user\n{file}:\n\na house\n\nthe cat{end}{assistant}"
    assert texts[0] == f"<|im_start|>system\nbe brief{end}{first}"
    assert texts[1] == f"{texts[0]}{answers[0]}{end}<|im_start|>user\nis on{end}{assistant}"
    assert [each["n_cached_tokens"] == 0 for each in found] == [True, False, False]
    own = options(chat_models, draft="none")
    for text, answer in zip(texts, answers, strict=True):
        assert specgen("run", *own, "--raw", "-q", "-p", text).out == answer


def test_a_seed_gives_other_answers_to_one_question_and_the_same_next_time(chat: Chat) -> None:
    lines = "the cat\n/regen\n/regen\nis on\n"
    first = chat("--temp", "1.5", "--seed", "7", lines=lines)
    assert len(set(first.out.splitlines())) == 4
    assert chat("--temp", "1.5", "--seed", "7", lines=lines).out == first.out
    assert "always the same" not in first.err
    assert "always the same" in chat(lines=lines).err
    assert "always the same" not in chat("--xtc-probability", "0.5", lines=lines).err


def test_commands_in_a_pipe_speak_on_stderr(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    lines = "the cat|/system be brief|/draft off|is on|/regen|/stats"
    lines += f"|/save {file}|/undo|/reset|/load {file}|/draft on|/help|the mat|/quit|never asked"
    result = chat("--json", lines=lines.replace("|", "\n"))
    assert result.code == 0
    texts, found = prompts(result), events(result, "finished")
    assert len(texts) == 4
    assert "be brief" in texts[1]
    assert (texts[2], found[2]["text"]) == (texts[1], found[1]["text"])
    assert [each["n_drafted"] != 0 for each in found] == [True, False, False, True]
    assert "is on" in texts[3]
    assert "never asked" not in texts[3]
    for words in ("now has 1 turn", "now has 0 turns", "/undo", "of 2 turns", "so far: 3 answers,"):
        assert words in result.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/foo", "there is no command /foo"),
        ("/regen", "there is no question to answer again"),
        ("/think", "no thinking block"),
        ("/load missing.jsonl", "missing.jsonl: cannot be read"),
        ("/save missing/x.jsonl", "missing/x.jsonl: cannot be written"),
        ("cat " * 3000, "the message, with the system message and files, has"),
    ],
)
def test_an_invalid_line_is_reported_and_the_conversation_continues(
    chat: Chat, line: str, words: str
) -> None:
    plain = chat(lines="the cat\n", draft="none")
    result = chat(lines=f"{line}\nthe cat\n")
    assert result.out == plain.out
    assert result.code in (2, 3)
    errors = [each for each in result.err.splitlines() if each.startswith("error: ")]
    assert [words in error for error in errors] == [True]


def test_input_that_cannot_start_a_conversation_is_refused(chat: Chat, tmp_path: Path) -> None:
    bad = chat(lines=b"the cat\ncaf\xe9\nmore\n")
    assert bad.code == 3
    assert "byte 0xe9 on line 2" in bad.err
    assert bad.out.count("\n") == 1
    assert chat(lines="").code == 0
    assert "is not a valid name" in chat("--session", "a/b", lines="x\n").err
    assert "cannot be read" in chat("--file", str(tmp_path / "no"), lines="x\n").err


def test_a_model_without_a_template_gets_a_named_one(chat: Chat) -> None:
    result = chat(target="plain", draft="none", lines="x\ny\n")
    assert result.code == 0
    assert "a conversation needs a chat template" in result.err
    assert "chatml is used; choose another with --chat-template" in result.err
    named = chat("--chat-template", "chatml", target="plain", draft="none", lines="x\ny\n")
    assert result.out == named.out
    assert "--chat-template" not in named.err


def test_turns_that_do_not_fit_the_context_are_left_out_with_a_notice(chat: Chat) -> None:
    lines = "".join(f"number {n} of the cat\n" for n in range(8))
    result = chat("--json", "-c", "256", "--system", "be brief", lines=lines)
    assert result.code == 0
    notices = [event["message"] for event in events(result, "notice")]
    gone = [message for message in notices if "left out from here on" in message]
    assert gone
    assert all("the system message kept" in message for message in gone)
    last = prompts(result)[-1]
    assert [words in last for words in ("be brief", "number 0", "number 7")] == [True, False, True]
    assert len(events(result, "finished")) == 8


def test_a_conversation_is_kept_and_continued_unless_its_file_cannot_be_written(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat(lines="the cat\nis on\nthe mat\n")
    first = chat("--session", "zoo", lines="the cat\nis on\n")
    second = chat("--session", "zoo", lines="the mat\n")
    assert first.out + second.out == whole.out
    assert "continuing a conversation of 2 turns" in second.err

    def full(_path: Path, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    before = kept("zoo")
    with monkeypatch.context() as patch:
        patch.setattr(conversation, "replace_bytes", full)
        failed = chat("--session", "zoo", lines="is on\nthe mat\n")
    assert (failed.code, failed.out) == (10, "")
    assert "No space left" in failed.err
    assert kept("zoo") == before
    (file,) = (Path(os.environ["SPECGEN_DATA"]) / "chats").glob("*.json")
    file.write_bytes(file.read_bytes()[:-9])
    damaged = chat("--session", "zoo", lines="x\n")
    assert (damaged.code, damaged.out) == (3, "")
    assert "zoo.json: damaged, or not a conversation" in damaged.err


def test_a_thought_is_unchanged_in_a_pipe_and_shown_when_asked_for(chat: Chat) -> None:
    text = "<think>\nwhy not\x1b[2J</think>\n\nyes"
    grammar = 'root ::= "<think>\\nwhy not\\x1b[2J</think>\\n\\nyes"'
    result = chat("--grammar", grammar, "-n", "99", "-q", lines="the cat\n/think\n")
    assert (result.code, result.out) == (0, f"{text}\n")
    assert result.err == "why not\N{SYMBOL FOR ESCAPE}[2J\n"


#: Of gpt-oss's family: the marks are control tokens.
HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "<|call|>")


def test_thoughts_between_control_tokens_are_recognised(
    chat: Chat, specgen: Specgen, tmp_path: Path
) -> None:
    config = TinyConfig(chat_template=CHATML_TEMPLATE, control_tokens=HARMONY)
    model = str(write_tiny_model(tmp_path / "a.gguf", config))
    thought = '<|channel|> "analysis" <|message|> "why" <|end|> <|start|> "assistant"'
    for begin, shown, told in (
        (thought, "<think>why</think>\n\nso\n", "why\n"),
        ("", "so\n", "no thinking block"),
    ):
        # Only a grammar that has the mark itself is one of an answer with thoughts.
        marks = "# <|channel|>analysis<|message|>" if begin else ""
        grammar = f'{marks}\nroot ::= {begin} <|channel|> "final" <|message|> "so"'
        own = ("-m", model, "-n", "60", "-q", "--grammar", grammar)
        assert specgen("run", *own, "-md", "none", "x").out.rstrip("\n") == shown[:-1]
        found = chat(*own, lines="x\ny\n/think\n", draft="none")
        assert (found.out, found.code) == (shown * 2, 0 if begin else 2)
        assert told in found.err
        asked = prompts(chat(*own, "--json", lines="x\ny\n", draft="none"))
        assert asked[1].count("so") == 1
        assert "why" not in asked[1]


def test_an_answer_that_fails_is_reported_and_the_conversation_continues(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat("--session", "kept", lines="the cat\n").out
    decode, n_calls = AnswerLoop.round, iter(range(10_000))

    def fail(loop: AnswerLoop, sequences: Sequence[Any], *more: Any) -> object:
        if next(n_calls) == 3:
            raise BackendError("out of order")
        return decode(loop, sequences, *more)

    monkeypatch.setattr(AnswerLoop, "round", fail)
    result = chat("--session", "fails", lines="the cat\n/regen\n")
    assert result.code == 9
    assert "error: out of order" in result.err
    beginning, again, _ = result.out.split("\n")
    assert f"{again}\n" == whole
    assert whole.startswith(beginning)
    assert len(beginning) < len(again)
    assert kept("fails") == [("the cat", again)]


def begun(models: Path, lines: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a conversation in its own process, and send it lines; more may follow."""
    process = spawn("chat", *options(models), "-q", *arguments, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(lines.encode())
    process.stdin.flush()
    return process


@posix
def test_a_kill_at_any_moment_loses_only_the_unfinished_answer(
    chat_models: Path, chat: Chat
) -> None:
    lines = [f"number {number}\n" for number in range(40)]
    room = ("-c", "2048")
    answers = chat(*room, lines="".join(lines[:12])).out.splitlines()
    n_seen = 0
    for n_turns in (1, 2, 4, 6):  # each time it goes on where it was killed
        left = "".join(lines[n_seen:])
        process = begun(chat_models, left, *room, "--session", "killed")
        try:
            wait_for("killed", n_turns)
        finally:
            process.kill()
            _, said = process.communicate()
        assert said == b""
        found = chat("--session", "killed", "--json", "-q", lines="")
        assert found.code == 0, found.err
        turns = [answer for _, answer in kept("killed") if answer is not None]
        assert turns[:12] == answers[: len(turns)]
        assert len(turns) >= max(n_seen, n_turns)
        n_seen = len(turns)


@posix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_pipe_ends_the_conversation_with_the_partial_answer(
    chat_models: Path, number: int, code: int
) -> None:
    process = begun(chat_models, "the cat\nmore\n", "-n", "1900", "--ignore-eos")
    assert process.stdout is not None
    beginning = process.stdout.read(5)
    process.send_signal(number)
    rest, errors = process.communicate()
    assert process.returncode == code, errors
    assert b"Traceback" not in errors
    assert len(beginning + rest) > 5


# --- at a terminal


@pytest.fixture
def terminal(chat_models: Path) -> Iterator[Terminal]:
    """Begins a conversation at a terminal."""
    import pexpect

    children: list[pexpect.spawn[str]] = []

    def begin(
        *arguments: str, quiet: bool = True, term: str = "xterm-256color", ready: str = READY
    ) -> pexpect.spawn[str]:
        command = ["-m", "specgen", "chat", *(["-q"] if quiet else []), *options(chat_models)]
        command += arguments
        env = {**os.environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"}
        like: dict[str, Any] = {"dimensions": (30, 100), "encoding": "utf-8", "timeout": 30}
        # Tests that run in the background of a shell ignore Ctrl-C, and so would their children.
        like["preexec_fn"] = heed_ctrl_c
        child = pexpect.spawn(sys.executable, command, env=env, cwd=str(ROOT), **like)
        children.append(child)
        child.expect_exact(ready)
        return child

    yield begin
    for child in children:
        child.close(force=True)


def heed_ctrl_c() -> None:
    """Give SIGINT its default effect in this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def kept(name: str) -> list[tuple[str, str | None]]:
    """The questions of a conversation, and the answers."""
    file = Path(os.environ["SPECGEN_DATA"]) / "chats" / f"{name}.json"
    turns = json.loads(file.read_bytes())["turns"]
    return [(turn["question"], turn["answer"]) for turn in turns]


def wait_for(name: str, n: int) -> list[tuple[str, str | None]]:
    """Wait until `n` turns of a conversation are answered, and return its turns."""
    turns: list[tuple[str, str | None]] = []
    for _ in range(6000):
        with contextlib.suppress(FileNotFoundError):
            turns = kept(name)
        if len(turns) >= n and turns[n - 1][1] is not None:
            return turns
        time.sleep(0.01)
    pytest.fail(f"{turns} are not {n} turns with answers")


@posix
def test_lines_pastes_and_earlier_messages_can_be_typed(terminal: Terminal, chat: Chat) -> None:
    child = terminal("--session", "typed")
    child.send("the cat\r")
    answer = chat(lines="the cat\n", draft="none").out
    assert wait_for("typed", 1) == [("the cat", answer.removesuffix("\n"))]
    child.expect_exact(READY)
    # A backslash continues the message on another line; Ctrl-C clears what was typed.
    child.send("never\x03")
    child.send("is on\\\rthe mat\r")
    assert wait_for("typed", 2)[1][0] == "is on\nthe mat"
    child.expect_exact(READY)
    # A paste with line ends in it is one message.
    child.send("\x1b[200~one\ntwo\x1b[201~\r")
    assert wait_for("typed", 3)[2][0] == "one\ntwo"
    child.expect_exact(READY)
    # The history has what was typed before.
    child.send("\x1b[A\x1b[A\x1b[A")
    child.send("\r")
    assert wait_for("typed", 4)[3][0] in ("is on\nthe mat", "the cat", "one\ntwo")
    child.send("\x04")
    child.expect_exact("\x1b[?2004l", timeout=60)
    child.wait()
    assert child.exitstatus == 0
    # A continued conversation begins with its last turns, the models and the context.
    shown = str(terminal("--session", "typed", quiet=False).before)
    assert [shown.count(f"> {line}") for line in ("the cat", "one", "is on")] == [0, 1, 1]
    assert "target.gguf; draft: draft.gguf; " in shown
    assert " tokens of context" in shown


@posix
@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_second_ctrl_c_at_an_empty_line_ends_the_conversation(
    terminal: Terminal, term: str
) -> None:
    import pexpect

    ready = "conversation\r\n> " if term == "dumb" else READY
    child = terminal(quiet=False, term=term, ready=ready)
    how_to_leave = "another Ctrl-C, Ctrl-D or /quit ends the conversation"
    again = "> " if term == "dumb" else READY
    for message in ("/stats\r", None):  # a message in between starts again
        child.send("\x03")
        child.expect_exact(how_to_leave)
        child.expect_exact(again)
        if message is not None:
            child.send(message)
            child.expect_exact("there is no answer yet")
            child.expect_exact(again)
    child.send("\x03")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


@posix
def test_a_terminal_without_escape_codes_shows_a_prompt(terminal: Terminal) -> None:
    child = terminal("--session", "dumb", quiet=False, term="dumb", ready="conversation\r\n> ")
    child.send("the cat\\\nis on\n")
    child.expect_exact("> ")
    assert wait_for("dumb", 1)[0][0] == "the cat\nis on"
    child.expect_exact("(cut off: raise -n for more)")
    child.expect_exact("> ")
    child.send("\x04")
    assert "\x1b" not in f"{child.before}{child.read()}"
    child.wait()
    assert child.exitstatus == 0


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_the_input_leaves_the_terminal_as_it_was(
    terminal: Terminal, number: int
) -> None:
    import pty
    import termios

    child = terminal()
    reader = pty.os.dup(child.child_fd)  # type: ignore[attr-defined]
    assert not termios.tcgetattr(reader)[3] & termios.ICANON
    child.kill(number)
    child.expect_exact("\x1b[?2004l")
    child.wait()
    assert child.exitstatus == 128 + number
    assert termios.tcgetattr(reader)[3] & termios.ICANON
    os.close(reader)


@posix
def test_interrupts_end_an_answer_and_what_is_typed_waits_for_its_end(terminal: Terminal) -> None:
    child = terminal("--session", "ahead", "-n", "1500", "--ignore-eos")
    child.send("the cat\r")
    child.expect("tokens  ")
    child.kill(signal.SIGINT)
    child.kill(signal.SIGINT)
    wait_for("ahead", 1)
    child.expect_exact(READY)
    child.send("/stats\r")
    child.expect_exact(READY)
    child.send("is on\r")
    child.expect("tokens  ")
    child.send("zebra\r")
    child.expect_exact(READY)
    assert "zebra" not in str(child.before)
    child.expect("tokens  ")
    child.send("\x03")
    assert [question for question, _ in wait_for("ahead", 3)] == ["the cat", "is on", "zebra"]
