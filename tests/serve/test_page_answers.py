"""Code and formulas in answers on the server's page, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.helpers.browser import browser
from tests.helpers.chat_page import (
    API,
    CHATTING,
    answer,
    answer_every_request,
    page,
    send,
    turn,
)
from tests.helpers.server import serves

__all__ = ["browser", "page"]

server = serves(**CHATTING)

CODE = """Two blocks:

```python
def f(a_b):
    return "x" + 1  # why
```

and

```
plain <b>
```
"""


def show(page: Page, text: str) -> Any:
    """Let the server answer this text, and return the element that shows it."""
    answer_every_request(page, text)
    send(page)
    answer(page)
    return turn(page).locator(".answer")


def test_each_paragraph_has_the_direction_of_its_script(page: Page) -> None:
    shown = show(page, "شرح للدالة `f(a)` هنا.\n\nEnglish.\n\n- أولاً!\n\n```\nf(b)  # شرح\n```")
    # The element that begins on the right, and the last sign of its text, which is on the left.
    arabic, english = shown.locator("p").all()
    place = """element => {
        const range = document.createRange();
        range.selectNodeContents(element);
        const text = range.getBoundingClientRect();
        const box = element.parentElement.getBoundingClientRect();
        return text.left - box.left > box.right - text.right ? "right" : "left";
    }"""
    assert arabic.evaluate(place) == "right"
    assert english.evaluate(place) == "left"
    for code in shown.locator("code").all():
        assert code.evaluate("code => getComputedStyle(code).direction") == "ltr"
    expect(shown).to_have_css("direction", "rtl")
    expect(turn(page).locator(".question")).to_have_css("direction", "ltr")


def test_a_list_has_its_bullets_on_the_side_where_its_text_begins(page: Page) -> None:
    shown = show(page, "English.\n\n- أولاً!\n- second\n\nand\n\n1. one\n2. ثانيًا\n")
    for name, direction in (("ul", "rtl"), ("ol", "ltr")):
        expect(shown.locator(name)).to_have_css("direction", direction)
        for item in shown.locator(f"{name} > li").all():
            expect(item).to_have_css("direction", direction)
            expect(item).not_to_have_css("unicode-bidi", "plaintext")


# --- code ----------------------------------------------------------------------------------------


def test_code_is_highlighted_and_its_tokens_stay_marked(page: Page) -> None:
    shown = show(page, CODE)
    python, plain = shown.locator("pre").all()
    assert python.text_content() == 'def f(a_b):\n    return "x" + 1  # why\n'
    assert python.locator(".hljs-keyword").all_text_contents() == ["def", "return"]
    assert python.locator(".hljs-string").all_text_contents() == ['"x"']
    assert plain.text_content() == "plain <b>\n"
    assert plain.locator("[class^=hljs]").count() == 0
    for block in (python, plain):
        marked = "".join(block.locator("[data-token]").all_text_contents())
        assert "".join(marked.split()) == "".join((block.text_content() or "").split())
    expect(shown.locator(".code").first).to_have_attribute("data-language", "python")
    colours = "elements => elements.map(element => getComputedStyle(element).color)"
    found = python.locator(".hljs-keyword, .hljs-string, .hljs-comment").evaluate_all(colours)
    assert len(set(found)) == 3
    # Accepted tokens are underlined in their own colour.
    token = python.locator(".accepted").first
    assert token.evaluate("element => getComputedStyle(element).textDecorationLine") == "underline"


def test_each_block_has_a_copy_button(page: Page) -> None:
    shown = show(page, CODE)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    buttons = shown.get_by_role("button", name="Copy code")
    assert buttons.count() == 2
    buttons.last.click()
    expect(shown.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "plain <b>\n"


@pytest.mark.parametrize("language", ['"onload=alert(1)', "no-such-language", "python x y"])
def test_any_name_of_a_language_is_harmless(page: Page, language: str) -> None:
    shown = show(page, f"```{language}\nx = 1\n```")
    assert shown.locator("pre").text_content() == "x = 1\n"


# --- formulas ------------------------------------------------------------------------------------


FORMULAS = r"""Inline $x^2$, \(y_1\) and $$\frac{a}{b}$$ in a line.

$$
\sum_{i=1}^n i
= \frac{n(n+1)}{2}
$$

1. **Then**
   \[
   e^{i\pi} + 1 = 0
   \]

| a | b |
| --- | --- |
| $z_0$ | 2 |
"""


def test_formulas_are_shown_as_such(page: Page) -> None:
    shown = show(page, FORMULAS)
    expect(shown.locator("math")).to_have_count(6)
    displayed = shown.locator("math[display=block]")
    expect(displayed).to_have_count(3)
    assert shown.locator("msup").count() == 2
    assert shown.locator("li math").count() == 1
    assert shown.locator("td math").count() == 1
    assert "$" not in (shown.text_content() or "")
    assert shown.locator("[style]").count() == 0


def test_a_box_has_one_border(page: Page) -> None:
    """Firefox and Safari draw the notation "box", and Chromium does not."""
    box = show(page, r"$$\boxed{E = mc^2}$$").locator("menclose")
    expect(box).to_have_attribute("notation", "")
    expect(box).to_have_css("border-left-style", "solid")


def test_aligned_equations_have_no_gap_before_their_signs(page: Page) -> None:
    shown = show(page, r"$$\begin{aligned} x &= 1 \\ y &= 2 \end{aligned}$$")
    cells = shown.locator("mtr").first.locator("mtd")
    expect(cells.nth(0)).to_have_css("padding-right", "0px")
    expect(cells.nth(1)).to_have_css("padding-left", "0px")


@pytest.mark.parametrize(
    "text",
    [
        "It costs $5, or $6 with tax.",
        "It costs $5 and not 6$ at all.",
        "From $5-$10, or US$5 and A$6.",
        "Use `$x$` or `\\(y\\)`.",
        "```\n$x$ and \\[y\\]\n```",
        "Set $HOME/$USER and $PATH.",
        "Escaped: \\$x\\$ and \\[sic\\].",
        "An open $x^2 that never ends.",
    ],
)
def test_prices_code_and_variables_are_not_taken_for_formulas(page: Page, text: str) -> None:
    shown = show(page, text)
    assert shown.locator("math, var").count() == 0
    words = text.strip("`\n").replace("`", "").replace("\\$", "$")
    if "sic" in text:
        words = words.replace("\\[", "[").replace("\\]", "]")
    assert "".join(words.split()) in "".join((shown.text_content() or "").split())


@pytest.mark.parametrize(
    "tex",
    [
        r"\href{javascript:window.attacked=1}{x}",
        r"\includegraphics{https://example.org/x.png}",
        r"\htmlStyle{color:red}{x}",
        r"\fcolorbox{red}{blue}{x}",
        r"\pmb{x}",
        r"\text{<img src=x onerror=window.attacked=1>}",
        r"\unknown{x",
        r"\def\a{\a\a}\a",
    ],
)
def test_nothing_in_a_formula_runs_or_loads(page: Page, tex: str) -> None:
    """The page's fixture also checks that the content policy forbade nothing."""
    shown = show(page, f"$$ {tex} $$")
    expect(shown.locator("math, var")).not_to_have_count(0)
    assert shown.locator("img, a, [style], [href]").count() == 0
    assert page.evaluate("window.attacked") is None


def test_katex_is_loaded_with_the_first_formula_only(page: Page) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    show(page, "no formula")
    assert not [url for url in requests if "katex" in url]
    page.unroute(API)
    expect(show(page, "$x$").locator("math")).to_have_count(1)
    assert len([url for url in requests if "katex" in url]) == 1
    page.reload()
    expect(page.locator(".answer math")).to_have_count(1)


# --- while an answer arrives ---------------------------------------------------------------------


#: Shows a growing text, and returns what its blocks looked like after each step: the number of
#: elements that were removed, the text, and the number of formulas.
GROW = """async (steps) => {
    const { showMarkdown } = await import("./page/markdown.js");
    const element = document.createElement("div");
    element.className = "answer";
    document.querySelector("main").append(element);
    const seen = [];
    for (const text of steps) {
        const first = element.firstElementChild;
        showMarkdown(element, text, () => {});
        seen.push({
            keptFirst: first === null || first === element.firstElementChild,
            text: element.textContent,
            blocks: [...element.children].map(({ localName }) => localName),
        });
    }
    element.remove();
    return seen;
}"""


def test_finished_blocks_are_not_rebuilt(page: Page) -> None:
    whole = "Intro with *emphasis*.\n\n```python\nx = 1\ny = 2\n```\n\nThe end, $x$."
    steps = [whole[:length] for length in range(10, len(whole) + 1)]
    seen = page.evaluate(GROW, steps)
    assert all(step["keptFirst"] for step in seen)


def test_a_growing_code_block_keeps_its_button_and_its_lines(page: Page) -> None:
    kept = page.evaluate("""async () => {
        const { showMarkdown } = await import("./page/markdown.js");
        const element = document.createElement("div");
        document.querySelector("main").append(element);
        showMarkdown(element, "```python\\nfirst = 1\\n", () => {});
        const before = ["button", "pre", "code", ".hljs-number"].map(
            (name) => element.querySelector(name));
        showMarkdown(element, "```python\\nfirst = 1\\nsecond = 2\\n", () => {});
        const after = ["button", "pre", "code", ".hljs-number"].map(
            (name) => element.querySelector(name));
        return before.map((each, index) => each !== null && each === after[index]);
    }""")
    assert kept == [True, True, True, True]


@pytest.mark.parametrize("start", ["$$", "\\["])
def test_a_half_formula_is_its_source_and_not_markdown(page: Page, start: str) -> None:
    text = f"Then\n\n{start}\n\\frac{{a_1 * b}}{{c * d_2"
    (seen,) = page.evaluate(GROW, [text])
    assert "\\frac{a_1 * b}{c * d_2" in seen["text"]
    assert seen["blocks"][-1] == "var"


def test_a_half_code_block_is_a_code_block(page: Page) -> None:
    seen = page.evaluate(GROW, ["```py", "```python\n", "```python\ndef f(", "```python\ndef f():"])
    for step in seen[1:]:
        assert step["blocks"] == ["div"]


def test_an_answer_with_code_arrives_without_errors(page: Page) -> None:
    """The page's fixture checks for errors; the answer comes in many chunks."""
    expect(show(page, CODE + FORMULAS).locator("math")).to_have_count(6)
