"""Tests use only public names, so that private ones can change without them.

ruff checks attributes (SLF001). Here are imports, and names in strings: in patches and in programs.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.common import ROOT

PRIVATE = re.compile(
    r"\bspecgen(?:\.\w+)*\._[A-Za-z0-9]"
    r"|from specgen\S* import (?:\([^)]*|[^\n]*)\b_[A-Za-z0-9]"
    # Others' names are theirs.
    r"|attr\((?!os,|each,|HypothesisProvider,)[\w.]+, [\"']_[A-Za-z0-9]"
)


def test_tests_bind_to_public_names() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found = PRIVATE.search(path.read_text("utf-8"))
        assert found is None or path == Path(__file__), f"{path}: {found[0]}"


def test_private_names_are_found() -> None:
    assert PRIVATE.search("from specgen.method.loop import (\n    Loop,\n    _Round,\n)")
    assert PRIVATE.search("monkeypatch.setattr('specgen.method.loop._helper', None)")
    assert PRIVATE.search("monkeypatch.setattr(loop, '_backend', None)")
