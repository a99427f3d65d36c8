"""Verifiers: which drafted tokens are accepted, and which token follows them.

All are exact: the text has the same distribution as if the target had generated it alone. In this
module the *target's* distribution after a node is that of its logits after samplers and grammar.
The *draft's* is the one from which a drafted token was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import ProbArray
from specgen.text.sampling.distribution import Distribution

if TYPE_CHECKING:
    from specgen.options import VerifierName

#: The steps of the bisection for SpecTr's rho, enough for the precision of a float.
_N_HALVINGS = 50

#: Returns the target's distribution after a node of the draft, or after `ROOT`. It is costly, since
#: each call runs the samplers.
TargetAt: TypeAlias = Callable[[int], Distribution]
#: The accepted node, or None, and the distribution from which the next token is sampled in that
#: case.
Choice: TypeAlias = tuple[int | None, Distribution]
Rng: TypeAlias = np.random.Generator


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a draft."""

    #: The accepted nodes, from a child of the root down.
    path: tuple[int, ...]
    #: The target's own token after the path.
    next_token: int
    #: Why no token can follow the path, if none can. This does not matter if the answer ends there.
    failure: BackendError | None = None


class Verifier(Protocol):
    """Decides which tokens of a draft are accepted."""

    @property
    def wants_sampled_drafts(self) -> bool:
        """Whether drafters should sample their tokens instead of taking the most likely ones."""

    def verify(
        self,
        draft: Draft,
        target: TargetAt,
        rng: Rng,
    ) -> Verdict:
        """Return the accepted path through a draft, and the token after it.

        Args:
            draft: The draft, which may be empty.
            target: Returns the target's distribution after a node.
            rng: The source of randomness.
        """


class ResidualVerifier:
    """Speculative sampling, with the residual distribution after each rejection.

    A sampled token x is accepted with probability min(1, target(x) / draft(x)). After a rejection
    the target's distribution is replaced by the residual, normalize(max(0, target - draft)), from
    which the next token is sampled, unless a sibling of x is accepted by it.

    Leviathan et al., arXiv:2211.17192, Algorithm 1, and Chen et al., arXiv:2302.01318, Algorithm 2;
    for trees by recursion over siblings (Miao et al., arXiv:2305.09781, Algorithm 2), which may be
    sampled without replacement (Jeon et al., arXiv:2402.14160, Algorithm 1). If several independent
    walks sampled the same token, it is tried once for each of them.

    `MatchVerifier` and `SpecTrVerifier` inherit the walk down the tree, and replace `choose`.
    """

    wants_sampled_drafts = True

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        """Walk down the draft from the root, as long as `choose` accepts one of the next nodes."""
        path: list[int] = []
        node = ROOT
        walks = draft.walks
        while True:
            depth = len(path)
            candidates = draft.children[node]
            if draft.walks:
                # The next node of each walk that goes through `node`; walks may share nodes.
                candidates = [walk[depth] for walk in walks if len(walk) > depth]
            accepted, after = self.choose(draft, candidates, target(node), rng)
            if accepted is None:
                return Verdict(tuple(path), after.sample(rng))
            walks = tuple(walk for walk in walks if len(walk) > depth and walk[depth] == accepted)
            path.append(accepted)
            node = accepted

    def choose(
        self,
        draft: Draft,
        candidates: Sequence[int],
        target: Distribution,
        rng: Rng,
    ) -> Choice:
        """Try the nodes that may come next, one after the other.

        Args:
            draft: The draft.
            candidates: The nodes that may come next.
            target: The target's distribution at their position.
            rng: The source of randomness.

        Returns:
            The accepted node, or None and the residual distribution.
        """
        for node in candidates:
            token = draft.tokens[node]
            source = sampled_from(draft, node)
            if rng.random() * source.probability(token) < target.probability(token):
                return node, target
            # Go on with the residual. It is empty only if target and draft are equal up to
            # rounding, and then the target's distribution itself is correct.
            target = target.minus(source) or target
        return None, target


class MatchVerifier(ResidualVerifier):
    """Samples the target's token first, and accepts the drafted child that equals it, if any.

    At temperature 0 the token is the argmax. With the same seed, the text is the same with and
    without drafts. For drafts that were not sampled, no verifier accepts more tokens.
    """

    wants_sampled_drafts = False

    def choose(
        self,
        draft: Draft,
        candidates: Sequence[int],
        target: Distribution,
        rng: Rng,
    ) -> Choice:
        """Return the candidate with the sampled token, or None and that token."""
        token = target.sample(rng)
        accepted = next((node for node in candidates if draft.tokens[node] == token), None)
        return accepted, Distribution.certain(token)


class SpecTrVerifier(ResidualVerifier):
    """Chooses among the next tokens of k independent drafts: k-sequential selection.

    Sun et al., arXiv:2310.15141, Algorithm 2. With one draft left, k = 1, this is residual
    sampling.

    Each draft's token x is accepted with probability min(1, target(x) / (rho draft(x))), with the
    same rho in [1, k] for all. Then

        beta(rho) = sum over x of min(draft(x), target(x) / rho)

    is the probability that a single draft is accepted. After k rejections a token is sampled from

        normalize(target - min(draft, target / rho) (1 - (1 - beta)^k) / beta)

    rho is the smallest number for which no token is accepted too often:
    1 - (1 - beta)^k <= rho beta.
    """

    def choose(
        self,
        draft: Draft,
        candidates: Sequence[int],
        target: Distribution,
        rng: Rng,
    ) -> Choice:
        """Try the next token of each independent draft with the same threshold."""
        if not draft.walks or not candidates:
            return super().choose(draft, candidates, target, rng)
        k = len(candidates)
        source = sampled_from(draft, candidates[0])  # the same for all candidates
        target_probs = target.probs
        draft_probs = source.probabilities(target.token_ids)
        rho = _min_rho(target_probs, draft_probs, k)
        for node in candidates:
            token = draft.tokens[node]
            if rng.random() < target.probability(token) / (rho * source.probability(token)):
                return node, target
        # All were rejected: subtract from the target what would be accepted on average.
        accepted_probs = np.minimum(draft_probs, target_probs / rho)
        beta = float(accepted_probs.sum())
        scale = (1.0 - (1.0 - beta) ** k) / beta if beta > 0.0 else 0.0
        # Nothing is left only if, up to rounding, every token would be accepted.
        return None, target.reweighted(target_probs - accepted_probs * scale) or target


def _min_rho(
    target_probs: ProbArray,
    draft_probs: ProbArray,
    k: int,
) -> float:
    """Find SpecTr's smallest rho by bisection; the result is never smaller than it.

    Args:
        target_probs: The target's probabilities, float64[m].
        draft_probs: The draft's probabilities of the same tokens, float64[m].
        k: The number of independent drafts. The result is at most k, since
            1 - (1 - beta)^k <= k beta.
    """
    low = 1.0
    high = float(k)
    if k == 1:
        return high
    for _ in range(_N_HALVINGS):  # the two sides of the inequality cross only once
        middle = 0.5 * (low + high)
        beta = float(np.minimum(draft_probs, target_probs / middle).sum())
        if 1.0 - (1.0 - beta) ** k <= middle * beta:
            high = middle
        else:
            low = middle
    return high


class BlockVerifier(ResidualVerifier):
    """Verifies a sampled chain as a whole block.

    On average this never accepts fewer tokens than judging them one by one (Sun et al.,
    arXiv:2403.10444, Algorithm 2).

    With r(0) = 1 and r(i) = min(1, r(i-1) target(x_i) / draft(x_i)), the prefix of length i is
    accepted with probability h(i) = s(i) / (s(i) + 1 - r(i)), where s(i) = sum over x of max(0,
    r(i) target(x) - draft(x)) after that prefix; the whole chain with h = r. The longest accepted
    prefix is kept, and the token after it sampled from normalize(max(0, r target - draft)). A
    chain's end may depend on the tokens before it.

    In a tree, each run of only children is a block. If all of it is accepted, the siblings after it
    are judged by recursive rejection, and a new block follows. The number of siblings must be fixed
    before what follows is sampled.
    """

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        """Verify a block, then the siblings after it, then the next block, until a rejection."""
        if draft.walks:
            return super().verify(draft, target, rng)
        path: list[int] = []
        node = ROOT
        while True:
            block = _only_children(draft, node)
            n_accepted, after = _accept_block(draft, block, target, node, rng)
            path += block[:n_accepted]
            if n_accepted < len(block):
                return Verdict(tuple(path), after.sample(rng))
            last = block[-1] if block else node
            siblings = draft.children[last]
            accepted, after = self.choose(draft, siblings, after, rng)
            if accepted is None:
                return Verdict(tuple(path), after.sample(rng))
            path.append(accepted)
            node = accepted


def _only_children(draft: Draft, node: int) -> list[int]:
    """Return the chain of only children below `node`; it may be empty."""
    block: list[int] = []
    children = draft.children[node]
    while len(children) == 1:
        block += children
        children = draft.children[block[-1]]
    return block


def _accept_block(
    draft: Draft,
    block: Sequence[int],
    target: TargetAt,
    before: int,
    rng: Rng,
) -> tuple[int, Distribution]:
    """Verify a block as described in `BlockVerifier`, in the notation of the paper.

    Args:
        draft: The draft.
        block: The nodes x_1, x_2, ... of the block.
        target: Returns the target's distribution after a node.
        before: The node before the block.
        rng: The source of randomness.

    Returns:
        The number of accepted nodes, and the distribution of the token after them.
    """
    after = target(before)
    ratio = 1.0  # r(i)
    # The longest prefix accepted so far, its r(i), and the target's distribution after it.
    n_accepted = 0
    accepted_ratio = ratio
    after_accepted = after
    for i, node in enumerate(block, 1):
        token = draft.tokens[node]
        odds = after.probability(token) / sampled_from(draft, node).probability(token)
        ratio = min(1.0, ratio * odds)
        if ratio == 0.0:  # no longer prefix can be accepted either
            break
        after = target(node)
        if i == len(block):
            acceptance = ratio  # h(i) of the whole chain
        else:
            excess = after.excess(sampled_from(draft, block[i]), ratio)  # s(i)
            # If it is 0 and the ratio is 1 (0 / 0), the next prefix is certain to be accepted.
            # (The parentheses matter: 1e-17 + 1.0 - 1.0 would be 0.)
            acceptance = excess / (excess + (1.0 - ratio)) if excess > 0.0 else 0.0
        if rng.random() < acceptance:
            n_accepted = i
            accepted_ratio = ratio
            after_accepted = after
    if n_accepted < len(block):
        rejected = sampled_from(draft, block[n_accepted])
        after_accepted = after_accepted.minus(rejected, accepted_ratio) or after_accepted
    return n_accepted, after_accepted


def sampled_from(draft: Draft, node: int) -> Distribution:
    """Return the distribution from which a node's token was sampled.

    A token that was not sampled at random has probability 1.
    """
    return draft.distributions[node] or Distribution.certain(draft.tokens[node])


class AutoVerifier:
    """Picks the verifier that accepts most tokens, depending on how a draft was made.

    To pick it depending on the draft's tokens would bias the text.
    """

    wants_sampled_drafts = True

    def verify(self, draft: Draft, target: TargetAt, rng: Rng) -> Verdict:
        """Verify by `spectr`, `block` or `match`."""
        name: VerifierName = "match"
        if draft.is_sampled:
            name = "spectr" if draft.walks else "block"
        return VERIFIERS[name].verify(draft, target, rng)


VERIFIERS: Mapping[VerifierName, Verifier] = {
    "auto": AutoVerifier(),
    "match": MatchVerifier(),
    "residual": ResidualVerifier(),
    "block": BlockVerifier(),
    "spectr": SpecTrVerifier(),
}
