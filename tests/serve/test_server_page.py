"""The server's page in a real browser, with tiny models behind it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Route, expect

from specgen.serve.server.options import ServerOptions
from tests.helpers.browser import browser, contrast, luminance
from tests.helpers.common import ROOT
from tests.helpers.server import (
    N_CTX,
    PATIENCE_S,
    Running,
    running,
    session_of,
    tiny_server,
    wait_until,
)
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

__all__ = ["browser"]

QUESTION = "the cat is in the"
KINDS = ("accepted", "corrected", "bonus", "plain")
CHATTING: dict[str, Any] = {"chat_template": CHATML_TEMPLATE, "draft": 0.05}
API = "**/v1/chat/completions"
expect.set_options(timeout=1000 * PATIENCE_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose draft has tokens that are accepted and refused."""
    with tiny_server(tmp_path_factory.mktemp("page"), **CHATTING) as server:
        yield server


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose answers take minutes."""
    how = {**CHATTING, "n_ctx_train": 32768, "n_ctx": 32768, "max_tokens": -1}
    with tiny_server(tmp_path_factory.mktemp("endless"), **how) as server:
        yield server


@contextlib.contextmanager
def opened(browser: Browser, url: str, *, colours: bool = True) -> Iterator[Page]:
    """The page in a window of its own, which shows tokens (`colours`) or Markdown."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        box = page.locator("#colours")
        expect(box).not_to_be_checked()
        if colours:
            box.evaluate("box => box.click()")  # a user cannot, where a dialog asks for the key
        yield page


@pytest.fixture
def page(browser: Browser, server: Running) -> Iterator[Page]:
    """The page that shows tokens. At the end it has asked nobody else, and its console shows no error."""
    with watched(browser, server, colours=True) as page:
        yield page


@pytest.fixture
def markdown(browser: Browser, server: Running) -> Iterator[Page]:
    """The same, showing Markdown."""
    with watched(browser, server, colours=False) as page:
        yield page


@contextlib.contextmanager
def watched(browser: Browser, server: Running, *, colours: bool) -> Iterator[Page]:
    faults: list[str] = []
    addresses: list[str] = []

    def note(message: ConsoleMessage) -> None:
        # The browser also notes each response with an error status, which some tests ask for.
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    with opened(browser, server.url, colours=colours) as page:
        page.on("console", note)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: addresses.append(request.url))
        page.reload()  # with all of these in place
        expect(page.locator("#about")).to_have_text("target · drafts from draft")
        yield page
    assert faults == []
    assert addresses
    assert all(address.startswith(f"{server.url}/") for address in addresses)


def question(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Question")


def send(page: Page, text: str = QUESTION) -> Any:
    """Ask, by the keyboard alone. Returns the body of the request."""
    question(page).fill(text)
    with page.expect_request(API) as request:
        question(page).press("Enter")
    return request.value.post_data_json


def turn(page: Page, number: int = -1) -> Locator:
    return page.locator(".turn").nth(number)


def answer(page: Page) -> str:
    """The text of the last answer, when it is whole."""
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return turn(page).locator(".answer").text_content() or ""


def reply(route: Route, *chunks: dict[str, Any], end: str = "data: [DONE]\n\n") -> None:
    """Answer in the place of the server."""
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    route.fulfill(content_type="text/event-stream", body=text + end)


def reply_with(page: Page, text: str, **last: Any) -> None:
    """Let each answer be this text, in pieces of a few characters."""
    pieces = [
        with_pieces({"text": each, "kind": "accepted"}) for each in re.findall("(?s).{1,7}", text)
    ]
    page.route(API, lambda route: reply(route, *pieces, last))


def with_pieces(*pieces: dict[str, Any]) -> dict[str, Any]:
    text = "".join(piece["text"] for piece in pieces)
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"choices": [choice], "pieces": pieces}


def test_the_page_says_what_the_server_says(server: Running, page: Page) -> None:
    body = send(page)
    shown = answer(page)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    found = server.post("/v1/chat/completions", messages=body["messages"]).json()
    assert shown == found["choices"][0]["message"]["content"]
    expect(turn(page).locator(".question")).to_have_text(QUESTION)
    figures = turn(page).locator(".figures")
    drafts = found["speculative"]
    expect(figures).to_contain_text(f"{found['usage']['completion_tokens']} tokens ·")
    expect(figures).to_contain_text("tokens/s")
    expect(figures).to_contain_text(f"{drafts['n_accepted']} of {drafts['n_drafted']} drafted")


def test_marks_differ_as_the_legend_explains(page: Page) -> None:
    page.route(
        API,
        lambda route: reply(
            route,
            with_pieces(*({"text": f"{kind} ", "kind": kind, "origin": None} for kind in KINDS)),
        ),
    )
    send(page)
    answer(page)
    look = """elements => elements.map(element => {
        const style = getComputedStyle(element);
        return [style.color, style.fontWeight, style.textDecorationLine].join(" ");
    })"""
    marks = turn(page).locator(".answer span").evaluate_all(look)
    assert len(set(marks)) == len(KINDS)
    legend = page.locator(".legend summary span")
    assert legend.all_text_contents() == list(KINDS)
    assert legend.evaluate_all(look) == marks
    page.get_by_role("checkbox", name="Colours").uncheck()
    assert turn(page).locator(".answer span").count() == 0
    page.get_by_role("checkbox", name="Colours").check()
    assert turn(page).locator(".answer span").evaluate_all(look) == marks


def test_what_a_model_says_is_no_markup(page: Page) -> None:
    said = "<img src=/health onerror=alert(1)><script>alert(1)</script>&amp;\n  <b>"
    page.route(API, lambda route: reply(route, with_pieces({"text": said, "kind": "<i>"})))
    send(page, said)
    assert answer(page) == said
    assert turn(page).locator(".question").text_content() == said
    assert turn(page).locator("img, script, b, i").count() == 0


@pytest.mark.parametrize("way", ["Stop", "Escape", "New conversation"])
def test_a_stopped_answer_is_cancelled(browser: Browser, endless: Running, way: str) -> None:
    stopped = 'answers_total{finish_reason="interrupted"}'

    def n_stopped() -> float:
        has_some = 'finish_reason="interrupted"' in endless.http.get("/metrics").text
        return endless.metric(stopped) if has_some else 0.0

    n_before = n_stopped()
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()  # it comes in pieces
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        if way == "Escape":
            page.keyboard.press(way)
        else:
            page.get_by_role("button", name=way).click()
        shown = answer(page) if way != "New conversation" else ""
        wait_until(lambda: n_stopped() == n_before + 1, "the end of the answer")
        if shown:
            expect(turn(page).locator(".figures")).to_contain_text("stopped")
        else:
            assert page.locator(".turn").count() == 0
        body = send(page, "go on")
        if shown:
            assert body["messages"][1] == {"role": "assistant", "content": shown}
        # The server has the question before the page is closed: the next test counts from there.
        expect(turn(page).locator(".answer span").first).to_be_attached()
    wait_until(lambda: n_stopped() == n_before + 2, "the end: the page is closed")


def test_an_error_is_one_line_and_the_next_question_works(page: Page) -> None:
    send(page, "the cat " * 500)
    error = turn(page).get_by_role("alert")
    expect(error).to_contain_text("tokens, but the context has")
    expect(error).to_contain_text("a larger context (-c)")
    assert "\n" not in (error.text_content() or "")
    body = send(page)
    assert answer(page)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]


def test_thoughts_are_faint_and_no_part_of_the_conversation(markdown: Page) -> None:
    page = markdown
    deltas = [{"reasoning_content": "Two and two."}, {"content": "four"}]
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    page.route(API, lambda route: reply(route, *chunks))
    send(page)
    assert answer(page).strip() == "four"
    expect(turn(page).locator(".thought")).to_have_text("Two and two.")
    page.reload()
    expect(turn(page).locator(".thought")).to_have_text("Two and two.")
    assert send(page)["messages"][1] == {"role": "assistant", "content": "four"}


@pytest.mark.parametrize(
    ("chunk", "end", "message"),
    [
        ({"error": {"message": "out of\nmemory"}}, "", "out of memory"),
        ({}, "", "The connection was lost before the answer ended."),
        ({}, "data: nonsense\n\n", "The server sent something that this page does not understand."),
    ],
)
def test_an_answer_that_breaks_off(
    browser: Browser, server: Running, chunk: dict[str, Any], end: str, message: str
) -> None:
    piece = with_pieces({"text": "the", "kind": "plain"})
    with opened(browser, server.url) as page:
        page.route(API, lambda route: reply(route, piece, chunk, end=end))
        send(page)
        assert answer(page) == "the"
        assert turn(page).get_by_role("alert").text_content() == message
        page.unroute(API)
        page.route(API, lambda route: route.abort())
        send(page)
        expect(turn(page).get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    options = ServerOptions(port=0, api_keys=("right",))
    with tiny_server(tmp_path, options, **CHATTING) as server:
        with opened(browser, server.url) as page:
            page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_have_text("The server wants an API key.")
        with opened(browser, server.url) as page:
            about, dialog = page.locator("#about"), page.get_by_role("dialog")
            for key in ("wrong", "right"):
                expect(about).to_be_empty()
                dialog.get_by_label("API key").fill(key)
                dialog.get_by_label("API key").press("Enter")
                if key == "wrong":
                    expect(dialog).to_contain_text("refused")
            expect(about).to_contain_text("target")
            page.reload()
            expect(about).to_contain_text("target")
            expect(dialog).to_be_hidden()
            send(page)
            assert answer(page)
            assert "right" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_model_that_has_neither_a_draft_nor_a_chat_template(
    browser: Browser, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "bare.gguf", TinyConfig(chat_template=None))
    with running(session_of(model, "none")) as server, opened(browser, server.url) as page:
        expect(page.locator("#about")).to_have_text("bare · no drafts")
        expect(page.get_by_label("Drafts")).to_be_disabled()
        expect(page.get_by_role("alert")).to_contain_text("no chat template")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(page: Page, scheme: Literal["light", "dark"]) -> None:
    """The contrast is at least 4.5 to 1, as the accessibility guidelines (WCAG, AA) want it."""
    page.emulate_media(color_scheme=scheme)
    paper = luminance(page.locator("body"), "backgroundColor")
    for kind in (*KINDS, "forced", "error", "figures"):
        sample = page.locator("body").evaluate_handle(
            "(body, kind) => body.appendChild(Object.assign("
            "document.createElement('span'), { className: kind }))",
            kind,
        )
        element = sample.as_element()
        assert element is not None
        assert contrast(luminance(element, "color"), paper) >= 4.5
    button = page.get_by_role("button", name="Send")
    assert contrast(luminance(button, "color"), luminance(button, "backgroundColor")) >= 4.5
    assert (paper > 0.5) == (scheme == "light")


def test_a_narrow_window_with_a_huge_table_and_long_code(markdown: Page) -> None:
    """Neither the page nor the conversation scrolls sideways, and everything is within reach."""
    markdown.set_viewport_size({"width": 320, "height": 568})
    row = "| " + " | ".join(f"a_long_word_{n}" for n in range(60)) + " |\n"
    text = row + "|" + " --- |" * 60 + "\n" + row * 300 + "\n```\n" + "code " * 400 + "\n```\n"
    markdown.route(API, lambda route: reply(route, with_pieces({"text": text, "kind": "plain"})))
    send(markdown, "a" * 200)
    answer(markdown)
    assert turn(markdown).locator("tr").count() == 301
    for wide in ("html", "main"):
        sizes = markdown.locator(wide).evaluate("element => [element.scrollWidth, innerWidth]")
        assert sizes[0] <= sizes[1] == 320
    buttons = (markdown.get_by_role("button", name=name) for name in ("Send", "Copy code"))
    for part in (question(markdown), *buttons):
        box = part.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
    log = markdown.get_by_role("log").bounding_box()
    assert log is not None
    assert log["height"] >= 150


# --- Markdown --------------------------------------------------------------------------------

TEXT = """# Title

- one
- two_of_them with `code`

```python
def f(a_b):
    return 1
```

| a | b |
| --- | --: |
| 1 | 2 |

See [there](https://example.org/page).
"""


def test_markdown_is_shown_while_it_comes_and_at_the_end(markdown: Page) -> None:
    reply_with(markdown, TEXT)
    send(markdown)
    answer(markdown)
    shown = turn(markdown).locator(".answer")
    expect(shown.get_by_role("heading")).to_have_text("Title")
    assert shown.get_by_role("listitem").all_text_contents() == ["one", "two_of_them with code"]
    assert shown.get_by_role("cell").all_text_contents() == ["1", "2"]
    code = shown.locator("pre code")
    assert code.text_content() == "def f(a_b):\n    return 1\n"
    assert "mono" in code.evaluate("element => getComputedStyle(element).fontFamily")
    link = shown.get_by_role("link")
    assert link.evaluate("link => [link.href, link.target, link.rel]") == [
        "https://example.org/page",
        "_blank",
        "noopener noreferrer",
    ]
    markdown.get_by_role("checkbox", name="Colours").check()
    assert shown.text_content() == TEXT


@pytest.mark.parametrize(
    "said",
    [
        "<script>window.attacked = 1</script>",
        '<img src="https://example.org/x.png" onerror="window.attacked = 1">',
        "[![x](https://example.org/x.png)](https://example.org/)",
        '![x](x "y" onerror=window.attacked=1)',
        "[x](javascript:window.attacked=1)",
        "[x](&#106;avascript:window.attacked=1)",
        "[x](data:text/html,<script>window.attacked=1</script>)",
        "<javascript:window.attacked=1>",
        '[x](https://example.org "" onmouseover=window.attacked=1 x="")',
        "<a href=javascript:window.attacked=1>x</a>",
        "<svg onload=window.attacked=1><style>@import '//example.org/x.css'</style></svg>",
        "<iframe srcdoc='<script>parent.attacked = 1</script>'></iframe>",
        "<base href=https://example.org><link rel=stylesheet href=//example.org/x.css>",
        "<math><mtext><table><mglyph><style><img src=x onerror=window.attacked=1>",
        "```html\n<script>window.attacked = 1</script>\n```",
        '```"onload=window.attacked=1\ncode\n```',
        "a <details open ontoggle=window.attacked=1>b</details>",
        "<meta http-equiv=refresh content='0;url=https://example.org'>",
    ],
)
def test_what_a_model_says_neither_runs_nor_loads(markdown: Page, said: str) -> None:
    """The fixture checks at its end that nothing was requested elsewhere; nothing new is asked here either."""
    requested: list[str] = []
    markdown.on("request", lambda request: requested.append(request.url))
    reply_with(markdown, said)
    send(markdown)
    answer(markdown)
    shown = turn(markdown).locator(".answer")
    attributes = shown.locator("*").evaluate_all(
        "all => all.flatMap(each => [...each.attributes].map(one => one.name))"
    )
    assert set(attributes) <= {"href", "target", "rel", "type", "class"}
    tags = shown.locator("*").evaluate_all("all => all.map(each => each.tagName)")
    assert set(tags) <= {"P", "A", "BR", "DIV", "PRE", "CODE", "BUTTON"}
    for link in shown.locator("a[href]").all():
        assert (link.get_attribute("href") or "").startswith("https://example.org")
        link.hover()
    for link in shown.locator("a:not([href])").all():
        link.click()
    assert markdown.evaluate("window.attacked") is None
    assert [url for url in requested if not url.endswith("/completions")] == []


@pytest.mark.parametrize("text", ["> " * 20_000 + "deep", "*" * 20_000, "[" * 5_000])
def test_markdown_that_cannot_be_read_is_shown_as_text(markdown: Page, text: str) -> None:
    markdown.route(API, lambda route: reply(route, with_pieces({"text": text, "kind": "plain"})))
    send(markdown)
    assert answer(markdown)
    expect(turn(markdown).get_by_role("alert")).to_be_hidden()


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_the_answer_and_its_code_are_copied(
    browser: Browser, server: Running, has_clipboard: bool
) -> None:
    """Without a clipboard of its own, as over plain HTTP in a network, a page copies from a text field."""
    with opened(browser, server.url, colours=False) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if not has_clipboard:
            page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject())")
        reply_with(page, TEXT)
        send(page)
        answer(page)
        code = "def f(a_b):\n    return 1\n"
        for name, text in (("Copy code", code), ("Copy answer", TEXT)):
            page.get_by_role("button", name=name).click()
            expect(page.get_by_role("button", name="Copied").first).to_be_visible()
            assert page.evaluate("navigator.clipboard.readText()") == text
            expect(page.get_by_role("button", name=name)).to_be_visible()


# --- what the browser keeps ------------------------------------------------------------------


def test_a_reload_keeps_the_conversation_and_the_settings(page: Page) -> None:
    page.get_by_text("More settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("9")
    page.get_by_label("Drafts").uncheck()
    send(page)
    first = answer(page)
    figures = turn(page).locator(".figures").text_content() or ""
    assert "9 tokens" in figures
    assert "cut off at the most tokens allowed" in figures
    spans = turn(page).locator(".answer span")
    kinds = spans.evaluate_all("all => all.map(each => each.title)")
    page.reload()
    expect(page.locator("#about")).to_have_text("target · drafts from draft")
    assert answer(page) == first
    expect(turn(page).locator(".figures")).to_have_text(figures)
    expect(turn(page).locator(".question")).to_have_text(QUESTION)
    assert spans.evaluate_all("all => all.map(each => each.title)") == kinds
    expect(page.get_by_label("Drafts")).not_to_be_checked()
    body = send(page, "a dog")
    assert [message["content"] for message in body["messages"]] == [
        "Be brief.",
        QUESTION,
        first,
        "a dog",
    ]
    assert (body["temperature"], body["max_tokens"]) == (0, 9)
    assert body["speculative"]["draft"] is False
    answer(page)
    page.reload()
    page.get_by_role("button", name="Edit question").click()
    expect(question(page)).to_have_value("a dog")
    page.reload()
    assert page.locator(".turn").count() == 1
    with page.expect_request(API) as request:
        page.get_by_role("button", name="Try again").click()
    again: Any = request.value.post_data_json
    assert [message["content"] for message in again["messages"]] == ["Be brief.", QUESTION]
    assert answer(page) == first
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    assert page.locator(".turn").count() == 0
    expect(page.get_by_label("Temperature")).to_have_value("0")


@pytest.mark.parametrize(
    "storage",
    [
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }",
        """const session = Object.getOwnPropertyDescriptor(window, "sessionStorage");
        Object.defineProperty(window, "localStorage", { get() { throw new DOMException('no') } })""",
        "for (const what of ['turns', 'settings']) localStorage.setItem(`specgen / ${what}`, '[{}, 7')",
        "localStorage.setItem('specgen / turns', '[{}, 7]')",
    ],
    ids=["full", "blocked", "no JSON", "another version"],
)
def test_a_storage_that_does_not_work_costs_nothing_else(page: Page, storage: str) -> None:
    page.add_init_script(storage)
    page.reload()
    expect(page.locator("#about")).to_have_text("target · drafts from draft")
    send(page)
    assert answer(page)
    assert page.locator(".turn").count() == 1


# --- figures and hints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "words"),
    [
        ((1.42, 1.71), "· 1.4 to 1.7 times as fast as without drafts"),
        ((0.94, 1.18), "· about as fast as without drafts (0.9 to 1.2 times)"),
        (None, None),
    ],
)
def test_the_gain_is_told_in_words(
    page: Page, between: tuple[float, float] | None, words: str | None
) -> None:
    timings = {"predicted_n": 20, "predicted_per_second": 31.2, "prompt_n": 3, "cache_n": 0}
    drafts = {"n_drafted": 9, "n_accepted": 8, "mean_accepted_length": 1.9}
    drafts["estimated_speedup_range"] = between  # type: ignore[assignment]
    reply_with(page, "text", timings=timings, speculative=drafts)
    send(page)
    answer(page)
    figures = turn(page).locator(".figures")
    expect(figures).to_contain_text("1.9 tokens per pass of the target")
    if words is None:
        expect(figures).not_to_contain_text("without drafts")
    else:
        expect(figures).to_contain_text(words)


def test_a_full_context_is_explained(page: Page) -> None:
    page.get_by_text("More settings").click()
    page.get_by_label("Max tokens").fill("10000")
    send(page)
    answer(page)
    figures = turn(page).locator(".figures")
    expect(figures).to_contain_text(f"the context of {N_CTX} tokens is full")
    expect(figures).to_contain_text(f"-c {2 * N_CTX}")


def test_the_libraries_are_those_that_their_table_names() -> None:
    folder = ROOT / "specgen/serve/server/page/vendor"
    table = (folder / "README.md").read_text(encoding="utf-8")
    sums = dict(re.findall(r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    libraries = {file.name for file in folder.iterdir() if "js" in file.suffix}
    assert set(sums) == libraries
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
