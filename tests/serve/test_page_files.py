"""Files attached to a question on the server's page, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.helpers.browser import browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    answer,
    answer_every_request,
    ask,
    page,
    question,
    rows,
    send,
    turn,
)
from tests.helpers.server import Running, serves

__all__ = ["browser", "page"]

server = serves(**CHATTING)

NOTES = "The cat is called Mia.\n"
#: Gives files to the page, as a browser does when they are dropped or pasted.
GIVE = """([event, names]) => {
    const data = new DataTransfer();
    for (const [name, text] of Object.entries(names)) {
        data.items.add(new File([text], name));
    }
    const target = document.getElementById("question");
    const init = { bubbles: true, cancelable: true };
    if (event === "paste") {
        target.dispatchEvent(new ClipboardEvent(event, { ...init, clipboardData: data }));
    } else {
        target.dispatchEvent(new DragEvent("dragover", { ...init, dataTransfer: data }));
        target.dispatchEvent(new DragEvent(event, { ...init, dataTransfer: data }));
    }
}"""


def give(page: Page, way: str, files: dict[str, str], folder: Path) -> None:
    """Attach files with the button, or drop or paste them."""
    if way != "button":
        page.evaluate(GIVE, [way, files])
        return
    paths = []
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach files").click()
    chooser.value.set_files(paths)


def n_tokens(server: Running, text: str) -> int:
    return len(server.post("/tokenize", content=text).json()["tokens"])


@pytest.mark.parametrize("way", ["button", "drop", "paste"])
def test_files_are_sent_with_their_names_in_fences(
    server: Running, page: Page, tmp_path: Path, way: str
) -> None:
    code = "```\nnot the end\n```"
    give(page, way, {"notes.txt": NOTES, "more.md": code}, tmp_path)
    part = f"File notes.txt:\n```txt\n{NOTES.strip()}\n```"
    chips = page.get_by_role("list", name="Files to send").get_by_role("listitem")
    expect(chips.first).to_contain_text(f"notes.txt · {n_tokens(server, part)} tokens")
    body = send(page, "What is the name of the cat?")
    content = body["messages"][-1]["content"]
    assert content == (
        f"{part}\n\nFile more.md:\n````md\n{code}\n````\n\nWhat is the name of the cat?"
    )
    expect(chips).to_have_count(0)
    assert answer(page)
    shown = turn(page)
    expect(shown.locator(".question")).to_have_text("What is the name of the cat?")
    files = shown.get_by_role("list", name="Files")
    expect(files.get_by_role("listitem")).to_have_count(2)
    files.get_by_text("notes.txt").click()
    expect(files.get_by_text(NOTES.strip())).to_be_visible()


def test_files_stay_with_their_question(page: Page, tmp_path: Path) -> None:
    """Also after a reload, and when the question is edited or asked again."""
    give(page, "drop", {"notes.txt": NOTES}, tmp_path)
    first = send(page)["messages"]
    answer(page)
    page.reload()
    with page.expect_request(API) as request:
        turn(page).get_by_role("button", name="Regenerate").click()
    body: Any = request.value.post_data_json
    assert body["messages"] == first
    answer(page)
    turn(page).get_by_role("button", name="Edit question").click()
    with page.expect_request(API) as request:
        page.get_by_role("textbox", name="Edited question").press("Enter")
    body = request.value.post_data_json
    assert body["messages"] == first
    answer(page)
    second = send(page, "a dog")["messages"]
    assert second[0] == first[0]
    assert second[-1]["content"] == "a dog"


def test_a_file_that_does_not_fit_is_reported_before_it_is_sent(page: Page, tmp_path: Path) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    give(page, "drop", {"long.txt": "the cat is in the house " * 100}, tmp_path)
    notice = page.locator("#notice")
    expect(notice).to_contain_text("long.txt has")
    expect(notice).to_contain_text("but the model's context has only 256: remove")
    question(page).fill("What is it about?")
    question(page).press("Enter")
    expect(notice).to_contain_text("The question with its files has")
    assert not [url for url in requests if url.endswith("/v1/chat/completions")]
    expect(question(page)).to_have_value("What is it about?")
    page.get_by_role("button", name="Remove long.txt").click()
    expect(notice).to_be_hidden()
    assert ask(page, "What is it about?")


def test_files_that_only_together_are_too_long(page: Page, tmp_path: Path) -> None:
    half = "the cat is in the house " * 10
    give(page, "drop", {"one.txt": half}, tmp_path)
    expect(page.locator("#files")).to_contain_text("tokens")
    expect(page.locator("#notice")).to_be_hidden()
    give(page, "drop", {"two.txt": half}, tmp_path)
    expect(page.locator("#notice")).to_contain_text("The files together have")


def test_a_question_with_a_file_stays_in_its_conversation(page: Page, tmp_path: Path) -> None:
    answer_every_request(page, "hi")
    ask(page, "the first one")
    page.get_by_role("button", name="New conversation").click()
    give(page, "drop", {"one.txt": "the cat"}, tmp_path)
    expect(page.locator("#files")).to_contain_text("tokens")
    # Counting its tokens takes until the user looks at another conversation.
    waiting: list[Route] = []

    def hold(route: Route) -> None:
        waiting.append(route)

    page.route("**/input_tokens", hold)
    with page.expect_request("**/input_tokens"):
        question(page).fill("the second one")
        question(page).press("Enter")
    question(page).press("Enter")
    question(page).press("a")
    rows(page).first.click()
    expect(page.locator(".turn .question")).to_have_text("the first one")
    waiting[0].continue_()
    expect(rows(page)).to_have_count(2)
    assert len(waiting) == 1
    expect(page.locator(".turn .question")).to_have_text(["the first one"])
    rows(page).filter(has_text="the second one").click()
    expect(page.locator(".turn .question")).to_have_text(["the second one"])
    expect(question(page)).to_have_value("")


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("photo.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "photo.png is not a text file"),
        ("zeros.txt", b"a\0b", "zeros.txt is not a text file"),
        ("latin.txt", "Käse".encode("latin-1"), "latin.txt is not a text file"),
        ("empty.txt", b"\n", "empty.txt is empty."),
        ("large.txt", b"a" * 8_000_001, "large.txt has 9 MB, and a file may have at most 8 MB."),
    ],
)
def test_a_file_that_is_not_text_is_rejected_in_one_line(
    page: Page, tmp_path: Path, name: str, data: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach files").click()
    chooser.value.set_files(tmp_path / name)
    expect(page.locator("#notice")).to_contain_text(told)
    assert "\n" not in (page.locator("#notice").text_content() or "")
    expect(page.locator("#files")).to_be_hidden()
    assert len(send(page)["messages"][-1]["content"]) < 100
    answer(page)


def test_texts_of_other_systems_are_read(page: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes("one\r\ntwö".encode("utf-16"))
    page.locator("#file-input").set_input_files(tmp_path / "notes.txt")
    expect(page.locator("#files")).to_contain_text("tokens")
    assert "one\ntwö\n" in send(page)["messages"][-1]["content"]
    answer(page)


def test_a_conversation_is_found_by_the_text_of_its_file(page: Page, tmp_path: Path) -> None:
    give(page, "button", {"notes.txt": NOTES}, tmp_path)
    expect(page.locator("#files")).to_contain_text("tokens")
    ask(page, "Who is it?")
    page.get_by_role("searchbox").fill("mia")
    expect(page.locator("#rows")).to_contain_text("The cat is called Mia.")


def test_a_pasted_text_stays_a_text(page: Page) -> None:
    """Even with a picture of it, as word processors copy it."""
    prevented = page.evaluate("""() => {
        const data = new DataTransfer();
        data.setData("text/plain", "words");
        data.items.add(new File(["x"], "words.png"));
        const event = new ClipboardEvent("paste",
            { bubbles: true, cancelable: true, clipboardData: data });
        document.getElementById("question").dispatchEvent(event);
        return event.defaultPrevented;
    }""")
    assert not prevented
    expect(page.locator("#files")).to_be_hidden()


def test_files_are_saved_with_a_conversation(page: Page, tmp_path: Path) -> None:
    give(page, "drop", {"notes.txt": NOTES}, tmp_path)
    send(page)
    answer(page)
    page.get_by_label("Actions for").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Save as JSON").click()
    download.value.save_as(tmp_path / "saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))
    (file,) = saved["turns"][0]["files"]
    assert (file["name"], file["text"]) == ("notes.txt", NOTES)
