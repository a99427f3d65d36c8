"""Prunes a target to a draft: searches for the blocks to leave out, and writes the rest to a file.

Such a draft uses the target's own layers (Zhang et al., arXiv:2309.08168). It is a separate file, because
llama.cpp cannot leave blocks out while it runs; so it takes memory in addition to the target's.

One pass over some hundred tokens of the target's own answers judges a set of blocks. Its agreement is the
share of positions at which the likeliest token is the one that the target chose. (The objective of SWIFT, Xia
et al., arXiv:2410.06916, section 4.2.)
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specgen.decoding.backend import Batch
from specgen.engine.calibration.gain import Costs, expected_gain
from specgen.engine.calibration.weight_copies import share_of_time
from specgen.engine.loaded_models import Models
from specgen.engine.measurements import measure_if_new
from specgen.errors import UsageError
from specgen.llama import LlamaBackend, LlamaModel, default_threads
from specgen.llama.skipped_blocks import SkippingBackend
from specgen.options import ContextOptions
from specgen.system.json_lines import write_errors
from specgen.training.pruned_weights import bytes_a_token, check_prunable, check_space, write_pruned
from specgen.training.pruning_search import N_FIRST, Blocks, Evaluations, search
from specgen.training.target_text import TargetAnswer, TargetText
from specgen.training.training_loop import Budget

#: Places of the target's text that judge a set of blocks, and places that judge the result.
N_JUDGED = 512
_N_HELD_BACK = 1024
#: The size, in cells, of the contexts in which decodes are timed.
_N_CTX = 256
#: The most judged tokens of an answer, and the longest prompt: prompts take time and judge nothing.
_N_ANSWER = 96
_MOST_PROMPT = 96
#: The number of rows that are decoded at once.
_N_ROWS = 512


@dataclass(frozen=True, slots=True)
class Pruned:
    """A draft cut from a target of `n_layer` blocks, without those in `left_out`.

    `agreement` is the share of positions of held-back answers at which its likeliest token is the target's.
    `cost` is the time of a token, as a share of the target's. `speedup` is expected over plain decoding.
    `n_judged` sets of blocks were judged.
    """

    left_out: tuple[int, ...]
    n_layer: int
    agreement: float
    cost: float
    speedup: float
    n_judged: int


class PrunedCosts:
    """The costs of the target's batches, and of a token of the target in Q4_0 without some blocks.

    A small file, which keeps every fourth block, is timed beside the target. The time of other files is
    estimated in proportion to their bytes, since a token reads all weights once.
    """

    def __init__(self, loaded: Models, folder: Path) -> None:
        model, target = loaded.target, loaded.options.target
        n_layer = model.n_layer
        kept = range(0, n_layer, 4)
        small = frozenset(range(n_layer)).difference(kept)
        probe = folder / "pruned-probe.gguf"
        try:
            write_pruned(target, small, probe, default_threads())
            with loaded.contexts(_N_CTX, drafts=False) as (own, _):
                measure_if_new(loaded, own, None)
                share = timed_share(loaded, own, probe)
        finally:
            with write_errors(probe):
                probe.unlink(missing_ok=True)
        self._n_layer = n_layer
        self._share = share
        self._n_kept = len(kept)
        #: The bytes of a block, and of all tensors outside blocks.
        self._block_bytes = bytes_a_token(target) - bytes_a_token(target, (n_layer - 1,))
        self._other_bytes = bytes_a_token(target, range(n_layer))
        known = loaded.costs.table().known
        self.batch_s = {n: seconds for n, seconds in known.items() if n <= loaded.n_rows_max}
        if len(self.batch_s) < 2:
            raise UsageError("a round has no room for a draft", hint="take a larger --draft-max")

    def cost(self, n_left_out: int) -> float:
        """Return a token's time without `n_left_out` blocks, as a share of the target's."""
        kept, timed = (
            self._other_bytes + n * self._block_bytes
            for n in (self._n_layer - n_left_out, self._n_kept)
        )
        return self._share * kept / timed

    def speedup(self, n_left_out: int, agreement: float) -> float:
        """Return the expected speed-up over plain decoding of a draft without `n_left_out` blocks."""
        return self.speedup_at(self.cost(n_left_out), agreement)

    def speedup_at(self, cost: float, agreement: float) -> float:
        """Return the same if a token takes the share `cost` of the target's time."""
        return expected_gain(Costs(self.batch_s, cost * self.batch_s[1]), agreement).speedup


def timed_share(loaded: Models, own: LlamaBackend, file: Path) -> float:
    """Return a token's time in the model of a file over that in the target; the two are timed in turns."""
    context = loaded.options.draft_context
    with contextlib.closing(LlamaModel(file, n_gpu_layers=context.n_gpu_layers)) as model:
        backend = LlamaBackend(model, context, n_ctx=own.n_ctx, clock=loaded.clock, n_outputs=1)
        with contextlib.closing(backend):
            return share_of_time(own, backend, (1,))


def prune(
    loaded: Models,
    text: TargetText,
    output: Path,
    budget: Budget,
    progress: Callable[[str, int, int], None],
) -> Pruned | None:
    """Search for the blocks to leave out, and write the draft to `output`; None if interrupted.

    The judgements are kept, and the same call continues. `progress` gets what is done, the steps done and the
    steps in all. Raises `ModelFileError` if blocks of the target cannot be left out, `UsageError` if there is
    no text to judge by or too little time, `MemoryLimitError`, `OutputError` and `BackendError`.
    """
    model, target = loaded.target, loaded.options.target
    check_prunable(model)
    texts = judged_texts(text.answers, N_JUDGED, held_back=False)
    held_back = judged_texts(text.answers, _N_HELD_BACK, held_back=True)
    check_space(target, output.parent)
    costs = PrunedCosts(loaded, output.parent)
    record = output.with_name(f"{output.name}.judged")
    key = hashlib.sha256(repr([(text.prompt, text.tokens) for text in texts]).encode()).hexdigest()
    with (
        Judge(model, loaded.costs.context_options(), texts, loaded.clock) as judge,
        Evaluations.opened(record, key[:16], judge.agreement) as judged,
    ):
        _check_time(judged, model.n_layer, budget)
        left_out = search(
            judged,
            costs.speedup,
            model.n_layer,
            is_over=budget.is_over,
            progress=progress,
        )
        n_judged = len(judged.known)
    if left_out is None or budget.interrupted():
        return None
    write_pruned(target, left_out, output, default_threads())
    with loaded.contexts(_N_CTX, drafts=False) as (own, _):
        cost = timed_share(loaded, own, output)
    agreement = agreement_of(output, loaded, held_back)
    speedup = costs.speedup_at(cost, agreement)
    return Pruned(tuple(sorted(left_out)), model.n_layer, agreement, cost, speedup, n_judged)


def _check_time(judged: Evaluations, n_layer: int, budget: Budget) -> None:
    """Judge one set to time it; raise `UsageError` if there is no time for as many as the search needs."""
    started_s = budget.clock()
    judged(frozenset({1}))
    took_s = budget.clock() - started_s
    n_needed = n_layer + N_FIRST - len(judged.known)
    if took_s * n_needed > budget.until_s - budget.clock():
        raise UsageError(
            f"{n_needed} more sets are judged at least, each in {took_s:.1f} s: there is no time for it",
            hint=f"give it --minutes {1 + took_s * n_needed / 60.0:.0f} beyond what the text takes; "
            "what was done is kept",
        )


def agreement_of(file: Path, loaded: Models, texts: Sequence[JudgedText]) -> float:
    """Return the share of positions at which the model in a file predicts the texts' token."""
    context = loaded.options.draft_context
    with (
        contextlib.closing(LlamaModel(file, n_gpu_layers=context.n_gpu_layers)) as model,
        Judge(model, context, texts, loaded.clock) as judge,
    ):
        return judge.agreement(frozenset())


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A prompt, and the tokens of the answer that are judged."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1


def judged_texts(
    answers: Iterable[TargetAnswer], n_tokens: int, *, held_back: bool
) -> list[JudgedText]:
    """Return the beginnings of answers, with about `n_tokens` tokens together. Raises `UsageError` if there
    are none."""
    found: list[JudgedText] = []
    n_left = n_tokens
    for answer in answers:
        if answer.is_held_back != held_back or len(answer.prompt_tokens) > _MOST_PROMPT:
            continue
        tokens = answer.tokens[: min(_N_ANSWER, n_left)]
        found.append(JudgedText(answer.prompt_tokens, tokens))
        n_left -= len(tokens)
        if n_left <= 0:
            break
    if not found:
        raise UsageError(
            "there is no text to judge by", hint="let the target write more, to shorter prompts"
        )
    return found


class Judge:
    """Judges sets of left-out blocks by texts. Use it as a context manager. Raises `MemoryLimitError`."""

    def __init__(
        self,
        model: LlamaModel,
        context: ContextOptions,
        texts: Sequence[JudgedText],
        clock: Callable[[], float],
    ) -> None:
        self._batches = list(_batches(texts))
        self._backend = SkippingBackend(
            model,
            replace(context, n_batch=_N_ROWS),
            n_ctx=max(len(batch) for batch, _ in self._batches),
            clock=clock,
            n_sequences=max(len(set(batch.sequences)) for batch, _ in self._batches),
            n_outputs=max(len(expected) for _, expected in self._batches),
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    @property
    def n_tokens(self) -> int:
        return sum(len(expected) for _, expected in self._batches)

    def agreement(self, left_out: Blocks) -> float:
        """Return the share of places at which the model without these blocks predicts the text's token."""
        n_agreed = 0
        for batch, expected in self._batches:
            likeliest = self._backend.decode_without(batch, left_out).argmax(axis=1)
            n_agreed += int((likeliest == expected).sum())
            for sequence in {sequence for (sequence,) in batch.sequences}:
                self._backend.remove(sequence)
        return n_agreed / self.n_tokens


def _batches(texts: Sequence[JudgedText]) -> Iterable[tuple[Batch, list[int]]]:
    """Yield batches of whole texts, each text a sequence, with the expected token of each row that wants
    logits."""
    batch, expected, n_sequences = Batch(), list[int](), 0
    for text in texts:
        if len(batch) and len(batch) + text.n_rows > _N_ROWS:
            yield batch, expected
            batch, expected, n_sequences = Batch(), [], 0
        tokens = (*text.prompt, *text.tokens[:-1])
        for position, token in enumerate(tokens):
            batch.add(token, position, (n_sequences,), position >= len(text.prompt) - 1)
        expected += text.tokens
        n_sequences += 1
    yield batch, expected
