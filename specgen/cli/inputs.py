"""Texts that commands read: from arguments, files, and standard input."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgen.errors import PromptError, UsageError
from specgen.option_fields import utf8
from specgen.system.files import decode_text, named_file
from specgen.text.built_in_templates import BUILT_IN

#: The file name that stands for standard input or output.
STDIO = Path("-")
#: The time until a note says that the end of standard input is awaited.
PATIENCE_S = 2.0
#: The number of characters of a template that a message shows.
_N_SHOWN = 60


def read_prompt(
    argument: str | None,
    option: str | None,
    files: Sequence[Path],
    note: Callable[[str], None],
) -> str:
    """Return the prompt: the files, then what is piped in, then the question, in paragraphs.

    Args:
        argument: The question as an argument; `-` is standard input in its place.
        option: The question as an option.
        files: Files; one of them may be standard input.
        note: Prints a note.

    Raises:
        UsageError: If there is no prompt, or a part is given twice.
        PromptError: If the prompt is empty, or cannot be read.
    """
    if argument is not None and option is not None:
        raise UsageError("the prompt is given twice: PROMPT and --prompt", hint="give it once")
    question = option if argument is None else argument
    sources = _prompt_sources(question, files)
    if question is not None and question != "-" and named_file(question):
        note(f"the prompt is the text {question!r}; to read the file: -f {shlex.quote(question)}")
    names = []
    texts = []
    for source in sources:
        name, text = _read_source(source, note)
        if text:
            names.append(name)
            texts.append(text)
    if not texts:
        raise PromptError("the prompt is empty", hint="give some text")
    if len(texts) > 1:
        note(f"the prompt is {', then '.join(names)}")
    return "\n\n".join(texts)


def _prompt_sources(question: str | None, files: Sequence[Path]) -> list[Path | str]:
    """Return the parts of the prompt in their order.

    Returns:
        A path for a file or standard input, and a text for the question.
    """
    if question is not None and question.endswith(".gguf") and named_file(question):
        raise UsageError(f"the prompt is the name of a model: {question}", "-md names the draft")
    sources: list[Path | str] = [*files]
    if question == "-":
        sources.append(STDIO)
    elif question is not None:
        sources.append(question)
    n_stdio = sources.count(STDIO)
    if n_stdio > 1:
        raise UsageError("standard input is given twice as the prompt", hint="give - once")
    if n_stdio == 0 and not is_terminal():
        sources.insert(len(files), STDIO)  # what is piped in comes before the question
    if not sources:
        hint = 'give one, as in `specgen run "Why is the sky blue?"`, or pipe it in'
        raise UsageError("no prompt is given", hint)
    return sources


def _read_source(source: Path | str, note: Callable[[str], None]) -> tuple[str, str]:
    """Return the name of a part of the prompt, and its text without the last line break."""
    if isinstance(source, str):
        try:
            return "the question", utf8(source)
        except ValueError as error:
            raise PromptError(f"the prompt: {error}") from None
    text = _read_stdin(note) if source == STDIO else read_input(source)
    if text.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    return input_name(source), text


def _read_stdin(note: Callable[[str], None]) -> str:
    """Return the text of standard input, after a note if that takes long."""
    waiting = (
        "waiting for the end of standard input, which is part of the prompt "
        "(`< /dev/null` gives none)"
    )
    timer = threading.Timer(PATIENCE_S, note, [waiting])
    timer.daemon = True
    timer.start()
    try:
        return read_input(STDIO)
    finally:
        timer.cancel()


def input_name(path: Path) -> str:
    """Return the name of a file in messages."""
    return "standard input" if path == STDIO else str(path)


def read_bytes(path: Path) -> bytes:
    """Return the content of a file or of standard input.

    Raises:
        PromptError: If it cannot be read.
    """
    try:
        if path == STDIO:
            return sys.stdin.buffer.read()
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise PromptError(f"{input_name(path)}: cannot be read: {reason}") from error


def read_input(path: Path | None) -> str:
    """Return the text of a file or of standard input; "" if the path is None.

    Raises:
        PromptError: If it cannot be read, or is not text.
    """
    if path is None:
        return ""
    return decode_text(read_bytes(path), input_name(path), PromptError)


def is_terminal() -> bool:
    """Return whether nothing is piped in: standard input is a terminal, or closed."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


# --- chat templates


def read_template(given: str) -> str:
    """Return the chat template that --chat-template names.

    Args:
        given: The text of a template, a name in `BUILT_IN`, the name of a model, or the path of a
            template or of a GGUF file.

    Raises:
        UsageError: If there is no such template, or it is not valid.
    """
    from specgen.session.prompts.sandbox import check_syntax

    if "{{" in given or "{%" in given:
        template = given
    elif given in BUILT_IN:
        template = BUILT_IN[given]
    else:
        path = _template_file(given)
        template = _template_in_model(path) if path.suffix == ".gguf" else read_input(path)
    problem = check_syntax(template)
    if problem:
        raise UsageError(f"--chat-template {_excerpt(given)}: not a template of Jinja: {problem}")
    return template


def _excerpt(given: str) -> str:
    """Return the beginning of a template's text or name, for messages."""
    return given.partition("\n")[0][:_N_SHOWN]


def _template_file(given: str) -> Path:
    """Return the file that has a template: the model with this name, or the file at this path."""
    from specgen.models.hub_names import locate
    from specgen.models.registry import load_registry

    model = load_registry().models.get(given)
    if model is None:
        path = named_file(given)
        problem = "no such file"
    else:
        path = locate(model)
        problem = "not on this disk: `specgen models pull` fetches it"
    if path is None:
        hint = f"give a file of Jinja or GGUF, a model's name, or {', '.join(BUILT_IN)}"
        raise UsageError(f"--chat-template {_excerpt(given)}: {problem}", hint)
    return path


def _template_in_model(path: Path) -> str:
    """Return the chat template in a GGUF file."""
    from specgen.llama.file_check import check_file
    from specgen.llama.gguf_file import GgufMetadata

    check_file(path)
    with GgufMetadata(path) as metadata:
        template = metadata.text("tokenizer.chat_template")
    if not template:
        raise UsageError(f"--chat-template {path}: this model has no chat template")
    return template


def read_variables(given: str) -> dict[str, Any]:
    """Return the variables for a chat template, from the text of a JSON object.

    Raises:
        UsageError: If it is not a JSON object, or sets variables that specgen sets itself.
    """
    from specgen.session.prompts.template import OWN_VARIABLES

    try:
        variables = json.loads(given)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs {given}: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UsageError(f'--chat-template-kwargs {given}: give an object, as {{"name": 1}}')
    conflicting_names = OWN_VARIABLES & variables.keys()
    if conflicting_names:
        names = ", ".join(sorted(conflicting_names))
        raise UsageError(f"--chat-template-kwargs: specgen sets {names}")
    return variables
