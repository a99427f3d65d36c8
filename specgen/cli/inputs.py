"""Texts that commands read: from arguments, files, and standard input."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgen.errors import PromptError, UsageError
from specgen.option_fields import utf8

#: As a file's name: standard input or output.
STDIO = Path("-")
#: How long standard input may take to end until a note says that it is awaited.
PATIENCE_S = 2.0
#: Chat templates by llama.cpp's names; the templates of other families are in their models' files.
BUILT_IN = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "{% set first = messages[0] if messages[0].role == 'system' else none %}"
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if loop.index0 == 1 and first %}{{ first.content | trim }}\n\n{% endif %}"
    "{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}


def read_prompt(
    argument: str | None, option: str | None, files: Sequence[Path], note: Callable[[str], None]
) -> str:
    """Return the prompt: the files, then what is piped in, then the question, in paragraphs.

    Args:
        argument: The question as an argument; `-` is standard input in its place.
        option: The question as an option.
        files: Files, of which one may be standard input as well.
        note: Prints a note.

    Raises:
        UsageError: There is no prompt, or a part is given twice.
        PromptError: The prompt is empty, or cannot be read.
    """
    if argument is not None and option is not None:
        raise UsageError("the prompt is given twice: PROMPT and --prompt", hint="give it once")
    question = option if argument is None else argument
    if question is not None and question.endswith(".gguf") and Path(question).is_file():
        raise UsageError(f"the prompt is the name of a model: {question}", "-md names the draft")

    # A path is a file or standard input, a text is the question.
    sources: list[Path | str] = [*files]
    if question == "-":
        sources.append(STDIO)
    elif question is not None:
        sources.append(question)
    n_stdio = sources.count(STDIO)
    if n_stdio > 1:
        raise UsageError("standard input is given twice as the prompt", hint="give - once")
    if n_stdio == 0 and not is_terminal():
        sources.insert(len(files), STDIO)
    if not sources:
        hint = 'give one, as in `specgen run "Why is the sky blue?"`, or pipe it in'
        raise UsageError("no prompt is given", hint)

    names = []
    texts = []
    for source in sources:
        name, text = _read_part(source, note)
        if text:
            names.append(name)
            texts.append(text)
    if not texts:
        raise PromptError("the prompt is empty", hint="give some text")
    if len(texts) > 1:
        note(f"the prompt is {', then '.join(names)}")
    return "\n\n".join(texts)


def _read_part(source: Path | str, note: Callable[[str], None]) -> tuple[str, str]:
    """Return the name of a part of the prompt, and its text without the last line break."""
    if isinstance(source, str):
        try:
            return "the question", utf8(source)
        except ValueError as error:
            raise PromptError(f"the prompt: {error}") from None
    text = _read_stdin(note) if source == STDIO else read_text(source)
    line_break = "\r\n" if text.endswith("\r\n") else "\n"
    return str(_name_of(source)), text.removesuffix(line_break)


def _read_stdin(note: Callable[[str], None]) -> str:
    """Return the text of standard input, after a note if that takes long."""
    awaited = (
        "waiting for the end of standard input, which is part of the prompt "
        "(`< /dev/null` gives none)"
    )
    patience = threading.Timer(PATIENCE_S, note, [awaited])
    patience.daemon = True
    patience.start()
    try:
        return read_text(STDIO)
    finally:
        patience.cancel()


def _name_of(path: Path) -> Path | str:
    """Return what messages call a file."""
    return "standard input" if path == STDIO else path


def read_bytes(path: Path) -> bytes:
    """Return the content of a file or of standard input. Raise `PromptError`."""
    try:
        return sys.stdin.buffer.read() if path == STDIO else path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise PromptError(f"{_name_of(path)}: cannot be read: {reason}") from error


def read_text(path: Path | None, *, with_mark: bool = False) -> str:
    """Return the text of a file, or of standard input, in UTF-8.

    Args:
        path: The file; None has no text.
        with_mark: Whether a byte order mark at the beginning is kept.

    Raises:
        PromptError: It cannot be read, or is not UTF-8.
    """
    if path is None:
        return ""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise not_utf8(_name_of(path), error, line) from None
    return text if with_mark else text.removeprefix("\ufeff")


def not_utf8(name: object, error: UnicodeDecodeError, line: int) -> PromptError:
    """Return the error for a text with this name that is not UTF-8 on a line."""
    what = f"{name} is not UTF-8: byte {error.object[error.start]:#04x} on line {line}"
    return PromptError(what, "convert it first, for example with iconv -f LATIN1 -t UTF-8")


def is_terminal() -> bool:
    """Return whether standard input is a terminal, or closed: then nothing is piped in."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


# --- chat templates


def read_template(given: str) -> str:
    """Return a chat template: one of `BUILT_IN`, a model's, a file's, or the text itself.

    Raises:
        UsageError: There is none, or it is not valid.
    """
    from specgen.session.prompts.sandbox import check_syntax

    if "{{" in given or "{%" in given:
        template = given
    elif given in BUILT_IN:
        template = BUILT_IN[given]
    else:
        path = _template_file(given)
        template = _template_in(path) if path.suffix == ".gguf" else read_text(path)
    problem = check_syntax(template)
    if problem:
        name = given.partition("\n")[0][:60]
        raise UsageError(f"--chat-template {name}: not a template of Jinja: {problem}")
    return template


def _template_file(given: str) -> Path:
    """Return the file with a template: a model of this name, or what is at this path."""
    from specgen.models.hub_names import locate
    from specgen.models.registry import load_registry

    model = load_registry().models.get(given)
    if model is None:
        path: Path | None = Path(given).expanduser()
        problem = "no file"
    else:
        path = locate(model)
        problem = "not on this disk: `specgen models pull` fetches it"
    if path is None or not path.is_file():
        hint = f"give a file of Jinja or GGUF, a model's name, or {', '.join(BUILT_IN)}"
        raise UsageError(f"--chat-template {given}: {problem}", hint)
    return path


def _template_in(path: Path) -> str:
    """Return the template of a model."""
    from specgen.llama.file_check import check_file
    from specgen.llama.gguf_file import GgufMetadata

    check_file(path)
    with GgufMetadata(path) as metadata:
        template = metadata.text("tokenizer.chat_template")
    if not template:
        raise UsageError(f"--chat-template {path}: this model has no chat template")
    return template


def read_variables(given: str) -> dict[str, Any]:
    """Return the variables for a chat template, from a JSON object. Raise `UsageError`."""
    from specgen.session.prompts.template import OWN_VARIABLES

    try:
        variables = json.loads(given)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs {given}: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UsageError(f'--chat-template-kwargs {given}: give an object, as {{"name": 1}}')
    own = OWN_VARIABLES & variables.keys()
    if own:
        raise UsageError(f"--chat-template-kwargs: specgen sets {', '.join(sorted(own))}")
    return variables
