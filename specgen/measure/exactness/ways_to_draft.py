"""The ways to draft that `specgen verify` checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from specgen.options import DraftOptions, PolicyName

#: A way to draft: the policy of `specgen run`, or "forced", which drafts in every round.
WayName: TypeAlias = Literal[PolicyName, "forced"]


def ways_to_draft(drafting: DraftOptions) -> dict[WayName, DraftOptions]:
    """Return the ways to draft that are checked.

    The first is the way of `specgen run`. If its cost policy may decide not to draft, a second one
    drafts in every round, so that drafts are checked in any case.
    """
    ways: dict[WayName, DraftOptions] = {drafting.policy_in_use: drafting}
    if drafting.is_by_cost:
        # N-gram options that are not set depend on the policy. Keep those of the cost policy.
        shortest, longest = drafting.ngram_lengths
        ways["forced"] = replace(
            drafting,
            policy="fixed",
            p_min=0.0,
            ngrams=drafting.adds_ngrams,
            ngram_min=shortest,
            ngram_max=longest,
        )
    return ways
