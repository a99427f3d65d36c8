"""Vocabularies: whether two are the same, and the translation of texts and drafts between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.lexicon import Lexicon, counterpart, n_incomplete_bytes
from specgen.drafters.translated import PrefixPipeline, Translation
from specgen.drafters.vocabularies import check_pair
from specgen.errors import PairError
from specgen.method.draft import Draft
from tests.helpers.common import BYTES
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import (
    CountingVocabulary,
    broken_texts,
    joined,
    target_texts,
    vocabularies,
    vocabulary,
)

pytestmark = pytest.mark.slow

# --- pairs


UNUSED = 2


@dataclass(frozen=True)
class Table:
    entries: tuple[bytes, ...] = (b"<s>", b"</s>", b"a", b"b", b"ab")
    kind: int = 2
    add_bos: bool = False
    special: dict[str, int] = field(default_factory=lambda: {"bos": 0, "eos": 1, "eot": -1})
    unused: frozenset[int] = frozenset()

    @property
    def n_tokens(self) -> int:
        return len(self.entries)

    def token_entry(self, token_id: int) -> bytes:
        return self.entries[token_id]

    def token_text(self, token_id: int) -> str:
        return self.entries[token_id].decode("utf-8", "replace")

    def token_entries(self) -> Sequence[bytes]:
        return self.entries

    def token_attributes(self, token_id: int) -> int:
        return UNUSED if token_id in self.unused else 4

    def special_tokens(self) -> dict[str, int]:
        return self.special


TABLE: Any = Table()


TEN = replace(TABLE, entries=tuple(b"%d" % i for i in range(10)))
MORE = replace(TABLE, entries=(*TABLE.entries, b"<|call|>"))


@pytest.mark.parametrize(
    "padded",
    [
        TABLE,
        *(
            replace(TABLE, entries=(*TABLE.entries, each, each))
            for each in (b"[PAD5]", b"<pad>", b"")
        ),
        replace(MORE, unused=frozenset({5})),
    ],
)
def test_padding_at_the_end_of_either_is_fine(padded: Any) -> None:
    assert check_pair(TABLE, padded, "t", "d") == 5
    assert check_pair(padded, TABLE, "t", "d") == 5


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (MORE, TABLE, "1 tokens exist in big.gguf only: 5 '<|call|>'"),
        (TABLE, MORE, "1 tokens exist in small.gguf only: 5 '<|call|>'"),
        (
            TABLE,
            replace(TABLE, entries=(b"<s>", b"</s>", b"a", b"c", b"\xff")),
            "2 of 5 tokens differ: 3 'b' and 3 'c'",
        ),
        (
            TEN,
            replace(TEN, entries=(*TEN.entries[:5], *[b"x"] * 5)),
            "5 of 10 tokens differ: 5 '5' and 5 'x'",
        ),
        (
            TABLE,
            replace(TABLE, entries=(b"1", b"2", b"3", b"4", b"5")),
            "5 of 5 tokens differ: each has a vocabulary of its own",
        ),
        (TABLE, replace(TABLE, kind=1), "their tokenizers are of different kinds"),
        (
            TABLE,
            replace(TABLE, special={"bos": 0, "eos": 2, "eot": -1}),
            "their eos tokens differ: 1 '</s>' and 2 'a'",
        ),
        (
            TABLE,
            replace(TABLE, special={"bos": 0, "eos": 1, "eot": 4}),
            "their eot tokens differ: none and 4 'ab'",
        ),
        (TABLE, replace(TABLE, add_bos=True), "only small.gguf begins a text with a bos token"),
    ],
)
def test_differences_are_named_and_counted(target: Any, draft: Any, message: str) -> None:
    with pytest.raises(PairError) as caught:
        check_pair(target, draft, "big.gguf", "small.gguf")
    assert caught.value.message.startswith("small.gguf cannot draft for big.gguf: ")
    assert caught.value.message.endswith(message)
    assert caught.value.hint


def spelled(vocabulary: FakeVocabulary, data: bytes) -> list[int]:
    return [token for token, _ in Lexicon(vocabulary).spell(data)]


# --- bytes as tokens


def test_a_token_for_the_unknown_is_never_text() -> None:
    class WithUnknown(FakeVocabulary):
        """Says token 0 for each byte that has no token."""

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            known = {self.pieces[token]: token for token in range(1, self.n_tokens)}
            return [known.get(bytes((byte,)), 0) for byte in f" {text}".encode()]

    unknown = WithUnknown((b"<unk>", b" ", b"a", b"b"), controls=frozenset({0}))
    assert spelled(unknown, "a中b\nab".encode()) == [2, 3, 2, 3]


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


# --- the text as it grows (`test_translated_loop.py` compares it byte for byte)


def test_no_token_spans_a_control_token() -> None:
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


def chain(tokens: Sequence[int], probabilities: Sequence[float | None] = ()) -> Draft:
    return Draft.chain(tokens, "model", probabilities)


def said_by(vocabulary: FakeVocabulary, tokens: Sequence[int]) -> tuple[bytes, int | None]:
    """The bytes of a branch up to its first control token, and that token."""
    for n, token in enumerate(tokens):
        if not vocabulary.token_bytes(token):
            return joined(vocabulary, tokens[:n]), token
    return joined(vocabulary, tokens), None


# --- strings


@given(vocabularies(), vocabularies(), broken_texts(), st.data())
def test_a_translated_chain_has_the_bytes_of_the_draft(
    target: FakeVocabulary, draft: FakeVocabulary, before: bytes, data: st.DataObject
) -> None:
    translation = Translation(target, draft)
    tokens = data.draw(target_texts(draft, 8))
    said, last = said_by(draft, tokens)
    held_back = said[: data.draw(st.integers(0, len(said)))]
    if data.draw(st.booleans()):
        held_back += data.draw(st.binary(max_size=2))  # the draft may begin differently
    before += held_back
    translated = translation.translate(chain(tokens), before, held_back)
    assert translated.is_chain
    assert not translated.is_sampled
    if not said.startswith(held_back):
        assert len(translated) == 0
        return
    rest = said[len(held_back) :]
    ends = [target.is_end(token) for token in translated.tokens]
    assert not any(ends[:-1])
    text = [token for token in translated.tokens if not target.is_end(token)]
    assert all(map(target.token_bytes, text))
    told = joined(target, text)
    assert rest.startswith(told)
    n_open = n_incomplete_bytes(before + rest)
    is_broken_off = n_open > len(rest)  # the text itself is: whatever is known must do
    if not is_broken_off:
        rest = rest[: len(rest) - n_open]
    if len(target.pieces) > 256:  # all bytes have tokens, so every complete character is translated
        assert told == rest
    if any(ends):
        assert last is not None
        assert draft.is_end(last)
        assert told == rest
        assert n_open == 0
    elif last is not None and draft.is_end(last) and told == rest and n_open == 0:
        assert not target.ends


def test_ends_go_by_role_and_only_after_whole_text() -> None:
    target = vocabulary([*BYTES[:0x80], "é".encode()], ["</s>", "<|im_end|>"], eot="<|im_end|>")
    eos, eot = 129, 130
    draft = vocabulary([*BYTES], ["<|eos|>", "<|eot|>", "<pad>"], eos="<|eos|>", eot="<|eot|>")
    strings = Translation(target, draft)

    def translate(tokens: Sequence[int], held_back: bytes = b"") -> tuple[int, ...]:
        return strings.translate(chain(tokens), b"x" + held_back, held_back).tokens

    a = ord("a")
    assert translate([a, 256]) == (a, eos)
    assert translate([a, 257]) == (a, eot)
    assert translate([256]) == (eos,)
    assert translate([a, 258, a]) == (a,)  # a control token that ends nothing ends the draft
    assert translate([a, 0xC3, 256]) == (a,)  # half a character
    assert translate([a, 0xC3, 0xA9, 256]) == (a, 128, eos)
    assert translate([a, 0xE4, 0xB8, 0xAD, 256]) == (a,)  # the target has no such character
    assert translate([a, 256], held_back=b"a") == (eos,)
    assert translate([256], held_back=b"a") == ()  # the held-back byte is still missing
    assert translate([a, 256, a]) == (a, eos)


def test_text_is_spelled_as_a_continuation_of_the_text_before() -> None:
    # Merges: "ab" is made first, so that "abc" is "ab" and "c"; but "bc" by itself is one.
    target = vocabulary([b"ab", b"bc", b"a", b"b", b"c"], merges=True)
    strings = Translation(target, vocabulary([b"a", b"b", b"c"]))
    assert strings.translate(chain([1, 2]), b"", b"").tokens == (1,)
    assert strings.translate(chain([1, 2]), b"a", b"").tokens == (3, 4)
    assert strings.translate(chain([0, 1, 2]), b"a", b"a").tokens == (3, 4)
    assert strings.translate(chain([1, 2]), b"c", b"").tokens == (1,)


def test_a_tokens_probability_is_that_of_the_draft_tokens_that_begin_in_it() -> None:
    target = vocabulary([b"a", b"b", b"c", b"abc", b"bc"], ["</s>"])
    draft = vocabulary([b"a", b"b", b"c", b"ca", b"cab"], ["</s>"])
    strings = Translation(target, draft)

    def likely(
        tokens: Sequence[int], probabilities: Sequence[float | None], held_back: bytes = b""
    ) -> list[tuple[int, float | None]]:
        made = strings.translate(chain(tokens, probabilities), held_back, held_back)
        return list(zip(made.tokens, made.probabilities, strict=True))

    assert likely([0, 1, 2], [0.5, 0.5, 0.25]) == [(3, 0.0625)]
    assert likely([0, 1, 2, 5], [0.5, 0.5, None, 0.75]) == [(3, None), (5, 0.75)]
    # If the target spells a token as several, the first one gets its probability.
    assert likely([4], [0.5], b"c") == [(0, 0.5), (1, 1.0)]


# --- drafts that must begin with a prefix


def test_a_prefix_is_completed_by_the_likeliest_token() -> None:
    draft = vocabulary([b"\n", b"\n  ", b"\n\n", b"a", b" ", b"\n\t"], ["</s>"])
    pipeline = PrefixPipeline(Lexicon(draft))
    logits = np.array([0.0, 2.0, 1.0, 9.0, 3.0, -1.0, 5.0], np.float32)
    plain = pipeline.distribution(logits)
    assert plain.mode == 3
    pipeline.prefix = b"\n"
    assert pipeline.distribution(logits).token_ids.tolist() == [1]
    weights = np.exp([0.0, 2.0, 1.0, -1.0])
    assert pipeline.likeliest(logits, [], 1)[1] == [pytest.approx(weights.max() / weights.sum())]
    # Only the first token is bound.
    assert pipeline.distribution(logits, [1]).mode == 3
    assert pipeline.likeliest(logits, [1], 1)[1][0] < 1.0
    pipeline.prefix = b"\n\n"
    assert pipeline.distribution(logits).token_ids.tolist() == [2]
    assert pipeline.likeliest(logits, [], 1)[1] == [pytest.approx(1.0)]
