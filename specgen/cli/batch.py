"""``specgen batch``: a prompt or a request on each line, and a result for each."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.cli import flags
from specgen.cli.flags import REQUIRED, argument, option
from specgen.cli.inputs import STDIO, read_bytes
from specgen.cli.model_loading import Setup, opened
from specgen.cli.output import Interrupt, Output
from specgen.errors import BatchError, OutputError, PromptError, UsageError
from specgen.options import Contexts, KernelOptions, SessionOptions
from specgen.system.files import as_json
from specgen.system.progress import ProgressView
from specgen.system.quantities import counted

if TYPE_CHECKING:
    from specgen.serve.batch.lines import BatchLine
    from specgen.serve.batch.on_ray import ActorJob, Cluster, RayBatch
    from specgen.serve.batch.runner import BatchRun
    from specgen.session.open import WantedSession
    from specgen.session.session import Session

#: The most lines that the last message names.
_N_NAMED = 10

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
        show_default="as many as are fastest and fit into memory",
    ),
    retry_errors: bool = _batch(
        False, "--retry-errors", "Answer lines again whose result in OUT is an error."
    ),
    allow_mixed: bool = _batch(
        False,
        "--allow-mixed",
        "Go on although OUT has results of other settings or other lines; they are kept.",
    ),
    ray: str | None = _batch(
        None,
        "--ray",
        "Let a Ray cluster answer: HOST:PORT, auto (this machine's, or that of RAY_ADDRESS), or local. "
        "Each node needs specgen, and the models at the same paths.",
        metavar="ADDRESS",
    ),
    cpus_per_worker: float | None = _batch(
        None,
        "--cpus-per-worker",
        "With --ray: CPUs of an actor.",
        min=0.01,
        metavar="N",
        show_default="all of the largest node: one actor a node",
    ),
    gpus_per_worker: float | None = _batch(
        None,
        "--gpus-per-worker",
        "With --ray: GPUs of an actor.",
        min=0.0,
        metavar="N",
        show_default="all of the node that has most",
    ),
    source: Path = argument(
        "IN", "A file with a request or a prompt on each line; - is standard input.", REQUIRED
    ),
    destination: Path = argument(
        "OUT", "The file that results are appended to; - is standard output.", REQUIRED
    ),
    template: flags.Template = flags.template,
    setup: Setup = flags.setup.without("answer_logprobs", "prompt_cache"),
    output: Output = flags.loudness,
) -> int:
    """Answer each line of a file, many at once; run it again to resume.

    A line is a request in the form of OpenAI's batches, an object with a prompt or with messages,
    or plain text. The options set what a line leaves out. Each result is a line of JSON.
    """
    is_stream = destination == STDIO or destination.is_fifo()
    if is_stream and (retry_errors or allow_mixed):
        raise UsageError("--retry-errors and --allow-mixed need a file as OUT")
    _check_files(source, None if is_stream else destination)
    from specgen.serve.batch.lines import continued, read_lines, streaming
    from specgen.serve.batch.runner import Prompting
    from specgen.serve.formats.parsed_request import Defaults

    name = "standard input" if source == STDIO else str(source)
    lines = read_lines(read_bytes(source), name, Defaults(setup.sampling, setup.answer))
    cluster = ray_cluster(ray, setup.machine, (cpus_per_worker, gpus_per_worker))
    wanted = setup.wanted_session(quiet=output.quiet)
    kernels, settings = setup.machine.kernels, _settings(wanted.options, template)
    now = datetime.datetime.now().astimezone()
    prompting = Prompting(template.chat, template.system, now)

    @contextlib.contextmanager
    def answering() -> Iterator[BatchRun | RayBatch]:
        if cluster is None:
            from specgen.serve.batch.runner import BatchRun

            with opened(wanted, kernels, output) as session:
                more: dict[str, Any] = {"wall_clock": time.time, "note": output.note}
                yield BatchRun(session, prompting, write_one, settings, parallel=parallel, **more)
            return
        from specgen.serve.batch.on_ray import RayBatch, connected

        how = {"prompting": prompting, "settings": settings, "parallel": parallel}
        job = actor_job(wanted, kernels, cluster.cpus_per_worker, **how)
        with connected(cluster, verbose=output.verbose > 0) as ray_module:
            yield RayBatch(ray_module, cluster, job, write_one)

    def write_one(record: Mapping[str, Any]) -> None:
        write(record)
        if record["error"] is not None:
            failed.add(record["custom_id"])

    with contextlib.ExitStack() as stack:
        todo, failed = lines, set[str]()
        if destination == STDIO:
            write = streaming(sys.stdout.buffer)
        elif is_stream:
            write = streaming(stack.enter_context(destination.open("wb")), str(destination))
        else:
            taken_up = continued(destination, retry_errors=retry_errors)
            earlier, write = stack.enter_context(taken_up)
            if earlier.is_torn:
                dropped = "the last result is incomplete and was dropped"
                output.note(f"{destination}: {dropped}; its line is answered again")
            if not allow_mixed:
                earlier.check_same(lines, settings, str(destination))
            todo = [line for line in lines if line.custom_id not in earlier.digests]
            failed |= earlier.errors
            if earlier.digests:
                n_known, n_all = len(lines) - len(todo), counted(len(lines), "line")
                output.note(f"{destination} has results for {n_known} of {n_all}")
        code = _answer(answering(), todo, output) if todo else 0
    if failed and not code:
        hint = "correct the lines that are wrong; --retry-errors asks for all of them again"
        what = f"{counted(len(failed), 'line')} of {len(lines)} could not be answered"
        named = _named([line for line in lines if line.custom_id in failed])
        raise BatchError(f"{what}{named}; the results say why", None if is_stream else hint)
    return code


def _check_files(source: Path, destination: Path | None) -> None:
    """Check that lines can be read and results written, before models are loaded."""
    if source.is_block_device() or source.is_char_device():  # it may have no end
        raise PromptError(f"{source}: a device, not a file with lines", "- is standard input")
    if destination is None:
        return
    if destination.exists() and not destination.is_file():
        what = "a folder" if destination.is_dir() else "a device"
        hint = "- is standard output"
        raise OutputError(f"{destination}: {what}, not a file for results", hint)
    if not destination.parent.is_dir():
        raise OutputError(f"{destination}: there is no folder {destination.parent}")


def _named(lines: Sequence[BatchLine]) -> str:
    names = [(str(line.number), line.custom_id) for line in lines]
    shown = [name if name == own else f"{name} ({own:.40})" for name, own in names[:_N_NAMED]]
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return f": line {', '.join(shown)}{more}" if shown else ""


def _answer(
    opening: contextlib.AbstractContextManager[BatchRun | RayBatch],
    lines: Sequence[BatchLine],
    output: Output,
) -> int:
    from specgen.render.tables import batch_summary

    stream = None if output.quiet or output.verbose > 0 else sys.stderr
    started_s = time.perf_counter()
    with (
        opening as job,
        Interrupt() as stop,
        contextlib.closing(ProgressView(stream, kind="lines")) as view,
    ):
        try:
            with contextlib.closing(job.run(lines, stop)) as tallies:
                for number, tally in enumerate(tallies):
                    if not number:  # the prompts are prepared
                        started_s = time.perf_counter()
                    pace = tally.n_tokens / (time.perf_counter() - started_s)
                    view.show(f"{pace:.1f} tokens/s", tally.n_done, tally.n_lines)
        finally:
            if job.stats.n_answers:
                seconds = time.perf_counter() - started_s
                output.note(batch_summary(job.stats, seconds, job.where))
    return stop.exit_code


def _settings(options: SessionOptions, template: flags.Template) -> Mapping[str, Any]:
    """Return what decides the answers besides the lines: the target, and options not at their
    defaults.
    """
    found: dict[str, Any] = {"target": options.target.name}
    with contextlib.suppress(OSError):
        found["target_bytes"] = options.target.stat().st_size
    defaults = SessionOptions(options.target)
    for part in ("sampler", "generation"):
        given, default = as_json(getattr(options, part)), as_json(getattr(defaults, part))
        found |= {name: value for name, value in given.items() if value != default[name]}
    found |= {name: value for name, value in as_json(template).items() if value is not None}
    context = options.target_context
    others = {"ctx_size": context.n_ctx, "chat_template": context.chat_template}
    found |= {name: value for name, value in others.items() if value is not None}
    if context.template_variables:
        found["template_variables"] = context.template_variables
    return found


# --- a cluster


def ray_cluster(
    address: str | None, machine: Contexts, per_worker: tuple[float | None, float | None]
) -> Cluster | None:
    if address is None:
        if per_worker != (None, None):
            raise UsageError("--cpus-per-worker and --gpus-per-worker go with --ray")
        return None
    if machine.target.workers is not None:
        raise UsageError("--ray and --rpc exclude each other")
    if importlib.util.find_spec("ray") is None:
        hint = "pip install 'specgen-gguf[ray]'"
        raise UsageError("--ray needs ray, which is not installed", hint)
    host, _, port = address.rpartition(":")
    if address not in {"local", "auto"} and not (host and "/" not in host and port.isdigit()):
        hint = "give HOST:PORT as `ray start --head` prints it, or auto, or local"
        raise UsageError(f"--ray {address}: not the address of a cluster", hint)
    from specgen.serve.batch.on_ray import Cluster

    return Cluster(address, *per_worker)


def open_on_node(wanted: WantedSession, kernels: KernelOptions) -> Session:
    """Load the models in an actor. Files that are made, and what is learnt, stay on the node."""
    from specgen.cli.model_loading import use_kernels
    from specgen.session.open import open_session
    from specgen.system.folders import cache_folder

    use_kernels(kernels, Output(quiet=True))
    options = replace(wanted.options, cache=cache_folder())
    return open_session(replace(wanted, options=options), clock=time.perf_counter)


def actor_job(
    wanted: WantedSession,
    kernels: KernelOptions,
    cpus_per_worker: float | None,
    **how: Any,
) -> ActorJob:
    """Return what an actor does: with absolute paths, and as many threads as its share of the
    node's CPUs.
    """
    from specgen.serve.batch.on_ray import ActorJob

    wanted = _absolute(wanted)
    options = wanted.options
    for name in ("target_context", "draft_context") if cpus_per_worker is not None else ():
        context = getattr(options, name)
        threads = context.n_threads or max(1, int(cpus_per_worker or 1))
        options = replace(options, **{name: replace(context, n_threads=threads)})
    n_bytes = how["settings"].get("target_bytes")
    files = {} if n_bytes is None else {str(options.target): n_bytes}
    opening = partial(open_on_node, replace(wanted, options=options), kernels)
    return ActorJob(opening, files=files, **how)


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, tuple):
        return tuple(map(_absolute, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _absolute(getattr(value, f.name)) for f in fields(value)})
    return value
