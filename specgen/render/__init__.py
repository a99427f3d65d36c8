"""Show a generation: renderers that consume its events.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.render.base import Renderer, Tee
    from specgen.render.jsonl import JsonlRenderer
    from specgen.render.live import LiveRenderer
    from specgen.render.notes import Notes
    from specgen.render.plain import ColourStreamRenderer, DumbTerminalRenderer, PlainRenderer
    from specgen.render.replay import from_json_object, read_events
    from specgen.render.report import print_report
    from specgen.render.select import make_console, make_renderer
    from specgen.render.summary import SummaryRenderer, print_summary

__all__ = [
    "ColourStreamRenderer",
    "DumbTerminalRenderer",
    "JsonlRenderer",
    "LiveRenderer",
    "Notes",
    "PlainRenderer",
    "Renderer",
    "SummaryRenderer",
    "Tee",
    "from_json_object",
    "make_console",
    "make_renderer",
    "print_report",
    "print_summary",
    "read_events",
]

_MODULES = {
    "ColourStreamRenderer": "plain",
    "DumbTerminalRenderer": "plain",
    "JsonlRenderer": "jsonl",
    "LiveRenderer": "live",
    "Notes": "notes",
    "PlainRenderer": "plain",
    "Renderer": "base",
    "SummaryRenderer": "summary",
    "Tee": "base",
    "from_json_object": "replay",
    "make_console": "select",
    "make_renderer": "select",
    "print_report": "report",
    "print_summary": "summary",
    "read_events": "replay",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
