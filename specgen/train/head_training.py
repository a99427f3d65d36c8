"""Decoder heads trained on a target's own text, with JAX.

Ridge regression finds a linear map to the target's next hidden state: little text suffices. Then
gradient descent minimises the cross-entropy with the target's own distribution, several tokens
ahead. (Distillation as in DistillSpec, Zhou et al., arXiv:2310.08461; unrolled as in a recurrent
drafter, Cheng et al., arXiv:2403.09919.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.decoder_heads import HeadWeights, write_heads
from specgen.llama.decoder_heads import quantize_part as quantized
from specgen.llama.operators import FloatArray
from specgen.system.files import new_beside, write_errors
from specgen.train.gguf_weights import model_rows
from specgen.train.target_text import TargetText
from specgen.train.training_loop import (
    LEAST_TEXT,
    Budget,
    Parameters,
    Schedule,
    TrainingState,
    train,
)

#: The number of tokens that heads can guess: those of the text, then low ids, which are frequent.
N_FREQUENT = 32_768
#: The size of the inner layer (inside silu), and the number of tokens ahead that the heads are
#: trained for.
N_INNER, N_AHEAD = 1024, 3
#: The weight of a token's loss, relative to the token before it; tokens in a step.
_FADING, _N_BATCH = 0.8, 256
#: Tokens that the text lacks are sampled: this many stand for all of them in a step.
_N_OTHERS = 2048
_RIDGE = 300.0
_LEAST_SAMPLES, _LEAST_JUDGED = LEAST_TEXT["heads"]
_OPTIMIZER = optax.scale_by_adam(b1=0.9, b2=0.98)


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Heads, and the shares of held-back places where they are right, one and more tokens ahead."""

    weights: HeadWeights
    before: tuple[float, ...]
    after: tuple[float, ...]
    n_samples: int
    n_steps: int

    @property
    def text(self) -> str:
        first = ", ".join(f"{share:.2f}" for share in self.after)
        return (
            f"on held-back answers the heads' guess is right for {first} of the tokens one, two and three ahead "
            f"({self.n_samples} places learnt from, {self.n_steps} steps)"
        )


class _Samples(NamedTuple):
    """Rows of a hidden state, the token chosen from it and the next ones, the next state, and
    likely tokens later.
    """

    hidden: FloatArray  # [n, n_embd]
    tokens: NDArray[np.int32]  # [n, 1 + N_AHEAD]
    next_hidden: FloatArray  # [n, n_embd]
    top_tokens: NDArray[np.int32]  # [n, N_AHEAD, N_TOP]
    top_probabilities: FloatArray  # [n, N_AHEAD, N_TOP]


def train_heads(
    text: TargetText, target: Path, model: LlamaModel, output: Path, budget: Budget
) -> TrainedHeads | None:
    """Train heads for `model` on its own text, and write those that agreed best on held-back
    answers; None if interrupted. Raise `UsageError` for too little text or a wrong `n_embd`,
    `ModelFileError`, `OutputError`.
    """
    learnt, judged = _samples(text, held_back=False), _samples(text, held_back=True)
    n_learnt, n_judged = len(learnt.hidden), len(judged.hidden)
    if n_learnt < _LEAST_SAMPLES or n_judged < _LEAST_JUDGED:
        raise UsageError(
            f"{n_learnt} places to learn from and {n_judged} to judge by: too few",
            hint=f"give more --minutes or --prompts: heads need {_LEAST_SAMPLES} and {_LEAST_JUDGED}",
        )
    n_embd, n_vocab = learnt.hidden.shape[1], model.vocabulary.n_tokens
    if n_embd % 32:
        why = f"has hidden states of {n_embd}: decoder heads need a multiple of 32"
        raise UsageError(f"{model.name} {why}")
    trainer = _Trainer(target, _frequent(text, n_vocab), learnt, judged, n_vocab)
    before = trainer.judge()
    state = TrainingState(-sum(before), trainer.copied())
    schedule = Schedule(
        n_learnt, _N_BATCH, 3, 2e-4, 30, last_share=0.02, judged_every=40, patience=6
    )
    if not train(trainer, state, schedule, budget):
        return None
    trainer.parameters = state.best
    weights = _weights(state.best, trainer, model)
    with write_errors(output), new_beside(output) as new:
        write_heads(new, weights)
        new.replace(output)
    return TrainedHeads(weights, before, trainer.judge(), n_learnt, state.n_steps)


def _samples(text: TargetText, *, held_back: bool) -> _Samples:
    none: NDArray[Any] = np.empty((0, 0), np.float32)
    found = [_Samples(none, none, none, none, none)]
    ahead = range(1, 1 + N_AHEAD)
    for index, answer in enumerate(text.answers):
        n = len(answer.tokens) - N_AHEAD
        if answer.is_held_back == held_back and n > 0:
            states, own = text.hidden(index).astype(np.float32), np.array(answer.tokens, np.int32)
            likely, shares = (
                np.stack([each[k : k + n] for k in ahead], axis=1) for each in text.top(index)
            )
            tokens = np.stack([own[k : k + n] for k in (0, *ahead)], axis=1)
            of_top: Any = likely, shares.astype(np.float32)
            found.append(_Samples(states[:n], tokens, states[1 : 1 + n], *of_top))
    return _Samples(*map(np.concatenate, zip(*found[1:], strict=True))) if found[1:] else found[0]


def _frequent(text: TargetText, n_vocab: int) -> NDArray[np.int32]:
    learnt = (answer.tokens for answer in text.answers if not answer.is_held_back)
    usual = [token for token, _ in Counter(chain.from_iterable(learnt)).most_common(N_FREQUENT)]
    others = np.setdiff1d(np.arange(n_vocab), usual)
    return np.sort([*usual, *others[: N_FREQUENT - len(usual)]]).astype(np.int32)


class _Trainer:
    def __init__(
        self,
        target: Path,
        tokens: NDArray[np.int32],
        learnt: _Samples,
        judged: _Samples,
        n_vocab: int,
    ) -> None:
        self._rng = np.random.default_rng(0)
        self.tokens = tokens
        #: It brings hidden states to a mean square of 1; those of the samples are scaled in place.
        self.scale = float(1.0 / np.sqrt(np.square(learnt.hidden).mean()))
        self._learnt, self._judged = learnt, judged
        for states in (learnt.hidden, learnt.next_hidden, judged.hidden):
            np.multiply(states, np.float32(self.scale), out=states)
        #: Each token's index among the frequent ones; -1 for the others.
        self._index = np.full(n_vocab, -1, np.int64)
        self._index[tokens] = np.arange(len(tokens))
        own, output = model_rows(target, tokens)
        own /= np.sqrt(np.square(own).mean())
        #: The embeddings of the frequent tokens at one scale, and a last row, their mean, for all
        #: others.
        self.embeddings: FloatArray = np.concatenate([own, own.mean(axis=0, keepdims=True)])
        #: The output matrix for scaled states (V in `decoder_heads`).
        self.output: FloatArray = output / np.float32(self.scale)
        seen = self._index[np.unique(learnt.tokens)]
        #: The frequent tokens of the text, and those that are not in it.
        self._own = seen[seen >= 0]
        self._others = np.setdiff1d(np.arange(len(tokens)), self._own)
        n_embd = learnt.hidden.shape[1]
        linear = self._linear_map()
        inner = self._rng.normal(0.0, (2 * n_embd) ** -0.5, (2 * n_embd, N_INNER))
        #: The cell with rows as vectors: M, N, c; Q, P, b; C. At first the linear map is all.
        self.parameters: Parameters = {
            "M": linear[:n_embd],
            "N": linear[n_embd:-1],
            "c": linear[-1],
            "Q": inner[:n_embd].astype(np.float32),
            "P": inner[n_embd:].astype(np.float32),
            "b": np.zeros(N_INNER, np.float32),
            "C": np.zeros((N_INNER, n_embd), np.float32),
        }
        self._moments: Any = _OPTIMIZER.init(self.parameters)

    def copied(self) -> Parameters:
        return {name: np.array(values) for name, values in self.parameters.items()}

    def _linear_map(self) -> FloatArray:
        """Fit the linear map of (state, embedding, 1) to the next state: float32[2 n_embd + 1,
        n_embd].
        """
        learnt = self._learnt
        n_embd = learnt.hidden.shape[1]
        gram = np.zeros((2 * n_embd + 1, 2 * n_embd + 1), np.float64)
        products = np.zeros((2 * n_embd + 1, n_embd), np.float64)
        for start in range(0, len(learnt.hidden), 4096):
            part = slice(start, start + 4096)
            hidden = learnt.hidden[part]
            ones = np.ones((len(hidden), 1), np.float32)
            inputs = np.concatenate([hidden, self._embedded(learnt.tokens[part, 0]), ones], axis=1)
            gram += inputs.T @ inputs
            products += inputs.T @ learnt.next_hidden[part]
        gram += _RIDGE * np.eye(len(gram))
        return np.linalg.solve(gram, products).astype(np.float32)

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        learnt = self._learnt
        n_others = min(_N_OTHERS, len(self._others))
        others = self._rng.choice(self._others, n_others, replace=False)
        candidates = np.concatenate([self._own, others])
        column = np.full(len(self.tokens) + 1, -1, np.int64)  # the last: of all other tokens
        column[candidates] = np.arange(len(candidates))
        # The sampled tokens stand for all tokens that the text lacks.
        bias = np.zeros(len(candidates), np.float32)
        if n_others:
            bias[len(self._own) :] = np.log(len(self._others) / n_others)
        columns = column[self._index[learnt.top_tokens[batch]]]
        shares = np.where(columns >= 0, learnt.top_probabilities[batch], np.float32(0.0))
        shares /= np.maximum(shares.sum(axis=2, keepdims=True), 1e-6)
        states = learnt.hidden[batch], self._embedded(learnt.tokens[batch, :N_AHEAD])
        output, wanted = (self.output[candidates], bias), (np.maximum(columns, 0), shares)
        own = self.parameters, self._moments
        self.parameters, self._moments = _step(*own, states, output, wanted, rate)

    def loss(self) -> float:
        return -sum(self.judge())

    def judge(self) -> tuple[float, ...]:
        judged, n = self._judged, len(self._judged.hidden)
        right = np.zeros(N_AHEAD)
        for start in range(0, n, _N_BATCH):
            part = slice(start, start + _N_BATCH)
            state: Any = judged.hidden[part]
            for k in range(N_AHEAD):
                state = advance(self.parameters, state, self._embedded(judged.tokens[part, k]))
                logits = np.asarray(state) @ self.output.T
                expected = self._index[judged.tokens[part, k + 1]]
                right[k] += (logits.argmax(axis=1) == expected).sum()
        return tuple((right / n).tolist())

    def _embedded(self, tokens: NDArray[np.int32]) -> FloatArray:
        rows: FloatArray = self.embeddings[self._index[tokens]]  # -1: the last row
        return rows


@jax.jit
def advance(parameters: Any, state: Any, embedded: Any) -> jax.Array:
    p = parameters
    inner = jax.nn.silu(state @ p["Q"] + embedded @ p["P"] + p["b"])
    found: jax.Array = state @ p["M"] + embedded @ p["N"] + p["c"] + inner @ p["C"]
    return found


@partial(jax.jit, donate_argnums=(0, 1))
def _step(
    parameters: Any, moments: Any, states: Any, output: Any, wanted: Any, rate: float
) -> tuple[Any, Any]:
    """Return parameters and moments after a step, from hidden states and embeddings ahead,
    float32[n, N_AHEAD, n_embd], an `output` matrix and bias, and the `wanted` shares of columns at
    each place ahead, [n, N_AHEAD, n_top].
    """
    (state, embedded), (matrix, bias), (columns, shares) = states, output, wanted

    def loss(parameters: Any) -> jax.Array:
        total, ahead = jnp.zeros(()), state
        for k in range(N_AHEAD):
            ahead = advance(parameters, ahead, embedded[:, k])
            logits = ahead @ matrix.T + bias
            likely = jnp.take_along_axis(logits, columns[:, k], axis=1)
            is_known = shares[:, k].sum(axis=1)  # 0 where no likely token is among the candidates
            mean_of_wanted = (shares[:, k] * likely).sum(axis=1)
            losses = is_known * jax.nn.logsumexp(logits, axis=1) - mean_of_wanted
            total += _FADING**k * losses.mean()
        return total

    directions, moments = _OPTIMIZER.update(jax.grad(loss)(parameters), moments)
    return jax.tree.map(lambda old, step: old - rate * step, parameters, directions), moments


def _weights(parameters: Parameters, trainer: _Trainer, model: LlamaModel) -> HeadWeights:
    p = parameters
    return HeadWeights(
        target=model.name,
        n_embd=p["M"].shape[0],
        n_vocab=model.vocabulary.n_tokens,
        vocabulary=model.vocabulary.digest(),
        scale=trainer.scale,
        tokens=trainer.tokens,
        of_state=quantized(np.concatenate([p["M"].T, p["Q"].T]), "of_state"),
        of_token=quantized(np.concatenate([p["N"].T, p["P"].T]), "of_token"),
        bias=np.concatenate([p["c"], p["b"]]),
        of_inner=quantized(np.ascontiguousarray(p["C"].T), "of_inner"),
        embeddings=quantized(trainer.embeddings, "embeddings"),
        output=quantized(trainer.output, "output"),
    )
