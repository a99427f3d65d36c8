"""``specgen run``: one prompt, one answer."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.interrupt import Interrupt
from specgen.cli.prompt import read_prompt
from specgen.cli.sources import Sources, resolve
from specgen.errors import UsageError
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    Show,
)

if TYPE_CHECKING:
    from specgen.session import Session, SessionOptions

_SAMPLER, _DRAFT = SamplerOptions(), DraftOptions()
_CONTEXT, _GENERATION = ContextOptions(), GenerationOptions()


def run(
    prompt_argument: flags.PromptArgument = None,
    target: flags.Target = None,
    draft: flags.Draft = None,
    pair: flags.Pair = None,
    prompt_option: flags.PromptOption = None,
    prompt_file: flags.PromptFile = None,
    chat: flags.Chat = None,
    system: flags.System = None,
    max_tokens: flags.MaxTokens = _GENERATION.max_tokens,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = _GENERATION.ignore_eos,
    temperature: flags.Temperature = _SAMPLER.temperature,
    top_k: flags.TopK = _SAMPLER.top_k,
    top_p: flags.TopP = _SAMPLER.top_p,
    min_p: flags.MinP = _SAMPLER.min_p,
    seed: flags.Seed = _SAMPLER.seed,
    draft_max: flags.DraftMax = _DRAFT.max_tokens,
    draft_min: flags.DraftMin = _DRAFT.min_tokens,
    draft_p_min: flags.DraftPMin = _DRAFT.p_min,
    ngram_min: flags.NgramMin = _DRAFT.ngram_min,
    ngram_max: flags.NgramMax = _DRAFT.ngram_max,
    ctx_size: flags.CtxSize = _CONTEXT.n_ctx,
    batch_size: flags.BatchSize = _CONTEXT.n_batch,
    threads: flags.Threads = _CONTEXT.n_threads,
    threads_batch: flags.ThreadsBatch = _CONTEXT.n_threads_batch,
    gpu_layers: flags.GpuLayers = _CONTEXT.n_gpu_layers,
    gpu_layers_draft: flags.GpuLayersDraft = _CONTEXT.n_gpu_layers,
    flash_attn: flags.FlashAttn = _CONTEXT.flash_attention,
    cache_type_k: flags.CacheTypeK = _CONTEXT.cache_type_k,
    cache_type_v: flags.CacheTypeV = _CONTEXT.cache_type_v,
    show: flags.ShowOption = "accepted",
    stats: flags.Stats = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> int:
    """Generate an answer to a prompt, faster and unchanged.

    The answer goes to standard output, everything else to standard error. On a terminal,
    colours show which tokens were drafted and accepted, and which the target chose itself.
    """
    if quiet and verbose:
        raise UsageError("--quiet and --verbose exclude each other", hint="take one of them")
    if ngram_min > ngram_max:
        raise UsageError(
            f"--ngram-min {ngram_min} is larger than --ngram-max {ngram_max}",
            hint="n-grams are looked for from the longest to the shortest",
        )
    if stop is not None and "" in stop:
        raise UsageError("--stop '' is empty: every answer would end before it began")
    if system is not None and chat is False:
        raise UsageError("--system needs the chat template, --raw does without")
    prompt = read_prompt(prompt_argument, prompt_option, prompt_file)

    options = _session_options(
        sources=_find_models(target, draft, pair, quiet=quiet),
        sampler=SamplerOptions(temperature, top_k, top_p, min_p, seed),
        drafting=DraftOptions(draft_max, draft_min, draft_p_min, ngram_max, ngram_min),
        generation=GenerationOptions(max_tokens, tuple(stop or ()), ignore_eos),
        context=ContextOptions(
            n_ctx=ctx_size,
            n_batch=batch_size,
            n_threads=threads,
            n_threads_batch=threads_batch,
            n_gpu_layers=gpu_layers,
            flash_attention=flash_attn,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
        ),
        gpu_layers_draft=gpu_layers_draft,
    )
    with _log_shown(verbose), _open_session(options, quiet=quiet or verbose) as session:
        return _answer(
            session,
            _apply_template(session, prompt, chat, system),
            show=show,
            stats=stats if stats is not None else not (json or quiet),
            json=json,
            quiet=quiet,
            verbose=verbose,
        )


def _find_models(
    target: str | None, draft: str | None, pair: str | None, *, quiet: bool
) -> Sources:
    """The files of the run, fetched if need be, with progress on standard error."""
    from specgen.models import SilentProgress, fetch, load_registry, stderr_progress

    registry = load_registry()

    def get(name: str) -> Path:
        progress = SilentProgress() if quiet else stderr_progress()
        return fetch(registry.model(name), progress=progress)

    return resolve(target, draft, pair, registry, get)


def _session_options(
    *,
    sources: Sources,
    sampler: SamplerOptions,
    drafting: DraftOptions,
    generation: GenerationOptions,
    context: ContextOptions,
    gpu_layers_draft: int,
) -> SessionOptions:
    from specgen.session import SessionOptions

    return SessionOptions(
        target=sources.target,
        draft=sources.draft,
        sampler=sampler,
        drafting=drafting,
        generation=generation,
        target_context=context,
        draft_context=replace(context, n_gpu_layers=gpu_layers_draft),
    )


@contextlib.contextmanager
def _log_shown(wanted: bool) -> Iterator[None]:
    """Show llama.cpp's log on standard error, if wanted."""
    if not wanted:
        yield
        return
    from specgen.backend.llama import logging_to

    with logging_to(lambda text: print(text, end="", file=sys.stderr, flush=True)):
        yield


def _open_session(options: SessionOptions, *, quiet: bool) -> Session:
    """Load the models; on a terminal, say so while it lasts."""
    from specgen.session import Session

    if quiet or not sys.stderr.isatty():
        return Session(options, time.perf_counter)
    from specgen.render import make_console

    console = make_console(sys.stderr, os.environ)
    with console.status(f"loading {options.target.name}"):
        return Session(options, time.perf_counter)


def _apply_template(session: Session, prompt: str, chat: bool | None, system: str | None) -> str:
    """The prompt as the model is to see it."""
    if chat is False:
        return prompt
    text = session.chat_prompt(prompt, system, datetime.datetime.now().astimezone())
    if text is not None:
        return text
    if chat or system is not None:
        wanted = "--chat" if chat else "--system"
        raise UsageError(
            f"{session.target_model.name} has no chat template, which {wanted} needs",
            hint=f"leave {wanted} out: the prompt is then continued as it is",
        )
    return prompt


def _answer(
    session: Session,
    prompt: str,
    *,
    show: Show,
    stats: bool,
    json: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Generate and show the answer; returns the exit code."""
    from specgen.events import FinishedEvent
    from specgen.render import make_renderer

    renderer = make_renderer(
        stdout=sys.stdout,
        stderr=sys.stderr,
        environ=os.environ,
        json=json,
        show=show,
        stats=stats,
        quiet=quiet,
        verbose=verbose,
    )
    interrupt = Interrupt()
    finish_reason = ""
    with interrupt, renderer:
        for event in session.generate(
            prompt,
            parse_special=True,  # as llama.cpp reads prompts: names of control tokens are these
            interrupted=interrupt,
            estimate_gain=stats or json,
        ):
            renderer.handle(event)
            if isinstance(event, FinishedEvent):
                finish_reason = event.finish_reason
    return interrupt.exit_code if finish_reason == "interrupted" else 0
