r"""A target with a trained MTP layer, to measure with: a Qwen2 file in the form of GLM-4.5.

    specgen draft data -m 1.5b.gguf --prompts prompts.jsonl --tokens 100000
    python benchmarks/mtp_target.py -m 1.5b.gguf --text FOLDER --prompts prompts.jsonl \
        --until 0.85 -o mtp.gguf
    python benchmarks/mtp_target.py -m bigger.gguf --layer mtp.gguf -o bigger-mtp.gguf

FOLDER is what `specgen draft data` prints. The file's text is that of the Qwen2 file: its layers
are copied. Behind them is one MTP layer, trained on the text in FOLDER. Makers train theirs
together with the model, on all of its text, and it is right at some 0.85 of the places. From a
little text no layer gets so far. So there are two uses.

- Memorised (`--until`): the layer learns the answers of the benchmark itself, until it is right at
  this share of their positions. Its costs are real, its acceptance is set: say so wherever such a
  figure appears.
- Honest (no `--until`): every tenth answer is held back, and accuracy is measured on those.

The layer predicts several tokens ahead in training as it does in use: at a deeper place it reads
its own hidden states instead of the target's ("training-time test" of EAGLE-3, Li et al.,
arXiv:2503.01840). Its matrices begin as those of the last layer, with outputs of zero, behind a map
that ridge regression finds from (token, hidden state) to the next hidden state. One JSON line is
printed for each judgement.
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

_FORM = "glm4moe"
_MATRIX_TYPE = "q8_0"
#: Tokens in a step; several texts follow one another in it.
_N_COLUMNS = 1024
#: How many tokens ahead the layer is trained for, and the weight of a token's loss relative to the
#: one before it.
_N_AHEAD = 3
_FADING = 0.8
#: Tokens that the layer can predict in training: those of the text, and others, up to so many.
_N_FREQUENT = 32_768
#: Of the tokens that the text lacks, so many are drawn for a step, and stand for all.
_N_OTHERS = 2048
_RIDGE = 300.0
_N_RISING = 10
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


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
        """The last layer's tensors, the start of training, with outputs of zero."""
        begin = f"blk.{self.n_layer - 1}."
        names = [name.removeprefix(begin) for name in self.tensors if name.startswith(begin)]
        layer = {name: self.floats(begin + name) for name in names}
        for name in ("attn_output.weight", "ffn_down.weight"):
            layer[name] = np.zeros_like(layer[name])
        layer["head_norm"] = self.floats("output_norm.weight")
        return layer


def stored(layer: Parameters) -> dict[str, Stored]:
    """The tensors of an MTP layer, without their "blk.N.".

    GLM-4.5's layer has experts: the feed-forward part is cut in two halves, of which one is the
    only expert and the other the expert that all tokens share, so that nothing is computed twice.
    """
    names = {
        "ffn_norm.weight": "post_attention_norm.weight",
        "head_norm": "nextn.shared_head_norm.weight",
        "enorm": "nextn.enorm.weight",
        "hnorm": "nextn.hnorm.weight",
    }
    found: dict[str, Stored] = {
        "ffn_gate_inp.weight": (np.zeros((1, len(layer["enorm"])), np.float32), None),
        "exp_probs_b.bias": (np.zeros((1,), np.float32), None),
    }
    for name, trained in layer.items():
        values = np.asarray(trained, np.float32)
        if name in names or values.ndim == 1:
            found[names.get(name, name)] = values, None
        elif name.startswith("ffn_"):
            expert, shared = np.split(values, 2, axis=int(name.startswith("ffn_down")))
            part = name.removesuffix(".weight")
            found[f"{part}_shexp.weight"] = _quantized(shared)
            found[f"{part}_exps.weight"] = _quantized(expert[None])
        else:
            found[name] = _quantized(values)
    return found


def _quantized(values: Floats) -> Stored:
    rows = quantize(np.ascontiguousarray(values), _MATRIX_TYPE).data
    return rows.reshape(*values.shape[:-1], -1), GGMLQuantizationType.Q8_0


def layer_of(path: Path) -> dict[str, Stored]:
    """The MTP layer of a file that was written here."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    (begin,) = (
        name.removesuffix("nextn.eh_proj.weight") for name in tensors if "nextn.eh_proj" in name
    )
    return {
        name.removeprefix(begin): (tensor.data, tensor.tensor_type)
        for name, tensor in tensors.items()
        if name.startswith(begin)
    }


def write_target(source: Qwen2File, layer: dict[str, Stored], output: Path) -> None:
    """Write the target with `layer` as its MTP layer."""
    writer = GGUFWriter(output, _FORM)
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
        writer.add_uint32(f"{_FORM}.{key}", size)
    writer.add_float32(f"{_FORM}.rope.freq_base", source.rope_base)
    writer.add_float32(f"{_FORM}.attention.layer_norm_rms_epsilon", source.epsilon)
    writer.add_bool(f"{_FORM}.expert_weights_norm", True)
    writer.add_float32(f"{_FORM}.expert_weights_scale", 1.0)
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

    The states are those after the last norm.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    n_prompt: int
    #: The likeliest tokens for each token of the answer, and their probabilities.
    top_tokens: NDArray[np.int32]
    top_probabilities: NDArray[np.float16]
    is_held_back: bool


def read_texts(text: TargetText, form: Path) -> Iterator[Text]:
    """Let the target read its answers again, for the hidden states of all places."""
    with contextlib.closing(LlamaModel(form)) as model:
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
                    for place, token in enumerate(tokens[start : start + 512].tolist(), start):
                        batch.add(token, place, (0,), place == len(tokens) - 1)
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

    Position i has a token, the hidden state before it, and the next token as the label: -1 where
    that does not belong to an answer.
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
        row, part = rows[-1], slice(used, used + n)
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
    """The layer's hidden states of a row's places, float32[n, n_embd], for each depth.

    At depth d a place reads the layer's own state of depth d - 1 at the place before. It sees
    itself, the places right before it at the depths that a draft has there, and all before those at
    the first depth.
    """
    embedded, hidden, texts, positions = row
    n, size, n_kv = len(texts), shape.head_size, shape.n_head_kv
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
    found: list[Any] = []
    for depth in range(n_ahead):
        if depth:
            hidden = jnp.where((positions > 0)[:, None], shifted(found[-1], 1), 0.0)
        normed = _normed(hidden, layer["hnorm"], shape.epsilon)
        states = jnp.concatenate((embedded, normed), axis=-1) @ layer["nextn.eh_proj.weight"].T
        inputs = _normed(states, layer["attn_norm.weight"], shape.epsilon)

        def heads(name: str, n_heads: int, inputs: Any = inputs) -> Any:
            made = inputs @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]
            return made.reshape(n, n_heads, size)

        queries = rotated(heads("attn_q", shape.n_head)).reshape(n, n_kv, -1, size)
        keys.append(rotated(heads("attn_k", n_kv)))
        values.append(heads("attn_v", n_kv))
        scores = jnp.einsum("qkgs,tks->kgqt", queries, keys[0])
        scores = jnp.where(is_same & (distances >= depth), scores, -jnp.inf)
        near = []
        for back in range(depth):
            score = jnp.einsum("qkgs,qks->kgq", queries, shifted(keys[depth - back], back))
            near.append(jnp.where(positions >= back, score, -jnp.inf)[..., None])
        shares = jax.nn.softmax(jnp.concatenate([scores, *near], -1) / np.sqrt(size), axis=-1)
        mixed = jnp.einsum("kgqt,tks->qkgs", shares[..., :n], values[0])
        for back in range(depth):
            seen = shifted(values[depth - back], back)
            mixed += jnp.einsum("kgq,qks->qkgs", shares[..., n + back], seen)
        states = states + mixed.reshape(n, -1) @ layer["attn_output.weight"].T
        inputs = _normed(states, layer["ffn_norm.weight"], shape.epsilon)
        gate = jax.nn.silu(inputs @ layer["ffn_gate.weight"].T)
        inner = gate * (inputs @ layer["ffn_up.weight"].T)
        states = states + inner @ layer["ffn_down.weight"].T
        found.append(_normed(states, layer["head_norm"], shape.epsilon))
    return found


_OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(
    shape: Shape, n_ahead: int, layer: Parameters, moments: Any, row: Any, labels: Any, rate: Any
) -> tuple[Parameters, Any, Any]:
    """A step of Adam on the cross-entropy with the target's likeliest tokens."""
    columns, shares, output, bias = labels

    def loss(layer: Parameters) -> Any:
        total = 0.0
        for depth, states in enumerate(forward(shape, layer, row, n_ahead)):
            logits = states @ output.T + bias
            wanted = jnp.take_along_axis(logits, jnp.maximum(columns, 0), axis=1)
            mass = shares.sum(axis=1)
            losses = mass * jax.nn.logsumexp(logits, axis=1) - (wanted * shares).sum(axis=1)
            total += _FADING**depth * losses.sum() / jnp.maximum(mass.sum(), 1.0)
        return total

    value, gradients = jax.value_and_grad(loss)(layer)
    directions, moments = _OPTIMIZER.update(gradients, moments)
    return jax.tree.map(lambda old, way: old - rate * way, layer, directions), moments, value


@partial(jax.jit, static_argnums=(0, 1))
def _likeliest(shape: Shape, n_ahead: int, layer: Parameters, row: Any, output: Any) -> Any:
    found = forward(shape, layer, row, n_ahead)
    return jnp.stack([(states @ output.T).argmax(axis=1) for states in found])


class Task:
    """The texts, and what of the vocabulary the layer is trained with."""

    def __init__(self, source: Path, file: Qwen2File, texts: list[Text], *, by_heart: bool) -> None:
        self.rng = np.random.default_rng(0)
        self.shape = Shape(
            file.n_head, file.n_head_kv, file.n_embd // file.n_head, file.rope_base, file.epsilon
        )
        learnt = [text for text in texts if by_heart or not text.is_held_back]
        judged = texts if by_heart else [text for text in texts if text.is_held_back]
        self.learnt, self.judged = rows_of(learnt, file.n_embd), rows_of(judged, file.n_embd)
        every = np.unique(np.concatenate([[0], *(text.tokens for text in texts)]))
        self._places = {int(token): place for place, token in enumerate(every)}
        self._embeddings, _ = model_rows(source, every)
        own = np.unique(np.concatenate([text.tokens for text in learnt]))
        tops = np.unique(np.concatenate([text.top_tokens.ravel() for text in learnt]))
        own = np.union1d(own, tops)
        n_vocab = len(file.tensors["token_embd.weight"].data)
        others = np.setdiff1d(np.arange(n_vocab), own)[: max(0, _N_FREQUENT - len(own))]
        self._tokens = np.concatenate([own, others])
        self._n_own = len(own)
        _, self._output = model_rows(source, self._tokens)
        self._full = jnp.asarray(self._output)
        self._index = np.full(n_vocab, -1, np.int64)
        self._index[self._tokens] = np.arange(len(self._tokens))
        self.n_learnt = sum(int((row.labels >= 0).sum()) for row in self.learnt)

    def ridge(self, norm: Floats) -> Floats:
        """Return the linear map from (embedding, hidden state) to the next hidden state.

        It gives the state before the norm's weights: float32[n_embd, 2 n_embd].
        """
        n_embd = len(norm)
        gram = np.zeros((2 * n_embd, 2 * n_embd))
        products = np.zeros((2 * n_embd, n_embd))
        for row in self.learnt:
            is_used = (row.positions[1:] > 0) & (row.positions[:-1] > 0)
            embedded, hidden, *_ = self.inputs(row)
            inputs = np.concatenate([_unit(embedded), _unit(hidden)], axis=1)[:-1][is_used]
            behind = row.hidden[1:][is_used].astype(np.float32) / norm
            gram += inputs.T @ inputs
            products += inputs.T @ behind
        gram += _RIDGE * np.eye(len(gram))
        return np.linalg.solve(gram, products).T.astype(np.float32)

    def inputs(self, row: Row) -> tuple[Any, ...]:
        embedded = self._embeddings[[self._places[int(token)] for token in row.tokens]]
        return embedded, row.hidden.astype(np.float32), row.texts, row.positions

    def labels(self, row: Row, *, hard: bool) -> tuple[Any, ...]:
        """Return what a step needs of the output matrix.

        The columns of the likeliest tokens, their shares, and the rows of the matrix.
        """
        n_others = min(_N_OTHERS, len(self._tokens) - self._n_own)
        drawn = self._n_own + self.rng.choice(
            len(self._tokens) - self._n_own, n_others, replace=False
        )
        used = np.concatenate([np.arange(self._n_own), drawn])
        bias = np.zeros(len(used), np.float32)
        if n_others:
            bias[self._n_own :] = np.log((len(self._tokens) - self._n_own) / n_others)
        if hard:
            columns = self._index[np.maximum(row.labels, 0)][:, None]
            shares = np.ones((len(columns), 1), np.float32)
        else:
            columns = self._index[row.top_tokens]
            shares = row.top_probabilities / np.maximum(row.top_probabilities.sum(1), 1e-6)[:, None]
        shares = shares * (row.labels >= 0)[:, None] * (columns < self._n_own)
        return columns, shares, self._output[used], bias

    def judge(self, layer: Parameters) -> list[float]:
        """Return how often the layer's top token is the target's, by depth."""
        right, n = np.zeros(_N_AHEAD), np.zeros(_N_AHEAD)
        for row in self.judged:
            found = np.asarray(
                _likeliest(self.shape, _N_AHEAD, layer, self.inputs(row), self._full)
            )
            is_label = row.labels >= 0
            for depth in range(_N_AHEAD):
                # Those places where a draft of this depth starts inside of the answer.
                is_there = is_label.copy()
                for back in range(1, depth + 1):
                    is_there[back:] &= is_label[:-back] & (row.texts[back:] == row.texts[:-back])
                right[depth] += (self._tokens[found[depth]] == row.labels)[is_there].sum()
                n[depth] += is_there.sum()
        return [round(float(share), 4) for share in right / n]


def _unit(values: Floats) -> Floats:
    scaled: Floats = values / np.sqrt(np.square(values).mean(axis=-1, keepdims=True) + 1e-12)
    return scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", type=Path, required=True)
    parser.add_argument("--layer", type=Path, help="take the layer of this file, train none")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument(
        "--until", type=float, help="learn by heart, up to this share of the places"
    )
    parser.add_argument("--tokens", type=int, default=sys.maxsize, help="answers to learn from")
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--ahead", type=int, default=_N_AHEAD, help="tokens ahead to train for")
    parser.add_argument("--judged-every", type=int, default=0, help="steps; 0: once a pass")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    by_heart = asked.until is not None
    file = Qwen2File(asked.target)
    if asked.layer is not None:
        write_target(file, layer_of(asked.layer), asked.output)
        return
    layer = file.last_layer()
    layer["enorm"] = layer["hnorm"] = np.ones(file.n_embd, np.float32)
    layer["nextn.eh_proj.weight"] = np.zeros((file.n_embd, 2 * file.n_embd), np.float32)
    write_target(file, stored(layer), asked.output)
    text = TargetText(asked.text, read_prompts(asked.prompts))
    texts = list(read_texts(text, asked.output))
    if asked.tokens < sys.maxsize:
        texts = _first(texts, asked.tokens)
    task = Task(asked.target, file, texts, by_heart=by_heart)
    layer["nextn.eh_proj.weight"] = task.ridge(layer["head_norm"])
    layer = {name: jnp.asarray(values) for name, values in layer.items()}
    moments = _OPTIMIZER.init(layer)
    began = time.monotonic()
    every = asked.judged_every or len(task.learnt)
    n_steps, best = asked.passes * len(task.learnt), -1.0
    losses: list[float] = []
    order = task.rng.permutation(len(task.learnt))
    for step in range(n_steps + 1):
        seconds = time.monotonic() - began
        is_last = step == n_steps or seconds > 60 * asked.minutes
        if step % every == 0 or is_last:
            right = task.judge(layer)
            loss = float(np.mean(losses)) if losses else None
            losses.clear()
            figures = {"step": step, "tokens": task.n_learnt, "right": right, "loss": loss}
            print(json.dumps({**figures, "seconds": round(seconds)}), flush=True)
            if right[0] > best:
                best = right[0]
                write_target(file, stored(layer), asked.output)
            if is_last or (by_heart and best >= asked.until):
                break
        if step % len(task.learnt) == 0:
            order = task.rng.permutation(len(task.learnt))
        row = task.learnt[order[step % len(task.learnt)]]
        share = max(seconds / (60 * asked.minutes), step / n_steps)
        rate = asked.rate * min(1.0, (step + 1) / _N_RISING) * (1.0 if by_heart else 1.0 - share)
        layer, moments, loss = _step(
            task.shape,
            asked.ahead,
            layer,
            moments,
            task.inputs(row),
            task.labels(row, hard=by_heart),
            rate,
        )
        losses.append(float(loss))


def _first(texts: list[Text], n_tokens: int) -> list[Text]:
    """The first answers to learn from, with so many tokens at most, and all that are held back."""
    kept, n_kept = [], 0
    for text in texts:
        n_kept += 0 if text.is_held_back else len(text.tokens) - text.n_prompt
        if text.is_held_back or n_kept <= n_tokens:
            kept.append(text)
    return kept


if __name__ == "__main__":
    main()
