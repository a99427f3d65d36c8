"""Request bodies that are nearly valid, and bytes that are not JSON."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

#: Values that programs forget to expect.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, 1e308, -(2**63), 10**30, float("nan"), float("inf")),
    *("", "x", "\x00", "\ud800", "é" * 300, "none", [], [[]], [None], [0], [10**9]),
    *({}, {"": None}, {"type": "object"}, {"type": ["string"]}, {"$ref": "#"}),
)
#: Names that nothing can hold, or that programs forget to expect.
_ODD_NAMES = ("\ud800", "1" * 5000, "", "a.b", "é" * 300)
_DEEPEST = 2000


def mutated(body: dict[str, Any], chance: random.Random) -> bytes:
    """A body in which one to three values, names or bytes were changed."""
    changed = copy.deepcopy(body)
    for _ in range(chance.choice([1, 1, 2, 3])):
        _change(changed, body, chance)
    data = json.dumps(changed, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")
    return _broken(data, chance) if chance.random() < 0.15 else data


def _change(changed: dict[str, Any], body: dict[str, Any], chance: random.Random) -> None:
    """Change one value or one name somewhere in a body."""
    holder, key = chance.choice(list(_places(changed)))
    kind = chance.random()
    if kind < 0.6:
        holder[key] = copy.deepcopy(chance.choice(_ODD))
    elif kind < 0.7:
        _, other = chance.choice(list(_places(body)))
        if isinstance(holder, dict):
            name = str(other) + chance.choice(["", "s", "_x"])
            if chance.random() < 0.3:
                name = chance.choice(_ODD_NAMES)
            holder[name] = copy.deepcopy(chance.choice(_ODD))
    elif kind < 0.8:
        holder[key] = _deep(chance)
    elif kind < 0.9 and isinstance(holder[key], str):
        holder[key] *= chance.choice([2, 50, 3000])
    else:
        del holder[key]
        holder = changed  # never without any value
        holder.setdefault("max_tokens", 1)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each value within a value: what holds it, and its key or index there."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        holder = todo.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])
    return found


def _deep(chance: random.Random) -> Any:
    """Lists or objects in each other."""
    value: Any = 1
    for _ in range(chance.choice([3, 50, _DEEPEST // 10])):
        value = [value] if chance.random() < 0.5 else {"properties": value}
    return value


def _broken(data: bytes, chance: random.Random) -> bytes:
    """Bytes that are mostly no JSON."""
    kind = chance.random()
    if kind < 0.4:
        return data[: chance.randrange(len(data))]
    if kind < 0.8:
        place = chance.randrange(len(data))
        return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    return b"[" * chance.choice([1, _DEEPEST, 100_000])
