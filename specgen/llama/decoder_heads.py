"""Decoder heads: a small recurrent network that reads a target's final hidden state and predicts
the tokens after the next one.

A round of the target gives its next token x and the hidden state h from which x was chosen. From
these two the heads predict the target's next hidden state h'. Like the target, they compute from h'
the logits of the token that follows. From h' and that token they predict the next state, and so on:

    h' = M h + N e + c + C silu(Q h + P e + b)       e: the embedding of the token x
    logits = V h'                                    V: rows of the target's output matrix

In Medusa (Cai et al., arXiv:2401.10774) and blockwise parallel decoding (Stern et al.,
arXiv:1811.03115) each head reads h alone, in Hydra (Ankner et al., arXiv:2402.05109) also the
tokens before its own. ReDrafter (Cheng et al., arXiv:2403.09919) uses one cell for all heads. EAGLE
(Li et al., arXiv:2401.15077) predicts the target's next hidden state. V has only the frequent part
of the vocabulary (FR-Spec, Zhao et al., arXiv:2502.14856).

A file of heads is a GGUF with the architecture `ARCHITECTURE`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import ModelFileError
from specgen.llama import operators
from specgen.llama.gguf_file import architecture_of
from specgen.llama.kernels.attached import LLAMA_CPP, computing
from specgen.llama.operators import FloatArray, Matrix, Weights
from specgen.system.arrays import Hidden, Logits

ARCHITECTURE = "specgen-heads"
#: The types of the cell's matrices and of those with a row for each token, which are by far the
#: largest.
CELL_TYPE, VOCABULARY_TYPE = "q8_0", "q4_0"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of heads, and the target that they were made for. n_embd is the size of a hidden
    state, n_inner that of the argument of silu. Matrices that are multiplied with the same vector
    are stored as one.
    """

    #: The target's name, the sizes of its hidden states and of its vocabulary, and the digest of
    #: its vocabulary.
    target: str
    n_embd: int
    n_vocab: int
    vocabulary: str
    #: The target's hidden states are multiplied with this first.
    scale: float
    #: int32[n_frequent], increasing: the frequent tokens, which the heads can predict.
    tokens: NDArray[np.int32]
    #: M and Q, N and P: (n_embd + n_inner, n_embd). c and b: float32[n_embd + n_inner].
    of_state: Weights
    of_token: Weights
    bias: FloatArray
    #: C: (n_embd, n_inner).
    of_inner: Weights
    #: The embeddings of the frequent tokens, then one for all others: (n_frequent + 1, n_embd).
    embeddings: Weights
    #: V: (n_frequent, n_embd).
    output: Weights


class DecoderHeads:
    """Loaded heads. A state is a predicted hidden state, float32[n_embd]. Raises `ModelFileError`."""

    def __init__(self, path: Path, clock: Callable[[], float], n_threads: int) -> None:
        self.weights = weights = read_heads(path)
        self._clock = clock
        self._n_threads = n_threads
        self.compute_s = 0.0
        n_frequent = len(weights.tokens)
        self._index = np.full(weights.n_vocab, n_frequent, np.int64)
        self._index[weights.tokens] = np.arange(n_frequent)
        self._embeddings = weights.embeddings.data.reshape(n_frequent + 1, -1)
        has_kernels = computing() != LLAMA_CPP
        buffer_type = operators.SPECGEN_BUFFER if has_kernels else operators.CPU_BUFFER
        with contextlib.ExitStack() as on_error:
            matrices = [
                on_error.enter_context(Matrix(each, buffer_type))
                for each in (weights.of_state, weights.of_token, weights.of_inner, weights.output)
            ]
            self._of_state, self._of_token, self._of_inner, self._output = matrices
            self._resources = on_error.pop_all()

    def close(self) -> None:
        self._resources.close()

    def begin(self, hidden: Hidden, token: int) -> Hidden:
        """Return the state after `token`, which the target chose from a hidden state, as float32[1,
        n_embd].
        """
        return self.advance(hidden[None] * np.float32(self.weights.scale), [token])

    def advance(self, states: Hidden, tokens: Sequence[int]) -> Hidden:
        started = self._clock()
        embeddings = self._embeddings[self._index[list(tokens)]]
        shape = (len(tokens), self.weights.n_embd)
        embedded = operators.dequantize(Weights(VOCABULARY_TYPE, shape, embeddings.reshape(-1)))
        parts = self._times(self._of_state, states) + self._times(self._of_token, embedded)
        parts += self.weights.bias
        inner = parts[:, shape[1] :]
        inner /= 1.0 + np.exp(-inner)  # silu
        states = parts[:, : shape[1]] + self._times(self._of_inner, inner)
        self.compute_s += self._clock() - started
        return states

    def logits(self, states: Hidden) -> Logits:
        started = self._clock()
        rows = self._times(self._output, states)
        self.compute_s += self._clock() - started
        return rows

    def _times(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        return operators.multiply(matrix, rows, n_threads=self._n_threads)


# --- files ------------------------------------------------------------------------------------

_NUMBERS = ("n_embd", "n_vocab")
_TEXTS = ("target", "vocabulary")
_MATRICES = {
    "of_state": CELL_TYPE,
    "of_token": CELL_TYPE,
    "of_inner": CELL_TYPE,
    "embeddings": VOCABULARY_TYPE,
    "output": VOCABULARY_TYPE,
}


def write_heads(path: Path, weights: HeadWeights) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        for name in _NUMBERS:
            writer.add_uint32(f"{ARCHITECTURE}.{name}", getattr(weights, name))
        for name in _TEXTS:
            writer.add_string(f"{ARCHITECTURE}.{name}", getattr(weights, name))
        writer.add_float32(f"{ARCHITECTURE}.scale", weights.scale)
        writer.add_tensor("tokens", weights.tokens)
        writer.add_tensor("bias", weights.bias)
        for name, type_name in _MATRICES.items():
            matrix: Weights = getattr(weights, name)
            data = matrix.data.reshape(matrix.shape[0], -1)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def is_heads_file(path: Path) -> bool:
    return architecture_of(path) == ARCHITECTURE


def read_heads(path: Path) -> HeadWeights:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields: dict[str, Any] = {
            name: reader.fields[f"{ARCHITECTURE}.{name}"].contents()
            for name in (*_NUMBERS, *_TEXTS, "scale")
        }
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        for name in ("tokens", "bias"):
            fields[name] = np.array(tensors[name].data)
        for name, type_name in _MATRICES.items():
            n_columns, n_rows = (int(size) for size in tensors[name].shape)
            data = np.array(tensors[name].data).reshape(-1).view(np.uint8)
            fields[name] = Weights(type_name, (n_rows, n_columns), data)
        weights = HeadWeights(**fields)
        _check(weights)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:  # not UTF-8, too
        raise ModelFileError(
            f"{path}: damaged decoder heads", hint="make them again with `specgen draft make`"
        ) from error
    return weights


def _check(weights: HeadWeights) -> None:
    n_embd, n_frequent = weights.n_embd, len(weights.tokens)
    n_inner = weights.of_inner.shape[1]
    tokens, bias = weights.tokens, weights.bias
    is_whole = (
        weights.of_state.shape == weights.of_token.shape == (n_embd + n_inner, n_embd)
        and weights.of_inner.shape[0] == n_embd
        and weights.embeddings.shape == (n_frequent + 1, n_embd)
        and weights.output.shape == (n_frequent, n_embd)
        and bias.shape == (n_embd + n_inner,)
        and np.isfinite([*bias, weights.scale]).all()
        and (tokens.ndim == 1 and (np.diff(tokens) > 0).all())
        and 0 <= tokens[0] <= tokens[-1] < weights.n_vocab
    )
    if not is_whole:
        raise ValueError("parts that do not fit together")


def matrix(values: FloatArray, name: str) -> Weights:
    """Quantise float32[n_rows, n_columns], n_columns a multiple of 32, to the matrix of this name
    in `HeadWeights`.
    """
    return operators.quantize(values, _MATRICES[name])
