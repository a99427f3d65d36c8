"""What a draft says, in the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.translated import PrefixShaper, Translation
from specgen.drafters.vocabularies import Lexicon, n_unfinished
from specgen.method.draft import Draft
from tests.helpers.common import BYTES
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.vocabularies import broken_texts, joined, target_texts, vocabularies, vocabulary


def chain(tokens: Sequence[int], probabilities: Sequence[float | None] = ()) -> Draft:
    return Draft.chain(tokens, "model", probabilities)


def said_by(vocabulary: FakeVocabulary, tokens: Sequence[int]) -> tuple[bytes, int | None]:
    """What a branch says up to its first control token, and that token."""
    for n, token in enumerate(tokens):
        if not vocabulary.token_bytes(token):
            return joined(vocabulary, tokens[:n]), token
    return joined(vocabulary, tokens), None


# --- strings


@given(vocabularies(), vocabularies(), broken_texts(), st.data())
def test_a_chain_says_in_the_targets_tokens_what_the_draft_says(
    target: FakeVocabulary, draft: FakeVocabulary, before: bytes, data: st.DataObject
) -> None:
    translation = Translation(target, draft)
    tokens = data.draw(target_texts(draft, 8))
    said, last = said_by(draft, tokens)
    held_back = said[: data.draw(st.integers(0, len(said)))]
    if data.draw(st.booleans()):
        held_back += data.draw(st.binary(max_size=2))  # perhaps not what the draft says
    before += held_back
    translated = translation.translate(chain(tokens), before, held_back)
    assert translated.is_chain
    assert not translated.is_drawn
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
    n_open = n_unfinished(before + rest)
    is_broken_off = n_open > len(rest)  # the text itself is: whatever is known must do
    if not is_broken_off:
        rest = rest[: len(rest) - n_open]
    if len(target.pieces) > 256:  # all bytes have tokens, so all that is whole is told
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
    assert translate([256], held_back=b"a") == ()  # what was held back is still to be said
    assert translate([a, 256, a]) == (a, eos)


def test_text_is_spelled_as_it_goes_on_from_the_text_before() -> None:
    # Merges: "ab" is made first, so that "abc" is "ab" and "c"; but "bc" by itself is one.
    target = vocabulary([b"ab", b"bc", b"a", b"b", b"c"], merges=True)
    strings = Translation(target, vocabulary([b"a", b"b", b"c"]))
    assert strings.translate(chain([1, 2]), b"", b"").tokens == (1,)
    assert strings.translate(chain([1, 2]), b"a", b"").tokens == (3, 4)
    assert strings.translate(chain([0, 1, 2]), b"a", b"a").tokens == (3, 4)
    assert strings.translate(chain([1, 2]), b"c", b"").tokens == (1,)


def test_a_token_is_as_likely_as_what_begins_in_it() -> None:
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
    # Of a token that the target spells as several, the first one has the doubt.
    assert likely([4], [0.5], b"c") == [(0, 0.5), (1, 1.0)]


# --- drafts that must begin with something


def test_a_beginning_is_finished_as_the_draft_thinks_likeliest() -> None:
    draft = vocabulary([b"\n", b"\n  ", b"\n\n", b"a", b" ", b"\n\t"], ["</s>"])
    shaper = PrefixShaper(Lexicon(draft))
    logits = np.array([0.0, 2.0, 1.0, 9.0, 3.0, -1.0, 5.0], np.float32)
    plain = shaper.distribution(logits)
    assert plain.mode == 3
    shaper.prefix = b"\n"
    assert shaper.distribution(logits).token_ids.tolist() == [1]
    weights = np.exp([0.0, 2.0, 1.0, -1.0])
    assert shaper.top_probability(logits) == pytest.approx(weights.max() / weights.sum())
    # Only the first token is bound.
    assert shaper.distribution(logits, [1]).mode == 3
    assert shaper.top_probability(logits, [1]) < 1.0
    shaper.prefix = b"\n\n"
    assert shaper.distribution(logits).token_ids.tolist() == [2]
    assert shaper.top_probability(logits) == pytest.approx(1.0)
