"""Makes the drafters, the policy and the state of one answer, for the models that are loaded."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specgen.drafters.interface import DraftRequest, Key, LoadedDraft
from specgen.method.acceptance import AcceptanceRates
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Backend
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import Branches
from specgen.method.drafter import HiddenStateSink
from specgen.method.policy import CostAwarePolicy, FixedPolicy, Policy, ThresholdPolicy
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.method.verifiers import VERIFIERS
from specgen.options import DRAFT_TEMPERATURE, DraftOptions, SamplerName, SamplerOptions, TreeShape
from specgen.session.prompts import Prompt
from specgen.session.request import Request, RequestSettings, Slot
from specgen.session.session import Session
from specgen.text.sampling.chain import Sampler

#: Samplers that change the logits of particular tokens, whatever the other logits are.
_BY_TOKEN: tuple[SamplerName, ...] = ("penalties", "dry")
#: The likeliest tokens considered at a position of a tree: hardly another would be worth a row.
_N_GUESSES = 8


@dataclass(frozen=True)
class DrafterFactory:
    """Makes what drafts for an answer. With `learns_alone`, what it adds to statistics is dropped
    with it.
    """

    session: Session
    learns_alone: bool = False

    def new_answer(
        self,
        prompt: Prompt,
        n_ctx: int,
        caches: Sequence[Backend],
        seed: int,
        request: Request | None = None,
    ) -> AnswerState:
        """Return the state of an answer to `prompt`. `caches` are the draft's contexts, without
        which models draft nothing. Without a `request`, it has the session's settings, and the only
        slot in all contexts.
        """
        session, rng = self.session, np.random.SeedSequence(seed)
        settings, index, slot, draft = session.settings, 0, Slot(), session.draft
        if request is not None:
            settings, index, slot = request.settings, request.index, request.slot or slot
            draft = draft if request.drafts else None
        # The draft has a random generator of its own, so that it cannot change the target's
        # samples.
        target_seed, draft_seed = rng.spawn(2)
        state = TextState(prompt.tokens, settings.grammar)
        cascade: Cascade | None = None
        hidden_states: HiddenStateSink | None = None
        if draft is not None and (caches or draft.timed is None):
            asked = self._draft_request(draft, prompt, state, settings, draft_seed)
            asked = replace(asked, caches=caches, slot=slot)
            drafter = draft.drafter(asked)
            hidden_states = drafter.hidden_states
            cascade = Cascade(None, drafter, state)
            if draft.is_free:
                cascade = Cascade(drafter, None, state)
            elif settings.drafting.adds_ngrams:
                asked = replace(asked, branches=session.n_branches_max > 1)
                cascade = Cascade(session.ngrams.drafter(asked), drafter, state)
        return AnswerState(
            vocabulary=session.target.vocabulary.showing(settings.generation.shown_controls),
            options=settings.generation,
            n_ctx=n_ctx,
            cascade=cascade,
            policy=self._policy(len(prompt.tokens), settings),
            verifier=VERIFIERS[settings.verifier],
            sampling=SamplingPipeline(settings.sampler, state),
            text_state=state,
            rng=np.random.default_rng(target_seed),
            slot=Branches(slot.number * session.n_branches_max, session.n_branches_max),
            index=index,
            hidden_states=hidden_states,
            ends=frozenset() if settings.generation.ignore_eos else prompt.ends,
        )

    def acceptance(
        self, settings: RequestSettings | None = None
    ) -> MutableMapping[str, AcceptanceRates]:
        settings, draft = settings or self.session.settings, self.session.draft
        mode = "greedy"
        if not settings.sampling.greedy:
            mode = f"temp {settings.sampling.temperature:.1f}, {settings.verifier}"
        if draft is not None and draft.n_at_once > 1:
            mode += ", parallel"
        target = self.session.options.target
        found = self._acceptance_of(target, draft.key if draft is not None else "none", mode)
        if draft is not None and draft.learnt is not None and draft.timed is not None and not found:
            # The learnt weights start from the statistics of the original weights.
            found.update(copy.deepcopy(dict(self._acceptance_of(target, draft.timed, mode))))
        return found

    def _acceptance_of(
        self, target: Path, draft: Key, mode: str
    ) -> MutableMapping[str, AcceptanceRates]:
        found = self.session.measurements.acceptance(target, draft, mode)
        return copy.deepcopy(found) if self.learns_alone else found

    def _policy(self, n_past: int, settings: RequestSettings) -> Policy:
        drafting = settings.drafting
        if drafting.tree.is_fixed and self.session.why_chains:
            n_most = drafting.tree.n_levels
            chains = replace(drafting, tree=TreeShape("off"), max_tokens=n_most, p_min=0.0)
            return FixedPolicy(chains)
        if drafting.policy == "fixed" or drafting.tree.is_fixed:
            return FixedPolicy(drafting)
        if drafting.policy == "threshold":
            return ThresholdPolicy(drafting)
        table = self.session.costs.table(n_past=n_past)
        return CostAwarePolicy(drafting, table, self.acceptance(settings))

    def _draft_request(
        self,
        draft: LoadedDraft,
        prompt: Prompt,
        state: TextState,
        settings: RequestSettings,
        seed: np.random.SeedSequence,
    ) -> DraftRequest:
        drafting, n_past = settings.drafting, len(prompt.tokens)

        def costs_of(key: Key) -> CostTable:
            return self.session.costs.table(key, n_past)

        wants_sampled_drafts = VERIFIERS[settings.verifier].wants_sampled_drafts
        draws = draft.can_draw and settings.sampler.is_random and wants_sampled_drafts
        can_branch = drafting.grows_trees and draft.why_chains is None
        branches = can_branch and (drafting.tree.is_fixed or not draws)
        shaped = draft_sampling(settings.sampler.options, drafting, draws=draws, branches=branches)
        return DraftRequest(
            state,
            SamplingPipeline(Sampler(shaped, settings.sampler.breakers), state),
            np.random.default_rng(seed),
            prompt=prompt.tokens,
            costs=costs_of(draft.timed) if draft.timed is not None else CostTable(),
            costs_of=costs_of,
            guesses_of=lambda model, key: self._acceptance_of(Path(model), key, "guesses"),
            draws=draws,
            branches=branches,
            shape=drafting.tree,
            n_max=drafting.n_max,
            n_deepest=drafting.tree_depth,
            head=prompt.head,
            draft_prompt=prompt.draft_tokens,
            is_endless=settings.generation.ignore_eos,
        )


def draft_sampling(
    target: SamplerOptions, drafting: DraftOptions, *, draws: bool, branches: bool
) -> SamplerOptions:
    """Return the target's samplers, changed so that more is accepted; penalties and biases stay."""
    if draws:
        temperature = drafting.temperature
        if temperature is None:
            temperature = DRAFT_TEMPERATURE * target.temperature
        top_k = target.top_k if drafting.top_k is None else drafting.top_k
        return replace(target, temperature=temperature, top_k=top_k)
    if branches:  # several of the likeliest tokens, which no sampler cuts off
        order = tuple(name for name in target.samplers if name in _BY_TOKEN)
        tree = drafting.tree
        return replace(
            target,
            samplers=(*order, "top_k", "temperature"),
            top_k=max(_N_GUESSES, *tree.numbers) if tree.is_fixed else _N_GUESSES,
            temperature=1.0,
            dynatemp_range=0.0,
        )
    # Without the temperature sampler, or with a dynamic temperature, sampling would not be greedy.
    order = tuple(dict.fromkeys((*target.samplers, "temperature")))
    return replace(target, temperature=0.0, dynatemp_range=0.0, xtc_probability=0.0, samplers=order)
