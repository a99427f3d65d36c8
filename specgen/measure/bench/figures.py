"""The figures of each contender, over all prompts and by category, and the report: as JSON, and as a page."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from specgen.measure.bench.runs import Outcome, Result, Runs
from specgen.measure.prompts import BenchPrompt
from specgen.session.costs import is_impossible

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
    """The time after the prompt: the shares of its parts, which add up to 1, and seconds a token."""

    target: float
    draft: float
    own: float
    token_s: float


@dataclass(frozen=True, slots=True)
class ContenderFigures:
    """The figures of a contender's answers; None means unknown.

    `speedup` is the geometric mean over the categories, `speedups` the spread over all answers. `whole` is
    the speed-up of whole answers, prompts included. `acceptance_by_position` begins with the first drafted
    token: the accepted share of all tokens drafted at that position. `first_token` is the median, over all
    answers, of the time to the first token relative to plain decoding's. `n_different` counts answers whose
    text differs from plain decoding's at temperature 0, where rounding in batches may turn a near-tie.
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
    """Return the figures of each contender that has an answer, lineup by lineup."""
    plain: dict[tuple[str, float], dict[_Key, Result]] = defaultdict(dict)
    answers: dict[tuple[str, float, str], dict[_Key, Result]] = defaultdict(dict)
    for result in results:
        lineup, key = (result.target, result.temperature), (result.prompt, result.round)
        answers[(*lineup, result.contender)][key] = result
        if result.is_plain:
            plain[lineup][key] = result
    lineups = dict.fromkeys(name[:2] for name in answers)
    order = [name for lineup in lineups for name in answers if name[:2] == lineup]
    return tuple(_figures(answers[name], plain[name[:2]]) for name in order)


def _figures(results: Mapping[_Key, Result], plain: Mapping[_Key, Result]) -> ContenderFigures:
    """Return a contender's figures; `plain` has plain decoding's answers in the same lineup."""
    first = next(iter(results.values()))
    outcomes = [result.outcome for result in results.values()]
    speedups = _ratios(results, plain, speedup_of)
    n_drafted = _sum(outcome.n_drafted for outcome in outcomes)
    n_accepted = _sum(outcome.n_accepted for outcome in outcomes)
    first_tokens = _ratios(results, plain, _first_token)
    return ContenderFigures(
        target=first.target,
        temperature=first.temperature,
        contender=first.contender,
        is_plain=first.is_plain,
        n_answers=len(results),
        n_tokens=sum(outcome.n_tokens for outcome in outcomes),
        speedup=_over_categories(results, speedups),
        speedups=spread(list(speedups.values())),
        whole=_over_categories(results, _ratios(results, plain, _whole_speedup)),
        worst=_worst(speedups),
        tokens_per_s=_speeds(outcomes),
        n_rounds=_sum(outcome.n_rounds for outcome in outcomes),
        n_drafted=n_drafted,
        acceptance_rate=(n_accepted or 0) / n_drafted if n_drafted else None,
        acceptance_by_position=_by_position(outcomes),
        mean_accepted_length=_mean_length(outcomes),
        shares=_shares(outcomes),
        first_token=statistics.median(first_tokens.values()) if first_tokens else None,
        n_different=None
        if first.temperature > 0.0
        else sum(
            not result.outcome.says_the_same(plain[key].outcome)
            for key, result in results.items()
            if key in plain
        ),
        categories=_by_category(results, speedups),
    )


# --- ratios to plain decoding ------------------------------------------------------------------------


def speedup_of(result: Result, plain: Result | None) -> float | None:
    """Return tokens a second over those of plain decoding for the same prompt in the same round."""
    if plain is None:
        return None
    fast, slow = result.outcome.tokens_per_s, plain.outcome.tokens_per_s
    return fast / slow if fast and slow else None


def _whole_speedup(result: Result, plain: Result) -> float | None:
    """Return the speed-up of an answer with as many tokens as plain decoding's, prompt included."""

    def whole_s(outcome: Outcome) -> float | None:
        if outcome.prompt_s is None or not outcome.tokens_per_s:
            return None
        return outcome.prompt_s + (plain.outcome.n_tokens - 1) / outcome.tokens_per_s

    slow_s, fast_s = whole_s(plain.outcome), whole_s(result.outcome)
    return slow_s / fast_s if slow_s and fast_s else None


def _first_token(result: Result, plain: Result) -> float | None:
    own, other = (each.outcome.time_to_first_token_s for each in (result, plain))
    return own / other if own is not None and other else None


def _ratios(
    results: Mapping[_Key, Result],
    plain: Mapping[_Key, Result],
    ratio: Callable[[Result, Result], float | None],
) -> dict[_Key, float]:
    """Return the ratios of the answers that have one."""
    found = {k: ratio(result, plain[k]) for k, result in results.items() if k in plain}
    return {key: value for key, value in found.items() if value is not None}


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None if there are no values."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread; None if there are no values."""
    if not values:
        return None
    first = middle = third = values[0]
    if len(values) > 1:
        first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(min(values), first, middle, third, max(values))


def _over_categories(
    results: Mapping[_Key, Result], speedups: Mapping[_Key, float]
) -> float | None:
    """Return the geometric mean over the categories of the geometric means over their answers."""
    means = [geometric_mean(values) for values in _grouped(results, speedups).values()]
    return geometric_mean([mean for mean in means if mean is not None])


def _grouped(
    results: Mapping[_Key, Result], speedups: Mapping[_Key, float]
) -> dict[str, list[float]]:
    """Return the speed-ups by category; each category has a list."""
    by_category: dict[str, list[float]] = {}
    for key, result in results.items():
        own = by_category.setdefault(result.category, [])
        if key in speedups:
            own.append(speedups[key])
    return by_category


def _by_category(
    results: Mapping[_Key, Result], speedups: Mapping[_Key, float]
) -> tuple[CategoryFigures, ...]:
    found = []
    for category, own in _grouped(results, speedups).items():
        outcomes = [each.outcome for each in results.values() if each.category == category]
        mean = geometric_mean(own)
        found.append(CategoryFigures(category, len(outcomes), mean, spread(own), _speeds(outcomes)))
    return tuple(found)


def _worst(speedups: Mapping[_Key, float]) -> Worst | None:
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for (prompt, _), speedup in speedups.items():
        by_prompt[prompt].append(speedup)
    means = [Worst(n, geometric_mean(values) or 0.0) for n, values in by_prompt.items()]
    return min(means, key=lambda worst: worst.speedup, default=None)


# --- counts and times ----------------------------------------------------------------------------------


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _speeds(outcomes: Sequence[Outcome]) -> Spread | None:
    return spread([outcome.tokens_per_s for outcome in outcomes if outcome.tokens_per_s])


def _by_position(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    drafted: defaultdict[int, int] = defaultdict(int)
    accepted: defaultdict[int, int] = defaultdict(int)
    for outcome in outcomes:
        for position, n in enumerate(outcome.drafted_by_depth):
            drafted[position] += n
        for position, n in enumerate(outcome.accepted_by_depth):
            accepted[position] += n
    shares: list[float] = []
    while drafted[len(shares)] >= _MIN_DRAFTED:
        shares.append(accepted[len(shares)] / drafted[len(shares)])
    return tuple(shares)


def _mean_length(outcomes: Sequence[Outcome]) -> float | None:
    """Return the tokens a round, over the rounds of all answers."""
    known = [
        (outcome.mean_accepted_length, outcome.n_rounds)
        for outcome in outcomes
        if outcome.mean_accepted_length is not None and outcome.n_rounds
    ]
    n_rounds = sum(n for _, n in known)
    return sum(mean * n for mean, n in known) / n_rounds if n_rounds else None


def _shares(outcomes: Sequence[Outcome]) -> Shares | None:
    times = [(each.target_s, each.draft_s, each.own_s) for each in outcomes]
    known = [time for time in times if None not in time]
    n_tokens = sum(max(0, outcome.n_tokens - 1) for outcome in outcomes)
    target, draft, own = (sum(time[part] or 0.0 for time in known) for part in range(3))
    whole = target + draft + own
    if len(known) < len(times) or not whole or not n_tokens:
        return None
    return Shares(target / whole, draft / whole, own / whole, whole / n_tokens)


# --- the report ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of a benchmark. `about` has the machine, versions, command line and settings.

    `contenders` describes each contender: its `target`, `temperature`, `name` and `drafters`. Both are JSON
    values."""

    about: Mapping[str, Any]
    contenders: Sequence[Mapping[str, Any]]
    prompts: Sequence[BenchPrompt]
    n_rounds: int
    runs: Runs
    figures: Sequence[ContenderFigures]
    is_interrupted: bool = False
    #: The share of all cores' time that other programs took meanwhile; None if it is unknown.
    others_share: float | None = None

    @property
    def lineups(self) -> list[tuple[str, float]]:
        """The targets and temperatures that have figures."""
        return list(dict.fromkeys((each.target, each.temperature) for each in self.figures))

    @property
    def categories(self) -> list[str]:
        """The categories of the prompts that were answered."""
        return list(dict.fromkeys(own.category for each in self.figures for own in each.categories))

    def of(self, lineup: tuple[str, float]) -> list[ContenderFigures]:
        """Return the figures of a lineup, plain decoding first."""
        return [each for each in self.figures if (each.target, each.temperature) == lineup]


def to_json_object(report: BenchReport) -> dict[str, Any]:
    """Return everything as JSON values, with times in seconds."""
    runs = report.runs
    lists: dict[str, Sequence[Any]] = {
        "figures": report.figures,
        "failures": runs.failures,
        "skipped_prompts": runs.skipped,
        "results": runs.results,
    }
    return {
        **report.about,
        "n_rounds": report.n_rounds,
        "is_interrupted": report.is_interrupted,
        "others_share": report.others_share,
        "prompts": [dataclasses.asdict(prompt) for prompt in report.prompts],
        "contenders": [dict(contender) for contender in report.contenders],
        **{name: [dataclasses.asdict(each) for each in own] for name, own in lists.items()},
    }


def to_html(report: BenchReport) -> str:
    """Return a page that loads nothing and holds the report as JSON; its script makes the tables and bars."""
    page = importlib.resources.files("specgen.measure.bench").joinpath("page.html")
    # In a script element nothing but this would end it.
    data = json.dumps(to_json_object(report), ensure_ascii=False).replace("<", "\\u003c")
    return page.read_text(encoding="utf-8").replace("REPORT", data, 1)
