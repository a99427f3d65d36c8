"""The recent speed of an answer."""

from __future__ import annotations

#: How much of the pace each round settles, later on.
_RATE = 0.06
#: At first, and when a draft model begins, the rounds since then count alike, and what was before
#: as so many of them: an answer has few rounds, and a pace that follows slowly takes a token for
#: dearer than it has become, so that drafts are too long. (In replays of 75 answers with four tables
#: this was 0.99 to 1.014 times as fast, and the worst answer of no table slower.)
_N_BEFORE = 4.0


class Pace:
    """Seconds for a token, tokens a round, and who drafts, in the rounds of late."""

    def __init__(self) -> None:
        #: None before the first round.
        self.token_s: float | None = None
        self.tokens_a_round = 1.0
        #: The share of rounds in which n-grams did not draft: those that are left to a model.
        self.left_by_ngrams = 1.0
        self._n_rounds = 0

    def begin_anew(self) -> None:
        """What comes now is another matter."""
        self._n_rounds = 0

    def observe(self, round_s: float, n_tokens: int, plain_s: float, *, by_ngrams: bool) -> None:
        """Enter a round that took so long and added so many tokens, and whether n-grams drafted in it;
        a plain decode takes `plain_s`."""
        before_s = plain_s if self.token_s is None else self.token_s
        self._n_rounds += 1
        rate = max(_RATE, 1.0 / (self._n_rounds + _N_BEFORE))
        # Seconds and tokens are averaged apart: the mean of their ratios is another thing.
        mean_round_s = before_s * self.tokens_a_round
        mean_round_s += rate * (round_s - mean_round_s)
        self.tokens_a_round += rate * (n_tokens - self.tokens_a_round)
        self.token_s = mean_round_s / self.tokens_a_round
        self.left_by_ngrams += rate * ((not by_ngrams) - self.left_by_ngrams)
