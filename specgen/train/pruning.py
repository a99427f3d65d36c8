"""Pruned drafts: the target without some of its layers, chosen by Bayesian optimisation.

A model usually works without a few of its layers: each layer only adds to the hidden states that
it reads, so the next layer can read these states instead. The result is a faster model that often
agrees with the complete one. The search for the layers to leave out follows Draft & Verify (Zhang
et al., arXiv:2309.08168): a Gaussian process is fitted to the speed-ups of the sets judged so far,
and the set with the largest expected improvement is judged next.

Judging a set takes one pass over a few hundred tokens of the target's own answers (SWIFT, Xia et
al., arXiv:2410.06916). No file is written for that: llama.cpp calls back with the output of each
layer, and the output of a left-out layer is overwritten with its input. The logits are bit for bit
equal to those of a file without these layers. Only for the best set is such a file written, which
is then used like any other draft model.
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
from specgen.llama.library import llama_cpp, native
from specgen.llama.model_description import describe_model
from specgen.llama.operators import read_tensor, write_copy, write_tensor
from specgen.method.backend import Batch
from specgen.options import ContextOptions
from specgen.session.calibration import PairCosts, expected_speedup, target_costs
from specgen.session.session import Session
from specgen.train.target_text import TargetAnswer, TargetText
from specgen.train.training_loop import Budget

#: Layers of a model, by their numbers from 0; usually a set of layers to leave out.
Layers: TypeAlias = frozenset[int]
#: Measures how often the model without these layers agrees with the target: a share of tokens.
Agreement: TypeAlias = Callable[[Layers], float]
#: Estimates the speed-up from the number of left-out layers and the agreement.
Speedup: TypeAlias = Callable[[int, float], float]
_Floats: TypeAlias = NDArray[np.float64]
_PromptAndAnswer: TypeAlias = tuple[Sequence[int], Sequence[int]]

#: Architectures whose layers are all alike. In others, a layer's computation depends on its number.
_UNIFORM_ARCHITECTURES = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "starcoder2")
#: Metadata keys: if one has a value above 1, the layers differ even in these architectures.
_NUMBER_KEYS = ("leading_dense_block_count", "nextn_predict_layers", "interleave_moe_layer_step")
#: Metadata keys: if one has a list with a value for each layer, the layers differ.
_LIST_KEYS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
#: Models with fewer layers are not pruned.
_MIN_LAYERS = 4
#: The number of answer tokens on which each set of layers is judged.
_N_JUDGED = 512
#: The number of held-back answer tokens on which the best set is judged again.
_N_HELD_BACK = 1024
#: The maximum number of tokens decoded at once.
_N_BATCH = 512
#: The maximum number of tokens used of one answer.
_MAX_ANSWER_TOKENS = 96
#: Longer prompts are not used: decoding them takes time, and only answers are judged.
_MAX_PROMPT_TOKENS = 96
#: The prefix of llama.cpp's name for the output of a layer; the layer's number follows.
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
    #: The number of sets of layers judged in the search.
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

    Args:
        session: The target.
        text: The target's own answers.
        output: The file to write.
        budget: The time that the search may take.

    Returns:
        The result for the best set of layers, or None if interrupted.

    Raises:
        UsageError: If there is no text to judge on, `--draft-max` leaves no room for a draft, or
            not even one set could be judged in time.
        MemoryLimitError: If there is too little memory for a context.
    """
    model = session.target
    target = session.options.target
    context = session.costs.context_options()
    judging = judged_texts(text.answers, _N_JUDGED, held_back=False)
    held_back = judged_texts(text.answers, _N_HELD_BACK, held_back=True)

    # A draft token takes the time of a target token, less the share of the left-out layers.
    seconds_by_rows = target_costs(session).known
    batch_s = {n: seconds for n, seconds in seconds_by_rows.items() if n <= session.n_rows_max}
    if len(batch_s) < 2:
        raise UsageError("a round has no room for a draft", hint="use a larger --draft-max")
    layer_share = layer_byte_share(target, model.n_layer)

    def speedup(n_left_out: int, agreement: float) -> float:
        token_s = batch_s[1] * (1.0 - n_left_out * layer_share)
        return expected_speedup(PairCosts(batch_s, token_s), agreement)

    with Judge(model, context, judging, session.clock) as judge:
        speedups = search(judge.agreement, speedup, model.n_layer, budget)
    if budget.interrupted():
        return None
    if not speedups:
        raise UsageError("no set of layers could be judged in time", hint="give more --minutes")

    # The best of many sets also had luck: judging it on other answers gives an unbiased agreement.
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
    """Check that layers of a model can be left out.

    Raises:
        ModelFileError: If its layers differ or are too few, or it has a recurrent state.
    """
    reason = _why_not_prunable(model)
    if reason is not None:
        raise ModelFileError(
            f"{model.name}: no layers can be left out: {reason}",
            hint="make another draft: --kind heads, or --kind distilled",
        )


def _why_not_prunable(model: LlamaModel) -> str | None:
    """Return the reason why no layers can be left out; None if they can."""
    architecture = model.architecture
    if model.has_recurrent_state:
        return "it has a recurrent state"
    if architecture not in _UNIFORM_ARCHITECTURES or model.n_window:
        return f"the layers of the architecture {architecture!r} may differ"
    if model.n_layer < _MIN_LAYERS:
        return f"it has only {model.n_layer} layers"
    described = describe_model(model.file)
    for key in _NUMBER_KEYS:
        if described.number(key) > 1:
            return f"its layers differ ({architecture}.{key})"
    for key in _LIST_KEYS:
        if described.numbers(key):
            return f"its layers differ ({architecture}.{key})"
    return None


def layer_byte_share(target: Path, n_layer: int) -> float:
    """Return one layer's share of the bytes that are read to decode a token.

    Decoding a token is limited by reading weights, so this is also its share of the time.
    """
    sizes = {name: tensor.n_bytes for name, tensor in describe_model(target).tensors.items()}
    # Embeddings that do not double as the output matrix do not count: only one row is read.
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight", None)
    layers_bytes = sum(size for name, size in sizes.items() if name.startswith("blk."))
    return layers_bytes / sum(sizes.values()) / n_layer


def write_pruned(
    target: Path,
    left_out: Collection[int],
    output: Path,
) -> None:
    """Write a copy of a model file without the layers in `left_out`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.only_copy = True
    # llama.cpp expects an array that ends with -1.
    params.prune_layers = (ctypes.c_int32 * (len(left_out) + 1))(*sorted(left_out), -1)
    write_copy(target, output, params)


# --- how well the target agrees with itself without some layers --------------------------------


def judged_texts(
    answers: Sequence[TargetAnswer],
    n_tokens: int,
    *,
    held_back: bool,
) -> list[_PromptAndAnswer]:
    """Return short prompts with the beginnings of their answers.

    Args:
        answers: The answers to choose from.
        n_tokens: The maximum number of answer tokens in total.
        held_back: Whether to use the answers that are held back, or the others.

    Raises:
        UsageError: If there are none.
    """
    texts: list[_PromptAndAnswer] = []
    n_remaining = n_tokens
    for answer in answers:
        if answer.is_held_back != held_back or len(answer.prompt_tokens) > _MAX_PROMPT_TOKENS:
            continue
        tokens = answer.tokens[: min(_MAX_ANSWER_TOKENS, n_remaining)]
        if tokens:
            texts.append((answer.prompt_tokens, tokens))
            n_remaining -= len(tokens)
    if not texts:
        raise UsageError(
            "there is no text to judge by",
            hint="let the target write more, to shorter prompts",
        )
    return texts


class Judge:
    """Judges sets of left-out layers on texts of the target; a context manager.

    Args:
        model: The target.
        context: The context options.
        texts: The prompts and answers to judge on.
        clock: Returns the time in seconds.

    Raises:
        MemoryLimitError: If there is too little memory for a context.
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
        #: The rows of the batch that want logits; the last layer's output has only these.
        self._wanted_rows: NDArray[np.intp] = np.zeros(0, np.intp)
        #: The input of the next left-out layer: the output of the last layer that is kept.
        self._layer_input: NDArray[np.float32] = np.zeros(0, np.float32)
        #: The error in the callback, to be raised after decoding.
        self._failure: BackendError | None = None
        self._callback = llama_cpp.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)
        self._backend = LlamaBackend(
            model,
            replace(context, n_batch=_N_BATCH),
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
        """Return the share of answer tokens that the model predicts without these layers.

        Layer 0 cannot be left out, because its input is not the output of another layer.

        Raises:
            BackendError: If decoding fails, or a layer's output cannot be read or written.
        """
        self._left_out = left_out
        n_agreed = 0
        n_predicted = 0
        for batch, expected in self._batches:
            self._wanted_rows = np.flatnonzero(batch.wants_logits)
            predicted = self._backend.decode(batch).argmax(axis=1)
            if self._failure is not None:
                raise self._failure
            n_agreed += int((predicted == expected).sum())
            n_predicted += len(expected)
            # Each token of the batch belongs to exactly one sequence.
            for sequence in {sequence for (sequence,) in batch.sequences}:
                self._backend.remove(sequence)
        return n_agreed / n_predicted

    def _on_tensor(
        self,
        tensor: Any,
        is_asking: bool,
        _data: Any,
    ) -> bool:
        """Overwrite the output of a left-out layer with its input.

        llama.cpp calls this before it computes a tensor, with `is_asking`, and again with the
        tensor's values if the first call returned True. The second returns whether to go on.
        """
        name: bytes = native.ggml_get_name(tensor)
        if not self._left_out or not name.startswith(_LAYER_OUTPUT):
            return not is_asking
        layer = int(name.removeprefix(_LAYER_OUTPUT))
        is_left_out = layer in self._left_out
        if is_asking:
            # Get an output to overwrite it, or because it is the input of a left-out layer.
            return is_left_out or layer + 1 in self._left_out
        try:
            if is_left_out:
                self._overwrite(tensor)
            else:
                self._layer_input = np.empty(native.ggml_nbytes(tensor) // 4, np.float32)
                read_tensor(tensor, self._layer_input)
        except BackendError as error:  # kept: exceptions cannot pass through native code
            self._failure = error
        return True

    def _overwrite(self, tensor: Any) -> None:
        values = self._layer_input
        # The last layer's output may have fewer rows than its input.
        if native.ggml_nbytes(tensor) != values.nbytes:
            values = values.reshape(-1, self._n_embd)[self._wanted_rows]
        write_tensor(tensor, np.ascontiguousarray(values))


def _batches(texts: Sequence[_PromptAndAnswer]) -> Iterator[tuple[Batch, list[int]]]:
    """Divide texts into batches of about `_N_BATCH` tokens, in which each text is a sequence.

    Yields:
        A batch, and the answer tokens that its logits should predict.
    """
    batch = Batch()
    expected: list[int] = []
    sequence = 0
    for prompt, answer in texts:
        tokens = (*prompt, *answer[:-1])
        if len(batch) and len(batch) + len(tokens) > _N_BATCH:
            yield batch, expected
            batch = Batch()
            expected = []
            sequence = 0
        for position, token in enumerate(tokens):
            # The last token of the prompt predicts the first token of the answer, and so on.
            wants_logits = position >= len(prompt) - 1
            batch.add(token, position, (sequence,), wants_logits)
        expected += answer
        sequence += 1
    yield batch, expected


# --- the search --------------------------------------------------------------------------------

#: The length scale of the Gaussian process: a number of layers in which two sets differ.
_LENGTH_SCALE = 4.0
#: The variance of its noise: an agreement on a few hundred tokens is only an estimate.
_NOISE = 0.02
#: The number of best sets so far, whose neighbours (different in one layer) are all candidates.
_N_BEST = 8
#: The number of random candidates that differ from one of the best sets in two layers.
_N_NEAR = 200
#: The number of candidates that are random sets.
_N_FAR = 100
#: The search ends after this many consecutive sets without a better one.
_PATIENCE = 60
#: Agreements below this count as this much, so that their logarithms are finite.
_MIN_AGREEMENT = 0.01
#: A random set includes a layer in proportion to this power of the agreement without the layer.
_HARMLESS_POWER = 4.0


def search(
    agreement: Agreement,
    speedup: Speedup,
    n_layer: int,
    budget: Budget,
    *,
    seed: int = 0,
) -> dict[Layers, float]:
    """Judge sets of layers until the time is over, or there is no improvement for a while.

    The first layer is never left out, nor are more than half of the layers.

    Args:
        agreement: Judges a set.
        speedup: Turns the agreement into a speed-up.
        n_layer: The number of layers of the complete model.
        budget: The time that the search may take.
        seed: The seed for random candidates.

    Returns:
        The expected speed-up of each judged set.
    """
    rng = np.random.default_rng(seed)
    speedups: dict[Layers, float] = {}
    # The logarithm of the agreement of the model without a single layer, for each layer. If layers
    # did their harm independently, agreements would multiply, so their logarithms would add up.
    log_agreements = np.zeros(n_layer)
    n_steps = n_layer - 1 + _PATIENCE

    def judge(left_out: Layers) -> float:
        """Judge a set, record its speed-up, and return its agreement."""
        measured = agreement(left_out)
        speedups[left_out] = speedup(len(left_out), measured)
        return measured

    def independent_speedup(left_out: Layers) -> float:
        """Return the speed-up that a set would have if its layers did their harm independently."""
        log_agreement = sum(log_agreements[layer] for layer in left_out)
        return speedup(len(left_out), math.exp(log_agreement))

    # First leave out each layer alone.
    for layer in range(1, n_layer):
        if budget.is_over():
            break
        budget.progress(layer - 1, n_steps)
        measured = judge(frozenset({layer}))
        log_agreements[layer] = math.log(max(_MIN_AGREEMENT, measured))

    # Then judge the most promising of many candidates in each step.
    n_worse = 0
    while not budget.is_over() and n_worse < _PATIENCE:
        budget.progress(n_layer - 1 + n_worse, n_steps)
        candidates = _candidates(speedups, log_agreements, rng)
        if not candidates:
            break
        sets = (*speedups, *candidates)
        independent = np.array([independent_speedup(left_out) for left_out in sets])
        improvements = _expected_improvements(speedups, candidates, independent, n_layer)
        chosen = candidates[int(improvements.argmax())]
        best_speedup = max(speedups.values())
        judge(chosen)
        if speedups[chosen] > best_speedup:
            n_worse = 0
        else:
            n_worse += 1
    return speedups


def _candidates(
    speedups: dict[Layers, float],
    log_agreements: _Floats,
    rng: np.random.Generator,
) -> list[Layers]:
    """Return sets that were not judged yet: some near the best sets, and some random ones.

    Args:
        speedups: The speed-ups of the judged sets.
        log_agreements: float64[n_layer], the logarithm of the agreement without each layer.
        rng: The generator for random sets.

    Returns:
        The sets, sorted, so that the order does not depend on hashes.
    """
    layers = np.arange(1, len(log_agreements))  # layer 0 cannot be left out
    n_max = len(log_agreements) // 2
    # Random sets prefer layers that do little harm when left out alone.
    layer_probs = np.exp(_HARMLESS_POWER * log_agreements[1:])
    layer_probs /= layer_probs.sum()

    def sample_layers(n: int, probs: _Floats | None = None) -> Layers:
        """Draw `n` different layers, uniformly unless `probs` are given."""
        return frozenset(rng.choice(layers, n, replace=False, p=probs).tolist())

    # `^` toggles layers: it leaves out those that were kept, and keeps those that were left out.
    best_sets = sorted(speedups, key=speedups.__getitem__, reverse=True)[:_N_BEST]
    candidates = {left_out ^ {layer} for left_out in best_sets for layer in layers.tolist()}
    for n in range(_N_NEAR):
        candidates.add(best_sets[n % len(best_sets)] ^ sample_layers(2))
    for _ in range(_N_FAR):
        n_left_out = int(rng.integers(1, n_max + 1))
        candidates.add(sample_layers(n_left_out, layer_probs))

    not_judged = candidates - speedups.keys()
    return sorted(
        (left_out for left_out in not_judged if 1 <= len(left_out) <= n_max),
        key=sorted,
    )


def _expected_improvements(
    speedups: dict[Layers, float],
    candidates: Sequence[Layers],
    independent: _Floats,
    n_layer: int,
) -> _Floats:
    """Return how much each candidate is expected to improve on the best speed-up so far.

    A Gaussian process (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006,
    algorithm 2.1) predicts the residual y of a set: its speed-up minus `independent`, which is due
    to the layers' interaction. For the judged sets X with residuals y, a candidate x, the
    covariance k and the Cholesky factor L of k(X, X) + noise:

        mean(x)     = (L^-1 k(X, x))' (L^-1 y)
        variance(x) = k(x, x) - |L^-1 k(X, x)|^2,  with k(x, x) = 1

    If a candidate's speed-up is normally distributed with mean m and standard deviation s, and the
    best speed-up so far is b, the expected improvement (Jones, Schonlau and Welch, "Efficient
    Global Optimization of Expensive Black-Box Functions", 1998) is, with z = (m - b) / s and the
    standard normal distribution's cdf and density:

        E[max(0, speed-up - b)] = (m - b) cdf(z) + s density(z)

    Args:
        speedups: The speed-ups of the judged sets.
        candidates: The sets to choose from.
        independent: float64[n_judged + n_candidates], the speed-ups that the judged sets and the
            candidates would have if layers did their harm independently.
        n_layer: The number of layers of the complete model.

    Returns:
        float64[n_candidates].
    """
    n_judged = len(speedups)
    judged_speedups = np.array(list(speedups.values()))
    residuals = judged_speedups - independent[:n_judged]
    # The process predicts residuals that are normalised to mean 0 and standard deviation 1.
    centre = residuals.mean()
    scale = residuals.std() + 1e-6

    # A set is a vector of zeros and ones, with ones for left-out layers: float64[n, n_layer].
    sets = [*speedups, *candidates]
    vectors = np.array([[layer in each for layer in range(n_layer)] for each in sets], float)
    judged_vectors = vectors[:n_judged]

    # Predict the mean and the standard deviation of each candidate's residual.
    noise = _NOISE * np.eye(n_judged)
    factor = np.linalg.cholesky(_covariance(judged_vectors, judged_vectors) + noise)
    to_candidates = np.linalg.solve(factor, _covariance(judged_vectors, vectors[n_judged:]))
    normalised = np.linalg.solve(factor, (residuals - centre) / scale)
    mean = centre + scale * (to_candidates.T @ normalised)
    variance = np.maximum(1e-12, 1.0 - (to_candidates**2).sum(axis=0))
    deviation = scale * np.sqrt(variance)

    # Turn both into the expected improvement of the speed-up.
    gain = independent[n_judged:] + mean - judged_speedups.max()
    z = gain / deviation
    cdf = 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0)))
    return np.asarray(gain * cdf + deviation * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def _covariance(first: _Floats, second: _Floats) -> _Floats:
    """Return the covariance of each pair of sets, which falls with their differing layers.

    Args:
        first: float64[n, n_layer], vectors of zeros and ones.
        second: float64[m, n_layer].

    Returns:
        float64[n, m].
    """
    n_differing = first @ (1.0 - second.T) + (1.0 - first) @ second.T
    return np.asarray(np.exp(-n_differing / _LENGTH_SCALE))
