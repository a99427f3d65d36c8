"""Decoder heads: a small recurrent network that predicts the tokens after the target's next one.

A round of the target yields its next token x and the hidden state h from which x was chosen. From
these two the heads predict the target's next hidden state h'. As the target does, they compute from
h' the logits of the following token. From h' and that token they predict the next state, and so on:

    h' = M h + N e + c + C silu(Q h + P e + b)       e: the embedding of the token x
    logits = V h'                                    V: rows of the target's output matrix

In Medusa (Cai et al., arXiv:2401.10774) and blockwise parallel decoding (Stern et al.,
arXiv:1811.03115) each head reads only h; in Hydra (Ankner et al., arXiv:2402.05109) it also reads
the tokens before its own. ReDrafter (Cheng et al., arXiv:2403.09919) uses one cell for all heads.
EAGLE (Li et al., arXiv:2401.15077) predicts the target's next hidden state. V has only the rows of
frequent tokens (FR-Spec, Zhao et al., arXiv:2502.14856).

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
#: The type of the network's inner matrices.
CELL_TYPE = "q8_0"
#: The type of the matrices with a row for each token, which are by far the largest.
VOCABULARY_TYPE = "q4_0"


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of heads, and properties of the target for which they were made.

    n_embd is the size of a hidden state, n_inner the size of the argument of silu. Matrices that
    are multiplied with the same vector are stored as one.
    """

    #: The target's name.
    target: str
    #: The size of the target's hidden states.
    n_embd: int
    #: The size of the target's vocabulary.
    n_vocab: int
    #: The digest of the target's vocabulary.
    vocabulary: str
    #: The factor with which the target's hidden states are multiplied first.
    scale: float
    #: The frequent tokens, which the heads can predict: int32[n_frequent], ascending.
    tokens: NDArray[np.int32]
    #: M, then Q: (n_embd + n_inner, n_embd).
    of_state: Weights
    #: N, then P: (n_embd + n_inner, n_embd).
    of_token: Weights
    #: c, then b: float32[n_embd + n_inner].
    bias: FloatArray
    #: C: (n_embd, n_inner).
    of_inner: Weights
    #: The embeddings of the frequent tokens, then one for all others: (n_frequent + 1, n_embd).
    embeddings: Weights
    #: V: (n_frequent, n_embd).
    output: Weights


class DecoderHeads:
    """Loaded heads. A state is a predicted hidden state, float32[n_embd]."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        n_threads: int,
    ) -> None:
        """Load heads.

        Args:
            path: The file of the heads.
            clock: Measures `compute_s`.
            n_threads: The number of threads that compute.

        Raises:
            ModelFileError: If the file cannot be read, or is damaged.
        """
        weights = read_heads(path)
        self.weights = weights
        self._clock = clock
        self._n_threads = n_threads
        #: The seconds of all computations so far.
        self.compute_s = 0.0
        n_frequent = len(weights.tokens)
        #: The row of each token in the embeddings, int64[n_vocab]. All tokens that are not frequent
        #: share the last row.
        self._embedding_rows = np.full(weights.n_vocab, n_frequent, np.int64)
        self._embedding_rows[weights.tokens] = np.arange(n_frequent)
        #: The quantised embeddings, uint8[n_frequent + 1, n_bytes]: only the needed rows are
        #: dequantised.
        self._embeddings = weights.embeddings.data.reshape(n_frequent + 1, -1)
        has_kernels = computing() != LLAMA_CPP
        buffer_type = operators.SPECGEN_BUFFER if has_kernels else operators.CPU_BUFFER
        with contextlib.ExitStack() as on_error:

            def load_matrix(part: Weights) -> Matrix:
                return on_error.enter_context(Matrix(part, buffer_type))

            self._of_state = load_matrix(weights.of_state)
            self._of_token = load_matrix(weights.of_token)
            self._of_inner = load_matrix(weights.of_inner)
            self._output = load_matrix(weights.output)
            self._resources = on_error.pop_all()

    def close(self) -> None:
        """Free the matrices."""
        self._resources.close()

    def begin(self, hidden: Hidden, token: int) -> Hidden:
        """Return the state after a token, float32[1, n_embd].

        Args:
            hidden: The hidden state from which the target chose the token, float32[n_embd].
            token: The token.
        """
        return self.advance(hidden[None] * np.float32(self.weights.scale), [token])

    def advance(self, states: Hidden, tokens: Sequence[int]) -> Hidden:
        """Return the states after tokens (see the formula above).

        Args:
            states: The state before each token, float32[n, n_embd].
            tokens: The tokens, n of them.

        Returns:
            float32[n, n_embd].
        """
        started = self._clock()
        n_embd = self.weights.n_embd
        embedded = self._embed(tokens)
        # M h + N e + c, then Q h + P e + b
        sums = self._multiply(self._of_state, states) + self._multiply(self._of_token, embedded)
        sums += self.weights.bias
        inner = sums[:, n_embd:]
        inner /= 1.0 + np.exp(-inner)  # silu
        states = sums[:, :n_embd] + self._multiply(self._of_inner, inner)
        self.compute_s += self._clock() - started
        return states

    def logits(self, states: Hidden) -> Logits:
        """Return the logits of the frequent tokens after each state: float32[n, n_frequent]."""
        started = self._clock()
        logits = self._multiply(self._output, states)
        self.compute_s += self._clock() - started
        return logits

    def _embed(self, tokens: Sequence[int]) -> FloatArray:
        """Return the embeddings of tokens, float32[n, n_embd]."""
        rows = self._embeddings[self._embedding_rows[list(tokens)]]
        shape = (len(tokens), self.weights.n_embd)
        return operators.dequantize(Weights(VOCABULARY_TYPE, shape, rows.reshape(-1)))

    def _multiply(self, matrix: Matrix, rows: FloatArray) -> FloatArray:
        return operators.multiply(matrix, rows, n_threads=self._n_threads)


# --- files

# The contents of a file, by the names of fields of `HeadWeights`.
_NUMBERS = ("n_embd", "n_vocab")
_TEXTS = ("target", "vocabulary")
_MATRICES = {
    "of_state": CELL_TYPE,
    "of_token": CELL_TYPE,
    "of_inner": CELL_TYPE,
    "embeddings": VOCABULARY_TYPE,
    "output": VOCABULARY_TYPE,
}


def is_heads_file(path: Path) -> bool:
    """Return whether a file has decoder heads."""
    return architecture_of(path) == ARCHITECTURE


def quantize_part(values: FloatArray, name: str) -> Weights:
    """Quantise a matrix of heads to the type that it has in a file of heads.

    Args:
        values: float32[n_rows, n_columns], n_columns a multiple of 32.
        name: The name of a field of `HeadWeights`.
    """
    return operators.quantize(values, _MATRICES[name])


def write_heads(path: Path, weights: HeadWeights) -> None:
    """Write a file of heads."""
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


def read_heads(path: Path) -> HeadWeights:
    """Read a file of heads.

    Raises:
        ModelFileError: If it cannot be read, or is damaged.
    """
    try:
        weights = _read(path)
        _check(weights)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:  # or text that is not UTF-8
        raise ModelFileError(
            f"{path}: damaged decoder heads", hint="make them again with `specgen draft make`"
        ) from error
    return weights


def _read(path: Path) -> HeadWeights:
    """Read a file of heads; errors of a damaged file are those of the gguf package."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields: dict[str, Any] = {
        name: reader.fields[f"{ARCHITECTURE}.{name}"].contents()
        for name in (*_NUMBERS, *_TEXTS, "scale")
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in ("tokens", "bias"):
        fields[name] = np.array(tensors[name].data)
    for name, type_name in _MATRICES.items():
        # GGUF gives the length of rows first.
        n_columns, n_rows = (int(size) for size in tensors[name].shape)
        data = np.array(tensors[name].data).reshape(-1).view(np.uint8)
        fields[name] = Weights(type_name, (n_rows, n_columns), data)
    return HeadWeights(**fields)


def _check(weights: HeadWeights) -> None:
    """Raise `ValueError` if shapes do not fit together, or values are out of range."""
    n_embd = weights.n_embd
    n_inner = weights.of_inner.shape[1]
    n_frequent = len(weights.tokens)
    tokens = weights.tokens
    bias = weights.bias
    is_valid = (
        weights.of_state.shape == weights.of_token.shape == (n_embd + n_inner, n_embd)
        and weights.of_inner.shape[0] == n_embd
        and weights.embeddings.shape == (n_frequent + 1, n_embd)
        and weights.output.shape == (n_frequent, n_embd)
        and bias.shape == (n_embd + n_inner,)
        and np.isfinite([*bias, weights.scale]).all()
        and (tokens.ndim == 1 and (np.diff(tokens) > 0).all())
        and 0 <= tokens[0] <= tokens[-1] < weights.n_vocab
    )
    if not is_valid:
        raise ValueError("parts that do not fit together")
