"""Write the tables of BENCHMARKS.md from the results of `benchmarks/spec_bench.py`.

    python -m benchmarks.spec_bench_table benchmarks/results/spec-bench.jsonl --half dev.jsonl

Prints Markdown. `--half` names a file with the questions that were used for tuning: there are
tables for these, for the others, and for all questions. `--longer-than 50` leaves out answers of up
to 50 tokens.

- A speed-up compares the tokens per second after the first token with those of plain decoding for
  the same question in the same turn. The speed-up of whole answers includes the prefill.
- If an answer was repeated, the median of the repeats counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.spec_bench import (
    CONTROL,
    PLAIN,
    VERSION_MARK,
    Results,
    read_results,
    speedup,
)
from benchmarks.spec_bench_questions import SpecBenchError, read_ids, task_of

_PERCENT = 100
#: An answer is reported as disturbed if other programs used more than this share of the cores'
#: time.
_BUSY_SHARE = 0.1


# --- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A contender's answer to a question, compared with another's."""

    question_id: int
    #: The category as Spec-Bench reports it.
    task: str
    target: str
    contender: str
    n_tokens: int
    #: The speed-up after the first token.
    speedup: float
    #: The speed-up with the prefill.
    whole_speedup: float
    #: The tokens that rounds generated, without forced ones, and the number of these rounds.
    n_round_tokens: float
    n_rounds: int
    is_equal: bool
    is_repeated: bool


def comparisons(lines: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Compare all answers with plain decoding, except those of one token, which have no speed."""
    compared: list[Comparison] = []
    for line in lines:
        answers = _by_contender(line)
        for name in answers:
            if name != PLAIN:
                compared += _compared(line, answers, name, base=PLAIN)
    return compared


def version_comparisons(lines: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Compare the answers of this version with those of other versions with the same draft.

    Repeats are left out, because they were made when one of the two was slow.
    """
    all_compared: list[Comparison] = []
    for line in lines:
        first = {
            name: {attempt: answer for attempt, answer in attempts.items() if attempt == 0}
            for name, attempts in _by_contender(line).items()
        }
        for name in first:
            draft, mark, _ = name.partition(VERSION_MARK)
            if mark and draft in first:
                compared = _compared(line, first, draft, base=name)
                label = f"{draft} over {name}"
                all_compared += (replace(each, contender=label) for each in compared)
    return all_compared


#: A contender's answers to a question, by attempt.
_Attempts = dict[int, Mapping[str, Any]]


def _by_contender(line: Mapping[str, Any]) -> dict[str, _Attempts]:
    attempts: dict[str, _Attempts] = defaultdict(dict)
    for answer in line["answers"]:
        attempts[answer["contender"]][answer["attempt"]] = answer
    return dict(attempts)


def _compared(
    line: Mapping[str, Any],
    answers: Mapping[str, _Attempts],
    name: str,
    base: str,
) -> Iterator[Comparison]:
    """Yield the comparison of a contender with another one, if both speeds are known."""
    attempts = answers[name]
    # If there are repeats, the first attempt does not count: it was repeated because it was slow.
    counted = [attempt for attempt in attempts if attempt > 0] or [0]
    pairs = [(attempts[attempt], answers[base][attempt]) for attempt in counted]
    speedups = []
    whole_speedups = []
    for own, other in pairs:
        ratio = speedup(own, other)
        if ratio is not None:
            speedups.append(ratio)
            whole_speedups.append(other["wall_s"] / own["wall_s"])
    if not speedups:
        return
    first = attempts[0]
    yield Comparison(
        question_id=line["question_id"],
        task=task_of(line["category"]),
        target=line["target"],
        contender=name,
        n_tokens=first["n_tokens"],
        speedup=statistics.median(speedups),
        whole_speedup=statistics.median(whole_speedups),
        n_round_tokens=(first["mean_accepted_length"] or 0.0) * first["n_rounds"],
        n_rounds=first["n_rounds"],
        is_equal=all(answer.get("is_equal", True) for answer in attempts.values()),
        is_repeated=counted != [0],
    )


# --- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a contender over several questions."""

    n_answers: int
    #: The geometric mean of the speed-ups.
    speedup: float
    #: The first and the third quartile of the speed-ups.
    quartiles: tuple[float, float]
    #: The 5th percentile of the speed-ups.
    low: float
    worst: float
    #: The share of answers that are at least as fast as plain decoding.
    share_not_slower: float
    #: The tokens per pass of the target; None if they are unknown.
    tokens_per_pass: float | None
    #: The geometric mean of the speed-ups of whole answers.
    whole_speedup: float
    n_equal: int
    n_repeated: int


def summary_of(compared: Sequence[Comparison]) -> Summary:
    """Summarise at least one comparison. All comparisons have the same weight."""
    speedups = [each.speedup for each in compared]
    n_rounds = sum(each.n_rounds for each in compared)
    n_round_tokens = sum(each.n_round_tokens for each in compared)
    return Summary(
        n_answers=len(compared),
        speedup=statistics.geometric_mean(speedups),
        quartiles=(percentile(speedups, 25), percentile(speedups, 75)),
        low=percentile(speedups, 5),
        worst=min(speedups),
        share_not_slower=sum(ratio >= 1.0 for ratio in speedups) / len(speedups),
        tokens_per_pass=n_round_tokens / n_rounds if n_rounds else None,
        whole_speedup=statistics.geometric_mean(each.whole_speedup for each in compared),
        n_equal=sum(each.is_equal for each in compared),
        n_repeated=sum(each.is_repeated for each in compared),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated between the two nearest values."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=_PERCENT, method="inclusive")[percent - 1]


def grouped(
    compared: Iterable[Comparison], key: Callable[[Comparison], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Comparison]]:
    """Group comparisons by a key, in the order in which the keys first appear."""
    groups: dict[tuple[str, ...], list[Comparison]] = defaultdict(list)
    for each in compared:
        groups[key(each)].append(each)
    return dict(groups)


# --- Markdown ---------------------------------------------------------------------------------

_COLUMNS = (
    "setting",
    "answers",
    "speed-up",
    "quartiles",
    "5th percentile",
    "worst",
    "1.0 or more",
    "tokens per pass",
    "whole answers",
    "identical texts",
    "repeated",
)


def tables(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of two tables: the contenders, and their speed-ups by category."""
    if not compared:
        yield "No answers yet."
        return
    yield from _summary_table(compared)
    yield ""
    yield from _task_table(compared)


def _summary_table(compared: Sequence[Comparison]) -> Iterator[str]:
    yield from _head(_COLUMNS)
    for (target, contender), group in _in_order(compared).items():
        yield _row(_cells(_label(target, contender, compared), summary_of(group)))


def _cells(name: str, summary: Summary) -> tuple[str, ...]:
    first, third = summary.quartiles
    passes = summary.tokens_per_pass
    return (
        name,
        str(summary.n_answers),
        f"{summary.speedup:.2f}",
        f"{first:.2f} to {third:.2f}",
        f"{summary.low:.2f}",
        f"{summary.worst:.2f}",
        f"{summary.share_not_slower:.0%}",
        "" if passes is None else f"{passes:.2f}",
        f"{summary.whole_speedup:.2f}",
        f"{summary.n_equal} of {summary.n_answers}",
        str(summary.n_repeated),
    )


def _task_table(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield the lines of a table with a row for each category and a column for each contender."""
    contenders = list(_in_order(compared))
    labels = [_label(target, contender, compared) for target, contender in contenders]
    yield from _head(["category", *labels])
    by_task = grouped(compared, lambda each: (each.task,))
    for (task,) in sorted(by_task):
        by_contender = _in_order(by_task[(task,)])
        groups = [by_contender.get(contender, []) for contender in contenders]
        yield _row(
            [task, *(f"{summary_of(group).speedup:.2f}" if group else "" for group in groups)]
        )


def _in_order(compared: Sequence[Comparison]) -> dict[tuple[str, ...], list[Comparison]]:
    """Group by target and contender. Contenders are sorted by name, with controls last."""
    groups = grouped(compared, lambda each: (each.target, each.contender))
    targets = list(dict.fromkeys(each.target for each in compared))
    order = sorted(
        groups, key=lambda key: (targets.index(key[0]), key[1].startswith(CONTROL), key[1])
    )
    return {key: groups[key] for key in order}


def _label(target: str, contender: str, compared: Sequence[Comparison]) -> str:
    """Return the contender's name, followed by its target unless that is the first one."""
    if target == compared[0].target:
        return contender
    return f"{contender}, {target}"


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _row(columns)
    yield _row(["---"] * len(columns))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def circumstances(results: Results) -> Iterator[str]:
    """Yield lines about the questions, the machines, the commits and the commands."""
    ids_by_target: dict[str, set[int]] = defaultdict(set)
    for line in results.lines:
        ids_by_target[line["target"]].add(line["question_id"])
    for target, ids in ids_by_target.items():
        yield f"- questions for {target}: {len(ids)}"
    for name, values in _circumstances(results).items():
        yield f"- {name}: {'; '.join(values)}"
    shares = [
        answer["others_share"]
        for line in results.lines
        for answer in line["answers"]
        if answer.get("others_share") is not None
    ]
    if shares:
        n_busy = sum(share > _BUSY_SHARE for share in shares)
        yield (
            f"- answers during which other programs used more than {_BUSY_SHARE:.0%} of the cores' "
            f"time: {n_busy} of {len(shares)}"
        )


def _circumstances(results: Results) -> dict[str, list[str]]:
    """Return the distinct values of each circumstance, by its name."""
    values_by_name: dict[str, dict[str, None]] = defaultdict(dict)
    for run in results.runs:
        machine = run["machine"]
        cores = machine["n_logical_cores"]
        values_by_name["machine"][
            f"{machine['cpu']}, {cores} logical cores, {machine['system']}"
        ] = None
        for contenders in run["about"].values():
            for contender, about in contenders.items():
                _, _, version = contender.partition(VERSION_MARK)
                name = f"specgen ({version})" if version else "specgen"
                values_by_name[name][f"commit {about['commit']}, kernels {about['kernels']}"] = None
        values_by_name["tokens"][f"up to {run['max_tokens']}, at temperature 0"] = None
        values_by_name["command"][f"`{run['command']}`"] = None
    return {name: list(values) for name, values in values_by_name.items()}


# --- the command ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--half", type=Path, help="the file of the questions for tuning")
    parser.add_argument(
        "--longer-than", type=int, default=0, metavar="N", help="only answers of more than N tokens"
    )
    arguments = parser.parse_args()
    try:
        results = read_results(arguments.results)
        dev_ids = read_ids(arguments.half) if arguments.half is not None else None
    except SpecBenchError as error:
        sys.exit(error.message)
    for line in report(results, dev_ids, arguments.longer_than):
        print(line)


def report(
    results: Results, dev_ids: frozenset[int] | None = None, longer_than: int = 0
) -> Iterator[str]:
    """Yield the lines of all tables.

    Args:
        results: The results.
        dev_ids: The questions for tuning, which get separate tables; None for no such tables.
        longer_than: Answers with no more tokens than this are left out.
    """
    yield from circumstances(results)
    kinds = {
        "": comparisons(results.lines),
        "Relative to the other version, ": version_comparisons(results.lines),
    }
    for title, compared in kinds.items():
        chosen = [each for each in compared if each.n_tokens > longer_than]
        if not chosen:
            continue
        parts = {"all questions": chosen}
        if dev_ids is not None:
            parts["the questions for tuning"] = [
                each for each in chosen if each.question_id in dev_ids
            ]
            parts["the other questions"] = [
                each for each in chosen if each.question_id not in dev_ids
            ]
        for name, part in parts.items():
            heading = f"{title}{name}"
            yield ""
            yield f"**{heading[0].upper()}{heading[1:]}**"
            yield ""
            yield from tables(part)


if __name__ == "__main__":
    main()
