"""Texts that commands read: from arguments, files, and standard input."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specgen.errors import PromptError, UsageError
from specgen.sampler_options import utf8

#: As a file's name: standard input or output.
STDIO = Path("-")
#: How long standard input may take to end until a note says that it is awaited.
PATIENCE_S = 2.0
#: Chat templates by llama.cpp's names; the templates of other families are in their models' files.
BUILT_IN = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma": "{% set first = messages[0] if messages[0].role == 'system' else none %}{% for m in messages %}"
    "{% if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{% if loop.index0 == 1 and first %}{{ first.content | trim }}\n\n{% endif %}{{ m.content | trim }}"
    "<end_of_turn>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "phi3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
}


def read_prompt(
    argument: str | None, option: str | None, files: Sequence[Path], note: Callable[[str], None]
) -> str:
    """Return the prompt: the files, then what is piped in, then the question (`argument` or
    `option`), with blank lines between. `-` is standard input at that position. Raise `UsageError`
    or `PromptError`.
    """
    if argument is not None and option is not None:
        raise UsageError("the prompt is given twice: PROMPT and --prompt", hint="give it once")
    question = argument if argument is not None else option
    if question is not None and question.endswith(".gguf") and Path(question).is_file():
        raise UsageError(f"the prompt is the name of a model: {question}", "-md names the draft")
    sources: list[Path | str] = [*files, *([] if question is None else [question])]
    sources = [STDIO if source == "-" else source for source in sources]
    if sources.count(STDIO) > 1:
        raise UsageError("standard input is given twice as the prompt", hint="give - once")
    if STDIO not in sources and not is_terminal():
        sources.insert(len(files), STDIO)
    if not sources:
        hint = 'give one, as in `specgen run "Why is the sky blue?"`, or pipe it in'
        raise UsageError("no prompt is given", hint)
    given = [(name, text) for name, text in (_read(source, note) for source in sources) if text]
    if not given:
        raise PromptError("the prompt is empty", hint="give some text")
    if len(given) > 1:
        note(f"the prompt is {', then '.join(name for name, _text in given)}")
    return "\n\n".join(text for _name, text in given)


def _read(source: Path | str, note: Callable[[str], None]) -> tuple[str, str]:
    """Return the name of a part of the prompt (a string is the question), and its text without the
    last newline.
    """
    if isinstance(source, str):
        try:
            return "the question", utf8(source)
        except ValueError as error:
            raise PromptError(f"the prompt: {error}") from None
    awaited = "waiting for the end of standard input, which is part of the prompt (`< /dev/null` gives none)"
    patience = threading.Timer(PATIENCE_S, note, [awaited])
    patience.daemon = True
    if source == STDIO:
        patience.start()
    try:
        text = read_text(source)
    finally:
        patience.cancel()
    name = "standard input" if source == STDIO else str(source)
    return name, text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def read_bytes(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == STDIO else path.read_bytes()
    except OSError as error:
        name = "standard input" if path == STDIO else path
        raise PromptError(f"{name}: cannot be read: {error.strerror or error}") from error


def read_text(path: Path | None, *, with_mark: bool = False) -> str:
    """Return the text of a file in UTF-8, or of standard input; none for None. Raise `PromptError`."""
    if path is None:
        return ""
    name = "standard input" if path == STDIO else path
    data = read_bytes(path)
    try:
        text = data.decode("utf-8")
        return text if with_mark else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise not_utf8(name, error, data[: error.start].count(b"\n") + 1) from None


def not_utf8(name: object, error: UnicodeDecodeError, line: int) -> PromptError:
    what = f"{name} is not UTF-8: byte {error.object[error.start]:#04x} on line {line}"
    return PromptError(what, "convert it first, for example with iconv -f LATIN1 -t UTF-8")


def is_terminal() -> bool:
    """Return whether standard input is a terminal; a closed one counts, since nothing is piped in."""
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def read_template(given: str) -> str:
    """Return a chat template: one of `BUILT_IN`, a model's, a file's, or the text itself. Raise
    `UsageError`.
    """
    from specgen.session.prompts.sandbox import check_syntax

    template = given if "{{" in given or "{%" in given else BUILT_IN.get(given)
    if template is None:
        from specgen.models.hub_names import locate
        from specgen.models.registry import load_registry

        model = load_registry().models.get(given)
        path = Path(given).expanduser() if model is None else locate(model)
        if path is None or not path.is_file():
            away = "not on this disk: `specgen models pull` fetches it"
            what = "no file" if model is None else away
            hint = f"give a file of Jinja or GGUF, a model's name, or {', '.join(BUILT_IN)}"
            raise UsageError(f"--chat-template {given}: {what}", hint)
        template = _template_in(path) if path.suffix == ".gguf" else read_text(path)
    if problem := check_syntax(template):
        name = given.partition("\n")[0][:60]
        raise UsageError(f"--chat-template {name}: not a template of Jinja: {problem}")
    return template


def _template_in(path: Path) -> str:
    from specgen.llama.file_check import check_file
    from specgen.llama.gguf_file import GgufMetadata

    check_file(path)
    with GgufMetadata(path) as metadata:
        if not (template := metadata.text("tokenizer.chat_template")):
            raise UsageError(f"--chat-template {path}: this model has no chat template")
    return template


def read_variables(given: str) -> dict[str, Any]:
    from specgen.session.prompts.template import OWN_VARIABLES

    try:
        found = json.loads(given)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs {given}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f'--chat-template-kwargs {given}: give an object, as {{"name": 1}}')
    if own := OWN_VARIABLES & found.keys():
        raise UsageError(f"--chat-template-kwargs: specgen sets {', '.join(sorted(own))}")
    return found
