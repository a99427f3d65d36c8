"""What the prefill of prompts costs: more for each token, the later it is in its prompt."""

from __future__ import annotations

#: The weight of a chunk halves each time that this many tokens are decoded after it.
_HALF_LIFE_TOKENS = 8192
#: The prior guess of how the time grows along a prompt counts as this many tokens.
_PRIOR_TOKENS = 128
#: The position at which a token takes twice as long as at the beginning, in models with 1.5B
#: parameters.
_DOUBLING_POSITION = 5000.0


class PrefillCosts:
    """What the prefill of prompts costs.

    The later a token is in its prompt, the longer it takes, since attention reads all tokens before
    it. The seconds per token are a line, flat_s + growth_s * position, fitted to recent chunks
    by least squares. As long as all chunks had the same position, the slope is a guess
    (`_DOUBLING_POSITION`).
    """

    def __init__(self) -> None:
        # Sums over tokens, in which old chunks fade. The unit of positions is `_DOUBLING_POSITION`.
        self._n = 0.0
        self._positions = 0.0
        self._positions_squared = 0.0
        self._seconds = 0.0
        self._seconds_times_position = 0.0

    def observe(
        self,
        start: int,
        n: int,
        seconds: float,
    ) -> None:
        """Learn from a chunk.

        Args:
            start: The number of tokens before the chunk.
            n: The number of its tokens.
            seconds: The time that they took. Chunks without a measured time are ignored.
        """
        if n <= 0 or not seconds > 0.0:
            return
        position = (start + n / 2) / _DOUBLING_POSITION  # of the chunk's middle
        decay = 0.5 ** (n / _HALF_LIFE_TOKENS)
        self._n = decay * self._n + n
        self._positions = decay * self._positions + n * position
        self._positions_squared = decay * self._positions_squared + n * position**2
        self._seconds = decay * self._seconds + seconds
        self._seconds_times_position = decay * self._seconds_times_position + seconds * position

    def seconds(self, start: int, end: int) -> float:
        """Return the expected seconds for the tokens from `start` to `end`, exclusive.

        It is 0 while nothing is known.
        """
        if not self._n or end <= start:
            return 0.0
        # The least-squares slope. The guess is that a token takes twice as long at position 1
        # as at position 0, so that a token at position -1 would take no time: `_PRIOR_TOKENS`
        # tokens at position -1 with 0 seconds are added to what was observed.
        n = self._n + _PRIOR_TOKENS
        positions = self._positions - _PRIOR_TOKENS
        positions_squared = self._positions_squared + _PRIOR_TOKENS
        covariance = n * self._seconds_times_position - positions * self._seconds
        variance = n * positions_squared - positions**2
        growth_s = max(0.0, covariance / variance)
        # The line goes through the mean of the observed tokens.
        flat_s = max(0.0, (self._seconds - growth_s * self._positions) / self._n)
        token_s = flat_s + growth_s * (start + end) / 2 / _DOUBLING_POSITION  # at the mean position
        return (end - start) * token_s
