"""EAGLE-3 drafts (Li et al., arXiv:2503.01840): a layer that reads three of the target's layers."""

from __future__ import annotations

from specgen.drafters.states import LayerDrafter, TrainedDraft
from specgen.llama.hidden_state_contexts import EagleContext
from specgen.llama.paired_drafts import EagleModel


class EagleDrafter(LayerDrafter):
    """Drafts as an MTP layer does. But the text's first token has no row: there is no state before
    it.
    """

    name = "eagle3"
    n_left_out = 1


class Eagle3Draft(TrainedDraft):
    """A loaded EAGLE-3 draft, whose drafts may branch."""

    model_type = EagleModel
    context_type = EagleContext
    drafter_type = EagleDrafter
    draws_trees = True


KIND = Eagle3Draft.kind()
