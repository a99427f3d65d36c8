"""A target's text in a draft's tokens, however it arrives."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.draft_text import DraftText
from specgen.drafters.spelling import ControlTokens, Lexicon, Speller, n_unfinished
from specgen.drafters.translated import Translation
from specgen.method.draft import NO_DRAFT, Draft
from tests.helpers.common import BYTES
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import (
    CountingVocabulary,
    broken_texts,
    joined,
    target_texts,
    texts,
    vocabularies,
    vocabulary,
)


def speller(vocabulary: FakeVocabulary) -> Speller:
    return Speller(vocabulary, Lexicon(vocabulary))


# --- where text breaks off


@given(st.binary(max_size=12) | broken_texts())
def test_unfinished_bytes_are_those_that_a_decoder_waits_with(data: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    assert n_unfinished(data) == len(decoder.getstate()[0])


# --- bytes as tokens


@given(vocabularies(spells_all=True), broken_texts(), broken_texts())
def test_what_follows_a_text_is_spelled_exactly(
    vocabulary: FakeVocabulary, before: bytes, data: bytes
) -> None:
    spelling = speller(vocabulary).spell_after(before, data)
    assert joined(vocabulary, spelling.tokens) == data
    sizes = [len(vocabulary.token_bytes(token)) for token in spelling.tokens]
    assert spelling.ends == [sum(sizes[: n + 1]) for n in range(len(sizes))]


@given(vocabularies(spells_all=True, adds_space=True), texts())
def test_no_space_is_added_to_a_text(vocabulary: FakeVocabulary, text: str) -> None:
    # What is tokenized behind a line break has its space before that.
    tokens = vocabulary.tokenize("\n" + text, add_special=False, parse_special=False)
    assert vocabulary.token_bytes(tokens[0]) == b" "
    assert speller(vocabulary).spell(text.encode()).tokens == tokens[2:]


def test_a_token_for_the_unknown_is_never_text() -> None:
    class WithUnknown(FakeVocabulary):
        """Says token 0 for each byte that has no token."""

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            known = {self.pieces[token]: token for token in range(1, self.n_tokens)}
            return [known.get(bytes((byte,)), 0) for byte in f" {text}".encode()]

    unknown = WithUnknown((b"<unk>", b" ", b"a", b"b"), controls=frozenset({0}))
    assert speller(unknown).spell("a中b\nab".encode()).tokens == [2, 3, 2, 3]


# --- the vocabulary turned around


@given(vocabularies(), st.data())
def test_a_lexicon_finds_what_begins_with_given_bytes(
    vocabulary: FakeVocabulary, data: st.DataObject
) -> None:
    lexicon = Lexicon(vocabulary)
    some = data.draw(st.sampled_from(sorted(lexicon.tokens)))
    for prefix in (some, some[:1], some + b"\xff", b"\xff", b"qq"):
        found = [vocabulary.token_bytes(int(token)) for token in lexicon.with_prefix(prefix)]
        assert found == sorted(piece for piece in lexicon.tokens if piece.startswith(prefix))


@pytest.mark.parametrize("adds_space", [False, True])
def test_of_a_byte_and_a_character_the_tokenizers_choice_is_found(adds_space: bool) -> None:
    # Byte tokens come first, as SentencePiece has them; the tokenizer takes the characters.
    made = vocabulary([*BYTES, b"a", b"b", b" "], adds_space=adds_space)
    lexicon = Lexicon(made)
    assert [lexicon.find(piece) for piece in (b"a", b"b", b" ")] == [256, 257, 258]
    assert lexicon.find(b"c") == ord("c")


# --- control tokens


def test_control_tokens_go_by_name_and_then_by_role() -> None:
    source = vocabulary(
        [b"a"], ["<s>", "</s>", "<|eot|>", "<pad>", "<|im_start|>"], eos="</s>", eot="<|eot|>"
    )
    bos, eos, eot, pad, start = range(1, 6)
    same = vocabulary([b"x", b"y"], ["<|im_start|>", "</s>", "<|eot|>"], eos="</s>", eot="<|eot|>")
    found = ControlTokens(source, same)
    assert [found.find(token) for token in (bos, eos, eot, pad, start)] == [None, 3, 4, None, 2]
    other = vocabulary([b"x"], ["<|im_end|>", "<|eos|>"], eos="<|eos|>", eot="<|im_end|>")
    found = ControlTokens(source, other)
    assert [found.find(token) for token in (bos, eos, eot, pad, start)] == [None, 2, 1, None, None]
    single = vocabulary([b"x"], ["<|eos|>"])
    found = ControlTokens(source, single)
    assert [found.find(token) for token in (eos, eot)] == [1, 1]
    assert ControlTokens(source, vocabulary([b"x"])).find(eos) is None


# --- the text as it grows


class Followed:
    """A `DraftText`, and what it must say."""

    def __init__(self, target: FakeVocabulary, draft: FakeVocabulary) -> None:
        self.target, self.draft = target, draft
        self.translation = Translation(target, draft)
        self.text = DraftText(
            [7, 7], 1, target, draft, ControlTokens(target, draft), speller(draft)
        )
        #: The target's text; its first token is the prompt.
        self.context = [0]

    def follow(self, tokens: Sequence[int], drafted: Draft = NO_DRAFT) -> None:
        before = list(self.text.tokens)
        self.context += tokens
        self.text.follow(self.context, drafted)
        n = self.text.n_unchanged
        assert len(before) - 4 <= n
        assert self.text.tokens[:n] == before[:n]
        assert self.text.tokens[n : n + 1] != before[n : n + 1] or n == len(before)
        self.check()

    def rewind(self, n_tokens: int) -> None:
        before = list(self.text.tokens)
        del self.context[n_tokens:]
        self.text.rewind(n_tokens)
        assert self.text.tokens == before[: len(self.text.tokens)]
        assert self.text.n_unchanged <= len(self.text.tokens)

    def segments(self) -> list[tuple[bytes, int | None]]:
        """The text between control tokens, and the draft's token for what ends each."""
        segments: list[tuple[bytes, int | None]] = []
        data = b""
        for token in self.context[1:]:
            piece = self.target.token_bytes(token)
            data += piece
            if not piece:
                counterpart = ControlTokens(self.target, self.draft).find(token)
                segments.append((data, counterpart))
                data = b""
        return [*segments, (data, None)]

    def check(self) -> None:
        """Each character of the text is in the draft's tokens, unless it has none for it."""
        assert self.text.tokens[:2] == [7, 7]
        assert self.text.held_back == b""
        said = list(zip(self.text.tokens, self.text.ends, strict=True))[2:]
        n_before = 0
        for data, counterpart in self.segments():
            is_told = [False] * len(data)
            while said and said[0][1] <= n_before + len(data):
                token, end = said[0]
                piece = self.draft.token_bytes(token)
                if not piece:
                    break
                start = end - n_before - len(piece)
                assert data[start : end - n_before] == piece
                assert not any(is_told[start:])
                is_told[start : end - n_before] = [True] * len(piece)
                said.pop(0)
            self.check_told(data, is_told)
            n_before += len(data)
            if counterpart is not None:
                assert said.pop(0) == (counterpart, n_before)
        assert said == []

    def check_told(self, data: bytes, is_told: Sequence[bool]) -> None:
        spell = speller(self.draft).spell
        start = 0
        for character in data.decode("utf-8", "surrogateescape"):
            piece = character.encode("utf-8", "surrogateescape")
            end = start + len(piece)
            if not any(is_told[start:end]):
                assert not spell(piece).tokens, (data, start)
            for place in range(start, end):
                assert is_told[place] or not spell(data[place : place + 1]).tokens, (data, place)
            start = end

    def canonical(self) -> list[int]:
        """The spelling of the whole text at once."""
        tokens = [7, 7]
        for data, counterpart in self.segments():
            tokens += speller(self.draft).spell(data).tokens
            tokens += [] if counterpart is None else [counterpart]
        return tokens


@given(vocabularies(), st.booleans().flatmap(lambda each: vocabularies(spells_all=each)), st.data())
def test_a_text_is_told_but_for_what_the_draft_cannot_say(
    target: FakeVocabulary, draft: FakeVocabulary, data: st.DataObject
) -> None:
    followed = Followed(target, draft)
    tokens = data.draw(target_texts(target))
    while tokens:
        n = data.draw(st.integers(1, 8))
        followed.follow(tokens[:n])
        del tokens[:n]


#: A tokenizer that takes the longest piece does not look back, so its spelling of a text can
#: differ from that of a longer one only within the last piece's length.
LOCAL = vocabularies(spells_all=True, merges=False, n_longest=4)
WHOLE = vocabulary([character.encode() for character in "thecai:nсx中文字é😀 \n\t."], ["</s>"])


def chain_of(draft: FakeVocabulary, tokens: Sequence[int]) -> Draft:
    return Draft.chain(tokens, "model")


@given(vocabularies(spells_all=True), vocabularies(spells_all=True), st.data())
def test_drafted_tokens_that_the_text_took_stay(
    target: FakeVocabulary, draft: FakeVocabulary, data: st.DataObject
) -> None:
    followed = Followed(target, draft)
    followed.follow(data.draw(target_texts(target, 8)))
    before = list(followed.text.tokens)
    said = data.draw(texts(3).map(str.encode))
    # A draft's own spelling, which need not be its tokenizer's.
    lexicon = Lexicon(draft)
    tokens: list[int] = []
    rest = said
    while rest:
        some = [rest[:n] for n in range(1, len(rest) + 1) if lexicon.find(rest[:n]) is not None]
        piece = data.draw(st.sampled_from(some))
        tokens.append(lexicon.tokens[piece])
        rest = rest[len(piece) :]
    has_end = data.draw(st.booleans())
    end = sorted(draft.ends)[:1] if has_end else []
    spelled = speller(target).spell(said).tokens
    followed.follow(spelled, chain_of(draft, [*tokens, *end]))
    assert followed.text.tokens == before + tokens
    assert followed.text.n_unchanged == len(before)
    followed.rewind(len(followed.context) - len(spelled))
    # A text that goes another way takes the draft's tokens as far as they are right.
    n = data.draw(st.integers(0, len(spelled)))
    other = data.draw(target_texts(target, 4))
    followed.follow([*spelled[:n], *other], chain_of(draft, tokens))


@given(LOCAL, st.data())
def test_a_rewound_text_is_spelled_as_a_fresh_one(
    draft: FakeVocabulary, data: st.DataObject
) -> None:
    followed = Followed(WHOLE, draft)
    one = st.integers(0, WHOLE.n_tokens - 1)
    for _ in range(3):
        followed.follow(data.draw(st.lists(one, max_size=12)))
        followed.rewind(data.draw(st.integers(1, len(followed.context))))
    followed.follow(data.draw(st.lists(one, max_size=12)))
    assert followed.text.tokens == followed.canonical()


@given(LOCAL, st.data())
def test_what_is_held_back_comes_again(draft: FakeVocabulary, data: st.DataObject) -> None:
    followed = Followed(WHOLE, draft)
    one = st.integers(0, WHOLE.n_tokens - 1)
    followed.follow(data.draw(st.lists(one, max_size=12)))
    text = followed.text
    before = list(text.tokens)
    n = data.draw(st.integers(1, 4))
    ending = text.ending(n)
    if ending:
        assert joined(draft, before[-n:]) == ending
        text.hold_back(n)
        assert text.tokens == before[:-n]
        assert text.n_unchanged <= len(before) - n
        assert text.held_back == ending
        assert text.last_bytes(99).endswith(ending)
    else:  # so many tokens reach over a control token, or into the prompt
        n_bytes = len(followed.segments()[-1][0])
        said = before[2:][-n:]
        assert len(said) < n or len(joined(draft, said)) > n_bytes or joined(draft, said[:1]) == b""
    followed.follow(data.draw(st.lists(one, max_size=3)))
    assert text.tokens == followed.canonical()


def test_no_token_reaches_over_a_control_token() -> None:
    target = vocabulary([b"a", b"b"], ["</s>", "<pad>"])
    draft = vocabulary([b"a", b"b", b"ab", b"ba"], ["</s>"])
    followed = Followed(target, draft)
    followed.follow([0, 3, 1])  # a pad b: the draft has no token for the one between
    assert followed.text.tokens == [7, 7, 0, 1]
    assert followed.text.last_bytes(9) == b"b"
    assert followed.text.ending(1) == b"b"
    assert followed.text.ending(2) == b""
    followed.follow([2, 0, 1])
    assert followed.text.tokens == [7, 7, 0, 1, 4, 2]
    followed.rewind(2)
    assert followed.text.tokens == [7, 7, 0]
    followed.follow([1])
    assert followed.text.tokens == [7, 7, 2]


@pytest.mark.parametrize("spells_all", [True, False])
def test_the_cost_of_a_step_does_not_grow_with_the_text(spells_all: bool) -> None:
    """Counted in bytes that are tokenized, not in time."""
    words = [b"the", b" the", b"cat", b" ca", b"tthe", b"\n"]
    inner = vocabulary([*words, *(BYTES if spells_all else [b"t", b"h"])], ["</s>"])
    target = vocabulary(BYTES, ["</s>"])
    for said in (b"the cat", "中文".encode(), b"zzzzz", b"the " * 2):
        draft = CountingVocabulary.of(inner)
        followed = Followed(target, draft)
        costs: list[int] = []
        draft.counts.clear()
        for token in speller(target).spell(said * 60).tokens:
            followed.context.append(token)
            followed.text.follow(followed.context)
            costs.append(sum(draft.counts))
            draft.counts.clear()
        assert max(costs[len(said) * 30 :]) <= max(costs[: len(said) * 30]) <= 600
        assert sum(costs) / len(costs) <= 400
        followed.check()


# --- what a text begins with


def test_a_translated_prompt_begins_as_the_draft_begins_texts() -> None:
    target = vocabulary([b"a", b"b"], ["<s>", "</s>"], add_bos=True)
    draft = vocabulary([b"ab", b"a", b"b"], ["<pad>", "<s>", "</s>"], add_bos=True)
    translation = Translation(target, draft)
    for prompt, expected in (([2, 0, 1], [4, 0]), ([0, 1], [4, 0]), ([2], [4])):
        text = translation.text(prompt, None)
        text.follow(prompt)
        assert text.tokens == expected
    without = vocabulary([b"ab", b"a", b"b"], ["<pad>", "<s>", "</s>"])
    text = Translation(target, without).text([2, 0, 1], None)
    text.follow([2, 0, 1])
    assert text.tokens == [0]


def test_a_prompt_of_the_drafts_own_takes_the_place_of_the_targets() -> None:
    target = vocabulary([b"a", b"b"], ["<s>", "</s>"])
    draft = vocabulary([b"ab", b"a", b"b", b"bb"], ["</s>"])
    text = Translation(target, draft).text([2, 0, 1], [3, 2])
    text.follow([2, 0, 1, 1])
    assert text.tokens == [3, 2, 2]  # nothing merges with the prompt
    assert text.last_bytes(9) == b"b"
    text.rewind(3)
    assert text.tokens == [3, 2]
    text.follow([2, 0, 1, 0, 1])
    assert text.tokens == [3, 2, 0]
