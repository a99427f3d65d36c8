"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call."""

    name: str
    description: str
    #: The JSON schema of its arguments.
    parameters: Mapping[str, Any]

    @property
    def definition(self) -> dict[str, Any]:
        """The definition as chat templates expect it, with every field that they may read."""
        parameters = {
            "type": "object",
            "properties": {},
            **self.parameters,
        }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}
