"""The panel with details of a token on the server's page, in a real browser."""

from __future__ import annotations

import math
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.helpers.browser import browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    ask,
    chunk_of,
    opened,
    page,
    question,
    regenerate,
    reply,
    send,
    turn,
)
from tests.helpers.server import Running, serves
from tests.serve.test_page_access import FAINT
from tests.tiny import CHATML_TEMPLATE

__all__ = ["browser", "page"]

server = serves(**CHATTING)
#: A server whose answers take minutes.
endless = serves(**CHATTING, n_ctx_train=32768, n_ctx=32768, max_tokens=-1)

#: A server that drafts with n-grams.
ngrams = serves(chat_template=CHATML_TEMPLATE)

SCORES = "**/v1/chat/completions/token_probabilities"


def panel(page: Page) -> Locator:
    return page.locator("#inspector")


def share(logprob: float) -> str:
    """A probability as the page shows it."""
    probability = math.exp(logprob)
    if probability < 0.001:
        return "under 0.1%"
    if probability > 0.999:
        return "over 99.9%"
    n_digits = 1 if probability < 0.1 or probability > 0.99 else 0
    return f"{100 * probability:.{n_digits}f}%"


def count_scorings(page: Page) -> list[Any]:
    """Return a list to which the body of each request for probabilities is added."""
    bodies: list[Any] = []

    def note(request: Any) -> None:
        if request.url.endswith("/token_probabilities"):
            bodies.append(request.post_data_json)

    page.on("request", note)
    return bodies


def test_a_click_shows_what_was_drafted_and_why_it_was_rejected(
    server: Running, page: Page
) -> None:
    bodies = count_scorings(page)
    ask(page)
    assert bodies == []  # nothing is computed while an answer arrives
    turn(page).locator(".answer .corrected").first.click()
    shown = panel(page)
    expect(shown.get_by_role("heading")).to_contain_text("corrected")
    expect(shown.locator(".why")).to_contain_text("The draft model guessed")
    expect(shown.locator(".why")).to_contain_text("at temperature 0, only its most likely token")
    expect(shown.get_by_role("table")).to_have_count(2)
    (body,) = bodies
    scores = server.post("/v1/chat/completions/token_probabilities", **body).json()["tokens"]
    number = int((shown.get_by_role("heading").text_content() or "").split()[1]) - 1
    score = scores[number]
    for table, name in (("Target model", "top_logprobs"), ("Draft model", "draft_top_logprobs")):
        rows = shown.get_by_role("table", name=table).get_by_role("row")
        expected = [share(entry["logprob"]) for entry in score[name]]
        assert rows.locator("td:last-child").all_text_contents() == expected
    (chosen,) = shown.get_by_role("table", name="Target model").locator(".chosen").all()
    expect(chosen).to_contain_text("in the answer")
    (guess,) = [guess["token"] for guess in body["guesses"] if guess["position"] == number]
    (entry,) = [entry for entry in score["top_logprobs"] if entry["id"] == guess]
    expect(shown.locator(".numbers")).to_contain_text(share(entry["logprob"]))
    expect(shown.get_by_role("table", name="Target model").locator(".guessed")).to_have_count(1)
    # The next token of the same answer needs no other request.
    turn(page).locator(".answer .accepted").first.click()
    expect(shown.get_by_role("heading")).to_contain_text("accepted")
    expect(shown.locator(".why")).to_contain_text("accepted the guess")
    assert len(bodies) == 1


def test_a_rejected_token_leads_to_its_correction(page: Page) -> None:
    page.get_by_role("checkbox", name="Rejected tokens").check()
    ask(page)
    turn(page).locator(".answer .rejected").first.click()
    expect(panel(page).get_by_role("heading")).to_contain_text("corrected")


def test_it_works_with_the_keyboard(page: Page) -> None:
    ask(page)
    button = turn(page).get_by_role("button", name="Inspect tokens")
    button.focus()
    page.keyboard.press("Enter")
    shown = panel(page)
    heading = shown.get_by_role("heading")
    expect(heading).to_contain_text("corrected")
    first = heading.text_content()
    expect(turn(page).locator(".inspected")).not_to_have_count(0)
    page.keyboard.press("ArrowRight")
    expect(heading).not_to_have_text(first or "")
    page.keyboard.press("ArrowLeft")
    expect(heading).to_have_text(first or "")
    for _ in range(100):
        page.keyboard.press("ArrowLeft")
    expect(heading).to_contain_text("Token 1 of")
    expect(shown.get_by_role("button", name="Previous token")).to_be_disabled()
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
    expect(button).to_be_focused()
    expect(page.locator(".inspected")).to_have_count(0)


def test_it_still_works_after_a_reload(page: Page) -> None:
    ask(page)
    ask(page, "a dog and a house")
    page.reload()
    bodies = count_scorings(page)
    turn(page, 0).locator(".answer .corrected").first.click()
    expect(panel(page).get_by_role("table")).to_have_count(2)
    with page.expect_request(SCORES):
        turn(page, 1).get_by_role("button", name="Inspect tokens").click()
    expect(panel(page).get_by_role("table")).to_have_count(2)
    assert [len(body["messages"]) for body in bodies] == [1, 3]


def test_every_token_has_a_reason(page: Page) -> None:
    ask(page)
    turn(page).get_by_role("button", name="Inspect tokens").click()
    shown = panel(page)
    expect(shown.get_by_role("table")).to_have_count(2)
    for _ in range(100):
        page.keyboard.press("ArrowLeft")
    kinds = set()
    following = shown.get_by_role("button", name="Next token")
    while True:
        kinds.add((shown.get_by_role("heading").text_content() or "").split()[-1])
        expect(shown.locator(".why")).not_to_be_empty()
        expect(shown.locator(".numbers")).to_contain_text("The target model gives")
        if following.is_disabled():
            break
        page.keyboard.press("ArrowRight")
    assert {"accepted", "corrected"} <= kinds <= {"accepted", "corrected", "bonus", "plain"}


def test_the_end_of_the_text_comes_after_the_last_token(page: Page) -> None:
    texts = ("the", " cat", "")
    pieces = [{"text": text, "kind": "plain", "token_id": 0} for text in texts]
    chunk = chunk_of(*pieces)
    chunk["events"].insert(
        0, {"event": "prompt", "target": "target.gguf", "sampler": {"temperature": 0}}
    )
    page.route(API, lambda route: reply(route, chunk))
    page.route(SCORES, lambda route: route.fulfill(json={"target": "other.gguf"}))
    ask(page)
    turn(page).get_by_role("button", name="Inspect tokens").click()
    heading = panel(page).get_by_role("heading")
    following = panel(page).get_by_role("button", name="Next token")
    for place in ("Token 1 of 2: the", "Token 2 of 2: ␣cat"):
        expect(heading).to_contain_text(place)
        following.click()
    expect(heading).to_contain_text("After the last token: end of text")
    expect(following).to_be_disabled()
    page.keyboard.press("ArrowLeft")  # the button has not taken the focus with it
    expect(heading).to_contain_text("Token 2 of 2")


#: Whether nothing covers an element.
IS_UNCOVERED = """element => {
    element.scrollIntoView({ block: "nearest" });
    const { x, y, width, height } = element.getBoundingClientRect();
    return [0.1, 0.5, 0.9].every((share) =>
        element.contains(document.elementFromPoint(x + share * width, y + share * height)));
}"""


# The third is a window of 1280 x 720 pixels at 200%, the last one at 400%.
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 700), (640, 360), (320, 180)])
def test_the_panel_covers_nothing(
    browser: Browser, server: Running, width: int, height: int
) -> None:
    with browser.new_context(viewport={"width": width, "height": height}) as context:
        page = context.new_page()
        page.goto(server.url)
        ask(page, "a dog")
        ask(page)
        regenerate(page)
        turn(page).get_by_role("button", name="Inspect tokens").click()
        expect(panel(page).get_by_role("table")).to_have_count(2)
        place = turn(page).locator(".inspected").first.bounding_box()
        conversation = page.locator("main").bounding_box()
        assert place is not None
        assert conversation is not None
        assert conversation["y"] <= place["y"]
        assert place["y"] + place["height"] <= conversation["y"] + conversation["height"]
        undo = page.get_by_role("button", name="Undo")
        sending = page.get_by_role("button", name="Send")
        dismissing = page.get_by_role("button", name="Dismiss")
        for shown in (question(page), sending, undo, dismissing):
            assert shown.evaluate(IS_UNCOVERED)
        if height >= 700:
            assert page.evaluate("document.documentElement.scrollHeight") == height
        question(page).fill("a draft")
        expect(panel(page)).to_be_visible()
        undo.click()
        expect(panel(page)).to_be_hidden()  # its turn is gone
        page.keyboard.press("Escape")
        expect(question(page)).to_have_value("a draft")


def test_the_panel_is_closed_with_the_next_question(page: Page) -> None:
    ask(page)
    turn(page).get_by_role("button", name="Inspect tokens").click()
    expect(panel(page)).to_be_visible()
    question(page).focus()
    page.keyboard.press("Escape")
    expect(panel(page)).to_be_hidden()
    turn(page).get_by_role("button", name="Inspect tokens").click()
    ask(page, "a dog")
    expect(panel(page)).to_be_hidden()
    turn(page).get_by_role("button", name="Inspect tokens").click()
    page.get_by_role("button", name="New conversation").click()
    expect(panel(page)).to_be_hidden()


def test_escape_closes_the_panel_and_not_the_answer(browser: Browser, endless: Running) -> None:
    with opened(browser, endless.url) as page:
        bodies = count_scorings(page)
        send(page)
        expect(turn(page).locator(".answer span").nth(5)).to_be_attached()
        turn(page).locator(".answer [data-token]").first.click()
        expect(panel(page)).to_contain_text("when the answer is complete")
        page.keyboard.press("Escape")
        expect(panel(page)).to_be_hidden()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        assert bodies == []


def test_the_probabilities_come_when_the_answer_is_complete(
    browser: Browser, endless: Running
) -> None:
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(5)).to_be_attached()
        turn(page).locator(".answer [data-token]").first.click()
        expect(panel(page)).to_contain_text("when the answer is complete")
        page.get_by_role("button", name="Stop").click()
        expect(panel(page).get_by_role("table")).to_have_count(2)
        expect(turn(page).locator(".inspected")).not_to_have_count(0)


@pytest.mark.parametrize(
    ("answered", "told"),
    [
        (
            {"target": "other.gguf"},
            "This answer is by target.gguf, but the server has other.gguf now.",
        ),
        (None, "The server cannot be reached."),
        ({"error": {"message": "out of\nmemory", "code": "out_of_memory"}}, "out of memory"),
    ],
)
def test_an_answer_that_cannot_be_scored_shows_the_reason(
    page: Page, answered: dict[str, Any] | None, told: str
) -> None:
    ask(page)

    def handle(route: Any) -> None:
        if answered is None:
            route.abort()
        else:
            route.fulfill(status=503 if "error" in answered else 200, json=answered)

    page.route(SCORES, handle)
    turn(page).get_by_role("button", name="Inspect tokens").click()
    expect(panel(page).locator(".numbers")).to_have_text(told)
    expect(panel(page).locator(".why")).not_to_be_empty()
    page.unroute(SCORES)
    page.keyboard.press("ArrowRight")  # it is asked for again
    expect(panel(page).get_by_role("table")).to_have_count(2)


def test_n_grams_have_no_probabilities(browser: Browser, ngrams: Running) -> None:
    with opened(browser, ngrams.url) as page:
        ask(page)
        turn(page).get_by_role("button", name="Inspect tokens").click()
        expect(panel(page).get_by_role("table")).to_have_count(1)
        expect(panel(page)).to_contain_text("N-grams have no probabilities")
        expect(panel(page)).to_contain_text("Probabilities are those at temperature 1")


def test_a_turn_without_events_has_nothing_to_inspect(page: Page) -> None:
    choice = {"index": 0, "delta": {"content": "four"}, "finish_reason": None}
    page.route(API, lambda route: reply(route, {"choices": [choice]}))
    ask(page)
    expect(turn(page).get_by_role("button", name="Inspect tokens")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_phone(browser: Browser, server: Running, scheme: Any) -> None:
    viewport: Any = {"width": 375, "height": 700}
    with browser.new_context(color_scheme=scheme, viewport=viewport) as context:
        page = context.new_page()
        page.goto(server.url)
        ask(page)
        page.locator("#file-input").set_input_files(
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"the cat " * 500}
        )
        expect(page.locator("#notice")).to_contain_text("notes.txt has")
        turn(page).get_by_role("button", name="Inspect tokens").click()
        expect(panel(page).get_by_role("table")).to_have_count(2)
        assert page.evaluate(FAINT) == []
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        assert panel(page).evaluate("panel => panel.scrollWidth <= panel.clientWidth")
        place = turn(page).locator(".inspected").first.bounding_box()
        shown = panel(page).bounding_box()
        assert place is not None
        assert shown is not None
        assert place["y"] + place["height"] <= shown["y"]
