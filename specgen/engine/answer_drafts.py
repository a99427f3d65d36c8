"""The drafter and the policy of each answer of a session."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.backend.base import Backend
from specgen.calibration.acceptance import Chances
from specgen.calibration.memory import Memory
from specgen.core.last_hidden import LastHidden
from specgen.core.text_state import TextState
from specgen.drafters import CombinedDrafter, ConstrainedDrafter, Drafter
from specgen.engine.answer_settings import AnswerSettings
from specgen.engine.draft_model import MakeShaper
from specgen.engine.draft_stack import DraftStack
from specgen.engine.lookups import Lookups
from specgen.engine.model_costs import ChancesOf, ModelCosts
from specgen.engine.prompts import Prompt
from specgen.engine.slots import WHOLE, Part
from specgen.options import DraftOptions, TreeShape
from specgen.policy import CostAwarePolicy, FixedPolicy, Policy, ThresholdPolicy


class AnswerDrafts:
    """Makes drafters and policies for answers, of the draft that a session has at the time.

    `target` is the target's file, as `memory` knows it.
    """

    def __init__(
        self,
        drafts: DraftStack,
        lookups: Lookups,
        costs: ModelCosts,
        memory: Memory,
        target: Path,
    ) -> None:
        self._drafts = drafts
        self._lookups = lookups
        self._costs = costs
        self._memory = memory
        self._target = target

    def drafter(
        self,
        prompt: Prompt,
        backends: Sequence[Backend],
        state: TextState,
        rng: np.random.Generator,
        make_shaper: MakeShaper,
        settings: AnswerSettings,
        ngrams: Callable[[], Drafter],
        *,
        part: Part,
        chances: ChancesOf,
    ) -> tuple[Drafter | None, LastHidden | None]:
        """What drafts behind a prompt, None if nothing does; and where the loop is to leave the target's
        hidden states, None if nothing drafts from them. `backends` are the contexts of the draft
        model, if there is one, and of what drafts for it; `ngrams` makes what drafts alone or beside it."""

        def ngrams_within() -> Drafter:
            """N-grams that propose what the grammar allows."""
            return ConstrainedDrafter(ngrams(), state) if state.has_grammar else ngrams()

        model, heads = self._drafts.model, self._drafts.heads
        hidden: LastHidden | None = None
        if model is not None and backends:
            drafter = self.model_drafter(
                prompt, backends, state, rng, make_shaper, settings, part=part, chances=chances
            )
            merges = model.merges(settings)
        elif heads is not None:
            hidden = LastHidden()
            drafter = heads.drafter(hidden, state, rng, make_shaper, settings)
            merges = heads.merges(settings)
        else:
            return (ngrams_within() if self._drafts.source == "ngram" else None), None
        if settings.drafting.adds_ngrams:
            drafter = CombinedDrafter(ngrams_within(), drafter, merges=merges)
        return drafter, hidden

    def model_drafter(
        self,
        prompt: Prompt,
        backends: Sequence[Backend],
        state: TextState,
        rng: np.random.Generator,
        make_shaper: MakeShaper,
        settings: AnswerSettings,
        *,
        branches: bool = True,
        part: Part = WHOLE,
        chances: ChancesOf | None = None,
    ) -> Drafter:
        """What the draft model drafts, alone, in contexts of it and of what drafts for it."""
        assert self._drafts.model is not None, "there is no draft model"
        known = self._costs.known(len(prompt.tokens), chances or self._memory.chances)
        return self._drafts.model.drafter(
            prompt,
            backends,
            state,
            rng,
            make_shaper,
            known,
            settings,
            branches=branches,
            part=part,
        )

    def ngrams(self, drafting: DraftOptions, *, branches: bool) -> Drafter:
        """N-grams of the text, and of the texts that are looked up."""
        return self._lookups.ngrams(drafting, branches=branches)

    def policy(self, n_past: int, settings: AnswerSettings, chances: ChancesOf) -> Policy:
        """What decides how much is drafted for an answer behind `n_past` tokens."""
        drafting = settings.drafting
        if drafting.tree.is_fixed and self._drafts.why_chains:
            shape = drafting.tree
            drafting = replace(
                drafting, tree=TreeShape("off"), max_tokens=shape.n_levels, p_min=0.0
            )
            return FixedPolicy(drafting)
        if drafting.policy == "fixed" or drafting.tree.is_fixed:
            return FixedPolicy(drafting)
        if drafting.policy == "threshold":
            return ThresholdPolicy(drafting)
        known = self.chances(settings, chances)
        return CostAwarePolicy(drafting, self._costs.table(n_past=n_past), known)

    def chances(
        self, settings: AnswerSettings, chances: ChancesOf | None = None
    ) -> MutableMapping[str, Chances]:
        """What is known of the present draft's chances with an answer's samplers, by origin; in the
        memory, unless `chances` are others."""
        mode = "greedy"
        if not settings.sampling.greedy:
            mode = f"temp {settings.sampling.temperature:.1f}, {settings.verifier}"
        of_draft = chances or self._memory.chances
        found = of_draft(self._target, self._drafts.key, mode)
        if self._drafts.learnt is not None and self._drafts.path is not None and not found:
            # It begins with what is known of the draft as it came.
            found.update(copy.deepcopy(dict(of_draft(self._target, self._drafts.path, mode))))
        return found

    def chances_of_one_answer(
        self, target: Path, draft: Path | str, mode: str
    ) -> MutableMapping[str, Chances]:
        """A copy of what is known; what is learnt in it is forgotten."""
        return copy.deepcopy(self._memory.chances(target, draft, mode))


__all__ = ["AnswerDrafts"]
