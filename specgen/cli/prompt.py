"""The prompt: from an argument, an option, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from specgen.errors import PromptError, UsageError


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
    given = [name for name, value in _named(argument, option, file) if value is not None]
    if len(given) > 1:
        raise UsageError(f"the prompt is given twice: {' and '.join(given)}", hint="give it once")
    if file is not None:
        prompt = _decode(_read_file(file), str(file))
    elif argument == "-" or option == "-" or (not given and not _is_terminal(stdin)):
        prompt = _decode((stdin or sys.stdin.buffer).read(), "standard input")
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


def _named(
    argument: str | None, option: str | None, file: Path | None
) -> list[tuple[str, object | None]]:
    return [("PROMPT", argument), ("--prompt", option), ("--file", file)]


def _is_terminal(stdin: BinaryIO | None) -> bool:
    """Return whether standard input is a terminal; a closed one counts, since nothing is piped in."""
    if stdin is not None:
        return stdin.isatty()
    return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except IsADirectoryError:
        raise PromptError(f"{path}: a directory, not a prompt file") from None
    except FileNotFoundError:
        raise PromptError(f"{path}: no such file") from None
    except OSError as error:
        raise PromptError(f"{path}: cannot be read: {error.strerror}") from error


def _decode(data: bytes, name: str) -> str:
    """Return UTF-8 text without the byte order mark, and without the one newline at the end that tools
    add."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise PromptError(
            f"{name} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} "
            f"(line {line})",
            hint="convert it first, for example with iconv -f LATIN1 -t UTF-8",
        ) from None
    return text[: -len(_newline(text))] if _newline(text) else text


def _newline(text: str) -> str:
    return next((end for end in ("\r\n", "\n") if text.endswith(end)), "")


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
