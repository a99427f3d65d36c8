"""How specgen reads the calls and the thoughts of every chat template that llama.cpp ships, and how
it changes conversations for it, a line for each::

    python -m tests.long_runs.templates [FOLDER]

FOLDER is llama.cpp's `models/templates`; without one, the source of the installed llama-cpp-python
is fetched. Fails if a template has lost its form: all that write calls have one, but for those in
`UNREAD`. Calls in each form must be read again, whole and letter by letter, and the grammars of
calls must allow them. Conversations of up to `LONGEST` messages in any order must be in the prompt
with all of their messages.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts import build_peers
from specgen.errors import PromptError
from specgen.llama import LlamaModel
from specgen.serve.formats.tool_calls.form_probe import form_of
from specgen.serve.formats.tool_calls.forms import CallForm
from specgen.serve.formats.tool_calls.function import Function
from specgen.serve.formats.tool_calls.grammar import calls_grammar
from specgen.serve.formats.tool_calls.parser import ToolCallParser
from specgen.session.prompts.template import Message, ToolCall
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS, ThoughtReader
from specgen.text.grammar.free_text import ANY, grammar_start
from tests.helpers.conversations import conversation, fitted, fitted_turns, lost, orders
from tests.tiny import TinyConfig, write_tiny_model

#: Templates whose calls are not read, and why.
UNREAD = {
    "meetkai-functionary-medium-v3.2": (
        "the prompt ends with the mark of a call even if the answer is not one"
    ),
}
#: The numbers of messages of the longest conversations, without and with empty answers.
LONGEST = 6
LONGEST_WITH_EMPTY_ANSWERS = 4
#: Control tokens of models whose template offers tools and writes no call.
_TOKENS = ("<|tool_call_start|>", "<|tool_call|>")
_WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_NOTE = {"type": "object", "properties": {"note": {"type": "string"}}}
FUNCTIONS = [Function("weather", "", _WEATHER), Function("a.b/c", "", _NOTE)]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": "K\u00f6ln & <b>", "days": 3}),
    ("a.b/c", {"note": "x y"}),
    ("weather", {"city": "Bern"}),
]


def written(form: CallForm, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them that keeps to the form."""
    between = form.between or ""
    text = between.join(
        f"{name}{form.after_name}{_arguments(form, given)}" for name, given in calls
    )
    return f"{form.opening}{text}{form.closing}".replace(ANY, "1").strip()


def _arguments(form: CallForm, given: dict[str, Any]) -> str:
    if form.style == "json":
        return json.dumps(given, ensure_ascii=False)
    if form.style == "python":
        return f"({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    if form.style == "gemma":
        quoted = json.dumps(given, ensure_ascii=False).replace('": ', '":')
        return re.sub(r'"(\w+)":', r"\1:", quoted).replace('"', form.quote).replace(", ", ",")
    assert form.pair is not None
    pair, text = form.pair, ""
    for key, value in given.items():
        middle = pair.middles["string" if isinstance(value, str) else "integer"]
        text += f"{pair.opening}{key}{middle}{value}{pair.closing_of(key)}"
    return text


def faults(form: CallForm, folder: Path) -> list[str]:
    """What goes wrong with one call, with two and with three."""
    found = []
    controls = tuple(name for name in form.control_tokens if name != "<|python_tag|>")
    write_tiny_model(folder / "model.gguf", TinyConfig(control_tokens=controls))
    model = LlamaModel(folder / "model.gguf", n_gpu_layers=0)
    vocabulary = model.vocabulary.showing(form.control_tokens)
    for n in (1, 2, 3) if form.between is not None else (1,):
        text = written(form, CALLS[:n])
        for pieces in ([text], text):
            calls = _read(form, pieces)
            if calls != CALLS[:n]:
                found.append(f"{n} calls are read as {calls} from {text!r}")
        for must_call in (True, False):
            grammar, _ = calls_grammar(form, FUNCTIONS, is_parallel=True, must_call=must_call)
            state = grammar_start(grammar, vocabulary)
            for token in vocabulary.tokenize_inside(text, parse_special=True):
                if not state.allows(np.array([token]))[0]:
                    piece = vocabulary.token_bytes(token)
                    found.append(f"{n} calls: {piece!r} is not allowed in {text!r} ({must_call=})")
                    break
                state = state.after(token)
    model.close()
    return found


def _read(form: CallForm, pieces: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    parser = ToolCallParser(form, FUNCTIONS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(is_cut=False)
    return [
        (
            begun.name,
            json.loads(
                "".join(
                    each.text
                    for each in deltas
                    if each.kind == "arguments" and each.number == begun.number
                )
            ),
        )
        for begun in deltas
        if begun.kind == "call"
    ]


def about(name: str, template: str, work: Path) -> tuple[str, bool]:
    """What is read, and whether that is as expected."""
    lowered = name.lower()
    own = {_TOKENS[0]} if "lfm2" in lowered else {_TOKENS[1]} if "granite-3" in lowered else set()
    form = form_of(template, own.__contains__)
    has_tools = re.search(r"\btools\b", template) is not None
    if form is not None:
        calls = f"{form.style}{' in an object' if form.keys else ''}, {form.mark or 'bare'}"
        if wrong := faults(form, work):
            return "; ".join(wrong), False
    else:
        calls = UNREAD.get(name, "unknown form") if has_tools else "takes no tools"
    thoughts = next((mark for mark in THOUGHT_CONTROLS if mark in template), "none")
    try:
        turns = [Message("user", "hello")]
        prompt = fitted(template, turns).text
        if has_tools:  # what an agent sends next
            calls_made = tuple(ToolCall(f"call_{n}", *call) for n, call in enumerate(CALLS[:2]))
            turns.append(Message("assistant", "So", calls_made))
            turns += [Message("tool", "x", (), each.identity, each.name) for each in calls_made]
            fitted(template, turns)
        thoughts += ", begun by the template" if ThoughtReader(prompt).is_open else ""
    except PromptError as error:
        return f"calls: {calls}; {error.message}", False
    return (
        f"calls: {calls}; thoughts: {thoughts}",
        form is not None or not has_tools or name in UNREAD,
    )


def about_shapes(template: str) -> tuple[str, bool]:
    """How many conversations are changed, and whether all of them are in the prompt."""
    n_all = 0
    n_changed = 0
    all_orders = {*orders(LONGEST, "SUACT"), *orders(LONGEST_WITH_EMPTY_ANSWERS)}
    for letters in sorted(all_orders, key=len):
        n_all += 1
        try:
            found = fitted_turns(template, letters)
        except PromptError as error:
            return f"{letters} is refused: {error.message}", False
        if missing := lost(letters, found.text):
            return f"{letters} is without {missing}", False
        n_changed += found.messages != conversation(letters)
    return f"{n_changed} of {n_all} conversations are changed", True


def about_file(file: Path) -> bool:
    """Print the line of a template; return whether all is as expected."""
    template = file.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as work:
        line, is_expected = about(file.stem, template, Path(work))
    shapes, are_fitted = about_shapes(template)
    print(f"{file.stem}: {line}; {shapes}", flush=True)
    return is_expected and are_fitted


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as work, multiprocessing.Pool() as pool:
        if arguments:
            folder = Path(arguments[0])
        else:
            source = build_peers.fetch(build_peers.installed_version(), Path(work))
            folder = source / "vendor/llama.cpp/models/templates"
        files = sorted(folder.glob("*.jinja"))
        are_expected = pool.map(about_file, files, chunksize=1)
    failed = [
        file.stem for file, is_expected in zip(files, are_expected, strict=True) if not is_expected
    ]
    if failed:
        print(f"not as expected: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
