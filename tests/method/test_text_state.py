"""The text as samplers see it; what they make of it along paths is tested in `test_constrained.py`."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.text.text_state import TextState


@settings(max_examples=80)
@given(st.data())
def test_a_history_is_the_end_of_the_text_and_the_path(data: st.DataObject) -> None:
    """However the text grows, over many times the room that there is at first; a path leaves nothing behind."""
    text = list(range(5))
    state = TextState(text)
    for _ in range(data.draw(st.integers(1, 12))):
        new = list(range(data.draw(st.integers(0, 900))))
        for token in new:
            state.commit(token)
        text = text + new
        path = list(range(100, 100 + data.draw(st.integers(0, 2000))))
        n_last, whole = data.draw(st.integers(-1, 1500)), text + path
        history = state.history(path, n_last)
        assert history.dtype == np.int64
        assert history.tolist() == (whole if n_last < 0 else whole[max(0, len(whole) - n_last) :])
        assert state.history([*path, 7, 8], -1).tolist() == [*whole, 7, 8]
        assert state.history((), -1).tolist() == state.tokens == text
