"""What proposes drafts."""

from specgen.drafters.base import Drafter
from specgen.drafters.cascade import CascadeDrafter
from specgen.drafters.model import ModelDrafter
from specgen.drafters.ngram import NgramDrafter
from specgen.drafters.translated import TranslatedDrafter

__all__ = ["CascadeDrafter", "Drafter", "ModelDrafter", "NgramDrafter", "TranslatedDrafter"]
