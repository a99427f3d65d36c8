"""What a draft says, in the target's tokens: as text, and token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgen.drafters.translation import (
    Lexicon,
    PrefixShaper,
    SharedShaper,
    SharedTokens,
    Translation,
)
from specgen.drafters.translation.string_translation import n_unfinished
from specgen.method.draft import ROOT, Draft
from specgen.options import SamplerOptions
from specgen.text.sampling import Distribution, NoTokenAllowedError, Sampler
from specgen.text.text_state import Shaper, TextState
from tests.helpers.common import BYTES
from tests.helpers.fake_backend import FakeVocabulary
from tests.helpers.fake_grammar import FakeGrammar
from tests.helpers.vocabularies import broken_texts, joined, target_texts, vocabularies, vocabulary


def chain(tokens: Sequence[int], probabilities: Sequence[float | None] | None = None) -> Draft:
    return Draft.chain(tokens, "model", probabilities)


@st.composite
def trees(draw: st.DrawFn, vocabulary: FakeVocabulary, *, max_size: int = 8) -> Draft:
    tokens = draw(st.lists(st.integers(0, vocabulary.n_tokens - 1), max_size=max_size))
    n = len(tokens)
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(n))
    return Draft(tuple(tokens), parents, ("t",) * n, (None,) * n, (None,) * n)


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
    translated = translation.strings.translate(chain(tokens), before, held_back)
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


@given(vocabularies(), vocabularies(), broken_texts(), st.data())
def test_each_branch_of_a_tree_is_translated_as_by_itself(
    target: FakeVocabulary, draft: FakeVocabulary, before: bytes, data: st.DataObject
) -> None:
    strings = Translation(target, draft).strings
    tree = data.draw(trees(draft))
    translated = strings.translate(tree, before, b"")
    expected = {strings.translate(chain(tree.text(leaf)), before, b"").tokens
                for leaf in tree.leaves()}  # fmt: skip
    # Branches that begin alike are one as far as they do.
    found = {translated.text(node) for node in range(len(translated))}
    beginnings = {text[:n] for text in expected for n in range(1, len(text) + 1)}
    assert found == beginnings
    assert len(found) == len(translated)


def test_ends_go_by_role_and_only_after_whole_text() -> None:
    target = vocabulary([*BYTES[:0x80], "é".encode()], ["</s>", "<|im_end|>"], eot="<|im_end|>")
    eos, eot = 129, 130
    draft = vocabulary([*BYTES], ["<|eos|>", "<|eot|>", "<pad>"], eos="<|eos|>", eot="<|eot|>")
    strings = Translation(target, draft).strings

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


def test_no_half_character_is_proposed_unless_the_text_broke_off_in_one() -> None:
    target = vocabulary([*BYTES, "中".encode(), b"ab"], ["</s>"])
    strings = Translation(target, vocabulary(BYTES)).strings
    first, second, third = "中".encode()
    a, b = b"ab"

    def translate(tokens: Sequence[int], before: bytes) -> tuple[int, ...]:
        return strings.translate(chain(tokens), before, b"").tokens

    assert translate([a, first, second], b"") == (a,)
    assert translate([a, first, second, third], b"") == (a, 256)
    assert translate([second], bytes((first,))) == (second,)
    assert translate([second, third, a], bytes((first,))) == (second, third, a)
    assert translate([second, third, first], bytes((first,))) == (second, third)
    assert translate([third, a, b], bytes((first, second))) == (third, 257)


def test_text_is_spelled_as_it_goes_on_from_the_text_before() -> None:
    # Merges: "ab" is made first, so that "abc" is "ab" and "c"; but "bc" by itself is one.
    target = vocabulary([b"ab", b"bc", b"a", b"b", b"c"], merges=True)
    strings = Translation(target, vocabulary([b"a", b"b", b"c"])).strings
    assert strings.translate(chain([1, 2]), b"", b"").tokens == (1,)
    assert strings.translate(chain([1, 2]), b"a", b"").tokens == (3, 4)
    assert strings.translate(chain([0, 1, 2]), b"a", b"a").tokens == (3, 4)
    assert strings.translate(chain([1, 2]), b"c", b"").tokens == (1,)


def test_a_token_is_as_likely_as_what_begins_in_it() -> None:
    target = vocabulary([b"a", b"b", b"c", b"abc", b"bc"], ["</s>"])
    draft = vocabulary([b"a", b"b", b"c", b"ca", b"cab"], ["</s>"])
    strings = Translation(target, draft).strings

    def likely(
        tokens: Sequence[int], probabilities: Sequence[float | None], held_back: bytes = b""
    ) -> list[tuple[int, float | None]]:
        made = strings.translate(chain(tokens, probabilities), held_back, held_back)
        return list(zip(made.tokens, made.probabilities, strict=True))

    assert likely([0, 1, 2], [0.5, 0.5, 0.25]) == [(3, 0.0625)]
    assert likely([0, 1, 2, 5], [0.5, 0.5, None, 0.75]) == [(3, None), (5, 0.75)]
    # Of a token that the target spells as several, the first one has the doubt.
    assert likely([4], [0.5], b"c") == [(0, 0.5), (1, 1.0)]


# --- token by token


@given(vocabularies(), vocabularies())
def test_shared_tokens_stand_for_the_same(target: FakeVocabulary, draft: FakeVocabulary) -> None:
    shared = Translation(target, draft).shared
    assert len(shared) == len(shared.target_ids) == len(shared.draft_ids)
    assert (np.diff(shared.target_ids) > 0).all()
    assert len(set(shared.draft_ids.tolist())) == len(shared)
    for ours, theirs in zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True):
        assert target.token_bytes(ours) == draft.token_bytes(theirs)
        assert target.is_end(ours) == draft.is_end(theirs)
        assert target.token_bytes(ours) or target.is_end(ours)
        assert shared.target_tokens([theirs]) == [ours]
    # Nothing is left out.
    found = {target.token_bytes(int(token)) for token in shared.target_ids}
    assert found - {b""} == set(Lexicon(target).tokens) & set(Lexicon(draft).tokens)
    n_ends = sum(map(target.is_end, shared.target_ids.tolist()))
    assert (n_ends > 0) == bool(target.ends and draft.ends)


def test_of_several_ends_the_one_with_the_same_name_or_role_is_shared() -> None:
    target = vocabulary([b"a"], ["</s>"])
    draft = vocabulary([b"a"], ["<|eot|>", "</s>"], eot="<|eot|>", eos="</s>")
    assert Translation(target, draft).shared.draft_ids.tolist() == [0, 2]
    target = vocabulary([b"a"], ["<|eos|>"])
    draft = vocabulary([b"a"], ["<|eot|>", "</s>"], eot="<|eot|>", eos="</s>")
    assert Translation(target, draft).shared.draft_ids.tolist() == [0, 2]
    target = vocabulary([b"a"], ["<|im_end|>", "<|eos|>"], eos="<|eos|>", eot="<|im_end|>")
    shared = Translation(target, draft).shared
    assert (shared.target_ids.tolist(), shared.draft_ids.tolist()) == ([0, 1, 2], [0, 1, 2])


def normalized(row: Sequence[float]) -> Distribution:
    probs = np.array(row)
    kept = np.flatnonzero(probs)
    return Distribution(kept, probs[kept] / probs[kept].sum())


@given(vocabularies(), vocabularies(), st.data())
def test_distributions_are_restricted_to_what_is_shared(
    target: FakeVocabulary, draft: FakeVocabulary, data: st.DataObject
) -> None:
    shared = Translation(target, draft).shared
    n = target.n_tokens
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    row = rng.random(n) * (rng.random(n) < data.draw(st.sampled_from([0.05, 0.5, 1.0])))
    row[rng.integers(n)] += 0.1
    source = normalized(row.tolist())
    found = shared.to_draft(source)
    mass = sum(source.probability(int(token)) for token in shared.target_ids)
    if found is None:
        assert mass == 0.0
        return
    assert (np.diff(found.token_ids) > 0).all()
    assert (found.probs > 0).all()
    assert found.probs.sum() == pytest.approx(1.0)
    for ours, theirs in zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True):
        assert found.probability(theirs) == pytest.approx(source.probability(ours) / mass)


@given(vocabularies(), vocabularies(), st.data())
def test_a_draft_is_translated_up_to_what_is_not_shared(
    target: FakeVocabulary, draft: FakeVocabulary, data: st.DataObject
) -> None:
    shared = Translation(target, draft).shared
    tree = data.draw(trees(draft))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sources: list[Distribution | None] = []
    for token in tree.tokens:
        row = rng.random(draft.n_tokens)
        row[token] += 0.1
        sources.append(normalized(row.tolist()) if rng.random() < 0.8 else None)
    n = len(tree)
    tree = Draft(tree.tokens, tree.parents, tree.origins, (0.5,) * n, tuple(sources))
    translated = shared.translate(tree)
    to_target = dict(zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True))
    kept = [
        node
        for node in range(n)
        if all(tree.tokens[above] in to_target for above in tree.path(node))
    ]
    assert translated.tokens == tuple(to_target[tree.tokens[node]] for node in kept)
    for number, node in enumerate(kept):
        parent = tree.parents[node]
        assert translated.parents[number] == (ROOT if parent == ROOT else kept.index(parent))
        source, made = sources[node], translated.distributions[number]
        assert (source is None) == (made is None)
        if source is None or made is None:
            continue
        mass = sum(source.probability(token) for token in to_target)
        assert (np.diff(made.token_ids) > 0).all()
        for theirs, ours in to_target.items():
            assert made.probability(ours) == pytest.approx(source.probability(theirs) / mass)


# --- sampling among the shared tokens

LETTERS = vocabulary([b"a", b"b", b"c", b"d", b"ab"], ["</s>"])
OTHERS = vocabulary([b"x", b"d", b"c", b"bc", b"b", b"a"], ["<|eos|>"])
#: By the target's tokens, those of the draft.
PAIRS = {0: 5, 1: 4, 2: 2, 3: 1, 5: 6}

SAMPLERS = {
    "plain": SamplerOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "default": SamplerOptions(temperature=0.8),
    "greedy": SamplerOptions(),
    "others": SamplerOptions(temperature=0.9, typical_p=0.7, top_n_sigma=1.0, dynatemp_range=0.5),
    "XTC": SamplerOptions(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.1),
    "penalties": SamplerOptions(
        temperature=1.0, repeat_penalty=1.5, frequency_penalty=0.3, logit_bias=((1, 2.0),)
    ),
}


def shared_shaper(
    options: SamplerOptions, state: TextState
) -> tuple[SharedTokens, SharedShaper, Shaper]:
    shared = Translation(LETTERS, OTHERS).shared
    inner = Shaper(Sampler(options), state)
    return shared, SharedShaper(shared, inner), inner


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_see_the_targets_tokens(name: str) -> None:
    """The draft's logits, put where the target has its tokens, and sampled as the target's."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        history = rng.integers(0, 6, size=5).tolist()
        _, shaper, inner = shared_shaper(SAMPLERS[name], TextState(history))
        logits = rng.normal(0.0, 2.0, OTHERS.n_tokens).astype(np.float32)
        before = logits.copy()
        row = np.full(LETTERS.n_tokens, -np.inf, np.float32)
        for ours, theirs in PAIRS.items():
            row[ours] = logits[theirs]
        expected = inner.distribution(row, [3, 1])
        for _ in range(2):  # what the samplers did to the row is undone
            found = shaper.distribution(logits, [1, 4])
            assert found.token_ids.tolist() == sorted(PAIRS[t] for t in expected.token_ids.tolist())
            for ours, theirs in PAIRS.items():
                assert found.probability(theirs) == pytest.approx(expected.probability(ours))
        assert (logits == before).all()
        assert shaper.top_probability(logits, [1]) == pytest.approx(
            float(np.exp(logits - logits.max()).sum() ** -1)
        )


def test_a_grammar_holds_among_the_shared_tokens() -> None:
    logits = np.zeros(OTHERS.n_tokens, np.float32)
    # "ab" has no counterpart: where the grammar leaves nothing else, nothing is drafted.
    grammar = FakeGrammar({0: {4: 1}, 1: {3: 2, 1: 2}}).start
    _, shaper, _ = shared_shaper(SAMPLERS["plain"], TextState([0], grammar))
    with pytest.raises(NoTokenAllowedError):
        shaper.distribution(logits)
    state = TextState([0], grammar)
    state.commit(4)
    _, shaper, _ = shared_shaper(SAMPLERS["plain"], state)
    assert shaper.distribution(logits).token_ids.tolist() == [1, 4]


# --- drafts that must begin with something


def test_a_beginning_is_finished_as_the_draft_thinks_likeliest() -> None:
    draft = vocabulary([b"\n", b"\n  ", b"\n\n", b"a", b" ", b"\n\t"], ["</s>"])
    shaper = PrefixShaper(Sampler(SamplerOptions()), Lexicon(draft))
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


def test_an_end_that_is_ignored_is_not_drafted_either() -> None:
    draft = vocabulary([b"a", b"b"], ["</s>"])
    never = SamplerOptions(logit_bias=((2, -math.inf),))
    shaper = PrefixShaper(Sampler(never), Lexicon(draft))
    assert shaper.distribution(np.array([0.0, 1.0, 9.0], np.float32)).mode == 1


def test_a_translation_reads_each_vocabulary_once() -> None:
    translation = Translation(LETTERS, OTHERS)
    assert translation.shared is translation.shared
    assert translation.strings is translation.strings
