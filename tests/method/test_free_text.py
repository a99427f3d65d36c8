"""Grammars in free text: behind the mark of a call, and behind thoughts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from specgen.options import Grammar
from specgen.text.grammar.base import GrammarState
from specgen.text.grammar.free_text import ThoughtMarks, grammar_start
from tests.helpers.fake_backend import FakeVocabulary

#: Letters, the marks as one token and in pieces, and tokens that go on behind a mark.
PIECES = [
    *(bytes([byte]) for byte in b"<call>/abtx \n"),
    *(b"<call>", b"</call>", b"ll>a", b"l>x", b">ab</c", b"l>\n", b"</call><ca", b"x<call>b"),
    *(b"</t>", b"<t>", b"t>a", b"t>x", b"</t", "é<".encode(), b"call>"),
]
END = len(PIECES)


VOCABULARY = FakeVocabulary((*PIECES, b"END"), ends=frozenset([END]))
CALLS = Grammar("lark", 'start: /[ab]{1,3}/ "</call>"', mark="<call>")
MUST_CALL = Grammar("lark", 'start: "<call>" /[ab]{1,3}/ "</call>"', True, "<call>")
THOUGHTS = ThoughtMarks("<t>", "</t>")
#: A free text, and where it ends in a call that is open.
FREE = re.compile(r"(?:(?!<call>)[^\0]|<call>[ab]{1,3}</call>)*?")
OPEN = re.compile(FREE.pattern + r"<call>(?:[ab]{0,3}|[ab]{1,3}(?:<|</|</c|</ca|</cal|</call))")


def walk(state: GrammarState, rng: np.random.Generator, n: int) -> tuple[list[int], bool]:
    """Tokens that a grammar allows, and whether the last one is the end."""
    path: list[int] = []
    every = np.arange(VOCABULARY.n_tokens)
    for _ in range(n):
        allowed = np.flatnonzero(state.allows(every))
        assert len(allowed)
        assert state.is_free in (False, len(allowed) == len(every))
        token = int(rng.choice(allowed))
        if token == END:
            return path, True
        path.append(token)
        state = state.after(token)
    return path, False


def text_of(path: list[int]) -> str:
    return b"".join(PIECES[token] for token in path).decode()


@pytest.mark.parametrize("seed", range(200))
def test_each_call_in_a_free_text_follows_the_grammar(seed: int) -> None:
    """And no token is forbidden that the text may have: of those in free text, each is tried."""
    rng = np.random.default_rng(seed)
    path, _ = walk(grammar_start(CALLS, VOCABULARY), rng, 12)
    text = text_of(path)
    assert FREE.fullmatch(text) or OPEN.fullmatch(text), text
    state = grammar_start(CALLS, VOCABULARY)
    for n, token in enumerate(path):
        before = text_of(path[:n])
        for other, piece in enumerate(PIECES):
            after = before + piece.decode()
            is_valid = bool(FREE.fullmatch(after) or OPEN.fullmatch(after))
            if FREE.fullmatch(before):
                assert state.allows(np.array([other]))[0] == is_valid, (before, piece)
            elif not is_valid:
                assert not state.allows(np.array([other]))[0], (before, piece)
        state = state.after(token)


@pytest.mark.parametrize("seed", range(40))
def test_a_state_depends_on_the_text_alone(seed: int) -> None:
    """Not on the branches that were tried, or on what was forgotten."""
    rng, every = np.random.default_rng(seed), np.arange(VOCABULARY.n_tokens)
    for thoughts in (None, THOUGHTS):
        path, _ = walk(grammar_start(CALLS, VOCABULARY, thoughts), rng, 10)
        state, fresh = (grammar_start(CALLS, VOCABULARY, thoughts) for _ in range(2))
        for token in path:
            walk(state, rng, 3)
            before, state = state, state.after(token)
            before.forget()
            fresh = fresh.after(token)
            assert (state.allows(every) == fresh.allows(every)).all()


@pytest.mark.parametrize("state", ["may come", "open", "over"])
def test_thoughts_are_free_and_what_follows_is_not(state: str) -> None:
    marks = ThoughtMarks("<t>", "</t>", state=state)  # type: ignore[arg-type]
    grammar = Grammar("lark", 'start: "ab"')
    begun = "<t>" if state == "open" else ""
    found = set()
    for seed in range(300):
        path, is_ended = walk(
            grammar_start(grammar, VOCABULARY, marks), np.random.default_rng(seed), 12
        )
        text = begun + text_of(path)
        if is_ended:
            assert re.fullmatch(r"\s*(?:<t>(?:(?!</t>)[^\0])*</t>\s*)?ab", text), text
            found.add(text.lstrip().startswith("<t>"))
    assert found == {"may come": {True, False}, "open": {True}, "over": {False}}[state]


def test_behind_a_call_that_has_to_be_only_calls_may_come() -> None:
    n_calls = set()
    for seed in range(300):
        path, is_ended = walk(grammar_start(MUST_CALL, VOCABULARY), np.random.default_rng(seed), 40)
        if is_ended:
            text = text_of(path)
            assert re.fullmatch(r"\s*(?:<call>[ab]{1,3}</call>\s*)+(?:[^\0]{0,12})", text), text
            n_calls.add(text.count("</call>"))
    assert {1, 2} <= n_calls
