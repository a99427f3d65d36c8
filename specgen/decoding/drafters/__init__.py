"""Drafters: n-grams, models, heads, and combinations of them."""

from specgen.decoding.drafters.base import (
    Ask,
    Drafter,
    Drafting,
    PromptHeadSkipper,
    WrappedDrafter,
    draft_alone,
    ready,
)
from specgen.decoding.drafters.combined import Drafters
from specgen.decoding.drafters.dflash import DflashDrafter
from specgen.decoding.drafters.gemma4_assistant import AssistantDrafter
from specgen.decoding.drafters.heads import HeadsDrafter
from specgen.decoding.drafters.model import ModelDrafter
from specgen.decoding.drafters.mtp import EagleDrafter, MtpDrafter
from specgen.decoding.drafters.mtp_chain import MtpChainDrafter
from specgen.decoding.drafters.ngram import SuffixDrafter
from specgen.decoding.drafters.parallel import ParallelDrafter
from specgen.decoding.drafters.staged import Guesses
from specgen.decoding.drafters.translated import TranslatedDrafter
from specgen.decoding.drafters.tree import TreeModelDrafter

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
