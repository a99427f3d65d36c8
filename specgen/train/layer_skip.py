"""Pruned drafts: the target without some of its layers, chosen by Bayesian optimisation.

A model usually works without a few of its layers: each layer only adds to the hidden states that
it reads, so the next layer can read these states instead. The result is a faster model that often
agrees with the complete one. The search for the layers to leave out follows Draft & Verify (Zhang
et al., arXiv:2309.08168): a Gaussian process, fitted to the speed-ups of the sets judged so far,
picks the set with the largest expected improvement to be judged next.

Judging a set takes one pass over a few hundred tokens of the target's own answers (SWIFT, Xia et
al., arXiv:2410.06916). No file is written for that: llama.cpp calls back with the output of each
layer, and the output of a left-out layer is replaced by its input. The logits are, bit for bit,
those of a file without these layers. In the end, such a file is written for the best set, and used
like any other draft model.
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
#: The share of tokens that the model predicts correctly without some layers.
Agreement: TypeAlias = Callable[[Layers], float]
#: The expected speed-up, given the number of left-out layers and the agreement.
Speedup: TypeAlias = Callable[[int, float], float]
_Floats: TypeAlias = NDArray[np.float64]
_PromptAndAnswer: TypeAlias = tuple[Sequence[int], Sequence[int]]

#: Architectures whose layers are all alike. In others a layer's number decides what it computes.
_ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2")
#: If one of these metadata is more than 1, the layers of these architectures differ as well.
_NUMBERS = ("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step")
#: The same if one of these is a list, with a value for each layer.
_LISTS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_LEAST_LAYERS = 4
#: Answer tokens that a set of layers is judged by.
_N_JUDGED = 512
#: Held-back answer tokens that the chosen set is judged by.
_N_HELD_BACK = 1024
#: Tokens decoded at once.
_N_ROWS = 512
#: The most judged tokens of one answer.
_MOST_ANSWER = 96
#: The longest prompt: prompts take time and judge nothing.
_MOST_PROMPT = 96
#: llama.cpp's name for the output of a layer, before the layer's number.
_LAYER_OUTPUT = b"l_out-"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A target without some of its layers."""

    #: The layers left out, in ascending order.
    left_out: tuple[int, ...]
    #: The number of layers of the complete target.
    n_layer: int
    #: The share of held-back tokens on which it agrees with the target.
    agreement: float
    #: The expected speed-up when the target drafts with it.
    speedup: float
    #: How many sets of layers were judged.
    n_judged: int

    @property
    def text(self) -> str:
        """A sentence about the result."""
        layers = ", ".join(map(str, self.left_out))
        return (
            f"{len(self.left_out)} of {self.n_layer} layers left out ({layers}); "
            f"it agrees with the target on {self.agreement:.1%} of held-back tokens; "
            f"expected speed-up {self.speedup:.2f} ({self.n_judged} sets of layers judged)"
        )


def prune(
    session: Session,
    text: TargetText,
    output: Path,
    budget: Budget,
) -> Pruned | None:
    """Search for layers to leave out, and write the draft to `output`.

    Returns:
        What was found, or None if interrupted.

    Raises:
        UsageError: If there is no text to judge by, no room for a draft, or no time.
    """
    model = session.target
    target = session.options.target
    context = session.costs.context_options()
    judging = judged_texts(text.answers, _N_JUDGED, held_back=False)
    held_back = judged_texts(text.answers, _N_HELD_BACK, held_back=True)

    # A draft token costs what a target token costs, less the share of the left-out layers.
    table = target_costs(session).known
    batch_s = {n: seconds for n, seconds in table.items() if n <= session.n_rows_max}
    if len(batch_s) < 2:
        raise UsageError("a round has no room for a draft", hint="use a larger --draft-max")
    layer_share = share_of_a_layer(target, model.n_layer)

    def speedup(n_left_out: int, agreement: float) -> float:
        token_s = batch_s[1] * (1.0 - n_left_out * layer_share)
        return expected_gain(PairCosts(batch_s, token_s), agreement)

    with Judge(model, context, judging, session.clock) as judge:
        speedups = search(judge.agreement, speedup, model.n_layer, budget)
    if budget.interrupted():
        return None
    if not speedups:
        raise UsageError("no set of layers could be judged in time", hint="give more --minutes")

    # The best of many sets was lucky, too: other answers give an unbiased agreement.
    left_out = max(speedups, key=speedups.__getitem__)
    write_pruned(target, left_out, output)
    with Judge(model, context, held_back, session.clock) as judge:
        agreement = judge.agreement(left_out)
    return Pruned(
        tuple(sorted(left_out)),
        model.n_layer,
        agreement,
        speedup(len(left_out), agreement),
        n_judged=len(speedups),
    )


def check_prunable(model: LlamaModel) -> None:
    """Raise `ModelFileError` if a model does not work without some of its layers."""
    reason = _why_not_prunable(model)
    if reason is not None:
        raise ModelFileError(
            f"{model.name}: no layers can be left out: {reason}",
            hint="make another draft: --kind heads, or --kind distilled",
        )


def _why_not_prunable(model: LlamaModel) -> str | None:
    architecture = model.architecture
    if model.has_recurrent_state:
        return "it has a recurrent state"
    if architecture not in _ARCHITECTURES or model.n_window:
        return f"the layers of the architecture {architecture!r} may differ"
    if model.n_layer < _LEAST_LAYERS:
        return f"it has only {model.n_layer} layers"
    for key in (*_NUMBERS, *_LISTS):
        value = model.metadata(f"{architecture}.{key}") or "0"
        is_list = value.startswith("[")
        if is_list or (key in _NUMBERS and value not in ("0", "1")):
            return f"its layers differ ({architecture}.{key})"
    return None


def share_of_a_layer(target: Path, n_layer: int) -> float:
    """Return a layer's share of the bytes that are read to decode one token."""
    with opened_parts(target) as (_, tensors):
        sizes = {tensor.name: tensor.n_bytes for tensor in tensors}
    if "output.weight" in sizes:  # of separate embeddings, a token reads a single row
        sizes.pop("token_embd.weight", None)
    layers_bytes = sum(size for name, size in sizes.items() if name.startswith("blk."))
    return layers_bytes / sum(sizes.values()) / n_layer


def write_pruned(
    target: Path,
    left_out: Collection[int],
    output: Path,
) -> None:
    """Write a copy of a model file without some layers."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.only_copy = True
    # The array ends with -1.
    params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*sorted(left_out), -1)
    write_copy(target, output, params)


# --- how well the target agrees with itself without some layers --------------------------------


def judged_texts(
    answers: Sequence[TargetAnswer],
    n_tokens: int,
    *,
    held_back: bool,
) -> list[_PromptAndAnswer]:
    """Return prompts and the beginnings of their answers, up to `n_tokens` answer tokens in total.

    Raises:
        UsageError: If there are none.
    """
    found: list[_PromptAndAnswer] = []
    for answer in answers:
        if answer.is_held_back != held_back or len(answer.prompt_tokens) > _MOST_PROMPT:
            continue
        tokens = answer.tokens[: min(_MOST_ANSWER, n_tokens)]
        if tokens:
            found.append((answer.prompt_tokens, tokens))
            n_tokens -= len(tokens)
    if not found:
        hint = "let the target write more, to shorter prompts"
        raise UsageError("there is no text to judge by", hint)
    return found


class Judge:
    """Judges sets of left-out layers by texts of the target; a context manager.

    Raises:
        MemoryLimitError: If there is too little memory for its context.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: ContextOptions,
        texts: Sequence[_PromptAndAnswer],
        clock: Callable[[], float],
    ) -> None:
        self._n_embd = model.n_embd
        self._batches = list(_batches(texts))
        self._left_out: Layers = frozenset()
        #: The rows of the batch that want logits; the last layer computes only these.
        self._wanted_rows: NDArray[np.intp] = np.zeros(0, np.intp)
        #: The input of the next left-out layer: the output of the last layer that is kept.
        self._layer_input: NDArray[np.float32] = np.zeros(0, np.float32)
        self._failure: BackendError | None = None
        self._tensor_name = ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._tensor_bytes = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        self._callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)
        self._backend = LlamaBackend(
            model,
            replace(context, n_batch=_N_ROWS),
            n_ctx=max(len(batch) for batch, _ in self._batches),
            clock=clock,
            n_sequences=max(len(set(batch.sequences)) for batch, _ in self._batches),
            n_outputs=max(len(expected) for _, expected in self._batches),
            on_tensor=self._callback,
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    def agreement(self, left_out: Layers) -> float:
        """Return how often the model without these layers predicts the text's token.

        Layer 0 must stay: its input is no other layer's output.
        """
        self._left_out = left_out
        n_agreed = 0
        n_predicted = 0
        for batch, expected in self._batches:
            self._wanted_rows = np.flatnonzero(batch.wants_logits)
            likeliest = self._backend.decode(batch).argmax(axis=1)
            if self._failure is not None:
                raise self._failure
            n_agreed += int((likeliest == expected).sum())
            n_predicted += len(expected)
            for sequence in {sequence for (sequence,) in batch.sequences}:
                self._backend.remove(sequence)
        return n_agreed / n_predicted

    def _on_tensor(
        self,
        tensor: Any,
        is_asking: bool,
        _data: Any,
    ) -> bool:
        """Replace the output of a left-out layer by its input.

        llama.cpp calls twice for a tensor: before computing it, to ask whether the tensor is
        wanted, and then with its values. The answer to the second call is whether to go on.
        """
        name: bytes = self._tensor_name(tensor)
        if not self._left_out or not name.startswith(_LAYER_OUTPUT):
            return not is_asking
        layer = int(name.removeprefix(_LAYER_OUTPUT))
        is_left_out = layer in self._left_out
        if is_asking:
            return is_left_out or layer + 1 in self._left_out
        try:
            if is_left_out:
                self._overwrite(tensor)
            else:
                self._layer_input = np.empty(self._tensor_bytes(tensor) // 4, np.float32)
                read_tensor(tensor, self._layer_input)
        except BackendError as error:  # an exception cannot pass through native code
            self._failure = error
        return True

    def _overwrite(self, tensor: Any) -> None:
        values = self._layer_input
        if self._tensor_bytes(tensor) != values.nbytes:  # the last layer, with fewer rows
            values = values.reshape(-1, self._n_embd)[self._wanted_rows]
        write_tensor(tensor, np.ascontiguousarray(values))


def _batches(texts: Sequence[_PromptAndAnswer]) -> Iterator[tuple[Batch, list[int]]]:
    """Yield batches of texts, a sequence each, and the tokens that their logits should predict."""
    batch = Batch()
    expected: list[int] = []
    sequence = 0
    for prompt, answer in texts:
        tokens = (*prompt, *answer[:-1])
        if len(batch) and len(batch) + len(tokens) > _N_ROWS:
            yield batch, expected
            batch = Batch()
            expected = []
            sequence = 0
        for position, token in enumerate(tokens):
            batch.add(token, position, (sequence,), position >= len(prompt) - 1)
        expected += answer
        sequence += 1
    yield batch, expected


# --- the search --------------------------------------------------------------------------------

#: The length scale of the Gaussian process, in layers by which two sets differ.
_LENGTH_SCALE = 4.0
#: The variance of its noise: a few hundred tokens tell an agreement only roughly.
_NOISE = 0.02
#: The number of best sets whose neighbours, which differ in one layer, are candidates of a step.
_N_BEST = 8
#: Further candidates that differ from one of the best sets in two layers.
_N_NEAR = 200
#: Further candidates that are random sets.
_N_FAR = 100
#: The search ends after so many sets in a row without a better one.
_PATIENCE = 60
#: The lowest agreement that is used, so that its logarithm is finite.
_LEAST_AGREEMENT = 0.01


def search(
    agreement: Agreement,
    speedup: Speedup,
    n_layer: int,
    budget: Budget,
    *,
    seed: int = 0,
) -> dict[Layers, float]:
    """Judge sets of layers until the time is over, or nothing better is found for a while.

    The first layer always stays, and so do half of all layers.

    Returns:
        The expected speed-up of each judged set.
    """
    rng = np.random.default_rng(seed)
    speedups: dict[Layers, float] = {}
    # Of the model without one layer. Where layers do their harm independently of one another, the
    # agreements multiply, so their logarithms add up.
    log_agreements = np.zeros(n_layer)
    n_steps = n_layer - 1 + _PATIENCE

    def judge(left_out: Layers) -> float:
        found = agreement(left_out)
        speedups[left_out] = speedup(len(left_out), found)
        return found

    def independent_speedup(left_out: Layers) -> float:
        """Return the speed-up that a set would have if its layers did their harm independently."""
        log_agreement = sum(log_agreements[layer] for layer in left_out)
        return speedup(len(left_out), math.exp(log_agreement))

    # First each layer is left out alone.
    for layer in range(1, n_layer):
        if budget.is_over():
            break
        budget.progress(layer - 1, n_steps)
        found = judge(frozenset({layer}))
        log_agreements[layer] = math.log(max(_LEAST_AGREEMENT, found))

    # Then the most promising candidate of each step.
    n_worse = 0
    while not budget.is_over() and n_worse < _PATIENCE:
        budget.progress(n_layer - 1 + n_worse, n_steps)
        candidates = _candidates(speedups, log_agreements, rng)
        if not candidates:
            break
        independent = np.array([independent_speedup(each) for each in (*speedups, *candidates)])
        improvements = _expected_improvements(speedups, candidates, independent, n_layer)
        chosen = candidates[int(improvements.argmax())]
        best = max(speedups.values())
        judge(chosen)
        n_worse += 1
        if speedups[chosen] > best:
            n_worse = 0
    return speedups


def _candidates(
    speedups: dict[Layers, float],
    log_agreements: _Floats,
    rng: np.random.Generator,
) -> list[Layers]:
    """Return sets that were not judged: some near the best ones, and some random ones.

    A random set prefers layers that do little harm alone: the chance of a layer is proportional
    to the fourth power of its agreement.
    """
    layers = np.arange(1, len(log_agreements))
    chances = np.exp(4.0 * log_agreements[1:])
    chances /= chances.sum()
    n_most = len(log_agreements) // 2

    def sampled(n: int, p: _Floats | None = None) -> Layers:
        return frozenset(rng.choice(layers, n, replace=False, p=p).tolist())

    best = sorted(speedups, key=speedups.__getitem__, reverse=True)[:_N_BEST]
    # `^` leaves out a layer that was kept, and keeps one that was left out.
    found = {left_out ^ {layer} for left_out in best for layer in layers.tolist()}
    for n in range(_N_NEAR):
        found.add(best[n % len(best)] ^ sampled(2))
    for _ in range(_N_FAR):
        found.add(sampled(int(rng.integers(1, n_most + 1)), chances))
    new = [each for each in found - speedups.keys() if 1 <= len(each) <= n_most]
    return sorted(new, key=sorted)


def _expected_improvements(
    speedups: dict[Layers, float],
    candidates: Sequence[Layers],
    independent: _Floats,
    n_layer: int,
) -> _Floats:
    """Return how much each candidate is expected to improve on the best speed-up so far.

    A Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
    algorithm 2.1) predicts the residual y of a set, its speed-up less `independent`: what the
    layers do to one another. For the judged sets X with residuals y, a candidate x, the covariance
    k and the Cholesky factor L of k(X, X) + noise:

        mean(x)     = (L^-1 k(X, x))' (L^-1 y)
        variance(x) = k(x, x) - |L^-1 k(X, x)|^2,  with k(x, x) = 1

    If a candidate's speed-up has the mean m and the deviation s, and the best one so far is b, the
    expected improvement (Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive
    Black-Box Functions", 1998) is, with z = (m - b) / s:

        E[max(0, speed-up - b)] = (m - b) cdf(z) + s density(z), of the normal distribution

    Args:
        speedups: Those of the judged sets.
        candidates: The sets to choose from.
        independent: float64[n_judged + n_candidates], the speed-ups of judged sets and candidates
            if layers did their harm independently.
        n_layer: The number of layers of the complete model.
    """
    n_judged = len(speedups)
    judged_speedups = np.array(list(speedups.values()))
    residuals = judged_speedups - independent[:n_judged]
    centre = residuals.mean()
    scale = residuals.std() + 1e-6

    # A set as a vector of zeros and ones: float64[n, n_layer].
    sets = [*speedups, *candidates]
    vectors = np.array([[layer in each for layer in range(n_layer)] for each in sets], float)
    judged_vectors = vectors[:n_judged]

    # The prediction of each candidate's residual.
    noise = _NOISE * np.eye(n_judged)
    factor = np.linalg.cholesky(_covariance(judged_vectors, judged_vectors) + noise)
    to_candidates = np.linalg.solve(factor, _covariance(judged_vectors, vectors[n_judged:]))
    normalised = np.linalg.solve(factor, (residuals - centre) / scale)
    mean = centre + scale * (to_candidates.T @ normalised)
    variance = np.maximum(1e-12, 1.0 - (to_candidates**2).sum(axis=0))
    deviation = scale * np.sqrt(variance)

    # The expected improvement of the speed-up.
    gain = independent[n_judged:] + mean - judged_speedups.max()
    z = gain / deviation
    cdf = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    return np.asarray(gain * cdf + deviation * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def _covariance(first: _Floats, second: _Floats) -> _Floats:
    """Return the covariances of two lists of sets: they fall with the layers that differ."""
    n_differing = first @ (1.0 - second.T) + (1.0 - first) @ second.T
    return np.asarray(np.exp(-n_differing / _LENGTH_SCALE))
