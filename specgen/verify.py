"""Which drafted tokens are kept, and what replaces the first one that is not.

Every verifier here is exact: what it keeps is distributed as the target alone would have
written it. The legend for all of them: *target* is the distribution that the target's logits
give at a node after the samplers, *draft* the one that a drafted token was drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specgen.arrays import Logits
from specgen.draft import ROOT, Draft
from specgen.options import SamplerOptions
from specgen.sampling import Distribution, argmax, distribution


@dataclass(frozen=True, slots=True)
class Verdict:
    """`path`: the accepted nodes from the root down. `next_token`: the target's own token
    after them, where it refused the draft or the draft ended."""

    path: tuple[int, ...]
    next_token: int


class Verifier(Protocol):
    """Judges a draft. `logits` is float32[1 + len(draft), n_vocab]: the target's logits
    after the root, then after each node."""

    def verify(self, draft: Draft, logits: Logits, rng: np.random.Generator) -> Verdict: ...


class MatchVerifier:
    """Draw the target's token; go on while it is one of the drafted children.

    This is plain decoding, told in advance: the target draws each token from its own
    distribution with one random number a token, so the same seed gives the same text with and
    without a draft. Any draft may be judged so, however its tokens came about. A drafted
    child set is accepted with the sum of its target probabilities, which is the best there is
    for a draft that was not drawn at random.
    """

    def __init__(self, options: SamplerOptions) -> None:
        self._options = options

    def verify(self, draft: Draft, logits: Logits, rng: np.random.Generator) -> Verdict:
        node = ROOT
        path: list[int] = []
        while True:
            token = self._choose(logits[node + 1], rng)
            for child in draft.children(node):
                if draft.tokens[child] == token:
                    break
            else:
                return Verdict(tuple(path), token)
            node = child
            path.append(child)

    def _choose(self, row: Logits, rng: np.random.Generator) -> int:
        if self._options.greedy:
            return argmax(row)
        return distribution(row, self._options).draw(rng)


class ResidualVerifier:
    """Accept a drawn token x with probability min(1, target(x) / draft(x)); after a refusal
    go on with the residual, normalize(max(0, target - draft)).

    Speculative sampling (Leviathan et al., arXiv:2211.17192, Algorithm 1; Chen et al.,
    arXiv:2302.01318, Algorithm 2), for trees by recursion over siblings (Miao et al.,
    arXiv:2305.09781, Algorithm 2): each refused sibling replaces the target by the residual
    that the next one is tested against. A node without a distribution was certain: its draft
    distribution has all its mass on the token.
    """

    def __init__(self, options: SamplerOptions) -> None:
        self._options = options

    def verify(self, draft: Draft, logits: Logits, rng: np.random.Generator) -> Verdict:
        node = ROOT
        path: list[int] = []
        while True:
            target = distribution(logits[node + 1], self._options)
            for child in draft.children(node):
                token = draft.tokens[child]
                draft_distribution = draft.distributions[child] or Distribution.certain(token)
                target_prob = target.probability(token)
                if rng.random() * draft_distribution.probability(token) < target_prob:
                    break
                # Nothing remains only if the two are equal up to rounding, where a refusal
                # has no chance but for rounding: the target itself is then the right choice.
                target = target.minus(draft_distribution) or target
            else:
                return Verdict(tuple(path), target.draw(rng))
            node = child
            path.append(child)


class AutoVerifier:
    """Residual sampling where a draft was drawn at random, matching everywhere else.

    Which of the two judges a round depends on how the draft was made, never on its tokens,
    so the choice biases nothing.
    """

    def __init__(self, options: SamplerOptions) -> None:
        self._match = MatchVerifier(options)
        self._residual = ResidualVerifier(options)

    def verify(self, draft: Draft, logits: Logits, rng: np.random.Generator) -> Verdict:
        verifier = self._residual if draft.is_drawn else self._match
        return verifier.verify(draft, logits, rng)
