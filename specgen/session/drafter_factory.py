"""Makes the drafter, the policy and the state of one answer, for the models that are loaded."""

from __future__ import annotations

import copy
from collections import abc
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from specgen.drafters import (
    AssistantDrafter,
    DflashDrafter,
    Drafter,
    Drafters,
    EagleDrafter,
    Guesses,
    HeadsDrafter,
    ModelDrafter,
    MtpChainDrafter,
    MtpDrafter,
    ParallelDrafter,
    PromptHeadSkipper,
    SuffixDrafter,
    TranslatedDrafter,
    TreeModelDrafter,
)
from specgen.drafters.hidden_trail import HiddenTrail, LastHidden, TargetStates
from specgen.drafters.translated import PrefixShaper, Translation
from specgen.llama.dflash import DflashContext
from specgen.llama.eagle import EagleContext
from specgen.llama.gemma4_assistant import AssistantContext
from specgen.llama.mtp import MtpContext
from specgen.method.acceptance import AcceptanceRates
from specgen.method.backend import Backend
from specgen.method.cost_table import CostTable
from specgen.method.draft import Branches
from specgen.method.policy import CostAwarePolicy, FixedPolicy, Policy, ThresholdPolicy
from specgen.method.verify import make_verifier
from specgen.options import (
    AUTO_TREE,
    DRAFT_TEMPERATURE,
    DraftOptions,
    SamplerName,
    SamplerOptions,
    TreeShape,
)
from specgen.session.draft_models import DraftModel, HeadsDraft, LoadedDraft, StatesDraft
from specgen.session.loaded_models import LONGEST_GUESS, Models
from specgen.session.prefix_cache import Slot
from specgen.session.prompts import Prompt
from specgen.session.request import RequestSettings
from specgen.text.sampling import Sampler
from specgen.text.sequence import Sequence
from specgen.text.text_state import Shaper, TextState

#: Makes a shaper of a chain of samplers and a text.
MakeShaper: TypeAlias = Callable[[Sampler, TextState], Shaper]
#: Returns acceptance statistics by origin, given a target's file, a draft (a file or a word such as
#: "ngram") and a mode (`Memory.acceptance`).
AcceptanceOf: TypeAlias = Callable[[Path, Path | str, str], MutableMapping[str, AcceptanceRates]]

#: The most continuations that n-grams propose at one position.
_N_NGRAM_BRANCHES = 3
#: Samplers that change the logits of particular tokens, whatever the other logits are.
_BY_TOKEN: tuple[SamplerName, ...] = ("penalties", "dry")
#: The number of likeliest tokens that are considered for one position of a tree: hardly any other token
#: would be worth a row of the target's batch.
_N_GUESSES = 8


@dataclass(frozen=True)
class DrafterFactory:
    """Makes what drafts for one answer with the models that are loaded at the time. With `learns_alone`, the
    acceptance statistics that an answer adds are dropped with it."""

    models: Models
    learns_alone: bool = False

    def sequence(
        self,
        prompt: Prompt,
        n_ctx: int,
        draft: Backend | None,
        seed: int,
        *,
        helpers: abc.Sequence[Backend] = (),
        plain: bool = False,
        make_shaper: MakeShaper = Shaper,
        settings: RequestSettings | None = None,
        slot: Slot | None = None,
        index: int = 0,
    ) -> Sequence:
        """Return the state of an answer to `prompt`, with the number `index`. `draft` is the draft model's
        context, if there is one, and `helpers` are those of the models that draft for it. With `plain`,
        nothing drafts. `settings` are by default those of the models; `slot` is the answer's slot in all
        contexts, by default the only one."""
        models, rng = self.models, np.random.SeedSequence(seed)
        settings, slot = settings or models.settings, slot or Slot()
        # The draft has a random generator of its own, so that it cannot change the target's samples.
        target_seed, draft_seed = rng.spawn(2)
        state = TextState(prompt.tokens, settings.grammar)
        drafters: Drafters | None = None
        hidden: TargetStates | None = None
        if not plain:
            maker = _RequestDrafters(
                models, self._acceptance_of, prompt, state, make_shaper, settings, slot
            )
            backends = () if draft is None else (draft, *helpers)
            drafters, hidden = maker.drafters(backends, np.random.default_rng(draft_seed))
        return Sequence(
            vocabulary=models.target.vocabulary.showing(settings.generation.shown_controls),
            options=settings.generation,
            n_ctx=n_ctx,
            drafters=drafters,
            policy=self._policy(len(prompt.tokens), settings),
            verifier=make_verifier(settings.verifier),
            shaper=make_shaper(settings.sampler, state),
            state=state,
            rng=np.random.default_rng(target_seed),
            slot=Branches(slot.number * models.n_branches_max, models.n_branches_max),
            index=index,
            hidden=hidden,
            ends=frozenset() if settings.generation.ignore_eos else prompt.ends,
        )

    def chain_drafter(self, prompt: Prompt, draft: Backend, state: TextState) -> Drafter:
        """Return the drafter of the draft model alone, or of what drafts from hidden states, which drafts chains
        of its most likely tokens over `state`, whatever the user's samplers are. The text starts with
        `prompt`."""
        maker = _RequestDrafters(
            self.models,
            self._acceptance_of,
            prompt,
            state,
            lambda _sampler, text: Shaper(Sampler(SamplerOptions()), text),
            self.models.settings,
            branches=False,
        )
        from_states = self.models.drafts.from_states
        if from_states is not None:
            maker = replace(maker, settings=self.models.settings.most_likely())
            return maker.of_states(from_states, draft, np.random.default_rng(0))[0]
        assert self.models.drafts.main is not None, "there is no draft model"
        return maker.of_model(self.models.drafts.main, (draft,), np.random.default_rng(0))

    def acceptance(
        self, settings: RequestSettings | None = None
    ) -> MutableMapping[str, AcceptanceRates]:
        """Return the acceptance statistics of the present draft with a request's samplers, by origin."""
        settings, drafts = settings or self.models.settings, self.models.drafts
        mode = "greedy"
        if not settings.sampling.greedy:
            mode = f"temp {settings.sampling.temperature:.1f}, {settings.verifier}"
        if drafts.main is not None and drafts.main.mask is not None:
            mode += ", parallel"
        target = self.models.options.target
        found = self._acceptance_of(target, drafts.key, mode)
        if drafts.learnt is not None and drafts.path is not None and not found:
            # The learnt weights start from the statistics of the original weights.
            found.update(copy.deepcopy(dict(self._acceptance_of(target, drafts.path, mode))))
        return found

    def _acceptance_of(
        self, target: Path, draft: Path | str, mode: str
    ) -> MutableMapping[str, AcceptanceRates]:
        found = self.models.memory.acceptance(target, draft, mode)
        return copy.deepcopy(found) if self.learns_alone else found

    def _policy(self, n_past: int, settings: RequestSettings) -> Policy:
        """Return the policy that decides how much is drafted for an answer after `n_past` tokens."""
        drafting = settings.drafting
        if drafting.tree.is_fixed and self.models.drafts.why_chains:
            n_most = drafting.tree.n_levels
            chains = replace(drafting, tree=TreeShape("off"), max_tokens=n_most, p_min=0.0)
            return FixedPolicy(chains)
        if drafting.policy == "fixed" or drafting.tree.is_fixed:
            return FixedPolicy(drafting)
        if drafting.policy == "threshold":
            return ThresholdPolicy(drafting)
        table = self.models.costs.table(n_past=n_past)
        return CostAwarePolicy(drafting, table, self.acceptance(settings))


@dataclass(frozen=True)
class _RequestDrafters:
    """Makes the drafter of one answer to `prompt`. `state` is the target's text, and `slot` the answer's part
    of the draft models' caches. Without `branches` models draft chains."""

    models: Models
    acceptance_of: AcceptanceOf
    prompt: Prompt
    state: TextState
    make_shaper: MakeShaper
    settings: RequestSettings
    slot: Slot = field(default_factory=Slot)
    branches: bool = True

    def drafters(
        self, backends: abc.Sequence[Backend], rng: np.random.Generator
    ) -> tuple[Drafters | None, TargetStates | None]:
        """Return the drafters (None: nothing drafts), and the object where the loop stores the target's
        hidden states (None: nothing drafts from them). `backends` are the contexts of the draft model, if
        there is one, and of its helpers."""
        drafts = self.models.drafts
        main, heads, from_states = drafts.main, drafts.heads, drafts.from_states
        hidden: TargetStates | None = None
        if main is not None and backends:
            drafter = self.of_model(main, backends, rng)
            merges = main.merges(self.settings)
        elif heads is not None:
            last = hidden = LastHidden()
            drafter = self._of_heads(heads, last, rng)
            merges = heads.merges(self.settings)
        elif from_states is not None and backends:
            drafter, hidden = self.of_states(from_states, backends[0], rng)
            merges = from_states.merges(self.settings)
        else:
            is_ngram = drafts.source == "ngram"
            return (Drafters(self._ngrams(), state=self.state) if is_ngram else None), None
        free = self._ngrams() if self.settings.drafting.adds_ngrams else None
        return Drafters(free, drafter, merges=merges, state=self.state), hidden

    def of_model(
        self, draft: DraftModel, backends: abc.Sequence[Backend], rng: np.random.Generator
    ) -> Drafter:
        """Return the drafter of a draft model. `backends` are the contexts of the model and of its helpers."""
        if draft.translation is not None:
            return self._of_translated(draft, draft.translation, backends, rng)
        settings, backend, own = self.settings, backends[0], self.prompt.without_head()
        draws, branches = draft.draws(settings), self.slot.branches(backend)
        shaper = self.make_shaper(_sampler(draft, settings), self.state)
        costs = self.models.costs.table(draft.model.path, len(self.prompt.tokens))
        held = own.tokens[: self.slot.share_prefix(backend, own.tokens)]
        drafter: Drafter
        if draft.mask is not None:
            drafter = ParallelDrafter(
                backend,
                shaper,
                rng,
                mask=draft.mask,
                draws=draws,
                n_shared_tokens=draft.n_shared_tokens,
                n_most=max(1, draft.drafting.n_max),
                branches=self.branches and draft.grows_trees(settings),
                shape=draft.drafting.tree,
                n_deepest=draft.drafting.tree_depth,
                costs=costs,
                sequence=branches.first,
                n_ctx=self.slot.n_ctx(backend),
                held=held,
            )
        elif self.branches and draft.grows_trees(settings):
            drafter = TreeModelDrafter(
                backend,
                shaper,
                rng,
                draws=draws,
                n_shared_tokens=draft.n_shared_tokens,
                shape=draft.drafting.tree,
                costs=costs,
                n_deepest=draft.drafting.tree_depth,
                slot=branches,
                n_ctx=self.slot.n_ctx(backend),
                held=held,
            )
        else:
            drafter = ModelDrafter(
                backend,
                shaper,
                rng,
                draws=draws,
                n_shared_tokens=draft.n_shared_tokens,
                costs=costs,
                guesses=self._guesses(draft, own, backends[1:], self.state),
                sequence=branches.first,
                n_ctx=self.slot.n_ctx(backend),
                held=held,
            )
        head = self.prompt.head
        return PromptHeadSkipper(drafter, head) if head else drafter

    def _of_translated(
        self,
        draft: DraftModel,
        translation: Translation,
        backends: abc.Sequence[Backend],
        rng: np.random.Generator,
    ) -> Drafter:
        """Return the drafter of a model with another vocabulary."""
        settings, backend = self.settings, backends[0]
        text = translation.text(self.prompt.tokens, self.prompt.draft_tokens)
        own, own_state = Prompt(self.prompt.text, tuple(text.tokens)), TextState(())
        is_endless = settings.generation.ignore_eos
        never = draft.model.vocabulary.end_tokens() if is_endless else ()
        shaper = PrefixShaper(translation.draft_lexicon, never)
        inner = ModelDrafter(
            backend,
            shaper,
            rng,
            draws=False,
            n_shared_tokens=draft.model.vocabulary.n_tokens,
            costs=self.models.costs.table(draft.model.path, len(self.prompt.tokens)),
            guesses=self._guesses(draft, own, backends[1:], own_state),
            sequence=self.slot.branches(backend).first,
            n_ctx=self.slot.n_ctx(backend),
            held=own.tokens[: self.slot.share_prefix(backend, own.tokens)],
        )
        return TranslatedDrafter(
            inner, translation, text, shaper, holds_back=backend.rollback == "cells"
        )

    def _guesses(
        self, draft: DraftModel, prompt: Prompt, backends: abc.Sequence[Backend], state: TextState
    ) -> Guesses | None:
        """Return the drafter of the model's helper, over a text in this model's tokens. The helper has a
        random generator of its own, so that it cannot change this model's samples."""
        helper, path = draft.helper, draft.model.path
        if helper is None or (helper != "ngram" and not backends):
            return None
        drafters = Drafters(SuffixDrafter(*DraftOptions().ngrams_of))
        key: Path | str = "ngram"
        if isinstance(helper, DraftModel):
            settings = self.settings.most_likely()
            maker = replace(self, prompt=prompt, state=state, settings=settings, make_shaper=Shaper)
            drafters = Drafters(model=maker.of_model(helper, backends, np.random.default_rng(0)))
            key = helper.model.path
        acceptance = self.acceptance_of(path, key, "guesses")
        costs = self.models.costs.table(path, len(self.prompt.tokens))
        return Guesses(drafters, guess_policy(costs, acceptance))

    def _of_heads(
        self, heads: HeadsDraft, last: LastHidden, rng: np.random.Generator
    ) -> HeadsDrafter:
        """Return the drafter of decoder heads. It drafts from the hidden states that the loop stores in
        `last`."""
        settings = self.settings
        return HeadsDrafter(
            heads.heads,
            last,
            self.make_shaper(_sampler(heads, settings), self.state),
            rng,
            self.models.target.vocabulary.is_end,
            draws=heads.draws(settings),
            branches=heads.grows_trees(settings),
            shape=heads.drafting.tree,
            costs=heads.costs,
            n_deepest=heads.drafting.tree_depth,
        )

    def of_states(
        self, draft: StatesDraft, backend: Backend, rng: np.random.Generator
    ) -> tuple[MtpDrafter, HiddenTrail]:
        """Return the drafter of the target's MTP layers or of an EAGLE-3 draft, and the hidden states that the
        loop stores for it."""
        assert isinstance(backend, (MtpContext, EagleContext, DflashContext, AssistantContext)), (
            "of what drafts"
        )
        settings, drafting, slot = self.settings, draft.drafting, self.slot
        branches = self.branches and draft.grows_trees(settings)
        trail, tokens = backend.trails[slot.number], self.prompt.tokens
        trail.begin(tokens, backend.trails)
        timed, n_left_out = self.models.drafts.timed, 0
        make: Callable[..., MtpDrafter] = MtpDrafter
        if isinstance(backend, EagleContext):  # the text's first token has no row
            make, n_left_out = EagleDrafter, 1
        if isinstance(backend, DflashContext):
            make = partial(
                DflashDrafter,
                mask=backend.draft.mask,
                n_most=backend.draft.n_most,
                predicts_from_last=backend.draft.predicts_from_last,
            )
        if isinstance(backend, MtpContext) and len(backend.layers) > 1:
            others = [(each, slot.share_prefix(each, tokens)) for each in backend.layers[1:]]
            make = partial(MtpChainDrafter, others=others)
        n_held = 0
        if isinstance(backend, AssistantContext):
            make = AssistantDrafter
        else:
            n_held = n_left_out + slot.share_prefix(backend, tokens[n_left_out:])
        made = make(
            backend,
            trail,
            self.make_shaper(_sampler(draft, settings), self.state),
            rng,
            draws=draft.draws(settings),
            branches=branches,
            shape=drafting.tree,
            costs=self.models.costs.table(timed, len(tokens)),
            slot=slot.branches(backend),
            n_ctx=slot.n_ctx(backend),
            n_deepest=drafting.tree_depth,
            n_held=n_held,
        )
        return made, trail

    def _ngrams(self) -> Drafter:
        """Return a drafter from n-grams of the text and of the lookup texts."""
        drafting = self.models.options.drafting
        n_children, n_deepest = 1, None
        if self.models.n_branches_max > 1:
            n_children, n_deepest = _N_NGRAM_BRANCHES, drafting.tree_depth
            if drafting.tree.is_fixed:
                n_children, n_deepest = max(drafting.tree.numbers), drafting.tree.n_levels
        return SuffixDrafter(
            *drafting.ngrams_of, self.models.corpora, n_children=n_children, n_deepest=n_deepest
        )


def guess_policy(costs: CostTable, acceptance: MutableMapping[str, AcceptanceRates]) -> Policy:
    """Return the policy that decides how much is drafted for a draft model with these costs."""
    return CostAwarePolicy(DraftOptions(max_tokens=LONGEST_GUESS), costs, acceptance)


def _sampler(draft: LoadedDraft, settings: RequestSettings) -> Sampler:
    """Return the samplers that a draft model or decoder heads draft with."""
    draws = draft.draws(settings)
    if draft.grows_trees(settings) and not draws:
        shaped = guess_sampling(settings.in_use, draft.drafting.tree)
    else:
        shaped = draft_sampling(settings.in_use, draft.drafting, draws=draws)
    return Sampler(shaped, settings.breakers)


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
