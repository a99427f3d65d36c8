"""The page that replays an answer, in a real browser."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from specgen.events import to_json_object
from specgen.render.streams import REPLAY, write_page
from tests.helpers.browser import browser
from tests.helpers.events import Script
from tests.helpers.races import short_race

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
    expect(page.locator("#play")).to_have_text("▶")
    assert page.locator("#position").text_content() == "round 3 of 3"
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert not errors


def test_a_race_shows_both_answers_as_they_were_at_a_time(browser: Browser, tmp_path: Path) -> None:
    race = short_race(round_s=0.1)
    answers = [[to_json_object(event) for event in answer.events] for answer in race.answers]
    data = {"answers": answers, "verdict": race.verdict, "conditions": "first one"}
    write_page(tmp_path / "page.html", REPLAY, data)
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.goto((tmp_path / "page.html").as_uri())
    texts = page.locator("#answer .text")
    assert page.locator("#verdict").text_content() == "1.5 times as fast, identical text"
    assert page.locator("#conditions").text_content() == "A replay at true speed: first one."
    assert page.locator("#answer h2").all_text_contents() == [
        "without drafts: 3 tokens in 0.3 s",
        "drafts from draft.gguf: 3 tokens in 0.2 s",
    ]
    assert texts.all_text_contents() == ["The cat <sat>", "The cat <sat>  dog"]
    left, right = (texts.nth(n).bounding_box() for n in (0, 1))
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] < right["x"]
    page.keyboard.press("ArrowLeft")
    assert texts.all_text_contents() == ["The cat", "The cat <sat>  dog"]
    assert page.locator("#position").text_content() == "0.2 of 0.3 s"
    page.keyboard.press("Home")
    assert texts.all_text_contents() == ["The", ""]
    assert page.locator("#round tr").count() == 0
    page.keyboard.press("End")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("▶")
    assert texts.all_text_contents() == ["The cat <sat>", "The cat <sat>  dog"]
    page.set_viewport_size({"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert not problems


def test_a_page_loads_nothing(browser: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", REPLAY, [])
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    refused = page.evaluate(
        """new Promise((resolve) => {
          document.addEventListener("securitypolicyviolation", (event) => {
            resolve(event.effectiveDirective);
          });
          fetch("http://127.0.0.1:9/").catch(() => {});
        })"""
    )
    assert refused == "connect-src"
