"""Verifiers: which drafted tokens are accepted, and which token follows them.

All are exact: the text is distributed as from the target alone. *Target* is the distribution that
its logits give after a node, with samplers and grammar; *draft* is the one that a drafted token was
drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray
from specgen.text.sampling.distribution import Distribution

if TYPE_CHECKING:
    from specgen.options import VerifierName

_N_HALVINGS = 50  # of the bisection for SpecTr's rho: as many as a float's precision allows

#: The target's distribution after a node of the draft, or after `ROOT`. Each call runs the
#: samplers.
TargetAt: TypeAlias = Callable[[int], Distribution]
#: The accepted node, if any, and what the next token is drawn from otherwise.
Choice: TypeAlias = tuple[int | None, Distribution]
Rng: TypeAlias = np.random.Generator


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted nodes, from a child of the root down, and the target's own token after them."""

    path: tuple[int, ...]
    next_token: int


class Verifier(Protocol):
    """Judges a draft. With `wants_sampled_drafts`, drafters should draw their tokens, not take the
    likeliest.
    """

    @property
    def wants_sampled_drafts(self) -> bool: ...
    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict: ...


class ResidualVerifier:
    """Accept a drawn token x with probability min(1, target(x) / draft(x)); after a rejection go on
    with the residual, normalize(max(0, target - draft)).

    Speculative sampling (Leviathan et al., arXiv:2211.17192, Algorithm 1; Chen et al.,
    arXiv:2302.01318, Algorithm 2), for trees by recursion over siblings (Miao et al.,
    arXiv:2305.09781, Algorithm 2), which may be drawn without replacement (Jeon et al.,
    arXiv:2402.14160, Algorithm 1). Of independent walks each draw is tried.
    """

    wants_sampled_drafts = True

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        """Go down from the root as long as `choose` accepts one of the nodes that come next."""
        walks, path = draft.walks, list[int]()
        while True:
            node, depth = path[-1] if path else ROOT, len(path)
            # The nodes below this one or, in independent walks, the next one of each walk that goes
            # on here.
            tries = draft.children[node]
            if draft.walks:
                tries = [walk[depth] for walk in walks if len(walk) > depth]
            accepted, after = self.choose(draft, tries, target(node), rng)
            if accepted is None:
                return Verdict(tuple(path), after.draw(rng))
            walks = tuple(walk for walk in walks if accepted in walk[depth : depth + 1])
            path.append(accepted)

    def choose(self, draft: Draft, tries: Sequence[int], target: Distribution, rng: Rng) -> Choice:
        """Try the nodes that may come next, after which the target has this distribution."""
        for child in tries:
            token, drafted = draft.tokens[child], sampled_from(draft, child)
            if rng.random() * drafted.probability(token) < target.probability(token):
                return child, target
            # Nothing is left only if the two are equal up to rounding: the target itself is right
            # then.
            target = target.minus(drafted) or target
        return None, target


class MatchVerifier(ResidualVerifier):
    """Draw the target's token; go on while it is one of the drafted children (at temperature 0: the
    argmax). A seed gives the same text with and without a draft. No verifier accepts more of a
    draft that was not drawn.
    """

    wants_sampled_drafts = False

    def choose(self, draft: Draft, tries: Sequence[int], target: Distribution, rng: Rng) -> Choice:
        token = target.draw(rng)
        accepted = next((child for child in tries if draft.tokens[child] == token), None)
        return accepted, Distribution.certain(token)


class SpecTrVerifier(ResidualVerifier):
    """Choose among the next tokens of k independent drafts: k-sequential selection (Sun et al.,
    arXiv:2310.15141, Algorithm 2). With one draft left, k = 1, this is residual sampling.

    A token x is taken with probability min(1, target(x) / (rho draft(x))), with the same rho in [1,
    k] for all. After k rejections a token is drawn from normalize(target - min(draft, target / rho)
    (1 - (1 - beta)^k) / beta), where beta(rho) = sum of min(draft, target / rho) is the probability
    that a single draft is taken. rho is the least one for which no token is taken too often, 1 - (1
    - beta)^k <= rho beta.
    """

    def choose(self, draft: Draft, tries: Sequence[int], target: Distribution, rng: Rng) -> Choice:
        if not draft.walks or not tries:
            return super().choose(draft, tries, target, rng)
        k, source = len(tries), sampled_from(draft, tries[0])
        drafted = source.probabilities(target.token_ids)
        rho = _least_rho(target.probs, drafted, k)
        for child in tries:
            token = draft.tokens[child]
            if rng.random() < target.probability(token) / (rho * source.probability(token)):
                return child, target
        taken = np.minimum(drafted, target.probs / rho)
        beta = float(taken.sum())
        scale = (1.0 - (1.0 - beta) ** k) / beta if beta > 0.0 else 0.0
        # Nothing is left only if everything was taken, up to rounding.
        return None, target.reweighted(target.probs - taken * scale) or target


def _least_rho(target: ProbArray, draft: ProbArray, k: int) -> float:
    """Return the least rho, up to rounding and never below it. Both distributions are float64[m]."""
    # k always suffices, since 1 - (1 - beta)^k <= k beta. The difference has one sign change.
    low, high = 1.0, float(k)
    for _ in range(_N_HALVINGS if k > 1 else 0):
        middle = 0.5 * (low + high)
        beta = float(np.minimum(draft, target / middle).sum())
        if 1.0 - (1.0 - beta) ** k <= middle * beta:
            high = middle
        else:
            low = middle
    return high


class BlockVerifier(ResidualVerifier):
    """Judge a drawn chain as a block, which on average never accepts fewer tokens than judging them
    one by one (Sun et al., arXiv:2403.10444, Algorithm 2).

    With r(0) = 1 and r(i) = min(1, r(i-1) target(x_i) / draft(x_i)), the prefix of length i is
    accepted with probability h(i) = s(i) / (s(i) + 1 - r(i)), where s(i) = sum over x of max(0,
    r(i) target(x) - draft(x)) after that prefix; the whole chain with h = r. The longest accepted
    prefix is kept, and the token after it drawn from normalize(max(0, r target - draft)). A chain's
    end may depend on the tokens before it.

    In a tree, each run of only children is a block; if it is accepted whole, the siblings after it
    are judged by recursive rejection, and a new block follows. The number of siblings must be fixed
    before what follows is drawn.
    """

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        if draft.walks:
            return super().verify(draft, target, rng)
        path = list[int]()
        while True:
            run, node = list[int](), path[-1] if path else ROOT
            while len(children := draft.children[run[-1] if run else node]) == 1:
                run += children
            n_kept, after = _accept_block(draft, run, target, node, rng)
            path += run[:n_kept]
            accepted = None
            if n_kept == len(run):
                accepted, after = self.choose(draft, children, after, rng)
            if accepted is None:
                return Verdict(tuple(path), after.draw(rng))
            path.append(accepted)


def _accept_block(
    draft: Draft, run: Sequence[int], target: TargetAt, before: int, rng: Rng
) -> tuple[int, Distribution]:
    """Return how many nodes of a run after `before` are kept, and what the token after them is
    drawn from.
    """
    after = kept_after = target(before)
    ratio, kept_ratio, n_kept = 1.0, 1.0, 0
    for i, node in enumerate(run, 1):
        token = draft.tokens[node]
        odds = after.probability(token) / sampled_from(draft, node).probability(token)
        ratio = min(1.0, ratio * odds)  # r(i)
        if ratio == 0.0:  # no longer prefix can be accepted either
            break
        after = target(node)
        if i == len(run):
            chance = ratio  # h(i)
        else:
            excess = after.excess(sampled_from(draft, run[i]), ratio)  # s(i)
            # Where it is 0 and the ratio 1, the next prefix is accepted with certainty.
            chance = excess / (excess + 1.0 - ratio) if excess > 0.0 else 0.0  # h(i)
        if rng.random() < chance:
            n_kept, kept_ratio, kept_after = i, ratio, after
    if n_kept < len(run):
        kept_after = kept_after.minus(sampled_from(draft, run[n_kept]), kept_ratio) or kept_after
    return n_kept, kept_after


def sampled_from(draft: Draft, node: int) -> Distribution:
    """Return what a node's token was drawn from: all mass on the token if it was not drawn."""
    return draft.distributions[node] or Distribution.certain(draft.tokens[node])


class AutoVerifier:
    """Picks the verifier that accepts most, by how a draft was made: to pick by its tokens would
    bias the text.
    """

    wants_sampled_drafts = True

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        drawn: VerifierName = "spectr" if draft.walks else "block"
        return VERIFIERS[drawn if draft.is_sampled else "match"].verify(draft, target, rng)


VERIFIERS: Mapping[VerifierName, Verifier] = {
    "auto": AutoVerifier(),
    "match": MatchVerifier(),
    "residual": ResidualVerifier(),
    "block": BlockVerifier(),
    "spectr": SpecTrVerifier(),
}
