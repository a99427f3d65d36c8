"""Names for the array types that pass between modules."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

#: float32[n_vocab] (a row) or float32[n_rows, n_vocab]: a view into the backend's memory,
#: valid until its next decode.
Logits: TypeAlias = npt.NDArray[np.float32]
#: float32[n_rows, n_embd]: final hidden states, also a view.
Hidden: TypeAlias = npt.NDArray[np.float32]
#: int64[n]: token ids.
TokenArray: TypeAlias = npt.NDArray[np.int64]
#: float64[n]: probabilities.
ProbArray: TypeAlias = npt.NDArray[np.float64]
#: bool[n].
BoolArray: TypeAlias = npt.NDArray[np.bool_]
