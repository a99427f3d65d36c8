"""The report of `specgen verify`, for people: on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specgen.measure.exactness import Difference, GreedyResult, SampledResult, VerifyReport, WayName
from specgen.render.rows import clean_line
from specgen.system.quantities import counted

#: Wide enough to read where output goes to a file.
_WIDTH = 100
_DEFECT = "bold red"
#: The ways to decide how much is drafted, in a line each.
_WAYS: Mapping[WayName, str] = {
    "cost": "as `specgen run` drafts: costs decide (--policy cost)",
    "threshold": "as `specgen run` drafts: the draft's probability decides (--policy threshold)",
    "fixed": "as `specgen run` drafts: a fixed length (--policy fixed, or --tree)",
    "forced": "with a draft in every round, whatever it costs",
}


def print_report(report: VerifyReport, console: Console) -> None:
    if not console.is_terminal:
        console.width = _WIDTH
    for indent, line in _lines(report):
        text = Text(line) if isinstance(line, str) else line
        console.print(Padding(text, (0, 0, 0, indent), expand=False))


def _lines(report: VerifyReport) -> Iterator[tuple[int, str | Text]]:
    yield 0, _verdict(report)
    for line in report.instead:
        yield 2, line
    most = counted(report.draft_max, "token")
    drafts = f"at most {most} a draft, verifier {report.verifier}"
    yield 0, f"{report.target} with drafts from {report.draft}: {drafts}"
    if report.kernels:
        yield 0, f"computed by {report.kernels}"
    if report.unequal_rows:
        yield 0, f"rows of this model depend on their batch: {report.unequal_rows}"
    for number in report.skipped:
        yield 0, f"prompt {number} was skipped: the context has no room for it"
    if report.greedy:
        yield 0, Text("Greedy: the same text with and without drafts?", "bold")
    for way, n_at_once in dict.fromkeys((each.way, each.n_at_once) for each in report.greedy):
        results = [each for each in report.greedy if (each.way, each.n_at_once) == (way, n_at_once)]
        at_once = f"; {n_at_once} answers at once" if n_at_once > 1 else ""
        yield 2, _WAYS[way] + at_once
        yield 4, _greedy(results)
        for result in results:
            if result.difference is not None:
                yield 6, _difference(result.prompt, result.difference)
    if report.sampled:
        heat = f"{report.sampler.temperature:g}"
        yield 0, Text(f"Sampled at temperature {heat}: the target's distribution?", "bold")
    elif report.check != "greedy" and not report.is_interrupted:
        yield 0, "Sampled: nothing was drafted in any answer, so there was nothing to sample"
    for place in report.sampled:
        yield 2, _WAYS[place.way]
        yield 4, _sampled(place)


def _verdict(report: VerifyReport) -> Text:
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
    n_tokens = counted(sum(result.n_tokens for result in results), "token")
    counts = f"{n_equal} equal, {counted(n_near_ties, 'near-tie')}, {counted(n_defects, 'defect')}"
    return f"{counted(len(results), 'prompt')}, {n_tokens}: {counts}; {_drafts(results)}"


def _difference(prompt: int, difference: Difference) -> Text:
    plain, drafted = (
        repr(clean_line(text.replace("Ġ", " ").replace("▁", " "))) if text else "the end"
        for text in (difference.plain, difference.drafted)
    )
    why = f"{plain} plainly, {drafted} with drafts; {difference.gap:.3g} logits apart, "
    why += (
        f"batches explain {difference.allowed:.3g}" if difference.allowed else "batches move no row"
    )
    if difference.same_in_batches_of is not None:
        why += f" (plain decoding does the same in batches of {difference.same_in_batches_of})"
    kind = ("defect", _DEFECT) if difference.is_defect else ("near-tie", "")
    where = f"prompt {prompt}, token {difference.position + 1}: "
    return Text.assemble(where, kind, f": {why}")


def _sampled(place: SampledResult) -> Text:
    verdict: tuple[str, str] = ("fits", "")
    if place.is_defect:
        verdict = "defect", _DEFECT
    elif place.test.n_cells == 1:
        verdict = "no test: only one token is likely", ""
    impossible = ""
    if place.n_impossible:
        impossible = (
            f", {counted(place.n_impossible, 'draw')} of tokens that the target gives probability 0"
        )
    return Text.assemble(
        f"prompt {place.prompt}, behind token {place.n_answer}: {place.n_draws} draws of {place.test.n_cells} cells, "
        f"p = {place.test.p_value:.2g} (fails up to {place.level:.1g}){impossible}: ",
        verdict,
        f"; {_drafts([place])}",
    )


def _drafts(results: Sequence[GreedyResult] | Sequence[SampledResult]) -> str:
    n_drafted = sum(result.n_drafted for result in results)
    if not n_drafted:
        return "nothing was drafted"
    n_accepted = sum(result.n_accepted for result in results)
    return f"{n_accepted / n_drafted:.0%} of {counted(n_drafted, 'drafted token')} accepted"
