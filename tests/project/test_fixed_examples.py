"""Tests with Hypothesis take the same examples in each run of the suite."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st


def examples() -> list[tuple[int, str]]:
    """The examples of a test."""
    found: list[tuple[int, str]] = []

    @given(st.integers(), st.text())
    def test(number: int, text: str) -> None:
        found.append((number, text))

    test()
    return found


def test_examples_do_not_depend_on_chance_or_on_what_was_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = examples()
    code = "".join(f"NUMBER_{n}, TEXT_{n} = {1000003 * n}, 'text {n}'\n" for n in range(100))
    module = ModuleType("imported")
    module.__file__ = str(tmp_path / "imported.py")
    Path(module.__file__).write_text(code, encoding="utf-8")
    monkeypatch.setitem(sys.modules, "imported", module)
    assert examples() == first
    assert len(set(first)) > 50
