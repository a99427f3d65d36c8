"""Pruned drafts: the target without some of its layers, chosen by Bayesian optimisation.

The layers are searched for as in Draft & Verify (Zhang et al., arXiv:2309.08168): a Gaussian
process over sets of layers chooses the next set to judge, by its expected improvement of the
expected speed. One pass over some hundred tokens of the target's own answers judges a set (SWIFT,
Xia et al., arXiv:2410.06916), with the layers left out in memory: llama.cpp calls back with their
results, which are replaced by their inputs. The logits are, bit for bit, those of a file without
these layers. The chosen draft is such a file, and drafts like any other model.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.errors import BackendError, ModelFileError, UsageError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.gguf_file import opened_parts
from specgen.llama.library import ggml, llama_cpp
from specgen.llama.operators import read_tensor, write_copy, write_tensor
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.session.calibration import PairCosts, expected_gain, target_costs
from specgen.session.session import Session
from specgen.train.target_text import TargetAnswer, TargetText
from specgen.train.training_loop import Budget

#: Layers of a model, by their numbers.
Layers: TypeAlias = frozenset[int]
#: The share of positions at which the model without some layers has the whole model's token.
Agreement: TypeAlias = Callable[[Layers], float]
#: The expected speed-up, by the number of left-out layers and the agreement.
Speedup: TypeAlias = Callable[[int, float], float]
_Floats: TypeAlias = NDArray[np.float64]
#: A prompt and an answer.
_Text: TypeAlias = tuple[Sequence[int], Sequence[int]]

#: Architectures whose layers are all alike. In others a layer's number decides what it computes.
_ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2")
#: Metadata that makes layers differ in these architectures, too: if it is more than 1, or a list.
_NUMBERS = ("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step")
_LISTS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_LEAST_LAYERS = 4
#: Places of the target's text that judge a set of layers, places that judge the result, and rows
#: decoded at once.
_N_JUDGED, _N_HELD_BACK, _N_ROWS = 512, 1024, 512
#: The most judged tokens of an answer, and the longest prompt: prompts take time and judge nothing.
_MOST_ANSWER, _MOST_PROMPT = 96, 96
#: llama.cpp's name for the result of a layer, before the layer's number.
_RESULT = b"l_out-"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A target without the layers `left_out`, its agreement with the target, and the expected
    speed-up.
    """

    left_out: tuple[int, ...]
    n_layer: int
    agreement: float
    speedup: float
    n_judged: int

    @property
    def text(self) -> str:
        layers = ", ".join(map(str, self.left_out))
        return (
            f"{len(self.left_out)} of {self.n_layer} layers left out ({layers}): it agrees with the target on "
            f"{self.agreement:.1%} of the tokens of held-back answers; expected speed-up {self.speedup:.2f} "
            f"({self.n_judged} sets were judged)"
        )


def prune(session: Session, text: TargetText, output: Path, budget: Budget) -> Pruned | None:
    """Search for layers to leave out, and write the draft; None if interrupted. Raise `UsageError`."""
    model, target = session.target, session.options.target
    judging = judged_texts(text.answers, _N_JUDGED, held_back=False)
    held_back = judged_texts(text.answers, _N_HELD_BACK, held_back=True)
    table = target_costs(session).known
    batch_s = {n: seconds for n, seconds in table.items() if n <= session.n_rows_max}
    if len(batch_s) < 2:
        raise UsageError("a round has no room for a draft", hint="take a larger --draft-max")
    layer_share = share_of_a_layer(target, model.n_layer)

    def speedup(n_left_out: int, agreement: float) -> float:
        token_s = batch_s[1] * (1.0 - n_left_out * layer_share)
        return expected_gain(PairCosts(batch_s, token_s), agreement)

    context = session.costs.context_options()
    with Judge(model, context, judging, session.clock) as judge:
        found = search(judge.agreement, speedup, model.n_layer, budget)
    if budget.interrupted():
        return None
    if not found:
        raise UsageError("there was no time to judge a set of layers", hint="give more --minutes")
    left_out = max(found, key=found.__getitem__)
    write_pruned(target, left_out, output)
    with Judge(model, context, held_back, session.clock) as judge:
        agreement = judge.agreement(left_out)
    gain = speedup(len(left_out), agreement)
    return Pruned(tuple(sorted(left_out)), model.n_layer, agreement, gain, len(found))


def check_prunable(model: LlamaModel) -> None:
    architecture = model.architecture
    reason = ""
    if model.has_recurrent_state:
        reason = "it has a recurrent state"
    elif architecture not in _ARCHITECTURES or model.n_window:
        reason = f"layers of the architecture {architecture!r} may differ by their place"
    elif model.n_layer < _LEAST_LAYERS:
        reason = f"it has {model.n_layer} layers only"
    for key in (*_NUMBERS, *_LISTS):
        value = model.metadata(f"{architecture}.{key}") or "0"
        if value.startswith("[") or (key in _NUMBERS and value not in ("0", "1")):
            reason = reason or f"its layers differ ({architecture}.{key})"
    if reason:
        hint = "make another draft: --kind heads, or --kind distilled"
        raise ModelFileError(f"{model.name}: no layers can be left out: {reason}", hint)


def share_of_a_layer(target: Path, n_layer: int) -> float:
    """Return the share of the bytes which decoding a token reads that a layer has."""
    with opened_parts(target) as (_, tensors):
        sizes = {tensor.name: tensor.n_bytes for tensor in tensors}
    if "output.weight" in sizes:  # a token reads a row of its embeddings
        sizes.pop("token_embd.weight", None)
    of_layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
    return of_layers / sum(sizes.values()) / n_layer


def write_pruned(target: Path, left_out: Collection[int], output: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.only_copy = True
    params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*sorted(left_out), -1)
    write_copy(target, output, params)


# --- how well the target agrees with itself without some layers --------------------------------


def judged_texts(answers: Sequence[TargetAnswer], n_tokens: int, *, held_back: bool) -> list[_Text]:
    """Return prompts and beginnings of answers, about `n_tokens` tokens in all. Raise `UsageError`
    if none.
    """
    found: list[_Text] = []
    for answer in answers:
        if answer.is_held_back == held_back and len(answer.prompt_tokens) <= _MOST_PROMPT:
            tokens = answer.tokens[: min(_MOST_ANSWER, n_tokens)]
            found += [(answer.prompt_tokens, tokens)] if tokens else []
            n_tokens -= len(tokens)
    if found:
        return found
    hint = "let the target write more, to shorter prompts"
    raise UsageError("there is no text to judge by", hint)


class Judge:
    """Judges sets of left-out layers by texts of the target, as a context manager. Raises
    `MemoryLimitError`.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: ContextOptions,
        texts: Sequence[_Text],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._batches = list(_batches(texts))
        self._left_out: Layers = frozenset()
        #: The rows of the batch that want logits; the last layer computes only these.
        self._wanted: NDArray[np.intp] = np.zeros(0, np.intp)
        self._input: NDArray[np.float32] = np.zeros(0, np.float32)
        self._failure: BackendError | None = None
        self._name = ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._size = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._native = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)
        self._backend = LlamaBackend(
            model,
            replace(context, n_batch=_N_ROWS),
            n_ctx=max(len(batch) for batch, _ in self._batches),
            clock=clock,
            n_sequences=max(len(set(batch.sequences)) for batch, _ in self._batches),
            n_outputs=max(len(expected) for _, expected in self._batches),
            on_tensor=self._native,
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    def agreement(self, left_out: Layers) -> float:
        """Return how often the model without these layers predicts the text's token. Layer 0 must
        stay.
        """
        n_agreed = n_places = 0
        for batch, expected in self._batches:
            self._left_out = left_out
            self._wanted = np.flatnonzero(batch.wants_logits)
            likeliest = self._backend.decode(batch).argmax(axis=1)
            if self._failure is not None:
                raise self._failure
            n_agreed += int((likeliest == expected).sum())
            n_places += len(expected)
            for sequence in {sequence for (sequence,) in batch.sequences}:
                self._backend.remove(sequence)
        return n_agreed / n_places

    def _on_tensor(self, tensor: Any, is_asked: bool, _data: Any) -> bool:
        """Give a left-out layer's result its input. llama.cpp calls twice: to ask, and when it is
        computed.
        """
        name: bytes = self._name(tensor)
        if not self._left_out or not name.startswith(_RESULT):
            return not is_asked
        layer = int(name.removeprefix(_RESULT))
        is_left_out = layer in self._left_out
        if is_asked:
            return is_left_out or layer + 1 in self._left_out
        try:
            if is_left_out:
                given = self._input
                if self._size(tensor) != given.nbytes:
                    given = given.reshape(-1, self._model.n_embd)[self._wanted]
                write_tensor(tensor, np.ascontiguousarray(given))
            else:
                self._input = np.empty(self._size(tensor) // 4, np.float32)
                read_tensor(tensor, self._input)
        except BackendError as error:  # an exception cannot pass through native code
            self._failure = error
        return True


def _batches(texts: Sequence[_Text]) -> Iterator[tuple[Batch, list[int]]]:
    batch, expected, n_sequences = Batch(), list[int](), 0
    for prompt, answer in texts:
        tokens = (*prompt, *answer[:-1])
        if len(batch) and len(batch) + len(tokens) > _N_ROWS:
            yield batch, expected
            batch, expected, n_sequences = Batch(), [], 0
        for position, token in enumerate(tokens):
            batch.add(token, position, (n_sequences,), position >= len(prompt) - 1)
        expected += answer
        n_sequences += 1
    yield batch, expected


# --- the search ------------------------------------------------------------------------------------

#: The length scale of the process, in layers by which two sets differ, and the variance of its
#: noise.
_LENGTH, _NOISE = 4.0, 0.02
#: Candidates of a step: neighbours of so many best sets, so many with two changes, and other random
#: sets.
_N_BEST, _N_NEAR, _N_FAR = 8, 200, 100
#: The search ends after so many judgements without a better one.
_PATIENCE = 60
#: The lowest agreement that is used, so that its logarithm is finite.
_LEAST = 0.01


def search(
    agreement: Agreement, speedup: Speedup, n_layer: int, budget: Budget, *, seed: int = 0
) -> dict[Layers, float]:
    """Return the expected speed-ups of judged sets of layers. The first layer and half of all
    always stay; each is left out alone first: the process learns how sets differ from the product
    of these agreements.
    """
    rng = np.random.default_rng(seed)
    known: dict[Layers, float] = {}
    alone = np.zeros(n_layer)

    def judge(left_out: Layers) -> float:
        found = agreement(left_out)
        known[left_out] = speedup(len(left_out), found)
        return found

    def independent(left_out: Layers) -> float:
        return speedup(len(left_out), math.exp(sum(alone[layer] for layer in left_out)))

    for layer in range(1, n_layer):
        if not budget.is_over():
            budget.progress(layer - 1, n_layer - 1 + _PATIENCE)
            alone[layer] = math.log(max(_LEAST, judge(frozenset({layer}))))
    n_worse = 0
    while not budget.is_over() and n_worse < _PATIENCE:
        budget.progress(n_layer - 1 + n_worse, n_layer - 1 + _PATIENCE)
        best = max(known.values())
        new = _candidates(known, alone, rng)
        if not new:
            break
        expected = np.array([independent(left_out) for left_out in (*known, *new)])
        chosen = new[int(_expected_improvements(known, new, expected, n_layer).argmax())]
        judge(chosen)
        n_worse = 0 if known[chosen] > best else n_worse + 1
    return known


def _candidates(
    known: dict[Layers, float], alone: _Floats, rng: np.random.Generator
) -> list[Layers]:
    """Return sets that were not judged: near the best ones, and random ones of layers that do
    little harm alone.
    """
    layers = np.arange(1, len(alone))
    shares = np.exp(4.0 * alone[1:])
    shares /= shares.sum()

    def drawn(n: int, p: _Floats | None = None) -> Layers:
        return frozenset(rng.choice(layers, n, replace=False, p=p).tolist())

    best = sorted(known, key=known.__getitem__, reverse=True)[:_N_BEST]
    new = {left_out ^ {layer} for left_out in best for layer in layers.tolist()}
    new |= {best[n % len(best)] ^ drawn(2) for n in range(_N_NEAR)}
    n_most = len(alone) // 2
    new |= {drawn(int(rng.integers(1, n_most + 1)), shares) for _ in range(_N_FAR)}
    return sorted((each for each in new - known.keys() if 1 <= len(each) <= n_most), key=sorted)


def _expected_improvements(
    known: dict[Layers, float], new: Sequence[Layers], independent: _Floats, n_layer: int
) -> _Floats:
    """Return how much faster than the best each new set is expected to be; `independent` are the
    speed-ups of known and new sets if layers did harm independently.
    """
    values = np.array(list(known.values()))
    beyond = values - independent[: len(known)]
    centre, scale = beyond.mean(), beyond.std() + 1e-6
    rows = np.array([[layer in each for layer in range(n_layer)] for each in (*known, *new)], float)
    seen, asked = rows[: len(known)], rows[len(known) :]
    factor = np.linalg.cholesky(_covariance(seen, seen) + _NOISE * np.eye(len(seen)))
    between = np.linalg.solve(factor, _covariance(seen, asked))
    mean = centre + scale * (between.T @ np.linalg.solve(factor, (beyond - centre) / scale))
    deviation = scale * np.sqrt(np.maximum(1e-12, 1.0 - (between**2).sum(axis=0)))
    better = independent[len(known) :] + mean - values.max()
    z = better / deviation
    share = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    return np.asarray(better * share + deviation * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def _covariance(ones: _Floats, others: _Floats) -> _Floats:
    differing = ones @ (1.0 - others.T) + (1.0 - ones) @ others.T
    return np.asarray(np.exp(-differing / _LENGTH))
