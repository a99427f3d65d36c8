"""What proposes drafts."""

from specgen.drafters.base import Drafter
from specgen.drafters.model import ModelDrafter
from specgen.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter"]
