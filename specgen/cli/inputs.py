"""Texts that commands read: from arguments, files, and standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from specgen.errors import PromptError, UsageError

#: As a file's name: standard input or output.
STDIO = Path("-")


def read_prompt(
    argument: str | None,
    option: str | None,
    file: Path | None,
    stdin: BinaryIO | None = None,
) -> str:
    """Return the prompt from the source that was given; without one, from standard input if it is piped.

    Raises `UsageError` if there is none or more than one, `PromptError` if it cannot be read, is not UTF-8,
    or is empty.
    """
    sources = {"PROMPT": argument, "--prompt": option, "--file": file}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"the prompt is given twice: {' and '.join(given)}", hint="give it once")
    if file is not None:
        prompt = _without_newline(decoded(read_bytes(file), str(file)))
    elif argument == "-" or option == "-" or (not given and not _is_terminal(stdin)):
        prompt = _without_newline(decoded((stdin or sys.stdin.buffer).read(), "standard input"))
    elif argument is not None or option is not None:
        prompt = _check_argument(argument if argument is not None else option or "")
    else:
        raise UsageError(
            "no prompt is given",
            hint='give one, as in `specgen run "Why is the sky blue?"`, or pipe it in',
        )
    if not prompt:
        raise PromptError("the prompt is empty", hint="give some text")
    return prompt


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, or standard input's for `STDIO`. Raises `PromptError`."""
    try:
        return sys.stdin.buffer.read() if path == STDIO else path.read_bytes()
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error


def decoded(data: bytes, name: str) -> str:
    """Return UTF-8 text without the byte order mark. Raises `PromptError`."""
    return decoded_with_mark(data, name).removeprefix("\ufeff")


def decoded_with_mark(data: bytes, name: str) -> str:
    """Return UTF-8 text as it is. Raises `PromptError`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise PromptError(
            f"{name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} (line {line})",
            hint="convert it first, for example with iconv -f LATIN1 -t UTF-8",
        ) from None


def _is_terminal(stdin: BinaryIO | None) -> bool:
    """Return whether standard input is a terminal; a closed one counts, since nothing is piped in."""
    if stdin is not None:
        return stdin.isatty()
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def _without_newline(text: str) -> str:
    """Return the text without the one newline at its end that tools add."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _check_argument(text: str) -> str:
    """Refuse an argument that is not UTF-8: such bytes arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not UTF-8 at character {error.start}",
            hint="check the terminal's locale",
        ) from None
    return text
