"""Known bugs of speculative decoders, planted to show that tests and `specgen verify` find them.

Each of them occurred in a library, in a widely copied example, or in the first code of a paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from specgen.events import CommittedEvent, Event
from specgen.measure.exactness import greedy_check, near_ties, sampled_check, visible_places
from specgen.method.answer_state import AnswerState
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.verifiers import MatchVerifier, TargetAt, Verdict, Verifier, sampled_from
from specgen.session.drafter_factory import DrafterFactory
from specgen.text.sampling.distribution import Distribution
from tests.helpers import joint_draws
from tests.helpers.fake_generations import WrappedDrafter


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug, and how to plant it."""

    #: Whether only sampled drafts reveal it.
    needs_draws: bool = True
    #: Replaces the verifier.
    verifier: Callable[[Verifier], Verifier] | None = None
    #: Replaces the drafter.
    drafter: Callable[[Drafter], Drafter] | None = None

    def plant(self, sequence: AnswerState) -> None:
        """Plant the bug in an answer."""
        if self.verifier is not None:
            sequence.verifier = self.verifier(sequence.verifier)
        cascade = sequence.cascade
        if self.drafter is not None and cascade is not None and cascade.model is not None:
            cascade.model = self.drafter(cascade.model)


class _Picky(WrappedDrafter):
    """Cuts a draft at the first sampled token that turned out unlikely."""

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        draft = yield from super().propose(context, plan, n_drafted)
        for node, source in enumerate(draft.distributions if draft.is_chain else ()):
            if source is not None and source.probability(draft.tokens[node]) < 0.5:
                return draft.first(node)
        return draft


class _Residual:
    """Speculative sampling with one step replaced."""

    wants_sampled_drafts = True

    def __init__(self, _: Verifier) -> None:
        pass

    def verify(self, draft: Draft, target: TargetAt, rng: np.random.Generator) -> Verdict:
        node = ROOT
        path: list[int] = []
        while draft.children[node]:
            child = draft.children[node][0]
            token = draft.tokens[child]
            source = sampled_from(draft, child)
            wanted = target(node)
            if not self.accepts(wanted, source, token, rng):
                return Verdict(tuple(path), self.residual(wanted, source).sample(rng))
            path.append(child)
            node = child
        return Verdict(tuple(path), target(self.bonus_row(path)).sample(rng))

    def accepts(
        self, target: Distribution, draft: Distribution, token: int, rng: np.random.Generator
    ) -> bool:
        return rng.random() * draft.probability(token) < target.probability(token)

    def residual(self, target: Distribution, draft: Distribution) -> Distribution:
        return target.minus(draft) or target

    def bonus_row(self, path: list[int]) -> int:
        return path[-1] if path else ROOT


class _NoResidual(_Residual):
    """Samples from the target's distribution after a rejection, instead of from the residual."""

    def residual(self, target: Distribution, draft: Distribution) -> Distribution:
        return target


class _StaleBonus(_Residual):
    """Samples the bonus token from the row before the right one."""

    def bonus_row(self, path: list[int]) -> int:
        return path[-2] if len(path) > 1 else ROOT


class _Lenient(_Residual):
    """Accepts tokens that are likely enough, as "typical acceptance" does."""

    def accepts(
        self, target: Distribution, draft: Distribution, token: int, rng: np.random.Generator
    ) -> bool:
        return target.probability(token) >= 0.1 * float(target.probs.max())


class _WrongRow(MatchVerifier):
    """Compares each drafted token with the row after it, instead of the one before it."""

    def __init__(self, _: Verifier) -> None:
        pass

    def verify(self, draft: Draft, target: TargetAt, rng: np.random.Generator) -> Verdict:
        def shifted(node: int) -> Distribution:
            return target(min(node + 1, len(draft) - 1))

        return super().verify(draft, shifted, rng)


#: The bugs by name.
BUGS: Mapping[str, Bug] = MappingProxyType(
    {
        "picky-policy": Bug(drafter=_Picky),
        "no-residual": Bug(verifier=_NoResidual),
        "stale-bonus": Bug(needs_draws=False, verifier=_StaleBonus),
        "wrong-row": Bug(needs_draws=False, verifier=_WrongRow),
        "lenient": Bug(needs_draws=False, verifier=_Lenient),
    }
)


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Plant a bug in all answers with drafts that begin from now on."""
    make = DrafterFactory.new_answer

    def new_answer(factory: DrafterFactory, *arguments: Any, **more: Any) -> AnswerState:
        answer = make(factory, *arguments, **more)
        if answer.cascade is not None:
            BUGS[name].plant(answer)
        return answer

    monkeypatch.setattr(DrafterFactory, "new_answer", new_answer)


def lose_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide bonus tokens from the checks, as if they had been decoded but not reported."""

    def tokens_of(events: Iterable[Event]) -> list[int]:
        committed = [event.pieces for event in events if isinstance(event, CommittedEvent)]
        return [each.token_id for pieces in committed for each in pieces if each.kind != "bonus"]

    for module in (greedy_check, near_ties, sampled_check, visible_places, joint_draws):
        monkeypatch.setattr(module, "tokens_of", tokens_of)
