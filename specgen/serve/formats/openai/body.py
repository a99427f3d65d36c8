"""Errors in the body of a request, and how its values are checked and shown."""

from __future__ import annotations

import json
from typing import Any

from specgen.errors import UsageError

#: The most characters of a field's name that an error repeats.
_LONGEST_NAME = 100


class BodyError(UsageError):
    """A field of a request that cannot be honoured: `field` is its name, `what` the reason."""

    def __init__(self, field: str, what: str) -> None:
        self.field = sendable(field)[:_LONGEST_NAME]
        self.what = sendable(what)
        super().__init__(f"{self.field}: {self.what}")


def sendable(text: str) -> str:
    """Return a text in which a half of a surrogate pair, which UTF-8 cannot express, is an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def utf8(name: str, text: str) -> str:
    """Return a text. Raise `BodyError` for half a surrogate pair, which is no text: JSON's escapes can make
    one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BodyError(name, f"half a surrogate pair at character {error.start}") from None
    return text


def text_of(name: str, value: Any) -> str:
    """Return a field's text. Raise `BodyError` if its value is none."""
    if not isinstance(value, str):
        raise BodyError(name, f"{shown(value)} is not a text")
    return utf8(name, value)


def boolean_of(name: str, value: Any, *, default: bool = False) -> bool:
    """Return a field's value, or the default for None. Raise `BodyError` if it is not true or false."""
    if not isinstance(value, bool | None):
        raise BodyError(name, f"{shown(value)} is not true or false")
    return default if value is None else value


def shown(value: Any) -> str:
    """Return a value as JSON, cut to fit a line."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def messages_of(value: Any) -> list[Any]:
    """Return the messages of a body, which are not read yet. Raise `BodyError` if there are none."""
    if not isinstance(value, list):
        raise BodyError("messages", f"{shown(value)} is not a list of messages")
    if not value:
        raise BodyError("messages", "the list is empty: give at least one message")
    return value
