"""Counts and times of an answer, for the summary."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from typing import Any

from specgen.events import FinishedEvent, ReasonCount
from specgen.method.policy import RoundResult
from specgen.method.tables import CostTable

#: How much decodes of equally many rows differ, as a share of their time, is learnt from at least so many of a kind
#: and so many in all; else it is taken to be `_USUAL_NOISE`.
_MIN_OF_A_KIND, _MIN_DECODES, _USUAL_NOISE = 3, 6, 0.1
#: The least uncertainty of a comparison with plain decoding.
_LEAST_ERROR = 0.02
#: A speed-up may exceed the tokens per pass by this factor before it counts as impossible.
_LEEWAY = 1.05


@dataclass(slots=True)
class Tally:
    """Counts and times, in seconds, of one generation. Fields with a name of `FinishedEvent` have its meaning."""

    n_rounds: int = 0
    n_forced: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    drafted_by_rank: Counter[int] = field(default_factory=Counter)
    accepted_by_rank: Counter[int] = field(default_factory=Counter)
    prompt_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    wall_s: float = 0.0
    time_to_first_token_s: float | None = None
    #: Tokens committed in rounds, in all and by the number of sequences that shared the round.
    n_round_tokens: int = 0
    n_tokens_by_sequences: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    #: `wall_s` when the prompt was decoded and its token committed, and the number of tokens then: a grammar may have
    #: forced some before and after it.
    start_s: float = 0.0
    n_start_tokens: int = 0
    #: The target's decode times by the number of rows.
    target_s_by_rows: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _undrafted: dict[str, ReasonCount] = field(default_factory=dict)

    def add_prompt(self, target_s: float, wall_s: float, n_tokens: int) -> None:
        """Add a piece of the prompt; the answer has `n_tokens` tokens then."""
        self.prompt_s += target_s
        self.target_s += target_s
        self.wall_s += wall_s
        self.start_s, self.n_start_tokens = self.wall_s, n_tokens

    def add_round(self, result: RoundResult) -> None:
        """Add a round; the sequences share its batch's time equally."""
        n_committed = min(len(result.path) + 1, len(result.committed))  # the others were forced
        self.n_rounds += 1
        self.n_round_tokens += n_committed
        self.n_tokens_by_sequences[result.n_sequences] += n_committed
        self.target_s_by_rows[result.n_rows].append(result.target_s)
        self.target_s += result.target_s / result.n_sequences
        self.draft_s += result.model_s
        if not len(result.draft):
            self.add_undrafted(result.plan.reason, result.plan.why)
            return
        accepted = result.path[:n_committed]
        depths, ranks = result.draft.depths(), result.draft.ranks()
        self.n_drafted += len(depths)
        self.n_accepted += len(accepted)
        self.drafted_by_depth.update(depths)
        self.accepted_by_depth.update(range(len(accepted)))
        self.drafted_by_rank.update(ranks)
        self.accepted_by_rank.update([ranks[node] for node in accepted])

    def add_undrafted(self, reason: str, text: str, n_rounds: int = 1) -> None:
        """Add rounds that drafted nothing, and why."""
        n_before = self._undrafted[reason].n_rounds if reason in self._undrafted else 0
        self._undrafted[reason] = ReasonCount(reason, text, n_before + n_rounds)

    @property
    def undrafted(self) -> tuple[ReasonCount, ...]:
        return tuple(sorted(self._undrafted.values(), key=lambda each: -each.n_rounds))

    @property
    def loop_s(self) -> float:
        return max(0.0, self.wall_s - self.draft_s - self.target_s)

    @property
    def acceptance_rate(self) -> float | None:
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        return self.n_round_tokens / self.n_rounds if self.n_rounds else None

    def figures(self) -> dict[str, Any]:
        """Return the fields of `FinishedEvent` that the tally has."""
        names = [each.name for each in fields(FinishedEvent) if hasattr(self, each.name)]
        found = {name: getattr(self, name) for name in names}
        for name, value in found.items():
            if isinstance(value, Counter):
                found[name] = tuple(value[n] for n in range(max(value, default=-1) + 1))
        return found

    def speed(self, n_tokens: int) -> float | None:
        """Return the tokens per second, without the prompt's decode and the tokens that came with it."""
        if n_tokens <= self.n_start_tokens or self.wall_s <= self.start_s:
            return None
        return (n_tokens - self.n_start_tokens) / (self.wall_s - self.start_s)

    def whole_speedup(self, n_tokens: int, plain_token_s: float | None) -> float | None:
        """Return the speed-up of the whole answer, prefill included, if a token takes `plain_token_s` without a
        draft. Plain decoding prefills the target alone."""
        if plain_token_s is None or not self.wall_s or n_tokens <= self.n_start_tokens:
            return None
        return (self.prompt_s + (n_tokens - self.n_start_tokens) * plain_token_s) / self.wall_s

    def speedup_error(self) -> float:
        """Return the uncertainty of the speed-up, as a share of it: two standard errors.

        The time of a token in plain decoding counts as one measurement, that of this answer is known from all its
        rounds. Both vary as decodes of equally many rows do in this answer; the sixth at either end does not count,
        so that a single hiccup does not decide.
        """
        ratios: list[float] = []
        for each in self.target_s_by_rows.values():
            if len(each) >= _MIN_OF_A_KIND and min(each) > 0.0:
                usual = statistics.median(each)
                ratios += [math.log(seconds / usual) for seconds in each]
        noise = _USUAL_NOISE
        if len(ratios) >= _MIN_DECODES:
            sixths = statistics.quantiles(ratios, n=6, method="inclusive")
            noise = (sixths[-1] - sixths[0]) / 2
        n_rounds = max(1, self.n_rounds)
        return max(_LEAST_ERROR, 2.0 * noise * math.sqrt(1 + 1 / n_rounds))

    def priced_token_s(self, costs: CostTable) -> float | None:
        """Return the mean time of a token if no sequence had drafted, by the costs of the target's batches at the
        speed that the machine had during this answer. Sequences that share a round have equal parts of its time. None
        if nothing was measured."""
        if not costs or not self.n_round_tokens:
            return None
        expected_s = sum(len(each) * costs.seconds(n) for n, each in self.target_s_by_rows.items())
        observed_s = sum(map(sum, self.target_s_by_rows.values()))
        seconds = sum(
            n_tokens * costs.seconds(n) / n for n, n_tokens in self.n_tokens_by_sequences.items()
        )
        return observed_s / expected_s * seconds / self.n_round_tokens


def is_impossible(speedup: float, tokens_per_pass: float | None) -> bool:
    """Return whether a speed-up is larger than drafting can give: a pass of the target takes at least as long
    as in plain decoding. The machine was then less busy than when plain decoding was measured."""
    return tokens_per_pass is not None and speedup > _LEEWAY * tokens_per_pass
