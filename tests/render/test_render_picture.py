"""The picture of a recorded run."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.make_picture import main
from tests.helpers.events import Script
from tests.render.test_render_streams import recorded


def test_it_shows_the_run_the_summary_and_the_legend(tmp_path: Path) -> None:
    script = Script().prompt().plain("The").round([" cat", " <sat>"], 1, " lay").round(["."], 1, "")
    record, output = tmp_path / "run.jsonl", tmp_path / "images" / "run.svg"
    record.write_bytes(recorded(script.finish().events))
    assert main([str(record), "--output", str(output), "--title", "a run"]) == 0
    svg = output.read_text(encoding="utf-8")
    ET.fromstring(svg)
    shown = html.unescape("".join(re.findall(r">([^<>]+)</text>", svg))).replace("\xa0", " ")
    for text in ("a run", "The", "cat", " <sat>", "lay", "5 tokens", "acceptance rate", "legend"):
        assert text in shown
    assert "line-through" in svg
    assert "url(" not in re.sub(r"url\(#", "", svg)  # nothing is loaded from elsewhere


def test_a_record_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, output = tmp_path / "run.jsonl", tmp_path / "run.svg"
    record.write_bytes(recorded(Script().prompt().events))
    for source in (record, tmp_path / "none"):
        assert main([str(source), "--output", str(output)]) == 1
    assert not output.exists()
    assert "the run did not finish" in capsys.readouterr().err
