"""Fits a draft model to a target's own text, with JAX, and writes it as a GGUF file.

Training changes the scales of the blocks of its matrices (`gguf_weights.py`), towards the tokens
that the target chose or, where they are known, found likeliest (distillation as in DistillSpec,
Zhou et al., arXiv:2310.08461). Some ten thousand tokens suffice for a gain. The draft is a Llama,
Qwen2, Qwen3 or Gemma 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from specgen.errors import MemoryLimitError, ModelFileError, UsageError
from specgen.system.files import new_beside, write_errors
from specgen.system.machine import available_memory_bytes
from specgen.system.quantities import human_bytes
from specgen.train.gguf_weights import (
    GgufWeights,
    Hyperparameters,
    apply_changes,
    initial_changes,
    read_weights,
    write_weights,
)
from specgen.train.target_text import N_COLUMNS, PackedRows, TrainingText, pack_split
from specgen.train.training_loop import LEAST_TEXT, Budget, Schedule, TrainingState, train

#: Tensors by name. The tensors of layers are stacked and named without "blk.N.": the first axis is
#: the layer.
Parameters: TypeAlias = dict[str, Any]
#: The names of a layer's matrices, which `_linear` multiplies by.
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NO_WINDOW = np.iinfo(np.int32).max
#: Long gradients are scaled down; the second moment decays fast: there are only some hundred steps.
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
#: The learning rate of Adam at its peak.
RATE = 6e-3
#: The number of rows in a step, and passes over the text at most.
N_ROWS, N_PASSES = 3, 2
#: Judgements in a pass over the text, and the number without an improvement after which training
#: ends.
_JUDGED_PER_PASS, _PATIENCE = 3, 4
#: The learning rate rises in a quarter of the steps, but in so many at most, and falls to this
#: share of its peak.
_MOST_RISING, _LAST_SHARE = 20, 0.05
_LEAST_LEARNT, _LEAST_JUDGED = LEAST_TEXT["distilled"]


@dataclass(frozen=True, slots=True)
class Distilled:
    """The shares of held-back tokens that the draft finds likeliest, before and as written after
    training.
    """

    agreement_before: float
    agreement_after: float
    n_steps: int
    seconds: float

    @property
    def text(self) -> str:
        return (
            f"it agrees with the target on {self.agreement_after:.1%} of the tokens of held-back answers, before it "
            f"was fitted on {self.agreement_before:.1%} ({self.n_steps} steps)"
        )


def distil(
    draft: Path, texts: Sequence[TrainingText], output: Path, budget: Budget, *, rate: float = RATE
) -> Distilled | None:
    """Train a draft on texts and write it to `output`; None if interrupted. Raise `UsageError` for
    too little text.
    """
    learnt, judged = pack_split(texts)
    if learnt.n_labels < _LEAST_LEARNT or judged.n_labels < _LEAST_JUDGED:
        raise UsageError(
            f"{learnt.n_labels} tokens to learn from and {judged.n_labels} to judge by: too few",
            hint=f"give more --minutes or --prompts: a draft needs {_LEAST_LEARNT} and {_LEAST_JUDGED}",
        )
    trainer = Trainer(draft, learnt, judged)
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    n_batch = min(N_ROWS, learnt.n_rows)
    n_per_pass = learnt.n_rows // n_batch
    schedule = Schedule(
        learnt.n_rows,
        n_batch,
        N_PASSES,
        rate,
        n_rising=1 + min(_MOST_RISING, N_PASSES * n_per_pass // 4),
        last_share=_LAST_SHARE,
        judged_every=max(1, n_per_pass // _JUDGED_PER_PASS),
        patience=_PATIENCE,
    )
    before = trainer.before
    with write_errors(output), new_beside(output) as new:
        fitted = fit(trainer, schedule, budget, new)
        if fitted is None:
            return None
        new.replace(output)
    state, after = fitted
    return Distilled(before.agreement, after.agreement, state.n_steps, state.seconds)


def fit(
    trainer: Trainer, schedule: Schedule, budget: Budget, output: Path
) -> tuple[TrainingState, Score] | None:
    """Train, write the weights of the lowest loss, and judge them as written; None if interrupted."""
    state = TrainingState(trainer.before.loss, trainer.copied())
    if not train(trainer, state, schedule, budget):
        return None
    write_weights(trainer.file, state.best, output)
    return state, Trainer(output, trainer.learnt, trainer.judged).before


def _check_memory(draft: Path, weights: GgufWeights) -> None:
    shape = weights.hyperparameters
    n_vocab = len(weights.tensors["token_embd.weight"])
    n_ff = max(len(weights.tensors[f"blk.{i}.ffn_up.weight"]) for i in range(shape.n_layer))
    # The outputs of a layer's matrices for each token, and some copies of a row's logits.
    states = shape.n_layer * (8 * shape.n_embd + 4 * n_ff) * N_ROWS * N_COLUMNS
    n_parameters = sum(tensor.size for tensor in weights.tensors.values())
    needed = 4 * (n_parameters + states + 4 * N_COLUMNS * n_vocab)
    available = available_memory_bytes()
    if needed > available:
        raise MemoryLimitError(
            f"{draft}: training it needs about {human_bytes(needed)} more, "
            f"{human_bytes(available)} are free",
            hint="train a smaller draft, or close other programs",
        )


# --- the transformer ------------------------------------------------------------------------------


def stack_layers(weights: GgufWeights) -> tuple[Parameters, Parameters]:
    """Return the tensors of a file's layers, stacked and named without "blk.N.", and all others."""
    names = [name.removeprefix("blk.0.") for name in weights.tensors if name.startswith("blk.0.")]
    order = range(weights.hyperparameters.n_layer)  # a file may have them in another one
    layers = {name: np.stack([weights.tensors[f"blk.{i}.{name}"] for i in order]) for name in names}
    others = {name: each for name, each in weights.tensors.items() if not name.startswith("blk.")}
    return layers, others


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
    """Return the hidden state of each token for the output matrix: float32[n_rows, n_columns,
    n_embd], from `PackedRows`. A token sees only itself and the tokens before it in the same text.
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

    # The backward pass recomputes all but the outputs of matrices: attention scores would take the
    # most memory.
    step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    states, _ = jax.lax.scan(step, states, (layers, windows, frequencies))
    return _normed(shape, states, others["output_norm.weight"])


def _frequencies(shape: Hyperparameters, divisors: Any) -> Any:
    """Return the angle between neighbouring positions: float32[n_layer, head_size / 2]."""
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
    """Rotate queries or keys. Llama's files have a pair's values beside one another, the others
    half a head apart.
    """
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
    """Return inputs times a matrix, with the factors of its blocks if it has some, plus the bias if
    any.
    """
    matrix = layer[f"{name}.weight"]
    if f"{name}.factors" in layer:
        matrix = apply_changes(matrix, layer[f"{name}.factors"])
    found: jax.Array = inputs @ matrix.T
    if f"{name}.bias" in layer:
        found = found + layer[f"{name}.bias"]
    return found


@dataclass(frozen=True, slots=True)
class Score:
    """How well a draft predicts the tokens of answers."""

    #: The share of tokens that the draft finds likeliest.
    agreement: float
    #: The mean cross-entropy with the target's likeliest tokens or, where these are not known, its
    #: tokens.
    loss: float


class Trainer:
    """Trains factors for the blocks of a draft's weights on rows of text, and judges by others."""

    def __init__(self, draft: Path, learnt: PackedRows, judged: PackedRows) -> None:
        weights = read_weights(draft)
        _check_memory(draft, weights)
        self.file, self.learnt, self.judged = draft, learnt, judged
        self._shape = weights.hyperparameters
        layers, others = stack_layers(weights)
        self._frozen = jax.tree.map(jnp.asarray, (layers, others))
        names = [f"{name}.weight" for name in LAYER_MATRICES]
        order = range(self._shape.n_layer)
        start = initial_changes(
            {name: layers[name] for name in names},
            {name: [weights.types[f"blk.{i}.{name}"] for i in order] for name in names},
        )
        if not start:
            types = ", ".join(sorted(set(weights.types.values())))
            raise ModelFileError(f"no matrix has scales that can be trained (types: {types})")
        self._changes: Parameters = jax.tree.map(jnp.asarray, start)
        self._moments: Any = _OPTIMIZER.init(self._changes)

    @cached_property
    def before(self) -> Score:
        """The score of the weights in the file, if asked for before the first step."""
        return self.judge()

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        rows = _arrays(self.learnt.pick(batch))
        own = self._changes, self._moments, self._frozen
        self._changes, self._moments = _step(self._shape, *own, rows, rate)

    def judge(self) -> Score:
        loss = n_right = 0.0
        for index in range(self.judged.n_rows):
            row = _arrays(self.judged.pick(np.array([index])))
            sums = _sums(self._shape, self._changes, self._frozen, row)
            loss, n_right = loss + float(sums[0]), n_right + float(sums[1])
        n_labels = self.judged.n_labels
        return Score(n_right / n_labels, loss / n_labels)

    def loss(self) -> float:
        """Return the loss, which tells steps apart that agree on as many of a few thousand tokens."""
        return self.judge().loss

    def copied(self) -> Parameters:
        return {name: np.array(values) for name, values in self._changes.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    shape: Hyperparameters, changes: Any, moments: Any, frozen: Any, rows: Any, rate: float
) -> tuple[Parameters, Any]:
    def mean_loss(changes: Parameters) -> Any:
        loss, _, n_labels = _sums(shape, changes, frozen, rows)
        return loss / n_labels

    gradients = jax.grad(mean_loss)(changes)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    return jax.tree.map(lambda old, step: old - rate * step, changes, directions), moments


@partial(jax.jit, static_argnums=0)
def _sums(
    shape: Hyperparameters, changes: Parameters, frozen: Any, rows: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return three sums over the rows' labels: of losses, of those that are the likeliest token,
    and of all.
    """
    layers, others = frozen
    tokens, texts, positions, labels, top_tokens, top_probabilities = rows
    states = hidden_states(shape, {**layers, **changes}, others, tokens, texts, positions)
    output = output_matrix(others)

    def of_row(row: Any) -> tuple[jax.Array, jax.Array]:
        states, labels, top_tokens, shares = row
        logits = states @ output.T
        if top_tokens.shape[-1]:  # with the target's distribution, a second pass does not overfit
            of_top = jnp.take_along_axis(logits, top_tokens, axis=1)
            wanted = (of_top * shares).sum(axis=-1) / jnp.maximum(shares.sum(axis=-1), 1e-6)
        else:
            wanted = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - wanted
        is_label = labels >= 0
        is_right = is_label & (logits.argmax(axis=-1) == labels)
        return jnp.sum(jnp.where(is_label, losses, 0.0)), jnp.sum(is_right)

    # One row at a time, and recomputed for the gradient: the logits of a few tokens take a
    # megabyte.
    losses, n_right = jax.lax.map(
        jax.checkpoint(of_row), (states, labels, top_tokens, top_probabilities)
    )
    return losses.sum(), n_right.sum(), jnp.sum(labels >= 0)


def _arrays(rows: PackedRows) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.asarray, rows))
