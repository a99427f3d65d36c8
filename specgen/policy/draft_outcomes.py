"""Learn acceptance rates by comparing drafts with the text, including drafts that were not verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specgen.calibration.acceptance import Chances, origin_of_rank
from specgen.core.draft import ROOT, Draft
from specgen.policy.base import RoundReport


@dataclass(slots=True)
class _Waiting:
    """A draft that is compared with the text as it grows, verified or not, and the node of it that
    the text has reached."""

    draft: Draft
    ranks: list[int]
    node: int = ROOT

    def holds(self, other: Draft) -> bool:
        """Whether another draft is a part of this one, from the reached node on."""
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
        """Go to the child with the text's next token; False if there is none, or if it has no
        children."""
        for child in self.draft.children(self.node):
            if self.draft.tokens[child] == token:
                self.node = child
                return bool(self.draft.children(child))
        return False


@dataclass(slots=True)
class _Untaken:
    """The part of an unverified draft that was expected to pay, and the seconds that verifying it
    would have saved so far."""

    waiting: _Waiting
    saved_s: float


@dataclass(slots=True)
class DraftOutcomes:
    """Compares drafts with the text, and counts the results in the drafters' `chances`, by origin.

    A token that was not drawn at random need not be verified for this: the text shows whether it
    continues with the token. A drawn token is counted only where it was verified.
    """

    chances: Callable[[str], Chances]
    #: The model's largest probability before each node of this round's draft, by node.
    confidences: dict[int, float] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _untaken: dict[str, _Untaken] = field(default_factory=dict)

    def begin_round(self) -> None:
        """Begin a round: forget the confidences of the last one."""
        self.confidences.clear()

    def wait_for(self, draft: Draft) -> None:
        """Remember a draft without drawn tokens, whether or not it will be verified."""
        if not len(draft) or draft.is_drawn:
            return
        waiting = self._waiting.get(draft.origins[0])
        if waiting is not None and waiting.holds(draft):
            return  # the same draft, shortened
        self._waiting[draft.origins[0]] = _Waiting(draft, draft.ranks())

    def is_following(self, origin: str) -> bool:
        """Whether an unverified draft of this drafter is being followed."""
        return origin in self._untaken

    def follow(self, draft: Draft, cost_s: float) -> None:
        """Find out what an unverified draft would have saved; verifying it would have cost `cost_s`."""
        self._untaken[draft.origins[0]] = _Untaken(_Waiting(draft, []), -cost_s)

    def observe(self, report: RoundReport, token_s: float) -> Iterator[tuple[str, float]]:
        """Count the results of a round; a token is worth `token_s` seconds. For each followed draft
        that has come to its end, yields the origin and the seconds that it would have saved."""
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
        """Count which of the judged tokens of a drawn chain were accepted.

        They are counted by the model's confidence before the draw, which shows what to expect of
        them, and not by the probability of the drawn token."""
        draft, n_accepted = report.draft, len(report.path)
        for node in range(min(n_accepted + 1, len(draft))):
            if draft.distributions[node] is not None and node in self.confidences:
                chances = self.chances(draft.origins[node])
                chances.judge(self.confidences[node], accepted=node < n_accepted)

    def _judge_children(self, waiting: _Waiting, token: int) -> None:
        """Count, for each token that was proposed here, whether it is the text's token."""
        draft = waiting.draft
        for child in draft.children(waiting.node):
            confidence = draft.probabilities[child]
            chances = self.chances(origin_of_rank(draft.origins[child], waiting.ranks[child]))
            chances.judge(
                1.0 if confidence is None else confidence, accepted=draft.tokens[child] == token
            )
