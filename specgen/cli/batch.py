"""``specgen batch``: answers each line of a file."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli import flags
from specgen.cli.flags import REQUIRED, argument, option
from specgen.cli.inputs import STDIO, input_name, read_bytes
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Interrupt, Output
from specgen.errors import BatchError, OutputError, PromptError, UsageError
from specgen.options import ContextOptions, Contexts, KernelOptions, SessionOptions
from specgen.system.files import as_json
from specgen.system.progress import ProgressView
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from specgen.serve.batch.lines import BatchLine, Write
    from specgen.serve.batch.on_ray import ActorJob, Cluster, RayBatch
    from specgen.serve.batch.runner import BatchRun, Prompting
    from specgen.session.open import WantedSession
    from specgen.session.session import Session

#: The maximum number of failed lines that the error message lists.
_MAX_LISTED_LINES = 10
#: The number of answers at once for whose contexts the weights of a target that is larger than
#: memory leave room. Contexts for more are opened if they fit.
_STREAMED_PARALLEL = 4

_batch = partial(option, panel="Batch")


@flags.takes_options
def batch(
    *,
    parallel: int | None = _batch(
        None,
        "--parallel -np",
        "How many answers to generate at once.",
        min=1,
        metavar="N",
        show_default="the fastest number that fits into memory",
    ),
    retry_errors: bool = _batch(
        False, "--retry-errors", "Answer again those lines whose result in OUT is an error."
    ),
    allow_mixed: bool = _batch(
        False,
        "--allow-mixed",
        "Continue even if OUT has results with other settings, or of other lines; they are kept.",
    ),
    ray: str | None = _batch(
        None,
        "--ray",
        "Let a Ray cluster answer: HOST:PORT, auto (this machine's, or that of RAY_ADDRESS), or "
        "local. Each node needs specgen, and the models at the same paths.",
        metavar="ADDRESS",
    ),
    cpus_per_worker: float | None = _batch(
        None,
        "--cpus-per-worker",
        "The number of CPUs of each actor, with --ray.",
        min=0.01,
        metavar="N",
        show_default="all of the largest node: one actor per node",
    ),
    gpus_per_worker: float | None = _batch(
        None,
        "--gpus-per-worker",
        "The number of GPUs of each actor, with --ray.",
        min=0.0,
        metavar="N",
        show_default="all of the node with the most",
    ),
    source: Path = argument(
        "IN", "A file with a request or a prompt on each line; - is standard input.", REQUIRED
    ),
    destination: Path = argument(
        "OUT", "The file that results are appended to; - is standard output.", REQUIRED
    ),
    template: flags.Template = flags.template,
    setup: Setup = flags.setup.without("--logprobs", "--prompt-cache"),
    output: Output = flags.loudness,
) -> int:
    """Answer each line of a file, many at once; run it again to resume.

    A line is a request in the form of OpenAI's batches, an object with a prompt or with messages,
    or plain text. Options are the defaults of a line. Each result is a line of JSON.
    """
    is_stream = destination == STDIO or destination.is_fifo()
    if is_stream and (retry_errors or allow_mixed):
        raise UsageError("--retry-errors and --allow-mixed need a file as OUT")
    _check_files(source, None if is_stream else destination)
    from specgen.serve.batch.lines import notes_on, read_lines
    from specgen.serve.formats.parsed_request import Defaults

    name = input_name(source)
    lines = read_lines(read_bytes(source), name, Defaults(setup.sampling, setup.answer))
    for note in islice(notes_on(lines), _MAX_LISTED_LINES):
        output.note(f"{name}: {note}")
    cluster = _ray_cluster(ray, setup.machine, cpus_per_worker, gpus_per_worker)
    plan = _plan_of(setup, template, parallel, quiet=output.quiet)

    code = 0
    with _opened_results(
        destination,
        lines,
        plan.settings,
        output,
        retry_errors=retry_errors,
        allow_mixed=allow_mixed,
    ) as results:
        if results.todo:
            if cluster is None:
                opening = _opened_run(plan, results.write, output)
            else:
                opening = _opened_cluster_run(plan, cluster, results.write, output)
            code = _answer(opening, results.todo, output)
    if results.failed and not code:
        raise _batch_error(lines, results.failed, is_stream=is_stream)
    return code


def _check_files(source: Path, destination: Path | None) -> None:
    """Check, before models are loaded, that lines can be read and results written.

    Args:
        source: The file of lines, or `STDIO`.
        destination: The file for results; None if it is a stream.

    Raises:
        PromptError: If the source is a device.
        OutputError: If the destination exists and is not a file, or its folder does not exist.
    """
    if source.is_block_device() or source.is_char_device():  # a device may never end
        raise PromptError(f"{source}: a device, not a file with lines", "- is standard input")
    if destination is None:
        return
    if destination.exists() and not destination.is_file():
        what = "a folder" if destination.is_dir() else "a device"
        hint = "- is standard output"
        raise OutputError(f"{destination}: {what}, not a file for results", hint)
    if not destination.parent.is_dir():
        raise OutputError(f"{destination}: there is no folder {destination.parent}")


def _batch_error(
    lines: Sequence[BatchLine],
    failed_ids: Collection[str],
    *,
    is_stream: bool,
) -> BatchError:
    """Return the error that names the lines without an answer.

    Args:
        lines: All lines.
        failed_ids: The ids of the lines whose result is an error.
        is_stream: Whether the results went to a stream, which cannot be continued.
    """
    hint = None
    if not is_stream:
        hint = "correct the lines that are wrong; --retry-errors asks for all of them again"
    what = f"{len(failed_ids)} of {counted(len(lines), 'line')} could not be answered"
    listing = _listing([line for line in lines if line.custom_id in failed_ids])
    return BatchError(f"{what}{listing}; the results say why", hint)


def _listing(failed_lines: Sequence[BatchLine]) -> str:
    """Return the numbers of the lines, and ids that users gave them, as the end of a sentence.

    It is "" if there are none: with --allow-mixed, only lines of an earlier input may have failed.
    """
    if not failed_lines:
        return ""
    names: list[str] = []
    for line in failed_lines[:_MAX_LISTED_LINES]:
        name = str(line.number)
        if line.custom_id != name:  # a line without an id has its number as its id
            name += f" ({line.custom_id:.40})"
        names.append(name)
    noun = "line" if len(failed_lines) == 1 else "lines"
    listing = f": {noun} {', '.join(names)}"
    n_more = len(failed_lines) - _MAX_LISTED_LINES
    if n_more > 0:
        listing += f" and {n_more} more"
    return listing


@dataclass(frozen=True, slots=True)
class _OpenResults:
    """The open destination of results, and which lines it still lacks."""

    #: Appends a result to the destination.
    append: Write
    #: The lines that have no result yet.
    todo: Sequence[BatchLine]
    #: The ids of the lines whose result is an error.
    failed: set[str] = field(default_factory=set)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a result, and remember whether it is an error."""
        self.append(record)
        if record["error"] is not None:
            self.failed.add(record["custom_id"])


@contextlib.contextmanager
def _opened_results(
    destination: Path,
    lines: Sequence[BatchLine],
    settings: Mapping[str, Any],
    output: Output,
    *,
    retry_errors: bool,
    allow_mixed: bool,
) -> Iterator[_OpenResults]:
    """Open the destination of results.

    A file keeps the results that it has, except errors if `retry_errors` is set, and only lines
    without a result are left to do. A stream gets the results of all lines.

    Raises:
        OutputError: If the destination cannot be written.
        UsageError: If it has results for other lines or settings, unless `allow_mixed` is set.
    """
    from specgen.serve.batch.lines import continued, streaming

    if destination == STDIO:
        yield _OpenResults(streaming(sys.stdout.buffer), lines)
        return
    if destination.is_fifo():
        with destination.open("wb") as stream:
            yield _OpenResults(streaming(stream, str(destination)), lines)
        return
    with continued(destination, retry_errors=retry_errors) as (earlier, append):
        if earlier.is_torn:
            output.note(
                f"{destination}: the last result is incomplete and was dropped; its line is "
                "answered again"
            )
        if not allow_mixed:
            earlier.check_same(lines, settings, str(destination))
        todo = [line for line in lines if line.custom_id not in earlier.digests]
        if earlier.digests:
            n_known = len(lines) - len(todo)
            n_all = counted(len(lines), "line")
            output.note(f"{destination} has results for {n_known} of {n_all}")
        yield _OpenResults(append, todo, set(earlier.errors))


def _answer(
    opening: contextlib.AbstractContextManager[BatchRun | RayBatch],
    lines: Sequence[BatchLine],
    output: Output,
) -> int:
    """Answer the lines and show the progress.

    Args:
        opening: A context manager that opens the job: here, or on a cluster.
        lines: The lines to answer.
        output: Where the progress is shown.

    Returns:
        The exit code of the signal that ended the job, or 0.
    """
    from specgen.render.tables import batch_summary

    stream = None if output.quiet or output.verbose > 0 else sys.stderr
    started_s = time.perf_counter()
    with (
        opening as job,
        Interrupt() as stop,
        contextlib.closing(ProgressView(stream, kind="lines")) as view,
    ):
        try:
            with contextlib.closing(job.run(lines, stop)) as rounds:
                for index, stats in enumerate(rounds):
                    if index == 0:  # all prompts are prepared: measure from here
                        started_s = time.perf_counter()
                    pace = stats.n_tokens / (time.perf_counter() - started_s)
                    view.show(f"{pace:.1f} tokens/s", stats.n_done, stats.n_lines)
        finally:
            if job.stats.n_answers:
                seconds = time.perf_counter() - started_s
                output.note(batch_summary(job.stats, seconds, job.where))
    return stop.exit_code


@dataclass(frozen=True, slots=True)
class _BatchPlan:
    """How lines are answered, on this machine or by each actor of a cluster."""

    #: The session that answers them.
    wanted: WantedSession
    #: Which kernels compute on the CPU.
    kernels: KernelOptions
    #: How lines become prompts.
    prompting: Prompting
    #: What is recorded with each result.
    settings: Mapping[str, Any]
    #: The number of answers to generate at once; None for the fastest number that fits.
    parallel: int | None


def _plan_of(
    setup: Setup,
    template: flags.Template,
    parallel: int | None,
    *,
    quiet: bool,
) -> _BatchPlan:
    """Find the models, download missing ones, and return how lines are answered with them."""
    from specgen.serve.batch.runner import Prompting

    wanted = setup.wanted_session(quiet=quiet)
    wanted = replace(wanted, n_slots=parallel or _STREAMED_PARALLEL)
    now = datetime.datetime.now().astimezone()
    return _BatchPlan(
        wanted,
        setup.machine.kernels,
        Prompting(template.chat, template.system, now),
        _settings(wanted.options, template),
        parallel,
    )


@contextlib.contextmanager
def _opened_run(
    plan: _BatchPlan,
    write: Write,
    output: Output,
) -> Iterator[BatchRun | RayBatch]:
    """Load the models, and yield the run that answers lines with them."""
    from specgen.serve.batch.runner import BatchRun

    with opened(plan.wanted, plan.kernels, output) as session:
        yield BatchRun(
            session,
            plan.prompting,
            write,
            plan.settings,
            parallel=plan.parallel,
            wall_clock=time.time,
            note=output.note,
        )


def _settings(options: SessionOptions, template: flags.Template) -> Mapping[str, Any]:
    """Return what the answers depend on, apart from their lines, to record it with the results.

    This is the target, and all options that differ from their defaults.
    """
    settings: dict[str, Any] = {"target": options.target.name}
    with contextlib.suppress(OSError):
        settings["target_bytes"] = options.target.stat().st_size
    defaults = SessionOptions(options.target)
    settings |= _changed(options.sampler, defaults.sampler)
    settings |= _changed(options.generation, defaults.generation)
    context = options.target_context
    prompt_settings = {
        **as_json(template),
        "ctx_size": context.n_ctx,
        "chat_template": context.chat_template,
        "template_variables": context.template_variables or None,
    }
    settings |= {name: value for name, value in prompt_settings.items() if value is not None}
    return settings


def _changed(options: object, defaults: object) -> dict[str, Any]:
    """Return the options, in their JSON form, that differ from the defaults."""
    json_defaults = as_json(defaults)
    return {name: value for name, value in as_json(options).items() if value != json_defaults[name]}


# --- a cluster


@contextlib.contextmanager
def _opened_cluster_run(
    plan: _BatchPlan,
    cluster: Cluster,
    write: Write,
    output: Output,
) -> Iterator[BatchRun | RayBatch]:
    """Connect to a Ray cluster, and yield the run whose actors load the models."""
    from specgen.serve.batch.on_ray import RayBatch, connected

    job = _actor_job(plan, cluster.cpus_per_worker)
    with connected(cluster, verbose=output.verbose > 0) as ray_module:
        yield RayBatch(ray_module, cluster, job, write)


def _ray_cluster(
    address: str | None,
    machine: Contexts,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
) -> Cluster | None:
    """Return the Ray cluster at the address of --ray; None if no address is given.

    Raises:
        UsageError: If the address is invalid, Ray is not installed, or options conflict.
    """
    if address is None:
        if cpus_per_worker is not None or gpus_per_worker is not None:
            raise UsageError("--cpus-per-worker and --gpus-per-worker go with --ray")
        return None
    if machine.target.workers is not None:
        raise UsageError("--ray and --rpc cannot be used together")
    if importlib.util.find_spec("ray") is None:
        hint = "pip install 'specgen-gguf[ray]'"
        raise UsageError("--ray needs ray, which is not installed", hint)
    host, _, port = address.rpartition(":")
    is_host_and_port = bool(host) and "/" not in host and port.isdigit()
    if address not in ("local", "auto") and not is_host_and_port:
        hint = "give HOST:PORT as `ray start --head` prints it, or auto, or local"
        raise UsageError(f"--ray {address}: not the address of a cluster", hint)
    if gpus_per_worker is not None and gpus_per_worker > 1 and not gpus_per_worker.is_integer():
        hint = "give a whole number, or a share of one GPU such as 0.5"
        problem = f"--gpus-per-worker {gpus_per_worker:g}: Ray can split only a single GPU"
        raise UsageError(problem, hint)
    from specgen.serve.batch.on_ray import Cluster

    return Cluster(address, cpus_per_worker, gpus_per_worker)


def open_on_node(wanted: WantedSession, kernels: KernelOptions) -> Session:
    """Open a session in an actor of a Ray cluster, with the node's own cache folder."""
    from specgen.cli.model_loading import use_kernels
    from specgen.session.open import open_session
    from specgen.system.folders import cache_folder

    use_kernels(kernels, Output(quiet=True))
    options = replace(wanted.options, cache=cache_folder())
    return open_session(replace(wanted, options=options), clock=time.perf_counter)


def _actor_job(plan: _BatchPlan, cpus_per_worker: float | None) -> ActorJob:
    """Return the job of each actor of a Ray cluster. All paths in it are absolute.

    Args:
        plan: How lines are answered.
        cpus_per_worker: The CPUs of an actor, which limit its threads; None is a whole node.
    """
    from specgen.serve.batch.on_ray import ActorJob

    wanted = _with_absolute_paths(plan.wanted)
    options = wanted.options
    if cpus_per_worker is not None:
        n_threads = max(1, int(cpus_per_worker))
        options = replace(
            options,
            target_context=_with_threads(options.target_context, n_threads),
            draft_context=_with_threads(options.draft_context, n_threads),
        )
    # Each node checks that its file of the target has the same size.
    file_sizes: dict[str, int] = {}
    if "target_bytes" in plan.settings:
        file_sizes[str(options.target)] = plan.settings["target_bytes"]
    open_session = partial(open_on_node, replace(wanted, options=options), plan.kernels)
    return ActorJob(open_session, plan.prompting, plan.settings, plan.parallel, file_sizes)


def _with_threads(context: ContextOptions, n_threads: int) -> ContextOptions:
    """Return a context with this many threads, unless the user gave a number."""
    return replace(context, n_threads=context.n_threads or n_threads)


def _with_absolute_paths(value: Any) -> Any:
    """Return an option's value, or a dataclass of options, with all paths in it absolute."""
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, tuple):
        return tuple(map(_with_absolute_paths, value))
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            member.name: _with_absolute_paths(getattr(value, member.name))
            for member in fields(value)
        }
        return replace(value, **changes)
    return value
