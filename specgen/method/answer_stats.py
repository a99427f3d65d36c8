"""Counts and times of one answer, and the speed-up that is estimated from them."""

from __future__ import annotations

import math
import operator
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from typing import Any

from specgen.events import FinishedEvent, ReasonCount
from specgen.method.cost_table import CostTable
from specgen.method.policy import RoundResult

#: The least equal decodes of one size, and in all, from which their noise is learnt.
_MIN_OF_A_SIZE = 3
_MIN_DECODES = 6
#: The noise of a decode that is assumed otherwise, as a share of its time.
_USUAL_NOISE = 0.1
#: The least uncertainty of a comparison with plain decoding, whose price was measured at another
#: moment.
_LEAST_ERROR = 0.1


@dataclass(slots=True)
class AnswerStats:
    """Counts and times, in seconds, of one answer.

    Fields and properties with the name of a field of `FinishedEvent` have its meaning.
    """

    n_rounds: int = 0
    n_forced: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_rank: Counter[int] = field(default_factory=Counter)
    accepted_by_rank: Counter[int] = field(default_factory=Counter)
    rounds_by_tokens: Counter[int] = field(default_factory=Counter)
    prompt_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    wall_s: float = 0.0
    time_to_first_token_s: float | None = None
    #: Tokens committed in rounds, without forced ones.
    n_round_tokens: int = 0
    #: The same by the number of sequences that shared the round.
    n_tokens_by_sequences: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: `wall_s` when the prompt was decoded and its token committed.
    start_s: float = 0.0
    #: The number of committed tokens then.
    n_start_tokens: int = 0
    #: The target's decode times by the number of rows.
    target_s_by_rows: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: Rounds without a draft, by the name of the reason.
    _undrafted: dict[str, ReasonCount] = field(default_factory=dict)

    def add_prompt(
        self,
        target_s: float,
        wall_s: float,
        n_tokens: int,
    ) -> None:
        """Add a chunk of the prompt; `n_tokens` tokens are committed after it."""
        self.prompt_s += target_s
        self.target_s += target_s
        self.wall_s += wall_s
        self.start_s = self.wall_s
        self.n_start_tokens = n_tokens

    def add_round(self, result: RoundResult) -> None:
        """Add a round; the sequences share its batch's time equally."""
        n_committed = min(len(result.path) + 1, len(result.committed))  # the others were forced
        self.n_rounds += 1
        self.n_round_tokens += n_committed
        self.rounds_by_tokens[max(0, n_committed - 1)] += 1
        self.n_tokens_by_sequences[result.n_sequences] += n_committed
        self.target_s_by_rows[result.n_rows].append(result.target_s)
        self.target_s += result.target_s / result.n_sequences
        self.draft_s += result.model_s
        if len(result.draft):
            self._add_draft(result, result.path[:n_committed])
        else:
            self._add_undrafted(result)

    def _add_draft(self, result: RoundResult, accepted: tuple[int, ...]) -> None:
        depths = result.draft.depths
        ranks = result.draft.ranks
        self.n_drafted += len(depths)
        self.n_accepted += len(accepted)
        self.drafted_by_depth.update(set(depths))
        self.accepted_by_depth.update(range(len(accepted)))
        self.drafted_by_rank.update(ranks)
        self.accepted_by_rank.update(map(ranks.__getitem__, accepted))

    def _add_undrafted(self, result: RoundResult) -> None:
        reason = result.plan.reason
        before = self._undrafted.get(reason)
        n_before = 0 if before is None else before.n_rounds
        self._undrafted[reason] = ReasonCount(reason, result.plan.why, n_before + 1)

    @property
    def undrafted(self) -> tuple[ReasonCount, ...]:
        """Why rounds drafted nothing, the most frequent reason first."""
        by_rounds = operator.attrgetter("n_rounds")
        return tuple(sorted(self._undrafted.values(), key=by_rounds, reverse=True))

    @property
    def loop_s(self) -> float:
        """The time that neither the target nor the draft took."""
        return max(0.0, self.wall_s - self.draft_s - self.target_s)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted positions at which a token was accepted."""
        n_drafted = sum(self.drafted_by_depth.values())
        return self.n_accepted / n_drafted if n_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """The tokens of a round, on average."""
        return self.n_round_tokens / self.n_rounds if self.n_rounds else None

    def figures(self) -> dict[str, Any]:
        """Return the fields of `FinishedEvent` that are known here; counters become tuples."""
        figures: dict[str, Any] = {}
        for each in fields(FinishedEvent):
            if hasattr(self, each.name):
                value = getattr(self, each.name)
                if isinstance(value, Counter):
                    value = tuple(value[n] for n in range(max(value, default=-1) + 1))
                figures[each.name] = value
        return figures

    def speed(self, n_tokens: int) -> float | None:
        """Return the tokens per second after the prompt, and the tokens that came with it.

        It is None if there are no other tokens among all `n_tokens` of the answer.
        """
        if n_tokens <= self.n_start_tokens or self.wall_s <= self.start_s:
            return None
        return (n_tokens - self.n_start_tokens) / (self.wall_s - self.start_s)

    def whole_speedup(self, n_tokens: int, plain_token_s: float | None) -> float | None:
        """Return the speed-up of the answer with its prompt, which only the target has to read."""
        if plain_token_s is None or not self.wall_s or n_tokens <= self.n_start_tokens:
            return None
        plain_s = self.prompt_s + (n_tokens - self.n_start_tokens) * plain_token_s
        return plain_s / self.wall_s

    def speedup_error(self) -> float:
        """Return two standard errors of the speed-up, as a share of it.

        Plain decoding counts as one measurement, this answer as all its rounds. Both vary as equal
        decodes do here, without the sixth at either end.
        """
        ratios: list[float] = []
        for times_s in self.target_s_by_rows.values():
            if len(times_s) >= _MIN_OF_A_SIZE and min(times_s) > 0.0:
                usual_s = statistics.median(times_s)
                ratios += [math.log(seconds / usual_s) for seconds in times_s]
        noise = _USUAL_NOISE
        if len(ratios) >= _MIN_DECODES:
            sixths = statistics.quantiles(ratios, n=6, method="inclusive")
            noise = (sixths[-1] - sixths[0]) / 2
        n_rounds = max(1, self.n_rounds)
        return max(_LEAST_ERROR, 2.0 * noise * math.sqrt(1 + 1 / n_rounds))

    def priced_token_s(self, costs: CostTable) -> float | None:
        """Return the mean time of a token without drafts; None if nothing was measured.

        It follows from the costs of the target's batches, at the machine's speed during this
        answer, shared by the sequences of each round.
        """
        if not costs or not self.n_round_tokens:
            return None
        # What the decodes of this answer should have taken by the table, and what they took.
        expected_s = sum(
            len(times_s) * costs.seconds(n_rows)
            for n_rows, times_s in self.target_s_by_rows.items()
        )
        observed_s = sum(map(sum, self.target_s_by_rows.values()))
        # What the tokens would have taken one by one.
        plain_s = sum(
            n_tokens * costs.seconds(n) / n for n, n_tokens in self.n_tokens_by_sequences.items()
        )
        return observed_s / expected_s * plain_s / self.n_round_tokens
