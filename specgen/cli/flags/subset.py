"""Groups of options without those that a command defines in another way."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from specgen.cli.flags.groups import Group


def without(group: Group, *names: str) -> Group:
    """Return the group without the parameters of these names, which keep their defaults. Names that the group
    does not have are ignored."""
    hints = typing.get_type_hints(group, include_extras=True)
    parameters = inspect.signature(group).parameters

    def rest(**values: Any) -> Any:
        return group(**values)

    kept = [parameter for name, parameter in parameters.items() if name not in names]
    rest.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    rest.__annotations__ = {parameter.name: hints[parameter.name] for parameter in kept}
    return rest
