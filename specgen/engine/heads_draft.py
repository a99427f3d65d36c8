"""Decoder heads for a target: check that they fit, and make their drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from specgen.backend.llama import LlamaModel, default_threads
from specgen.backend.llama.decoder_heads import DecoderHeads
from specgen.calibration.cost_table import CostTable
from specgen.core.last_hidden import LastHidden
from specgen.core.text_state import TextState
from specgen.core.verifiers import make_verifier
from specgen.drafters import HeadsDrafter
from specgen.engine.answer_settings import AnswerSettings
from specgen.engine.draft_model import MakeShaper, draft_sampling, guess_sampling
from specgen.errors import PairError
from specgen.options import ContextOptions, DraftOptions
from specgen.sampling import Sampler

#: The numbers of states whose looks are timed, and how often each is.
_SIZES = (1, 2, 4, 8)
_N_REPEATS = 5


class HeadsDraft:
    """Loaded decoder heads for a target. Raises `ModelFileError` if the file is damaged, and `PairError`
    if the heads were made for another model, or the target has a recurrent state."""

    def __init__(
        self,
        path: Path,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
        clock: Callable[[], float],
    ) -> None:
        if target.has_recurrent_state:
            raise PairError(
                f"{target.name} has a recurrent state; decoder heads cannot draft for it",
                hint="use a draft model, or --draft ngram",
            )
        n_threads = context.n_threads or default_threads()
        self._drafting = drafting
        self.heads = DecoderHeads(path, clock, n_threads)
        weights, vocabulary = self.heads.weights, target.vocabulary
        is_same = (weights.n_vocab, weights.vocabulary) == (
            vocabulary.n_tokens,
            vocabulary.digest(),
        )
        if not is_same or weights.n_embd != target.n_embd:
            self.heads.close()
            raise PairError(
                f"{path.name}: made for {weights.target}, not for {target.name}",
                hint=f"`specgen draft make -m {target.path}` makes heads for this target",
            )
        self._is_end = vocabulary.is_end
        #: The cost table of looks, the same for all answers.
        self._costs = self._timed(clock)

    def close(self) -> None:
        """Free the weights. May be called twice."""
        self.heads.close()

    def draws(self, settings: AnswerSettings) -> bool:
        """Whether drafts for an answer with these settings are sampled."""
        return settings.sampler.is_random and make_verifier(settings.verifier).wants_draws

    def merges(self, settings: AnswerSettings) -> bool:
        """Whether proposals of n-grams may become branches of drafts for an answer with these settings."""
        drafting = self._drafting
        grows = drafting.grows_trees and not drafting.tree.is_fixed
        return grows and not self.draws(settings)

    def drafter(
        self,
        last: LastHidden,
        state: TextState,
        rng: np.random.Generator,
        make_shaper: MakeShaper,
        settings: AnswerSettings,
    ) -> HeadsDrafter:
        """Return the drafter of one answer. It drafts from the hidden states that the loop stores in
        `last`."""
        draws, shape = self.draws(settings), self._drafting.tree
        branches = shape.is_fixed or (self._drafting.grows_trees and not draws)
        if branches and not draws:
            sampling = guess_sampling(settings.in_use, shape)
        else:
            sampling = draft_sampling(settings.in_use, self._drafting, draws=draws)
        return HeadsDrafter(
            self.heads,
            last,
            make_shaper(Sampler(sampling, settings.breakers), state),
            rng,
            self._is_end,
            draws=draws,
            branches=branches,
            shape=shape,
            costs=self._costs,
            n_deepest=self._drafting.tree_depth,
        )

    def _timed(self, clock: Callable[[], float]) -> CostTable:
        """Time looks beyond one and several nodes, which takes some milliseconds."""
        heads = self.heads
        states = heads.begin(np.zeros(heads.weights.n_embd, np.float32), 0)
        seconds: dict[int, float] = {}
        for n in _SIZES:
            behind = np.repeat(states, n, axis=0)
            for _ in range(_N_REPEATS):
                started = clock()
                heads.logits(heads.advance(behind, [0] * n))
                took_s = clock() - started
                seconds[n] = min(took_s, seconds.get(n, took_s))
        return CostTable(seconds)
