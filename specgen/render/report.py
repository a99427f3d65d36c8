"""The report of `specgen verify`, for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specgen.proof import Difference, GreedyResult, Report, SampledResult
from specgen.render.text import clean_line

#: Wide enough for the tables where output goes to a file.
_WIDTH = 110


def print_report(report: Report, console: Console) -> None:
    """Print what was checked, what was found, and what it comes to."""
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(
        Text(
            f"{report.target}, drafted for by {report.draft}: at most {report.draft_max} tokens a "
            f"draft, verifier {report.verifier}"
        )
    )
    if report.seeded_bug is not None:
        console.print(Text(f"with a bug built in: {report.seeded_bug}", "bold"))
    if report.greedy:
        _print_greedy(report, console)
    if report.sampled:
        _print_sampled(report, console)
    console.print()
    console.print(_verdict(report))


def _print_greedy(report: Report, console: Console) -> None:
    results, differing = report.greedy, report.differences
    n_tokens = sum(result.n_tokens for result in results)
    defects = [r for r in differing if r.difference is not None and r.difference.is_defect]
    console.print()
    console.print(Text("Greedy", "bold"))
    console.print(
        f"  {_count(len(results), 'prompt')}, {_count(n_tokens, 'token')}; "
        f"{_drafts(results)}\n"
        f"  {len(results) - len(differing)} equal, "
        f"{_count(len(differing) - len(defects), 'near-tie')}, {_count(len(defects), 'defect')}",
        highlight=False,
    )
    if differing:
        console.print(Padding(_differences(differing, console.encoding), (0, 2)))


def _differences(results: list[GreedyResult], encoding: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("prompt", justify="right")
    table.add_column("token", justify="right")
    table.add_column("plain, logit")
    table.add_column("speculative, logit")
    table.add_column("gap", justify="right")
    table.add_column("moved by", justify="right")
    table.add_column("batches alone move", justify="right")
    table.add_column("")
    for result in results:
        difference = result.difference
        if difference is None:
            continue
        plain, other = difference.plain, difference.speculative
        table.add_row(
            str(result.prompt),
            str(difference.position),
            Text(f"{_token(plain.text, encoding)} {plain.plain_logit:.3f}"),
            Text(f"{_token(other.text, encoding)} {other.plain_logit:.3f}"),
            f"{difference.gap:.3f}",
            f"{difference.moved:.3f}",
            f"{difference.batches_move:.3f}",
            _why(difference),
        )
    return table


def _why(difference: Difference) -> Text:
    if difference.is_defect:
        return Text("defect", "bold red")
    if difference.same_in_batches_of is not None:
        return Text(f"plain too, in batches of {difference.same_in_batches_of}")
    return Text("near-tie")


def _print_sampled(report: Report, console: Console) -> None:
    console.print()
    console.print(Text(f"Sampled, temperature {report.sampler.temperature:g}", "bold"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in (
        "place", "draws", "accepted", "tokens", "cells", "G", "p", "distance", "95 %",
        "if exact", "finds",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("")
    for result in report.sampled:
        for depth in result.depths:
            first = depth is result.depths[0]
            distance, test = depth.distance, depth.test
            failed = test.p_value <= result.level
            table.add_row(
                f"{result.prompt}+{result.n_answer}" if first else "",
                str(result.n_draws) if first else "",
                _rate(result) if first else "",
                str(depth.n_tokens),
                str(test.n_cells),
                f"{test.statistic:.1f}",
                f"{test.p_value:.2g}",
                f"{distance.measured:.3f}",
                f"{distance.lower:.3f} to {distance.upper:.3f}",
                f"{distance.if_exact:.3f}",
                f"{depth.detectable:.3f}",
                Text("defect", "bold red") if failed else Text("fits"),
            )
    console.print(Padding(table, (0, 2)))
    for result in report.sampled:
        rows = result.rows
        console.print(
            Text.assemble(
                f"  place {result.prompt}+{result.n_answer}: {rows.n_rows} rows of rounds are within "
                f"{rows.largest:.4f} of plain ones; batches alone move them by {rows.by_batches:.4f}",
                (" defect", "bold red") if rows.is_defect else "",
            )
        )
    console.print(
        Text(
            "  A test fails below p = "
            f"{report.sampled[0].level:.1g}. Distances are total variation distances of the joint "
            "distribution of that many tokens, with a 95 % interval; `if exact` is what an exact "
            "sampler shows on average, and a distance of `finds` is found with 99 % probability.",
            "dim",
        )
    )


def _verdict(report: Report) -> Text:
    if report.verdict == "defect":
        return Text("Not lossless: at least one defect.", "bold red")
    if report.verdict == "nothing drafted":
        return Text("Nothing was drafted, so nothing was shown; try more prompts.", "bold")
    return Text("Lossless: no defect found.", "bold green")


def _drafts(results: tuple[GreedyResult, ...]) -> str:
    n_drafted = sum(result.n_drafted for result in results)
    n_accepted = sum(result.n_accepted for result in results)
    if not n_drafted:
        return "nothing was drafted"
    return f"{n_accepted} of {_count(n_drafted, 'drafted token')} accepted"


def _rate(result: SampledResult) -> str:
    return f"{result.n_accepted / result.n_drafted:.0%}" if result.n_drafted else "none"


def _token(text: str, encoding: str) -> str:
    return repr(clean_line(text.replace("Ġ", " ").replace("▁", " "), encoding))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


__all__ = ["print_report"]
