"""The forward pass of Llama, Qwen2, Qwen3 and Gemma 3 in JAX, over several texts at once.

The architectures differ in little: Qwen2 adds biases to queries, keys and values; Qwen3 and
Gemma 3 normalise each head's queries and keys; Gemma 3 also scales its embeddings, normalises
what a layer adds, gates with GELU, and limits most layers to a window. The tensors in the file show the
biases and norms of queries and keys; the rest depends on the architecture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from specgen.training.distil import block_scales
from specgen.training.distil.gguf_weights import GgufWeights, Hyperparameters

#: Tensors by name. The tensors of layers are stacked and named without "blk.N.": the first axis is the layer.
Parameters: TypeAlias = dict[str, Any]
#: The names of a layer's matrices, which `_linear` multiplies by.
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NO_WINDOW = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class StackedParameters:
    """The parameters of a transformer: those of its layers, stacked, and all others."""

    layers: Parameters
    others: Parameters


def stack_layers(weights: GgufWeights) -> StackedParameters:
    """Return a file's tensors in the form that `hidden_states` takes; layers' names are without "blk.N."."""
    names = [name.removeprefix("blk.0.") for name in weights.tensors if name.startswith("blk.0.")]
    order = range(weights.hyperparameters.n_layer)  # a file may have them in another one
    layers = {name: np.stack([weights.tensors[f"blk.{i}.{name}"] for i in order]) for name in names}
    others = {name: each for name, each in weights.tensors.items() if not name.startswith("blk.")}
    return StackedParameters(layers, others)


def output_matrix(others: Parameters) -> jax.Array:
    """Return the matrix that turns `hidden_states` into logits: float32[n_vocab, n_embd]."""
    name = "output.weight" if "output.weight" in others else "token_embd.weight"
    return jnp.asarray(others[name])


def hidden_states(
    hyperparameters: Hyperparameters,
    layers: Parameters,
    others: Parameters,
    tokens: jax.Array,
    texts: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Return the hidden state of each token for the output matrix: float32[n_rows, n_columns, n_embd].

    `tokens`, `texts` and `positions` are int32[n_rows, n_columns]. A row holds several texts one after the
    other; a token sees only itself and the tokens before it with the same number in `texts`. `positions`
    count from 0 in each text.
    """
    shape = hyperparameters
    states = others["token_embd.weight"][tokens]
    if shape.architecture == "gemma3":
        states = states * math.sqrt(shape.n_embd)
    distances = positions[:, :, None] - positions[:, None, :]
    is_seen = (texts[:, :, None] == texts[:, None, :]) & (distances >= 0)
    windows = np.array([window or _NO_WINDOW for window in shape.windows], np.int32)
    frequencies = _frequencies(shape, others.get("rope_freqs.weight"))

    def step(states: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        layer, window, frequency = of_layer
        angles = positions[:, :, None, None] * frequency
        mask = is_seen & (distances < window)
        return _layer(shape, layer, states, mask, angles), None

    # The backward pass keeps the outputs of matrices and recomputes the rest, since attention scores
    # would take the most memory.
    step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    states, _ = jax.lax.scan(step, states, (layers, windows, frequencies))
    return _normed(shape, states, others["output_norm.weight"])


def _frequencies(shape: Hyperparameters, divisors: Any) -> Any:
    """Return the angle between neighbouring positions, for each layer and pair: float32[n_layer, head_size
    / 2]."""
    exponents = -np.arange(0, shape.head_size, 2, dtype=np.float32) / shape.head_size
    bases = np.array(shape.rope_bases, np.float32)[:, None]
    found = bases**exponents / np.array(shape.rope_factors, np.float32)[:, None]
    return found if divisors is None else found / divisors


def _layer(
    shape: Hyperparameters, layer: Parameters, states: jax.Array, mask: jax.Array, angles: jax.Array
) -> jax.Array:
    is_gemma = shape.architecture == "gemma3"
    inputs = _normed(shape, states, layer["attn_norm.weight"])
    added = _attention(shape, layer, inputs, mask, angles)
    if is_gemma:
        added = _normed(shape, added, layer["post_attention_norm.weight"])
    states = states + added
    inputs = _normed(shape, states, layer["ffn_norm.weight"])
    gate = _linear(layer, "ffn_gate", inputs)
    gate = jax.nn.gelu(gate, approximate=True) if is_gemma else jax.nn.silu(gate)
    added = _linear(layer, "ffn_down", gate * _linear(layer, "ffn_up", inputs))
    if is_gemma:
        added = _normed(shape, added, layer["post_ffw_norm.weight"])
    return states + added


def _attention(
    shape: Hyperparameters, layer: Parameters, inputs: jax.Array, mask: jax.Array, angles: jax.Array
) -> jax.Array:
    n_rows, n_columns = inputs.shape[:2]
    size, n_kv = shape.head_size, shape.n_head_kv

    def heads(name: str, n: int) -> jax.Array:
        return _linear(layer, name, inputs).reshape(n_rows, n_columns, n, size)

    queries, keys = heads("attn_q", shape.n_head), heads("attn_k", n_kv)
    values = heads("attn_v", n_kv)
    if "attn_q_norm.weight" in layer:
        queries = _normed(shape, queries, layer["attn_q_norm.weight"])
        keys = _normed(shape, keys, layer["attn_k_norm.weight"])
    queries, keys = _rotated(shape, queries, angles), _rotated(shape, keys, angles)
    # A head of keys serves a group of query heads.
    queries = queries.reshape(n_rows, n_columns, n_kv, shape.n_head // n_kv, size)
    scores = jnp.einsum("bqkgs,btks->bkgqt", queries, keys) / math.sqrt(size)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    mixed = jnp.einsum("bkgqt,btks->bqkgs", jax.nn.softmax(scores, axis=-1), values)
    return _linear(layer, "attn_output", mixed.reshape(n_rows, n_columns, -1))


def _rotated(shape: Hyperparameters, values: jax.Array, angles: jax.Array) -> jax.Array:
    """Return queries or keys rotated by their positions. In GGUF files of Llama the two values of a pair
    are neighbours; in the others they are half a head apart."""
    axis = -1 if shape.architecture == "llama" else -2
    pairs = (2, -1) if axis == -2 else (-1, 2)
    first, second = jnp.moveaxis(values.reshape(*values.shape[:-1], *pairs), axis, 0)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.stack(rotated, axis).reshape(values.shape)


def _normed(shape: Hyperparameters, values: jax.Array, weights: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + shape.norm_epsilon) * weights


def _linear(layer: Parameters, name: str, inputs: jax.Array) -> jax.Array:
    """Return inputs times a matrix, with the factors of its blocks if it has some, plus the bias if there
    is one."""
    matrix = layer[f"{name}.weight"]
    if f"{name}.factors" in layer:
        matrix = block_scales.apply_changes(matrix, layer[f"{name}.factors"])
    found: jax.Array = inputs @ matrix.T
    if f"{name}.bias" in layer:
        found = found + layer[f"{name}.bias"]
    return found
