"""Decoder heads trained on a target's own text, with NumPy.

`specgen.llama.decoder_heads` describes what heads compute. Training has two steps. Ridge regression finds a
linear map to the target's next hidden state; each position gives as many numbers to learn from as a hidden
state has, so little text suffices. Then gradient descent minimises the cross-entropy with the target's own
distribution, several tokens ahead. (Distillation as in DistillSpec, Zhou et al., arXiv:2310.08461; unrolled
as in training a recurrent drafter, Cheng et al., arXiv:2403.09919.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.decoder_heads import HeadWeights, matrix
from specgen.llama.operators import FloatArray
from specgen.train.gguf_weights import ModelRows
from specgen.train.target_text import N_TOP, TargetText
from specgen.train.training_loop import Budget, Parameters, Schedule, TrainingState, train

_ONE = np.float32(1.0)

#: The number of tokens that heads can guess: first those of the text, then those with the lowest ids, since
#: tokenizers give low ids to frequent tokens. (In the 1.5B's held-back answers 8,192 tokens cover 0.86 of the
#: positions, 32,768 cover 0.96.)
N_FREQUENT = 32_768
#: The size of the inner layer (inside silu), and the number of tokens ahead that the heads are trained for.
N_INNER = 1024
N_AHEAD = 3
#: The weight of a token's loss, relative to the token before it.
_FADING = 0.8
#: Tokens in a step, the most passes over the text, and the learning rate: it rises in so many steps, and falls
#: to this share of its peak.
_N_BATCH = 256
_N_PASSES = 3
_RATE = 2e-4
_N_RISING = 30
_LAST_SHARE = 0.02
#: The decay of Adam's moments.
_BETAS = (0.9, 0.98)
#: Tokens that the text lacks are sampled: this many stand for all of them in a step.
_N_OTHERS = 2048
_RIDGE = 300.0
#: The fewest tokens to learn from, and to judge by.
_LEAST_SAMPLES = 8 * _N_BATCH
_LEAST_JUDGED = 100
#: Steps between judgements.
_JUDGED_EVERY = 40
#: Judgements without a better one after which training ends.
_PATIENCE = 6


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often heads predict the target's token on held-back answers.

    Item k is for the token k + 1 positions ahead, given the right tokens before it: `top_1` counts the
    likeliest token, `top_4` the four likeliest."""

    top_1: tuple[float, ...]
    top_4: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Heads, their agreement with the target, and the amount of training."""

    weights: HeadWeights
    #: The agreement of the linear map alone, and after training.
    before: Agreement
    after: Agreement
    n_samples: int
    n_steps: int


@dataclass(frozen=True, slots=True)
class _Samples:
    """Tokens of texts. Row i has the hidden state from which the target chose a token, this token with the
    next ones, and the target's distribution for each of the next ones."""

    #: float32[n, n_embd], int32[n, 1 + N_AHEAD].
    hidden: FloatArray
    tokens: NDArray[np.int32]
    #: The next hidden state: float32[n, n_embd].
    next_hidden: FloatArray
    #: The likeliest tokens at later positions: int32[n, N_AHEAD, N_TOP], float32[n, N_AHEAD, N_TOP].
    top_tokens: NDArray[np.int32]
    top_probabilities: FloatArray

    def __len__(self) -> int:
        return len(self.hidden)


def train_heads(
    text: TargetText, target: Path, model: LlamaModel, budget: Budget
) -> TrainedHeads | None:
    """Train heads for `model`, whose file is `target`, on the text that it wrote; None if interrupted.

    The result has the weights that agreed best on the held-back answers. Raises `UsageError` if the
    text is too short or `n_embd` is no multiple of 32, `ModelFileError` if the target's file is damaged.
    """
    learnt, judged = _samples(text, held_back=False), _samples(text, held_back=True)
    if len(learnt) < _LEAST_SAMPLES or len(judged) < _LEAST_JUDGED:
        raise UsageError(
            f"{len(learnt)} places to learn from and {len(judged)} to judge by: too few",
            hint=f"give more --minutes or --prompts: heads need {_LEAST_SAMPLES} and {_LEAST_JUDGED}",
        )
    n_embd, n_vocab = learnt.hidden.shape[1], model.vocabulary.n_tokens
    if n_embd % 32:
        raise UsageError(
            f"{model.name} has hidden states of {n_embd}: decoder heads need a multiple of 32"
        )
    task = _Task(ModelRows(target), _frequent(text, n_vocab), learnt, judged, n_vocab)
    network = Network(task.linear_map(), n_embd, N_INNER, task.rng)
    optimizer = Adam(network.parameters)
    before = task.judge(network)
    state = TrainingState(-sum(before.top_1), network.copied())
    schedule = Schedule(
        len(learnt),
        _N_BATCH,
        _N_PASSES,
        _RATE,
        n_rising=_N_RISING,
        last_share=_LAST_SHARE,
        judged_every=_JUDGED_EVERY,
        patience=_PATIENCE,
    )
    is_whole = train(
        state,
        schedule,
        budget,
        step=lambda batch, rate: optimizer.step(task.gradients(network, batch), rate),
        loss=lambda: -sum(task.judge(network).top_1),
        parameters=network.copied,
    )
    if not is_whole:
        return None
    network.parameters.update(state.best)
    weights = _weights(network.parameters, task, model)
    return TrainedHeads(weights, before, task.judge(network), len(learnt), state.n_steps)


def _samples(text: TargetText, *, held_back: bool) -> _Samples:
    """Return the tokens with N_AHEAD tokens behind them, of the answers that are held back or of the others."""
    columns: list[list[NDArray[Any]]] = [[], [], [], [], []]
    ahead = range(1, 1 + N_AHEAD)
    for index, answer in enumerate(text.answers):
        n = len(answer.tokens) - N_AHEAD
        if answer.is_held_back != held_back or n < 1:
            continue
        states, own = text.hidden(index).astype(np.float32), np.array(answer.tokens, np.int32)
        of_answer = (
            states[:n],
            np.stack([own[k : k + n] for k in (0, *ahead)], axis=1),
            states[1 : 1 + n],
            *(np.stack([top[k : k + n] for k in ahead], axis=1) for top in text.top(index)),
        )
        for column, values in zip(columns, of_answer, strict=True):
            column.append(values)
    if not columns[0]:
        none: NDArray[Any] = np.empty((0, 0), np.float32)
        return _Samples(none, none, none, none, none)
    hidden, tokens, behind, top_tokens, probabilities = map(np.concatenate, columns)
    return _Samples(hidden, tokens, behind, top_tokens, probabilities.astype(np.float32))


def _frequent(text: TargetText, n_vocab: int) -> NDArray[np.int32]:
    """Return the ids of the tokens to guess, increasing."""
    counts = Counter(
        token for answer in text.answers if not answer.is_held_back for token in answer.tokens
    )
    tokens = {token for token, _ in counts.most_common(N_FREQUENT)}
    for token in range(n_vocab):
        if len(tokens) >= N_FREQUENT:
            break
        tokens.add(token)
    return np.array(sorted(tokens), np.int32)


class _Task:
    """The training data, gradients on it, and the agreement on held-back positions."""

    def __init__(
        self,
        rows: ModelRows,
        tokens: NDArray[np.int32],
        learnt: _Samples,
        judged: _Samples,
        n_vocab: int,
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.tokens = tokens
        #: It brings hidden states to a mean square of 1.
        self.scale = scale = float(1.0 / np.sqrt(np.square(learnt.hidden).mean()))
        self._learnt, self._judged = learnt, judged
        #: Each token's index among the frequent ones; -1 for the others.
        self._index = np.full(n_vocab, -1, np.int64)
        self._index[tokens] = np.arange(len(tokens))
        self.embeddings = _with_others(rows.embeddings(tokens))
        #: The output matrix for scaled states (V in `decoder_heads`).
        self.output = rows.output(tokens) / np.float32(scale)
        seen = self._index[np.unique(learnt.tokens)]
        #: The frequent tokens of the text, and those that are not in it.
        self._own = seen[seen >= 0]
        self._others = np.setdiff1d(np.arange(len(tokens)), self._own)

    def linear_map(self) -> FloatArray:
        """Fit the linear map of (state, embedding, 1) to the next state by ridge regression: float32[2
        n_embd + 1, n_embd]."""
        learnt = self._learnt
        n_embd = learnt.hidden.shape[1]
        gram = np.zeros((2 * n_embd + 1, 2 * n_embd + 1), np.float64)
        products = np.zeros((2 * n_embd + 1, n_embd), np.float64)
        for start in range(0, len(learnt), 4096):
            part = slice(start, start + 4096)
            hidden = learnt.hidden[part] * np.float32(self.scale)
            ones = np.ones((len(hidden), 1), np.float32)
            inputs = np.concatenate([hidden, self._embedded(learnt.tokens[part, 0]), ones], axis=1)
            gram += inputs.T @ inputs
            products += inputs.T @ (learnt.next_hidden[part] * np.float32(self.scale))
        gram += _RIDGE * np.eye(len(gram))
        return np.linalg.solve(gram, products).astype(np.float32)

    def gradients(self, network: Network, batch: NDArray[np.int64]) -> Parameters:
        """Return the gradients of the cross-entropy with the target's distribution at the positions
        `batch`."""
        learnt = self._learnt
        n = len(batch)
        n_others = min(_N_OTHERS, len(self._others))
        others = self.rng.choice(self._others, n_others, replace=False)
        candidates = np.concatenate([self._own, others])
        column = np.full(len(self.tokens), -1, np.int64)
        column[candidates] = np.arange(len(candidates))
        output = self.output[candidates]
        # The sampled tokens stand for all tokens that the text lacks.
        bias = np.zeros(len(candidates), np.float32)
        if n_others:
            bias[len(self._own) :] = np.log(len(self._others) / n_others)
        state = learnt.hidden[batch] * np.float32(self.scale)
        passes, losses = [], []
        for k in range(N_AHEAD):
            forward = network.forward(state, self._embedded(learnt.tokens[batch, k]))
            state = forward.result
            errors = _softmax(state @ output.T + bias)
            likeliest = self._index[learnt.top_tokens[batch, k]]
            likeliest = np.where(likeliest >= 0, column[likeliest], -1)
            wanted = np.where(likeliest >= 0, learnt.top_probabilities[batch, k], np.float32(0.0))
            mass = wanted.sum(axis=1, keepdims=True)
            wanted = wanted / np.maximum(mass, 1e-6)
            errors *= mass > 0.0
            is_there = likeliest >= 0
            row_of = np.repeat(np.arange(n)[:, None], N_TOP, axis=1)
            np.subtract.at(errors, (row_of[is_there], likeliest[is_there]), wanted[is_there])
            losses.append((errors @ output) * np.float32(_FADING**k / n))
            passes.append(forward)
        return network.backward(passes, losses)

    def judge(self, network: Network) -> Agreement:
        """Measure how often the network predicts the target's token at held-back positions, given the
        tokens before."""
        judged = self._judged
        right = np.zeros(N_AHEAD)
        among = np.zeros(N_AHEAD)
        for start in range(0, len(judged), _N_BATCH):
            part = slice(start, start + _N_BATCH)
            state = judged.hidden[part] * np.float32(self.scale)
            for k in range(N_AHEAD):
                state = network.forward(state, self._embedded(judged.tokens[part, k])).result
                logits = state @ self.output.T
                expected = self._index[judged.tokens[part, k + 1]]
                best = np.argpartition(logits, -4, axis=1)[:, -4:]
                right[k] += (logits.argmax(axis=1) == expected).sum()
                among[k] += (best == expected[:, None]).any(axis=1).sum()
        n = len(judged)
        return Agreement(tuple((right / n).tolist()), tuple((among / n).tolist()))

    def _embedded(self, tokens: NDArray[np.int32]) -> FloatArray:
        rows: FloatArray = self.embeddings[self._index[tokens]]  # -1: the last row
        return rows


def _with_others(embeddings: FloatArray) -> FloatArray:
    """Return the embeddings of the frequent tokens at one scale, and a last row, their mean, for all
    others."""
    embeddings = embeddings / np.sqrt(np.square(embeddings).mean())
    return np.concatenate([embeddings, embeddings.mean(axis=0, keepdims=True)]).astype(np.float32)


def _sigmoid(values: FloatArray) -> FloatArray:
    result = np.exp(-values)
    result += _ONE
    np.reciprocal(result, out=result)
    return result


def _softmax(logits: FloatArray) -> FloatArray:
    logits -= logits.max(axis=1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=1, keepdims=True)
    return logits


@dataclass(frozen=True, slots=True)
class _Pass:
    """The values of a forward pass that the backward pass needs."""

    state: FloatArray
    embedded: FloatArray
    inner: FloatArray
    sigmoid: FloatArray
    result: FloatArray


class Network:
    """The cell of the heads, with rows as vectors: M, N, c; Q, P, b; C."""

    def __init__(
        self, linear: FloatArray, n_embd: int, n_inner: int, rng: np.random.Generator
    ) -> None:
        deviation = 1.0 / np.sqrt(2 * n_embd)
        inner = rng.normal(0.0, deviation, (2 * n_embd, n_inner)).astype(np.float32)
        self.parameters: Parameters = {
            "M": linear[:n_embd].copy(),
            "N": linear[n_embd:-1].copy(),
            "c": linear[-1].copy(),
            "Q": inner[:n_embd].copy(),
            "P": inner[n_embd:].copy(),
            "b": np.zeros(n_inner, np.float32),
            "C": np.zeros((n_inner, n_embd), np.float32),  # at first the linear map is all
        }

    def copied(self) -> Parameters:
        return {name: values.copy() for name, values in self.parameters.items()}

    def forward(self, state: FloatArray, embedded: FloatArray) -> _Pass:
        p = self.parameters
        inner: FloatArray = state @ p["Q"] + embedded @ p["P"] + p["b"]
        sigmoid = _sigmoid(inner)
        result: FloatArray = (
            state @ p["M"] + embedded @ p["N"] + p["c"] + (inner * sigmoid) @ p["C"]
        )
        return _Pass(state, embedded, inner, sigmoid, result)

    def backward(self, passes: list[_Pass], losses: list[NDArray[Any]]) -> Parameters:
        """Return the gradients by the parameters; `losses[k]` is the gradient by the result of
        `passes[k]`."""
        p = self.parameters
        gradients = {name: np.zeros_like(values) for name, values in p.items()}
        behind: NDArray[Any] = np.zeros_like(losses[-1])
        for forward, loss in zip(reversed(passes), reversed(losses), strict=True):
            by_result = loss + behind
            inner, sigmoid = forward.inner, forward.sigmoid
            slope: NDArray[Any] = sigmoid * (_ONE + inner * (_ONE - sigmoid))
            by_inner = (by_result @ p["C"].T) * slope
            gradients["M"] += forward.state.T @ by_result
            gradients["N"] += forward.embedded.T @ by_result
            gradients["c"] += by_result.sum(axis=0)
            gradients["C"] += (inner * sigmoid).T @ by_result
            gradients["Q"] += forward.state.T @ by_inner
            gradients["P"] += forward.embedded.T @ by_inner
            gradients["b"] += by_inner.sum(axis=0)
            behind = by_result @ p["M"].T + by_inner @ p["Q"].T
        return gradients


class Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980), in place."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._means = {name: np.zeros_like(values) for name, values in parameters.items()}
        self._squares = {name: np.zeros_like(values) for name, values in parameters.items()}
        self._n = 0

    def step(self, gradients: Parameters, rate: float) -> None:
        self._n += 1
        first, second = _BETAS
        for name, gradient in gradients.items():
            mean, square = self._means[name], self._squares[name]
            mean *= first
            mean += (1.0 - first) * gradient
            square *= second
            square += (1.0 - second) * np.square(gradient)
            root = np.sqrt(square / (1.0 - second**self._n)) + 1e-8
            self._parameters[name] -= np.float32(rate / (1.0 - first**self._n)) * mean / root


def _weights(parameters: Parameters, task: _Task, model: LlamaModel) -> HeadWeights:
    """Return the weights in a file's layout: a matrix has a row for each output."""
    p = parameters
    return HeadWeights(
        target=model.name,
        n_embd=p["M"].shape[0],
        n_vocab=model.vocabulary.n_tokens,
        vocabulary=model.vocabulary.digest(),
        scale=task.scale,
        tokens=task.tokens,
        of_state=matrix(np.concatenate([p["M"].T, p["Q"].T]), "of_state"),
        of_token=matrix(np.concatenate([p["N"].T, p["P"].T]), "of_token"),
        bias=np.concatenate([p["c"], p["b"]]),
        of_inner=matrix(np.ascontiguousarray(p["C"].T), "of_inner"),
        embeddings=matrix(task.embeddings, "embeddings"),
        output=matrix(task.output, "output"),
    )
