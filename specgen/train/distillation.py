"""Fits a draft model to a target's own text, with JAX, and writes it as a GGUF file.

Training changes only the scales of the blocks of its quantised matrices (see `gguf_weights`). It
minimises the cross-entropy with the target's distribution if it is known, as in DistillSpec (Zhou
et al., arXiv:2310.08461), or else with the tokens that the target chose. About ten thousand tokens
are enough for a gain.

llama.cpp cannot compute these gradients, so this module reimplements the transformer in JAX, for
Llama, Qwen2, Qwen3 and Gemma 3.
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
from specgen.train.training_loop import MIN_TEXT, Budget, Schedule, TrainingState, copied, train

#: Tensors by name. The tensors of layers are stacked, with the layer as the first axis, and named
#: without "blk.N.".
Tensors: TypeAlias = dict[str, Any]
#: The names of a layer's matrices, which `_linear` applies.
LAYER_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
#: The window of layers that attend to the whole text.
_NO_WINDOW = np.iinfo(np.int32).max
#: Large gradients are clipped. The second moment decays faster than usual, because there are only a
#: few hundred steps.
_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
#: The highest learning rate of Adam.
RATE = 6e-3
#: The number of rows in a step.
N_ROWS = 3
#: The maximum number of passes over the text.
N_PASSES = 2
#: The number of times that the draft is judged in a pass over the text.
_JUDGEMENTS_PER_PASS = 3
#: Training ends after this many consecutive judgements without an improvement.
_PATIENCE = 4
#: The learning rate rises during the first quarter of the steps, but at most this many.
_MAX_RISING = 20
#: The last learning rate, as a share of the highest.
_LAST_SHARE = 0.05
_MIN_LEARNT, _MIN_JUDGED = MIN_TEXT["distilled"]


@dataclass(frozen=True, slots=True)
class Distilled:
    """The result of training a draft."""

    #: The share of held-back tokens that were the draft's top guess before training.
    agreement_before: float
    #: The same share for the file that was written.
    agreement_after: float
    #: The number of gradient descent steps.
    n_steps: int
    #: The time that training took.
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

    Args:
        draft: The draft's file, which stays unchanged.
        texts: The texts to train on, and the held-back ones to judge on.
        output: The file to write.
        budget: The time that training may take.
        rate: The highest learning rate.

    Returns:
        The result, or None if interrupted.

    Raises:
        UsageError: If there is too little text.
        ModelFileError: If the draft cannot be read or trained.
        MemoryLimitError: If there is too little memory.
        OutputError: If `output` cannot be written.
    """
    learnt, judged = pack_split(texts)
    if learnt.n_labels < _MIN_LEARNT or judged.n_labels < _MIN_JUDGED:
        needed = f"{_MIN_LEARNT} and {_MIN_JUDGED}"
        raise UsageError(
            f"too few tokens to learn from ({learnt.n_labels}) or to judge by ({judged.n_labels})",
            hint=f"give more --minutes or --prompts: a draft needs at least {needed}",
        )
    trainer = Trainer(draft, learnt, judged, available_memory_bytes())
    with write_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    n_batch = min(N_ROWS, learnt.n_rows)
    n_steps_per_pass = learnt.n_rows // n_batch
    schedule = Schedule(
        learnt.n_rows,
        n_batch,
        N_PASSES,
        rate,
        n_rising=1 + min(_MAX_RISING, N_PASSES * n_steps_per_pass // 4),
        last_share=_LAST_SHARE,
        judged_every=max(1, n_steps_per_pass // _JUDGEMENTS_PER_PASS),
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
    """Train a draft, write the weights with the lowest loss, and judge the file.

    Args:
        trainer: The draft to train.
        schedule: The steps to take.
        budget: The time that training may take.
        output: The file to write.

    Returns:
        The state after training and the score of the file, whose float16 scales are less precise
        than the weights in training; None if interrupted.
    """
    state = TrainingState(trainer.before.loss, copied(trainer.parameters))
    if not train(trainer, state, schedule, budget):
        return None
    write_weights(trainer.file, state.best, output)
    written = Trainer(output, trainer.learnt, trainer.judged)
    return state, written.before


def check_memory(
    draft: Path,
    weights: GgufWeights,
    available_bytes: float,
) -> None:
    """Check that there is enough memory for training a draft.

    Raises:
        MemoryLimitError: If the estimated need is more than `available_bytes`.
    """
    shape = weights.hyperparameters
    n_vocab = len(weights.tensors["token_embd.weight"])
    n_ff = max(len(weights.tensors[f"blk.{i}.ffn_up.weight"]) for i in range(shape.n_layer))
    # All in float32: the parameters, the outputs of all layers' matrices for each token of a step,
    # and about four copies of the logits of a row.
    n_parameters = sum(tensor.size for tensor in weights.tensors.values())
    n_states = shape.n_layer * (8 * shape.n_embd + 4 * n_ff) * N_ROWS * N_COLUMNS
    n_logits = 4 * N_COLUMNS * n_vocab
    needed_bytes = 4 * (n_parameters + n_states + n_logits)
    if needed_bytes > available_bytes:
        raise MemoryLimitError(
            f"{draft}: training it needs about {human_bytes(needed_bytes)} more, "
            f"{human_bytes(int(available_bytes))} are free",
            hint="train a smaller draft, or close other programs",
        )


# --- the transformer ------------------------------------------------------------------------------


def stack_layers(weights: GgufWeights) -> tuple[Tensors, Tensors]:
    """Stack the tensors of a file's layers.

    Returns:
        The stacked tensors, named without "blk.N.", and all other tensors of the file.
    """
    tensors = weights.tensors
    layer_numbers = range(weights.hyperparameters.n_layer)
    layers = {}
    for first_name in tensors:
        if first_name.startswith("blk.0."):
            name = first_name.removeprefix("blk.0.")
            layers[name] = np.stack([tensors[f"blk.{layer}.{name}"] for layer in layer_numbers])
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("blk.")}
    return layers, others


def output_matrix(others: Tensors) -> jax.Array:
    """Return the matrix that turns hidden states into logits: float32[n_vocab, n_embd].

    A file without an output matrix uses its token embeddings.
    """
    name = "output.weight" if "output.weight" in others else "token_embd.weight"
    return jnp.asarray(others[name])


def hidden_states(
    shape: Hyperparameters,
    layers: Tensors,
    others: Tensors,
    tokens: jax.Array,
    texts: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Return the final hidden state of each token, which the output matrix turns into logits.

    A token attends only to itself and the tokens before it in the same text.

    Args:
        shape: The hyperparameters.
        layers: The stacked tensors of the layers, from `stack_layers`, and changes of factors.
        others: The other tensors.
        tokens: int32[n_rows, n_columns], as in `PackedRows`.
        texts: int32[n_rows, n_columns], the number of each token's text in its row.
        positions: int32[n_rows, n_columns], the position of each token in its text.

    Returns:
        float32[n_rows, n_columns, n_embd].
    """
    states = others["token_embd.weight"][tokens]
    if shape.architecture == "gemma3":
        states = states * math.sqrt(shape.n_embd)
    # [n_rows, n_columns of queries, n_columns of keys]
    distances = positions[:, :, None] - positions[:, None, :]
    is_same_text = texts[:, :, None] == texts[:, None, :]
    is_visible = is_same_text & (distances >= 0)
    windows = np.array([window or _NO_WINDOW for window in shape.windows], np.int32)
    frequencies = _frequencies(shape, others.get("rope_freqs.weight"))

    def apply_layer(states: jax.Array, layer_inputs: Any) -> tuple[jax.Array, None]:
        layer, window, layer_frequencies = layer_inputs
        # The same for all heads of a token: float32[n_rows, n_columns, 1, head_size / 2].
        angles = positions[:, :, None, None] * layer_frequencies
        mask = is_visible & (distances < window)
        return _layer(shape, layer, states, mask, angles), None

    # To save memory, only the outputs of matrices are stored for the backward pass. Everything
    # else is recomputed, above all the attention scores, which would take the most memory.
    apply_layer = jax.checkpoint(
        apply_layer,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )
    states, _ = jax.lax.scan(apply_layer, states, (layers, windows, frequencies))
    return _rms_norm(shape, states, others["output_norm.weight"])


def _frequencies(shape: Hyperparameters, divisors: Any) -> Any:
    """Return the angles by which RoPE rotates from one position to the next.

    Pair i of a head's components is rotated by base^(-2 i / head_size) (Su et al.,
    arXiv:2104.09864), divided by the layer's factor of linear scaling.

    Args:
        shape: The hyperparameters.
        divisors: Further divisors of the angles, float32[head_size / 2], or None.

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
    layer: Tensors,
    states: jax.Array,
    mask: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Return the hidden states after a layer: attention, then a gated feed-forward network.

    Gemma 3 also normalises the outputs of both before they are added to the states. See
    `_attention` for the shapes.
    """
    is_gemma = shape.architecture == "gemma3"
    inputs = _rms_norm(shape, states, layer["attn_norm.weight"])
    added = _attention(shape, layer, inputs, mask, angles)
    if is_gemma:
        added = _rms_norm(shape, added, layer["post_attention_norm.weight"])
    states = states + added

    inputs = _rms_norm(shape, states, layer["ffn_norm.weight"])
    gate = _linear(layer, "ffn_gate", inputs)
    gate = jax.nn.gelu(gate, approximate=True) if is_gemma else jax.nn.silu(gate)
    added = _linear(layer, "ffn_down", gate * _linear(layer, "ffn_up", inputs))
    if is_gemma:
        added = _rms_norm(shape, added, layer["post_ffw_norm.weight"])
    return states + added


def _attention(
    shape: Hyperparameters,
    layer: Tensors,
    inputs: jax.Array,
    mask: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Return the output of grouped-query attention (Ainslie et al., arXiv:2305.13245).

    The letters in the einsums: b is the row, q the column of queries, t the column of keys and
    values, k the key head, g the query head in its group, and s the component of a head.

    Args:
        shape: The hyperparameters.
        layer: The layer's tensors.
        inputs: float32[n_rows, n_columns, n_embd].
        mask: bool[n_rows, n_columns of queries, n_columns of keys], True where a token attends.
        angles: float32[n_rows, n_columns, 1, head_size / 2], the rotations of RoPE.

    Returns:
        float32[n_rows, n_columns, n_embd].
    """
    n_rows, n_columns, _ = inputs.shape

    def heads(name: str, n_heads: int) -> jax.Array:
        values = _linear(layer, name, inputs)
        return values.reshape(n_rows, n_columns, n_heads, shape.head_size)

    queries = heads("attn_q", shape.n_head)
    keys = heads("attn_k", shape.n_head_kv)
    values = heads("attn_v", shape.n_head_kv)
    if "attn_q_norm.weight" in layer:
        queries = _rms_norm(shape, queries, layer["attn_q_norm.weight"])
        keys = _rms_norm(shape, keys, layer["attn_k_norm.weight"])
    queries = _rotated(shape, queries, angles)
    keys = _rotated(shape, keys, angles)

    # Each key head serves a group of query heads.
    n_group = shape.n_head // shape.n_head_kv
    queries = queries.reshape(
        n_rows,
        n_columns,
        shape.n_head_kv,
        n_group,
        shape.head_size,
    )
    scores = jnp.einsum("bqkgs,btks->bkgqt", queries, keys) / math.sqrt(shape.head_size)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    mixed = jnp.einsum("bkgqt,btks->bqkgs", jax.nn.softmax(scores, axis=-1), values)
    return _linear(layer, "attn_output", mixed.reshape(n_rows, n_columns, -1))


def _rotated(
    shape: Hyperparameters,
    values: jax.Array,
    angles: jax.Array,
) -> jax.Array:
    """Rotate each pair of components of queries or keys (RoPE).

    In Llama's files the two components of a pair are neighbours, in others half a head apart.

    Args:
        shape: The hyperparameters.
        values: float32[n_rows, n_columns, n_heads, head_size].
        angles: float32[n_rows, n_columns, 1, head_size / 2].
    """
    if shape.architecture == "llama":
        pairs_shape = (-1, 2)
        axis = -1
    else:
        pairs_shape = (2, -1)
        axis = -2
    pairs = values.reshape(*values.shape[:-1], *pairs_shape)
    first, second = jnp.moveaxis(pairs, axis, 0)
    cosine = jnp.cos(angles)
    sine = jnp.sin(angles)
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return jnp.stack(rotated, axis).reshape(values.shape)


def _rms_norm(
    shape: Hyperparameters,
    values: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Normalise values to a root mean square of 1, and scale them by the learnt weights."""
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + shape.norm_epsilon) * weights


def _linear(
    layer: Tensors,
    name: str,
    inputs: jax.Array,
) -> jax.Array:
    """Multiply inputs by one of a layer's matrices, and add its bias if it has one.

    The blocks of a matrix in training are multiplied by their factors first.
    """
    matrix = layer[f"{name}.weight"]
    if f"{name}.factors" in layer:
        matrix = apply_changes(matrix, layer[f"{name}.factors"])
    outputs: jax.Array = inputs @ matrix.T
    if f"{name}.bias" in layer:
        outputs = outputs + layer[f"{name}.bias"]
    return outputs


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """How well a draft predicts the tokens of answers."""

    #: The share of tokens that are the draft's top guess.
    agreement: float
    #: The mean cross-entropy with the distribution over the target's likeliest tokens or, if these
    #: are unknown, with the tokens that it chose.
    loss: float


class Trainer:
    """Trains factors for the blocks of a draft's weights; a `Trainee`.

    Args:
        draft: The draft's file.
        learnt: The rows to learn from.
        judged: The held-back rows to judge on.
        available_bytes: The memory for training; infinite if the draft is only judged.

    Raises:
        ModelFileError: If the draft cannot be read, or has no matrix that can be trained.
        MemoryLimitError: If there is too little memory.
    """

    def __init__(
        self,
        draft: Path,
        learnt: PackedRows,
        judged: PackedRows,
        available_bytes: float = math.inf,
    ) -> None:
        weights = read_weights(draft)
        check_memory(draft, weights, available_bytes)
        self.file = draft
        self.learnt = learnt
        self.judged = judged
        self._shape = weights.hyperparameters
        layers, others = stack_layers(weights)
        #: The weights of the file, which do not change: the layers' stacked tensors and the others.
        self._frozen = jax.tree.map(jnp.asarray, (layers, others))
        matrices = {}
        types = {}
        for name in [f"{matrix}.weight" for matrix in LAYER_MATRICES]:
            matrices[name] = layers[name]
            types[name] = [
                weights.types[f"blk.{layer}.{name}"] for layer in range(self._shape.n_layer)
            ]
        changes = initial_changes(matrices, types)
        if not changes:
            all_types = ", ".join(sorted(set(weights.types.values())))
            raise ModelFileError(f"no matrix has scales that can be trained (types: {all_types})")
        #: The trained parameters: the factor of each block is 1 plus its change.
        self.parameters: Tensors = jax.tree.map(jnp.asarray, changes)
        self._moments: Any = _OPTIMIZER.init(self.parameters)

    @cached_property
    def before(self) -> Score:
        """The score of the weights in the file; read it before the first step."""
        return self.judge()

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        """Take a step of gradient descent on the rows with these indices."""
        rows = _on_device(self.learnt.pick(batch))
        self.parameters, self._moments = _step(
            self._shape,
            self.parameters,
            self._moments,
            self._frozen,
            rows,
            rate,
        )

    def judge(self) -> Score:
        """Return the current score on the held-back rows."""
        loss = 0.0
        n_right = 0.0
        for index in range(self.judged.n_rows):
            row = _on_device(self.judged.pick(np.array([index])))
            row_loss, row_right, _ = _sums(self._shape, self.parameters, self._frozen, row)
            loss += float(row_loss)
            n_right += float(row_right)
        n_labels = self.judged.n_labels
        return Score(n_right / n_labels, loss / n_labels)

    def loss(self) -> float:
        """Return the current loss, which is finer than the agreement."""
        return self.judge().loss


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    shape: Hyperparameters,
    changes: Any,
    moments: Any,
    frozen: Any,
    rows: Any,
    rate: float,
) -> tuple[Tensors, Any]:
    """Take a step of Adam on the mean loss of some rows, and return the changes and moments.

    Args:
        shape: The hyperparameters.
        changes: The trained parameters before the step.
        moments: Adam's moments before the step.
        frozen: The layers' stacked tensors and the others, from `stack_layers`.
        rows: The `PackedRows` to learn from.
        rate: The learning rate.
    """

    def mean_loss(changes: Tensors) -> Any:
        loss, _, n_labels = _sums(shape, changes, frozen, rows)
        return loss / n_labels

    gradients = jax.grad(mean_loss)(changes)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    return jax.tree.map(lambda old, step: old - rate * step, changes, directions), moments


@partial(jax.jit, static_argnums=0)
def _sums(
    shape: Hyperparameters,
    changes: Tensors,
    frozen: Any,
    rows: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Judge a draft on some rows; see `_step` for the arguments.

    Returns:
        The sum of the labels' losses, the number of right guesses, and the number of labels.
    """
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
    # Logits take much memory, so only those of one row exist at a time, and the backward pass
    # recomputes them.
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

    The loss of a label is the cross-entropy log(sum(exp(logits))) - wanted_logit. The latter is the
    mean of the logits under the target's distribution or, if this is unknown, the label's logit.

    Args:
        output: float32[n_vocab, n_embd], the output matrix.
        states: float32[n_columns, n_embd].
        labels: int32[n_columns], -1 where there is none.
        top_tokens: int32[n_columns, n_top], the target's likeliest tokens; `n_top` is 0 if these
            are unknown.
        top_probabilities: float32[n_columns, n_top].
    """
    logits = states @ output.T  # [n_columns, n_vocab]
    n_top = top_tokens.shape[-1]
    if n_top:  # learning the target's distribution, a draft does not overfit in a second pass
        top_logits = jnp.take_along_axis(logits, top_tokens, axis=1)
        total = jnp.maximum(top_probabilities.sum(axis=-1), 1e-6)
        wanted_logit = (top_logits * top_probabilities).sum(axis=-1) / total
    else:
        # Columns without a label read the logit of token 0, which is not used.
        wanted_logit = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - wanted_logit
    is_label = labels >= 0
    is_right = is_label & (logits.argmax(axis=-1) == labels)
    return jnp.sum(jnp.where(is_label, losses, 0.0)), jnp.sum(is_right)


def _on_device(rows: PackedRows) -> PackedRows:
    """Return rows as JAX arrays."""
    return PackedRows(*map(jnp.asarray, rows))  # type: ignore[arg-type]
