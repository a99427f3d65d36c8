"""The report of `specgen verify`, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specgen.measure.proof import Difference, GreedyResult, ProofReport, SampledResult, WayName
from specgen.render.text import clean_line, counted

#: Wide enough to read where output goes to a file.
_WIDTH = 100
_HEADING = "bold"
_DEFECT = "bold red"
_EXPLANATION = "dim"
#: The ways to decide how much is drafted, in a line each.
_WAYS: Mapping[WayName, str] = {
    "cost": "As `specgen run` drafts: costs decide (--policy cost)",
    "threshold": "As `specgen run` drafts: the draft's probability decides (--policy threshold)",
    "fixed": "As `specgen run` drafts: a fixed length (--policy fixed, or --tree)",
    "forced": "With a draft in every round, whatever it costs, by model and n-grams in turn",
}


def print_report(report: ProofReport, console: Console) -> None:
    """Print the checks, their results, and the verdict."""
    if not console.is_terminal:
        console.width = _WIDTH
    _print(
        console,
        f"{report.target} with drafts from {report.draft}: at most "
        f"{counted(report.draft_max, 'token')} a draft, verifier {report.verifier}",
    )
    if report.kernels:
        _print(console, f"computed by {report.kernels}")
    if report.seeded_bug is not None:
        _print(console, f"with a planted bug: {report.seeded_bug}", style=_HEADING)
    for skipped in report.skipped:
        _print(console, f"prompt {skipped.prompt} was skipped: {skipped.reason}")
    if report.greedy:
        _print_greedy(report, console)
    if report.sampled:
        _print_sampled(report, console)
    elif report.check != "greedy" and not report.is_interrupted:
        console.print()
        _print(console, "Sampled", style=_HEADING)
        _print(
            console, "nothing was drafted in any answer, so there was nothing to sample", indent=2
        )
    if report.unequal_rows:
        console.print()
        _print(console, f"Rows of this model depend on their batch: {report.unequal_rows}")
    console.print()
    console.print(_verdict(report))


def _print(console: Console, text: str | Text, *, indent: int = 0, style: str = "") -> None:
    """Print a paragraph with all lines indented."""
    paragraph = Text(text, style) if isinstance(text, str) else text
    console.print(Padding(paragraph, (0, 0, 0, indent), expand=False))


# --- greedy ---------------------------------------------------------------------------------


def _print_greedy(report: ProofReport, console: Console) -> None:
    console.print()
    _print(console, "Greedy: the same text with and without drafts?", style=_HEADING)
    for way, n_at_once in dict.fromkeys((each.way, each.n_at_once) for each in report.greedy):
        results = [each for each in report.greedy if (each.way, each.n_at_once) == (way, n_at_once)]
        how = f"; {n_at_once} answers at once, as `specgen batch` and `serve` make them"
        _print(console, _WAYS[way] + (how if n_at_once > 1 else ""), indent=2)
        _print_greedy_results(results, console)


def _print_greedy_results(results: Sequence[GreedyResult], console: Console) -> None:
    """Print the results of one way to draft."""
    differing = [result for result in results if result.difference is not None]
    n_near_ties = sum(not result.is_defect for result in differing)
    n_defects = sum(result.is_defect for result in results)
    n_equal = sum(r.difference is None and not r.is_defect for r in results)
    n_tokens = sum(result.n_tokens for result in results)
    _print(
        console,
        f"{counted(len(results), 'prompt')}, {counted(n_tokens, 'token')}; {_drafts(results)}",
        indent=4,
    )
    _print(
        console,
        f"{n_equal} equal, {counted(n_near_ties, 'near-tie')}, {counted(n_defects, 'defect')}",
        indent=4,
    )
    for result in results:
        if result.difference is not None:
            _print(console, _difference(result, result.difference, console.encoding), indent=4)
    worst = max(results, key=lambda r: (r.is_moved, r.moved_by))
    _print(
        console,
        _moved(
            sum(result.n_rows for result in results),
            worst.moved_by,
            worst.batches_move,
            exact_rows=worst.exact_rows,
            is_defect=worst.is_moved,
        ),
        indent=4,
    )


def _difference(result: GreedyResult, difference: Difference, encoding: str) -> Text:
    plain, other = difference.plain, difference.speculative
    where = f"prompt {result.prompt}, token {difference.position + 1}: "
    if -1 in (plain.token_id, other.token_id):
        shorter = "plain" if plain.token_id == -1 else "speculative"
        return Text.assemble(where, ("defect", _DEFECT), f": the {shorter} text ends here")
    taken = (
        f"plain takes {_token(plain.text, encoding)}, speculative "
        f"{_token(other.text, encoding)}; the gap is {difference.gap:.2g} logits; "
    )
    if not difference.was_chosen:
        why = "the target did not choose that token"
    else:
        why = (
            f"the row moved by {difference.moved_by:.2%}, batches alone move rows by up to "
            f"{difference.batches_move:.2%}"
        )
    if difference.same_in_batches_of is not None:
        why += f" (so does plain decoding in batches of {difference.same_in_batches_of})"
    verdict = ("defect", _DEFECT) if difference.is_defect else ("near-tie", "")
    return Text.assemble(where, verdict, f": {taken}{why}")


# --- sampled --------------------------------------------------------------------------------


def _print_sampled(report: ProofReport, console: Console) -> None:
    console.print()
    heading = f"Sampled at temperature {report.sampler.temperature:g}: the target's distribution?"
    _print(console, heading, style=_HEADING)
    way = None
    for result in report.sampled:
        if result.way != way:
            way = result.way
            _print(console, _WAYS[way], indent=2)
        _print(
            console,
            f"prompt {result.prompt}, after {counted(result.n_answer, 'token')} of its answer: "
            f"{result.n_draws} draws, {_drafts((result,))}",
            indent=4,
        )
        console.print(Padding(_tests(result), (0, 0, 0, 6), expand=False))
        if result.n_impossible:
            impossible = (
                f"{counted(result.n_impossible, 'draw')} to which the target gives probability 0"
            )
            _print(console, Text(impossible, _DEFECT), indent=6)
        rows = result.rows
        moved = _moved(
            rows.n_rows,
            rows.moved_by,
            rows.batches_move,
            exact_rows=rows.exact_rows,
            is_defect=rows.is_defect,
        )
        _print(console, moved, indent=6)
    level = report.sampled[0].level
    _print(
        console,
        f"A test fails below p = {level:.1g}. Distances are total variation distances of the joint "
        "distribution of so many tokens: measured, with a 95 % interval, and what an exact sampler "
        "shows on average; one of `detects` or more is found with 99 % probability.",
        indent=2,
        style=_EXPLANATION,
    )


def _tests(result: SampledResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style=_EXPLANATION)
    for name in ("tokens", "cells", "p", "distance", "95 %", "if exact", "detects"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for depth in result.depths:
        distance, test = depth.distance, depth.test
        verdict = Text("fits")
        if test.p_value <= result.level:
            verdict = Text("defect", _DEFECT)
        elif test.n_cells == 1:
            verdict = Text("no test")
        table.add_row(
            str(depth.n_tokens),
            str(test.n_cells),
            f"{test.p_value:.2g}",
            f"{distance.measured:.3f}",
            f"{distance.lower:.3f}-{distance.upper:.3f}",
            f"{distance.if_exact:.3f}",
            f"{depth.detectable:.3f}" if test.n_cells > 1 else "nothing",
            verdict,
        )
    return table


# --- both -----------------------------------------------------------------------------------


def _moved(n_rows: int, by: float, by_batches: float, *, exact_rows: bool, is_defect: bool) -> Text:
    if exact_rows and not is_defect:
        return Text(
            f"{counted(n_rows, 'row')} of logits are those of plain decoding, bit by bit: specgen's kernels are "
            "batch-invariant"
        )
    # How far batches alone move rows is measured only where rows moved by more than is always allowed.
    explained = (
        f"; batches alone move them by up to {by_batches:.2%}" if by_batches or is_defect else ""
    )
    return Text.assemble(
        f"{counted(n_rows, 'row')} of logits moved by up to {by:.2%}{explained}",
        (": defect", _DEFECT) if is_defect else "",
    )


def _verdict(report: ProofReport) -> Text:
    if report.verdict == "defect":
        return Text("Not lossless: at least one defect.", _DEFECT)
    if report.verdict == "interrupted":
        return Text("Interrupted: no defect in what was checked.", "bold")
    if report.verdict == "nothing drafted":
        checks = ", ".join(report.undrafted)
        return Text(f"Nothing was drafted, so nothing was checked: {checks}.", _DEFECT)
    return Text("Lossless: no defect found.", "bold green")


def _drafts(results: Sequence[GreedyResult] | Sequence[SampledResult]) -> str:
    n_drafted = sum(result.n_drafted for result in results)
    n_accepted = sum(result.n_accepted for result in results)
    if not n_drafted:
        return "nothing was drafted"
    drafters: Counter[str] = Counter()
    for result in results:
        drafters.update(result.drafted_by)
    by = ", ".join(f"{name} {n}" for name, n in drafters.most_common())
    drafted = counted(n_drafted, "drafted token") + (f" ({by})" if len(drafters) > 1 else "")
    return f"{n_accepted / n_drafted:.0%} of {drafted} accepted"


def _token(text: str, encoding: str) -> str:
    return repr(clean_line(text.replace("Ġ", " ").replace("▁", " "), encoding))
