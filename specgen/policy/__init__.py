"""How much is worth drafting: a fixed length, a bound on the probability, or measured costs."""

from specgen.policy.base import Policy, RoundReport, TreePolicy
from specgen.policy.cost_aware import CostAwarePolicy
from specgen.policy.fixed import FixedPolicy
from specgen.policy.threshold import ThresholdPolicy
from specgen.policy.wrapped import Decided, WrappedPolicy

__all__ = [
    "CostAwarePolicy",
    "Decided",
    "FixedPolicy",
    "Policy",
    "RoundReport",
    "ThresholdPolicy",
    "TreePolicy",
    "WrappedPolicy",
]
