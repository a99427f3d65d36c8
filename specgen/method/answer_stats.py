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

#: The noise of decodes is measured on batch sizes that occurred at least this many times...
_MIN_OF_A_SIZE = 3
#: ...if there are at least this many such decodes in all.
_MIN_DECODES = 6
#: The noise that is assumed otherwise, as a share of a decode's time.
_DEFAULT_NOISE = 0.1
#: The minimum error of a comparison with plain decoding, as a share of the speed-up: plain decoding
#: was measured at another moment.
_MIN_ERROR = 0.1


@dataclass(slots=True)
class AnswerStats:
    """Counts and times, in seconds, of one answer.

    Fields and properties that `FinishedEvent` has too are documented there.
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
    #: The number of tokens that were committed in rounds, without forced ones.
    n_round_tokens: int = 0
    #: The same with forced ones.
    n_round_tokens_in_all: int = 0
    #: The number of decodes that plain decoding would need for the tokens of rounds, by the number
    #: of sequences that shared the round: one for each token that the grammar left open.
    n_plain_decodes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: The value of `wall_s` at the end of the prefill, with the first token committed.
    start_s: float = 0.0
    #: The number of the answer's tokens at that moment.
    n_start_tokens: int = 0
    #: The seconds of each decode of the target, by its number of rows.
    target_s_by_rows: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: The number of rounds without a draft, by the name of the reason.
    _undrafted: dict[str, ReasonCount] = field(default_factory=dict)

    def add_prompt(
        self,
        target_s: float,
        wall_s: float,
        n_tokens: int,
    ) -> None:
        """Add a chunk of the prompt.

        Args:
            target_s: The seconds that the target took.
            wall_s: The seconds of the whole step.
            n_tokens: The number of the answer's tokens that are committed by now.
        """
        self.prompt_s += target_s
        self.target_s += target_s
        self.wall_s += wall_s
        self.start_s = self.wall_s
        self.n_start_tokens = n_tokens

    def add_round(self, result: RoundResult) -> None:
        """Add a round. The time of its batch is divided equally among its sequences."""
        # The accepted tokens and the target's own, unless the answer ended before. What was
        # committed beyond these was forced.
        n_committed = min(len(result.path) + 1, len(result.committed))
        self.n_rounds += 1
        self.n_round_tokens += n_committed
        self.rounds_by_tokens[max(0, n_committed - 1)] += 1
        self.n_round_tokens_in_all += len(result.committed)
        self.n_plain_decodes[result.n_sequences] += len(result.committed) - result.n_without_choice
        self.target_s_by_rows[result.n_rows].append(result.target_s)
        self.target_s += result.target_s / result.n_sequences
        # Only the model's decodes: the rest of drafting is specgen's own work (`loop_s`).
        self.draft_s += result.model_s
        if len(result.draft):
            self._add_draft(result, result.path[:n_committed])
        else:
            self._add_undrafted(result)

    def _add_draft(
        self,
        result: RoundResult,
        accepted: tuple[int, ...],
    ) -> None:
        depths = result.draft.depths
        ranks = result.draft.ranks
        self.n_drafted += len(depths)
        self.n_accepted += len(accepted)
        self.drafted_by_depth.update(set(depths))  # once for each level of a tree
        self.accepted_by_depth.update(range(len(accepted)))
        self.drafted_by_rank.update(ranks)
        self.accepted_by_rank.update(ranks[node] for node in accepted)

    def _add_undrafted(self, result: RoundResult) -> None:
        reason = result.plan.reason
        previous = self._undrafted.get(reason)
        n_previous = 0 if previous is None else previous.n_rounds
        # The wording may have changed: the latest one counts.
        self._undrafted[reason] = ReasonCount(reason, result.plan.why, n_previous + 1)

    @property
    def undrafted(self) -> tuple[ReasonCount, ...]:
        """The reasons why rounds had no draft, the most frequent one first."""
        by_rounds = operator.attrgetter("n_rounds")
        return tuple(sorted(self._undrafted.values(), key=by_rounds, reverse=True))

    @property
    def loop_s(self) -> float:
        """The seconds that were spent neither in the target nor on drafting."""
        return max(0.0, self.wall_s - self.draft_s - self.target_s)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted positions at which a token was accepted; None without a draft."""
        n_drafted = sum(self.drafted_by_depth.values())
        return self.n_accepted / n_drafted if n_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """The mean number of tokens per round, without forced ones; None before the first round."""
        return self.n_round_tokens / self.n_rounds if self.n_rounds else None

    def figures(self) -> dict[str, Any]:
        """Return the fields of `FinishedEvent` that have the same name here.

        A counter becomes a tuple, with the count of n at index n.
        """
        figures: dict[str, Any] = {}
        for event_field in fields(FinishedEvent):
            name = event_field.name
            if hasattr(self, name):
                value = getattr(self, name)
                if isinstance(value, Counter):
                    value = tuple(value[n] for n in range(max(value, default=-1) + 1))
                figures[name] = value
        return figures

    def speed(self, n_tokens: int) -> float | None:
        """Return the tokens per second after the prefill and the tokens that were committed in it.

        Args:
            n_tokens: The number of all tokens of the answer.

        Returns:
            The speed; None if all tokens were committed in the prefill.
        """
        if n_tokens <= self.n_start_tokens or self.wall_s <= self.start_s:
            return None
        return (n_tokens - self.n_start_tokens) / (self.wall_s - self.start_s)

    def whole_speedup(
        self,
        n_tokens: int,
        plain_token_s: float | None,
    ) -> float | None:
        """Return the speed-up of the whole answer, including its prefill.

        Plain decoding would need only the target's part of the prefill.

        Args:
            n_tokens: The number of all tokens of the answer.
            plain_token_s: The seconds per token without drafting; None if unknown.

        Returns:
            The speed-up; None if it is unknown.
        """
        if plain_token_s is None or not self.wall_s or n_tokens <= self.n_start_tokens:
            return None
        plain_s = self.prompt_s + (n_tokens - self.n_start_tokens) * plain_token_s
        return plain_s / self.wall_s

    def speedup_error(self) -> float:
        """Return two standard errors of the speed-up, as a share of it.

        The noise of a single decode is taken from how much decodes of the same size vary in this
        answer. Plain decoding counts as one measurement, the answer as one for each round.
        """
        log_ratios: list[float] = []
        for times_s in self.target_s_by_rows.values():
            if len(times_s) >= _MIN_OF_A_SIZE and min(times_s) > 0.0:
                median_s = statistics.median(times_s)
                log_ratios += [math.log(seconds / median_s) for seconds in times_s]
        noise = _DEFAULT_NOISE
        if len(log_ratios) >= _MIN_DECODES:
            # Without the sixth at either end, two thirds are left: one standard deviation each way.
            sixths = statistics.quantiles(log_ratios, n=6, method="inclusive")
            noise = (sixths[-1] - sixths[0]) / 2
        n_rounds = max(1, self.n_rounds)
        return max(_MIN_ERROR, 2.0 * noise * math.sqrt(1 + 1 / n_rounds))

    def priced_token_s(self, costs: CostTable) -> float | None:
        """Return the estimated seconds per token without drafting; None if nothing was measured.

        Without drafting, the target would decode once for each token that the grammar did not
        force. (Forced tokens are only rows of the next batch, even if they were drafted here.) Each
        decode is priced as its sequence's share of the batch, then corrected for how fast the
        machine was during this answer.
        """
        n_decodes = sum(self.n_plain_decodes.values())
        if not costs or not n_decodes:
            return None
        # The seconds of this answer's decodes, according to the table and in fact.
        expected_s = sum(
            len(times_s) * costs.seconds(n_rows)
            for n_rows, times_s in self.target_s_by_rows.items()
        )
        observed_s = sum(map(sum, self.target_s_by_rows.values()))
        # The seconds of the same tokens without drafting, according to the table.
        n_rows_each = self.n_round_tokens_in_all / n_decodes
        plain_s = sum(
            n_decodes_shared * _mean_batch_s(costs, n * n_rows_each) / n
            for n, n_decodes_shared in self.n_plain_decodes.items()
        )
        return observed_s / expected_s * plain_s / self.n_round_tokens_in_all


def _mean_batch_s(costs: CostTable, mean_n_rows: float) -> float:
    """Return the expected seconds of batches that have `mean_n_rows` rows on average."""
    n_rows = math.floor(mean_n_rows)
    share_of_larger = mean_n_rows - n_rows
    smaller_s = (1.0 - share_of_larger) * costs.seconds(n_rows)
    return smaller_s + share_of_larger * costs.seconds(n_rows + 1)
