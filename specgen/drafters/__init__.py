"""Drafters: n-grams, models, heads, and combinations of them."""

from specgen.drafters.base import Ask, AskingDrafter, Drafter, Drafting, draft_alone, drafting_of
from specgen.drafters.combined import CombinedDrafter
from specgen.drafters.constrained import ConstrainedDrafter
from specgen.drafters.heads import HeadsDrafter
from specgen.drafters.model import ModelDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.prompt_head import PromptHeadSkipper
from specgen.drafters.staged import Guesses
from specgen.drafters.translated import TranslatedDrafter
from specgen.drafters.tree import TreeModelDrafter
from specgen.drafters.wrapped import WrappedDrafter

__all__ = [
    "Ask",
    "AskingDrafter",
    "CombinedDrafter",
    "ConstrainedDrafter",
    "Drafter",
    "Drafting",
    "Guesses",
    "HeadsDrafter",
    "ModelDrafter",
    "PromptHeadSkipper",
    "SuffixDrafter",
    "TranslatedDrafter",
    "TreeModelDrafter",
    "WrappedDrafter",
    "draft_alone",
    "drafting_of",
]
