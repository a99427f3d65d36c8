"""Drafters: n-grams, models, heads, and combinations of them."""

from specgen.drafters.base import (
    Ask,
    Drafter,
    Drafting,
    PromptHeadSkipper,
    WrappedDrafter,
    draft_alone,
    ready,
)
from specgen.drafters.combined import Drafters
from specgen.drafters.heads import HeadsDrafter
from specgen.drafters.model import ModelDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.staged import Guesses
from specgen.drafters.translated import TranslatedDrafter
from specgen.drafters.tree import TreeModelDrafter

__all__ = [
    "Ask",
    "Drafter",
    "Drafters",
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
    "ready",
]
