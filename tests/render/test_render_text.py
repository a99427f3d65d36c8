"""Text from a model: made harmless, split into cells, and wrapped into rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcwidth

from specgen.render.rows import Cell, Cleaner, Flow, Row, Run, append_cells, clean, wrap

FAMILY = "👩‍👩‍👧‍👦"
#: Characters that terminals, or programs that write to them, stumble over.
DIFFICULT = st.sampled_from(
    [
        *"\x1b\r\n\t\x00\x07\x7f\x9b\x85 \u00a0\u0301\u200b\u200d\ufe0f\u202e\u2028\u3000",
        *("漢", "字", "、", "。", "한", "\u1112", "\u1161", "\u11ab", "\udc80"),
        *(FAMILY, "🇩🇪", "👍🏽", "❤️", "e\u0301", "1️⃣"),
        *("[bold]", ":smile:", "\x1b[31m", "\r\n"),
    ]
)
TEXTS = st.lists(DIFFICULT | st.text(max_size=8) | st.sampled_from(["word ", "a", " "])).map(
    "".join
)


def text_of(row: Row) -> str:
    return "".join(cell.text for cell in row.cells)


def cells_of(text: str) -> list[Cell]:
    cells: list[Cell] = []
    append_cells(cells, text, "plain")
    return cells


def texts(cells: list[Cell]) -> list[str]:
    return [cell.text for cell in cells]


@given(TEXTS)
def test_clean_text_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    cleaned = clean(text)
    forbidden = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}
    assert not forbidden & set(cleaned)
    assert not {"\u202a", "\u202b", "\u202d", "\u202e", "\u2066", "\u2069"} & set(cleaned)
    cleaned.encode()  # and nothing that UTF-8 lacks


@given(TEXTS, st.data())
def test_cleaning_does_not_depend_on_how_the_text_arrives(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    cleaner = Cleaner()
    assert cleaner.feed(text[:cut]) + cleaner.feed(text[cut:]) + cleaner.finish() == clean(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[2Jb", "a␛[2Jb"),
        ("a\r\nb", "a\nb"),
        ("a\r\r\nb", "a␍\nb"),
        ("a\u2028b", "a\nb"),
        ("a\x9b31mb", "a\ufffd31mb"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
    ],
)
def test_control_characters_are_replaced_by_visible_ones(text: str, expected: str) -> None:
    assert clean(text) == expected


@pytest.mark.parametrize(
    "character",
    [FAMILY, "🇩🇪", "👍🏽", "❤️", "1️⃣", "e\u0301", "\u1112\u1161\u11ab", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "ก็", "🏳️\u200d🌈"],
)
def test_code_points_shown_as_one_character_share_a_cell(character: str) -> None:
    assert texts(cells_of(f"a{character}b")) == ["a", character, "b"]


@given(st.text())
def test_no_character_is_wider_than_assumed(text: str) -> None:
    cleaned = clean(text).replace("\n", "").replace("\t", "")
    for cell in cells_of(cleaned):
        assert sum(max(0, wcwidth(character)) for character in cell.text) <= cell.width
        assert not cell.exact or sum(map(wcwidth, cell.text)) == cell.width


def rows_of(text: str, columns: int) -> list[str]:
    return [text_of(row) for row in wrap(cells_of(text), columns)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", [""]),
        ("one two three", ["one two th", "ree"]),
        ("0123456789 ab", ["0123456789", " ab"]),
        ("漢字漢字漢字", ["漢字漢字漢", "字"]),
        ("a漢字漢字漢字", ["a漢字漢字", "漢字"]),
        ("👍👍👍👍👍👍", ["👍👍👍👍", "👍👍"]),  # terminals may disagree about the width
    ],
)
def test_rows_end_where_the_terminal_ends_them(text: str, rows: list[str]) -> None:
    assert rows_of(text, 10) == rows


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("one two  three four", ["one two", "three four"]),
        ("0123456789 ab", ["0123456789", "ab"]),
        ("a 0123456789abc", ["a 01234567", "89abc"]),  # no row is left half empty
        ("see 漢字漢字漢字", ["see 漢字漢", "字漢字"]),
        ("    return a + b + c", ["    return", " a + b + c"]),
        (
            "```\none two three\n```\none two three",
            ["```", "one two th", "ree", "```", "one two", "three"],
        ),
    ],
)
def test_prose_is_broken_between_words_and_code_where_the_terminal_breaks_it(
    text: str, rows: list[str]
) -> None:
    flow = Flow(10)
    for character in text:
        flow.feed([Run(character, "plain")])
    assert [text_of(row) for row in flow.finish()] == rows


def test_tabs_go_to_the_next_stop() -> None:
    flow = Flow(40)
    flow.feed([Run("a\tb", "plain"), Run("c\td\n\te", "accepted")])
    assert [text_of(row) for row in flow.finish()] == ["a       bc      d", "        e"]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_tab_stop_does_not_depend_on_how_the_text_is_split(size: int) -> None:
    text = "some words and more\tend"
    flow = Flow(12)
    for start in range(0, len(text), size):
        flow.feed([Run(text[start : start + size], "plain")])
    assert [text_of(row) for row in flow.finish()] == ["some words", "and more", "end"]


def test_rejected_text_neither_breaks_a_line_nor_joins_a_character() -> None:
    flow = Flow(40)
    flow.feed([Run("e", "plain"), Run("\u0301\n\tx", "rejected"), Run("\u0301", "corrected")])
    (row,) = flow.finish()
    assert text_of(row) == "e \u0301↵    x \u0301"
