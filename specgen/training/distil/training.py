"""Trains the scales of a draft's blocks on rows of text: training steps and judgements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specgen.errors import ModelFileError
from specgen.system.atomic_files import new_beside
from specgen.training.distil import block_scales
from specgen.training.distil.gguf_weights import GgufWeights, Hyperparameters
from specgen.training.distil.training_texts import Rows
from specgen.training.distil.transformer import (
    LAYER_MATRICES,
    Parameters,
    hidden_states,
    output_matrix,
    stack_layers,
)

#: The number of rows in a step.
N_ROWS = 3
#: The longest gradient: longer ones are scaled down, so that one odd batch does not undo the others.
_MOST_GRADIENT = 1.0
#: The decay of Adam's second moment, faster than usual: there are only some hundred steps.
_SECOND_MOMENT = 0.99
_OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(_MOST_GRADIENT), optax.scale_by_adam(b2=_SECOND_MOMENT)
)


@dataclass(frozen=True, slots=True)
class Score:
    """How well a draft predicts the tokens of answers."""

    #: The share of tokens that the draft finds likeliest.
    agreement: float
    #: The mean negative log-probability of the tokens.
    loss: float


class Trainer:
    """Trains factors for the blocks of a draft's weights; the weights themselves do not change.

    Raises `ModelFileError` if no matrix has scales. `softness` is the share of the loss that is the
    cross-entropy with the target's likeliest tokens (forward KL of DistillSpec, Zhou et al.,
    arXiv:2310.08461, over these tokens alone), in rows that have them; the rest
    is the cross-entropy with the target's choice.
    """

    def __init__(self, weights: GgufWeights, *, softness: float = 0.0) -> None:
        self._softness = softness
        self._shape = weights.hyperparameters
        stacked = stack_layers(weights)
        self._frozen = jax.tree.map(jnp.asarray, (stacked.layers, stacked.others))
        names = [f"{name}.weight" for name in LAYER_MATRICES]
        order = range(self._shape.n_layer)
        start = block_scales.initial_changes(
            {name: stacked.layers[name] for name in names},
            {name: [weights.types[f"blk.{i}.{name}"] for i in order] for name in names},
        )
        if not start:
            types = ", ".join(sorted(set(weights.types.values())))
            raise ModelFileError(f"no matrix has scales that can be trained (types: {types})")
        self._changes: Parameters = jax.tree.map(jnp.asarray, start)
        self._moments: Any = _OPTIMIZER.init(self._changes)

    def step(self, rows: Rows, rate: float) -> None:
        """Take a step of Adam with the learning rate `rate` on the mean loss of some rows."""
        self._changes, self._moments = _step(
            self._shape,
            self._changes,
            self._moments,
            self._frozen,
            _arrays(rows),
            rate,
            self._softness,
        )

    def judge(self, rows: Rows) -> Score:
        """Return how well the draft with its present factors predicts the labels of rows."""
        loss = n_right = 0.0
        for index in range(len(rows)):
            row = _arrays(rows.pick(np.array([index])))
            sums = _sums(self._shape, self._changes, self._frozen, row, 0.0)
            loss, n_right = loss + float(sums[0]), n_right + float(sums[1])
        return Score(n_right / rows.n_labels, loss / rows.n_labels)

    def changes(self) -> Parameters:
        """Return a copy of the changes of the factors, with the names and shapes of
        `block_scales.initial_changes`."""
        return {name: np.array(values) for name, values in self._changes.items()}

    def save(self, path: Path, **others: Any) -> None:
        """Write the changes, the optimizer's state and other arrays to a file, whole. Raise `OSError`."""
        leaves = jax.tree.leaves((self._changes, self._moments))
        arrays: dict[str, Any] = {f"state_{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        with new_beside(path) as new:
            with new.open("wb") as file:
                np.savez(file, **arrays, **others)
            new.replace(path)

    def restore(self, saved: Any) -> None:
        """Restore the state from the arrays that `save` wrote. Raise `KeyError` or `ValueError` if they
        belong to another model."""
        leaves, structure = jax.tree.flatten((self._changes, self._moments))
        found = [saved[f"state_{index}"] for index in range(len(leaves))]
        if any(old.shape != new.shape for old, new in zip(leaves, found, strict=True)):
            raise ValueError("the saved arrays are of other shapes")
        self._changes, self._moments = jax.tree.unflatten(structure, map(jnp.asarray, found))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    shape: Hyperparameters,
    changes: Parameters,
    moments: Any,
    frozen: Any,
    rows: Any,
    rate: float,
    softness: float,
) -> tuple[Parameters, Any]:
    """Return the changes of the factors and Adam's moments after a step."""

    def mean_loss(changes: Parameters) -> jax.Array:
        loss, _, n_labels = _sums(shape, changes, frozen, rows, softness)
        mean: jax.Array = loss / n_labels
        return mean

    gradients = jax.grad(mean_loss)(changes)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    return jax.tree.map(lambda old, step: old - rate * step, changes, directions), moments


@partial(jax.jit, static_argnums=0)
def _sums(
    shape: Hyperparameters, changes: Parameters, frozen: Any, rows: Any, softness: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return three sums over the rows' labels: their losses (without softness, negative log-probabilities),
    how many are the likeliest token, and how many there are."""
    layers, others = frozen
    tokens, texts, positions, labels, top_tokens, top_probabilities = rows
    states = hidden_states(shape, {**layers, **changes}, others, tokens, texts, positions)
    output = output_matrix(others)

    def of_row(row: Any) -> tuple[jax.Array, jax.Array]:
        states, labels, top_tokens, shares = row
        logits = states @ output.T
        wanted = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        if top_tokens.shape[-1]:
            of_top = jnp.take_along_axis(logits, top_tokens, axis=1)
            mass = jnp.maximum(shares.sum(axis=-1), 1e-6)
            mean_of_top = (of_top * shares).sum(axis=-1) / mass
            wanted = (1.0 - softness) * wanted + softness * mean_of_top
        losses = jax.nn.logsumexp(logits, axis=-1) - wanted
        is_label = labels >= 0
        is_right = is_label & (logits.argmax(axis=-1) == labels)
        return jnp.sum(jnp.where(is_label, losses, 0.0)), jnp.sum(is_right)

    # One row at a time, and recomputed for the gradient: the logits of a few tokens take a megabyte.
    losses, n_right = jax.lax.map(
        jax.checkpoint(of_row), (states, labels, top_tokens, top_probabilities)
    )
    return losses.sum(), n_right.sum(), jnp.sum(labels >= 0)


def _arrays(rows: Rows) -> tuple[jax.Array, ...]:
    arrays = (
        *(rows.tokens, rows.texts, rows.positions, rows.labels),
        *(rows.top_tokens, rows.top_probabilities),
    )
    return tuple(jnp.asarray(array) for array in arrays)
