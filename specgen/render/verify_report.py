"""The report of `specgen verify` for people, on one screen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specgen.measure.exactness import Difference, GreedyResult, SampledResult, VerifyReport, WayName
from specgen.render.rows import clean_line
from specgen.system.quantities import counted

#: Wide enough to be readable in a file.
_WIDTH = 100
_DEFECT = "bold red"
#: The ways to decide how much is drafted, in words.
_WAYS: Mapping[WayName, str] = {
    "cost": "as `specgen run` drafts: costs decide (--policy cost)",
    "threshold": "as `specgen run` drafts: the draft's probability decides (--policy threshold)",
    "fixed": "as `specgen run` drafts: a fixed length (--policy fixed, or --tree)",
    "forced": "with a draft in every round, whatever it costs",
}

#: A line of the report and its indentation.
_ReportLine: TypeAlias = tuple[int, "str | Text"]


def print_report(report: VerifyReport, console: Console) -> None:
    """Print a report."""
    if not console.is_terminal:
        console.width = _WIDTH
    for indent, line in _lines(report):
        text = Text(line) if isinstance(line, str) else line
        console.print(Padding(text, (0, 0, 0, indent), expand=False))


def _lines(report: VerifyReport) -> Iterator[_ReportLine]:
    yield from _heading(report)
    yield from _greedy_part(report)
    yield from _sampled_part(report)


# --- the parts of the report


def _heading(report: VerifyReport) -> Iterator[_ReportLine]:
    yield 0, _outcome(report)
    for line in report.instead:
        yield 2, line
    most = counted(report.draft_max, "token")
    drafts = f"at most {most} per draft, verifier {report.verifier}"
    yield 0, f"{report.target} with drafts from {report.draft}: {drafts}"
    if report.kernels:
        yield 0, f"computed by {report.kernels}"
    if report.unequal_rows:
        yield 0, f"this model is not batch-invariant: {report.unequal_rows}"
    for number in report.skipped:
        yield 0, f"prompt {number} was skipped: the context has no room for it"


def _greedy_part(report: VerifyReport) -> Iterator[_ReportLine]:
    if report.greedy:
        yield 0, Text("Greedy: the same text with and without drafts?", "bold")
    by_check: dict[tuple[WayName, int], list[GreedyResult]] = defaultdict(list)
    for result in report.greedy:
        by_check[result.way, result.n_at_once].append(result)
    for (way, n_at_once), results in by_check.items():
        at_once = f"; {n_at_once} answers at once" if n_at_once > 1 else ""
        yield 2, _WAYS[way] + at_once
        yield 4, _greedy(results)
        for result in results:
            if result.difference is not None:
                yield 6, _difference(result.prompt, result.difference)


def _sampled_part(report: VerifyReport) -> Iterator[_ReportLine]:
    if report.sampled:
        temperature = f"{report.sampler.temperature:g}"
        question = f"Sampled at temperature {temperature}: the target's distribution?"
        yield 0, Text(question, "bold")
    elif report.check != "greedy" and not report.is_interrupted:
        yield 0, "Sampled: nothing was drafted in any answer, so there was nothing to sample"
    for result in report.sampled:
        yield 2, _WAYS[result.way]
        yield 4, _sampled(result)


# --- lines


def _outcome(report: VerifyReport) -> Text:
    if report.verdict == "defect":
        return Text("Not lossless: at least one defect.", _DEFECT)
    if report.verdict == "interrupted":
        return Text("Interrupted: no defect in what was checked.", "bold")
    if report.verdict == "nothing drafted":
        undrafted = ", ".join(report.undrafted)
        return Text(f"Nothing was drafted, so nothing was checked: {undrafted}.", _DEFECT)
    if report.instead:
        return Text("Lossless, but not all was checked that was asked for.", "bold")
    return Text("Lossless: no defect found.", "bold green")


def _greedy(results: Sequence[GreedyResult]) -> str:
    n_equal = sum(result.difference is None for result in results)
    n_defects = sum(result.is_defect for result in results)
    n_near_ties = len(results) - n_equal - n_defects
    answers = f"{counted(len(results), 'prompt')}, "
    answers += counted(sum(result.n_tokens for result in results), "token")
    counts = f"{n_equal} equal, {counted(n_near_ties, 'near-tie')}, {counted(n_defects, 'defect')}"
    return f"{answers}: {counts}; {_drafts(results)}"


def _difference(prompt: int, difference: Difference) -> Text:
    plain = _token(difference.plain)
    drafted = _token(difference.drafted)
    why = f"{plain} without drafts, {drafted} with drafts; {difference.gap:.3g} logits apart, "
    if difference.allowed:
        why += f"of which batches explain {difference.allowed:.3g}"
    else:
        why += "and rows are the same in any batch"
    if difference.same_in_batches_of is not None:
        why += f" (plain decoding does the same in batches of {difference.same_in_batches_of})"
    kind = ("defect", _DEFECT) if difference.is_defect else ("near-tie", "")
    where = f"prompt {prompt}, token {difference.position + 1}: "
    return Text.assemble(where, kind, f": {why}")


def _token(text: str) -> str:
    """Return a token in quotes; an empty text means that the answer ended."""
    if not text:
        return "the end"
    # Vocabularies write a space in one of these ways.
    return repr(clean_line(text.replace("Ġ", " ").replace("▁", " ")))


def _sampled(result: SampledResult) -> Text:
    conclusion = ("fits", "")
    if result.is_defect:
        conclusion = ("defect", _DEFECT)
    elif result.test.n_cells == 1:
        conclusion = ("no test: only one token is likely", "")
    draws = f"{result.n_draws} draws in {result.test.n_cells} cells"
    p_value = f"p = {result.test.p_value:.2g} (a defect up to {result.level:.1g})"
    impossible = ""
    if result.n_impossible:
        n_impossible = counted(result.n_impossible, "draw")
        impossible = f", {n_impossible} of tokens to which the target gives probability 0"
    return Text.assemble(
        f"prompt {result.prompt}, after token {result.n_answer}: {draws}, {p_value}{impossible}: ",
        conclusion,
        f"; {_drafts([result])}",
    )


def _drafts(results: Sequence[GreedyResult] | Sequence[SampledResult]) -> str:
    n_drafted = sum(result.n_drafted for result in results)
    if not n_drafted:
        return "nothing was drafted"
    n_accepted = sum(result.n_accepted for result in results)
    return f"{n_accepted / n_drafted:.0%} of {counted(n_drafted, 'drafted token')} accepted"
