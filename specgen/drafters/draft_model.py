"""A draft model: a stand-alone model that drafts for the target, with what drafts for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.drafters.expansion import WIDEST
from specgen.drafters.interface import ContextSpec, DraftKind, DraftRequest, DraftSetup, LoadedDraft
from specgen.drafters.kinds import refuse_draft
from specgen.drafters.model_drafter import Guesses, ModelDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.parallel import ParallelDrafter, is_parallel_draft, mask_token
from specgen.drafters.translated import PrefixShaper, TranslatedDrafter, Translation
from specgen.drafters.vocabularies import check_pair
from specgen.errors import ModelFileError, PairError, UsageError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.kernels.frequent_rows import compute_frequent_tokens
from specgen.llama.native_context import n_native_sequences
from specgen.method.cascade import Cascade
from specgen.method.drafter import Drafter
from specgen.method.policy import CostAwarePolicy
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, DraftSource, SamplerOptions, TreeShape
from specgen.text.sampling.chain import Sampler

LONGEST_GUESS = 8  # the most tokens that one draft model drafts for another
_STEP = 256  # context sizes are rounded up to a multiple of this, as llama.cpp does
_N_PARALLEL = 4  # a token of a parallel draft counts as its share of a decode that predicts so many


class DraftModel(LoadedDraft):
    """A loaded draft model for a target. `weights` is a file to load instead of the model's own:
    what it learnt.
    """

    def __init__(self, path: Path, setup: DraftSetup, weights: Path | None = None) -> None:
        super().__init__(path.name, weights or path)
        self.timed, self.learnt = path, weights
        refuse_draft(path)
        self.model = LlamaModel(path, weights=weights, n_gpu_layers=setup.context.n_gpu_layers)
        self.models = (self.model,)
        #: What drafts for this model, if something does.
        self.helper: DraftModel | None = None
        self._guesses_ngrams = False
        #: The number of tokens that both vocabularies have, from 0 on, if they are the same.
        self._n_shared_tokens = self.model.vocabulary.n_tokens
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            #: The translation between the vocabularies; None if they are the same.
            self._translation = self._pair(setup)
            self.mask = mask_token(self.model, setup.drafting.mask)
            lacks_mask = self.mask is None and setup.drafting.mask == "auto"
            self._lacks_mask = lacks_mask and is_parallel_draft(self.model)
            if self._translation is not None:
                # What a token may be depends on how the one before it is spelled, so none are made
                # in parallel.
                self.can_draw, self.own_vocabulary, self.mask = False, self.model, None
            self._open_helper(setup)
            on_error.pop_all()
        if self.mask is not None:
            self.n_at_once = _N_PARALLEL
        else:
            self.learns = path
        self.why_chains = setup.why_chains or self._why_chains()
        self._decodes_branches = (
            setup.drafting.grows_trees and self.why_chains is None and self.mask is None
        )

    def _pair(self, setup: DraftSetup) -> Translation | None:
        target = setup.target
        own = self.model.vocabulary
        try:
            self._n_shared_tokens = check_pair(target.vocabulary, own, target.name, self.name)
        except PairError:
            if setup.drafting.translate == "off":
                raise
            translation = Translation(target.vocabulary, own)
            translation.draft_lexicon.with_prefix(b"")  # read now, not in the middle of an answer
            return translation
        return None

    def _open_helper(self, setup: DraftSetup) -> None:
        """Load what drafts for this model: a model, which drafts chains, or n-grams."""
        if not setup.helpers:
            return
        if self.mask is not None:
            raise UsageError(
                f"{self.name}: a parallel draft takes no draft of its own; leave out the next --draft",
                hint="--draft-mask off drafts one token after the other",
            )
        first, *rest = setup.helpers
        if not isinstance(first, Path):
            self._guesses_ngrams = True
            return
        drafting = replace(setup.drafting, tree=TreeShape("off"), mask="off", translate="off")
        own = replace(setup, target=self.model, drafting=drafting, helpers=tuple(rest), learnt=None)
        self.helper = DraftModel(first, own)
        self.models += self.helper.models

    def _why_chains(self) -> str | None:
        # A parallel draft decodes no node of a tree, so that its own state does not matter.
        if self.model.has_recurrent_state and self.mask is None:
            return f"{self.name} has a recurrent state, which branches cannot share"
        if self._translation is not None:
            return f"what {self.name} drafts is translated, a chain at a time"
        if self.helper is not None or self._guesses_ngrams:
            return f"{self.name} has a draft of its own, which drafts chains"
        return None

    def n_sequences(self, n_rows: int) -> int:
        return n_native_sequences(self.model, n_rows + 1 if self._decodes_branches else 1)

    def contexts(self, room: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its context, no larger than its training context, and that of what drafts for it."""
        self.model.check_parallel(room.n_slots)
        n_ctx = room.n_ctx
        if self._translation is not None:  # it may need more tokens for the same text
            n_ctx = -(-n_ctx * 3 // 2 // _STEP) * _STEP
        n_train = self.model.n_ctx_train
        n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
        n_outputs, n_branches = 1, 1
        if self.mask is not None:
            n_outputs = max(1, room.n_rows - 1)
        elif self._decodes_branches:
            n_outputs, n_branches = min(room.n_rows, WIDEST), room.n_rows + 1
        elif self.helper is not None or self._guesses_ngrams:
            n_outputs = 1 + LONGEST_GUESS
        context = LlamaBackend(
            self.model,
            room.options_of(self.model.path),
            n_ctx=n_ctx * room.n_slots,
            clock=room.clock,
            n_sequences=n_branches * room.n_slots,
            n_outputs=n_outputs * room.n_slots,
            n_rollback=n_outputs - 1,
            n_branches=n_branches,
        )
        with contextlib.ExitStack() as on_error:
            on_error.callback(context.close)
            compute_frequent_tokens(context)
            others = self.helper.contexts(room) if self.helper is not None else ()
            on_error.pop_all()
        return (context, *others)

    def drafter(self, request: DraftRequest) -> Drafter:
        backend, n, translation = request.caches[0], self._n_shared_tokens, self._translation
        if translation is None:
            if self.mask is not None:
                return ParallelDrafter(backend, request, mask=self.mask, n_shared_tokens=n)
            return ModelDrafter(backend, request, n_shared_tokens=n, guesses=self._guesses(request))
        text = translation.text(request.prompt, request.draft_prompt)
        # The target's biases and penalties refer to the target's token ids.
        never = self.model.vocabulary.end_tokens() if request.is_endless else ()
        shaper = PrefixShaper(translation.draft_lexicon, never)
        own = replace(request, text=TextState(()), shaper=shaper, prompt=text.tokens, head=range(0))
        inner = ModelDrafter(backend, own, n_shared_tokens=n, guesses=self._guesses(own))
        holds_back = backend.rollback == "cells"
        return TranslatedDrafter(inner, translation, text, shaper, holds_back=holds_back)

    def _guesses(self, request: DraftRequest) -> Guesses | None:
        """Return what drafts for this model. Its random generator is its own: this model's samples
        stay the same.
        """
        caches, key = request.caches[1:], Path("ngram")
        if self._guesses_ngrams:
            caches, cascade = (), Cascade(SuffixDrafter(*DraftOptions().ngrams_of))
        elif self.helper is not None and caches:
            key = self.helper.model.path
            own = replace(
                request,
                shaper=SamplingPipeline(
                    Sampler(SamplerOptions()), request.text
                ),  # the likeliest token
                rng=np.random.default_rng(0),
                caches=caches,
                costs=request.costs_of(key),
                draws=False,
                draft_prompt=None,
            )
            cascade = Cascade(model=self.helper.drafter(own))
        else:
            return None
        acceptance = request.guesses_of(self.model.path, key)
        options = DraftOptions(max_tokens=LONGEST_GUESS)
        return Guesses(cascade, CostAwarePolicy(options, request.costs, acceptance), caches)

    def notices(self) -> Iterator[str]:
        if self._lacks_mask:
            yield (
                f"{self.name} is a parallel draft, but its file does not say which its mask token is, so it drafts one "
                "token after the other: give --draft-mask (`pard_token` in the config.json of the model that it was "
                "converted from)"
            )


def _open(source: DraftSource, setup: DraftSetup) -> DraftModel:
    """Load a model with what it learnt, if that loads. With masks it drafts as it came: it learnt
    without them.
    """
    path = Path(source)
    if setup.learnt is not None:
        with contextlib.suppress(ModelFileError):
            draft = DraftModel(path, setup, setup.learnt)
            if draft.mask is None:
                return draft
            draft.close()
    return DraftModel(path, setup)


KIND = DraftKind("model", matches=lambda source: isinstance(source, Path), open=_open)
