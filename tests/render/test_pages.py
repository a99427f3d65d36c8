"""The page that replays an answer, in a real browser."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from specgen.events import to_json_object
from specgen.render.streams import REPLAY, write_page
from tests.helpers.browser import browser
from tests.helpers.events import Script

__all__ = ["browser"]


def test_an_answer_grows_round_by_round(browser: Browser, tmp_path: Path) -> None:
    script = Script().prompt().plain("The <!--<script>").round([" cat", " sat", " on"], 1, " lay")
    drafted, parents = [" down", " up", " there"], (-1, -1, 0)
    events = script.tree(drafted, parents, (0,), ".").finish().events
    write_page(tmp_path / "page.html", REPLAY, [*map(to_json_object, events)])
    page = browser.new_page(viewport={"width": 375, "height": 800})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.locator("#answer").text_content() == "The <!--<script> cat lay down.  up  there"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#position").text_content() == "round 2 of 3"
    assert page.locator("#answer").text_content() == "The <!--<script> cat lay  sat on"
    assert page.locator("#answer .rejected").text_content() == " sat on"
    rows = page.locator("#round tr").all_text_contents()
    assert rows[1:3] == [" cat50%accepted", "   sat50%rejected"]
    page.keyboard.press("Home")
    assert page.locator("#answer").text_content() == "The <!--<script>"
    page.locator("#timeline").click(position={"x": 340, "y": 10})
    assert page.locator("#position").text_content() == "round 3 of 3"
    page.locator("#play").click()
    page.wait_for_function("document.getElementById('play').textContent === '▶'")
    assert page.locator("#position").text_content() == "round 3 of 3"
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert not errors
