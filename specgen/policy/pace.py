"""The recent speed of an answer."""

from __future__ import annotations

#: The weight of a new round in the averages, once there were many.
_RATE = 0.06
#: At first, and after a draft model starts, the rounds since then count equally, and all before as this
#: many of them. An answer has few rounds, and an average that follows slowly overestimates the time of a
#: token, so that drafts are too long. (In replays of 75 answers with four cost tables this was 0.99 to
#: 1.014 times as fast, and the worst answer was slower with none of them.)
_N_BEFORE = 4.0


class Pace:
    """Averages over recent rounds: seconds a token, tokens a round, and rounds without n-grams."""

    def __init__(self) -> None:
        #: Seconds a token; None before the first round.
        self.token_s: float | None = None
        self.tokens_a_round = 1.0
        #: The share of rounds in which n-grams did not draft, which are left to a model.
        self.left_by_ngrams = 1.0
        self._n_rounds = 0

    def begin_anew(self) -> None:
        """Give less weight to the rounds so far, since the next ones differ from them."""
        self._n_rounds = 0

    def observe(self, round_s: float, n_tokens: int, plain_s: float, *, by_ngrams: bool) -> None:
        """Enter a round that took `round_s` seconds and added `n_tokens` tokens; `by_ngrams` is whether
        n-grams drafted in it. A plain decode takes `plain_s`."""
        before_s = plain_s if self.token_s is None else self.token_s
        self._n_rounds += 1
        rate = max(_RATE, 1.0 / (self._n_rounds + _N_BEFORE))
        # Seconds and tokens are averaged separately: the mean of their ratios would be a different figure.
        mean_round_s = before_s * self.tokens_a_round
        mean_round_s += rate * (round_s - mean_round_s)
        self.tokens_a_round += rate * (n_tokens - self.tokens_a_round)
        self.token_s = mean_round_s / self.tokens_a_round
        self.left_by_ngrams += rate * ((not by_ngrams) - self.left_by_ngrams)
