"""``specgen bench``: compares drafts with plain decoding, over many prompts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from specgen.cli import flags
from specgen.cli.flags import argument, option
from specgen.cli.flags.trials import TRIALS, Trials, alone, check_drafts, trial_options
from specgen.cli.inputs import STDIO
from specgen.cli.model_loading import log_shown, use_kernels
from specgen.cli.output import Output, check_file_option, console_on
from specgen.errors import UsageError
from specgen.measure.benchmark import (
    PLAIN,
    Runs,
    entries_of,
    figures_of,
    find_drafts,
    measure,
    speedup_sentences,
    to_json_object,
)
from specgen.measure.prompts import (
    BenchPrompt,
    first_of_each,
    given_prompts,
    own_prompts,
    read_bench_prompts,
)
from specgen.options import (
    AUTO_TREE,
    Contexts,
    DraftOptions,
    PolicyName,
    SamplerOptions,
    TreeShape,
    parse_tree,
)
from specgen.system.files import write_errors, write_output
from specgen.system.quantities import counted


def _parse_policies(given: Sequence[str]) -> tuple[str, ...]:
    """Return the policies named, each once.

    Args:
        given: The values of --policy, in which commas separate names.

    Raises:
        ValueError: If a name is not that of a policy.
    """
    known = get_args(PolicyName)
    names = [name.strip() for name in ",".join(given).split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return tuple(dict.fromkeys(names))


_measured_option = partial(option, panel="What is measured")


@flags.takes_options
def bench(
    *,
    target: str | None = flags.target_option(
        None, show_default="the default pair's", panel="Models"
    ),
    drafts: list[str] | None = option(
        None,
        "--draft --model-draft -md",
        "A draft; may be repeated. In large.gguf+small.gguf, the second drafts for the first.",
        metavar="FILE|NAME|ngram|none",
        autocompletion=flags.draft_names,
        show_default="the one that `specgen run` would use, and ngram",
        panel="Models",
    ),
    policies: tuple[PolicyName, ...] = _measured_option(
        ("cost",),
        "--policy",
        "How much to draft: cost, threshold or fixed; several with commas, or given several times.",
        metavar="NAMES",
        parse=_parse_policies,
        show_default=DraftOptions().policy,
    ),
    trees: tuple[TreeShape, ...] = _measured_option(
        (AUTO_TREE,),
        "--tree",
        "Whether drafts branch, as for `specgen run`; may be repeated.",
        metavar="auto|off|3,2,1|4x5",
        parse=lambda given: tuple(dict.fromkeys(map(parse_tree, given))),
        show_default=str(DraftOptions().tree),
    ),
    temperatures: tuple[float, ...] = _measured_option(
        (0.0,),
        "--temp --temperature",
        "A temperature; may be repeated.",
        min=0.0,
        max=100.0,
        show_default="0",
    ),
    n_per_category: int | None = _measured_option(
        None,
        "--count -N",
        "How many of the first prompts of each category to use.",
        min=1,
        show_default="all",
    ),
    n_passes: int = _measured_option(1, "--repeat", "How often to go through all prompts.", min=1),
    trials: Trials = TRIALS.without("--count").with_default("--max-tokens", 128),
    json_file: Path | None = option(
        None,
        "--json",
        "Write all measurements as JSON; - prints them on standard output instead of the table.",
        metavar="FILE",
    ),
    html_file: Path | None = option(
        None,
        "--html",
        "Write a page with the results: charts, all answers and the settings.",
        metavar="FILE",
    ),
    chat: bool | None = flags.chat_option(),
    drafting: DraftOptions = flags.drafting.without("--policy", "--tree"),
    sampling: SamplerOptions = flags.sampling.without("--temp"),
    machine: Contexts = flags.machine,
    output: Output = flags.loudness,
    texts: list[str] | None = argument("PROMPTS", "Prompts to answer, instead of a file of them."),
) -> int:
    """Measure what drafting gains over plain decoding, on your own prompts.

    Plain decoding, and every draft with every policy, answer every prompt at every temperature, in
    interleaved runs. Speeds are tokens per second after the first token. Prompts of the file may
    have a "category".

    In a pipe, it prints tab-separated lines under column names, one for each contender and one for
    each of its categories: speed-ups over plain decoding (geometric mean, quartiles, worst prompt),
    tokens per second (median), acceptance rate, tokens per pass of the target, and the time to the
    first token relative to plain decoding.
    """
    from specgen.session.open import open_measurements
    from specgen.session.opening_notes import layers_without_gpu

    prompts = _prompts(texts, trials.prompts, n_per_category)
    check_drafts(drafting, "compare")
    check_file_option("--json", json_file)
    check_file_option("--html", html_file)
    use_kernels(machine.kernels, output)
    for note in layers_without_gpu(machine.target, machine.draft):
        output.note(note)
    path, stages = find_drafts(target, drafts or [], quiet=output.quiet)
    options = trial_options(alone(path), trials.max_tokens, machine, drafting)
    options = replace(options, sampler=sampling)
    unique_temperatures = list(dict.fromkeys(temperatures))
    entries = entries_of(options, stages, policies, trees, unique_temperatures, open_measurements())

    names = ", ".join(dict.fromkeys(entry.name for entry in entries))
    task = f"{counted(len(prompts), 'prompt')}, each answered with up to {trials.max_tokens} tokens"
    less = "fewer prompts (-N) or tokens (-n) take less time"
    output.note(f"{task} by: {names}; {less}")
    with log_shown(output), output.measuring() as (progress, stop):
        runs = measure(
            entries,
            prompts,
            chat=chat,
            n_passes=n_passes,
            progress=progress,
            interrupted=stop,
        )

    document = to_json_object(entries, prompts, runs, _command())
    notes = _notes(runs)
    _show(runs, document, json_file)
    for note in notes:
        output.note(note)
    if html_file is not None:
        from specgen.render.streams import BENCH, write_page

        write_page(html_file, BENCH, {**document, "notes": notes})
    if runs.error is not None:
        raise runs.error
    return stop.exit_code


def _prompts(
    texts: list[str] | None,
    file: Path | None,
    n_per_category: int | None,
) -> list[BenchPrompt]:
    """Return the prompts of the command line or of a file, or else the built-in ones.

    Args:
        texts: The prompts on the command line.
        file: The file of --prompts.
        n_per_category: The number of prompts of each category to keep; None keeps all.
    """
    if texts and file is not None:
        what = "the prompts are given twice: as texts and as --prompts"
        raise UsageError(what, hint="use one of them")
    if texts:
        prompts = given_prompts(texts)
    elif file is not None:
        prompts = read_bench_prompts(file)
    else:
        prompts = own_prompts()
    if n_per_category is None:
        return prompts
    return first_of_each(prompts, n_per_category)


def _show(
    runs: Runs,
    document: dict[str, object],
    json_file: Path | None,
) -> None:
    """Print the results, as a table, lines or JSON, and write them to the file of --json."""
    from specgen.render.tables import bench_lines, print_bench_tables

    text = json.dumps(document, indent=1, ensure_ascii=False)
    figures = figures_of(runs.results)
    if json_file == STDIO:
        print(text)
    elif sys.stdout.isatty():
        print_bench_tables(figures, console_on(sys.stdout))
    else:
        for line in bench_lines(figures):
            print(line)
    if json_file is not None and json_file != STDIO:
        # File names that are not UTF-8 have lone surrogates, which must not lose an hour's work.
        with write_errors(json_file):
            write_output(json_file, f"{text}\n".encode("utf-8", "replace"))


def _notes(runs: Runs) -> list[str]:
    """Return sentences on the gains, and on what was left out or went wrong, each once."""
    from specgen.render.tables import notes_on_figures

    notes: list[str] = []
    if runs.error is None and not runs.is_interrupted:
        notes += speedup_sentences(figures_of(runs.results))
    for failure in runs.failures:
        if failure.contender == PLAIN:  # without it, the prompt has nothing to compare with
            omission = f"prompt {failure.prompt} was left out"
        else:
            omission = f"{failure.contender} (temperature {failure.temperature:g}) was left out"
            if failure.prompt is not None:
                omission += f" from prompt {failure.prompt} on"
        notes.append(f"{omission}: {failure.message}")
    for result in runs.results:
        notes += [f"{result.contender}: {notice}" for notice in result.outcome.notices]
    notes += notes_on_figures(runs.others_share)
    if runs.is_interrupted:
        notes.append("interrupted: not everything was measured")
    return list(dict.fromkeys(notes))


def _command() -> str:
    """Return the command line for the report, without the user's Hugging Face token."""
    arguments = sys.argv[1:]
    token = os.environ.get("HF_TOKEN")
    if token:
        arguments = [argument.replace(token, "TOKEN") for argument in arguments]
    return shlex.join(["specgen", *arguments])
