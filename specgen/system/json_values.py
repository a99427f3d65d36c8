"""Convert values to what JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from json import JSONDecodeError
from pathlib import PurePath
from typing import Any


def json_reason(error: Exception) -> str:
    """Return why a line is not JSON, by an error of `json.loads`."""
    if isinstance(error, JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def as_json(value: Any) -> Any:
    """Convert dataclasses, dictionaries, lists, tuples and paths to what JSON can hold; other values stay.
    Infinities and NaN, which JSON does not have, become texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
