"""The time that may be lost in trying a draft."""

from __future__ import annotations

#: The share of an answer's time that may be spent on trials of drafters that are not expected to pay.
_SHARE = 0.01
#: A drafter is put aside if it lost more than this share of the time so far plus the time of this
#: many plain tokens: for this many rounds at first, and for twice as many each time.
_MAX_LOSS = 0.01
_MAX_LOST_TOKENS = 4.0
_N_ROUNDS_ASIDE = 16
#: The credit fades over about this many rounds.
_MEMORY = 32.0
#: The most that a drafter's unverified drafts can count as lost, in plain tokens' time: its next
#: drafts may be better.
_MAX_SHOWN_LOSS = 2.0


class Budget:
    """An account, within one answer, of the time that drafting saved and lost against plain decoding.

    A policy's expectations can be wrong, for a text or because the machine's speed has changed.
    The account shows this.
    """

    #: Tokens that a trial drafts.
    n_tokens = 3

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._tried_s = 0.0
        #: Seconds that drafting saved lately.
        self.credit_s = 0.0
        #: Seconds that unverified drafts would have saved lately, by origin.
        self._shown_s: dict[str, float] = {}
        self._saved_s: dict[str, float] = {}
        self._aside: dict[str, int] = {}
        self._n_aside: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds of the rounds so far."""
        return self._elapsed_s

    def credit_of(self, origin: str) -> float:
        """Seconds that drafting saved lately, plus those that this drafter's unverified drafts
        would have saved."""
        return self.credit_s + self._shown_s.get(origin, 0.0)

    def show(self, origin: str, saved_s: float, plain_s: float) -> None:
        """Enter what an unverified draft would have saved; negative if it would have lost time."""
        shown_s = self._shown_s.get(origin, 0.0) + saved_s
        self._shown_s[origin] = max(shown_s, -_MAX_SHOWN_LOSS * plain_s)

    def allows(self, cost_s: float) -> bool:
        """Whether a trial that costs `cost_s` seconds is allowed now."""
        return self._tried_s + cost_s <= _SHARE * self._elapsed_s

    def begin_round(self) -> None:
        """Begin a round: old results of unverified drafts fade, and drafters wait one round less."""
        self._shown_s = {o: s * (1.0 - 1.0 / _MEMORY) for o, s in self._shown_s.items()}
        self._aside = {origin: n - 1 for origin, n in self._aside.items() if n > 1}

    def is_put_aside(self, origin: str) -> bool:
        """Whether a drafter is put aside."""
        return origin in self._aside

    def spend(
        self,
        origin: str | None,
        *,
        saved_s: float,
        elapsed_s: float,
        plain_s: float,
        is_trial: bool,
    ) -> None:
        """Enter a round that the drafter `origin` started (None: no drafter did). Times are seconds;
        `saved_s` is negative if plain decoding would have been faster."""
        self._elapsed_s += elapsed_s
        self.credit_s *= 1.0 - 1.0 / _MEMORY
        self.credit_s += saved_s if origin is not None else 0.0
        if origin is None:
            return
        if is_trial:
            self._tried_s += max(0.0, -saved_s)
            return
        saved_s += self._saved_s.get(origin, 0.0)
        # Savings are capped, so that old ones do not cover new losses for ever.
        saved_s = min(saved_s, 8.0 * plain_s)
        if saved_s < -_MAX_LOST_TOKENS * plain_s - _MAX_LOSS * self._elapsed_s:
            n_rounds = self._n_aside.get(origin, _N_ROUNDS_ASIDE)
            self._aside[origin] = n_rounds
            self._n_aside[origin] = 2 * n_rounds
            saved_s = 0.0
        self._saved_s[origin] = saved_s
