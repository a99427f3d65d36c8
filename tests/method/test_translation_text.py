"""A target's text in a draft's tokens, however it arrives."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.translated import Translation
from specgen.drafters.vocabularies import Lexicon, counterpart, n_unfinished
from specgen.method.draft import Draft
from tests.helpers.common import BYTES
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import (
    CountingVocabulary,
    broken_texts,
    joined,
    vocabularies,
    vocabulary,
)


def spelled(vocabulary: FakeVocabulary, data: bytes) -> list[int]:
    return [token for token, _ in Lexicon(vocabulary).spell(data)]


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
    found = Lexicon(vocabulary).spell_after(before, data)
    assert joined(vocabulary, [token for token, _ in found]) == data
    sizes = [len(vocabulary.token_bytes(token)) for token, _ in found]
    assert [end for _, end in found] == [sum(sizes[: n + 1]) for n in range(len(sizes))]


def test_a_token_for_the_unknown_is_never_text() -> None:
    class WithUnknown(FakeVocabulary):
        """Says token 0 for each byte that has no token."""

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            known = {self.pieces[token]: token for token in range(1, self.n_tokens)}
            return [known.get(bytes((byte,)), 0) for byte in f" {text}".encode()]

    unknown = WithUnknown((b"<unk>", b" ", b"a", b"b"), controls=frozenset({0}))
    assert spelled(unknown, "a中b\nab".encode()) == [2, 3, 2, 3]


# --- the vocabulary turned around


@pytest.mark.parametrize("adds_space", [False, True])
def test_of_a_byte_and_a_character_the_tokenizers_choice_is_found(adds_space: bool) -> None:
    # Byte tokens come first, as SentencePiece has them; the tokenizer takes the characters.
    made = vocabulary([*BYTES, b"a", b"b", b" "], adds_space=adds_space)
    lexicon = Lexicon(made)
    assert [lexicon.tokens[piece] for piece in (b"a", b"b", b" ")] == [256, 257, 258]
    assert lexicon.tokens[b"c"] == ord("c")


# --- control tokens


def test_control_tokens_go_by_name_and_then_by_role() -> None:
    source = vocabulary(
        [b"a"], ["<s>", "</s>", "<|eot|>", "<pad>", "<|im_start|>"], eos="</s>", eot="<|eot|>"
    )
    bos, eos, eot, pad, start = range(1, 6)
    same = vocabulary([b"x", b"y"], ["<|im_start|>", "</s>", "<|eot|>"], eos="</s>", eot="<|eot|>")

    def found(destination: FakeVocabulary) -> list[int | None]:
        tokens = (bos, eos, eot, pad, start)
        return [counterpart(token, source, destination) for token in tokens]

    assert found(same) == [None, 3, 4, None, 2]
    other = vocabulary([b"x"], ["<|im_end|>", "<|eos|>"], eos="<|eos|>", eot="<|im_end|>")
    assert found(other) == [None, 2, 1, None, None]
    assert found(vocabulary([b"x"], ["<|eos|>"])) == [None, 1, 1, None, None]
    assert found(vocabulary([b"x"])) == [None] * 5


# --- the text as it grows (`test_translated_loop.py` has what it says, byte for byte)


def test_no_token_reaches_over_a_control_token() -> None:
    target = vocabulary([b"a", b"b"], ["</s>", "<pad>"])
    draft = vocabulary([b"a", b"b", b"ab", b"ba"], ["</s>"])
    text, context = Translation(target, draft).text([0], [7, 7]), [0]

    def follow(*tokens: int) -> list[int]:
        context.extend(tokens)
        text.follow(context)
        return text.tokens

    assert follow(0, 3, 1) == [7, 7, 0, 1]  # a pad b: the draft has no token for the one between
    assert text.last_bytes(9) == b"b"
    assert (text.ending(1), text.ending(2)) == (b"b", b"")
    assert follow(2, 0, 1) == [7, 7, 0, 1, 4, 2]


def test_drafted_tokens_that_the_text_took_stay() -> None:
    """The draft's own spelling, which is not its tokenizer's: its cache holds it."""
    target = vocabulary([b"a", b"b"], ["</s>"])
    draft = vocabulary([b"a", b"b", b"ab"], ["</s>"])
    text = Translation(target, draft).text([0], [])
    drafted = Draft.chain([0, 1, 0, 1], "model")
    text.follow([0, 0, 1, 0], drafted)
    assert text.tokens == [0, 1, 0]
    text.follow([0, 0, 1, 0, 0])  # another way
    assert text.tokens == [0, 1, 0, 0]


@given(vocabularies(spells_all=True, merges=False, n_longest=4), st.data())
def test_a_text_in_pieces_is_spelled_as_the_whole(
    draft: FakeVocabulary, data: st.DataObject
) -> None:
    """A tokenizer that takes the longest piece does not look back, so its spelling is the same."""
    one = st.integers(0, WHOLE.n_tokens - 2)
    text, context = Translation(WHOLE, draft).text([0], []), [0]
    for _ in range(3):
        context += data.draw(st.lists(one, max_size=12))
        text.follow(context)
        n_held = data.draw(st.integers(1, 4))
        if text.ending(n_held):
            text.hold_back(n_held)  # the next text brings it again
    context += data.draw(st.lists(one, max_size=12))
    text.follow(context)
    assert text.tokens == spelled(draft, joined(WHOLE, context[1:]))


#: Whole characters, and an end.
WHOLE = vocabulary([character.encode() for character in "thecai:nсx中文字é😀 \n\t."], ["</s>"])


@pytest.mark.parametrize("spells_all", [True, False])
def test_the_cost_of_a_step_does_not_grow_with_the_text(spells_all: bool) -> None:
    """Counted in bytes that are tokenized, not in time."""
    words = [b"the", b" the", b"cat", b" ca", b"tthe", b"\n"]
    inner = vocabulary([*words, *(BYTES if spells_all else [b"t", b"h"])], ["</s>"])
    target = vocabulary(BYTES, ["</s>"])
    for said in (b"the cat", "中文".encode(), b"zzzzz", b"the " * 2):
        draft = CountingVocabulary.of(inner)
        text, context = Translation(target, draft).text([0], []), [0]
        costs: list[int] = []
        draft.counts.clear()
        for token in spelled(target, said * 60):
            context.append(token)
            text.follow(context)
            costs.append(sum(draft.counts))
            draft.counts.clear()
        assert max(costs[len(said) * 30 :]) <= max(costs[: len(said) * 30]) <= 600
        assert sum(costs) / len(costs) <= 400
        for token, end in zip(text.tokens, text.ends, strict=True):
            piece = draft.token_bytes(token)
            assert (said * 60)[end - len(piece) : end] == piece


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
