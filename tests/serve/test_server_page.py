"""The server's page in a real browser, with answers of tiny models."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from specgen.serve.server.options import ServerOptions
from tests.helpers.browser import browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    QUESTION,
    answer,
    answer_every_request,
    chunk_of,
    opened,
    page,
    reply,
    rows,
    send,
    turn,
)
from tests.helpers.common import ROOT
from tests.helpers.server import Running, serves, tiny_server, wait_until

__all__ = ["browser", "page"]

KINDS = ("accepted", "corrected", "bonus", "forced", "plain")

#: A server whose target accepts some drafted tokens and rejects others.
server = serves(**CHATTING)
#: A server whose answers take minutes.
endless = serves(**CHATTING, n_ctx_train=32768, n_ctx=32768, max_tokens=-1)


def test_the_page_shows_the_answer_and_its_statistics(server: Running, page: Page) -> None:
    body = send(page)
    shown = answer(page)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    same = server.post("/v1/chat/completions", messages=body["messages"]).json()
    assert shown.split() == same["choices"][0]["message"]["content"].split()
    expect(turn(page).locator(".question")).to_have_text(QUESTION)
    stats = turn(page).locator(".stats")
    drafts = same["speculative"]
    expect(stats).to_contain_text(f"{same['usage']['completion_tokens']} tokens ·")
    expect(stats).to_contain_text("tokens/s")
    n_positions = sum(drafts["drafted_by_position"])
    share = f"{drafts['n_accepted']} of {n_positions} drafted tokens accepted"
    expect(stats).to_contain_text(f"{share} ({round(100 * drafts['acceptance_rate'])}%)")


def test_a_share_of_accepted_tokens_is_the_same_while_the_answer_comes(page: Page) -> None:
    shown = page.evaluate("""async () => {
        const { AnswerStats } = await import("./page/answer_stats.js");
        const stats = new AnswerStats(0);
        const nodes = [-1, -1, 0].map((parent) => ({ parent }));
        const pieces = ["accepted", "corrected"].map((kind) => ({ kind, text: "a" }));
        const committed = { event: "committed", pieces, n_tokens: 2 };
        stats.add({ events: [{ event: "drafted", nodes }, committed] }, 1000);
        const running = stats.running();
        const speculative = {
            n_drafted: 3, n_accepted: 1, drafted_by_position: [1, 1], mean_accepted_length: 2,
            estimated_speedup: 1.62, estimated_speedup_range: [1.4, 1.8], estimate_is_rough: true,
        };
        const timings = { cache_n: 0, prompt_n: 1, predicted_n: 2, predicted_per_second: 3 };
        stats.add({ timings, speculative }, 2000);
        return [running, stats.final()];
    }""")
    for text in shown:
        assert "1 of 2 drafted tokens accepted (50%)" in text
    rough = "about 1.6 times as fast as without drafts (rough: the machine was busy)"
    assert rough in shown[1]


def test_the_end_of_the_text_is_not_counted(page: Page) -> None:
    """Neither is it in the API's `usage`, of which a stopped answer has none."""
    pieces = [{"text": text, "kind": "plain"} for text in ("the", " cat", "")]
    page.route(API, lambda route: reply(route, chunk_of(*pieces)))
    send(page)
    answer(page)
    expect(turn(page).locator(".stats")).to_have_text("2 tokens")


def test_each_kind_of_token_looks_as_in_the_legend(page: Page) -> None:
    chunk = chunk_of(*({"text": f"{kind} ", "kind": kind, "origin": None} for kind in KINDS))
    chunk["events"].insert(0, {"event": "verified", "rejected": [{"text": "nothing"}]})
    page.route(API, lambda route: reply(route, chunk))
    send(page)
    text = answer(page)
    look = """elements => elements.map(element => {
        const style = getComputedStyle(element);
        return [style.color, style.fontWeight, style.textDecorationLine].join(" ");
    })"""
    marks = turn(page).locator(".answer span")
    legend = page.locator(".legend summary span")
    expect(marks.locator("visible=true")).to_have_count(len(KINDS))
    page.get_by_role("checkbox", name="Rejected tokens").check()
    looks = marks.evaluate_all(look)
    assert len(set(looks)) == len(KINDS) + 1
    del looks[4]  # forced tokens need a grammar, and the page asks for none
    assert legend.all_text_contents() == ["accepted", "rejected", "corrected", "bonus", "plain"]
    assert looks == legend.evaluate_all(look)
    assert marks.nth(1).get_attribute("data-text") == "nothing"
    assert answer(page) == text  # rejected tokens are not copied with the answer
    assert send(page)["logprobs"] is True
    answer(page)
    page.get_by_role("checkbox", name="Colours").uncheck()
    assert len(set(marks.locator("visible=true").evaluate_all(look))) == 1


def test_questions_and_kinds_of_tokens_are_never_parsed_as_html(page: Page) -> None:
    asked = "<img src=/health onerror=alert(1)><script>alert(1)</script>&amp;\n  <b>"
    page.route(API, lambda route: reply(route, chunk_of({"text": "so", "kind": "<i>"})))
    send(page, asked)
    assert answer(page) == "so"
    assert turn(page).locator(".question").text_content() == asked
    assert turn(page).locator("img, script, b, i").count() == 0


def test_a_replay_is_a_file_that_works_without_the_server(page: Page, tmp_path: Path) -> None:
    send(page)
    shown = answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").click()
    download.value.save_as(tmp_path / "replay.html")
    with page.context.new_page() as replay:
        replay.goto((tmp_path / "replay.html").as_uri())
        text = replay.locator("#answer span:not(.rejected)").all_text_contents()
        assert "".join(text) == "".join(shown.split())
        assert "prompt tokens" in (replay.locator("#about").text_content() or "")
        headers = replay.get_by_role("main").get_by_role("columnheader")
        expect(headers).to_have_text(["token", "draft", "target", "kind"])
    bars = turn(page).locator(".passes span").all_text_contents()
    page.reload()
    assert bars
    expect(turn(page).locator(".passes span")).to_have_text(bars)
    with page.expect_download() as again:
        page.get_by_role("button", name="Save replay").click()
    assert again.value.path().read_bytes() == (tmp_path / "replay.html").read_bytes()


def test_tokens_stay_marked_where_markdown_changed_a_line(page: Page) -> None:
    """Escapes and entities are shown differently; tokens rejected at the very end are shown too."""
    tokens = [
        ("[a", "accepted"),
        ("](https://example.org)", "plain"),
        (" &amp; ", "plain"),
        ("more", "corrected"),
        (" \\*", "plain"),
        ("b", "bonus"),
        ("\\*\n\n", "plain"),
        ("end", "bonus"),
    ]
    chunk = chunk_of(*({"text": text, "kind": kind} for text, kind in tokens))
    last = chunk_of({"text": "", "kind": "plain"})
    last["events"].insert(0, {"event": "verified", "rejected": [{"text": " not\n  so"}]})
    page.route(API, lambda route: reply(route, chunk, last))
    send(page)
    assert answer(page).split() == ["a", "&", "more", "*b*", "end"]
    marks = turn(page).locator(".answer span:not(.plain)")
    shown = [(mark.get_attribute("class"), mark.text_content()) for mark in marks.all()]
    assert shown[:2] == [("accepted", "a"), ("corrected", "more")]
    assert shown[-2:] == [("bonus", "end"), ("rejected", "")]
    assert marks.last.get_attribute("data-text") == " not↵so"


def test_an_empty_page_has_examples(page: Page) -> None:
    expect(page.get_by_role("heading", level=2)).to_be_visible()
    examples = page.locator(".example")
    text = " ".join((examples.last.text_content() or "").split())
    examples.last.click()
    assert answer(page)
    expect(turn(page).locator(".question")).to_have_text(text)
    expect(examples.last).to_be_hidden()


@pytest.mark.parametrize("way", ["Stop", "Escape"])
def test_a_stopped_answer_is_cancelled(browser: Browser, endless: Running, way: str) -> None:
    label = 'finish_reason="interrupted"'

    def n_stopped() -> float:
        if label not in endless.http.get("/metrics").text:
            return 0.0
        return endless.metric(f"answers_total{{{label}}}")

    n_before = n_stopped()
    with opened(browser, endless.url) as page:
        send(page)
        # Some tokens have arrived, and others are still to come.
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        if way == "Escape":
            page.keyboard.press(way)
        else:
            page.get_by_role("button", name=way).click()
        shown = answer(page)
        wait_until(lambda: n_stopped() == n_before + 1, "the end of the answer")
        assert shown
        expect(turn(page).locator(".stats")).to_contain_text("stopped")
        body = send(page, "go on")
        assert [each["role"] for each in body["messages"]] == ["user", "assistant", "user"]
        assert body["messages"][1]["content"]
        # The server must have the question before the page is closed: the next test counts on it.
        expect(turn(page).locator(".answer span").first).to_be_attached()
    wait_until(lambda: n_stopped() == n_before + 2, "the end after the page was closed")


def test_an_error_is_one_line_and_the_next_question_works(page: Page) -> None:
    send(page, "the cat " * 500)
    error = turn(page).get_by_role("alert")
    expect(error).to_contain_text("tokens, but the context has")
    expect(error).to_contain_text("a larger context (-c)")
    assert "\n" not in (error.text_content() or "")
    body = send(page)
    assert answer(page)
    assert body["messages"] == [{"role": "user", "content": QUESTION}]


def test_the_progress_of_the_prefill_is_shown(page: Page) -> None:
    assert send(page)["return_progress"] is True
    shown = page.evaluate("""async () => {
        const { AnswerStats } = await import("./page/answer_stats.js");
        const stats = new AnswerStats(0);
        const prompt_progress = { total: 4000, cache: 1000, processed: 2500, time_ms: 3000 };
        stats.add({ prompt_progress }, 1);
        return stats.running();
    }""")
    assert shown == "prefilling the prompt: 63% of 4000 tokens, 3.00 s left"


def test_thoughts_are_shown_but_not_sent_again(page: Page) -> None:
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
def test_a_broken_answer_keeps_its_text_and_shows_the_error(
    browser: Browser, server: Running, chunk: dict[str, Any], end: str, message: str
) -> None:
    piece = chunk_of({"text": "the", "kind": "plain"})
    with opened(browser, server.url) as page:
        page.route(API, lambda route: reply(route, piece, chunk, end=end))
        send(page)
        assert answer(page) == "the"
        assert turn(page).get_by_role("alert").text_content() == message
        page.unroute(API)
        page.route(API, lambda route: route.abort())
        send(page)
        expect(turn(page).get_by_role("alert")).to_have_text("The server cannot be reached.")


def test_the_page_asks_for_a_key_and_stores_it_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    options = ServerOptions(port=0, api_keys=("right",))
    with tiny_server(tmp_path, options, **CHATTING) as server:
        with opened(browser, server.url) as page:
            page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_have_text("The server requires an API key.")
        with opened(browser, server.url) as page:
            about, dialog = page.locator("#about"), page.get_by_role("dialog")
            for key in ("wrong", "right"):
                expect(about).to_be_empty()
                dialog.get_by_label("API key").fill(key)
                dialog.get_by_label("API key").press("Enter")
                if key == "wrong":
                    expect(dialog).to_contain_text("rejected")
            expect(about).to_contain_text("target")
            page.reload()
            expect(about).to_contain_text("target")
            expect(dialog).to_be_hidden()
            send(page)
            assert answer(page)
            assert "right" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_server_that_was_away_is_asked_for_its_models_again(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    page.unroute("**/v1/models")
    assert send(page)["model"] == "target"
    assert answer(page)
    expect(page.locator("#about")).to_have_text("target · drafts from draft")


#: Lets the browser receive the properties of model B late.
LATE = """
    const { fetch } = window;
    window.fetch = async (address, options) => {
        const response = await fetch(address, options);
        if (address.endsWith("model=B")) {
            const properties = await response.json();
            response.json = () => new Promise((resolve) => {
                window.release = () => resolve(properties);
            });
        }
        return response;
    };
"""


def test_a_late_answer_about_another_model_is_not_shown(browser: Browser, server: Running) -> None:
    with browser.new_context() as context:
        context.add_init_script(LATE)
        page = context.new_page()
        models = {"data": [{"id": "A"}, {"id": "B"}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=models))
        for name in ("A", "B"):
            properties = {"draft": f"draft of {name}"}
            page.route(f"**/props?model={name}", fulfilled(properties))
        page.goto(server.url)
        about, menu = page.locator("#about"), page.get_by_label("Model")
        expect(about).to_have_text("drafts from draft of A")
        menu.select_option("B")
        wait_until(lambda: page.evaluate("window.release !== undefined"), "the late answer")
        menu.select_option("A")
        page.evaluate("release()")
        assert page.evaluate("new Promise(resolve => setTimeout(resolve, 0, true))")
        expect(about).to_have_text("drafts from draft of A")


def fulfilled(body: dict[str, Any]) -> Callable[[Route], None]:
    """Return what answers a request with this body."""
    return lambda route: route.fulfill(json=body)


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


def test_markdown_is_shown_with_all_its_tokens(page: Page) -> None:
    answer_every_request(page, TEXT)
    send(page)
    answer(page)
    shown = turn(page).locator(".answer")
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
    text = (shown.text_content() or "").replace("Copy code", "")
    assert "".join("".join(shown.locator("[data-token]").all_text_contents()).split()) == "".join(
        text.split()
    )


def test_a_copy_button_gets_its_label_back(page: Page) -> None:
    answer_every_request(page, TEXT)
    send(page)
    answer(page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = turn(page).locator(".code .copy")
    button.click()
    button.click()
    expect(button).to_have_text("Copied")
    expect(button).to_have_text("Copy code")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(a_b):\n    return 1\n"


@pytest.mark.parametrize(
    "text",
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
def test_nothing_in_an_answer_runs_or_loads(page: Page, text: str) -> None:
    """The page's fixture also checks that nothing was requested from elsewhere."""
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    answer_every_request(page, text)
    send(page)
    answer(page)
    shown = turn(page).locator(".answer")
    attributes = shown.locator("*").evaluate_all(
        "all => all.flatMap(each => [...each.attributes].map(one => one.name))"
    )
    known = {"href", "target", "rel", "type", "class", "title", "tabindex"}
    known |= {"data-token", "data-language"}
    assert set(attributes) <= known
    tags = shown.locator("*").evaluate_all("all => all.map(each => each.tagName)")
    assert set(tags) <= {"P", "A", "BR", "DIV", "PRE", "CODE", "BUTTON", "SPAN"}
    for link in shown.locator("a[href]").all():
        assert (link.get_attribute("href") or "").startswith("https://example.org")
        link.hover()
    for link in shown.locator("a:not([href])").all():
        link.click()
    assert page.evaluate("window.attacked") is None
    # The browser loads the icon anew when the address gets the conversation's name.
    own = ("/completions", "/icon.svg")
    assert [url for url in requested if not url.endswith(own)] == []


@pytest.mark.parametrize("text", ["> " * 20_000 + "deep", "*" * 20_000, "[" * 5_000])
def test_markdown_that_cannot_be_parsed_is_shown_as_text(page: Page, text: str) -> None:
    page.route(API, lambda route: reply(route, chunk_of({"text": text, "kind": "plain"})))
    send(page)
    answer(page)
    assert turn(page).locator(".answer > *").count()
    expect(turn(page).get_by_role("alert")).to_be_hidden()


# --- what the browser stores -----------------------------------------------------------------


def test_the_conversation_and_the_settings_survive_a_reload(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("9")
    page.get_by_label("Max tokens").press("Enter")
    expect(page.get_by_role("button", name="Settings (3)")).to_be_visible()
    page.get_by_label("Drafts").uncheck()
    send(page)
    first = answer(page)
    stats = turn(page).locator(".stats").text_content() or ""
    assert "9 tokens" in stats
    assert "cut off at the maximum number of tokens" in stats
    spans = turn(page).locator(".answer span")
    titles = spans.evaluate_all("all => all.map(each => each.title)")
    page.reload()
    expect(page.locator("#about")).to_have_text("target · drafts from draft")
    assert answer(page) == first
    expect(turn(page).locator(".stats")).to_have_text(stats)
    expect(turn(page).locator(".question")).to_have_text(QUESTION)
    assert spans.evaluate_all("all => all.map(each => each.title)") == titles
    expect(page.get_by_label("Drafts")).not_to_be_checked()
    body = send(page, "a dog")
    contents = [message["content"].split() for message in body["messages"]]
    assert contents == [each.split() for each in ("Be brief.", QUESTION, first, "a dog")]
    assert (body["temperature"], body["max_tokens"]) == (0, 9)
    assert body["speculative"]["draft"] is False
    answer(page)
    page.get_by_role("button", name="New conversation").click()
    page.reload()
    expect(rows(page)).to_have_count(1)
    assert page.locator(".turn").count() == 0
    rows(page).click()
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Temperature")).to_have_value("0")


@pytest.mark.parametrize("stored", ["5", '"x"', "[]", "{nonsense"])
def test_settings_that_cannot_be_read_are_ignored(page: Page, stored: str) -> None:
    page.evaluate("stored => localStorage.setItem('specgen / settings', stored)", stored)
    page.reload()
    expect(page.locator("#about")).to_have_text("target · drafts from draft")
    assert send(page)["speculative"]["draft"] is True


def test_an_invalid_setting_is_gone_when_the_panel_is_closed(page: Page) -> None:
    for last_valid in ("", "0.5"):
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill(last_valid)
        page.get_by_label("Temperature").press("Tab")
        page.get_by_label("Temperature").fill("5")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page.locator("#temperature")).to_have_value(last_valid)
    assert send(page)["temperature"] == 0.5


def test_the_page_works_where_all_storage_is_blocked(browser: Browser, server: Running) -> None:
    with browser.new_context() as context:
        context.add_init_script(
            "for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) {"
            "    Object.defineProperty(window, name, { get() { throw new Error('blocked'); } });"
            "}"
            # Firefox blocks this, too.
            "BroadcastChannel = class { constructor() { throw new Error('blocked'); } };"
        )
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#about")).to_have_text("target · drafts from draft")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Temperature").press("Enter")
        assert send(page)["temperature"] == 0.5
        assert answer(page)


# --- libraries -------------------------------------------------------------------------------


def test_the_vendored_libraries_match_their_checksums() -> None:
    folder = ROOT / "specgen/serve/server/page/vendor"
    table = (folder / "README.md").read_text(encoding="utf-8")
    sums = dict(re.findall(r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    libraries = {file.name for file in folder.iterdir() if "js" in file.suffix}
    assert set(sums) == libraries
    for name, expected in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
