"""The time that may be lost in trying a draft."""

from __future__ import annotations

#: The share of an answer's time that may be spent on trying drafters that promise nothing.
_SHARE = 0.01
#: A drafter that lost more than this share of the time so far, and so many plain tokens' time,
#: is put aside; for twice as many rounds each time.
_MAX_LOSS = 0.01
_MAX_LOST_TOKENS = 4.0
_N_ROUNDS_ASIDE = 16
#: Of so many rounds the credit keeps the memory.
_MEMORY = 32.0
#: What a drafter that is not followed may be thought to have lost, in plain tokens' time: what it
#: says next may be another matter.
_MAX_SHOWN_LOSS = 2.0


class Budget:
    """Keeps account, within one answer, of what drafting saved and lost against plain decoding.

    Expectations can be wrong, for a text or for a machine that is not what it was: then the
    account says so.
    """

    #: Tokens of a trial.
    n_tokens = 3

    def __init__(self) -> None:
        self._elapsed_s = 0.0
        self._tried_s = 0.0
        #: Seconds that drafting saved lately.
        self.credit_s = 0.0
        #: Seconds that drafts which were not verified would have saved lately, by origin.
        self._shown_s: dict[str, float] = {}
        self._saved_s: dict[str, float] = {}
        self._aside: dict[str, int] = {}
        self._n_aside: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        """Seconds of the rounds so far."""
        return self._elapsed_s

    def credit_of(self, origin: str) -> float:
        """Seconds that drafting saved lately, those included that a drafter which was not
        followed would have saved."""
        return self.credit_s + self._shown_s.get(origin, 0.0)

    def show(self, origin: str, saved_s: float, plain_s: float) -> None:
        """Enter what a draft that was not verified would have saved: negative, had it been wrong."""
        shown_s = self._shown_s.get(origin, 0.0) + saved_s
        self._shown_s[origin] = max(shown_s, -_MAX_SHOWN_LOSS * plain_s)

    def allows(self, cost_s: float) -> bool:
        """Whether a trial that costs so much is allowed now."""
        return self._tried_s + cost_s <= _SHARE * self._elapsed_s

    def begin_round(self) -> None:
        """A round begins."""
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
        """Enter a round in which `origin` began to draft (None: none did). Times in seconds;
        `saved_s` is negative where plain decoding would have been quicker."""
        self._elapsed_s += elapsed_s
        self.credit_s *= 1.0 - 1.0 / _MEMORY
        self.credit_s += saved_s if origin is not None else 0.0
        if origin is None:
            return
        if is_trial:
            self._tried_s += max(0.0, -saved_s)
            return
        saved_s += self._saved_s.get(origin, 0.0)
        # What was saved long ago is no credit for ever.
        saved_s = min(saved_s, 8.0 * plain_s)
        if saved_s < -_MAX_LOST_TOKENS * plain_s - _MAX_LOSS * self._elapsed_s:
            n_rounds = self._n_aside.get(origin, _N_ROUNDS_ASIDE)
            self._aside[origin] = n_rounds
            self._n_aside[origin] = 2 * n_rounds
            saved_s = 0.0
        self._saved_s[origin] = saved_s
