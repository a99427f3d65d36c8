"""Drafters: n-grams, models, heads, and combinations of them."""

from specgen.drafters.base import PromptHeadSkipper, WrappedDrafter
from specgen.drafters.combined import Drafters
from specgen.drafters.dflash import DflashDrafter
from specgen.drafters.gemma4_assistant import AssistantDrafter
from specgen.drafters.heads import HeadsDrafter
from specgen.drafters.model import ModelDrafter
from specgen.drafters.mtp import EagleDrafter, MtpDrafter
from specgen.drafters.mtp_chain import MtpChainDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.parallel import ParallelDrafter
from specgen.drafters.staged import Guesses
from specgen.drafters.translated import TranslatedDrafter
from specgen.drafters.tree import TreeModelDrafter
from specgen.method.drafter import Ask, Drafter, Drafting, draft_alone, ready

__all__ = [
    "Ask",
    "AssistantDrafter",
    "DflashDrafter",
    "Drafter",
    "Drafters",
    "Drafting",
    "EagleDrafter",
    "Guesses",
    "HeadsDrafter",
    "ModelDrafter",
    "MtpChainDrafter",
    "MtpDrafter",
    "ParallelDrafter",
    "PromptHeadSkipper",
    "SuffixDrafter",
    "TranslatedDrafter",
    "TreeModelDrafter",
    "WrappedDrafter",
    "draft_alone",
    "ready",
]
