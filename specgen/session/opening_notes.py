"""Notes for the user about a session that was just opened or closed, one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from specgen import __version__
from specgen.llama import LlamaModel, build
from specgen.llama.kernels.admission import is_first_time
from specgen.options import ContextOptions, DraftOptions, SessionOptions
from specgen.session.prompts import template_of
from specgen.session.session import Session
from specgen.session.streaming_notes import streaming_notes
from specgen.system.files import is_writable
from specgen.system.folders import cache_folder, packed_folder
from specgen.system.machine import usable_threads
from specgen.system.quantities import human_bytes


def notes_about(
    session: Session,
    options: SessionOptions,
    *,
    never_drafts: bool,
) -> Iterator[str]:
    """Yield the notes about a session that was just opened.

    Args:
        session: The session.
        options: Its options as the user gave them.
        never_drafts: Whether the user asked for no drafts, so that drafting options have no effect.
    """
    for model in session.models:
        yield from _kernel_notes(model)
    yield from _disk_notes(session)
    yield from streaming_notes(session)
    if never_drafts:
        yield from _unused_drafting_options(options.drafting)
    yield from layers_without_gpu(options.target_context, options.draft_context)
    yield from _unused_template_variables(session, options.target_context)
    yield from _thread_notes(options.target_context)
    for draft in session.models[1:]:
        yield from _size_notes(session.target, draft)


def layers_without_gpu(target: ContextOptions, draft: ContextOptions) -> Iterator[str]:
    """Yield a note for each option that moves layers to a GPU which llama.cpp does not find."""
    for context, name in ((target, "-ngl"), (draft, "-ngld")):
        if context.n_gpu_layers > 0 and not build().gpu_offload:
            yield (
                f"{name} {context.n_gpu_layers} has no effect: "
                "this build of llama.cpp finds no GPU (`specgen doctor`)"
            )


def notes_after_closing(session: Session) -> Iterator[str]:
    """Yield a note for each model of a closed session whose packed weights are on the disk now."""
    for name, packed in session.packed.items():
        if packed.written_bytes:
            yield (
                f"{name}: its weights were packed for this machine, and "
                f"{human_bytes(packed.written_bytes)} are stored in {packed_folder()}, "
                "so the next start is quick (--packed-cache off stores none)"
            )


def _thread_notes(context: ContextOptions) -> Iterator[str]:
    """Yield a note for each number of threads that is larger than what can run at once."""
    usable = usable_threads()
    why = usable.limit or f"this machine runs {usable.amount} threads at once"
    for name, n_threads in (("-t", context.n_threads), ("-tb", context.n_threads_batch)):
        if n_threads is not None and n_threads > usable.amount:
            yield f"{name} {n_threads} is slower than {name} {usable.amount}: {why}"


def _kernel_notes(model: LlamaModel) -> Iterator[str]:
    """Yield a note if specgen's kernels failed for a model."""
    problem = model.loaded.kernel_problem
    if problem:
        yield (
            f"{model.name}: computed with llama.cpp's kernels, because specgen's failed in a trial "
            f"({problem}); please report this (`specgen doctor -m` tries again)"
        )


def _disk_notes(session: Session) -> Iterator[str]:
    """Yield a note if packed weights find no room on the disk: once per version of specgen."""
    if not is_writable(packed_folder()):  # `note_about_folders` has said so
        return
    for model in session.models:
        packed = model.loaded.packed
        if packed is not None and packed.lacks_room:
            if is_first_time(cache_folder() / f"no-room-for-packed-weights-{__version__}"):
                yield (
                    f"{model.name}: its packed weights are not stored, so every start packs them "
                    "again: there is too little disk space (a tenth of the disk stays free; this "
                    "note is shown once)"
                )
            return


def _unused_drafting_options(drafting: DraftOptions) -> Iterator[str]:
    """Yield a note for each drafting option that the user set."""
    defaults = DraftOptions()
    for field in fields(defaults):
        # An environment variable is set for all commands, and the lookup store gets the answers
        # even if nothing drafts: neither is a mistake.
        is_expected = "envvar" in field.metadata or field.name == "lookup_store"
        is_set = getattr(drafting, field.name) != getattr(defaults, field.name)
        # Fields without metadata are not command line options.
        if is_set and field.metadata and not is_expected:
            # "--flag/--no-flag": name the first one.
            name = field.metadata["spellings"][0].partition("/")[0]
            yield f"{name} has no effect: with `--draft none` nothing drafts"


def _unused_template_variables(session: Session, context: ContextOptions) -> Iterator[str]:
    """Yield a note for each variable that does not occur in the target's chat template."""
    template = template_of(session.target, has_tools=True) or ""
    for name in context.template_variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield f"--chat-template-kwargs: the chat template does not read {name}"


def _size_notes(target: LlamaModel, draft: LlamaModel) -> Iterator[str]:
    if draft.size_bytes > target.size_bytes:
        yield (
            f"the draft {draft.name} ({human_bytes(draft.size_bytes)}) is larger than the target "
            f"{target.name} ({human_bytes(target.size_bytes)}): are the two swapped?"
        )
