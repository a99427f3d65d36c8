"""Dequantised rows of a GGUF model's matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import ModelFileError
from specgen.llama.operators import TYPE_NUMBERS, FloatArray, Weights, dequantize
from specgen.models.files import model_parts

_NAMES = {number: name for name, number in TYPE_NUMBERS.items()}
#: The number of rows that are dequantised at once.
_N_ROWS = 4096


class ModelRows:
    """The token embeddings and the output matrix of a model; the two may be the same tensor.

    Raises `ModelFileError` if there are no embeddings, or if a tensor's type is unknown."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        tensors: dict[str, Any] = {}
        for part in model_parts(path):
            tensors |= {tensor.name: tensor for tensor in GGUFReader(part).tensors}
        embeddings = tensors.get("token_embd.weight")
        if embeddings is None:
            raise ModelFileError(f"{path}: it has no token embeddings")
        self._embeddings = embeddings
        self._output = tensors.get("output.weight", embeddings)
        for tensor in (self._embeddings, self._output):
            if int(tensor.tensor_type) not in _NAMES:
                raise ModelFileError(
                    f"{path}: {tensor.name} has the type {tensor.tensor_type.name}"
                )

    def embeddings(self, tokens: Sequence[int] | NDArray[Any]) -> FloatArray:
        """Return the embeddings of tokens: float32[n, n_embd]."""
        return _rows(self._embeddings, np.asarray(tokens))

    def output(self, tokens: Sequence[int] | NDArray[Any]) -> FloatArray:
        """Return the rows of the output matrix for tokens: float32[n, n_embd]."""
        return _rows(self._output, np.asarray(tokens))


def _rows(tensor: Any, indices: NDArray[Any]) -> FloatArray:
    n_columns, n_rows = int(tensor.shape[0]), int(tensor.shape[1])
    data = np.asarray(tensor.data).reshape(n_rows, -1).view(np.uint8)
    name = _NAMES[int(tensor.tensor_type)]
    values = np.empty((len(indices), n_columns), np.float32)
    for start in range(0, len(indices), _N_ROWS):
        piece = indices[start : start + _N_ROWS]
        weights = Weights(name, (len(piece), n_columns), data[piece].reshape(-1))
        values[start : start + len(piece)] = dequantize(weights)
    return values
