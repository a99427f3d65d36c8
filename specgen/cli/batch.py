"""``specgen batch``: a prompt or a request on each line, and a result for each."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specgen.cli import flags
from specgen.cli.batch_on_hosts import (
    answer_on_hosts,
    check_alone,
    defaults_of,
    open_hosts,
    settings_of,
)
from specgen.cli.batch_on_ray import BatchWork, answer_on_ray, ray_options
from specgen.cli.batch_restart import with_workers
from specgen.cli.flags.subset import without
from specgen.cli.interrupt import Interrupt
from specgen.cli.one_answer import with_grammar
from specgen.cli.opening import log_shown, open_session, use_kernels
from specgen.errors import BatchError, OutputError, PromptError, UsageError
from specgen.json_values import as_json
from specgen.options import (
    Contexts,
    DraftOptions,
    GenerationOptions,
    Grammar,
    SamplerOptions,
    SessionOptions,
)
from specgen.selection.model_choice import ModelChoice
from specgen.selection.session_opening import find_models, session_options

if TYPE_CHECKING:
    from specgen.batch.lines import Line
    from specgen.batch.results import Earlier, Results
    from specgen.batch.runner import Batch
    from specgen.engine.models import Models

_BATCH = "Batch"
_STDIO = Path("-")


@flags.takes_options(
    models=flags.models,
    answer=without(flags.answer, "logprobs"),
    grammar=flags.constraint,
    sampling=flags.sampling,
    drafting=flags.drafting,
    machine=flags.machine,
)
def batch(
    *,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A file with a request or a prompt on each line; - is standard input.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="The file that results are appended to; - is standard output.",
            show_default=False,
        ),
    ],
    models: ModelChoice,
    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            "-np",
            min=1,
            metavar="N",
            help="How many answers to generate at once.",
            show_default="as many as is measured to be fastest and fits into memory",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    retry_errors: Annotated[
        bool,
        typer.Option(
            "--retry-errors",
            help="Answer lines again whose result in OUT is an error.",
            rich_help_panel=_BATCH,
        ),
    ] = False,
    allow_mixed: Annotated[
        bool,
        typer.Option(
            "--allow-mixed",
            help="Go on although OUT has results of other settings or other lines; they are kept.",
            rich_help_panel=_BATCH,
        ),
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="URL[,URL]",
            help="Let these servers answer the lines (`specgen serve`, or any with OpenAI's API), each "
            "as many at once as it has slots. No model is loaded here. SPECGEN_API_KEY holds their key.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    host_timeout: Annotated[
        float,
        typer.Option(
            "--host-timeout",
            min=0.1,
            metavar="SECONDS",
            help="Give up after so long without an answer from any server (--on), without a started actor "
            "(--ray), or while waiting for lost workers (--rpc).",
            rich_help_panel=_BATCH,
        ),
    ] = 120.0,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Let a Ray cluster answer the lines, with an actor on each node: HOST:PORT, auto (the "
            "cluster of this machine, or of RAY_ADDRESS), or local (this machine alone). Each node needs "
            "specgen, and the model files at the same paths. Needs `pip install 'specgen[ray]'`.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    cpus_per_worker: Annotated[
        float | None,
        typer.Option(
            "--cpus-per-worker",
            min=0.01,
            metavar="N",
            help="With --ray: CPUs of an actor. A node gets as many actors as it has CPUs for.",
            show_default="all of the largest node: one actor a node",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    gpus_per_worker: Annotated[
        float | None,
        typer.Option(
            "--gpus-per-worker",
            min=0.0,
            metavar="N",
            help="With --ray: GPUs of an actor.",
            show_default="all of the node that has most",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    chat: flags.Chat = None,
    system: flags.System = None,
    answer: GenerationOptions,
    grammar: Grammar | None,
    sampling: SamplerOptions,
    drafting: DraftOptions,
    machine: Contexts,
    learn: flags.Learn = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Answer each line of a file, many at once; started again, go on where the last run ended.

    A line is a request in the form of OpenAI's batches, an object with a prompt or with messages, or
    plain text. The options set what a line leaves out. Each result is a line of JSON, written as soon
    as it is finished. Started again, the command answers only what is missing.
    """
    flags.check_loudness(quiet=quiet, verbose=verbose)
    if system is not None and chat is False:
        raise UsageError("--system and --raw exclude each other: --raw uses no chat template")
    if destination == _STDIO and (retry_errors or allow_mixed):
        raise UsageError("--retry-errors and --allow-mixed need a file as OUT")
    _check_folder(destination)
    from specgen.batch.lines import read_lines

    generation = with_grammar(answer, grammar, json=True)
    lines = read_lines(_read(source), _name(source, "standard input"), sampling, generation)

    def note(text: str) -> None:
        if not quiet:
            print(f"note: {text}", file=sys.stderr)

    cluster = ray_options(
        ray, on, machine, (cpus_per_worker, gpus_per_worker), patience_s=host_timeout
    )
    if on is not None:
        check_alone(models, drafting, machine)
        defaults = defaults_of(sampling, generation, chat, system)
        hosts = open_hosts(on, parallel)
        settings = settings_of(hosts, defaults)

        def answer_lines(todo: Sequence[Line], results: Results) -> tuple[int, int]:
            return answer_on_hosts(
                hosts,
                defaults,
                todo,
                results,
                settings,
                patience_s=host_timeout,
                quiet=quiet or verbose,
                note=note,
            )
    else:
        sources = find_models(models, quiet=quiet)
        options = session_options(sources, sampling, drafting, generation, machine, learn=learn)
        settings = _settings(options, chat, system)
        work = BatchWork(options, sources.drafts, machine.kernels, chat, system, parallel)

        def answer_lines(todo: Sequence[Line], results: Results) -> tuple[int, int]:
            answer = _answer_here if cluster is None else partial(answer_on_ray, cluster)
            return answer(work, todo, results, settings, quiet=quiet, verbose=verbose, note=note)

    with contextlib.ExitStack() as stack:
        from specgen.batch.results import ResultsFile, ResultsStream, missing
        from specgen.render.text import counted

        results: Results = ResultsStream(sys.stdout.buffer)
        n_errors, todo = 0, lines
        if destination != _STDIO:
            stack.enter_context(_alone(destination))
            earlier = _take_up(destination, retry_errors=retry_errors, note=note)
            todo = missing(lines, earlier, settings, str(destination), allow_mixed=allow_mixed)
            n_errors = len(earlier.errors)
            if earlier.digests:
                n_known = len(lines) - len(todo)
                note(f"{destination} has results for {n_known} of {counted(len(lines), 'line')}")
            results = stack.enter_context(ResultsFile.opened(destination, earlier))
        code = 0
        if todo:
            code, n_failed = with_workers(
                machine.target.workers,
                lambda: answer_lines(todo, results),
                n_missing=len(todo),
                can_restart=_STDIO not in (source, destination),
                patience_s=host_timeout,
                note=note,
            )
            n_errors += n_failed
    if n_errors and not code:
        raise BatchError(
            f"{counted(n_errors, 'line')} of {len(lines)} could not be answered; the results say why",
            hint="--retry-errors answers them again",
        )
    return code


def _answer_here(
    work: BatchWork,
    lines: Sequence[Line],
    results: Results,
    settings: Mapping[str, Any],
    *,
    quiet: bool,
    verbose: bool,
    note: Callable[[str], None],
) -> tuple[int, int]:
    """Get the lines answered on this machine; return the exit code, and the number of errors in results."""
    from specgen.batch.runner import Batch, Prompting

    use_kernels(work.kernels, quiet=quiet)
    with (
        log_shown(verbose),
        open_session(work.options, quiet=quiet, verbose=verbose, drafts=work.drafts) as loaded,
    ):
        prompting = Prompting(work.chat, work.system, datetime.datetime.now().astimezone())
        job = Batch(loaded, prompting, results, settings, wall_clock=time.time, note=note)
        code = _answer(loaded, job, lines, work.parallel, quiet=quiet or verbose, note=note)
        return code, job.tally.n_errors


def _answer(
    loaded: Models,
    job: Batch,
    lines: Sequence[Line],
    parallel: int | None,
    *,
    quiet: bool,
    note: Callable[[str], None],
) -> int:
    """Make the answers; return the exit code."""
    from specgen.engine.engine import Engine
    from specgen.engine.measurements import fastest_parallel
    from specgen.render.batch_progress import batch_progress, batch_summary

    with Interrupt() as stop, batch_progress(sys.stderr, quiet=quiet) as report:
        tasks = job.prepare(lines, stop)
        if tasks and not stop():
            n_parallel = parallel or fastest_parallel(loaded, len(tasks), stop)
            n_ctx = max(task.n_ctx for task in tasks)
            started = time.perf_counter()
            with Engine.largest(
                loaded, n_parallel, n_ctx, is_fixed=parallel is not None, interrupted=stop
            ) as engine:
                try:
                    job.run(engine, tasks, stop, report)
                finally:
                    loaded.memory.save()
                    if job.tally.n_answers:
                        seconds = time.perf_counter() - started
                        where = f"{engine.n_parallel} at once"
                        note(batch_summary(job.tally, seconds, where))
    return stop.exit_code


def _read(source: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == _STDIO else source.read_bytes()
    except OSError as error:
        raise PromptError(f"{source}: cannot be read: {error.strerror}") from error


def _name(path: Path, standard: str) -> str:
    return standard if path == _STDIO else str(path)


def _check_folder(destination: Path) -> None:
    """Check that results can be written, before models are loaded."""
    if destination == _STDIO:
        return
    if destination.is_dir():
        raise OutputError(f"{destination}: a folder, not a file for results")
    if not destination.parent.is_dir():
        raise OutputError(f"{destination}: there is no folder {destination.parent}")


@contextlib.contextmanager
def _alone(destination: Path) -> Iterator[None]:
    """Keep other processes from writing to a file of results."""
    from specgen.catalogue import cache_folder
    from specgen.json_lines import locked

    name = hashlib.sha256(os.fsencode(destination.resolve())).hexdigest()[:16]
    held = OutputError(
        f"{destination}: another specgen batch is writing to it",
        hint="wait until it has ended, or name another file",
    )
    with locked(cache_folder() / "locks" / f"{name}.lock", held):
        yield


def _take_up(destination: Path, *, retry_errors: bool, note: Callable[[str], None]) -> Earlier:
    """Return the results that a file already has."""
    from specgen.batch.results import read_results, without_errors

    earlier = read_results(destination)
    if earlier.is_torn:
        note(
            f"{destination}: the last result is incomplete and was dropped; its line is answered again"
        )
    if retry_errors and earlier.errors:
        earlier = without_errors(destination, earlier)
    return earlier


def _settings(options: SessionOptions, chat: bool | None, system: str | None) -> Mapping[str, Any]:
    """Return the settings that decide the answers, besides the lines: the target, and the options that are
    not at their defaults. (Drafts change nothing.)"""
    found: dict[str, Any] = {"target": options.target.name}
    with contextlib.suppress(OSError):
        found["target_bytes"] = options.target.stat().st_size
    defaults = SessionOptions(options.target)
    for part in ("sampler", "generation"):
        given, default = as_json(getattr(options, part)), as_json(getattr(defaults, part))
        found |= {name: value for name, value in given.items() if value != default[name]}
    for name, value in (("chat", chat), ("system", system)):
        if value is not None:
            found[name] = value
    if options.target_context.n_ctx is not None:
        found["ctx_size"] = options.target_context.n_ctx
    return found
