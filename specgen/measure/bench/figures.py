"""The figures of each contender, over all prompts and by category."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specgen.measure.bench.runs import Result
from specgen.session.calibration.gain import is_impossible

#: At a draft position with fewer drafted tokens than this, an acceptance rate means nothing.
_MIN_DRAFTED = 5

#: Prompt and round: the key that a lineup's answers to one prompt share.
_Key: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Spread:
    """The minimum, the quartiles and the maximum of some values."""

    low: float
    quartile: float
    median: float
    third_quartile: float
    high: float


@dataclass(frozen=True, slots=True)
class CategoryFigures:
    """The answers to prompts of one category. `speedup` over plain decoding is the geometric mean over the
    answers; None if plain decoding reports no speed."""

    category: str
    n_answers: int
    speedup: float | None
    speedups: Spread | None
    tokens_per_s: Spread | None


@dataclass(frozen=True, slots=True)
class Worst:
    """The prompt with the smallest speed-up of a contender, by the geometric mean over its rounds."""

    prompt: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Shares:
    """The time after the prompt: the shares of its parts, which add up to 1, and `token_s`, seconds a
    token."""

    target: float
    draft: float
    own: float
    token_s: float


@dataclass(frozen=True, slots=True)
class ContenderFigures:
    """The figures of a contender's answers; None means unknown.

    `speedup` is the geometric mean over the categories, `speedups` the spread over all answers. `whole` is
    the speed-up of whole answers, prompts included. (If a program prefills its draft model before the first
    token, that time shows only there.) `acceptance_by_position` begins with the first drafted token: the
    accepted share of all tokens drafted at that position. `first_token` is the median, over all answers, of
    the time to the first token relative to plain decoding's. `n_different` counts answers whose text
    differs from plain decoding's (at temperature 0, where rounding in batches may turn a near-tie).
    """

    target: str
    temperature: float
    contender: str
    is_plain: bool
    n_answers: int
    n_tokens: int
    speedup: float | None
    speedups: Spread | None
    whole: float | None
    worst: Worst | None
    tokens_per_s: Spread | None
    n_rounds: int | None
    n_drafted: int | None
    acceptance_rate: float | None
    acceptance_by_position: tuple[float, ...]
    mean_accepted_length: float | None
    shares: Shares | None
    first_token: float | None
    n_different: int | None
    categories: tuple[CategoryFigures, ...]

    @property
    def is_impossible(self) -> bool:
        """Whether the speed-up is larger than the tokens per pass of the target allow. (Another program may
        be faster for other reasons.)"""
        drafts = self.shares is not None and self.speedup is not None
        return drafts and is_impossible(self.speedup or 0.0, self.mean_accepted_length)


def figures_of(results: Iterable[Result]) -> tuple[ContenderFigures, ...]:
    """Return the figures of each contender that has an answer, plain decoding first in each lineup."""
    plain: dict[tuple[str, float], dict[_Key, Result]] = defaultdict(dict)
    told: dict[tuple[str, float, str], dict[_Key, Result]] = defaultdict(dict)
    for result in results:
        lineup, key = (result.target, result.temperature), (result.prompt, result.round)
        told[(*lineup, result.contender)][key] = result
        if result.is_plain:
            plain[lineup][key] = result
    lineups = dict.fromkeys(name[:2] for name in told)
    order = [name for lineup in lineups for name in told if name[:2] == lineup]
    return tuple(_figures(told[name], plain[name[:2]]) for name in order)


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None if there are no values."""
    if not values:
        return None
    return math.exp(statistics.fmean(math.log(value) for value in values))


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread; None if there are no values."""
    if not values:
        return None
    if len(values) == 1:
        (only,) = values
        return Spread(only, only, only, only, only)
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(min(values), first, middle, third, max(values))


def speedup_of(result: Result, plain: Result | None) -> float | None:
    """Return tokens a second over those of plain decoding for the same prompt in the same round."""
    if plain is None:
        return None
    fast, slow = result.outcome.tokens_per_s, plain.outcome.tokens_per_s
    return fast / slow if fast and slow else None


def whole_speedup_of(result: Result, plain: Result | None) -> float | None:
    """Return the speed-up of an answer with as many tokens as plain decoding's, prompt included."""
    if plain is None:
        return None
    slow_s, fast_s = (_whole_s(each, plain.outcome.n_tokens) for each in (plain, result))
    return slow_s / fast_s if slow_s and fast_s else None


def _whole_s(result: Result, n_tokens: int) -> float | None:
    """Return the seconds for the prompt and `n_tokens` tokens, at a contender's speed."""
    outcome = result.outcome
    if outcome.prompt_s is None or not outcome.tokens_per_s:
        return None
    return outcome.prompt_s + (n_tokens - 1) / outcome.tokens_per_s


# --- one contender ---------------------------------------------------------------------------


def _figures(results: Mapping[_Key, Result], plain: Mapping[_Key, Result]) -> ContenderFigures:
    """Return a contender's figures; `plain` has plain decoding's answers in the same lineup."""
    first = next(iter(results.values()))
    outcomes = [result.outcome for result in results.values()]
    speedups = _speedups(results, plain)
    drafted = [outcome for outcome in outcomes if outcome.n_drafted is not None]
    n_drafted = sum(outcome.n_drafted or 0 for outcome in drafted)
    n_accepted = sum(outcome.n_accepted or 0 for outcome in drafted)
    rounds = [outcome.n_rounds for outcome in outcomes if outcome.n_rounds is not None]
    return ContenderFigures(
        target=first.target,
        temperature=first.temperature,
        contender=first.contender,
        is_plain=first.is_plain,
        n_answers=len(results),
        n_tokens=sum(outcome.n_tokens for outcome in outcomes),
        speedup=_over_categories(results, speedups),
        speedups=spread(list(speedups.values())),
        whole=_over_categories(results, _speedups(results, plain, whole_speedup_of)),
        worst=_worst(speedups),
        tokens_per_s=spread([o.tokens_per_s for o in outcomes if o.tokens_per_s]),
        n_rounds=sum(rounds) if rounds else None,
        n_drafted=n_drafted if drafted else None,
        acceptance_rate=n_accepted / n_drafted if n_drafted else None,
        acceptance_by_position=_by_position(list(results.values())),
        mean_accepted_length=_mean_length(list(results.values())),
        shares=_shares(list(results.values())),
        first_token=_first_token(results, plain),
        n_different=_n_different(results, plain),
        categories=_by_category(results, plain),
    )


def _speedups(
    results: Mapping[_Key, Result],
    plain: Mapping[_Key, Result],
    of: Callable[[Result, Result | None], float | None] = speedup_of,
) -> dict[_Key, float]:
    """Return the speed-ups of the answers that have one."""
    found = {key: of(result, plain.get(key)) for key, result in results.items()}
    return {key: speedup for key, speedup in found.items() if speedup is not None}


def _over_categories(
    results: Mapping[_Key, Result], speedups: Mapping[_Key, float]
) -> float | None:
    """Return the geometric mean over the categories of the geometric means over their answers."""
    by_category: dict[str, list[float]] = defaultdict(list)
    for key, speedup in speedups.items():
        by_category[results[key].category].append(speedup)
    means = map(geometric_mean, by_category.values())
    return geometric_mean([mean for mean in means if mean is not None])


def _by_category(
    results: Mapping[_Key, Result], plain: Mapping[_Key, Result]
) -> tuple[CategoryFigures, ...]:
    by_category: dict[str, dict[_Key, Result]] = defaultdict(dict)
    for key, result in results.items():
        by_category[result.category][key] = result
    found = []
    for category, own in by_category.items():
        speedups = list(_speedups(own, plain).values())
        speeds = [r.outcome.tokens_per_s for r in own.values() if r.outcome.tokens_per_s]
        found.append(
            CategoryFigures(
                category, len(own), geometric_mean(speedups), spread(speedups), spread(speeds)
            )
        )
    return tuple(found)


def _worst(speedups: Mapping[_Key, float]) -> Worst | None:
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for (prompt, _), speedup in speedups.items():
        by_prompt[prompt].append(speedup)
    means = {prompt: geometric_mean(values) for prompt, values in by_prompt.items()}
    told = [Worst(prompt, mean) for prompt, mean in means.items() if mean is not None]
    return min(told, key=lambda worst: worst.speedup, default=None)


def _by_position(results: Sequence[Result]) -> tuple[float, ...]:
    drafted: defaultdict[int, int] = defaultdict(int)
    accepted: defaultdict[int, int] = defaultdict(int)
    for result in results:
        for position, n in enumerate(result.outcome.drafted_by_depth):
            drafted[position] += n
        for position, n in enumerate(result.outcome.accepted_by_depth):
            accepted[position] += n
    shares: list[float] = []
    while drafted[len(shares)] >= _MIN_DRAFTED:
        shares.append(accepted[len(shares)] / drafted[len(shares)])
    return tuple(shares)


def _mean_length(results: Sequence[Result]) -> float | None:
    """Return the tokens a round, over the rounds of all answers."""
    pairs = [(result.outcome.mean_accepted_length, result.outcome.n_rounds) for result in results]
    told = [(mean * n, n) for mean, n in pairs if mean is not None and n]
    n_rounds = sum(n for _, n in told)
    return sum(tokens for tokens, _ in told) / n_rounds if n_rounds else None


def _shares(results: Sequence[Result]) -> Shares | None:
    target_s = draft_s = own_s = 0.0
    n_tokens = 0
    for outcome in (result.outcome for result in results):
        if outcome.target_s is None or outcome.draft_s is None or outcome.own_s is None:
            return None
        target_s, draft_s = target_s + outcome.target_s, draft_s + outcome.draft_s
        own_s += outcome.own_s
        n_tokens += max(0, outcome.n_tokens - 1)
    whole = target_s + draft_s + own_s
    if not whole or not n_tokens:
        return None
    return Shares(target_s / whole, draft_s / whole, own_s / whole, whole / n_tokens)


def _first_token(results: Mapping[_Key, Result], plain: Mapping[_Key, Result]) -> float | None:
    ratios = []
    for key, result in results.items():
        own = result.outcome.time_to_first_token_s
        others = plain[key].outcome.time_to_first_token_s if key in plain else None
        if own is not None and others:
            ratios.append(own / others)
    return statistics.median(ratios) if ratios else None


def _n_different(results: Mapping[_Key, Result], plain: Mapping[_Key, Result]) -> int | None:
    """Return the number of different texts; None above temperature 0, where texts may differ."""
    if any(result.temperature > 0.0 for result in results.values()):
        return None
    return sum(
        not result.outcome.says_the_same(plain[key].outcome)
        for key, result in results.items()
        if key in plain
    )
