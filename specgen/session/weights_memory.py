"""The memory of a session's models: what they need, and how much the target's weights may use.

If the weights of a target do not fit, they are *streamed*: as much of them as fits stays in memory,
and the rest is read from disk in every pass (llama/weights.py). Whether they fit is decided here,
before anything is loaded, from the metadata of the files and from the memory that
`specgen.system.machine` reports. A draft always stays in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import BackendError, MemoryLimitError, ModelFileError, UsageError
from specgen.llama.file_check import check_file
from specgen.llama.kernels.packed_weights import must_stream
from specgen.llama.library import has_gpu
from specgen.llama.model_description import describe_model
from specgen.llama.native_context import CONTEXT_OVERHEAD_BYTES, MAX_SEQUENCES
from specgen.models.files import parts_of
from specgen.models.stored_models import shown_name
from specgen.options import (
    LONGEST_DRAFT,
    LONGEST_STREAMED_DRAFT,
    ContextOptions,
    DraftSource,
    SessionOptions,
)
from specgen.system.machine import available_memory_bytes, usable_memory
from specgen.system.quantities import human_bytes

#: Weights of less than this share of the available memory fit, whatever the contexts need: their
#: metadata need not be read to find that out.
_SMALL_SHARE = 0.25
#: The memory that streamed weights leave free: for what is read ahead, and for the growing process.
_RESERVE_BYTES = 256 * 2**20
#: The largest share of the memory for streamed weights that batches of a prompt may take instead.
_BATCH_SHARE = 1 / 16
#: The default number of tokens for a prompt and its answer.
DEFAULT_N_CTX = 4096
#: The maximum number of rows of such a batch. Larger ones are limited by computation.
_MAX_BATCH = 4096


# --- what models need -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The estimated memory of the models of a session, in bytes."""

    #: The weights of the target.
    weights_bytes: int
    #: Everything else: the target's contexts, and the drafts with theirs.
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.other_bytes


def memory_needs(
    options: SessionOptions,
    drafts: Iterable[DraftSource],
    n_slots: int = 1,
) -> MemoryNeeds:
    """Estimate the memory of a target, its largest draft, further drafts, and all their contexts.

    Args:
        options: The target, the further drafts, and the options of contexts.
        drafts: The drafts, one of which will be used.
        n_slots: The number of answers at once, each with a context of the usual size.

    Raises:
        ModelFileError: If a file cannot be read.
        BackendError: If one is not a GGUF file.
    """
    target = options.target
    context = options.target_context
    n_ctx = context_size(target, context) * n_slots

    def draft_bytes(source: DraftSource) -> int:
        if not isinstance(source, Path):
            return 0
        return weights_bytes(source) + context_bytes(source, options.draft_context, n_ctx)

    largest_draft_bytes = max(map(draft_bytes, drafts), default=0)
    further_draft_bytes = sum(map(draft_bytes, options.further_drafts))
    return MemoryNeeds(
        weights_bytes(target),
        context_bytes(target, context, n_ctx) + largest_draft_bytes + further_draft_bytes,
    )


def weights_bytes(file: Path) -> int:
    """Return the size of a model's weights, which is that of its files.

    Raises:
        ModelFileError: If a file cannot be read.
    """
    try:
        return sum(part.stat().st_size for part in parts_of(file))
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}") from error


def context_bytes(
    file: Path,
    context: ContextOptions,
    n_tokens: int,
) -> int:
    """Estimate the memory of a context of `n_tokens` tokens.

    Raises:
        BackendError: If it is not a GGUF file.
    """
    cells = describe_model(file).cache_bytes(n_tokens, context.cache_type_k, context.cache_type_v)
    return cells + CONTEXT_OVERHEAD_BYTES


def usual_n_ctx(wanted: int | None, n_train: int) -> int:
    """Return the size of a context, in tokens, that does not depend on a prompt.

    Args:
        wanted: The size that the user gave; 0 stands for the size that the model was trained with,
            None for the default.
        n_train: The size that the model was trained with; 0 if unknown.
    """
    if wanted is not None:
        return wanted or n_train or DEFAULT_N_CTX
    if n_train > 0:
        return min(DEFAULT_N_CTX, n_train)
    return DEFAULT_N_CTX


def context_size(file: Path, context: ContextOptions) -> int:
    """Return the usual size of a model's context in tokens.

    Raises:
        BackendError: If it is not a GGUF file.
    """
    model = describe_model(file)
    n_ctx = usual_n_ctx(context.n_ctx, model.n_ctx_train)
    if n_ctx > model.n_ctx_train > 0 and model.has_learned_positions:
        return model.n_ctx_train
    return n_ctx


def logits_bytes(file: Path, n_rows: int) -> int:
    """Return the memory of the logits of a number of rows.

    Raises:
        BackendError: If it is not a GGUF file.
    """
    return 4 * n_rows * describe_model(file).n_vocab  # float32


def _row_bytes(file: Path) -> int:
    """Estimate the memory of the activations of one row of a batch."""
    model = describe_model(file)
    # float32: the gate, the up projection and their product; the residual stream, its norm, and
    # the inputs and outputs of attention.
    return 4 * (3 * model.number("feed_forward_length") + 6 * model.n_embd)


# --- what the target's weights may use ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightsBudget:
    """The memory for the weights of a target."""

    #: The maximum number of bytes that stay in memory; None: all of them.
    max_bytes: int | None = None
    #: The number of a prompt's tokens to decode at once, for which streamed weights leave memory;
    #: None: as many as the options say.
    n_batch: int | None = None
    #: The default maximum length of drafts for a target with streamed weights.
    longest_draft: int = LONGEST_STREAMED_DRAFT


#: The budget of weights that fit.
ALL_WEIGHTS = WeightsBudget()


def weights_budget(
    options: SessionOptions,
    drafts: Iterable[DraftSource],
    n_slots: int = 1,
    max_bytes: float = math.inf,
) -> WeightsBudget:
    """Decide how much memory the weights of a target may use.

    Call this before anything is loaded, since whatever is loaded reduces the available memory.

    Args:
        options: The target, the further drafts, and the options of contexts.
        drafts: The drafts, one of which will be used.
        n_slots: The number of answers at once, for whose contexts streamed weights leave room.
        max_bytes: The memory for everything that the session loads, if less is available.

    Raises:
        MemoryLimitError: If they do not fit, and `weights_memory` is ``all``.
        UsageError: If `weights_memory` is a size, but the weights are not in this machine's memory.
    """
    if not _is_on_cpu(options.target_context):
        if isinstance(options.target_context.weights_memory, int):
            raise UsageError(
                "--weights-memory is about weights in the memory of this machine",
                hint="leave it out, or leave out --rpc and give -ngl 0",
            )
        return ALL_WEIGHTS
    memory_bytes = min(float(available_memory_bytes()), max_bytes)
    return budget_within(options, tuple(drafts), memory_bytes, n_slots)


def budget_within(
    options: SessionOptions,
    drafts: Sequence[DraftSource],
    memory_bytes: float,
    n_slots: int = 1,
) -> WeightsBudget:
    """Return the budget of a target's weights if all models have to fit into some memory.

    Files that cannot be read do not count: loading them reports what is wrong with them.

    Args:
        options: The target, the further drafts, and the options of contexts.
        drafts: The drafts, one of which will be used.
        memory_bytes: The memory for everything that the session loads.
        n_slots: The number of answers at once, for whose contexts streamed weights leave room.

    Raises:
        MemoryLimitError: If they do not fit, and `weights_memory` is ``all``.
    """
    target = options.target
    wanted = options.target_context.weights_memory
    try:
        longest_draft = _longest_draft(n_slots)
        if isinstance(wanted, int):
            return _given_budget(target, wanted, longest_draft)
        if weights_bytes(target) < _SMALL_SHARE * memory_bytes:
            return ALL_WEIGHTS
        check_file(target)
        drafts = [draft for draft in drafts if _is_readable(draft)]
        # Weights that fit together with the contexts for one answer stay in memory.
        needs = memory_needs(options, drafts)
        if not must_stream(target, int(memory_bytes) - needs.other_bytes):
            return ALL_WEIGHTS
        if wanted == "all":
            raise _too_large(target, needs, memory_bytes)
        other_bytes = memory_needs(options, drafts, n_slots).other_bytes
        other_bytes += _RESERVE_BYTES + logits_bytes(target, n_slots * (1 + longest_draft))
        return _streamed_budget(target, int(memory_bytes) - other_bytes, longest_draft)
    except (ModelFileError, BackendError, OSError):
        return ALL_WEIGHTS


def _is_readable(draft: DraftSource) -> bool:
    """Return whether the memory that a draft needs can be estimated."""
    if not isinstance(draft, Path):
        return True
    try:
        weights_bytes(draft)
        describe_model(draft)
    except (ModelFileError, BackendError):
        return False
    return True


def can_stream(context: ContextOptions) -> bool:
    """Return whether a target may be streamed if its weights do not fit."""
    return _is_on_cpu(context) and context.weights_memory != "all"


def _is_on_cpu(context: ContextOptions) -> bool:
    """Return whether the CPU computes the whole model on this machine."""
    return context.workers is None and (context.n_gpu_layers == 0 or not has_gpu())


def _longest_draft(n_slots: int) -> int:
    """Return the default maximum length of drafts if weights are streamed.

    Each node of a tree may need a sequence. A draft and its text need a few more.
    """
    n_sequences = MAX_SEQUENCES // n_slots - 4
    return max(LONGEST_DRAFT, min(LONGEST_STREAMED_DRAFT, n_sequences))


def _given_budget(
    target: Path,
    given_bytes: int,
    longest_draft: int,
) -> WeightsBudget:
    """Return the budget if the user gave the memory for weights."""
    check_file(target)
    if not must_stream(target, given_bytes):
        return ALL_WEIGHTS
    return WeightsBudget(given_bytes, _batch_rows(target, given_bytes), longest_draft)


def _streamed_budget(
    target: Path,
    free_bytes: int,
    longest_draft: int,
) -> WeightsBudget:
    """Return the budget of streamed weights and of the batches of a prompt."""
    n_batch = _batch_rows(target, free_bytes)
    batch_bytes = n_batch * _row_bytes(target)
    return WeightsBudget(max(0, free_bytes - batch_bytes), n_batch, longest_draft)


def _batch_rows(target: Path, max_bytes: int) -> int:
    """Return the number of a prompt's tokens to decode at once, if weights are streamed.

    Each batch reads the streamed weights once, so larger ones than usual save time.

    Args:
        target: The target's file.
        max_bytes: The memory for weights. A small share of it may be used for a larger batch.
    """
    n_rows = ContextOptions().n_batch
    row_bytes = _row_bytes(target)
    if row_bytes > 0:
        while n_rows < _MAX_BATCH and 2 * n_rows * row_bytes <= _BATCH_SHARE * max_bytes:
            n_rows *= 2
    return n_rows


def _too_large(
    target: Path,
    needs: MemoryNeeds,
    memory_bytes: float,
) -> MemoryLimitError:
    """Return the error for weights that have to fit and do not."""
    free_bytes = max(0, int(memory_bytes) - needs.other_bytes)
    limit = usable_memory().limit
    return MemoryLimitError(
        f"{shown_name(target)}: its weights need {human_bytes(needs.weights_bytes)}, but only "
        f"{human_bytes(free_bytes)} of memory are free for them{f' ({limit})' if limit else ''}",
        hint="without --weights-memory all, the rest is read from disk in every pass",
    )
