"""Grammars: which tokens may come next, states as values, and error messages about invalid
grammars.
"""

from __future__ import annotations

import ctypes
import gc
import re
import string
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.errors import UsageError
from specgen.llama import LlamaVocabulary
from specgen.llama.library import llama_cpp
from specgen.method.text_state import TextState
from specgen.options import Grammar
from specgen.system.arrays import BoolArray
from specgen.text.grammar.base import GrammarState
from specgen.text.grammar.free_text import ThoughtMarks, grammar_start
from specgen.text.grammar.llguidance_grammar import LlguidanceGrammar
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.tiny import vocabulary_of

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
#: Grammars and, for their texts, regular expressions.
GRAMMARS = {
    "words": ('root ::= ("the" | " and" | "ing")+ "."', r"(the| and|ing)+\."),
    "characters": ("root ::= [é-ü😀-😃]+ [^a-zéà]{2} [x]?", r"[é-ü😀-😃]+[^a-zéà]{2}x?"),
    "no ascii": ("root ::= [^\\x00-\\x7Fé]{1,3}", r"[^\x00-\x7Fé]{1,3}"),
    "any": ('root ::= .{3} "é" | "€€"', r"(?s:...)é|€€"),
    "one text": ('root ::= "def é😀 self"', "def é😀 self"),
    "optional": ('root ::= "a"? "b"{0,2} "cc"{1,2}', "a?b{0,2}(cc){1,2}"),
    "empty stars": ('root ::= ("a"*)* "b"', "a*b"),
    "or nothing": ('root ::= "" | "x" root', "x*"),
    "many ways": ("root ::= ([a-c]? [b-e]?)+ " + '"a"? ' * 5 + '"."', r"[a-e]*\."),
}
#: Some 10^13 ways to read a text of 12 characters.
CHAIN = "".join(f'"{letter}"? ' for letter in string.ascii_lowercase * 200) + '"."'


@pytest.fixture(scope="module", params=["bpe", "spm"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaVocabulary]:
    with vocabulary_of(tmp_path_factory.mktemp("model"), tokenizer=request.param) as found:
        yield found


def gbnf_grammar(vocabulary: LlamaVocabulary, gbnf: str) -> LlguidanceGrammar:
    return LlguidanceGrammar(vocabulary, Grammar("gbnf", gbnf))


class Reference:
    """The tokens of the whole vocabulary that llama.cpp allows, as long as the text is UTF-8."""

    def __init__(self, vocabulary: LlamaVocabulary, gbnf: str) -> None:
        self.vocabulary = vocabulary
        self.gbnf = gbnf

    def allowed(self, path: list[int]) -> BoolArray:
        sampler = llama_cpp.llama_sampler_init_grammar(
            self.vocabulary.handle, self.gbnf.encode(), b"root"
        )
        for token_id in path:
            llama_cpp.llama_sampler_accept(sampler, token_id)
        n = self.vocabulary.n_tokens
        data = (llama_cpp.llama_token_data * n)(
            *(llama_cpp.llama_token_data(id=i, logit=0.0, p=0.0) for i in range(n))
        )
        array = llama_cpp.llama_token_data_array(data=data, size=n, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        llama_cpp.llama_sampler_free(sampler)
        text = b"".join(map(self.vocabulary.token_bytes, path))
        return np.array(
            [
                data[i].logit == 0.0
                and (self.vocabulary.is_end(i) or self._fits(text, self.vocabulary.token_bytes(i)))
                for i in range(n)
            ]
        )

    @staticmethod
    def _fits(text: bytes, piece: bytes) -> bool:
        if not piece or b"\0" in piece:
            return False
        try:
            (text + piece).decode()
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return True

    def forced(self, path: list[int]) -> int | None:
        allowed = set(np.flatnonzero(self.allowed(path)).tolist())
        ends = [token for token in self.vocabulary.end_tokens() if token in allowed]
        if len(allowed) == 1 or (ends and allowed == set(ends)):
            return ends[0] if ends else allowed.pop()
        return None


def token_of(vocabulary: LlamaVocabulary, piece: bytes) -> int:
    return next(t for t in range(vocabulary.n_tokens) if vocabulary.token_bytes(t) == piece)


def every(vocabulary: LlamaVocabulary) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(vocabulary.n_tokens)


def walk(
    vocabulary: LlamaVocabulary, state: GrammarState, rng: np.random.Generator, n_tokens: int = 60
) -> tuple[list[int], GrammarState]:
    """A path of random tokens, ended as soon as that may be once it is long."""
    path: list[int] = []
    while True:
        allowed = np.flatnonzero(state.allows(every(vocabulary)))
        if not len(allowed):
            return path, state
        ends = [token for token in allowed.tolist() if vocabulary.is_end(token)]
        token = int(rng.choice(ends if ends and len(path) > n_tokens else allowed))
        path.append(token)
        state = state.after(token)
        if len(path) > 5000:
            pytest.fail("the text does not end")


def text_bytes(vocabulary: LlamaVocabulary, path: list[int]) -> bytes:
    return b"".join(map(vocabulary.token_bytes, path))


def text_of(vocabulary: LlamaVocabulary, path: list[int]) -> str:
    return text_bytes(vocabulary, path).decode()


def is_utf8(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


# --- what may come next ---------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAMMARS)
def test_random_texts_conform(vocabulary: LlamaVocabulary, name: str) -> None:
    gbnf, pattern = GRAMMARS[name]
    grammar = gbnf_grammar(vocabulary, gbnf)
    for seed in range(20):
        path, _ = walk(vocabulary, grammar.start, np.random.default_rng(seed), 8)
        assert vocabulary.is_end(path[-1])
        assert re.fullmatch(pattern, text_of(vocabulary, path)), path


_MATTERS = [*(gbnf for gbnf, _ in GRAMMARS.values()), JSON]


@given(gbnf=st.sampled_from(_MATTERS), seed=st.integers(0, 2**32), length=st.integers(0, 12))
@settings(max_examples=60)
def test_allowed_and_forced_tokens_equal_brute_force(
    vocabulary: LlamaVocabulary, gbnf: str, seed: int, length: int
) -> None:
    rng = np.random.default_rng(seed)
    reference = Reference(vocabulary, gbnf)
    state, path = gbnf_grammar(vocabulary, gbnf).start, []
    for _ in range(length):
        allowed = np.flatnonzero(state.allows(every(vocabulary)))
        # Half the time a short token: those come between the bytes of a character.
        short = [t for t in allowed.tolist() if len(vocabulary.token_bytes(t)) == 1]
        token = int(rng.choice(short if short and rng.random() < 0.5 else allowed))
        if vocabulary.is_end(token):
            break
        path.append(token)
        if rng.random() < 0.5:
            state.forced()  # what it leaves in the state must not matter
        state = state.after(token)
    expected = reference.allowed(path)
    found = state.allows(every(vocabulary))
    # If a set excludes a character, llama.cpp also rejects parts of others that begin alike.
    for token in np.flatnonzero(found & ~expected).tolist():
        assert "[^" in gbnf
        assert not is_utf8(text_bytes(vocabulary, [*path, token]))
    assert not (expected & ~found).any()
    one_by_one = gbnf_grammar(vocabulary, gbnf).start
    for token in path:
        one_by_one = one_by_one.after(token)
    few = rng.integers(0, vocabulary.n_tokens, 200)
    assert (one_by_one.allows(few) == found[few]).all()
    if (found == expected).all():
        assert one_by_one.forced() == state.forced() == reference.forced(path)


def test_the_text_ends_where_the_grammar_does(vocabulary: LlamaVocabulary) -> None:
    ends = np.array(vocabulary.end_tokens())
    a, b = token_of(vocabulary, b"a"), token_of(vocabulary, b"b")
    state = gbnf_grammar(vocabulary, 'root ::= "a" "b"?').start
    assert not state.allows(ends).any()
    state = state.after(a)
    assert state.allows(ends).all()
    assert state.forced() is None  # it may continue
    state = state.after(b)
    assert state.forced() == ends[0]
    over = state.after(int(ends[0]))
    assert not over.allows(every(vocabulary)).any()
    assert over.forced() is None
    with pytest.raises(ValueError, match="the text has ended"):
        over.after(a)


def test_a_wrong_token_is_an_error_and_not_the_end_of_the_process(
    vocabulary: LlamaVocabulary,
) -> None:
    state = gbnf_grammar(vocabulary, 'root ::= "a"').start
    for token_id in range(vocabulary.n_tokens):
        if not state.allows(np.array([token_id]))[0]:
            with pytest.raises(ValueError, match=f"does not allow token {token_id}"):
                state.after(token_id)
    for token_id in (-1, vocabulary.n_tokens, 2**40):
        with pytest.raises(ValueError, match=f"no token {token_id}"):
            state.after(token_id)
        with pytest.raises(ValueError, match=f"no token {token_id}"):
            state.allows(np.array([0, token_id]))
    assert state.allows(np.array([], np.int64)).tolist() == []


def test_long_chains_of_optional_items_are_followed_or_refused(vocabulary: LlamaVocabulary) -> None:
    """llama.cpp would follow each way in which a token fits into them."""
    chain = gbnf_grammar(vocabulary, f"root ::= {CHAIN}").start
    assert chain.after(token_of(vocabulary, b"a")).allows(every(vocabulary)).any()
    with pytest.raises(UsageError, match="more than 50000"):
        gbnf_grammar(vocabulary, "root ::= " + '("a"? "b"?)? ' * 20_000 + '"."')
    a, dot, x = (token_of(vocabulary, piece) for piece in (b"a", b".", b"x"))
    same = gbnf_grammar(vocabulary, "root ::= " + '"a"? ' * 500 + '"."').start
    for _ in range(20):
        assert same.allows(np.array([a, dot, x])).tolist() == [True, True, False]
        same = same.after(a)


def test_a_grammar_names_tokens(vocabulary: LlamaVocabulary) -> None:
    a, b = token_of(vocabulary, b"a"), token_of(vocabulary, b"b")
    end = vocabulary.end_tokens()[0]
    named = vocabulary.token_entry(end).decode()
    gbnf = f"root ::= <[{a}]> !<[{b}]> {named if named.startswith('<') else f'<[{end}]>'}?"
    state = gbnf_grammar(vocabulary, gbnf).start
    assert np.flatnonzero(state.allows(every(vocabulary))).tolist() == [a]
    state = state.after(a)
    refused = np.flatnonzero(~state.allows(every(vocabulary)))
    assert b in refused.tolist()
    assert a not in refused.tolist()


# --- states are values ----------------------------------------------------------------------


def test_branches_do_not_disturb_each_other(vocabulary: LlamaVocabulary) -> None:
    start = gbnf_grammar(vocabulary, JSON).start
    paths = [walk(vocabulary, start, np.random.default_rng(seed), 0)[0][:12] for seed in range(8)]
    states = [start] * len(paths)
    for step in range(12):  # all branches grow together
        states = [
            state.after(path[step]) if step < len(path) else state
            for state, path in zip(states, paths, strict=True)
        ]
    reference = Reference(vocabulary, JSON)
    for path, state in zip(paths, states, strict=True):
        if not vocabulary.is_end(path[-1]):
            assert (state.allows(every(vocabulary)) == reference.allowed(path)).all()
    assert (start.allows(every(vocabulary)) == reference.allowed([])).all()


def test_threads_may_share_a_grammar(vocabulary: LlamaVocabulary) -> None:
    grammar = gbnf_grammar(vocabulary, JSON)
    alone = [walk(vocabulary, grammar.start, np.random.default_rng(s), 0)[0][:20] for s in range(4)]
    found: list[list[int]] = [[] for _ in alone]

    def work(seed: int) -> None:
        found[seed] = walk(vocabulary, grammar.start, np.random.default_rng(seed), 0)[0][:20]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(len(alone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_text_does_not_keep_its_past_states(vocabulary: LlamaVocabulary) -> None:
    """Each holds a parser: those of a long text would fill the memory."""
    start, a = gbnf_grammar(vocabulary, 'root ::= "a"*').start, token_of(vocabulary, b"a")
    text = TextState((), start)
    passed = []
    for _ in range(20):
        state = text.grammar()
        assert state is not None
        passed.append(weakref.ref(state))
        del state
        text.commit(a)
    gc.collect()
    assert sum(ref() is not None for ref in passed) == 1  # the start, which the request holds


# --- invalid grammars ---------------------------------------------------------------------------

BAD = {
    "": "the grammar is empty",
    "# nothing": "the grammar is empty",
    'a ::= "b"': "the grammar has no rule 'root'",
    'root ::= "a"\nb ::= c': "line 2: there is no rule 'c'",
    'root = "a"': "line 1: expected ::= after 'root', found '= \"a\"'",
    'root ::= "a': "expected a closing quote or bracket, found the end",
    "root ::= [a": "expected a closing quote or bracket, found the end",
    'root ::= ("a"': "expected '\\)', found the end",
    'root ::= "a" )': "expected the end of the line, found '\\)'",
    'root ::= "a"\n | "b"': "line 2: expected the name of a rule",
    'root ::= "\\q"': "unknown escape \\\\q",
    'root ::= "\\x4"': "expected 2 hexadecimal digits",
    "root ::= *": "nothing before a repetition",
    'root ::= "a"{': "expected a number",
    'root ::= "a"{5,3}': "at least 5 and at most 3",
    'root ::= "a"{3000}': "3000 repetitions",
    "root ::= [z-a]": "nothing from 'z' to 'a'",
    'root ::= "a"{99999999999999999999}': "too large",
    "root ::= " + "(" * 100_000: "nested more than 1000 deep",
    'root ::= root "z"': "line 1: rule 'root' derives no text",
    'root ::= a root\na ::= b\nb ::= ""': "derives no text",
    'root ::= "a\0b"': "NUL",
    'root ::= "\ud800"': "not valid UTF-8",
    'root ::= <no token> "a"': "<no token> is not one token of this model",
    "root ::= !<[99999999]>": r"<\[99999999\]> is not one token",
    "root ::= <": "expected a token",
    'root ::= "\\x00"': "characters that no text can have",
}


@pytest.mark.parametrize("gbnf", BAD, ids=lambda gbnf: repr(gbnf[:30]))
def test_a_bad_grammar_is_one_line_and_nothing_else(
    vocabulary: LlamaVocabulary, gbnf: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=BAD[gbnf]) as caught:
        gbnf_grammar(vocabulary, gbnf)
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


_PIECES = ['"a"', "[^b]", "x", "root", *"()|*+?.\n", "{2}", "{0,2}", '""']


@given(parts=st.lists(st.sampled_from([*_PIECES, "root ::= ", "x ::= "]), max_size=12))
@settings(max_examples=300)
def test_an_accepted_grammar_can_be_followed(vocabulary: LlamaVocabulary, parts: list[str]) -> None:
    gbnf = "root ::= " + " ".join(parts)
    try:
        state = gbnf_grammar(vocabulary, gbnf).start
    except UsageError:
        return
    for _ in range(3):  # none of these ends the process
        allowed = np.flatnonzero(state.allows(every(vocabulary)))
        if len(allowed):
            state = state.after(int(allowed[0]))


# --- in free text: after the mark of a call, and after thoughts

#: Letters, the marks as one token and in pieces, and tokens that go on after a mark.
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


def walk_free(state: GrammarState, rng: np.random.Generator, n: int) -> tuple[list[int], bool]:
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


def free_text(path: list[int]) -> str:
    return b"".join(PIECES[token] for token in path).decode()


@pytest.mark.parametrize("seed", range(200))
def test_each_call_in_a_free_text_follows_the_grammar(seed: int) -> None:
    """And no token is forbidden that the text may have: of those in free text, each is tried."""
    rng = np.random.default_rng(seed)
    path, _ = walk_free(grammar_start(CALLS, VOCABULARY), rng, 12)
    text = free_text(path)
    assert FREE.fullmatch(text) or OPEN.fullmatch(text), text
    state = grammar_start(CALLS, VOCABULARY)
    for n, token in enumerate(path):
        before = free_text(path[:n])
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
        path, _ = walk_free(grammar_start(CALLS, VOCABULARY, thoughts), rng, 10)
        state, fresh = (grammar_start(CALLS, VOCABULARY, thoughts) for _ in range(2))
        for token in path:
            walk_free(state, rng, 3)
            before = state
            state = state.after(token)
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
        path, is_ended = walk_free(
            grammar_start(grammar, VOCABULARY, marks), np.random.default_rng(seed), 12
        )
        text = begun + free_text(path)
        if is_ended:
            assert re.fullmatch(r"\s*(?:<t>(?:(?!</t>)[^\0])*</t>\s*)?ab", text), text
            found.add(text.lstrip().startswith("<t>"))
    assert found == {"may come": {True, False}, "open": {True}, "over": {False}}[state]


def test_after_a_required_call_only_calls_may_come() -> None:
    n_calls = set()
    for seed in range(300):
        path, is_ended = walk_free(
            grammar_start(MUST_CALL, VOCABULARY), np.random.default_rng(seed), 40
        )
        if is_ended:
            text = free_text(path)
            assert re.fullmatch(r"\s*(?:<call>[ab]{1,3}</call>\s*)+(?:[^\0]{0,12})", text), text
            n_calls.add(text.count("</call>"))
    assert {1, 2} <= n_calls
