"""Makes a draft out of a target: searches for the blocks to leave out, and writes the rest to a file.

Such a draft uses the target's own layers (Zhang et al., arXiv:2309.08168). It is a separate file, because
llama.cpp cannot leave blocks out while it runs; so it takes memory in addition to the target's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specgen.engine.calibration.gain import Costs, expected_gain
from specgen.engine.calibration.weight_copies import share_of_time
from specgen.engine.loaded_models import Models
from specgen.engine.measurements import measure_if_new
from specgen.errors import UsageError
from specgen.llama import LlamaBackend, LlamaModel, default_threads
from specgen.system.json_lines import write_errors
from specgen.training.pruned.evaluations import Evaluations
from specgen.training.pruned.files import bytes_a_token, check_prunable, check_room, write_pruned
from specgen.training.pruned.judging import Judge, JudgedText, judged_texts
from specgen.training.pruned.search import N_FIRST, search
from specgen.training.texts import TargetText

#: Positions of the target's text that judge a set of blocks, and positions that judge the result.
N_PLACES = 512
_N_HELD_BACK = 1024
#: The size, in cells, of the contexts in which decodes are timed.
_N_CTX = 256


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


def make_pruned(
    loaded: Models,
    text: TargetText,
    output: Path,
    *,
    until_s: float,
    clock: Callable[[], float],
    interrupted: Callable[[], bool],
    progress: Callable[[str, int, int], None],
) -> Pruned | None:
    """Search for the blocks to leave out until `clock` reaches `until_s`, and write the draft to `output`.

    Return None if `interrupted` returns True; the judgements are kept, and the same call continues. Raise
    `ModelFileError` if blocks of the target cannot be left out, `UsageError` if there is no text to judge
    by or too little time, `MemoryLimitError`, `OutputError` and `BackendError`.
    """
    model, target = loaded.target, loaded.options.target
    check_prunable(model)
    texts = judged_texts(text.answers, N_PLACES, held_back=False)
    held_back = judged_texts(text.answers, _N_HELD_BACK, held_back=True)
    check_room(target, output.parent)
    costs = PrunedCosts(loaded, output.parent)
    context = loaded.costs.context_options()
    record = output.with_name(f"{output.name}.judged")
    with (
        Judge(model, context, texts, loaded.clock) as judge,
        Evaluations.opened(record, _key(texts), judge.agreement) as judged,
    ):
        _check_time(judged, model.n_layer, until_s, clock)
        left_out = search(
            judged,
            costs.speedup,
            model.n_layer,
            is_over=lambda: interrupted() or clock() > until_s,
            progress=progress,
        )
        n_judged = len(judged.known)
    if interrupted() or left_out is None:
        return None
    write_pruned(target, left_out, output, default_threads())
    with loaded.contexts(_N_CTX, drafts=False) as (own, _):
        cost = timed_share(loaded, own, output)
    agreement = agreement_of(output, loaded, held_back)
    return Pruned(
        tuple(sorted(left_out)),
        model.n_layer,
        agreement,
        cost,
        costs.speedup_at(cost, agreement),
        n_judged,
    )


def _check_time(
    judged: Evaluations, n_layer: int, until_s: float, clock: Callable[[], float]
) -> None:
    """Judge one set to time it; raise `UsageError` if there is no time for as many as the search needs."""
    started_s = clock()
    judged(frozenset({1}))
    took_s = clock() - started_s
    n_needed = n_layer + N_FIRST - len(judged.known)
    if took_s * n_needed > until_s - clock():
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


def _key(texts: Sequence[JudgedText]) -> str:
    """Return a digest of the texts that judge the sets."""
    return hashlib.sha256(
        repr([(text.prompt, text.tokens) for text in texts]).encode()
    ).hexdigest()[:16]


__all__ = ["N_PLACES", "Pruned", "PrunedCosts", "agreement_of", "make_pruned", "timed_share"]
