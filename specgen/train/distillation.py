"""Fits a draft model to a target's own text, with JAX, and writes it as a GGUF file.

Training changes only the scales of the blocks of its quantised matrices (see `gguf_weights`). It
minimises the cross-entropy with the target's distribution where that is known, as in DistillSpec
(Zhou et al., arXiv:2310.08461), otherwise with the tokens that the target chose. About ten thousand
tokens are enough for a gain.

llama.cpp computes no gradients, so this module implements the transformer again, for Llama, Qwen2,
Qwen3 and Gemma 3.
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
from specgen.train.training_loop import MIN_TEXT, Budget, Schedule, TrainingState, train

#: Tensors by name. The tensors of layers are stacked and named without "blk.N.": the first axis is
#: the layer.
Parameters: TypeAlias = dict[str, Any]
#: The names of a layer's matrices, which `_linear` multiplies by.
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NO_WINDOW = np.iinfo(np.int32).max
#: Long gradients are scaled down. The second moment decays fast: there are only a few hundred
#: steps.
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
#: The learning rate of Adam at its peak.
RATE = 6e-3
#: The number of rows in a step.
N_ROWS = 3
#: The most passes over the text.
N_PASSES = 2
#: How often the draft is judged in a pass over the text.
_JUDGED_PER_PASS = 3
#: Training ends after so many judgements without an improvement.
_PATIENCE = 4
#: The learning rate rises in a quarter of the steps, but in no more than this.
_MOST_RISING = 20
#: It falls to this share of its peak.
_LAST_SHARE = 0.05
_LEAST_LEARNT, _LEAST_JUDGED = MIN_TEXT["distilled"]


@dataclass(frozen=True, slots=True)
class Distilled:
    """What training changed, on held-back answers."""

    #: The share of tokens that the draft found likeliest before.
    agreement_before: float
    #: The same after training, as written to the file.
    agreement_after: float
    n_steps: int
    #: How long training took.
    seconds: float

    @property
    def text(self) -> str:
        """A sentence about the result."""
        return (
            f"it agrees with the target on {self.agreement_after:.1%} of held-back tokens, "
            f"before training on {self.agreement_before:.1%} ({self.n_steps} steps)"
        )


def distil(
    draft: Path,
    texts: Sequence[TrainingText],
    output: Path,
    budget: Budget,
    *,
    rate: float = RATE,
) -> Distilled | None:
    """Train a draft on texts and write it to `output`.

    Returns:
        What training changed, or None if interrupted.

    Raises:
        UsageError: If there is too little text.
        ModelFileError: If the draft cannot be read or trained.
        MemoryLimitError: If there is too little memory.
        OutputError: If the file cannot be written.
    """
    learnt, judged = pack_split(texts)
    if learnt.n_labels < _LEAST_LEARNT or judged.n_labels < _LEAST_JUDGED:
        least = f"{_LEAST_LEARNT} and {_LEAST_JUDGED}"
        raise UsageError(
            f"too few tokens to learn from ({learnt.n_labels}) or to judge by ({judged.n_labels})",
            hint=f"give more --minutes or --prompts: a draft needs at least {least}",
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
    trainer: Trainer,
    schedule: Schedule,
    budget: Budget,
    output: Path,
) -> tuple[TrainingState, Score] | None:
    """Train, write the weights of the lowest loss, and judge them as written.

    Returns:
        The state after training and the score of the file; None if interrupted.
    """
    state = TrainingState(trainer.before.loss, trainer.copied())
    if not train(trainer, state, schedule, budget):
        return None
    write_weights(trainer.file, state.best, output)
    return state, Trainer(output, trainer.learnt, trainer.judged).before


def check_memory(
    draft: Path,
    weights: GgufWeights,
    available_bytes: int,
) -> None:
    """Raise `MemoryLimitError` if training a draft may need more memory than is available."""
    shape = weights.hyperparameters
    n_vocab = len(weights.tensors["token_embd.weight"])
    n_ff = max(len(weights.tensors[f"blk.{i}.ffn_up.weight"]) for i in range(shape.n_layer))
    # In float32: the parameters, the outputs of a layer's matrices for each token of a step, and
    # about four copies of a row's logits.
    n_parameters = sum(tensor.size for tensor in weights.tensors.values())
    n_states = shape.n_layer * (8 * shape.n_embd + 4 * n_ff) * N_ROWS * N_COLUMNS
    n_logits = 4 * N_COLUMNS * n_vocab
    needed_bytes = 4 * (n_parameters + n_states + n_logits)
    if needed_bytes > available_bytes:
        raise MemoryLimitError(
            f"{draft}: training it needs about {human_bytes(needed_bytes)} more, "
            f"{human_bytes(available_bytes)} are free",
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
    shape: Hyperparameters,
    layers: Parameters,
    others: Parameters,
    tokens: jax.Array,
    texts: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Return the final hidden state of each token, which the output matrix turns into logits.

    A token sees only itself and the tokens before it in the same text.

    Args:
        shape: The hyperparameters.
        layers: The tensors of the layers, from `stack_layers`.
        others: The other tensors.
        tokens: int32[n_rows, n_columns], as in `PackedRows`.
        texts: The same shape: which text of its row a token belongs to.
        positions: The same shape: the token's position in its text.

    Returns:
        float32[n_rows, n_columns, n_embd].
    """
    states = others["token_embd.weight"][tokens]
    if shape.architecture == "gemma3":
        states = states * math.sqrt(shape.n_embd)
    # [n_rows, n_columns (who sees), n_columns (what is seen)]
    distances = positions[:, :, None] - positions[:, None, :]
    is_seen = (texts[:, :, None] == texts[:, None, :]) & (distances >= 0)
    windows = np.array([window or _NO_WINDOW for window in shape.windows], np.int32)
    frequencies = _frequencies(shape, others.get("rope_freqs.weight"))

    def step(states: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        layer, window, layer_frequencies = of_layer
        # For all heads of a token alike: float32[n_rows, n_columns, 1, head_size / 2].
        angles = positions[:, :, None, None] * layer_frequencies
        mask = is_seen & (distances < window)
        return _layer(shape, layer, states, mask, angles), None

    # The backward pass recomputes all but the outputs of matrices: attention scores would take the
    # most memory.
    step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    states, _ = jax.lax.scan(step, states, (layers, windows, frequencies))
    return _normed(shape, states, others["output_norm.weight"])


def _frequencies(shape: Hyperparameters, divisors: Any) -> Any:
    """Return the angles by which RoPE rotates from one position to the next.

    Pair i of a head turns by base^(-2 i / head_size) (Su et al., arXiv:2104.09864), divided by the
    factor that stretches positions, and by `divisors`, float32[head_size / 2], if there are some.

    Returns:
        float32[n_layer, head_size / 2].
    """
    exponents = -np.arange(0, shape.head_size, 2, dtype=np.float32) / shape.head_size
    bases = np.array(shape.rope_bases, np.float32)[:, None]
    frequencies = bases**exponents / np.array(shape.rope_factors, np.float32)[:, None]
    if divisors is None:
        return frequencies
    return frequencies / divisors


def _layer(
    shape: Hyperparameters,
    layer: Parameters,
    states: jax.Array,
    mask: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Return hidden states after a layer: attention, then a gated feed-forward network.

    Gemma 3 also normalises what is added to the states.
    """
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
    shape: Hyperparameters,
    layer: Parameters,
    inputs: jax.Array,
    mask: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Return the output of grouped-query attention (Ainslie et al., arXiv:2305.13245).

    In the einsums, b is the row, q the query's column, t the column of keys and values, k the head
    of keys, g the query head in its group, and s the component of a head.

    Args:
        shape: The hyperparameters.
        layer: The layer's tensors.
        inputs: float32[n_rows, n_columns, n_embd].
        mask: bool[n_rows, n_columns, n_columns], which tokens each token sees.
        angles: float32[n_rows, n_columns, 1, head_size / 2].
    """
    n_rows, n_columns, _ = inputs.shape

    def heads(name: str, n_heads: int) -> jax.Array:
        values = _linear(layer, name, inputs)
        return values.reshape(n_rows, n_columns, n_heads, shape.head_size)

    queries = heads("attn_q", shape.n_head)
    keys = heads("attn_k", shape.n_head_kv)
    values = heads("attn_v", shape.n_head_kv)
    if "attn_q_norm.weight" in layer:
        queries = _normed(shape, queries, layer["attn_q_norm.weight"])
        keys = _normed(shape, keys, layer["attn_k_norm.weight"])
    queries = _rotated(shape, queries, angles)
    keys = _rotated(shape, keys, angles)

    # A head of keys serves a group of query heads.
    n_group = shape.n_head // shape.n_head_kv
    queries = queries.reshape(n_rows, n_columns, shape.n_head_kv, n_group, shape.head_size)
    scores = jnp.einsum("bqkgs,btks->bkgqt", queries, keys) / math.sqrt(shape.head_size)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    mixed = jnp.einsum("bkgqt,btks->bqkgs", jax.nn.softmax(scores, axis=-1), values)
    return _linear(layer, "attn_output", mixed.reshape(n_rows, n_columns, -1))


def _rotated(
    shape: Hyperparameters,
    values: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Rotate each pair of components of queries or keys, [n_rows, n_columns, n_heads, head_size].

    In Llama's files the components of a pair are neighbours, in others half a head apart.
    """
    if shape.architecture == "llama":
        pairs = (-1, 2)
        axis = -1
    else:
        pairs = (2, -1)
        axis = -2
    first, second = jnp.moveaxis(values.reshape(*values.shape[:-1], *pairs), axis, 0)
    cosine = jnp.cos(angles)
    sine = jnp.sin(angles)
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.stack(rotated, axis).reshape(values.shape)


def _normed(
    shape: Hyperparameters,
    values: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + shape.norm_epsilon) * weights


def _linear(
    layer: Parameters,
    name: str,
    inputs: jax.Array,
) -> jax.Array:
    """Return inputs times a matrix, whose blocks may have factors, plus its bias if it has one."""
    matrix = layer[f"{name}.weight"]
    if f"{name}.factors" in layer:
        matrix = apply_changes(matrix, layer[f"{name}.factors"])
    found: jax.Array = inputs @ matrix.T
    if f"{name}.bias" in layer:
        found = found + layer[f"{name}.bias"]
    return found


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """How well a draft predicts the tokens of answers."""

    #: The share of tokens that the draft finds likeliest.
    agreement: float
    #: The mean cross-entropy with the target's likeliest tokens or, where these are not known, its
    #: tokens.
    loss: float


class Trainer:
    """Trains factors for the blocks of a draft's weights; a `Trainee`.

    Args:
        draft: The draft's file.
        learnt: The rows to learn from.
        judged: The rows to judge by.

    Raises:
        ModelFileError: If the draft cannot be read, or has no matrix that can be trained.
        MemoryLimitError: If there is too little memory.
    """

    def __init__(
        self,
        draft: Path,
        learnt: PackedRows,
        judged: PackedRows,
    ) -> None:
        weights = read_weights(draft)
        check_memory(draft, weights, available_memory_bytes())
        self.file = draft
        self.learnt = learnt
        self.judged = judged
        self._shape = weights.hyperparameters
        layers, others = stack_layers(weights)
        #: The weights of the file, which stay: those of layers, and others.
        self._frozen = jax.tree.map(jnp.asarray, (layers, others))
        names = [f"{name}.weight" for name in LAYER_MATRICES]
        order = range(self._shape.n_layer)
        changes = initial_changes(
            {name: layers[name] for name in names},
            {name: [weights.types[f"blk.{i}.{name}"] for i in order] for name in names},
        )
        if not changes:
            types = ", ".join(sorted(set(weights.types.values())))
            raise ModelFileError(f"no matrix has scales that can be trained (types: {types})")
        #: What is trained: a factor of a block is 1 plus its change.
        self._changes: Parameters = jax.tree.map(jnp.asarray, changes)
        self._moments: Any = _OPTIMIZER.init(self._changes)

    @cached_property
    def before(self) -> Score:
        """The score of the weights in the file, if asked for before the first step."""
        return self.judge()

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        """Take a step of gradient descent, learning from some of the rows."""
        rows = _on_device(self.learnt.pick(batch))
        self._changes, self._moments = _step(
            self._shape,
            self._changes,
            self._moments,
            self._frozen,
            rows,
            rate,
        )

    def judge(self) -> Score:
        """Return the present score on the rows to judge by."""
        loss = 0.0
        n_right = 0.0
        for index in range(self.judged.n_rows):
            row = _on_device(self.judged.pick(np.array([index])))
            row_loss, row_right, _ = _sums(self._shape, self._changes, self._frozen, row)
            loss += float(row_loss)
            n_right += float(row_right)
        n_labels = self.judged.n_labels
        return Score(n_right / n_labels, loss / n_labels)

    def loss(self) -> float:
        """Return the loss, which also tells apart steps that agree equally often."""
        return self.judge().loss

    def copied(self) -> Parameters:
        """Return a copy of the present changes."""
        return {name: np.array(values) for name, values in self._changes.items()}


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    shape: Hyperparameters,
    changes: Any,
    moments: Any,
    frozen: Any,
    rows: Any,
    rate: float,
) -> tuple[Parameters, Any]:
    """Return changes and moments after a step of Adam on the mean loss of the rows' labels."""

    def mean_loss(changes: Parameters) -> Any:
        loss, _, n_labels = _sums(shape, changes, frozen, rows)
        return loss / n_labels

    gradients = jax.grad(mean_loss)(changes)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    return jax.tree.map(lambda old, step: old - rate * step, changes, directions), moments


@partial(jax.jit, static_argnums=0)
def _sums(
    shape: Hyperparameters,
    changes: Parameters,
    frozen: Any,
    rows: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the sum of the losses of rows' labels, the number of right guesses, and of labels."""
    layers, others = frozen
    states = hidden_states(
        shape,
        {**layers, **changes},
        others,
        rows.tokens,
        rows.texts,
        rows.positions,
    )
    output = output_matrix(others)
    # One row at a time, and recomputed for the gradient: the logits of a few tokens take a
    # megabyte.
    losses, n_right = jax.lax.map(
        jax.checkpoint(lambda row: _row_sums(output, *row)),
        (states, rows.labels, rows.top_tokens, rows.top_probabilities),
    )
    return losses.sum(), n_right.sum(), jnp.sum(rows.labels >= 0)


def _row_sums(
    output: jax.Array,
    states: jax.Array,
    labels: jax.Array,
    top_tokens: jax.Array,
    top_probabilities: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the losses of a row's labels, and the number of right guesses.

    The loss of a label is the cross-entropy log(sum(exp(logits))) - wanted, in which `wanted` is
    the label's logit or, where the target's distribution is known, the mean of the logits under it.

    Args:
        output: float32[n_vocab, n_embd], the output matrix.
        states: float32[n_columns, n_embd].
        labels: int32[n_columns], -1 where there is none.
        top_tokens: int32[n_columns, n_top], the target's likeliest tokens.
        top_probabilities: float32[n_columns, n_top].
    """
    logits = states @ output.T  # [n_columns, n_vocab]
    if top_tokens.shape[-1]:  # with the target's distribution, a second pass does not overfit
        top_logits = jnp.take_along_axis(logits, top_tokens, axis=1)
        total = jnp.maximum(top_probabilities.sum(axis=-1), 1e-6)
        wanted = (top_logits * top_probabilities).sum(axis=-1) / total
    else:
        wanted = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - wanted
    is_label = labels >= 0
    is_right = is_label & (logits.argmax(axis=-1) == labels)
    return jnp.sum(jnp.where(is_label, losses, 0.0)), jnp.sum(is_right)


def _on_device(rows: PackedRows) -> PackedRows:
    return PackedRows(*map(jnp.asarray, rows))  # type: ignore[arg-type]
