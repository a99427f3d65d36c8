"""The probabilities that a row of logits means by itself: before samplers, at temperature 1."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specgen.errors import BackendError
from specgen.system.arrays import Logits, best

#: The kernel library's function for `likeliest`, once the library is attached. Its source says what
#: it computes, and how exactly.
native_likeliest: Callable[..., float] | None = None
#: The most tokens that it is asked for. The types of its results are made here, once, because
#: making them takes longer than calling it.
_MOST_NATIVE = 64
_TokenBuffer = ctypes.c_int32 * _MOST_NATIVE
_ScoreBuffer = ctypes.c_float * _MOST_NATIVE


def likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Return the n most likely tokens of a row, and their probabilities.

    Args:
        logits: float32[n_vocab].
        n: How many tokens to return. Among equals, lower ids come first.

    Raises:
        BackendError: The largest logit is not finite.
    """
    if native_likeliest is not None and n <= _MOST_NATIVE and logits.flags.carray:
        row = ctypes.c_float.from_buffer(logits.data)
        token_ids = _TokenBuffer()
        scores = _ScoreBuffer()
        total = native_likeliest(ctypes.addressof(row), len(logits), n, token_ids, scores)
        if 0.0 < total < math.inf:
            found = [token_id for token_id in token_ids[:n] if token_id >= 0]
            return found, _probabilities(scores[: len(found)], total)
    return numpy_likeliest(logits, n)


def numpy_likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Compute `likeliest` without the kernel library."""
    top = float(logits.max())
    if not math.isfinite(top):
        raise not_finite(top)
    token_ids = best(logits, n)
    total = float(np.exp(logits - np.float32(top)).sum())
    return token_ids.tolist(), _probabilities(logits[token_ids].tolist(), total)


def _probabilities(logits: Sequence[float], total: float) -> list[float]:
    """Return probabilities from logits, the largest first, and the sum of exp(logit - largest)."""
    return [math.exp(logit - logits[0]) / total for logit in logits]


def log_probabilities(logits: Logits, token_ids: Iterable[int]) -> list[float]:
    """Return the natural logarithms of some tokens' probabilities.

    Args:
        logits: float32[n_vocab].
        token_ids: The tokens.
    """
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]


def not_finite(logit: float) -> BackendError:
    """Return the error for a row whose largest logit is infinite or not a number."""
    return BackendError(
        f"the model's largest logit is {logit}: the file is damaged, or this build of llama.cpp "
        "computes wrongly on this machine",
        hint="run `specgen doctor`",
    )
