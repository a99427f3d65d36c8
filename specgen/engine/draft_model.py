"""A draft model for a target: check that their vocabularies fit, and make its drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np

from specgen.backend.base import Backend, Vocabulary
from specgen.backend.llama import LlamaModel
from specgen.calibration.cost_table import CostTable
from specgen.core.text_state import Shaper, TextState
from specgen.core.verifiers import make_verifier
from specgen.drafters import (
    Drafter,
    Drafters,
    Guesses,
    ModelDrafter,
    PromptHeadSkipper,
    TranslatedDrafter,
    TreeModelDrafter,
)
from specgen.drafters.translation import BeginningShaper, SharedShaper, Translation
from specgen.engine.answer_settings import AnswerSettings
from specgen.engine.pairing import check_pair
from specgen.engine.prompts import Prompt
from specgen.engine.slots import WHOLE, Part
from specgen.errors import PairError
from specgen.options import (
    AUTO_TREE,
    DRAFT_TEMPERATURE,
    ContextOptions,
    DraftOptions,
    SamplerName,
    SamplerOptions,
    TreeShape,
)
from specgen.policy import Policy
from specgen.sampling import Sampler

#: How a draft with another vocabulary is translated.
Translated: TypeAlias = Literal["string", "tokens"]
#: Makes a shaper of a chain of samplers and a text.
MakeShaper: TypeAlias = Callable[[Sampler, TextState], Shaper]


class Known(Protocol):
    """What is known about the models so far, for one answer."""

    def costs(self, model: Path) -> CostTable:
        """Return the costs of a draft model's decodes."""
        ...

    def policy(self, model: Path, draft: Path | str) -> Policy:
        """Return the policy that decides how much `draft` drafts for the draft model `model`."""
        ...

    def ngrams(self, vocabulary: Vocabulary) -> Drafter:
        """Return an n-gram drafter for texts in a vocabulary."""
        ...


#: Samplers that change the logits of particular tokens, whatever the other logits are.
_BY_TOKEN: tuple[SamplerName, ...] = ("penalties", "dry")
#: The number of likeliest tokens that are considered for one place of a tree: hardly any other token
#: would be worth a row of the target's batch.
_N_GUESSES = 8
#: ``auto`` draws drafts from the shared tokens if at least this share of the draft's tokens is
#: shared. (At 80 %, translated text is accepted more at every temperature: docs/lab-notes.md.)
_MOSTLY = 0.95


class DraftModel:
    """A loaded draft model for a target. `weights` is a file to load instead of the model's own: a
    quicker copy, or weights that it learnt.

    Raises `ModelFileError` if the file cannot be used, and `PairError` if the vocabularies differ and
    `translate` forbids translation, or allows only shared tokens while there are none.
    """

    def __init__(
        self,
        path: Path,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
        weights: Path | None = None,
    ) -> None:
        #: The model or n-grams that draft for this model.
        self.helper: DraftModel | Literal["ngram"] | None = None
        self._drafting = drafting
        self.model = LlamaModel(path, weights=weights, n_gpu_layers=context.n_gpu_layers)
        try:
            self._pair(target)
        except PairError:
            self.model.close()
            raise
        #: Whether its drafts may be trees if the samplers allow that.
        self.branches = (
            drafting.grows_trees
            and not target.has_recurrent_state
            and not self.model.has_recurrent_state
            and self._translation is None
        )

    def close(self) -> None:
        """Free the model and its helper. May be called twice."""
        self.model.close()
        if isinstance(self.helper, DraftModel):
            self.helper.close()

    @property
    def has_own_vocabulary(self) -> bool:
        return self._translation is not None

    def translated(self, settings: AnswerSettings) -> Translated | None:
        """Return how drafts for an answer with these settings are translated; None if they need not be."""
        translation = self._translation
        if translation is None:
            return None
        mode = self._drafting.translate
        if mode == "auto":
            # At temperature 0, translated text is never worse than shared tokens, since it may use
            # tokens that only the draft has. Sampled drafts are accepted more often than argmax
            # drafts, but that gain does not outweigh a small set of shared tokens.
            n_tokens = len(translation.draft_lexicon)
            shares = settings.sampler.is_random and len(translation.shared) >= _MOSTLY * n_tokens
            mode = "tokens" if shares else "string"
        return "tokens" if mode == "tokens" else "string"

    def draws(self, settings: AnswerSettings) -> bool:
        """Whether drafts for an answer with these settings are sampled."""
        return (
            settings.sampler.is_random
            and make_verifier(settings.verifier).wants_draws
            and self.translated(settings) != "string"
        )

    def grows_trees(self, settings: AnswerSettings) -> bool:
        """Whether drafts for an answer with these settings may be trees."""
        is_fixed = self._drafting.tree.is_fixed
        return self.branches and (is_fixed or not self.draws(settings))

    def merges(self, settings: AnswerSettings) -> bool:
        """Whether proposals of n-grams may become branches of drafts for an answer with these settings."""
        return self.grows_trees(settings) and not self._drafting.tree.is_fixed

    def drafter(
        self,
        prompt: Prompt,
        backends: Sequence[Backend],
        state: TextState,
        rng: np.random.Generator,
        make_shaper: MakeShaper,
        known: Known,
        settings: AnswerSettings,
        *,
        branches: bool = True,
        part: Part = WHOLE,
    ) -> Drafter:
        """Return the drafter of one answer to `prompt`. It uses the answer's `part` of `backends`: the
        first is a context of this model, the others, if any, are contexts of its helpers. `state` is the
        target's text, `known` the costs and statistics so far, and `settings` are the answer's. Without
        `branches` it drafts chains."""
        translation, backend = self._translation, backends[0]
        costs = known.costs(self.model.path)
        slot, n_ctx = part.slot(backend), part.n_ctx(backend)
        draws, sampler = self.draws(settings), self._sampler(settings)
        if translation is None:
            shaper = make_shaper(sampler, state)
            own_prompt = prompt.without_head()
            held = own_prompt.tokens[: part.share_prefix(backend, own_prompt.tokens)]
            drafter: Drafter
            if branches and self.grows_trees(settings):
                drafter = TreeModelDrafter(
                    backend,
                    shaper,
                    rng,
                    draws=draws,
                    n_shared_tokens=self._n_shared_tokens,
                    shape=self._drafting.tree,
                    costs=costs,
                    n_deepest=self._drafting.tree_depth,
                    slot=slot,
                    n_ctx=n_ctx,
                    held=held,
                )
            else:
                drafter = ModelDrafter(
                    backend,
                    shaper,
                    rng,
                    draws=draws,
                    n_shared_tokens=self._n_shared_tokens,
                    costs=costs,
                    guesses=self._guesses(own_prompt, backends[1:], state, known, settings, part),
                    sequence=slot.first,
                    n_ctx=n_ctx,
                    held=held,
                )
            return PromptHeadSkipper(drafter, prompt.head) if prompt.head else drafter
        text = translation.text(prompt.tokens, prompt.draft_tokens)
        own_prompt, own_state = Prompt(prompt.text, tuple(text.tokens)), TextState(())
        translated: BeginningShaper | SharedShaper
        if self.translated(settings) == "string":
            translated = BeginningShaper(sampler, translation.draft_lexicon)
        else:
            translated = SharedShaper(translation.shared, make_shaper(sampler, state))
        inner = ModelDrafter(
            backend,
            translated,
            rng,
            draws=draws,
            n_shared_tokens=self.model.vocabulary.n_tokens,
            costs=costs,
            guesses=self._guesses(own_prompt, backends[1:], own_state, known, settings, part),
            sequence=slot.first,
            n_ctx=n_ctx,
            held=own_prompt.tokens[: part.share_prefix(backend, own_prompt.tokens)],
        )
        return TranslatedDrafter(
            inner, translation, text, translated, holds_back=backend.rollback == "cells"
        )

    def _guesses(
        self,
        prompt: Prompt,
        backends: Sequence[Backend],
        state: TextState,
        known: Known,
        settings: AnswerSettings,
        part: Part,
    ) -> Guesses | None:
        """Return the helper's drafter for this model, over a text in this model's tokens. The helper
        has a random generator of its own, so that it cannot change this model's samples."""
        helper = self.helper
        if helper is None or (helper != "ngram" and not backends):
            return None
        if helper == "ngram":
            drafters = Drafters(known.ngrams(self.model.vocabulary))
            name: Path | str = helper
        else:
            own_rng = np.random.default_rng(0)
            drafter = helper.drafter(
                prompt, backends, state, own_rng, Shaper, known, settings.most_likely(), part=part
            )
            drafters = Drafters(model=drafter)
            name = helper.model.path
        return Guesses(drafters, known.policy(self.model.path, name))

    def _sampler(self, settings: AnswerSettings) -> Sampler:
        """Return the samplers that the model drafts with."""
        if self.translated(settings) == "string":
            # The target's biases and penalties refer to the target's token ids.
            is_endless = settings.generation.ignore_eos
            ends = self.model.vocabulary.end_tokens() if is_endless else ()
            never = tuple((token, -math.inf) for token in ends)
            return Sampler(SamplerOptions(logit_bias=never))
        if self.grows_trees(settings) and not self.draws(settings):
            shaped = guess_sampling(settings.in_use, self._drafting.tree)
        else:
            draws = self.draws(settings)
            shaped = draft_sampling(settings.in_use, self._drafting, draws=draws)
        return Sampler(shaped, settings.breakers)

    def _pair(self, target: LlamaModel) -> None:
        """Compare the vocabularies, and prepare the translation if they differ."""
        self._translation: Translation | None = None
        self._n_shared_tokens = 0
        translate = self._drafting.translate
        try:
            self._n_shared_tokens = check_pair(
                target.vocabulary, self.model.vocabulary, target.name, self.model.name
            )
        except PairError:
            if translate == "off":
                raise
            self._translation = Translation(target.vocabulary, self.model.vocabulary)
            if translate == "tokens" and not len(self._translation.shared):
                raise PairError(
                    f"{self.model.name} cannot draft for {target.name} with --translate tokens: "
                    "they share no token",
                    hint="--translate string translates its text",
                ) from None
            if translate != "tokens":
                self._translation.draft_lexicon.load()  # now, not in the middle of an answer


def draft_sampling(
    target: SamplerOptions, drafting: DraftOptions, *, draws: bool
) -> SamplerOptions:
    """Return the samplers of a draft model: the target's, changed so that more drafts are accepted.
    Penalties and biases stay, since they decide which tokens the target can accept."""
    if not draws:  # the most likely text is accepted most
        # Without the temperature sampler, or with a dynamic temperature, sampling would not be greedy.
        order = tuple(dict.fromkeys((*target.samplers, "temperature")))
        return replace(
            target, temperature=0.0, dynatemp_range=0.0, xtc_probability=0.0, samplers=order
        )
    temperature, top_k = drafting.temperature, drafting.top_k
    if temperature is None:
        temperature = DRAFT_TEMPERATURE * target.temperature
    return replace(target, temperature=temperature, top_k=target.top_k if top_k is None else top_k)


def guess_sampling(target: SamplerOptions, tree: TreeShape = AUTO_TREE) -> SamplerOptions:
    """Return the samplers of a draft model that proposes several of its likeliest tokens. Penalties
    and biases stay, since they decide which tokens the target can accept; samplers that cut off less
    likely tokens are dropped."""
    order: list[SamplerName] = [name for name in target.samplers if name in _BY_TOKEN]
    return replace(
        target,
        samplers=(*order, "top_k", "temperature"),
        top_k=max(_N_GUESSES, *tree.numbers) if tree.is_fixed else _N_GUESSES,
        temperature=1.0,
        dynatemp_range=0.0,
    )
