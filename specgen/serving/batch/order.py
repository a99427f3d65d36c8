"""The order in which prompts are answered: prompts with a common beginning are neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specgen.engine.prefix_cache import n_common

#: Prompts are neighbours if they share this many tokens more than all prompts do: decoding these tokens only
#: once is worth more than the order of the lines.
_N_SHARED = 16


def order_by_prefix(prompts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the numbers of the prompts, int32[n_tokens] each, in the order to answer them in.

    Prompts with a long common beginning stand together, where the first of them stood; otherwise the given
    order stays.
    """
    tokens = [prompt.tolist() for prompt in prompts]
    by_tokens = sorted(range(len(prompts)), key=tokens.__getitem__)
    if len(by_tokens) < 2:
        return by_tokens
    common = [n_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(by_tokens)]
    # In sorted order, the first and the last share exactly what all share.
    least = min(common) + _N_SHARED
    groups = [[by_tokens[0]]]
    for number, n in zip(by_tokens[1:], common, strict=True):
        if n >= least:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [number for group in sorted(groups, key=min) for number in group]
