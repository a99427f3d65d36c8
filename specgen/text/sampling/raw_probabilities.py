"""The probabilities of a row of logits before any sampler, at temperature 1."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specgen.errors import BackendError
from specgen.events import TokenLogprob
from specgen.system.arrays import Logits, best
from specgen.text.vocabulary import Vocabulary

#: The kernel library's function for `likeliest`; None until the library is attached. Its source
#: documents what it computes, and its precision.
native_likeliest: Callable[..., float] | None = None
#: The maximum number of tokens that the library is asked for.
_MAX_NATIVE = 64
# The types of its results are created once, since that takes longer than calling the function.
_TokenBuffer = ctypes.c_int32 * _MAX_NATIVE
_ScoreBuffer = ctypes.c_float * _MAX_NATIVE


def likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Return the n most likely tokens of a row, and their probabilities.

    Args:
        logits: The row, float32[n_vocab].
        n: The number of tokens. Among tokens with equal logits, lower ids come first.

    Raises:
        BackendError: If the largest logit is not finite.
    """
    if native_likeliest is not None and n <= _MAX_NATIVE and logits.flags.carray:
        row = ctypes.c_float.from_buffer(logits.data)
        token_ids = _TokenBuffer()
        scores = _ScoreBuffer()
        total = native_likeliest(ctypes.addressof(row), len(logits), n, token_ids, scores)
        if 0.0 < total < math.inf:  # otherwise a logit is not finite; NumPy finds out below
            likeliest_ids = [token_id for token_id in token_ids[:n] if token_id >= 0]
            return likeliest_ids, _probabilities(scores[: len(likeliest_ids)], total)
    return numpy_likeliest(logits, n)


def numpy_likeliest(logits: Logits, n: int) -> tuple[list[int], list[float]]:
    """Compute `likeliest` without the kernel library."""
    top = float(logits.max())
    if not math.isfinite(top):
        raise not_finite_error(top)
    token_ids = best(logits, n)
    total = float(np.exp(logits - np.float32(top)).sum())
    return token_ids.tolist(), _probabilities(logits[token_ids].tolist(), total)


def _probabilities(logits: Sequence[float], total: float) -> list[float]:
    """Return the probabilities of some tokens of a row.

    Args:
        logits: Their logits. The first one is the largest of the row.
        total: The sum of exp(logit - largest) over the whole row.
    """
    return [math.exp(logit - logits[0]) / total for logit in logits]


def log_probabilities(logits: Logits, token_ids: Iterable[int]) -> list[float]:
    """Return the natural logarithms of some tokens' probabilities.

    Args:
        logits: The row, float32[n_vocab].
        token_ids: The tokens.
    """
    top = float(logits.max())
    normalizer = top + float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
    return [float(logits[token_id]) - normalizer for token_id in token_ids]


def likely_tokens(
    logits: Logits,
    n: int,
    others: Iterable[int],
    vocabulary: Vocabulary,
) -> tuple[TokenLogprob, ...]:
    """Return the n most likely tokens of a row, in descending order, and then some others.

    Args:
        logits: The row, float32[n_vocab].
        n: The number of most likely tokens.
        others: More tokens. Those among the most likely ones are not repeated.
        vocabulary: Has the texts of the tokens.
    """
    token_ids = list(dict.fromkeys([*best(logits, n).tolist(), *others]))
    logprobs = log_probabilities(logits, token_ids)
    return tuple(
        token_logprob(token_id, logprob, vocabulary)
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    )


def token_logprob(
    token_id: int,
    logprob: float,
    vocabulary: Vocabulary,
) -> TokenLogprob:
    """Return a token with its text and bytes. Invalid UTF-8 is written as escapes."""
    data = vocabulary.token_bytes(token_id)
    text = data.decode("utf-8", "backslashreplace") or vocabulary.token_text(token_id)
    return TokenLogprob(token_id, text, logprob, tuple(data))


def not_finite_error(logit: float) -> BackendError:
    """Return the error for a row whose largest logit is infinite or not a number."""
    return BackendError(
        f"the model's largest logit is {logit}: the file is damaged, or this build of llama.cpp "
        "computes wrongly on this machine",
        hint="run `specgen doctor`",
    )
