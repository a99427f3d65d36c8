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
from functools import cached_property
from typing import Any, TypeAlias

from specgen.measure.bench.runs import Outcome, Result, Runs
from specgen.measure.prompts import BenchPrompt
from specgen.text.tally import is_impossible

#: The category of figures over all categories.
OVERALL = "overall"
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
class Worst:
    """The prompt with the smallest speed-up of a contender, by the geometric mean over its rounds."""

    prompt: int
    speedup: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a contender's answers, to all prompts or to those of one category; None means unknown.

    `speedup` over plain decoding is the geometric mean over the answers; that of all prompts is the mean over
    the categories. `speedups` is the spread over the answers, `whole` the speed-up of whole answers, prompts
    included. `first_token` is the median of the time to the first token relative to plain decoding's.
    `n_different` counts answers whose text differs from plain decoding's at temperature 0, where rounding in
    batches may turn a near-tie. `is_impossible` says that the speed-up is larger than the tokens per pass of the
    target allow.
    """

    target: str
    temperature: float
    contender: str
    is_plain: bool
    category: str
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
    mean_accepted_length: float | None
    first_token: float | None
    n_different: int | None
    is_impossible: bool
    categories: tuple[Figures, ...]


def figures_of(results: Iterable[Result]) -> tuple[Figures, ...]:
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


def _figures(
    results: Mapping[_Key, Result], plain: Mapping[_Key, Result], category: str | None = None
) -> Figures:
    """Return a contender's figures; `plain` has plain decoding's answers in the same lineup."""
    parts: list[Figures] = []
    if category is None:
        for name in dict.fromkeys(result.category for result in results.values()):
            own = {key: result for key, result in results.items() if result.category == name}
            parts.append(_figures(own, plain, name))
    first = next(iter(results.values()))
    outcomes = [result.outcome for result in results.values()]
    speedups, wholes = _ratios(results, plain, speedup_of), _ratios(results, plain, _whole_speedup)
    firsts = _ratios(results, plain, _first_token)
    speedup, whole = geometric_mean(speedups.values()), geometric_mean(wholes.values())
    if parts:
        speedup = geometric_mean(each.speedup for each in parts)
        whole = geometric_mean(each.whole for each in parts)
    rounds = [(each.mean_accepted_length, each.n_rounds) for each in outcomes]
    lengths = [(mean, n) for mean, n in rounds if mean is not None and n]
    n_tokens, n_passes = sum(mean * n for mean, n in lengths), sum(n for _, n in lengths)
    mean_length = n_tokens / n_passes if n_passes else None
    n_drafted = _sum(outcome.n_drafted for outcome in outcomes)
    n_accepted = _sum(outcome.n_accepted for outcome in outcomes)
    pairs = [(result, plain[key]) for key, result in results.items() if key in plain]
    n_different = sum(not own.outcome.says_the_same(other.outcome) for own, other in pairs)
    return Figures(
        target=first.target,
        temperature=first.temperature,
        contender=first.contender,
        is_plain=first.is_plain,
        category=category or OVERALL,
        n_answers=len(results),
        n_tokens=sum(outcome.n_tokens for outcome in outcomes),
        speedup=speedup,
        speedups=spread(list(speedups.values())),
        whole=whole,
        worst=_worst(speedups),
        tokens_per_s=spread([each.tokens_per_s for each in outcomes if each.tokens_per_s]),
        n_rounds=_sum(outcome.n_rounds for outcome in outcomes),
        n_drafted=n_drafted,
        acceptance_rate=(n_accepted or 0) / n_drafted if n_drafted else None,
        mean_accepted_length=mean_length,
        first_token=statistics.median(firsts.values()) if firsts else None,
        n_different=n_different if first.temperature <= 0.0 else None,
        is_impossible=speedup is not None and is_impossible(speedup, mean_length),
        categories=tuple(parts),
    )


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


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the known values; None if there are none."""
    logs = [math.log(value) for value in values if value is not None]
    return math.exp(statistics.fmean(logs)) if logs else None


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread; None if there are no values."""
    if not values:
        return None
    first = middle = third = values[0]
    if len(values) > 1:
        first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(min(values), first, middle, third, max(values))


def _worst(speedups: Mapping[_Key, float]) -> Worst | None:
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for (prompt, _), speedup in speedups.items():
        by_prompt[prompt].append(speedup)
    means = [Worst(n, geometric_mean(values) or 0.0) for n, values in by_prompt.items()]
    return min(means, key=lambda worst: worst.speedup, default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# --- the report ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchReport:
    """The results of a benchmark. `about` has the machine, versions, command line and settings.

    `contenders` describes each contender: its `target`, `temperature`, `name` and `drafters`. Both are JSON
    values."""

    about: Mapping[str, Any]
    contenders: Sequence[Mapping[str, Any]]
    prompts: Sequence[BenchPrompt]
    runs: Runs
    n_rounds: int = 1
    is_interrupted: bool = False
    #: The share of all cores' time that other programs took meanwhile; None if it is unknown.
    others_share: float | None = None

    @cached_property
    def figures(self) -> tuple[Figures, ...]:
        return figures_of(self.runs.results)


def to_json_object(report: BenchReport) -> dict[str, Any]:
    """Return everything as JSON values, with times in seconds."""
    runs = report.runs
    lists: dict[str, Sequence[Any]] = {
        "prompts": report.prompts,
        "figures": report.figures,
        "failures": runs.failures,
        "skipped_prompts": runs.skipped,
        "results": runs.results,
    }
    return {
        **report.about,
        "kernels": runs.kernels,
        "n_rounds": report.n_rounds,
        "is_interrupted": report.is_interrupted,
        "others_share": report.others_share,
        "contenders": [dict(contender) for contender in report.contenders],
        **{name: [dataclasses.asdict(each) for each in own] for name, own in lists.items()},
    }


def to_html(report: BenchReport) -> str:
    """Return a page that loads nothing and holds the report as JSON; its script makes the tables and bars."""
    page = importlib.resources.files("specgen.measure.bench").joinpath("page.html")
    # In a script element nothing but this would end it.
    data = json.dumps(to_json_object(report), ensure_ascii=False).replace("<", "\\u003c")
    return page.read_text(encoding="utf-8").replace("REPORT", data, 1)
