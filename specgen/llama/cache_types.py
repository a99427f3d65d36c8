"""The types of the values in a KV cache."""

from __future__ import annotations

from specgen.llama.library import native
from specgen.options import CacheType

#: GGML's numbers for the types.
CACHE_TYPES: dict[CacheType, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
#: The number of values in the largest block of such a type.
_N_IN_BLOCK = 32


def bytes_per_value(cache_type: CacheType) -> float:
    """Return the mean size of a value."""
    return int(native.ggml_row_size(CACHE_TYPES[cache_type], _N_IN_BLOCK)) / _N_IN_BLOCK
