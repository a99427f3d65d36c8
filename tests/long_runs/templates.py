"""Check every chat template that llama.cpp ships: tool calls, thoughts, and conversations.

    python -m tests.long_runs.templates [FOLDER]

FOLDER is llama.cpp's `models/templates`; without one, the source of the installed llama-cpp-python
is downloaded. Prints a line for each template: the form of calls with its mark, the mark before
thoughts, and how many conversations are changed because the template would refuse them or leave out
messages. Fails if one of these does not hold:

- The form of calls is found for every template that writes them, except for those in `UNREAD`.
- Calls in this form are parsed, as a whole and character by character, and the grammars of calls
  allow them.
- The prompts of conversations of up to `LONGEST` messages, in any order, contain all messages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from scripts import build_peers
from specgen.errors import PromptError, SpecgenError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.grammar import calls_grammar
from specgen.serve.formats.tool_calls.parser import ToolCallParser
from specgen.session.prompts.template import Message, ToolCall
from specgen.session.prompts.thoughts import thoughts_after
from specgen.text.grammar.free_text import ANY, grammar_start
from tests.helpers.conversations import conversation, fitted, fitted_turns, lost, orders
from tests.tiny import TinyConfig, write_tiny_model

#: A call: the name of its function, and the arguments.
Call: TypeAlias = tuple[str, dict[str, Any]]

#: Templates whose calls are not read, and why.
UNREAD = {
    "meetkai-functionary-medium-v3.2": (
        "the prompt ends with the mark of a call even if the answer is not one"
    ),
}
#: The numbers of messages of the longest conversations, without and with empty answers.
LONGEST = 6
LONGEST_WITH_EMPTY_ANSWERS = 4
#: Control tokens of families of models whose template offers tools and writes no call.
_TOKENS = {"lfm2": "<|tool_call_start|>", "granite-3": "<|tool_call|>"}
_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_NOTE = {"type": "object", "properties": {"note": {"type": "string"}}}
FUNCTIONS = [Function("weather", "", _WEATHER), Function("a.b/c", "", _NOTE)]
CALLS: list[Call] = [
    ("weather", {"city": "K\u00f6ln & <b>", "days": 3}),
    ("a.b/c", {"note": "x y"}),
    ("weather", {"city": "Bern"}),
]


# --- the form of calls ----------------------------------------------------------------------------


def written(form: CallForm, calls: Sequence[Call]) -> str:
    """Calls as a model writes them that keeps to the form."""
    texts = [f"{name}{form.after_name}{_arguments(form, given)}" for name, given in calls]
    text = (form.between or "").join(texts)
    return f"{form.opening}{text}{form.closing}".replace(ANY, "1").strip()


def _arguments(form: CallForm, given: dict[str, Any]) -> str:
    if form.style == "json":
        return json.dumps(given, ensure_ascii=False)
    if form.style == "python":
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        return f"({arguments})"
    if form.style == "gemma":
        text = json.dumps(given, ensure_ascii=False)
        text = re.sub(r'"(\w+)": ', r"\1:", text)
        return text.replace('"', form.quote).replace(", ", ",")
    pair = form.pair
    assert pair is not None
    text = ""
    for key, value in given.items():
        value_type = "string" if isinstance(value, str) else "integer"
        text += f"{pair.opening}{key}{pair.middles[value_type]}{value}{pair.closing_of(key)}"
    return text


def faults(form: CallForm, folder: Path) -> list[str]:
    """What goes wrong with one call, with two and with three."""
    controls = tuple(name for name in form.control_tokens if name != "<|python_tag|>")
    file = write_tiny_model(folder / "model.gguf", TinyConfig(control_tokens=controls))
    numbers: tuple[int, ...] = (1, 2, 3)
    if form.between is None:
        numbers = (1,)
    found: list[str] = []
    with contextlib.closing(LlamaModel(file, n_gpu_layers=0)) as model:
        vocabulary = model.vocabulary.showing(form.control_tokens)
        for n_calls in numbers:
            found += _reading_faults(form, CALLS[:n_calls])
            found += _grammar_faults(form, CALLS[:n_calls], vocabulary)
    return found


def _reading_faults(form: CallForm, calls: Sequence[Call]) -> Iterator[str]:
    """The calls that are read wrongly, as a whole and character by character."""
    text = written(form, calls)
    for pieces in ([text], text):
        found = _read(form, pieces)
        if found != list(calls):
            yield f"{len(calls)} calls are read as {found} from {text!r}"


def _read(form: CallForm, pieces: Iterable[str]) -> list[Call]:
    parser = ToolCallParser(form, FUNCTIONS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(is_cut=False)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if delta.kind == "call":
            names[delta.number] = delta.name
            arguments[delta.number] = ""
        elif delta.kind == "arguments":
            arguments[delta.number] += delta.text
    return [(name, json.loads(arguments[number])) for number, name in names.items()]


def _grammar_faults(
    form: CallForm, calls: Sequence[Call], vocabulary: LlamaVocabulary
) -> Iterator[str]:
    """The first token that each grammar of calls forbids."""
    text = written(form, calls)
    for must_call in (True, False):
        grammar, _ = calls_grammar(form, FUNCTIONS, is_parallel=True, must_call=must_call)
        state = grammar_start(grammar, vocabulary)
        for token in vocabulary.tokenize_inside(text, parse_special=True):
            if not state.allows(np.array([token]))[0]:
                piece = vocabulary.token_bytes(token)
                yield f"{len(calls)} calls: {piece!r} is not allowed in {text!r} ({must_call=})"
                break
            state = state.after(token)


# --- a template -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about a template."""

    text: str
    is_expected: bool


def about_calls(name: str, template: str, work: Path) -> Finding:
    """The form of the calls of a template, and whether they are read and allowed."""
    form = form_of(template, _own_tokens(name).__contains__)
    if form is not None:
        wrong = faults(form, work)
        if wrong:
            return Finding("; ".join(wrong), is_expected=False)
        keys = " in an object" if form.keys else ""
        return Finding(f"{form.style}{keys}, {form.mark or 'bare'}", is_expected=True)
    if not _takes_tools(template):
        return Finding("takes no tools", is_expected=True)
    return Finding(UNREAD.get(name, "unknown form"), is_expected=name in UNREAD)


def _own_tokens(name: str) -> set[str]:
    """The control token for calls of a model whose template writes no call."""
    lowered = name.lower()
    for family, token in _TOKENS.items():
        if family in lowered:
            return {token}
    return set()


def _takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def about_thoughts(template: str) -> Finding:
    """The mark before thoughts, and whether what an agent sends next is rendered."""
    turns = [Message("user", "hello")]
    try:
        prompt = fitted(template, turns).text
        if _takes_tools(template):
            calls = tuple(ToolCall(f"call_{n}", *call) for n, call in enumerate(CALLS[:2]))
            turns.append(Message("assistant", "So", calls))
            turns += [
                Message("tool", "x", tool_call_id=call.identity, name=call.name) for call in calls
            ]
            fitted(template, turns)
    except PromptError as error:
        return Finding(error.message, is_expected=False)
    marks = thoughts_after(prompt, template)
    if marks is None:
        return Finding("none", is_expected=True)
    text = " ".join(marks.begin.split())  # some have line breaks
    if marks.state == "open":
        text += ", begun by the template"
    return Finding(text, is_expected=True)


def about_shapes(template: str) -> Finding:
    """How many conversations are changed, and whether all of them are in the prompt."""
    n_all = 0
    n_changed = 0
    all_orders = {*orders(LONGEST, "SUACT"), *orders(LONGEST_WITH_EMPTY_ANSWERS)}
    for letters in sorted(all_orders, key=len):
        n_all += 1
        try:
            found = fitted_turns(template, letters)
        except PromptError as error:
            return Finding(f"{letters} is refused: {error.message}", is_expected=False)
        missing = lost(letters, found.text)
        if missing:
            return Finding(f"{letters} is without {missing}", is_expected=False)
        if found.messages != conversation(letters):
            n_changed += 1
    return Finding(f"{n_changed} of {n_all} conversations are changed", is_expected=True)


def about_file(file: Path) -> bool:
    """Print the line of a template; return whether all is as expected."""
    template = file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as work:
        calls = about_calls(file.stem, template, Path(work))
    thoughts = about_thoughts(template)
    shapes = about_shapes(template)
    line = f"{file.stem}: calls: {calls.text}; thoughts: {thoughts.text}; {shapes.text}"
    print(line, flush=True)
    return calls.is_expected and thoughts.is_expected and shapes.is_expected


def main() -> int:
    """Print a line about each template; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="with files *.jinja (default: llama.cpp's, downloaded)"
    )
    folder: Path | None = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as work:
        if folder is None:
            try:
                source = build_peers.fetch(build_peers.installed_version(), Path(work))
            except (SpecgenError, build_peers.BuildError) as error:
                sys.exit(str(error))
            folder = source / "vendor/llama.cpp/models/templates"
        files = sorted(folder.glob("*.jinja"))
        if not files:
            sys.exit(f"{folder} has no file *.jinja")
        with multiprocessing.Pool() as pool:
            are_expected = pool.map(about_file, files, chunksize=1)
    failed: list[str] = []
    for file, is_expected in zip(files, are_expected, strict=True):
        if not is_expected:
            failed.append(file.stem)
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
