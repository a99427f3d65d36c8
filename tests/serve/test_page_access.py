"""The accessibility of the page: keyboards, screen readers, contrast, phones, lost connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.cli.test_cli_serve import listening
from tests.helpers.browser import browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    QUESTION,
    act,
    answer,
    answer_every_request,
    ask,
    opened,
    page,
    question,
    reply,
    rows,
    send,
    turn,
)
from tests.helpers.server import Running, serves
from tests.tiny import TinyConfig, write_tiny_model

__all__ = ["browser", "page"]

#: A server whose target accepts some drafted tokens and rejects others.
server = serves(**CHATTING)

ANSWER = (
    "# A title\n\nSome `code` in a sentence with a [link](https://example.org).\n\n> quoted\n\n"
    "```\nlines\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
)


def show_everything(page: Page) -> None:
    """Bring all parts of the page into view: turns, an error, the legend, a menu, the undo bar."""
    answer_every_request(page, ANSWER)
    ask(page, "the first one")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "the second one")
    page.unroute(API)
    page.route(API, lambda route: route.abort())
    send(page, "a dog")
    expect(turn(page).get_by_role("alert")).to_be_visible()
    page.locator(".legend summary").click()
    page.get_by_role("checkbox", name="Rejected tokens").check()
    show_list(page)
    act(page, "the first one", "Delete")
    expect(rows(page)).to_have_count(1)
    hide_list(page)
    page.get_by_role("button", name="Edit question").first.click()


def show_list(page: Page) -> None:
    button = page.get_by_role("button", name="Conversations")
    if button.is_visible():
        button.click()


def hide_list(page: Page) -> None:
    button = page.get_by_role("button", name="Close")
    if button.is_visible():
        button.click()


# --- keyboard and screen readers -----------------------------------------------------------------


def tab_to(page: Page, role: str, name: str) -> None:
    """Press Tab until an element has the focus."""
    wanted = page.get_by_role(role, name=name).first  # type: ignore[arg-type]
    for _ in range(60):
        page.keyboard.press("Tab")
        if wanted.evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"Tab does not reach {role} {name!r}")


def test_everything_works_with_the_keyboard(page: Page) -> None:
    first = ask(page)
    expect(question(page)).to_be_focused()
    # Another temperature.
    tab_to(page, "button", "Settings")
    page.keyboard.press("Enter")
    tab_to(page, "spinbutton", "Temperature")
    page.keyboard.type("0.5")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings (1)")).to_be_focused()
    # An edited question.
    tab_to(page, "button", "Edit question")
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.type(" house")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .question")).to_have_text(f"{QUESTION} house")
    answer(page)
    # Another answer, whose turn replaces the one with the button.
    tab_to(page, "button", "Regenerate")
    with page.expect_request(API):
        page.keyboard.press("Enter")
    answer(page)
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    # A new conversation, and back.
    tab_to(page, "button", "New conversation")
    page.keyboard.press("Enter")
    expect(question(page)).to_be_focused()
    page.keyboard.type("a dog")
    page.keyboard.press("Enter")
    answer(page)
    tab_to(page, "link", QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn .question")).to_have_text(f"{QUESTION} house")
    # Its menu.
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Cats")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Cats")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".turn .question")).to_have_text(f"{QUESTION} house")
    assert first
    # The way around the list.
    page.reload()
    expect(rows(page)).to_have_count(2)
    page.evaluate("document.activeElement.blur()")
    tab_to(page, "link", "Skip to the question")
    page.keyboard.press("Enter")
    expect(question(page)).to_be_focused()


def test_everything_has_a_name_for_screen_readers(page: Page) -> None:
    show_everything(page)
    page.get_by_role("button", name="Settings").click()
    nameless = page.evaluate("""() => {
        const named = (element) =>
            element.ariaLabel || element.textContent.trim() || element.labels?.[0]?.textContent ||
            document.getElementById(element.getAttribute("aria-labelledby"))?.textContent;
        const elements = document.querySelectorAll(
            "button, input, select, textarea, summary, a, nav, main, dialog, article, [role=log]");
        return [...elements].filter((element) => !named(element)).map(({ outerHTML }) => outerHTML);
    }""")
    assert nameless == []
    images = page.locator("img, svg").count()
    assert images == 0
    expect(page.locator("html")).to_have_attribute("lang", "en")
    for role in ("banner", "navigation", "main", "log"):
        assert page.locator(f"css=body >> role={role}").count() == 1, role


def test_everything_is_in_a_landmark_and_can_be_scrolled_with_the_keyboard(page: Page) -> None:
    answer_every_request(page, ANSWER)
    ask(page)
    expect(page.get_by_role("form", name="Ask a question")).to_contain_text("Drafts")
    # What is said to open the legend is what is seen.
    summary = page.locator(".legend summary")
    expect(summary).to_have_accessible_name("accepted corrected bonus plain")
    for name in ("pre", ".wide"):
        expect(turn(page).locator(name)).to_have_attribute("tabindex", "0")


def test_the_enter_that_ends_a_composition_sends_nothing(page: Page) -> None:
    """Safari reports it after the composition, with the code of keys that a method handled."""
    question(page).fill("\u732b")
    page.evaluate("""() => document.getElementById("question").dispatchEvent(
        new KeyboardEvent("keydown", { key: "Enter", keyCode: 229, cancelable: true }))""")
    expect(question(page)).to_have_value("\u732b")
    expect(page.locator(".turn")).to_have_count(0)
    assert ask(page, "\u732b")
    expect(page.locator(".turn")).to_have_count(1)


def test_a_copy_keeps_the_focus_where_there_is_no_clipboard(
    browser: Browser, server: Running
) -> None:
    """Browsers offer it only over HTTPS and on the loopback."""
    with browser.new_context() as context:
        context.add_init_script("Object.defineProperty(navigator, 'clipboard', {});")
        page = context.new_page()
        page.goto(server.url)
        ask(page)
        button = turn(page).locator(".copy")
        button.press("Enter")
        expect(button).to_have_text("Copied")
        expect(button).to_be_focused()
        question(page).press("Control+v")
        expect(question(page)).not_to_have_value("")


# --- what can be seen ----------------------------------------------------------------------------


@pytest.fixture(params=[("light", 1280), ("light", 375), ("dark", 1280), ("dark", 375)])
def shown_page(request: pytest.FixtureRequest, browser: Browser, server: Running) -> Iterator[Page]:
    """The page in a colour scheme and a width."""
    scheme, width = request.param
    viewport = {"width": width, "height": 800}
    with browser.new_context(color_scheme=scheme, viewport=viewport) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#about")).to_have_text("target · drafts from draft")
        yield page


#: Returns the texts and borders that are shown with too little contrast to what is behind them.
FAINT = """() => {
    const channels = (color) => color.match(/[0-9.]+/g).map(Number);
    const alphaOf = (color) => channels(color)[3] ?? 1;
    const luminanceOf = (color) => {
        const [red, green, blue] = channels(color).slice(0, 3).map((channel) => {
            const share = channel / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const contrast = (one, other) => {
        const [light, dark] = [luminanceOf(one), luminanceOf(other)].sort((a, b) => b - a);
        return (light + 0.05) / (dark + 0.05);
    };
    const backgroundOf = (element) => {
        for (let each = element; each !== null; each = each.parentElement) {
            const { backgroundColor } = getComputedStyle(each);
            if (alphaOf(backgroundColor) === 1) {
                return backgroundColor;
            }
        }
        return getComputedStyle(document.body).backgroundColor;
    };
    const faint = [];
    const check = (element, what, color, background, least) => {
        const ratio = contrast(color, background);
        if (ratio < least) {
            const name = `${element.tagName}.${element.className}#${element.id}`;
            faint.push(`${name}: ${what} ${color} on ${background}: ${ratio.toFixed(2)}`);
        }
    };
    const shown = [...document.body.querySelectorAll("*")].filter((each) => each.checkVisibility());
    for (const element of shown) {
        const style = getComputedStyle(element);
        const isText = [...element.childNodes].some(({ nodeType, data }) =>
            nodeType === Node.TEXT_NODE && data.trim() !== "");
        if ((isText || "value" in element) && !element.disabled && !element.closest(":disabled")) {
            check(element, "text", style.color, backgroundOf(element), 4.5);
        }
        if (element.placeholder) {
            const { color } = getComputedStyle(element, "::placeholder");
            check(element, "placeholder", color, backgroundOf(element), 4.5);
        }
        for (const side of ["Top", "Right", "Bottom", "Left"]) {
            if (parseFloat(style[`border${side}Width`]) > 0) {
                const around = backgroundOf(element.parentElement);
                check(element, "border", style[`border${side}Color`], around, 3);
            }
        }
    }
    return faint;
}"""


def test_texts_and_borders_have_enough_contrast(shown_page: Page) -> None:
    assert shown_page.evaluate(FAINT) == []
    show_everything(shown_page)
    assert shown_page.evaluate(FAINT) == []
    show_list(shown_page)
    shown_page.get_by_label("Actions for").click()
    assert shown_page.evaluate(FAINT) == []
    hide_list(shown_page)
    shown_page.get_by_role("button", name="Settings").click()
    assert shown_page.evaluate(FAINT) == []


def test_nothing_is_wider_than_the_window(shown_page: Page) -> None:
    width = shown_page.viewport_size["width"] if shown_page.viewport_size else 0
    long_word = "x" * 400
    parts = "() => [document.documentElement, document.body, document.querySelector('main')].map("
    measure = parts + "each => each.scrollWidth)"
    assert max(shown_page.evaluate(measure)) <= width
    show_everything(shown_page)
    assert max(shown_page.evaluate(measure)) <= width
    # A thought, an answer, an error and a notice that are one long word.
    deltas = ({"reasoning_content": long_word}, {"content": long_word})
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    failure = {"error": {"message": long_word}}
    shown_page.unroute(API)
    shown_page.route(API, lambda route: reply(route, *chunks, failure))
    send(shown_page, long_word)
    expect(turn(shown_page).get_by_role("alert")).to_have_text(long_word)
    shown_page.evaluate(
        "async text => (await import('./page/notice.js')).showNotice(text)", long_word
    )
    expect(shown_page.locator("#notice")).to_be_visible()
    assert max(shown_page.evaluate(measure)) <= width
    shown_page.get_by_role("button", name="Settings").click()
    panel = shown_page.get_by_role("dialog")
    assert panel.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
    assert panel.evaluate("panel => panel.offsetWidth") <= width


def test_the_title_of_an_answer_is_visible(shown_page: Page) -> None:
    answer_every_request(shown_page, ANSWER)
    ask(shown_page)
    title = turn(shown_page).get_by_role("heading", name="A title")
    expect(title).to_have_css("position", "static")
    expect(title).to_have_css("clip-path", "none")


@pytest.mark.parametrize("width", [1280, 960, 640, 400, 320])
def test_a_menu_of_models_fits_into_the_header(
    browser: Browser, server: Running, width: int
) -> None:
    names = ["target", "Another-Model-With-A-Long-Name-135M-Instruct.Q4_1"]
    with browser.new_context(viewport={"width": width, "height": 360}) as context:
        page = context.new_page()
        data = [{"id": name} for name in names]
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
        page.goto(server.url)
        expect(page.get_by_role("combobox", name="Model").locator("option")).to_have_text(names)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        button = page.get_by_role("button", name="New conversation").bounding_box()
        assert button is not None
        assert button["x"] + button["width"] <= width


def test_the_list_overlays_a_narrow_page(browser: Browser, server: Running) -> None:
    with browser.new_context(viewport={"width": 375, "height": 700}) as context:
        page = context.new_page()
        page.goto(server.url)
        ask(page)
        expect(page.get_by_role("navigation")).to_be_hidden()
        button = page.get_by_role("button", name="Conversations")
        button.click()
        assert page.evaluate("document.querySelector('main').inert")
        page.keyboard.press("Escape")
        expect(page.get_by_role("navigation")).to_be_hidden()
        expect(button).to_be_focused()
        page.get_by_role("button", name="New conversation").click()
        ask(page, "a dog")
        button.click()
        act(page, "a dog", "Delete")
        page.get_by_role("button", name="Undo").click()
        expect(page.get_by_role("navigation")).to_be_hidden()
        expect(page.locator(".turn .question")).to_have_text("a dog")
        button.click()
        page.get_by_role("link", name=QUESTION).click()
        expect(page.get_by_role("navigation")).to_be_hidden()
        expect(page.locator(".turn .question")).to_have_text(QUESTION)
        assert not page.evaluate("document.querySelector('main').inert")


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_dies_leaves_what_it_has_answered(browser: Browser, tmp_path: Path) -> None:
    config = TinyConfig(
        chat_template=str(CHATTING["chat_template"]),
        logit_scale=6.0,
        unprintable_scale=0.0,
        n_ctx_train=32768,
    )
    model = str(write_tiny_model(tmp_path / "target.gguf", config))
    options = ("-m", model, "--draft", "none", "--ignore-eos")
    with listening(*options) as (process, url), opened(browser, url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        expect(turn(page).get_by_role("button", name="Try again")).to_be_hidden()
        process.kill()
        error = turn(page).get_by_role("alert")
        expect(error).to_have_text("The connection was lost before the answer ended.")
        shown = answer(page)
        assert shown
        expect(turn(page).get_by_role("button", name="Copy answer")).to_be_hidden()
        again = turn(page).get_by_role("button", name="Try again")
        again.click()
        expect(error).to_have_text("The server cannot be reached.")
        page.get_by_role("button", name="Undo").click()
        expect(error).to_have_text("The connection was lost before the answer ended.")
        assert answer(page) == shown
        # A new server at the same address.
        port = url.rsplit(":", 1)[1].rstrip("/")
        with listening(*options, "-n", "5", port=port):
            again.click()
            expect(turn(page).locator(".stats")).to_contain_text("5 tokens")
            expect(error).to_be_hidden()
            expect(turn(page).get_by_role("button", name="Copy answer")).to_be_visible()


def test_a_failed_turn_has_nothing_to_copy(page: Page) -> None:
    page.route(API, lambda route: route.abort())
    send(page)
    expect(turn(page).get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(turn(page).get_by_role("button", name="Try again")).to_be_visible()
    for name in ("Copy answer", "Save replay"):
        expect(turn(page).get_by_role("button", name=name)).to_be_hidden()
    page.reload()
    expect(turn(page).get_by_role("button", name="Try again")).to_be_visible()
    expect(turn(page).get_by_role("button", name="Copy answer")).to_be_hidden()


def test_an_answer_with_code_can_be_copied_as_a_whole(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_every_request(page, ANSWER)
    ask(page)
    page.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER


def test_the_sampler_settings_are_sent(page: Page, server: Running) -> None:
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Top k")).to_have_attribute("placeholder", "40")
    expect(page.get_by_label("Seed")).to_have_attribute("placeholder", "random")
    expect(page.get_by_label("Max tokens")).to_have_attribute("placeholder", "24")
    values = {"Temperature": 0.5, "Top k": 3, "Top p": 0.9, "Min p": 0.1, "Repeat penalty": 1.2}
    values |= {"Seed": 7, "Max tokens": 9}
    for label, value in values.items():
        page.get_by_label(label).fill(str(value))
    page.get_by_role("button", name="Done").click()
    body = send(page)
    fields = [label.lower().replace(" ", "_") for label in values]
    assert [body[field] for field in fields] == list(values.values())
    answer(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("2")  # not a probability
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    assert send(page)["top_p"] == 0.9
    answer(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Use the server's samplers").click()
    page.get_by_role("button", name="Done").click()
    assert not {"top_p", "seed", "max_tokens"} & set(send(page))
    answer(page)
