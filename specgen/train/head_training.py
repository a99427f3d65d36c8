"""Trains decoder heads on a target's own text, with JAX.

Decoder heads guess the target's next tokens from its last hidden state, with a recurrent cell (see
`specgen.llama.decoder_heads`). From a hidden state h and the embedding e of the token that was
chosen there, the cell predicts the next hidden state, and so on, a few tokens ahead:

    next h = M h + N e + c + C silu(Q h + P e + b)

Training has two stages. Ridge regression finds the linear part, M, N and c, for which little text
is enough. Then gradient descent trains everything: the cell is unrolled over several tokens, as in
the recurrent drafter of Cheng et al. (arXiv:2403.09919), and its logits are fitted to the target's
distribution, as in DistillSpec (Zhou et al., arXiv:2310.08461).
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
    MIN_TEXT,
    Budget,
    Parameters,
    Schedule,
    TrainingState,
    copied,
    train,
)

#: The number of tokens that heads can guess: the tokens in the text first, then those with the
#: lowest ids, which are frequent in most vocabularies.
N_FREQUENT = 32_768
#: The size of the inner layer (inside silu).
N_INNER = 1024
#: The number of tokens ahead that the heads are trained for.
N_AHEAD = 3
#: The weight of a token's loss, relative to the token before it.
_LOSS_DECAY = 0.8
#: The number of positions in a step.
_N_BATCH = 256
#: In each step, this many sampled tokens represent all tokens that are not in the text.
_N_SAMPLED = 2048
#: The strength of the ridge regression's penalty.
_RIDGE = 300.0
#: The number of samples that the ridge regression reads at once.
_N_RIDGE_ROWS = 4096
_MIN_LEARNT, _MIN_JUDGED = MIN_TEXT["heads"]
_OPTIMIZER = optax.scale_by_adam(b1=0.9, b2=0.98)


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Trained decoder heads, and their accuracy on held-back answers."""

    #: The weights.
    weights: HeadWeights
    #: The shares of right guesses one, two and three tokens ahead, before gradient descent.
    before: tuple[float, ...]
    #: The same shares after gradient descent.
    after: tuple[float, ...]
    #: The number of positions learnt from.
    n_samples: int
    #: The number of gradient descent steps.
    n_steps: int

    @property
    def text(self) -> str:
        """A sentence about the result."""
        shares = ", ".join(f"{share:.0%}" for share in self.after)
        return (
            f"the heads guess {shares} of held-back tokens one, two and three ahead "
            f"(trained on {self.n_samples} positions, {self.n_steps} steps)"
        )


class _TrainingSamples(NamedTuple):
    """Positions in answers, one in each row, and what followed them."""

    #: The target's hidden states at these positions: float32[n, n_embd].
    hidden: FloatArray
    #: The tokens chosen from these states, and the next N_AHEAD tokens: int32[n, 1 + N_AHEAD].
    tokens: NDArray[np.int32]
    #: The hidden states one token later: float32[n, n_embd].
    next_hidden: FloatArray
    #: The target's likeliest tokens at the next N_AHEAD positions: int32[n, N_AHEAD, N_TOP].
    top_tokens: NDArray[np.int32]
    #: The probabilities of these tokens: float32[n, N_AHEAD, N_TOP].
    top_probabilities: FloatArray


def train_heads(
    text: TargetText,
    target: Path,
    model: LlamaModel,
    output: Path,
    budget: Budget,
) -> TrainedHeads | None:
    """Train heads for a target, and write those with the most right guesses on held-back answers.

    Args:
        text: The target's own answers.
        target: The target's file.
        model: The target, loaded.
        output: The file to write.
        budget: The time that training may take.

    Returns:
        The heads and their accuracy, or None if interrupted.

    Raises:
        UsageError: If there is too little text, or the target's `n_embd` is not supported.
        ModelFileError: If the target's file or an answer's file cannot be read.
        OutputError: If `output` cannot be written.
    """
    learnt = _samples(text, held_back=False)
    judged = _samples(text, held_back=True)
    n_learnt = len(learnt.hidden)
    n_judged = len(judged.hidden)
    if n_learnt < _MIN_LEARNT or n_judged < _MIN_JUDGED:
        needed = f"{_MIN_LEARNT} and {_MIN_JUDGED}"
        raise UsageError(
            f"too few positions to learn from ({n_learnt}) or to judge by ({n_judged})",
            hint=f"give more --minutes or --prompts: heads need at least {needed}",
        )
    n_embd = learnt.hidden.shape[1]
    if n_embd % 32:  # the weights are quantised in blocks of 32
        why = f"its hidden states have {n_embd} components, which is not a multiple of 32"
        raise UsageError(f"{model.name} cannot have decoder heads: {why}")
    n_vocab = model.vocabulary.n_tokens
    trainer = _HeadTrainer(
        target,
        _frequent_tokens(text, n_vocab),
        learnt,
        judged,
        n_vocab,
    )
    accuracy_before = trainer.judge()
    state = TrainingState(-sum(accuracy_before), copied(trainer.parameters))
    schedule = Schedule(
        n_rows=n_learnt,
        n_batch=_N_BATCH,
        n_passes=3,
        rate=2e-4,
        n_rising=30,
        last_share=0.02,
        judged_every=40,
        patience=6,
    )
    if not train(trainer, state, schedule, budget):
        return None
    trainer.parameters = state.best
    weights = _weights(trainer, model)
    with write_errors(output), new_beside(output) as new:
        write_heads(new, weights)
        new.replace(output)
    return TrainedHeads(
        weights,
        accuracy_before,
        trainer.judge(),
        n_learnt,
        state.n_steps,
    )


def _samples(text: TargetText, *, held_back: bool) -> _TrainingSamples:
    """Return samples of all answers that are held back, or of all others."""
    samples_of_answers = []
    for index, answer in enumerate(text.answers):
        n = len(answer.tokens) - N_AHEAD  # the last positions have too few tokens after them
        if answer.is_held_back == held_back and n > 0:
            samples_of_answers.append(_samples_of(text, index, n))
    if not samples_of_answers:
        empty: NDArray[Any] = np.empty((0, 0), np.float32)
        return _TrainingSamples(empty, empty, empty, empty, empty)
    # Concatenate field by field.
    return _TrainingSamples(*map(np.concatenate, zip(*samples_of_answers, strict=True)))


def _samples_of(
    text: TargetText,
    index: int,
    n: int,
) -> _TrainingSamples:
    """Return samples of the first `n` positions of `text.answers[index]`."""
    hidden = text.hidden(index).astype(np.float32)
    tokens = np.array(text.answers[index].tokens, np.int32)
    top_tokens, top_probabilities = text.top(index)

    def ahead(values: NDArray[Any], first: int) -> NDArray[Any]:
        """Return, for each position, the values from `first` to N_AHEAD positions later."""
        return np.stack([values[k : k + n] for k in range(first, 1 + N_AHEAD)], axis=1)

    return _TrainingSamples(
        hidden=hidden[:n],
        tokens=ahead(tokens, 0),
        next_hidden=hidden[1 : 1 + n],
        top_tokens=ahead(top_tokens, 1),
        top_probabilities=ahead(top_probabilities, 1).astype(np.float32),
    )


def _frequent_tokens(text: TargetText, n_vocab: int) -> NDArray[np.int32]:
    """Return the tokens that heads can guess, int32[N_FREQUENT], in ascending order."""
    learnt_answers = (answer.tokens for answer in text.answers if not answer.is_held_back)
    counts = Counter(chain.from_iterable(learnt_answers))
    text_tokens = [token for token, _ in counts.most_common(N_FREQUENT)]
    other_tokens = np.setdiff1d(np.arange(n_vocab), text_tokens)  # in ascending order
    n_missing = N_FREQUENT - len(text_tokens)
    return np.sort([*text_tokens, *other_tokens[:n_missing]]).astype(np.int32)


class _StepInputs(NamedTuple):
    """The inputs of a gradient descent step: `n` positions, and the candidates for their tokens.

    The softmax covers only the candidates, which are all tokens in the text and a sample of the
    others (sampled softmax, Jean et al., arXiv:1412.2007). Over the whole vocabulary, it would take
    most of the time.
    """

    #: The hidden states to start from: float32[n, n_embd].
    hidden: FloatArray
    #: The embeddings of the tokens chosen there and later: float32[n, N_AHEAD, n_embd].
    embeddings: FloatArray
    #: The candidates' rows of the output matrix: float32[n_candidates, n_embd].
    output: FloatArray
    #: Added to the candidates' logits: float32[n_candidates].
    bias: FloatArray
    #: The target's likeliest tokens as indices into the candidates, 0 for a token that is not a
    #: candidate: int64[n, N_AHEAD, N_TOP].
    top_candidates: NDArray[np.int64]
    #: Their probabilities, 0 for a token that is not a candidate: float32[n, N_AHEAD, N_TOP].
    top_probabilities: FloatArray


class _HeadTrainer:
    """Decoder heads in training; a `Trainee`.

    Args:
        target: The target's file.
        tokens: The frequent tokens, which the heads can guess, in ascending order.
        learnt: The samples to learn from. Their states are scaled in place.
        judged: The samples of held-back answers. Their states are scaled in place.
        n_vocab: The size of the target's vocabulary.
    """

    def __init__(
        self,
        target: Path,
        tokens: NDArray[np.int32],
        learnt: _TrainingSamples,
        judged: _TrainingSamples,
        n_vocab: int,
    ) -> None:
        self._rng = np.random.default_rng(0)
        self._learnt = learnt
        self._judged = judged
        self.tokens = tokens
        #: The factor that gives hidden states a mean square of 1.
        self.scale = float(1.0 / np.sqrt(np.square(learnt.hidden).mean()))
        # All states that are used: judging does not need `judged.next_hidden`.
        for states in (learnt.hidden, learnt.next_hidden, judged.hidden):
            np.multiply(states, np.float32(self.scale), out=states)
        #: The index of each token of the vocabulary in `tokens`; -1 if it is not frequent.
        self._index = np.full(n_vocab, -1, np.int64)
        self._index[tokens] = np.arange(len(tokens))
        embeddings, output = model_rows(target, tokens)
        embeddings /= np.sqrt(np.square(embeddings).mean())
        #: The embeddings of the frequent tokens, with a mean square of 1. The last row, their mean,
        #: represents all other tokens, whose index is -1.
        self.embeddings: FloatArray = np.concatenate(
            [embeddings, embeddings.mean(axis=0, keepdims=True)]
        )
        #: The output matrix for scaled states (V in `decoder_heads`).
        self.output: FloatArray = output / np.float32(self.scale)
        text_indices = self._index[np.unique(learnt.tokens)]
        #: The indices of the frequent tokens that are in the text.
        self._in_text = text_indices[text_indices >= 0]
        #: The indices of the frequent tokens that are not in the text.
        self._not_in_text = np.setdiff1d(np.arange(len(tokens)), self._in_text)
        #: The parameters of the cell; its matrices are transposed, since vectors are rows here.
        self.parameters = self._initial_parameters()
        self._moments: Any = _OPTIMIZER.init(self.parameters)

    def _initial_parameters(self) -> Parameters:
        """Return the linear map that ridge regression finds, and a random inner layer."""
        n_embd = self._learnt.hidden.shape[1]
        linear = self._linear_map()
        # Scaled so that the inner layer's inputs have a variance of about 1.
        inner = self._rng.normal(0.0, (2 * n_embd) ** -0.5, (2 * n_embd, N_INNER))
        return {
            "M": linear[:n_embd],
            "N": linear[n_embd:-1],
            "c": linear[-1],
            "Q": inner[:n_embd].astype(np.float32),
            "P": inner[n_embd:].astype(np.float32),
            "b": np.zeros(N_INNER, np.float32),
            "C": np.zeros((N_INNER, n_embd), np.float32),  # the inner layer has no effect yet
        }

    def _linear_map(self) -> FloatArray:
        """Fit the linear map from (state, embedding, 1) to the next state by ridge regression.

        With inputs X, outputs Y and the identity I, the map is (X'X + ridge I)^-1 X'Y.

        Returns:
            float32[2 n_embd + 1, n_embd].
        """
        learnt = self._learnt
        n_embd = learnt.hidden.shape[1]
        n_inputs = 2 * n_embd + 1
        gram = np.zeros((n_inputs, n_inputs), np.float64)  # X'X
        products = np.zeros((n_inputs, n_embd), np.float64)  # X'Y
        for start in range(0, len(learnt.hidden), _N_RIDGE_ROWS):
            part = slice(start, start + _N_RIDGE_ROWS)
            hidden = learnt.hidden[part]
            embeddings = self._embedded(learnt.tokens[part, 0])
            ones = np.ones((len(hidden), 1), np.float32)
            inputs = np.concatenate([hidden, embeddings, ones], axis=1)
            gram += inputs.T @ inputs
            products += inputs.T @ learnt.next_hidden[part]
        gram += _RIDGE * np.eye(n_inputs)
        return np.linalg.solve(gram, products).astype(np.float32)

    def step(self, batch: NDArray[np.int64], rate: float) -> None:
        """Take a step of gradient descent on the samples with these indices."""
        learnt = self._learnt
        candidates, bias = self._sampled_candidates()

        # The position of each frequent token in `candidates`, -1 if it is not a candidate. The
        # extra last element, which index -1 refers to, stays -1: for tokens that are not frequent.
        positions = np.full(len(self.tokens) + 1, -1, np.int64)
        positions[candidates] = np.arange(len(candidates))
        top = positions[self._index[learnt.top_tokens[batch]]]
        # The probabilities of those that are candidates, normalised to a sum of 1.
        shares = np.where(top >= 0, learnt.top_probabilities[batch], np.float32(0.0))
        shares /= np.maximum(shares.sum(axis=2, keepdims=True), 1e-6)

        inputs = _StepInputs(
            hidden=learnt.hidden[batch],
            embeddings=self._embedded(learnt.tokens[batch, :N_AHEAD]),
            output=self.output[candidates],
            bias=bias,
            top_candidates=np.maximum(top, 0),
            top_probabilities=shares,
        )
        self.parameters, self._moments = _descend(self.parameters, self._moments, inputs, rate)

    def _sampled_candidates(self) -> tuple[NDArray[np.int64], FloatArray]:
        """Sample the candidates of a step: all tokens in the text, and some of the others.

        A sampled token represents all those that were not sampled: if one in four is sampled, it
        counts four times in the softmax's denominator, so log(4) is added to its logit.

        Returns:
            The candidates as indices of frequent tokens, int64[n_candidates], and the bias of their
            logits, float32[n_candidates].
        """
        n_in_text = len(self._in_text)
        n_not_in_text = len(self._not_in_text)
        n_sampled = min(_N_SAMPLED, n_not_in_text)
        sampled = self._rng.choice(self._not_in_text, n_sampled, replace=False)
        candidates = np.concatenate([self._in_text, sampled])
        bias = np.zeros(len(candidates), np.float32)
        if n_sampled:
            bias[n_in_text:] = np.log(n_not_in_text / n_sampled)
        return candidates, bias

    def loss(self) -> float:
        """Return minus the number of right guesses per position, so that less is better."""
        return -sum(self.judge())

    def judge(self) -> tuple[float, ...]:
        """Return the accuracy on held-back answers.

        Returns:
            The shares of right guesses one, two, ... N_AHEAD tokens ahead.
        """
        judged = self._judged
        n_positions = len(judged.hidden)
        n_right = np.zeros(N_AHEAD)
        for start in range(0, n_positions, _N_BATCH):
            part = slice(start, start + _N_BATCH)
            state: Any = judged.hidden[part]
            # The cell reads the tokens that the target chose, and should guess the next one.
            for ahead in range(N_AHEAD):
                embedded = self._embedded(judged.tokens[part, ahead])
                state = advance(self.parameters, state, embedded)
                guesses = (np.asarray(state) @ self.output.T).argmax(axis=1)
                # Never right for a token that is not frequent, whose index is -1.
                expected = self._index[judged.tokens[part, ahead + 1]]
                n_right[ahead] += (guesses == expected).sum()
        return tuple((n_right / n_positions).tolist())

    def _embedded(self, tokens: NDArray[np.int32]) -> FloatArray:
        """Return the embeddings of tokens, float32[..., n_embd].

        Tokens that are not frequent have the index -1, which refers to the last row.
        """
        rows: FloatArray = self.embeddings[self._index[tokens]]
        return rows


@jax.jit
def advance(
    parameters: Any,
    state: Any,
    embedded: Any,
) -> jax.Array:
    """Apply the cell: predict hidden states one token later (see the module's formula).

    Args:
        parameters: The matrices and biases of the cell, by their names in the formula.
        state: float32[n, n_embd], the hidden states.
        embedded: float32[n, n_embd], the embeddings of the tokens chosen there.

    Returns:
        float32[n, n_embd].
    """
    p = parameters
    inner = jax.nn.silu(state @ p["Q"] + embedded @ p["P"] + p["b"])
    next_state: jax.Array = state @ p["M"] + embedded @ p["N"] + p["c"] + inner @ p["C"]
    return next_state


@partial(jax.jit, donate_argnums=(0, 1))
def _descend(
    parameters: Any,
    moments: Any,
    inputs: _StepInputs,
    rate: float,
) -> tuple[Any, Any]:
    """Return the parameters and Adam's moments after a step.

    The loss is the cross-entropy between the target's distribution, approximated by its likeliest
    tokens, and the heads' distribution, summed over the tokens ahead with falling weights.
    """

    def loss(parameters: Any) -> jax.Array:
        total = jnp.zeros(())
        state: Any = inputs.hidden
        for ahead in range(N_AHEAD):
            state = advance(parameters, state, inputs.embeddings[:, ahead])
            logits = state @ inputs.output.T + inputs.bias  # [n, n_candidates]
            top_logits = jnp.take_along_axis(logits, inputs.top_candidates[:, ahead], axis=1)
            # They add up to 1, or to 0 where no likely token is a candidate: the loss is then 0.
            shares = inputs.top_probabilities[:, ahead]
            mean_top_logit = (shares * top_logits).sum(axis=1)
            losses = shares.sum(axis=1) * jax.nn.logsumexp(logits, axis=1) - mean_top_logit
            total += _LOSS_DECAY**ahead * losses.mean()
        return total

    directions, moments = _OPTIMIZER.update(jax.grad(loss)(parameters), moments)
    parameters = jax.tree.map(lambda old, change: old - rate * change, parameters, directions)
    return parameters, moments


def _weights(trainer: _HeadTrainer, model: LlamaModel) -> HeadWeights:
    """Return the quantised weights; matrices are transposed back, and stacked by their input."""
    p = trainer.parameters
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
