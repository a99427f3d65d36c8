"""``specgen bench``: compares ways to draft with plain decoding, over many prompts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Argument, Option

from specgen.cli import flags
from specgen.cli.inputs import STDIO
from specgen.cli.model_loading import log_shown, use_kernels
from specgen.cli.output import Output
from specgen.errors import OutputError, UsageError
from specgen.measure.bench.plan import about, entries_of, find_drafts, measure, ways_of
from specgen.measure.prompts import first_of_each, given_prompts, own_prompts, read_bench_prompts
from specgen.options import (
    Contexts,
    DraftOptions,
    GenerationOptions,
    PolicyName,
    SamplerOptions,
    SessionOptions,
)
from specgen.render.text import counted
from specgen.system.machine import LoadOfOthers, notes_on_figures
from specgen.system.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specgen.measure.bench.figures import BenchReport
    from specgen.measure.bench.plan import Entry
    from specgen.measure.prompts import BenchPrompt

_POLICIES: tuple[PolicyName, ...] = ("cost", "threshold", "fixed")

_MODELS = flags.panel(
    "Models",
    targets=flags.target_option(
        help="A target: a GGUF file, or a name from `specgen models list`; may be given several times.",
        show_default="the default pair's",
    ),
    drafts=Option(
        "--draft",
        "--model-draft",
        "-md",
        metavar="FILE|NAME|ngram|none",
        autocompletion=flags.draft_names,
        help="What drafts, for every target; may be given several times. In large.gguf+small.gguf the "
        "small one drafts for the large one.",
        show_default="the pair's; with -m alone the one that `specgen run` would use, and ngram",
    ),
    pairs=Option(
        "--pair",
        metavar="NAME",
        autocompletion=flags.pair_names,
        help="A target and its draft, by a name from `specgen models list`; may be given several times.",
    ),
)
_CONTEST = flags.panel(
    "What is measured",
    policies=Option(
        "--policy",
        metavar="NAMES",
        help="How much to draft: cost, threshold or fixed; several with commas, or given several times.",
        show_default=DraftOptions().policy,
    ),
    trees=Option(
        "--tree",
        metavar="auto|off|3,2,1|4x5",
        help="Whether drafts branch, as for `specgen run`; may be given several times.",
        show_default=str(DraftOptions().tree),
    ),
    temperatures=Option(
        "--temp",
        "--temperature",
        min=0.0,
        max=100.0,
        help="A temperature; may be given several times.",
        show_default="0",
    ),
    prompts=Option(
        "--prompts",
        help='JSON Lines with "prompt", or "turns" (the first is used), and "category"; or text with a '
        "prompt on each line.",
        show_default="16 of our own",
    ),
    n_prompts=Option(
        "--count",
        "-N",
        min=1,
        help="How many prompts of each category to use; the first ones.",
        show_default="all",
    ),
    max_tokens=Option(
        "--max-tokens",
        "--predict",
        "--n-predict",
        "-n",
        min=2,
        help="The most tokens of each answer.",
    ),
    n_rounds=Option("--repeat", min=1, help="How often to go through all prompts."),
)
_FILES = flags.panel(
    "Output",
    json_file=Option(
        "--json",
        metavar="FILE",
        help="Write all measurements as JSON; - writes them to standard output instead of the table.",
    ),
    html_file=Option(
        "--html", metavar="FILE", help="Write a report as one self-contained HTML file."
    ),
)


@flags.takes_options(
    _MODELS,
    _CONTEST,
    _FILES,
    chat=flags.CHAT,
    drafting=flags.drafting.without("policy", "tree"),
    sampling=flags.sampling.without("temperature"),
    machine=flags.machine,
    output=flags.loudness,
    texts=Argument(
        metavar="PROMPTS",
        help="Prompts to answer, instead of a file of them.",
        show_default=False,
    ),
)
def bench(
    *,
    texts: list[str] | None = None,
    targets: list[str] | None = None,
    drafts: list[str] | None = None,
    pairs: list[str] | None = None,
    policies: list[str] | None = None,
    trees: list[str] | None = None,
    temperatures: list[float] | None = None,
    prompts: Path | None = None,
    n_prompts: int | None = None,
    max_tokens: int = 128,
    n_rounds: int = 1,
    chat: bool | None = None,
    drafting: DraftOptions,
    sampling: SamplerOptions,
    machine: Contexts,
    json_file: Path | None = None,
    html_file: Path | None = None,
    output: Output,
) -> int:
    """Measure what drafting gains over plain decoding, on your own prompts.

    Plain decoding, and every draft with every policy, answer every prompt
    at every temperature, taking turns in the same run. Speeds are tokens
    per second after the first token.

    In a pipe, it prints the columns' names, then a line for each contender, followed by one for each
    category. The columns, separated by tabs: target; temperature; contender;
    category, or "overall"; number of answers; speed-up over plain decoding
    (geometric mean); its first and third quartile, and the worst; tokens per
    second (median); acceptance rate; tokens per pass of the target; time to the first
    token relative to plain decoding; answers whose text differs from plain
    decoding's; the speed-up of whole answers, prompts included.
    """
    from specgen.measure.bench.figures import BenchReport
    from specgen.models.files import cache_folder
    from specgen.session.open import layers_without_gpu, open_memory

    asked = _prompts(texts, prompts, n_prompts)
    use_kernels(machine.kernels, output)
    for note in layers_without_gpu(machine.target, machine.draft):
        output.note(note)
    base = SessionOptions(
        target=Path(),  # each contender has its own
        draft="none",
        sampler=sampling,
        drafting=drafting,
        generation=GenerationOptions(max_tokens=max_tokens),
        target_context=machine.target,
        draft_context=machine.draft,
        cache=cache_folder(),
    )
    shapes = list(dict.fromkeys(flags.tree_shape(text) for text in trees or ["auto"]))
    ways = ways_of(drafting, parse_policies(policies), shapes)
    if max(way.n_max for way in ways) == 0:
        raise UsageError("--draft-max 0 drafts nothing, so there is nothing to compare")
    _check_folder(html_file, "--html")
    if json_file != STDIO:
        _check_folder(json_file, "--json")
    found = find_drafts(targets or [], pairs or [], drafts or [], quiet=output.quiet)
    temperatures = list(dict.fromkeys(temperatures or [0.0]))
    entries = entries_of(base, found, ways, temperatures, open_memory())
    load = LoadOfOthers()
    with log_shown(output), output.measuring() as (progress, stop):
        runs = measure(
            entries,
            asked,
            chat=chat,
            n_rounds=n_rounds,
            progress=progress,
            interrupted=stop,
            announce=lambda own, kernels, seconds: output.note(
                _planned(own, kernels, seconds, len(asked), n_rounds)
            ),
        )
    report = BenchReport(
        about=about(base, entries, chat, _command(os.environ.get("HF_TOKEN"))),
        contenders=[entry.to_json_object() for entry in entries],
        prompts=asked,
        runs=runs,
        n_rounds=n_rounds,
        is_interrupted=stop(),
        others_share=load.share,
    )
    _write(report, json_file, html_file)
    for note in dict.fromkeys(_notes(report)):
        output.note(note)
    if runs.error is not None:
        raise runs.error
    return stop.exit_code


def _prompts(
    texts: list[str] | None, file: Path | None, n_of_each: int | None
) -> list[BenchPrompt]:
    if texts and file is not None:
        raise UsageError(
            "the prompts are given twice: as texts and as --prompts", hint="use one of them"
        )
    if texts:
        asked = given_prompts(texts)
    else:
        asked = own_prompts() if file is None else read_bench_prompts(file)
    return asked if n_of_each is None else first_of_each(asked, n_of_each)


def parse_policies(given: Sequence[str] | None) -> tuple[PolicyName, ...]:
    """Return the policies of these names, each of which may be several with commas between; without names,
    the default one. Raise `UsageError`."""
    if not given:
        return (DraftOptions().policy,)
    found: dict[PolicyName, None] = {}
    for name in (name.strip() for names in given for name in names.split(",")):
        for policy in (each for each in _POLICIES if each == name):
            found[policy] = None
        if name not in ("", *_POLICIES):
            raise UsageError(f"--policy {name}: one of {', '.join(_POLICIES)}")
    if not found:
        raise UsageError("--policy is empty", hint=f"give one of {', '.join(_POLICIES)}")
    return tuple(found)


def _check_folder(path: Path | None, option: str) -> None:
    """Check that a file can be written, before hours of measuring."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UsageError(f"{option} {path}: {what}", hint="give the path of a file")


def _write(report: BenchReport, json_file: Path | None, html_file: Path | None) -> None:
    """Show the report, and write the files that were asked for. Raise `OutputError`."""
    from specgen.measure.bench.figures import to_html, to_json_object
    from specgen.render.tables import bench_lines, print_bench_tables

    document = json.dumps(to_json_object(report), indent=1, ensure_ascii=False)
    if json_file == STDIO:
        print(document)
    elif sys.stdout.isatty():
        from specgen.render.select import make_console

        print_bench_tables(report, make_console(sys.stdout, os.environ))
    else:
        for line in bench_lines(report):
            print(line)
    if json_file is not None and json_file != STDIO:
        _write_file(json_file, f"{document}\n")
    if html_file is not None:
        _write_file(html_file, to_html(report))


def _write_file(path: Path, text: str) -> None:
    # A lone surrogate, from a file name that is not UTF-8, must not cost an hour's work.
    data = text.encode("utf-8", "replace")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def _planned(
    entries: Sequence[Entry], kernels: str, seconds: float, n_prompts: int, n_rounds: int
) -> str:
    """Return what will be measured for a target and about how long it takes."""
    names = ", ".join(dict.fromkeys(entry.name for entry in entries))
    rounds = "" if n_rounds == 1 else f", {n_rounds} times"
    n_tokens = entries[0].options.generation.max_tokens
    return (
        f"{entries[0].target} ({kernels}): {counted(n_prompts, 'prompt')}{rounds}, each answered with up to "
        f"{n_tokens} tokens by: {names}. This takes about {duration(max(1.0, seconds))}; fewer prompts (-N 1) or "
        "tokens (-n 32) take less"
    )


def _notes(report: BenchReport) -> list[str]:
    """Return remarks about the figures."""
    runs = report.runs
    notes = [
        f"{failure.contender} (temperature {failure.temperature:g}) was left out"
        f"{'' if failure.prompt is None else f' from prompt {failure.prompt} on'}: "
        f"{failure.message}"
        for failure in runs.failures
    ]
    notes += [f"prompt {skip.prompt} was left out: {skip.reason}" for skip in runs.skipped]
    for result in runs.results:
        notes += [f"{result.contender}: {notice}" for notice in result.outcome.notices]
    notes += notes_on_figures(report.others_share)
    notes += [
        f"{each.contender}: x{each.speedup:.2f} is more than {each.mean_accepted_length:.2f} tokens per "
        "pass of the target allow: the machine's speed changed meanwhile"
        for each in report.figures
        if each.is_impossible
    ]
    if report.is_interrupted:
        notes.append("interrupted: not everything was measured")
    return notes


def _command(token: str | None) -> str:
    """Return the command line for the report, without the token."""
    arguments = [each.replace(token, "TOKEN") if token else each for each in sys.argv[1:]]
    return shlex.join(["specgen", *arguments])
