"""EAGLE-3: a trained layer drafts from the inputs of three of the target's layers.

For further tokens it reads its own hidden states. It drafts a chain or a tree (Li et al.,
arXiv:2503.01840).
"""

from __future__ import annotations

from specgen.drafters.hidden_state_drafts import LayerDrafter, TrainedDraft
from specgen.llama.hidden_state_contexts import EagleContext
from specgen.llama.paired_drafts import EagleModel


class EagleDrafter(LayerDrafter):
    """Drafts like an MTP layer, but the text's first token has no row: no state precedes it."""

    name = "eagle3"
    n_skipped = 1


class Eagle3Draft(TrainedDraft):
    """A loaded EAGLE-3 draft."""

    model_type = EagleModel
    context_type = EagleContext
    drafter_type = EagleDrafter
    can_branch = True


KIND = Eagle3Draft.kind()
