"""Text is released in complete parts: characters across tokens, and stop strings across chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.method.text_state import TextState
from specgen.text.text_stream import TextStream

#: Few letters, so that stop strings and their beginnings turn up.
LETTERS = st.text(alphabet="abé😀", max_size=30)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(LETTERS, st.lists(st.integers(0, 200)))
def test_text_is_byte_exact_however_it_is_cut(text: str, cuts: list[int]) -> None:
    stream = TextStream()
    shown = [stream.push(piece) for piece in pieces(text.encode(), cuts)]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) + stream.flush() == text
    assert stream.text == text


@given(st.binary(max_size=40), st.lists(st.integers(0, 200)))
def test_invalid_utf_8_is_replaced_as_in_python(data: bytes, cuts: list[int]) -> None:
    stream = TextStream()
    shown = "".join(stream.push(piece) for piece in pieces(data, cuts)) + stream.flush()
    assert shown == data.decode("utf-8", "replace")


@given(
    LETTERS,
    st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 200)),
)
def test_stop_strings_are_found_where_the_whole_text_has_them(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = TextStream(stops)
    shown = ""
    for piece in pieces(text.encode(), cuts):
        shown += stream.push(piece)
        if stream.stopped_by is not None:
            break
        assert not any(stop in shown for stop in stops)
    shown += stream.flush()
    hits = [text.find(stop) for stop in stops if stop in text]
    if stream.stopped_by is None:
        assert not hits
        assert shown == text
    else:
        # The scan stops with the first piece that completes a stop string.
        assert stream.stopped_by in stops
        assert shown == text[: len(shown)]
        assert text[len(shown) :].startswith(stream.stopped_by)
        assert not any(stop in shown for stop in stops)
    assert stream.text == shown


@pytest.mark.parametrize(
    ("text", "n_indent", "shown"),
    [
        ("a\n  b\n c\nd", 1, "a\n  b\n c"),
        ("a\n    b\n\t  c\n d", 3, "a\n    b\n\t  c"),
        (" a\n\n   b", 3, " a"),
        ("a\n  ", 3, "a\n  "),
        ("a\n   b|c", 3, "a\n   b"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 30])
def test_a_line_with_too_little_indentation_ends_a_text(
    text: str, n_indent: int, shown: str, size: int
) -> None:
    stream = TextStream(["|"], n_indent)
    found = ""
    for start in range(0, len(text), size):
        if stream.stopped_by is None:
            found += stream.push(text[start : start + size].encode())
    assert found + stream.flush() == shown


@given(LETTERS, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(stops)
    shown = ""
    for character in text:
        shown += stream.push(character.encode())
        if stream.stopped_by is not None:
            return
    rest = text[len(shown) :]
    assert rest == "" or any(stop.startswith(rest) for stop in stops)
    assert stream.flush() == rest


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(["a", ""])


def test_a_preview_keeps_nothing() -> None:
    stream = TextStream()
    grin = "😀".encode()
    assert stream.push(grin[:2]) == ""
    assert stream.preview(grin[2:], b"ab") == "ab"
    assert stream.preview(b"", grin[2:]) == "😀"
    assert stream.preview(b"", grin[2:3]) == "\ufffd"
    assert stream.push(grin[2:]) == "😀"
    assert stream.flush() == ""


# --- the text as samplers see it


@settings(max_examples=80)
@given(st.data())
def test_a_history_is_the_end_of_the_text_and_the_drafted_tokens(data: st.DataObject) -> None:
    """However the text grows, far beyond the initial capacity. Drafted tokens leave no trace."""
    text = list(range(5))
    state = TextState(text)
    for _ in range(data.draw(st.integers(1, 12))):
        new = list(range(data.draw(st.integers(0, 900))))
        for token in new:
            state.commit(token)
        text = text + new
        drafted = list(range(100, 100 + data.draw(st.integers(0, 2000))))
        n_last = data.draw(st.integers(-1, 1500))
        whole = text + drafted
        history = state.history(drafted, n_last)
        assert history.dtype == np.int64
        assert history.tolist() == (whole if n_last < 0 else whole[max(0, len(whole) - n_last) :])
        assert state.history([*drafted, 7, 8], -1).tolist() == [*whole, 7, 8]
        assert state.history((), -1).tolist() == state.tokens == text
