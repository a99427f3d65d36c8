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
from specgen.drafters import Drafter, Drafters
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
    """Makes the drafter and the policy of each answer, for the draft that the session has then.

    `target` is the target's file, the key of its entries in `memory`.
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
    ) -> tuple[Drafters | None, LastHidden | None]:
        """Return the drafters of an answer to `prompt` (None: it is not drafted for), and the object
        where the loop stores the target's hidden states (None: nothing drafts from them).

        `backends` are the contexts of the draft model, if there is one, and of its helpers. `ngrams`
        makes the n-gram drafter, which drafts alone or beside the model."""
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
            is_ngram = self._drafts.source == "ngram"
            return (Drafters(ngrams(), state=state) if is_ngram else None), None
        free = ngrams() if settings.drafting.adds_ngrams else None
        return Drafters(free, drafter, merges=merges, state=state), hidden

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
        """Return the draft model's drafter without n-grams beside it. `backends` are the contexts of
        the draft model and of its helpers."""
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
        """Return a drafter from n-grams of the text and of the texts that are looked up."""
        return self._lookups.ngrams(drafting, branches=branches)

    def policy(self, n_past: int, settings: AnswerSettings, chances: ChancesOf) -> Policy:
        """Return the policy that decides how much is drafted for an answer after `n_past` tokens."""
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
        """Return the acceptance statistics of the present draft with an answer's samplers, by origin.
        They are those of the memory unless `chances` is given."""
        mode = "greedy"
        if not settings.sampling.greedy:
            mode = f"temp {settings.sampling.temperature:.1f}, {settings.verifier}"
        of_draft = chances or self._memory.chances
        found = of_draft(self._target, self._drafts.key, mode)
        if self._drafts.learnt is not None and self._drafts.path is not None and not found:
            # The learnt weights start from the statistics of the original weights.
            found.update(copy.deepcopy(dict(of_draft(self._target, self._drafts.path, mode))))
        return found

    def chances_of_one_answer(
        self, target: Path, draft: Path | str, mode: str
    ) -> MutableMapping[str, Chances]:
        """Return a copy of the acceptance statistics; what an answer adds to the copy is not kept."""
        return copy.deepcopy(self._memory.chances(target, draft, mode))


__all__ = ["AnswerDrafts"]
