"""The report that `specgen verify` prints, which fits on one screen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specgen.measure.exactness.greedy_check import GreedyResult
from specgen.measure.exactness.near_ties import Difference
from specgen.measure.exactness.report import VerifyReport
from specgen.measure.exactness.sampled_check import SampledResult
from specgen.measure.exactness.ways_to_draft import WayName
from specgen.render.rows import clean_line
from specgen.system.quantities import counted

_DEFECT_STYLE = "bold red"
#: The ways to draft, in words.
_WAY_TEXTS: Mapping[WayName, str] = {
    "cost": "as `specgen run` drafts: costs decide (--policy cost)",
    "threshold": "as `specgen run` drafts: the draft's probability decides (--policy threshold)",
    "fixed": "as `specgen run` drafts: a fixed length (--policy fixed, or --tree)",
    "forced": "with a draft in every round, whatever it costs",
}

#: A line of the report: the number of columns by which it is indented, and its text.
_ReportLine: TypeAlias = tuple[int, "str | Text"]


def print_report(report: VerifyReport, console: Console) -> None:
    """Print a report; only a terminal wraps its lines."""
    for indent, line in _lines(report):
        text = Text(clean_line(line)) if isinstance(line, str) else line
        if console.is_terminal:
            console.print(Padding(text, (0, 0, 0, indent), expand=False))
        else:
            console.print(Text(" " * indent) + text, soft_wrap=True)


def _lines(report: VerifyReport) -> Iterator[_ReportLine]:
    yield from _heading(report)
    yield from _greedy_part(report)
    yield from _sampled_part(report)
    yield 0, _verdict_line(report)


# --- the parts of the report


def _heading(report: VerifyReport) -> Iterator[_ReportLine]:
    """Yield the settings, and what could not be checked as the user asked for it."""
    max_tokens = counted(report.draft_max, "token")
    settings = f"at most {max_tokens} per draft, verifier {report.verifier}"
    yield 0, f"{report.target} with drafts from {report.draft}: {settings}"
    for line in report.instead:
        yield 2, line
    if report.kernels:
        yield 0, f"computed by {report.kernels}"
    if report.unequal_rows:
        yield 0, f"this model is not batch-invariant: {report.unequal_rows}"
    for number in report.skipped:
        yield 0, f"prompt {number} was skipped: the context has no room for it"


def _greedy_part(report: VerifyReport) -> Iterator[_ReportLine]:
    """Yield the greedy results, grouped by the way to draft and the number of answers at once."""
    if report.greedy:
        yield 0, Text("Greedy: the same text with and without drafts?", "bold")
    groups: dict[tuple[WayName, int], list[GreedyResult]] = defaultdict(list)
    for result in report.greedy:
        groups[result.way, result.n_at_once].append(result)
    for (way, n_at_once), results in groups.items():
        at_once = f"; {n_at_once} answers at once" if n_at_once > 1 else ""
        yield 2, _WAY_TEXTS[way] + at_once
        yield 4, _greedy_counts(results)
        for result in results:
            if result.difference is not None:
                yield 6, _difference_line(result.prompt, result.difference)


def _sampled_part(report: VerifyReport) -> Iterator[_ReportLine]:
    """Yield the sampled results, with the way to draft of each."""
    if report.sampled:
        temperature = f"{report.sampler.temperature:g}"
        question = f"Sampled at temperature {temperature}: the target's distribution?"
        yield 0, Text(question, "bold")
    elif report.check != "greedy" and not report.is_interrupted:
        yield 0, "Sampled: nothing was drafted in any answer, so there was nothing to sample"
    for result in report.sampled:
        yield 2, _WAY_TEXTS[result.way]
        yield 4, _sampled_line(result)


# --- lines


def _verdict_line(report: VerifyReport) -> Text:
    """Return the verdict on all checks in a sentence."""
    checked = _checked(report)
    if report.verdict == "defect":
        failed = ", ".join(_failures(report))
        return Text(f"FAIL: the output differs from the target's own in {failed}", _DEFECT_STYLE)
    if report.verdict == "interrupted":
        return Text(f"INTERRUPTED: no difference found in {checked} so far", "bold")
    if report.verdict == "nothing drafted":
        undrafted = ", ".join(report.undrafted)
        reason = f"nothing was drafted, so nothing was checked: {undrafted}"
        return Text(f"FAIL: {reason}", _DEFECT_STYLE)
    n_near_ties = sum(result.difference is not None for result in report.greedy)
    found = "no difference found"
    if n_near_ties:
        near_ties = counted(n_near_ties, "near-tie")
        found = f"no difference found that rounding does not explain ({near_ties})"
    if report.instead:
        rest = "but not everything was checked as asked (see above)"
        return Text(f"PASS: {found} in {checked}, {rest}", "bold")
    return Text(f"PASS: {found} in {checked}", "bold green")


def _checked(report: VerifyReport) -> str:
    """Return what was checked: the number of answers and of samples."""
    parts: list[str] = []
    if report.check != "sampled":
        parts.append(counted(len(report.greedy), "answer"))
    if report.check != "greedy":
        parts.append(counted(sum(result.n_samples for result in report.sampled), "sample"))
    return " and ".join(parts)


def _failures(report: VerifyReport) -> Iterator[str]:
    """Yield how many answers, and how many tests of samples, show a defect."""
    n_answers = sum(result.is_defect for result in report.greedy)
    if n_answers:
        yield f"{n_answers} of {counted(len(report.greedy), 'answer')}"
    n_tests = sum(result.is_defect for result in report.sampled)
    if n_tests:
        yield f"{n_tests} of {counted(len(report.sampled), 'sampling test')}"


def _greedy_counts(results: Sequence[GreedyResult]) -> str:
    """Return the number of equal answers, near-ties and defects."""
    n_equal = sum(result.difference is None for result in results)
    n_defects = sum(result.is_defect for result in results)
    n_near_ties = len(results) - n_equal - n_defects
    answers = f"{counted(len(results), 'prompt')}, "
    answers += counted(sum(result.n_tokens for result in results), "token")
    counts = f"{n_equal} equal, {counted(n_near_ties, 'near-tie')}, {counted(n_defects, 'defect')}"
    return f"{answers}: {counts}; {_acceptance(results)}"


def _difference_line(prompt: int, difference: Difference) -> Text:
    """Return what differs in the answer to a prompt, and whether rounding explains it.

    Args:
        prompt: The prompt's number.
        difference: The first difference between the answer and plain decoding's.
    """
    plain = _quoted_token(difference.plain)
    drafted = _quoted_token(difference.drafted)
    details = f"{plain} without drafts, {drafted} with drafts; {difference.gap:.3g} logits apart, "
    if difference.allowed:
        details += f"and batches explain {difference.allowed:.3g} of that"
    else:
        details += "and rows are the same in any batch"
    if difference.same_in_batches_of is not None:
        details += f" (plain decoding does the same in batches of {difference.same_in_batches_of})"
    kind = ("defect", _DEFECT_STYLE) if difference.is_defect else ("near-tie", "")
    place = f"prompt {prompt}, token {difference.position + 1}: "
    return Text.assemble(place, kind, f": {details}")


def _quoted_token(text: str) -> str:
    """Return a token's text in quotes; an empty text means that the answer ended."""
    if not text:
        return "the end"
    # Vocabularies write a space as one of these characters.
    return repr(clean_line(text.replace("Ġ", " ").replace("▁", " ")))


def _sampled_line(result: SampledResult) -> Text:
    """Return the result of a sampled check in a line."""
    conclusion = ("fits", "")
    if result.is_defect:
        conclusion = ("defect", _DEFECT_STYLE)
    elif result.test.n_cells == 1:
        conclusion = ("no test: only one token is likely", "")
    samples = f"{counted(result.n_samples, 'sample')} in {counted(result.test.n_cells, 'cell')}"
    p_value = f"p = {result.test.p_value:.2g} (a defect up to {result.level:.1g})"
    impossible = ""
    if result.n_impossible:
        n_impossible = counted(result.n_impossible, "sample")
        impossible = f", {n_impossible} of tokens to which the target gives probability 0"
    return Text.assemble(
        f"prompt {result.prompt}, after token {result.n_answer}: ",
        f"{samples}, {p_value}{impossible}: ",
        conclusion,
        f"; {_acceptance([result])}",
    )


def _acceptance(results: Sequence[GreedyResult] | Sequence[SampledResult]) -> str:
    """Return the share of drafted tokens that were accepted, in words."""
    n_drafted = sum(result.n_drafted for result in results)
    if not n_drafted:
        return "nothing was drafted"
    n_accepted = sum(result.n_accepted for result in results)
    return f"{n_accepted / n_drafted:.0%} of {counted(n_drafted, 'drafted token')} accepted"
