"""Make the drafters, the policy and the state of one answer, for the loaded models."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from specgen.drafters.interface import (
    Drafter,
    Drafting,
    DraftRequest,
    Key,
    LoadedDraft,
    Price,
    RoundPlan,
)
from specgen.drafters.ngram_counts import NgramCounts
from specgen.drafters.shared_phrases import SharedPhrases, phrases_file
from specgen.method.acceptance import AcceptanceCounts
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Backend
from specgen.method.cascade import Cascade
from specgen.method.cost_table import CostTable
from specgen.method.draft import Branches
from specgen.method.policy import CostAwarePolicy, FixedPolicy, Policy, ThresholdPolicy
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.method.verifiers import VERIFIERS
from specgen.options import DRAFT_TEMPERATURE, DraftOptions, SamplerName, SamplerOptions, TreeShape
from specgen.session.prompts import Prompt
from specgen.session.request import Request, RequestSettings, Slot
from specgen.session.session import Session
from specgen.text.sampling.chain import Sampler

#: Samplers that change the logits of particular tokens, regardless of the other logits.
_PER_TOKEN_SAMPLERS: tuple[SamplerName, ...] = ("penalties", "dry")
#: The number of likeliest tokens that are considered at each position of a tree. Less likely ones
#: are hardly ever worth a row of the target's batch.
_N_GUESSES = 8


class _FailedDrafter(Drafter):
    """Stands for a drafter that could not be made: it fails in its first round, with the error."""

    def __init__(self, name: str, error: Exception) -> None:
        self._name = name
        self._error = error

    @property
    def name(self) -> str:
        return self._name

    def price(self, n_context: int) -> Price:
        raise self._error

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        raise self._error


@dataclass
class DrafterFactory:
    """Makes the state of each answer, with its drafter and its policy."""

    #: The loaded models.
    session: Session
    #: Whether each answer works on its own copy of the acceptance counts, so that it neither
    #: depends on earlier ones nor influences later ones. It then searches phrases of earlier
    #: answers only if the options ask to store them.
    learn_alone: bool = False

    @cached_property
    def _phrases_file(self) -> Path | None:
        """Return the file for the phrases of answers; None if they are not stored."""
        options = self.session.options
        if not options.phrase_store or options.cache is None:
            return None
        return phrases_file(options.cache, self.session.target.vocabulary.digest())

    @cached_property
    def _phrases(self) -> SharedPhrases:
        """Return the phrases that n-grams search: common ones, and those of earlier answers."""
        return SharedPhrases(self._phrases_file, common=self.session.common_phrases)

    @property
    def _finds_phrases(self) -> bool:
        """Whether drafts may repeat phrases of earlier answers."""
        return self._phrases_file is not None or not self.learn_alone

    def new_answer(
        self,
        prompt: Prompt,
        n_ctx: int,
        caches: Sequence[Backend],
        seed: int,
        request: Request | None = None,
        branches: Branches | None = None,
    ) -> AnswerState:
        """Return the state of an answer before its prompt is prefilled.

        Args:
            prompt: The text before the answer.
            n_ctx: The maximum number of tokens of prompt and answer together.
            caches: The draft's contexts. Without them, a draft that needs contexts is not used.
            seed: The seed of all random numbers.
            request: Supplies the settings, the slot and the number of the answer. None stands for
                an answer with the session's settings in the only slot.
            branches: The sequences of the answer in the target's cache. None stands for those of
                the only slot.
        """
        session = self.session
        settings = session.settings
        draft = session.draft
        index = 0
        slot = Slot()
        if request is not None:
            settings = request.settings
            index = request.index
            slot = request.slot or slot
            if not request.drafts:
                draft = None
        # Target and draft have separate random generators, so that a draft cannot change the
        # target's samples.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        text_state = TextState(prompt.tokens, settings.grammar)
        cascade: Cascade | None = None
        if draft is not None and (caches or draft.cost_key is None):
            draft_request = self._draft_request(
                draft,
                prompt,
                text_state,
                settings,
                seed=draft_seed,
                caches=caches,
                slot=slot,
            )
            adds_ngrams = settings.drafting.adds_ngrams
            cascade = self._cascade(draft, draft_request, adds_ngrams=adds_ngrams)
        generation = settings.generation
        ends = prompt.ends
        if generation.ignore_eos:
            ends = frozenset()
        elif prompt.stop:
            generation = replace(generation, stop=(*generation.stop, *prompt.stop))
        return AnswerState(
            vocabulary=session.target.vocabulary.showing(generation.shown_controls),
            options=generation,
            n_ctx=n_ctx,
            cascade=cascade,
            policy=self._policy(len(prompt.tokens), settings),
            verifier=VERIFIERS[settings.verifier],
            sampling=SamplingPipeline(settings.sampler, text_state),
            text_state=text_state,
            rng=np.random.default_rng(target_seed),
            branches=branches or Branches(n_branches=session.n_branches_max),
            index=index,
            hidden_states=cascade.hidden_states if cascade is not None else None,
            ends=ends,
        )

    def find_phrases(self, answer: AnswerState) -> None:
        """Find phrases in a finished answer, end token included, for the drafts of later ones."""
        if self._finds_phrases:
            n_prompt = answer.n_prompt
            self._phrases.add(answer.tokens[:n_prompt], answer.tokens[n_prompt:])

    def close(self) -> None:
        """Store the phrases that were found, if the options ask for that."""
        if self._finds_phrases:
            self._phrases.save()

    def _cascade(
        self,
        draft: LoadedDraft,
        request: DraftRequest,
        *,
        adds_ngrams: bool,
    ) -> Cascade:
        """Return the drafters of an answer: its draft's, and n-grams that are asked before it.

        Args:
            draft: The draft.
            request: The answer to draft for.
            adds_ngrams: Whether n-grams draft in addition to a drafter that decodes.
        """
        try:
            drafter = draft.drafter(request)
        except Exception as error:  # noqa: BLE001 - a bug in a drafter costs no answer
            drafter = _FailedDrafter(draft.origin, error)
        if draft.is_free:
            return Cascade(free=drafter, text_state=request.text)
        if not adds_ngrams:
            return Cascade(model=drafter, text_state=request.text)
        can_branch = self.session.n_branches_max > 1  # n-grams can, even if the draft cannot
        ngrams = self.session.ngrams.drafter(replace(request, can_branch=can_branch))
        return Cascade(ngrams, drafter, request.text)

    def acceptance_counts(
        self, settings: RequestSettings | None = None
    ) -> MutableMapping[str, AcceptanceCounts]:
        """Return how often drafted tokens were accepted in answers with these settings, by origin.

        There are separate counts for each target, draft and way of sampling. The answer adds to
        them in place.

        Args:
            settings: The settings of the answer; None uses the session's.
        """
        settings = settings or self.session.settings
        draft = self.session.draft
        mode = _sampling_mode(settings)
        if draft is not None and draft.n_at_once > 1:
            mode += ", parallel"
        target = self.session.options.target
        if draft is None:
            return self._acceptance_counts_of(target, "none", mode)
        counts = self._acceptance_counts_of(target, draft.key, mode)
        if not counts and draft.learnt is not None and draft.cost_key is not None:
            # A draft with newly learnt weights starts from the counts of the original weights.
            original = self._acceptance_counts_of(target, draft.cost_key, mode)
            counts.update(copy.deepcopy(dict(original)))
        return counts

    def _acceptance_counts_of(
        self,
        target: Path,
        draft: Key,
        mode: str,
    ) -> MutableMapping[str, AcceptanceCounts]:
        counts = self.session.measurements.acceptance_counts(target, draft, mode)
        return copy.deepcopy(counts) if self.learn_alone else counts

    def _ngram_counts(self, settings: RequestSettings) -> NgramCounts:
        """Return what was counted of n-grams in answers with these settings."""
        session = self.session
        mode = _sampling_mode(settings)
        counts = session.measurements.ngram_counts(session.options.target, mode)
        return copy.deepcopy(counts) if self.learn_alone else counts

    def _policy(self, n_past: int, settings: RequestSettings) -> Policy:
        """Return the policy that decides how much to draft.

        Args:
            n_past: The length of the prompt in tokens, on which the costs of decodes depend.
            settings: The settings of the answer.
        """
        drafting = settings.drafting
        if drafting.tree.is_fixed and self.session.why_chains:
            # Drafts cannot branch here: draft chains with as many tokens as the tree has levels.
            chains = replace(
                drafting,
                tree=TreeShape("off"),
                max_tokens=drafting.tree.n_levels,
                p_min=0.0,
            )
            return FixedPolicy(chains)
        if drafting.policy == "fixed" or drafting.tree.is_fixed:
            return FixedPolicy(drafting)
        if drafting.policy == "threshold":
            return ThresholdPolicy(drafting)
        table = self.session.costs.table(n_past=n_past)
        return CostAwarePolicy(drafting, table, self.acceptance_counts(settings))

    def _draft_request(
        self,
        draft: LoadedDraft,
        prompt: Prompt,
        text_state: TextState,
        settings: RequestSettings,
        *,
        seed: np.random.SeedSequence,
        caches: Sequence[Backend],
        slot: Slot,
    ) -> DraftRequest:
        """Return the request to a draft for an answer.

        Args:
            draft: The draft.
            prompt: The text before the answer.
            text_state: The text of the answer.
            settings: The settings of the answer.
            seed: The seed of the drafts' random numbers.
            caches: The draft's contexts.
            slot: The place of the text in them.
        """
        drafting = settings.drafting
        n_past = len(prompt.tokens)

        def costs_of(key: Key) -> CostTable:
            return self.session.costs.table(key, n_past)

        def acceptance_of_guesses(
            model: Key, second_draft: Key
        ) -> MutableMapping[str, AcceptanceCounts]:
            return self._acceptance_counts_of(Path(model), second_draft, "guesses")

        wants_sampled_drafts = VERIFIERS[settings.verifier].wants_sampled_drafts
        is_sampled = draft.can_sample and settings.sampler.is_random and wants_sampled_drafts
        can_branch = drafting.grows_trees and draft.why_chains is None
        if is_sampled and not drafting.tree.is_fixed:
            # Sampled drafts branch only in a fixed shape: for exact verification, the number of
            # siblings must not depend on the samples.
            can_branch = False
        options = draft_sampling(
            settings.sampler.options,
            drafting,
            is_sampled=is_sampled,
            can_branch=can_branch,
        )
        sampler = Sampler(options, settings.sampler.breakers)
        return DraftRequest(
            text=text_state,
            sampling=SamplingPipeline(sampler, text_state),
            rng=np.random.default_rng(seed),
            prompt=prompt.tokens,
            caches=caches,
            slot=slot,
            costs=costs_of(draft.cost_key) if draft.cost_key is not None else CostTable(),
            costs_of=costs_of,
            acceptance_of_guesses=acceptance_of_guesses,
            ngram_counts=self._ngram_counts(settings),
            phrases=self._phrases,
            is_sampled=is_sampled,
            can_branch=can_branch,
            shape=drafting.tree,
            n_max=drafting.n_max,
            n_levels_max=drafting.tree_depth,
            skipped_prefix=prompt.skipped_prefix,
            draft_prompt=prompt.draft_tokens,
            is_endless=settings.generation.ignore_eos,
        )


def _sampling_mode(settings: RequestSettings) -> str:
    """Return the name of a way of sampling, which has statistics of its own."""
    if settings.sampling.greedy:
        return "greedy"
    return f"temp {settings.sampling.temperature:.1f}, {settings.verifier}"


def draft_sampling(
    target: SamplerOptions,
    drafting: DraftOptions,
    *,
    is_sampled: bool,
    can_branch: bool,
) -> SamplerOptions:
    """Return the draft's samplers: the target's, changed so that more drafted tokens are accepted.

    Penalties and biases are kept.

    Args:
        target: The samplers of the answer.
        drafting: How drafts are made.
        is_sampled: Whether drafted tokens are sampled at random.
        can_branch: Whether drafts may be trees.
    """
    if is_sampled:
        temperature = drafting.temperature
        if temperature is None:
            temperature = DRAFT_TEMPERATURE * target.temperature
        top_k = drafting.top_k
        if top_k is None:
            top_k = target.top_k
        return replace(target, temperature=temperature, top_k=top_k)
    if can_branch:
        # Siblings are the likeliest tokens at a position. Samplers such as top-p would drop them.
        per_token = tuple(name for name in target.samplers if name in _PER_TOKEN_SAMPLERS)
        n_guesses = _N_GUESSES
        if drafting.tree.is_fixed:
            n_guesses = max(_N_GUESSES, *drafting.tree.numbers)
        return replace(
            target,
            samplers=(*per_token, "top_k", "temperature"),
            top_k=n_guesses,
            temperature=1.0,
            dynatemp_range=0.0,
        )
    # A chain consists of the likeliest tokens: sampling at temperature 0. That needs the
    # temperature sampler, which is added if the target has none, and no dynamic temperature.
    samplers = tuple(dict.fromkeys((*target.samplers, "temperature")))
    return replace(
        target,
        temperature=0.0,
        dynatemp_range=0.0,
        xtc_probability=0.0,
        samplers=samplers,
    )
