"""The text as samplers see it: histories along paths, grammars along paths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.options import SamplerOptions
from specgen.text.sampling import Sampler
from specgen.text.text_state import Shaper, TextState
from tests.helpers.fake_backend import random_language
from tests.helpers.fake_grammar import FakeGrammar

N_VOCAB = 12
LANGUAGE = random_language(N_VOCAB, seed=3)
TOKENS = st.lists(st.integers(0, N_VOCAB - 1), max_size=12)
#: Looks back, so that every path has a distribution of its own.
LOOKS_BACK = SamplerOptions(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.5,
    frequency_penalty=0.5,
    dry_multiplier=0.8,
    dry_allowed_length=1,
)
#: 0 1 in turn, then (from 2) three that are forced; 5 is a dead end; 11 ends the text.
GRAMMAR = FakeGrammar(
    {0: {0: 1, 2: 2, 5: 9, 11: -1}, 1: {1: 0, 3: 0}, 2: {4: 3}, 3: {6: 4}, 4: {7: 0}, 9: {}},
    end_tokens=(11,),
)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=700),
    answer=st.lists(st.integers(0, 99), max_size=20),
    path=st.lists(st.integers(0, 99), max_size=700),
    n_last=st.integers(-1, 1500),
)
def test_a_history_is_the_end_of_the_text_and_the_path(
    prompt: list[int], answer: list[int], path: list[int], n_last: int
) -> None:
    state = TextState(prompt)
    for token in answer:
        state.commit(token)
    text = prompt + answer
    whole = text + path
    expected = whole if n_last < 0 else whole[max(0, len(whole) - n_last) :]
    # Once more after another path, and without one: a path leaves nothing behind.
    for _ in range(2):
        history = state.history(path, n_last)
        assert history.dtype == np.int64
        assert history.tolist() == expected
        assert state.history([*path, 7, 8], -1).tolist() == [*whole, 7, 8]
        assert state.history((), -1).tolist() == text
    assert state.tokens == text


@settings(max_examples=50)
@given(st.data())
def test_histories_stay_right_however_the_text_grows(data: st.DataObject) -> None:
    """Against a plain list, over many times the room that there is at first."""
    text = list(range(5))
    state = TextState(text)
    for _ in range(data.draw(st.integers(1, 12))):
        new = list(range(data.draw(st.integers(0, 900))))
        for token in new:
            state.commit(token)
        text = text + new
        path = list(range(100, 100 + data.draw(st.integers(0, 2000))))
        assert state.history(path, -1).tolist() == text + path
        assert state.tokens == text
        assert state.history((), -1).tolist() == text


@given(prompt=TOKENS.filter(bool), path=TOKENS)
def test_a_path_is_judged_as_the_committed_text_would_be(
    prompt: list[int], path: list[int]
) -> None:
    sampler = Sampler(LOOKS_BACK)
    on_path = TextState(prompt)
    committed = TextState(prompt)
    for token in path:
        committed.commit(token)
    logits = LANGUAGE((*prompt, *path))
    ours = Shaper(sampler, on_path).distribution(logits.copy(), path)
    theirs = Shaper(sampler, committed).distribution(logits.copy())
    direct = sampler.distribution(logits.copy(), np.array(prompt + path, np.int64))
    for other in (theirs, direct):
        assert ours.token_ids.tolist() == other.token_ids.tolist()
        assert ours.probs.tolist() == other.probs.tolist()
