"""A stand-alone draft model: any small GGUF model that drafts for the target.

Depending on the file and the options, it drafts token by token (`autoregressive`), several tokens
at once (`parallel`), with a second draft (`staged`), or in another vocabulary (`translated`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.expansion import MAX_WIDTH
from specgen.drafters.interface import (
    ContextSpec,
    CostTable,
    Drafter,
    DraftKind,
    DraftOptions,
    DraftRequest,
    DraftSetup,
    DraftSource,
    LoadedDraft,
    ScorableText,
    TreeShape,
)
from specgen.drafters.kinds import refuse_draft
from specgen.drafters.ngram import LoadedNgrams
from specgen.drafters.ngram_counts import NgramCounts
from specgen.drafters.parallel import (
    ParallelDrafter,
    is_parallel_draft,
    mask_token,
)
from specgen.drafters.staged import DraftGuesser, StagedDrafter
from specgen.drafters.translated import (
    PrefixPipeline,
    TranslatedDrafter,
    Translation,
)
from specgen.drafters.vocabularies import check_pair
from specgen.errors import (
    ModelFileError,
    PairError,
    UsageError,
)
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.native_context import n_native_sequences, rounded_n_ctx
from specgen.method.cascade import Cascade
from specgen.method.policy import CostAwarePolicy
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.options import SamplerOptions
from specgen.text.sampling.chain import Sampler

#: The maximum number of tokens that are guessed at once for a draft model.
MAX_GUESS = 8
#: In a draft's own vocabulary, a text may have this many times as many tokens as in the target's.
_MAX_TRANSLATED_LENGTH = 1.5
#: To estimate the cost of a token of a parallel draft, a decode is assumed to predict this many.
_N_PARALLEL = 4


class StandaloneDraft(LoadedDraft):
    """A loaded draft model for a target.

    Its file and the options decide how it drafts (see `drafter`):

    - several tokens at once, if it was trained for that: then it has a `mask` token;
    - token by token, otherwise. Then it may have a draft of its own, the `second_draft`.

    If its vocabulary is not the target's, its drafts are translated.

    Args:
        path: The model's file.
        setup: The target and the options.
        weights: A file of learnt weights to load in place of the model's own; None if there is
            none.

    Raises:
        UsageError: If the options ask for what the model cannot do.
        ModelFileError: If a file cannot be used.
        PairError: If the vocabularies differ where they must not.
    """

    def __init__(
        self,
        path: Path,
        setup: DraftSetup,
        weights: Path | None = None,
    ) -> None:
        super().__init__(path.name, weights or path)
        self.cost_key = path
        self.learnt = weights
        refuse_draft(path)
        self.model = LlamaModel(path, weights=weights, n_gpu_layers=setup.context.n_gpu_layers)
        self.models = (self.model,)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            n_shared_tokens, translation = self._compare_vocabularies(setup)
            #: The number of tokens that may be drafted. It leaves out those that only fill the end
            #: of this model's vocabulary, if it is otherwise the target's.
            self._n_shared_tokens = n_shared_tokens
            #: The translation between the vocabularies; None if they are the same.
            self._translation = translation
            mask = mask_token(self.model, setup.drafting.mask)
            #: Whether it could draft in parallel, but its file does not name the mask token.
            self._lacks_mask = (
                mask is None and setup.drafting.mask == "auto" and is_parallel_draft(self.model)
            )
            #: The mask token; None if the model does not draft in parallel. A translated draft
            #: never does: each of its tokens may depend on how the one before it is spelled.
            self.mask = mask if translation is None else None
            #: What drafts for this model: another model, or n-grams; None if nothing does.
            self.second_draft = self._open_second_draft(setup)
            on_error.pop_all()
        if self.second_draft is not None:
            self.models += self.second_draft.models
        if translation is not None:
            self.own_vocabulary = self.model
            self.can_sample = False
        if self.mask is not None:
            self.n_at_once = _N_PARALLEL
        else:
            self.learns = path
        self.why_chains = setup.why_chains or self._why_chains()
        #: Whether it decodes the branches of a tree.
        self._decodes_branches = (
            setup.drafting.grows_trees and self.why_chains is None and self.mask is None
        )

    def _compare_vocabularies(self, setup: DraftSetup) -> tuple[int, Translation | None]:
        """Return the number of tokens that may be drafted, and a translation if one is needed.

        Raises:
            PairError: If the vocabularies differ, and the options exclude a translation.
        """
        target = setup.target
        own = self.model.vocabulary
        try:
            return check_pair(target.vocabulary, own, target.name, self.name), None
        except PairError:
            if setup.drafting.translate == "off":
                raise
        translation = Translation(target.vocabulary, own)
        translation.draft_lexicon.load()  # now, since it would delay an answer
        return own.n_tokens, translation

    def _open_second_draft(self, setup: DraftSetup) -> LoadedDraft | None:
        """Load the draft for this model, if the options name one: another model, or n-grams.

        Raises:
            UsageError: If this model drafts in parallel, so that it cannot have a draft.
            ModelFileError: If a file cannot be used.
            PairError: If the other model has another vocabulary.
        """
        if not setup.further_drafts:
            return None
        if self.mask is not None:
            raise UsageError(
                f"{self.name}: a parallel draft cannot have a draft of its own; leave out the next "
                "--draft",
                hint="--draft-mask off drafts one token at a time",
            )
        source, *others = setup.further_drafts
        if not isinstance(source, Path):
            # These n-grams search the text of the answer only, whatever the options say.
            return LoadedNgrams(replace(setup, drafting=DraftOptions()))
        # The other model drafts chains, token by token, in the same vocabulary.
        drafting = replace(setup.drafting, tree=TreeShape("off"), mask="off", translate="off")
        second_setup = replace(
            setup,
            target=self.model,
            drafting=drafting,
            further_drafts=tuple(others),
            learnt=None,
        )
        return StandaloneDraft(source, second_setup)

    def _why_chains(self) -> str | None:
        """Return why this model can only draft chains, whatever the target; None if it can branch.

        A parallel draft can branch with a recurrent state, since it decodes no nodes of a tree.
        """
        if self.model.has_recurrent_state and self.mask is None:
            return f"{self.name} has a recurrent state, which branches cannot share"
        if self._translation is not None:
            return f"{self.name} has another vocabulary, with which drafts cannot branch"
        if self.second_draft is not None:
            return f"{self.name} has a draft of its own, which drafts chains"
        return None

    def n_sequences(self, n_rows: int) -> int:
        """Return the number of llama.cpp's sequences per text, at least one for each branch."""
        return n_native_sequences(self.model, self._n_branches(n_rows))

    def _n_branches(self, n_rows: int) -> int:
        """Return the number of branches: one for the text and, in a tree, one for each node."""
        return n_rows + 1 if self._decodes_branches else 1

    def contexts(self, spec: ContextSpec) -> tuple[LlamaBackend, ...]:
        """Open its context, and those of its second draft."""
        self.model.check_parallel(spec.n_slots)
        n_branches = self._n_branches(spec.n_rows)
        n_outputs = self._n_outputs(spec.n_rows)
        context = LlamaBackend(
            self.model,
            spec.options_of(self.model.path),
            n_ctx=self._n_ctx(spec.n_ctx) * spec.n_slots,
            clock=spec.clock,
            n_sequences=n_branches * spec.n_slots,
            n_outputs=n_outputs * spec.n_slots,
            n_rollback=n_outputs - 1,
            n_branches=n_branches,
        )
        with contextlib.ExitStack() as on_error:
            on_error.callback(context.close)
            context.compute_frequent_tokens()
            others = self.second_draft.contexts(spec) if self.second_draft is not None else ()
            on_error.pop_all()
        return (context, *others)

    def _n_ctx(self, n_ctx: int) -> int:
        """Return the size of the model's context, which is never larger than in training.

        Args:
            n_ctx: The number of the target's tokens of a text.
        """
        if self._translation is not None:
            n_ctx = rounded_n_ctx(_MAX_TRANSLATED_LENGTH * n_ctx)
        n_train = self.model.n_ctx_train
        return min(n_ctx, n_train) if n_train > 0 else n_ctx

    def _n_outputs(self, n_rows: int) -> int:
        """Return the maximum number of rows per text whose logits are needed in one decode.

        Args:
            n_rows: The maximum number of the target's rows per text in a round.
        """
        if self.mask is not None:
            return max(1, n_rows - 1)
        if self._decodes_branches:
            return min(n_rows, MAX_WIDTH)
        if self.second_draft is not None:
            return 1 + MAX_GUESS
        return 1

    def drafter(self, request: DraftRequest) -> Drafter:
        """Return a drafter for one answer, of the kind that the file and the options ask for."""
        if self._translation is not None:
            return self._translated_drafter(request, self._translation)
        if self.mask is not None:
            backend = request.caches[0]
            n_shared = self._n_shared_tokens
            return ParallelDrafter(backend, request, mask=self.mask, n_shared_tokens=n_shared)
        return self._model_drafter(request)

    def _model_drafter(self, request: DraftRequest) -> ModelDrafter:
        """Return a drafter that drafts token by token, with a second draft if there is one."""
        backend = request.caches[0]
        n_shared = self._n_shared_tokens
        guesser = self._guesser(request)
        if guesser is None or backend.rollback != "cells":
            return ModelDrafter(backend, request, n_shared_tokens=n_shared)
        return StagedDrafter(backend, request, n_shared_tokens=n_shared, guesser=guesser)

    def _translated_drafter(
        self, request: DraftRequest, translation: Translation
    ) -> TranslatedDrafter:
        """Return a drafter that drafts in the model's vocabulary and translates."""
        text = translation.text(request.prompt, request.draft_prompt)
        # A new pipeline: the target's biases and penalties refer to the target's token ids.
        excluded = self.model.vocabulary.end_tokens() if request.is_endless else ()
        sampling = PrefixPipeline(translation.draft_lexicon, excluded)
        own = replace(
            request,
            text=TextState(()),
            sampling=sampling,
            prompt=text.tokens,
            skipped_prefix=range(0),
        )
        holds_back = request.caches[0].rollback == "cells"
        return TranslatedDrafter(
            self._model_drafter(own),
            translation,
            text,
            sampling,
            holds_back=holds_back,
        )

    def _guesser(self, request: DraftRequest) -> DraftGuesser | None:
        """Return the guesser of its tokens; None without a second draft or its contexts."""
        draft = self.second_draft
        if draft is None:
            return None
        caches = request.caches[1:]  # the first one is this model's own
        costs = CostTable()
        if draft.cost_key is not None:
            if not caches:
                return None
            costs = request.costs_of(draft.cost_key)
        second_request = replace(
            request,
            # The likeliest tokens, which this model is most likely to choose.
            sampling=SamplingPipeline(Sampler(SamplerOptions()), request.text),
            is_sampled=False,
            # A separate generator, so that this model's samples stay the same.
            rng=np.random.default_rng(0),
            caches=caches,
            costs=costs,
            # The request's own are about the target's tokens.
            ngram_counts=NgramCounts(),
            phrases=None,
            draft_prompt=None,
        )
        drafter = draft.drafter(second_request)
        cascade = Cascade(free=drafter) if draft.is_free else Cascade(model=drafter)
        acceptance = request.acceptance_of_guesses(self.model.path, draft.key)
        options = DraftOptions(max_tokens=MAX_GUESS)
        policy = CostAwarePolicy(options, request.costs, acceptance)
        return DraftGuesser(cascade, policy, caches)

    def scorable_text(
        self,
        prompt: Sequence[int],
        draft_prompt: Sequence[int] | None,
        answer: Sequence[int],
    ) -> ScorableText | None:
        """Return an answer as the model reads it; None for a parallel draft, which reads masks."""
        if self.mask is not None:
            return None
        if self._translation is not None:
            text = self._translation.text(prompt, draft_prompt)
            return ScorableText(self.model, text.steps(prompt, answer))
        if max((*prompt, *answer)) >= self._n_shared_tokens:
            return None
        return ScorableText.of(self.model, prompt, answer)

    def notices(self) -> Iterator[str]:
        """Yield a notice if the model would be faster with `--draft-mask`."""
        if self._lacks_mask:
            yield (
                f"{self.name} is a parallel draft, but its file does not say which its mask token "
                "is, so it drafts one token at a time: give --draft-mask (`pard_token` in "
                "the config.json of the model that it was converted from)"
            )


def _open(source: DraftSource, setup: DraftSetup) -> StandaloneDraft:
    """Load a model, with the weights that it learnt if possible, else with its original ones.

    A parallel draft uses its original weights, since learning does not train it with masks.
    """
    path = Path(source)
    if setup.learnt is not None:
        with contextlib.suppress(ModelFileError):
            draft = StandaloneDraft(path, setup, setup.learnt)
            if draft.mask is None:
                return draft
            draft.close()
    return StandaloneDraft(path, setup)


KIND = DraftKind("model", matches=lambda source: isinstance(source, Path), open=_open)
