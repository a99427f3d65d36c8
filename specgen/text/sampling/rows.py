"""What a row of logits says by itself, before samplers and grammar: its most likely tokens, and probabilities at
temperature 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import Logits, best

#: If a row's largest logit is this near to 0, the sum of all e^logit is an ordinary float32, and terms
#: that underflow to 0 do not matter.
_EXP_RANGE = 60.0


def argmax(logits: Logits) -> int:
    """Return the most likely token of a row, float32[n_vocab]; the lowest id among equals.

    Raise `BackendError` if the largest logit is not finite: NaN would win every comparison.
    """
    token_id = int(logits.argmax())
    check_finite(float(logits[token_id]))
    return token_id


def top_probability(logits: Logits) -> float:
    """Return the largest probability of a row at temperature 1, before any truncation."""
    top = float(logits[logits.argmax()])
    check_finite(top)
    if abs(top) < _EXP_RANGE:  # spares a pass over the row
        masses = np.exp(logits)
        return math.exp(top) / float(masses.sum())
    with np.errstate(over="ignore"):  # from one end of float32 to the other
        masses = logits - np.float32(top)
    np.exp(masses, out=masses)  # in place: another row of a large vocabulary leaves the CPU's cache
    return 1.0 / float(masses.sum())


def check_finite(logit: float) -> None:
    """Raise `BackendError` if the largest logit of a row is not finite."""
    if not math.isfinite(logit):
        raise BackendError(
            f"the model's largest logit is {logit}: the file is damaged, or this build of "
            "llama.cpp computes wrongly on this machine",
            hint="run `specgen doctor`",
        )


def log_probabilities(logits: Logits, token_ids: Sequence[int]) -> list[float]:
    """Return the natural logarithms of these tokens' probabilities, from a row of logits, float32[n_vocab];
    -inf for an impossible token."""
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]


def most_likely(logits: Logits, n: int) -> list[int]:
    """Return the n most likely tokens of a row, float32[n_vocab], the likeliest first."""
    return best(logits, n).tolist() if n > 0 else []
