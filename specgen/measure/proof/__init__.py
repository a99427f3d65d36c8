"""The checks of `specgen verify`: whether drafting changes the answers.

`greedy` compares texts, of answers alone and of several at once, and `differences` explains how they differ.
`sampled` tests draws against the target's exact distribution. Both compare rows of logits (`rows`).
`statistics` has the mathematics. `specgen.testing.bugs` has known bugs, which the checks must find.
"""

from specgen.measure.prompts import TRIAL_PROMPTS as OWN_PROMPTS
from specgen.measure.prompts import evenly_chosen, read_prompts
from specgen.measure.proof.differences import Choice, Difference, GreedyResult
from specgen.measure.proof.drafting_plans import DraftingPlan, WayName, ways_to_draft
from specgen.measure.proof.greedy import N_AT_ONCE, PlainAnswers, check_greedy
from specgen.measure.proof.report import ProofCheck, ProofReport, UncheckedPrompt, to_json_object
from specgen.measure.proof.sampled import SampledPlan, SampledResult, check_sampled, room
from specgen.measure.proof.statistics import split_level
from specgen.testing.bugs import BUGS, Bug

__all__ = [
    "BUGS",
    "N_AT_ONCE",
    "OWN_PROMPTS",
    "Bug",
    "Choice",
    "Difference",
    "DraftingPlan",
    "GreedyResult",
    "PlainAnswers",
    "ProofCheck",
    "ProofReport",
    "SampledPlan",
    "SampledResult",
    "UncheckedPrompt",
    "WayName",
    "check_greedy",
    "check_sampled",
    "evenly_chosen",
    "read_prompts",
    "room",
    "split_level",
    "to_json_object",
    "ways_to_draft",
]
