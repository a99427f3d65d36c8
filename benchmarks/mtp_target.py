r"""Train an MTP layer for a Qwen2 target, and write both in the format of GLM-4.5, to benchmark it.

    specgen draft data -m 1.5b.gguf --prompts prompts.jsonl --tokens 100000
    python benchmarks/mtp_target.py -m 1.5b.gguf --text FOLDER --prompts prompts.jsonl \
        --until 0.85 -o mtp.gguf
    python benchmarks/mtp_target.py -m bigger.gguf --layer mtp.gguf -o bigger-mtp.gguf

FOLDER is what `specgen draft data` prints. The written file generates the same text as the Qwen2
file, because its layers are copied. After them comes one MTP layer, trained on the text in FOLDER.

Model makers train the MTP layer together with the model on all of its text, and its top token is
right at about 85% of the positions. With little text, no layer reaches that. So there are two uses:

- Memorised (`--until`): the layer is trained on the answers of the benchmark itself until it is
  right at this share of their positions. Its costs are real, but its acceptance is chosen. State
  this wherever such a figure appears.
- Honest (no `--until`): every tenth answer is held out, and the accuracy is measured on those.

In training as in use, the layer predicts several tokens ahead: for later tokens its input is its
own hidden state instead of the target's ("training-time test" of EAGLE-3, Li et al.,
arXiv:2503.01840). Ridge regression initialises the input projection, as a map from (token, hidden
state) to the next hidden state. The other matrices are initialised with those of the last layer,
except that output matrices start at zero. Prints a JSON line for each evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from benchmarks.model_files import Stored, copy_metadata, write_file
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.operators import quantize
from specgen.measure.prompts import read_prompts
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.train.gguf_weights import model_rows
from specgen.train.target_text import N_TOP, TargetText

Parameters: TypeAlias = dict[str, Any]
Floats: TypeAlias = NDArray[np.float32]

#: The architecture that the target is written as.
_ARCHITECTURE = "glm4moe"
_MATRIX_TYPE = "q8_0"
#: The tokens in a training step, which are those of several texts.
_N_COLUMNS = 1024
#: How many tokens ahead the layer is trained to predict.
_N_AHEAD = 3
#: The weight of a token's loss, relative to the token before it.
_LOSS_DECAY = 0.8
#: The size of the vocabulary in training: all tokens of the text, and others up to this number.
_N_FREQUENT = 32_768
#: The number of tokens not in the text that are sampled for each step, to stand in for all of them.
_N_OTHERS = 2048
#: The regularisation of the ridge regression.
_RIDGE = 300.0
#: The warm-up steps, in which the learning rate rises.
_N_RISING = 10


# --- the file -------------------------------------------------------------------------------


class Qwen2File:
    """The tensors and sizes of a Qwen2 file."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.n_layer = self.value("block_count")
        self.n_embd = self.value("embedding_length")
        self.n_ff = self.value("feed_forward_length")
        self.n_head = self.value("attention.head_count")
        self.n_head_kv = self.value("attention.head_count_kv")
        self.rope_base = float(self.value("rope.freq_base"))
        self.epsilon = float(self.value("attention.layer_norm_rms_epsilon"))

    def value(self, key: str) -> Any:
        return self.reader.fields[f"qwen2.{key}"].contents()

    def floats(self, name: str) -> Floats:
        tensor = self.tensors[name]
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    def last_layer(self) -> Parameters:
        """The last layer's tensors with outputs of zero, with which training begins."""
        prefix = f"blk.{self.n_layer - 1}."
        names = [name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)]
        layer = {name: self.floats(prefix + name) for name in names}
        for name in ("attn_output.weight", "ffn_down.weight"):
            layer[name] = np.zeros_like(layer[name])
        layer["head_norm"] = self.floats("output_norm.weight")
        return layer


def stored(layer: Parameters) -> dict[str, Stored]:
    """The tensors of an MTP layer as they are stored, by their names without "blk.N.".

    A layer of GLM-4.5 is a mixture of experts. The feed-forward part is split into two halves: one
    becomes the only routed expert, the other the shared expert, so nothing is computed twice.
    """
    names = {
        "ffn_norm.weight": "post_attention_norm.weight",
        "head_norm": "nextn.shared_head_norm.weight",
        "enorm": "nextn.enorm.weight",
        "hnorm": "nextn.hnorm.weight",
    }
    tensors: dict[str, Stored] = {
        "ffn_gate_inp.weight": (np.zeros((1, len(layer["enorm"])), np.float32), None),
        "exp_probs_b.bias": (np.zeros((1,), np.float32), None),
    }
    for name, trained in layer.items():
        values = np.asarray(trained, np.float32)
        if name in names or values.ndim == 1:
            tensors[names.get(name, name)] = values, None
        elif name.startswith("ffn_"):
            expert, shared = np.split(values, 2, axis=int(name.startswith("ffn_down")))
            part = name.removesuffix(".weight")
            tensors[f"{part}_shexp.weight"] = _quantized(shared)
            tensors[f"{part}_exps.weight"] = _quantized(expert[None])
        else:
            tensors[name] = _quantized(values)
    return tensors


def _quantized(values: Floats) -> Stored:
    rows = quantize(np.ascontiguousarray(values), _MATRIX_TYPE).data
    return rows.reshape(*values.shape[:-1], -1), GGMLQuantizationType.Q8_0


def layer_of(path: Path) -> dict[str, Stored]:
    """The MTP layer of a file that this benchmark wrote."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    (prefix,) = (
        name.removesuffix("nextn.eh_proj.weight") for name in tensors if "nextn.eh_proj" in name
    )
    return {
        name.removeprefix(prefix): (tensor.data, tensor.tensor_type)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def write_target(source: Qwen2File, layer: dict[str, Stored], output: Path) -> None:
    """Write the target with `layer` as its MTP layer."""
    writer = GGUFWriter(output, _ARCHITECTURE)
    copy_metadata(source.reader, writer, without="qwen2.")
    head_size = source.n_embd // source.n_head
    sizes = {
        "block_count": source.n_layer + 1,
        "nextn_predict_layers": 1,
        "context_length": source.value("context_length"),
        "embedding_length": source.n_embd,
        "feed_forward_length": source.n_ff,
        "attention.head_count": source.n_head,
        "attention.head_count_kv": source.n_head_kv,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "rope.dimension_count": head_size,
        "expert_count": 1,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_feed_forward_length": layer["ffn_up_shexp.weight"][0].shape[0],
        "leading_dense_block_count": source.n_layer,
        "expert_gating_func": 2,
    }
    for key, size in sizes.items():
        writer.add_uint32(f"{_ARCHITECTURE}.{key}", size)
    writer.add_float32(f"{_ARCHITECTURE}.rope.freq_base", source.rope_base)
    writer.add_float32(f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon", source.epsilon)
    writer.add_bool(f"{_ARCHITECTURE}.expert_weights_norm", True)
    writer.add_float32(f"{_ARCHITECTURE}.expert_weights_scale", 1.0)
    tensors: dict[str, Stored] = {
        name.replace("ffn_norm", "post_attention_norm"): (tensor.data, tensor.tensor_type)
        for name, tensor in source.tensors.items()
    }
    tensors |= {f"blk.{source.n_layer}.{name}": each for name, each in layer.items()}
    write_file(writer, tensors)


# --- the text -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, and the target's hidden state after each token.

    The hidden states are taken after the output norm.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    n_prompt: int
    #: The target's most likely tokens at each position of the answer, and their probabilities.
    top_tokens: NDArray[np.int32]
    top_probabilities: NDArray[np.float16]
    is_held_back: bool


def read_texts(text: TargetText, target: Path) -> Iterator[Text]:
    """Prefill the target with its answers again, to get the hidden states of all positions."""
    with contextlib.closing(LlamaModel(target)) as model:
        longest = max(len(each.prompt_tokens) + len(each.tokens) for each in text.answers)
        options = ContextOptions(n_batch=512)
        with contextlib.closing(
            LlamaBackend(model, options, n_ctx=longest + 8, clock=time.perf_counter)
        ) as backend:
            for index, answer in enumerate(text.answers):
                tokens = np.array((*answer.prompt_tokens, *answer.tokens), np.int32)
                backend.remove(0)
                parts = []
                for start in range(0, len(tokens), 512):
                    batch = Batch()
                    for position, token in enumerate(tokens[start : start + 512].tolist(), start):
                        batch.add(token, position, (0,), position == len(tokens) - 1)
                    parts.append(backend.decode_hidden(batch, all_rows=True)[1].astype(np.float16))
                yield Text(
                    tokens,
                    np.concatenate(parts),
                    len(answer.prompt_tokens),
                    *text.top(index),
                    answer.is_held_back,
                )


@dataclass(frozen=True, slots=True)
class Row:
    """Several texts, concatenated.

    Position i has a token, the hidden state before it, and the next token as its label. The label
    is -1 if the next token does not belong to an answer.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    texts: NDArray[np.int32]
    positions: NDArray[np.int32]
    labels: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_probabilities: Floats


def rows_of(texts: list[Text], n_embd: int) -> list[Row]:
    rows: list[Row] = []
    used = _N_COLUMNS
    for number, text in enumerate(texts, 1):
        n = min(len(text.tokens), _N_COLUMNS)
        if used + n > _N_COLUMNS:
            used = 0
            rows.append(
                Row(
                    np.zeros(_N_COLUMNS, np.int32),
                    np.zeros((_N_COLUMNS, n_embd), np.float16),
                    np.zeros(_N_COLUMNS, np.int32),
                    np.zeros(_N_COLUMNS, np.int32),
                    np.full(_N_COLUMNS, -1, np.int32),
                    np.zeros((_N_COLUMNS, N_TOP), np.int32),
                    np.zeros((_N_COLUMNS, N_TOP), np.float32),
                )
            )
        row = rows[-1]
        part = slice(used, used + n)
        row.tokens[part] = text.tokens[:n]
        row.hidden[used + 1 : used + n] = text.hidden[: n - 1]
        row.texts[part] = number
        row.positions[part] = np.arange(n)
        first = text.n_prompt - 1
        if first < n - 1:
            answers = slice(used + first, used + n - 1)
            row.labels[answers] = text.tokens[first + 1 : n]
            row.top_tokens[answers] = text.top_tokens[: n - 1 - first]
            row.top_probabilities[answers] = text.top_probabilities[: n - 1 - first]
        used += n
    return rows


# --- the layer ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer."""

    n_head: int
    n_head_kv: int
    head_size: int
    rope_base: float
    epsilon: float


def _normed(values: Any, weights: Any, epsilon: float) -> Any:
    mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + epsilon) * weights


def forward(shape: Shape, layer: Parameters, row: tuple[Any, ...], n_ahead: int) -> list[Any]:
    """The layer's hidden states at a row's positions, float32[n, n_embd], for each depth.

    At depth d, the input of a position is the layer's own hidden state of depth d - 1 at the
    position before. It attends to itself, to the d positions right before it at the depths that
    they have in a draft, and to all earlier positions at depth 0.
    """
    embedded, hidden, texts, positions = row
    n = len(texts)
    size = shape.head_size
    n_kv = shape.n_head_kv
    frequencies = shape.rope_base ** (-jnp.arange(0, size, 2) / size)
    angles = positions[:, None, None] * frequencies
    cosine, sine = jnp.cos(angles), jnp.sin(angles)

    def rotated(values: Any) -> Any:
        first, second = jnp.split(values, 2, axis=-1)
        return jnp.concatenate(
            (first * cosine - second * sine, first * sine + second * cosine), axis=-1
        )

    def shifted(values: Any, by: int) -> Any:
        return jnp.pad(values[: n - by], ((by, 0), *[(0, 0)] * (values.ndim - 1)))

    distances = positions[:, None] - positions[None, :]
    is_same = texts[:, None] == texts[None, :]
    embedded = _normed(embedded, layer["enorm"], shape.epsilon)
    keys: list[Any] = []
    values: list[Any] = []
    states_by_depth: list[Any] = []
    for depth in range(n_ahead):
        if depth:
            previous = shifted(states_by_depth[-1], 1)
            hidden = jnp.where((positions > 0)[:, None], previous, 0.0)
        normed = _normed(hidden, layer["hnorm"], shape.epsilon)
        states = jnp.concatenate((embedded, normed), axis=-1) @ layer["nextn.eh_proj.weight"].T
        inputs = _normed(states, layer["attn_norm.weight"], shape.epsilon)

        def heads(name: str, n_heads: int, inputs: Any = inputs) -> Any:
            product = inputs @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]
            return product.reshape(n, n_heads, size)

        queries = rotated(heads("attn_q", shape.n_head)).reshape(n, n_kv, -1, size)
        keys.append(rotated(heads("attn_k", n_kv)))
        values.append(heads("attn_v", n_kv))
        scores = jnp.einsum("qkgs,tks->kgqt", queries, keys[0])
        scores = jnp.where(is_same & (distances >= depth), scores, -jnp.inf)
        draft_scores = []
        for back in range(depth):
            score = jnp.einsum("qkgs,qks->kgq", queries, shifted(keys[depth - back], back))
            draft_scores.append(jnp.where(positions >= back, score, -jnp.inf)[..., None])
        all_scores = jnp.concatenate([scores, *draft_scores], -1)
        attention = jax.nn.softmax(all_scores / np.sqrt(size), axis=-1)
        mixed = jnp.einsum("kgqt,tks->qkgs", attention[..., :n], values[0])
        for back in range(depth):
            draft_values = shifted(values[depth - back], back)
            mixed += jnp.einsum("kgq,qks->qkgs", attention[..., n + back], draft_values)
        states = states + mixed.reshape(n, -1) @ layer["attn_output.weight"].T
        inputs = _normed(states, layer["ffn_norm.weight"], shape.epsilon)
        gate = jax.nn.silu(inputs @ layer["ffn_gate.weight"].T)
        inner = gate * (inputs @ layer["ffn_up.weight"].T)
        states = states + inner @ layer["ffn_down.weight"].T
        states_by_depth.append(_normed(states, layer["head_norm"], shape.epsilon))
    return states_by_depth


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    shape: Shape, n_ahead: int, layer: Parameters, moments: Any, row: Any, labels: Any, rate: Any
) -> tuple[Parameters, Any, Any]:
    """A step of Adam on the cross-entropy with the target's most likely tokens."""
    columns, shares, output, bias = labels

    def loss(layer: Parameters) -> Any:
        total = 0.0
        for depth, states in enumerate(forward(shape, layer, row, n_ahead)):
            logits = states @ output.T + bias
            wanted = jnp.take_along_axis(logits, jnp.maximum(columns, 0), axis=1)
            mass = shares.sum(axis=1)
            losses = mass * jax.nn.logsumexp(logits, axis=1) - (wanted * shares).sum(axis=1)
            total += _LOSS_DECAY**depth * losses.sum() / jnp.maximum(mass.sum(), 1.0)
        return total

    value, gradients = jax.value_and_grad(loss)(layer)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    layer = jax.tree.map(lambda weights, step: weights - rate * step, layer, directions)
    return layer, moments, value


@partial(jax.jit, static_argnums=(0, 1))
def _likeliest(shape: Shape, n_ahead: int, layer: Parameters, row: Any, output: Any) -> Any:
    states_by_depth = forward(shape, layer, row, n_ahead)
    return jnp.stack([(states @ output.T).argmax(axis=1) for states in states_by_depth])


class Task:
    """The texts to train and evaluate on, and the part of the vocabulary that training uses."""

    def __init__(self, source: Path, file: Qwen2File, texts: list[Text], *, memorise: bool) -> None:
        self.rng = np.random.default_rng(0)
        self.shape = Shape(
            file.n_head, file.n_head_kv, file.n_embd // file.n_head, file.rope_base, file.epsilon
        )
        training = [text for text in texts if memorise or not text.is_held_back]
        evaluation = texts if memorise else [text for text in texts if text.is_held_back]
        self.training_rows = rows_of(training, file.n_embd)
        self.evaluation_rows = rows_of(evaluation, file.n_embd)
        self.n_training_tokens = sum(int((row.labels >= 0).sum()) for row in self.training_rows)
        # The embeddings of all tokens of all texts.
        embedded = np.unique(np.concatenate([[0], *(text.tokens for text in texts)]))
        self._embedding_index = {int(token): index for index, token in enumerate(embedded)}
        self._embeddings, _ = model_rows(source, embedded)
        # The vocabulary in training: first the tokens of the training texts, then others.
        text_tokens = np.unique(np.concatenate([text.tokens for text in training]))
        top_tokens = np.unique(np.concatenate([text.top_tokens.ravel() for text in training]))
        text_tokens = np.union1d(text_tokens, top_tokens)
        n_vocab = len(file.tensors["token_embd.weight"].data)
        n_others = max(0, _N_FREQUENT - len(text_tokens))
        others = np.setdiff1d(np.arange(n_vocab), text_tokens)[:n_others]
        self._tokens = np.concatenate([text_tokens, others])
        self._n_text_tokens = len(text_tokens)
        _, self._output = model_rows(source, self._tokens)
        self._full_output = jnp.asarray(self._output)
        self._index = np.full(n_vocab, -1, np.int64)
        self._index[self._tokens] = np.arange(len(self._tokens))

    def ridge(self, norm: Floats) -> Floats:
        """Return the linear map from (embedding, hidden state) to the next hidden state.

        The predicted state is not multiplied with the weights of the norm.

        Args:
            norm: The weights of the norm: float32[n_embd].

        Returns:
            The map: float32[n_embd, 2 n_embd].
        """
        n_embd = len(norm)
        gram = np.zeros((2 * n_embd, 2 * n_embd))
        products = np.zeros((2 * n_embd, n_embd))
        for row in self.training_rows:
            is_used = (row.positions[1:] > 0) & (row.positions[:-1] > 0)
            embedded, hidden, *_ = self.inputs(row)
            inputs = np.concatenate([_unit(embedded), _unit(hidden)], axis=1)[:-1][is_used]
            next_hidden = row.hidden[1:][is_used].astype(np.float32) / norm
            gram += inputs.T @ inputs
            products += inputs.T @ next_hidden
        gram += _RIDGE * np.eye(len(gram))
        return np.linalg.solve(gram, products).T.astype(np.float32)

    def inputs(self, row: Row) -> tuple[Any, ...]:
        indices = [self._embedding_index[int(token)] for token in row.tokens]
        embedded = self._embeddings[indices]
        return embedded, row.hidden.astype(np.float32), row.texts, row.positions

    def labels(self, row: Row, *, hard: bool) -> tuple[Any, ...]:
        """Return the labels of a row, and the part of the output matrix that a step uses.

        Args:
            row: The texts of the step.
            hard: Whether the only label is the token of the text, instead of the target's
                distribution over its most likely tokens.

        Returns:
            The columns of the labels in the logits, their probabilities, the rows of the output
            matrix, and a bias that makes the sampled tokens stand in for all others.
        """
        n_not_in_text = len(self._tokens) - self._n_text_tokens
        n_sampled = min(_N_OTHERS, n_not_in_text)
        sampled = self._n_text_tokens + self.rng.choice(n_not_in_text, n_sampled, replace=False)
        used = np.concatenate([np.arange(self._n_text_tokens), sampled])
        bias = np.zeros(len(used), np.float32)
        if n_sampled:
            bias[self._n_text_tokens :] = np.log(n_not_in_text / n_sampled)
        if hard:
            columns = self._index[np.maximum(row.labels, 0)][:, None]
            shares = np.ones((len(columns), 1), np.float32)
        else:
            columns = self._index[row.top_tokens]
            shares = row.top_probabilities / np.maximum(row.top_probabilities.sum(1), 1e-6)[:, None]
        shares = shares * (row.labels >= 0)[:, None] * (columns < self._n_text_tokens)
        return columns, shares, self._output[used], bias

    def evaluate(self, layer: Parameters) -> list[float]:
        """Return how often the layer's top token is the target's, by depth."""
        n_right = np.zeros(_N_AHEAD)
        n_positions = np.zeros(_N_AHEAD)
        for row in self.evaluation_rows:
            inputs = self.inputs(row)
            likeliest = np.asarray(
                _likeliest(self.shape, _N_AHEAD, layer, inputs, self._full_output)
            )
            is_label = row.labels >= 0
            for depth in range(_N_AHEAD):
                # Only positions for which a draft of this depth starts within the answer.
                counts = is_label.copy()
                for back in range(1, depth + 1):
                    counts[back:] &= is_label[:-back] & (row.texts[back:] == row.texts[:-back])
                n_right[depth] += (self._tokens[likeliest[depth]] == row.labels)[counts].sum()
                n_positions[depth] += counts.sum()
        return [round(float(share), 4) for share in n_right / n_positions]


def _unit(values: Floats) -> Floats:
    scaled: Floats = values / np.sqrt(np.square(values).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument(
        "--layer", type=Path, help="copy the layer of this file instead of training"
    )
    parser.add_argument("--text", type=Path, help="the folder that `specgen draft data` prints")
    parser.add_argument("--prompts", type=Path, help="the prompts of the answers in --text")
    parser.add_argument(
        "--until", type=float, help="memorise the answers, up to this share of their positions"
    )
    parser.add_argument("--tokens", type=int, default=sys.maxsize, help="tokens to train on")
    parser.add_argument("--passes", type=int, default=100, help="maximum passes over the text")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--ahead", type=int, default=_N_AHEAD, help="tokens ahead to predict")
    parser.add_argument(
        "--evaluate-every", type=int, default=0, help="steps between evaluations; 0: once per pass"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    memorise = arguments.until is not None
    file = Qwen2File(arguments.target)
    if arguments.layer is not None:
        write_target(file, layer_of(arguments.layer), arguments.output)
        return
    layer = file.last_layer()
    layer["enorm"] = layer["hnorm"] = np.ones(file.n_embd, np.float32)
    layer["nextn.eh_proj.weight"] = np.zeros((file.n_embd, 2 * file.n_embd), np.float32)
    write_target(file, stored(layer), arguments.output)
    text = TargetText(arguments.text, read_prompts(arguments.prompts))
    texts = list(read_texts(text, arguments.output))
    if arguments.tokens < sys.maxsize:
        texts = _first(texts, arguments.tokens)
    task = Task(arguments.target, file, texts, memorise=memorise)
    layer["nextn.eh_proj.weight"] = task.ridge(layer["head_norm"])
    layer = {name: jnp.asarray(values) for name, values in layer.items()}
    moments = _OPTIMIZER.init(layer)
    started_s = time.monotonic()
    n_rows = len(task.training_rows)
    evaluate_every = arguments.evaluate_every or n_rows
    n_steps = arguments.passes * n_rows
    best = -1.0
    losses: list[float] = []
    order = task.rng.permutation(n_rows)
    for step in range(n_steps + 1):
        seconds = time.monotonic() - started_s
        is_last = step == n_steps or seconds > 60 * arguments.minutes
        if step % evaluate_every == 0 or is_last:
            right = task.evaluate(layer)
            mean_loss = float(np.mean(losses)) if losses else None
            losses.clear()
            figures = {
                "step": step,
                "tokens": task.n_training_tokens,
                "right": right,
                "loss": mean_loss,
            }
            print(json.dumps({**figures, "seconds": round(seconds)}), flush=True)
            if right[0] > best:
                best = right[0]
                write_target(file, stored(layer), arguments.output)
            if is_last or (memorise and best >= arguments.until):
                break
        if step % n_rows == 0:
            order = task.rng.permutation(n_rows)
        row = task.training_rows[order[step % n_rows]]
        rate = arguments.rate * min(1.0, (step + 1) / _N_RISING)
        if not memorise:
            progress = max(seconds / (60 * arguments.minutes), step / n_steps)
            rate *= 1.0 - progress
        layer, moments, loss = _step(
            task.shape,
            arguments.ahead,
            layer,
            moments,
            task.inputs(row),
            task.labels(row, hard=memorise),
            rate,
        )
        losses.append(float(loss))


def _first(texts: list[Text], n_tokens: int) -> list[Text]:
    """Return the first training answers, up to a number of tokens, and all held-out answers."""
    kept, n_kept = [], 0
    for text in texts:
        n_kept += 0 if text.is_held_back else len(text.tokens) - text.n_prompt
        if text.is_held_back or n_kept <= n_tokens:
            kept.append(text)
    return kept


if __name__ == "__main__":
    main()
