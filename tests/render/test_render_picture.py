"""The picture of a recorded run."""

from __future__ import annotations

import html
import importlib.util
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from specgen.events import Event
from specgen.render.streams import JsonlRenderer
from tests.helpers.events import Script


@pytest.fixture(scope="module")
def main() -> Callable[[list[str]], int]:
    path = Path(__file__).parents[2] / "scripts" / "make_picture.py"
    specification = importlib.util.spec_from_file_location("make_picture", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    run: Callable[[list[str]], int] = module.main
    return run


def recorded(events: list[Event]) -> bytes:
    stream = io.BytesIO()
    with JsonlRenderer(stream) as renderer:
        for event in events:
            renderer.handle(event)
    return stream.getvalue()


@pytest.fixture
def record(tmp_path: Path) -> Path:
    script = Script().prompt().plain("The").round([" cat", " <sat>"], 1, " lay").round(["."], 1, "")
    path = tmp_path / "run.jsonl"
    path.write_bytes(recorded(script.finish().events))
    return path


def test_it_shows_the_run_the_summary_and_the_legend(
    main: Callable[[list[str]], int], record: Path, tmp_path: Path
) -> None:
    output = tmp_path / "images" / "run.svg"
    assert main([str(record), "--output", str(output), "--title", "a run"]) == 0
    svg = output.read_text(encoding="utf-8")
    ET.fromstring(svg)
    shown = html.unescape("".join(re.findall(r">([^<>]+)</text>", svg))).replace("\xa0", " ")
    for text in ("a run", "The", "cat", " <sat>", "lay", "5 tokens", "acceptance rate", "legend"):
        assert text in shown
    assert "line-through" in svg
    assert "url(" not in re.sub(r"url\(#", "", svg)  # nothing is loaded from elsewhere


def test_a_record_that_is_none_is_refused(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "run.jsonl"
    record.write_bytes(recorded(Script().prompt().events))
    output = tmp_path / "run.svg"
    assert main([str(record), "--output", str(output)]) == 1
    assert main([str(tmp_path / "none"), "--output", str(output)]) == 1
    assert not output.exists()
    assert "the run did not finish" in capsys.readouterr().err
