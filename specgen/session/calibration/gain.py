"""The expected speed-up of a draft, from what decodes cost and how often the draft agrees with the target.

`specgen run` makes this estimate before a draft model is used that was never tried with its target. What is
measured instead, as in `specgen.measure.trial`, is a speed-up by the same quotient, `speedup`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specgen.method.cost_table import CostTable

#: The usual acceptance rate of draft models of the target's own family, measured here, if drafts stop
#: where the draft model is unsure.
ACCEPTANCE = 0.7
#: The least expected speed-up with which a draft is used. The margin pays for the draft's decode of the
#: prompt, and for prompts that suit it less.
WORTH = 1.1
#: A speed-up may exceed the tokens per pass by this factor before it counts as impossible.
_LEEWAY = 1.05


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target's batches by their rows, including 1 row, and seconds of a drafted token."""

    batch_s: Mapping[int, float]
    draft_token_s: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of a token in plain decoding."""
        return self.batch_s[1]

    def rows_s(self, n_rows: int) -> float:
        """Return the seconds of a batch of `n_rows` rows, as a cost table of the sizes that were timed says.

        A batch never counts as cheaper than a single token: if it was measured so, the machine was less
        busy at that time.
        """
        return max(self.token_s, CostTable(self.batch_s).seconds(n_rows))


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of places where a drafter proposed a token, and where that was the target's token."""

    n_places: int
    n_agreed: int

    @property
    def rate(self) -> float | None:
        return self.n_agreed / self.n_places if self.n_places else None


@dataclass(frozen=True, slots=True)
class Gain:
    """The best speed-up that is expected of a draft model, with `n_drafted` tokens in each round.

    `batch_tokens` is the time of the round's batch and `token_tokens` that of a drafted token, both as
    multiples of the target's time for a single token. `free_speedup` is the expected speed-up if drafting
    took no time.
    """

    n_drafted: int
    speedup: float
    batch_tokens: float
    token_tokens: float
    free_speedup: float

    @property
    def is_worth_it(self) -> bool:
        return self.speedup >= WORTH

    @property
    def rules_out_all(self) -> bool:
        """Whether the target's batches are so slow that even a draft model that takes no time would not
        pay."""
        return self.free_speedup < WORTH


def is_impossible(found: float, tokens_per_pass: float | None) -> bool:
    """Return whether a speed-up is larger than drafting can give: a pass of the target takes at least as long
    as in plain decoding. The machine was then less busy than when plain decoding was measured."""
    return tokens_per_pass is not None and found > _LEEWAY * tokens_per_pass


def speedup(n_tokens: float, seconds: float, token_s: float) -> float:
    """Return the speed-up over plain decoding, which takes `token_s` seconds a token."""
    return token_s * n_tokens / seconds


def expected_gain(costs: Costs, acceptance: float = ACCEPTANCE) -> Gain:
    """Return the expected gain of a draft model, from costs of at least two sizes of batches.

    If each drafted token is accepted with probability a, given that those before it were, a round with n
    drafted tokens gives 1 + a + ... + a^n tokens. Plain decoding takes v(1) for each of them. The round
    takes v(n + 1) for the target's batch and c for each drafted token:

        speedup(n) = v(1) (1 + a + ... + a^n) / (v(n + 1) + n c)

    (Leviathan et al., arXiv:2211.17192, theorem 3.8, with batches that are not free.) The result is for
    the best n whose batch is not larger than the largest one that was timed. The acceptance rate at
    temperature 0 is the rate of agreement.
    """

    def of(n_drafted: int, draft_token_s: float) -> float:
        n_tokens = sum(acceptance**depth for depth in range(n_drafted + 1))
        seconds = costs.rows_s(n_drafted + 1) + n_drafted * draft_token_s
        return speedup(n_tokens, seconds, costs.token_s)

    numbers = range(1, max(costs.batch_s))
    best = max(numbers, key=lambda n: of(n, costs.draft_token_s))
    return Gain(
        n_drafted=best,
        speedup=of(best, costs.draft_token_s),
        batch_tokens=costs.rows_s(best + 1) / costs.token_s,
        token_tokens=costs.draft_token_s / costs.token_s,
        free_speedup=max(of(n, 0.0) for n in numbers),
    )
