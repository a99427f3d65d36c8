"""Losslessness, shown: what `specgen verify` does.

`greedy` compares texts, `sampled` tests draws against the target's exact distribution,
`statistics` is the mathematics of it, and `bugs` are known mistakes that the checks must find.
"""

from specgen.proof.bugs import BUGS, Bug
from specgen.proof.greedy import Choice, Difference, GreedyResult, check_greedy
from specgen.proof.prompts import OWN_PROMPTS, read_prompts, spread
from specgen.proof.report import Report, to_json_object
from specgen.proof.sampled import SampledPlan, SampledResult, check_sampled
from specgen.proof.statistics import split_level

__all__ = [
    "BUGS",
    "OWN_PROMPTS",
    "Bug",
    "Choice",
    "Difference",
    "GreedyResult",
    "Report",
    "SampledPlan",
    "SampledResult",
    "check_greedy",
    "check_sampled",
    "read_prompts",
    "split_level",
    "spread",
    "to_json_object",
]
