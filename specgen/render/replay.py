"""Read events from their JSON form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from specgen.events import EVENT_TYPES, DraftNode, Event, Piece, RejectedBranch

_TYPES = {kind.event: kind for kind in EVENT_TYPES}
#: Fields that are lists of nested values.
_PARTS: dict[str, type[Any]] = {"nodes": DraftNode, "pieces": Piece, "rejected": RejectedBranch}


def from_json_object(value: object) -> Event:
    """Return the event of an object that `to_json_object` made.

    Unknown fields are ignored. Raises `ValueError` if the value is no event, or lacks a field.
    """
    kind = _TYPES.get(str(value.get("event"))) if isinstance(value, dict) else None
    if kind is None or not isinstance(value, dict):
        raise ValueError(f"not an event: {str(value)[:80]}")
    try:
        # `nodes` is a list of values in an event, but a list of numbers in such a value.
        parts = {
            name: tuple(_build(_PARTS[name], part) for part in value[name])
            for name in _names(kind)
            if name in _PARTS and name in value
        }
        event: Event = _build(kind, value | parts)
    except TypeError as error:  # it names the fields that are missing
        raise ValueError(f"an incomplete {kind.event} event: {error}") from error
    return event


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events in JSON Lines; empty lines are skipped. Raises a `ValueError` with the line's number
    if a line is no event."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                event = from_json_object(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            yield event


def _build(kind: type[Any], value: dict[str, Any]) -> Any:
    return kind(**{name: _tuple(value[name]) for name in _names(kind) if name in value})


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


__all__ = ["from_json_object", "read_events"]
