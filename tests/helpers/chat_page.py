"""The server's page in a browser: fixtures, and the actions of a user.

A module that uses the fixture `page` must define the fixtures `browser` and `server`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Route,
    expect,
)

from tests.helpers.server import PATIENCE_S, Running
from tests.tiny import CHATML_TEMPLATE

QUESTION = "the cat is in the"
#: The configuration of a model that can chat, whose draft is sometimes rejected.
CHATTING: dict[str, Any] = {"chat_template": CHATML_TEMPLATE, "draft": 0.05}
API = "**/v1/chat/completions"
expect.set_options(timeout=1000 * PATIENCE_S)


@contextlib.contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """Open the page in a new browser window."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        yield page


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    """The page. It must send requests only to its server, and log no errors."""
    with browser.new_context() as context, tab(context, server.url) as page:
        yield page


@contextlib.contextmanager
def tab(context: BrowserContext, url: str) -> Iterator[Page]:
    """Open the page in a tab. The conditions of the fixture `page` apply."""
    errors: list[str] = []
    addresses: list[str] = []

    def collect_error(message: ConsoleMessage) -> None:
        # The browser also logs each response with an error status, which some tests cause.
        if message.type == "error" and "Failed to load resource" not in message.text:
            errors.append(message.text)

    page = context.new_page()
    page.on("console", collect_error)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(url)
    expect(page.locator("#about")).to_have_text("target · drafts from draft")
    yield page
    assert errors == []
    origin = "/".join(url.split("/")[:3])
    assert addresses
    assert all(address.startswith(f"{origin}/") for address in addresses)


def question(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Question", exact=True)


def send(page: Page, text: str = QUESTION) -> Any:
    """Ask a question with the keyboard, and return the body of the request."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()  # the answer before is stored
    question(page).fill(text)
    with page.expect_request(API) as request:
        question(page).press("Enter")
    return request.value.post_data_json


def ask(page: Page, text: str = QUESTION) -> str:
    """Ask a question, and return the answer when it is complete."""
    send(page, text)
    return answer(page)


def turn(page: Page, number: int = -1) -> Locator:
    return page.locator(".turn").nth(number)


def answer(page: Page) -> str:
    """Wait until the last answer is complete, and return its text, stripped."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return (turn(page).locator(".answer").text_content() or "").strip()


def regenerate(page: Page) -> str:
    """Let the last question be answered again, and return the answer when it is complete."""
    # The page looks up what is stored before it asks; until then, it shows the answer before.
    with page.expect_request(API):
        page.get_by_role("button", name="Regenerate").last.click()
    return answer(page)


def rows(page: Page) -> Locator:
    """The conversations in the list."""
    return page.get_by_role("navigation").get_by_role("link")


def act(page: Page, title: str, action: str) -> None:
    """Use the menu of a conversation in the list."""
    row = page.get_by_role("listitem").filter(has=page.get_by_role("link", name=title))
    row.get_by_label("Actions for").click()
    row.get_by_role("menuitem", name=action).click()


def reply(route: Route, *chunks: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
    """Answer a request instead of the server."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    route.fulfill(content_type="text/event-stream", body=text + end)


def answer_every_request(page: Page, text: str) -> None:
    """Answer each request with this text, in tokens of a few characters."""
    tokens = re.findall("(?s).{1,7}", text)
    pieces = [{"text": token, "kind": "accepted"} for token in tokens]
    chunks = [chunk_of(piece, n_before=number) for number, piece in enumerate(pieces)]
    page.route(API, lambda route: reply(route, *chunks))


def chunk_of(*pieces: dict[str, Any], n_before: int = 0) -> dict[str, Any]:
    """Return a chunk of a streamed answer that commits these tokens, after `n_before` others."""
    text = "".join(piece["text"] for piece in pieces)
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    n_tokens = n_before + sum(piece["text"] != "" for piece in pieces)
    committed = {"event": "committed", "pieces": pieces, "n_tokens": n_tokens}
    return {"choices": [choice], "events": [committed]}
