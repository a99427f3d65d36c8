"""The page's conversations in a real browser: the list, what the browser stores, several tabs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, Route, expect

from specgen.serve.server.options import Limits, ServerOptions
from tests.helpers.browser import browser, keeping_browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    QUESTION,
    act,
    answer,
    answer_every_request,
    ask,
    chunk_of,
    opened,
    page,
    question,
    regenerate,
    reply,
    rows,
    send,
    tab,
    turn,
)
from tests.helpers.server import Running, serves, tiny_server, wait_until

__all__ = ["browser", "keeping_browser", "page"]

#: A server whose target accepts some drafted tokens and rejects others.
server = serves(**CHATTING)
#: A server whose answers take minutes.
endless = serves(**CHATTING, n_ctx_train=32768, n_ctx=32768, max_tokens=-1)


def new(page: Page) -> None:
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)


def questions(page: Page) -> list[str]:
    return page.locator(".turn .question").all_text_contents()


def import_file(page: Page, text: str) -> None:
    file = FilePayload(name="a.json", mimeType="application/json", buffer=text.encode())
    page.locator("#import-file").set_input_files(file)


# --- the list ------------------------------------------------------------------------------------


def test_old_conversations_are_found_by_their_words(page: Page) -> None:
    for text, word in [("the cat", "Bavaria"), ("a dog", "Saxony"), ("a mouse", "Berlin")]:
        page.unroute(API)
        answer_every_request(page, f"I live in {word}, and nowhere else.")
        new(page)
        ask(page, text)
    expect(rows(page)).to_contain_text(["a mouse", "a dog", "the cat"])
    page.reload()
    expect(rows(page)).to_have_count(3)
    search = page.get_by_role("searchbox")
    search.fill("saxo a")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("I live in Saxony, and nowhere else.")
    expect(page.get_by_role("status")).to_contain_text(["1 conversation"])
    rows(page).click()
    expect(page.locator(".turn .question")).to_have_text("a dog")
    search.fill("Prussia")
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    search.press("Escape")
    expect(rows(page)).to_have_count(3)
    assert page.get_by_role("navigation").locator("[aria-current]").count() == 1
    page.go_back()
    expect(page.locator(".turn .question")).to_have_text("a mouse")


def test_search_results_are_marked_with_whole_words_around_them(page: Page) -> None:
    text = (
        "There are many picturesque towns around the <b>Starnberger See</b>, where generations of "
        "painters from Munich have spent their summers since the railway came."
    )
    answer_every_request(page, text)
    ask(page, "the cat (1)")
    search = page.get_by_role("searchbox")
    excerpt = rows(page).locator(".excerpt")
    search.fill("of STARN")
    expect(excerpt).to_have_text(
        "… towns around the <b>Starnberger See</b>, where generations of painters from Munich "
        "have spent their summers since …"
    )
    expect(excerpt.locator("mark")).to_have_text(["Starn", "of"])
    expect(excerpt.locator("b")).to_have_count(0)
    search.fill("came")
    expect(excerpt).to_have_text("… since the railway came.")
    search.fill("(1) the")
    expect(rows(page).locator(".title mark")).to_have_text(["the", "(1)"])
    search.fill("")
    expect(page.locator("mark")).to_have_count(0)


def test_a_long_word_that_was_found_is_cut(page: Page) -> None:
    answer_every_request(page, "x" * 300 + "needle" + "y" * 300)
    ask(page)
    page.get_by_role("searchbox").fill("needle")
    excerpt = rows(page).locator(".excerpt")
    expect(excerpt).to_have_text("… " + "x" * 24 + "needle" + "y" * 90 + " …")


def test_a_right_click_opens_the_menu_of_a_conversation(page: Page) -> None:
    ask(page)
    rows(page).click(button="right", position={"x": 30, "y": 10})
    menu = page.get_by_role("menu", name=QUESTION)
    expect(menu.get_by_role("menuitem", name="Rename")).to_be_focused()
    link = rows(page).bounding_box()
    place = menu.bounding_box()
    assert link is not None
    assert place is not None
    assert abs(place["x"] - link["x"] - 30) <= 1
    assert abs(place["y"] - link["y"] - 10) <= 1
    page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(rows(page)).to_be_focused()
    # A click elsewhere closes it, and so does another one on its button.
    button = page.get_by_label("Actions for")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    page.locator("main").click()
    expect(menu).to_be_hidden()
    button.click()
    button.click()
    expect(menu).to_be_hidden()
    # The field for a title has the browser's own menu.
    act(page, QUESTION, "Rename")
    page.get_by_role("textbox", name="Title").click(button="right")
    expect(menu).to_be_hidden()


def test_a_click_closes_a_menu_where_clicked_buttons_get_no_focus(page: Page) -> None:
    """In Safari, a click focuses only what has a tabindex."""
    ask(page)
    page.evaluate("""() => addEventListener("mousedown", (event) => {
        event.preventDefault();
        event.target.closest("[tabindex]").focus();
    })""")
    button = page.get_by_label("Actions for")
    button.click()
    expect(page.get_by_role("menu")).to_be_visible()
    button.click()
    expect(page.get_by_role("menu")).to_be_hidden()


@pytest.mark.parametrize("key", ["ContextMenu", "Shift+F10"])
def test_a_key_opens_the_menu_of_a_conversation(page: Page, key: str) -> None:
    ask(page)
    rows(page).focus()
    page.keyboard.press(key)
    menu = page.get_by_role("menu", name=QUESTION)
    items = menu.get_by_role("menuitem")
    expect(items.first).to_be_focused()
    place = menu.bounding_box()
    assert place is not None
    assert place["x"] + place["width"] <= 1280
    for pressed, number in [
        ("ArrowDown", 1),
        ("End", 3),
        ("ArrowDown", 0),
        ("ArrowUp", 3),
        ("Home", 0),
    ]:
        page.keyboard.press(pressed)
        expect(items.nth(number)).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_hidden()
    expect(rows(page)).to_be_focused()
    page.keyboard.press(key)
    page.keyboard.press("Tab")
    expect(menu).to_be_hidden()
    expect(page.get_by_label("Actions for")).to_be_focused()
    page.keyboard.press(key)
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Undo")).to_be_focused()


def test_a_long_title_does_not_end_with_half_a_character(page: Page, tmp_path: Path) -> None:
    answer_every_request(page, "hi")
    ask(page, "x" + "\N{MATHEMATICAL BOLD CAPITAL A}" * 80)
    title = rows(page).locator(".title").text_content() or ""
    assert title == "x" + "\N{MATHEMATICAL BOLD CAPITAL A}" * 59 + " …"
    with page.expect_download() as download:
        act(page, title, "Save as JSON")
    assert download.value.suggested_filename == f"x{title[1].lower() * 39}.json"


def test_a_conversation_is_renamed(page: Page) -> None:
    ask(page)
    act(page, QUESTION, "Rename")
    field = page.get_by_role("textbox", name="Title")
    expect(field).to_be_focused()
    field.fill("About cats")
    field.press("Enter")
    expect(rows(page)).to_contain_text("About cats")
    expect(page).to_have_title("About cats – specgen")
    ask(page, "a dog")
    page.reload()
    expect(rows(page)).to_contain_text("About cats")
    act(page, "About cats", "Rename")
    field.fill("Something else")
    field.press("Escape")
    expect(rows(page)).to_contain_text("About cats")
    act(page, "About cats", "Rename")
    field.fill("")
    field.press("Enter")
    expect(rows(page)).to_contain_text(QUESTION)


def test_a_deletion_can_be_undone(page: Page, tmp_path: Path) -> None:
    first = ask(page)
    new(page)
    ask(page, "a dog")
    act(page, QUESTION, "Delete")
    expect(rows(page)).to_have_count(1)
    expect(page.locator(".turn .question")).to_have_text("a dog")
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_focused()
    expect(page.locator("#undo-bar")).to_contain_text(f"“{QUESTION}” was deleted.")
    undo.press("Enter")
    expect(rows(page)).to_have_count(2)
    expect(page.locator(".turn .question")).to_have_text(QUESTION)
    assert answer(page) == first
    expect(undo).to_be_hidden()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").click()
    assert '"event":"committed"' in download.value.path().read_text(encoding="utf-8")
    # The one that is shown, for good.
    act(page, QUESTION, "Delete")
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Dismiss").click()
    page.reload()
    expect(rows(page)).to_have_count(1)
    stored = page.evaluate("""async () => {
        const [{ name }] = await indexedDB.databases();
        const { openDB } = await import("./page/vendor/idb.js");
        return (await (await openDB(name)).getAllKeys("replays")).length;
    }""")
    assert stored == 1


def test_a_new_conversation_does_not_stop_the_answer_in_another_one(
    browser: Browser, endless: Running
) -> None:
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        new(page)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(rows(page)).to_contain_text("answering")
        rows(page).click()
        marks = turn(page).locator(".answer span")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        n_marks = marks.count()
        wait_until(lambda: marks.count() > n_marks, "more of the answer")
        page.get_by_role("button", name="Stop").click()
        expect(turn(page).locator(".stats")).to_contain_text("stopped")
        expect(rows(page)).not_to_contain_text("answering")
        send(page, "go on")
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        act(page, QUESTION, "Delete")
        expect(page.locator(".turn")).to_have_count(0)
        label = 'finish_reason="interrupted"'
        wait_until(
            lambda: endless.metric(f"answers_total{{{label}}}") == 2, "the end of the answer"
        )


def test_escape_closes_the_menu_and_not_the_answer(browser: Browser, endless: Running) -> None:
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        rows(page).click(button="right")
        page.keyboard.press("Escape")
        expect(page.get_by_role("menu")).to_be_hidden()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Send")).to_be_visible()


# --- what the browser stores ---------------------------------------------------------------------


def test_an_answer_that_is_arriving_survives_a_reload(browser: Browser, endless: Running) -> None:
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        page.reload()
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        expect(turn(page).locator(".stats")).to_contain_text("unfinished")
        expect(turn(page).locator(".question")).to_have_text(QUESTION)
        expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_an_answer_is_stored_before_the_page_is_hidden(browser: Browser, endless: Running) -> None:
    """Firefox then ends the connection, and Safari stores nothing after that."""
    with opened(browser, endless.url) as page:
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        # Here, no other page follows.
        page.evaluate("dispatchEvent(new Event('beforeunload'))")
        expect(turn(page).locator(".stats")).to_contain_text("unfinished")
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        send(page, "a dog")
        page.get_by_role("button", name="Stop").click()
        answer(page)  # which is stored then
        page.reload()
        expect(page.locator(".turn .question")).to_have_text([QUESTION, "a dog"])
        expect(rows(page)).to_have_count(1)


def test_a_conversation_is_saved_as_files_and_imported(page: Page, tmp_path: Path) -> None:
    answer_every_request(page, "It is **there**.\n")
    ask(page)
    act(page, QUESTION, "Rename")
    page.get_by_role("textbox", name="Title").fill("About cats: 1/2")
    page.get_by_role("textbox", name="Title").press("Enter")
    with page.expect_download() as download:
        act(page, "About cats", "Save as Markdown")
    assert download.value.suggested_filename == "about-cats-1-2.md"
    text = download.value.path().read_text(encoding="utf-8")
    assert text.startswith("# About cats: 1/2\n\n*")
    assert text.endswith(f"## Question\n\n{QUESTION}\n\n## Answer\n\nIt is **there**.\n")
    with page.expect_download() as download:
        act(page, "About cats", "Save as JSON")
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    document = json.loads(saved.read_bytes())
    assert document["title"] == "About cats: 1/2"
    assert document["turns"][0]["answer"] == "It is **there**.\n"
    shown = turn(page).locator(".answer").inner_html()
    stats = turn(page).locator(".stats").text_content() or ""
    act(page, "About cats", "Delete")
    expect(rows(page)).to_have_count(0)
    page.get_by_label("Import").set_input_files(saved)
    expect(rows(page)).to_contain_text("About cats: 1/2")
    expect(turn(page).locator(".stats")).to_have_text(stats)
    assert turn(page).locator(".answer").inner_html() == shown
    page.get_by_label("Import").set_input_files(saved)
    expect(rows(page)).to_have_count(2)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "specgen conversation"}', '{"turns": [], "format": "x"}']
)
def test_a_file_that_is_not_a_conversation_is_rejected(
    page: Page, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text, encoding="utf-8")
    page.get_by_label("Import").set_input_files(file)
    refusal = "other.json is not a conversation that was saved as JSON."
    expect(page.get_by_role("alert")).to_have_text(refusal)
    expect(rows(page)).to_have_count(0)


def test_a_browser_that_stores_nothing_can_still_chat(browser: Browser, server: Running) -> None:
    with browser.new_context() as context:
        context.add_init_script("indexedDB.open = () => { throw new Error('blocked'); };")
        page = context.new_page()
        page.goto(server.url)
        expect(page.get_by_role("alert")).to_contain_text("does not store conversations")
        ask(page)
        ask(page, "a dog")
        assert regenerate(page)
        assert questions(page) == [QUESTION, "a dog"]
        file = {"format": "specgen conversation", "turns": [{"question": "a", "answer": "b"}]}
        page.evaluate("document.getElementById('notice').textContent = ''")
        import_file(page, json.dumps(file))
        expect(page.get_by_role("alert")).to_contain_text("does not store conversations")


# --- several tabs --------------------------------------------------------------------------------


def test_a_tab_follows_what_another_one_changes(page: Page, server: Running) -> None:
    ask(page)
    with tab(page.context, page.url) as other:
        expect(other.locator(".turn")).to_have_count(1)
        ask(other, "a dog")
        expect(page.locator(".turn .question")).to_have_text([QUESTION, "a dog"])
        expect(turn(page).locator(".answer")).to_have_text(answer(other))
        act(page, QUESTION, "Rename")
        page.get_by_role("textbox", name="Title").fill("Animals")
        page.get_by_role("textbox", name="Title").press("Enter")
        expect(rows(other)).to_contain_text("Animals")
        # Both go on with the same conversation, one after the other.
        expected = ask(page, "a mouse")
        expect(other.locator(".turn")).to_have_count(3)
        expect(turn(other).locator(".answer")).to_have_text(expected)
        expect(turn(other).locator(".stats")).not_to_contain_text("unfinished")
        ask(other, "a bird")
        expect(page.locator(".turn")).to_have_count(4)
        expect(rows(page)).to_have_count(1)
        act(other, "Animals", "Delete")
        expect(page.get_by_role("alert")).to_have_text(
            "The conversation was deleted in another tab."
        )
        expect(page.locator(".turn")).to_have_count(0)
        other.get_by_role("button", name="Undo").click()
        expect(rows(page)).to_contain_text("Animals")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_role("button", name="Done").click()
        expect(other.get_by_role("button", name="Settings (1)")).to_be_visible()


def test_tabs_that_ask_at_the_same_time_keep_both_questions(page: Page) -> None:
    ask(page)
    waiting: list[Route] = []
    with tab(page.context, page.url) as other:
        expect(other.locator(".turn")).to_have_count(1)
        page.route(API, lambda route: waiting.append(route))  # noqa: PLW0108
        send(page, "a dog")
        expect(other.locator(".turn")).to_have_count(2)
        expect(turn(other).locator(".stats")).to_contain_text("unfinished")
        ask(other, "a bird")
        wait_until_waiting(page, waiting)
        reply(waiting[0], chunk_of({"text": "barks", "kind": "plain"}))
        assert answer(page) == "barks"
        expect(page.get_by_role("alert")).to_contain_text("stored as a copy")
        expect(rows(page)).to_have_count(2)
        expect(rows(other)).to_have_count(2)
        for each, last in ((page, "a dog"), (other, "a bird")):
            each.reload()
            expect(turn(each).locator(".question")).to_have_text(last)
            assert turn(each).locator(".answer").text_content()
        page.unroute(API)
        assert page.url != other.url
        assert questions(page) == [QUESTION, "a dog"]
        with page.expect_download():
            page.get_by_role("button", name="Save replay").first.click()


def test_a_tab_that_is_closed_in_mid_answer_replaces_nothing(
    browser: Browser, endless: Running
) -> None:
    with opened(browser, endless.url) as page:
        # The page does not hear what the other tab does, like one that is busy until it is closed.
        page.add_init_script(
            "BroadcastChannel = class extends BroadcastChannel { set onmessage(listener) {} }"
        )
        page.reload()
        send(page, "a dog")
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        other = page.context.new_page()
        other.goto(page.url)
        expect(turn(other).locator(".stats")).to_contain_text("unfinished")
        answer_every_request(other, "sings")
        ask(other, "a bird")
        page.goto("about:blank")
        expect(rows(other)).to_have_count(2)
        for conversation, text in ((0, "a bird"), (1, "a dog")):
            rows(other).nth(conversation).click()
            expect(turn(other).locator(".question")).to_have_text(text)
            assert turn(other).locator(".answer span").count()


def test_a_page_from_the_back_forward_cache_still_works(
    keeping_browser: Browser, endless: Running
) -> None:
    with opened(keeping_browser, endless.url) as page:
        page.evaluate(
            "addEventListener('pageshow', ({ persisted }) => { sessionStorage.kept = persisted })"
        )
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        question(page).fill("a draft")
        page.goto(f"{endless.url}/health")
        page.evaluate("history.back()")
        expect(turn(page).locator(".stats")).to_contain_text("unfinished")
        if page.evaluate("sessionStorage.kept") != "true":
            pytest.skip("this browser does not keep the page")
        expect(question(page)).to_have_value("a draft")
        answer_every_request(page, "sleeps")
        question(page).press("Enter")
        expect(turn(page).locator(".answer")).to_have_text("sleeps")
        answer(page)  # it is stored now
        page.reload()
        expect(turn(page).locator(".answer")).to_have_text("sleeps")
        expect(rows(page)).to_have_count(1)


#: Lets the page think that the browser keeps it, or shows it again.
TRANSITION = "name => dispatchEvent(new PageTransitionEvent(name, { persisted: true }))"
#: Lets the page not hear what others do, as a page that is kept.
DEAF = "BroadcastChannel = class extends BroadcastChannel { set onmessage(listener) {} }"


def test_a_page_that_is_shown_again_catches_up(browser: Browser, endless: Running) -> None:
    with opened(browser, endless.url) as page:
        page.add_init_script(DEAF)
        page.reload()
        send(page)
        expect(turn(page).locator(".answer span").nth(3)).to_be_attached()
        question(page).fill("a draft")
        page.evaluate(TRANSITION, "pagehide")
        with page.context.new_page() as other:
            other.goto(endless.url)
            expect(rows(other)).to_have_count(1)
            answer_every_request(other, "sings")
            ask(other, "a bird")
        page.evaluate(TRANSITION, "pageshow")
        expect(rows(page)).to_contain_text(["a bird", QUESTION])
        expect(turn(page).locator(".stats")).to_contain_text("unfinished")
        expect(question(page)).to_have_value("a draft")
        # What it does from now on is stored.
        answer_every_request(page, "sleeps")
        page.get_by_role("button", name="Regenerate").click()
        expect(turn(page).locator(".answer")).to_have_text("sleeps")
        answer(page)  # it is stored now
        page.reload()
        expect(turn(page).locator(".answer")).to_have_text("sleeps")
        expect(rows(page)).to_have_count(2)


def test_a_page_that_is_shown_again_reports_what_was_deleted(page: Page) -> None:
    page.add_init_script(DEAF)
    page.reload()
    ask(page)
    page.evaluate(TRANSITION, "pagehide")
    with page.context.new_page() as other:
        other.goto(page.url)
        act(other, QUESTION, "Delete")
        expect(rows(other)).to_have_count(0)
    page.evaluate(TRANSITION, "pageshow")
    expect(rows(page)).to_have_count(0)
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_text("The conversation was deleted in another tab.")


def wait_until_waiting(page: Page, waiting: list[Route]) -> None:
    """Wait until a request of the page was intercepted."""
    while not waiting:
        page.wait_for_timeout(20)


# --- edited and repeated questions ---------------------------------------------------------------


def test_an_edited_question_replaces_the_later_turns(page: Page) -> None:
    texts = ["the cat", "a dog", "a mouse"]
    answers = [ask(page, text) for text in texts]
    page.get_by_role("button", name="Edit question").nth(1).click()
    field = page.get_by_role("textbox", name="Edited question")
    expect(field).to_be_focused()
    expect(field).to_have_value("a dog")
    field.fill("nothing")
    field.press("Escape")
    assert questions(page) == texts
    expect(page.get_by_role("button", name="Edit question").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    field.fill("a bird")
    with page.expect_request(API) as request:
        field.press("Enter")
    body: Any = request.value.post_data_json
    contents = [message["content"].split() for message in body["messages"]]
    assert contents == [["the", "cat"], answers[0].split(), ["a", "bird"]]
    assert answer(page)
    page.reload()
    expect(page.locator(".turn .question")).to_have_text(["the cat", "a bird"])


def test_replaced_turns_can_be_brought_back(page: Page) -> None:
    texts = ["the cat", "a dog", "a mouse"]
    answers = [ask(page, text) for text in texts]
    page.get_by_role("button", name="Edit question").first.click()
    page.get_by_role("textbox", name="Edited question").fill("a bird")
    with page.expect_request(API):
        page.get_by_role("button", name="Ask again").click()
    answer(page)
    expect(page.locator("#undo-bar")).to_contain_text("The answer in “a bird” was replaced")
    expect(page.locator("#undo-bar")).to_contain_text("the 2 turns after it removed")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".turn .question")).to_have_text(texts)
    page.reload()
    expect(page.locator(".turn .question")).to_have_text(texts)
    for number, text in enumerate(answers):
        expect(turn(page, number).locator(".answer")).to_have_text(text)
    with page.expect_download():
        page.get_by_role("button", name="Save replay").last.click()
    # Once the conversation has gone on, that would delete the later turns.
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    answer(page)
    ask(page, "a horse")
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()


def test_two_quick_clicks_ask_a_question_once(page: Page) -> None:
    ask(page)
    # Both clicks come before the page has looked up what is stored.
    with page.expect_request(API):
        turn(page).locator(".retry").evaluate("button => { button.click(); button.click(); }")
    assert answer(page)
    assert questions(page) == [QUESTION]
    page.get_by_role("button", name="Edit question").click()
    expect(page.get_by_role("button", name="Edit question")).to_be_hidden()
    page.get_by_role("textbox", name="Edited question").press("Escape")
    expect(page.get_by_role("button", name="Edit question")).to_be_focused()


def test_the_same_answer_is_explained(page: Page) -> None:
    first = ask(page)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_contain_text("a higher temperature")
    assert answer(page) == first
    assert page.locator(".turn").count() == 1
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("2")
    page.get_by_role("button", name="Done").click()
    assert regenerate(page) != first
    expect(page.get_by_role("alert")).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    expect(turn(page).locator(".answer")).to_have_text(first)


# --- a full context ------------------------------------------------------------------------------


def test_the_oldest_turns_are_left_out_when_the_context_is_full(page: Page) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    mark = page.locator(".mark")
    n_turns = 0
    bodies: list[Any] = []
    while mark.count() == 0:
        assert n_turns < 20
        bodies.append(send(page, f"{QUESTION} house of the dog {n_turns}"))
        assert answer(page)
        n_turns += 1
    assert n_turns > 2
    expect(turn(page).locator(".error")).to_be_hidden()
    n_left_out = mark.evaluate(
        "mark => [...document.querySelectorAll('.turn')]"
        ".filter(turn => mark.compareDocumentPosition(turn) & 2).length"
    )
    turns = "the turn above" if n_left_out == 1 else f"the {n_left_out} turns above"
    text = f"The context of 256 tokens is full: the model no longer sees {turns}."
    expect(mark).to_have_text(text)
    contents = [message["content"] for message in bodies[-1]["messages"]]
    assert contents[0] == "Be brief."
    assert contents[1] == f"{QUESTION} house of the dog {n_left_out}"
    assert len(contents) == 2 * (n_turns - n_left_out)
    page.reload()
    expect(mark).to_have_text(text)
    assert page.locator(".turn").count() == n_turns
    # The next prompt begins with the same turn, so that its tokens are cached.
    assert send(page, "so")["messages"][1]["content"] == contents[1]
    assert answer(page)
    # Without the later turns, nothing is left out.
    page.get_by_role("button", name="Edit question").first.click()
    page.get_by_role("textbox", name="Edited question").press("Enter")
    expect(mark).to_have_count(0)
    assert answer(page)


def test_a_question_that_never_fits_leaves_out_nothing(page: Page) -> None:
    ask(page)
    send(page, "the cat " * 500)
    answer(page)
    expect(turn(page).get_by_role("alert")).to_contain_text("but the context has 256")
    expect(page.locator(".mark")).to_have_count(0)
    body = send(page, "a dog")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    answer(page)


def test_turns_are_left_out_where_the_server_limits_prompts(
    browser: Browser, tmp_path: Path
) -> None:
    options = ServerOptions(port=0, limits=Limits(prompt_tokens=100))
    with tiny_server(tmp_path, options, **CHATTING) as server, opened(browser, server.url) as page:
        error = turn(page).get_by_role("alert")
        for number in range(20):
            ask(page, f"{QUESTION} house of the dog {number}")
            if error.is_visible():
                break
        expect(error).to_contain_text("at most 100 are allowed")
        turn(page).get_by_role("button", name="Try again").click()
        expect(page.locator(".mark")).to_be_visible()
        expect(error).to_be_hidden()
        assert answer(page)


def test_turns_are_left_out_as_chat_does(page: Page) -> None:
    """Up to half of the context is kept once less than a quarter of it is free for an answer."""
    count = """async ([nTurns, nLeftOut, nContext, maxTokens]) => {
        const { turnsToLeaveOut } = await import("./page/context_window.js");
        const countTokens = async (n) => 100 * (nTurns - n) + 100;
        return turnsToLeaveOut({ nTurns, nLeftOut }, nContext, maxTokens, countTokens);
    }"""
    cases: list[tuple[list[int | None], int]] = [
        ([6, 0, 1000, None], 0),  # 700 tokens, of at most 750
        ([7, 0, 1000, None], 3),  # 800 tokens become 500
        ([7, 0, 1000, 200], 0),
        ([7, 3, 1000, None], 3),
        ([10, 3, 1000, None], 6),
        ([3, 0, 150, None], 3),  # a question that never fits
        ([0, 0, 50, None], 0),
    ]
    for arguments, expected in cases:
        assert page.evaluate(count, arguments) == expected, arguments
