"""Learn acceptance rates from the text, also of proposed tokens that were not verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specgen.calibration.acceptance import Chances, origin_of_rank
from specgen.core.draft import ROOT, Draft
from specgen.policy.base import RoundReport


@dataclass(slots=True)
class _Waiting:
    """A draft that waits for the text to tell about it, whether or not it was verified, and the
    node of it where the text is."""

    draft: Draft
    ranks: list[int]
    node: int = ROOT

    def holds(self, other: Draft) -> bool:
        """Whether another draft is a part of what is left of this one."""
        found = {ROOT: self.node}
        for node, (parent, token) in enumerate(zip(other.parents, other.tokens, strict=True)):
            for child in self.draft.children(found[parent]):
                if self.draft.tokens[child] == token:
                    found[node] = child
                    break
            else:
                return False
        return True

    def step(self, token: int) -> bool:
        """Go to the child that says the text's next token; False if there is none, or if nothing
        is left behind it."""
        for child in self.draft.children(self.node):
            if self.draft.tokens[child] == token:
                self.node = child
                return bool(self.draft.children(child))
        return False


@dataclass(slots=True)
class _Untaken:
    """What would have been verified of a draft that was not, by what is expected of it, and what
    that would have saved so far, in seconds."""

    waiting: _Waiting
    saved_s: float


@dataclass(slots=True)
class DraftOutcomes:
    """Compares what drafters proposed with the text, and counts it in their `chances`, which are
    given by origin.

    A token that was not drawn at random need not be verified for that: whether the text goes on
    with it shows anyhow. One that was drawn is judged where it was verified.
    """

    chances: Callable[[str], Chances]
    #: How sure a model was, or could be at best, before each node of this round's draft was drawn.
    confidences: dict[int, float] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _untaken: dict[str, _Untaken] = field(default_factory=dict)

    def begin_round(self) -> None:
        """A round begins."""
        self.confidences.clear()

    def wait_for(self, draft: Draft) -> None:
        """Remember what a drafter proposed, whether or not it is verified."""
        if not len(draft) or draft.is_drawn:
            return
        waiting = self._waiting.get(draft.origins[0])
        if waiting is not None and waiting.holds(draft):
            return  # the same, cut off
        self._waiting[draft.origins[0]] = _Waiting(draft, draft.ranks())

    def is_following(self, origin: str) -> bool:
        """Whether what a drafter proposed and nobody verified is still compared with the text."""
        return origin in self._untaken

    def follow(self, draft: Draft, cost_s: float) -> None:
        """Find out what it would have saved to verify a draft, which would have cost so much."""
        self._untaken[draft.origins[0]] = _Untaken(_Waiting(draft, []), -cost_s)

    def observe(self, report: RoundReport, token_s: float) -> Iterator[tuple[str, float]]:
        """Count what a round told; a token is worth `token_s` seconds. Yields, of each draft that
        was followed to its end, the origin and the seconds that it would have saved."""
        if report.draft.is_drawn and report.draft.is_chain:
            self._judge_draws(report)
        for key in list(self._waiting):
            waiting = self._waiting[key]
            for token in report.committed:
                self._judge_children(waiting, token)
                if not waiting.step(token):
                    del self._waiting[key]
                    break
        for origin in list(self._untaken):
            untaken = self._untaken[origin]
            for token in report.committed:
                before = untaken.waiting.node
                goes_on = untaken.waiting.step(token)
                untaken.saved_s += token_s if untaken.waiting.node != before else 0.0
                if not goes_on:
                    del self._untaken[origin]
                    yield origin, untaken.saved_s
                    break

    def _judge_draws(self, report: RoundReport) -> None:
        """Count which tokens of a drawn chain were accepted, of those that were judged.

        How sure the model was before the draws, not how likely a drawn token is, says what to
        expect of them."""
        draft, n_accepted = report.draft, len(report.path)
        for node in range(min(n_accepted + 1, len(draft))):
            if draft.distributions[node] is not None and node in self.confidences:
                chances = self.chances(draft.origins[node])
                chances.judge(self.confidences[node], accepted=node < n_accepted)

    def _judge_children(self, waiting: _Waiting, token: int) -> None:
        """Count which of the tokens that were proposed here was the text's."""
        draft = waiting.draft
        for child in draft.children(waiting.node):
            confidence = draft.probabilities[child]
            chances = self.chances(origin_of_rank(draft.origins[child], waiting.ranks[child]))
            chances.judge(
                1.0 if confidence is None else confidence, accepted=draft.tokens[child] == token
            )
