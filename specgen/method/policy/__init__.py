"""How much is worth drafting: a fixed length, a bound on the probability, or measured costs."""

from specgen.method.policy.cost_aware import CostAwarePolicy
from specgen.method.policy.fixed import FixedPolicy, ThresholdPolicy
from specgen.method.policy.plan import (
    Offer,
    Policy,
    RoundPlan,
    RoundResult,
    Stop,
    draft_up_to,
)
from specgen.method.policy.reasons import REASONS, Reason, ReasonName
from specgen.method.policy.stopping import WhilePaying

__all__ = [
    "REASONS",
    "CostAwarePolicy",
    "FixedPolicy",
    "Offer",
    "Policy",
    "Reason",
    "ReasonName",
    "RoundPlan",
    "RoundResult",
    "Stop",
    "ThresholdPolicy",
    "WhilePaying",
    "draft_up_to",
]
