"""The checks of one architecture, for a random model of llama.cpp's tests or for a tiny model.

With specgen's kernels, texts and rows must be exactly the same. llama.cpp's kernels may round a row
differently in a batch. Then a row must be as close as batches alone move it, and a text may differ
only where two tokens are that close (`specgen.measure.exactness.near_ties`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np

from specgen.llama import LlamaBackend, LlamaModel
from specgen.measure.exactness.greedy_check import GreedyResult, check_greedy
from specgen.measure.exactness.near_ties import SLACK, movement
from specgen.method.backend import Batch
from specgen.options import ContextOptions, parse_tree
from specgen.session.engine import Engine
from specgen.session.session import Session
from specgen.system.arrays import Logits
from tests.helpers.rows import decoded, decoded_last
from tests.helpers.sessions import answered, opened

Kind: TypeAlias = Literal["f32", "q4_k"]

#: A random model repeats all of its tokens, so a match of one token makes an n-gram.
PROMPT = "".join(map(chr, range(32, 127))) + " the cat is in the else for with that it be not self"
PROMPTS = (PROMPT, "the cat is in the house of the", "a", PROMPT[20:70])
BATCHES = (2, 3, 8, 16, 33)
N_TOKENS = 20
#: llama.cpp's own code may always move a row by this, in addition to what batches move it by: it
#: reads activation functions (GELU) from tables of f16, and sums up values of an f16 cache in f16.
ROUNDING = 0.03
#: Threads for texts, and for comparing rows: each computes a part of every row.
N_THREADS, N_THREADS_ROWS = 1, 2
#: Cells of the contexts of backends; of a full context.
N_CTX, N_CTX_FULL = 256, 160


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with two drafts: `near` often agrees with it, `wrong` never does."""

    path: Path
    near: Path
    wrong: Path
    #: Whether specgen's kernels compute; else llama.cpp's own code.
    kernels: bool
    #: Where and how contexts compute.
    context: ContextOptions = ContextOptions()


class CheckFailedError(AssertionError):
    """A check failed. The message gives the reason in one line."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CheckFailedError(message)


# --- texts


def _loaded(
    subject: Subject, draft: str | Path, tree: str = "off", n_tokens: int = N_TOKENS, **context: Any
) -> Session:
    drafting = {"ngram_min": 1, "ngram_max": 3, "tree": parse_tree(tree)}
    return opened(
        subject.path,
        draft,
        context=replace(subject.context, n_threads=N_THREADS, **context),
        n_tokens=n_tokens,
        ignore_eos=True,
        drafting=drafting,
    )


def load(subject: Subject) -> str:
    """The model generates text."""
    with _loaded(subject, "none") as loaded:
        n_tokens = answered(loaded, PROMPT).n_tokens
    _require(n_tokens == N_TOKENS, f"{n_tokens} tokens of {N_TOKENS}")
    return ""


def _greedy(subject: Subject, draft: str | Path, tree: str = "off") -> str:
    """Greedy text with drafts is the same as with plain decoding."""
    with _loaded(subject, draft, tree) as loaded:
        (result,) = check_greedy(loaded, {1: loaded.prompts.of_text(PROMPT, chat=False)})
    _require(result.n_drafted > 0, "nothing was drafted")
    return _compared(result, subject)


def _compared(result: GreedyResult, subject: Subject) -> str:
    drafted = f"{result.n_accepted} of {result.n_drafted} drafted tokens accepted"
    difference = result.difference
    if difference is None:
        return drafted
    what = (
        f"the text differs at token {difference.position} by {difference.gap:.2g} logits, {drafted}"
    )
    _require(not subject.kernels, what)
    if result.is_defect:
        with _backends(subject) as backends:
            backend = backends(1)
            # In logits: the scale of a row of a random text, as good as any.
            spread = float(np.std(_along(backend, _random_text(1), 1)))
            _require(difference.gap <= _allowed(backend) * spread, what)
    return drafted + "; a near-tie"


def full_context(subject: Subject) -> str:
    """The answer continues until the context is full."""
    with _loaded(subject, subject.near, n_tokens=-1, n_ctx=N_CTX_FULL) as loaded:
        prompt = loaded.prompts.of_text(PROMPT, chat=False)
        (result,) = check_greedy(loaded, {1: prompt})
    _require(result.n_tokens >= N_CTX_FULL - len(prompt.tokens), f"only {result.n_tokens} tokens")
    return f"{result.n_tokens} tokens, {_compared(result, subject)}"


def parallel(subject: Subject) -> str:
    """Four answers at once with drafts are the same as each answer alone."""
    with _loaded(subject, "none") as loaded:
        expected = [tuple(answered(loaded, prompt).token_ids) for prompt in PROMPTS]
    with _loaded(subject, subject.near) as loaded, Engine(loaded, n_parallel=4) as engine:
        asked = [engine.insert(loaded.prompts.of_text(prompt, chat=False)) for prompt in PROMPTS]
        list(engine.run())
    n_ties = 0
    for number, (answer, tokens) in enumerate(zip(asked, expected, strict=True)):
        if answer.failure is not None:
            raise answer.failure
        assert answer.finished is not None
        if tuple(answer.finished.token_ids) == tokens:
            continue
        at = _first_difference(answer.finished.token_ids, tokens)
        what = f"answer {number} differs at token {at}"
        _require(not subject.kernels, what)
        text = (*answer.prompt.tokens, *tokens[:at])
        ours, theirs = tokens[at], answer.finished.token_ids[at]
        with _backends(subject) as backends:
            backend = backends(1)
            row = _along(backend, text, 1)[-1]
            gap = float(row[ours] - row[theirs]) / float(np.std(row))
            _require(gap <= _allowed(backend), f"{what}, by {gap:.2g} deviations")
        n_ties += 1
    return f"{n_ties} near-ties" if n_ties else ""


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)) - 1)


# --- rows


Opener: TypeAlias = Callable[[int], LlamaBackend]


@contextmanager
def _backends(subject: Subject, n_threads: int = N_THREADS) -> Iterator[Opener]:
    """Open backends with this number of sequences."""
    model = LlamaModel(subject.path, n_gpu_layers=subject.context.n_gpu_layers)
    options = replace(subject.context, n_threads=n_threads)
    with ExitStack() as closing:
        closing.callback(model.close)

        def backend(n_sequences: int) -> LlamaBackend:
            sizes: dict[str, Any] = {
                "n_ctx": N_CTX,
                "n_sequences": n_sequences,
                "n_outputs": max(BATCHES),
            }
            found = LlamaBackend(model, options, clock=time.perf_counter, **sizes)
            closing.callback(found.close)
            return found

        yield backend


def _random_text(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, n)]


def _along(backend: LlamaBackend, text: Sequence[int], size: int, n_prompt: int = 0) -> Logits:
    """The rows of a text, decoded in batches of `size`: float32[n_rows, n_vocab]. A prompt before
    them is one batch, which wants the last of its rows only.
    """
    backend.remove(0)
    rows = [decoded_last(backend, text[:n_prompt])[None]] if n_prompt else []
    starts = range(n_prompt, len(text), size)
    rows += [decoded(backend, text[start : start + size]) for start in starts]
    return np.concatenate(rows)


def _moved(backend: LlamaBackend) -> dict[str, float]:
    """Return how far each kind of batch moves rows of a random text; equal bits are left out."""
    text = _random_text(3 * max(BATCHES))
    alone = _along(backend, text, 1)
    _require(bool(np.isfinite(alone).all()), "rows are not finite")
    ways = {f"batches of {size}": _along(backend, text, size) for size in BATCHES}
    ways["after a prompt"] = _along(backend, text, 1, n_prompt=len(text) - 8)
    moved: dict[str, float] = {}
    for how, found in ways.items():
        pairs = [*zip(found, alone[-len(found) :], strict=True)]
        if not all(np.array_equal(one, other) for one, other in pairs):
            moved[how] = max(movement(one, other) for one, other in pairs)
    return moved


def _allowed(backend: LlamaBackend) -> float:
    """How far a row may move that rounding in batches moves; 0 where it moves none."""
    moved = _moved(backend)
    return SLACK * max(moved.values()) + ROUNDING if moved else 0.0


def rows(subject: Subject) -> str:
    """Batch invariance: a row is bit-identical in batches of all sizes, and after any prefill.

    llama.cpp's kernels do not promise it.
    """
    with _backends(subject, N_THREADS_ROWS) as backends:
        moved = _moved(backends(1))
    told = ", ".join(f"{how}: {by:.2g}" for how, by in moved.items())
    _require(not (subject.kernels and moved), told)
    return told


def _moved_by(backend: LlamaBackend, text: Sequence[int], row: Logits) -> float:
    """How far batches move the last row of this very text."""
    return max(movement(_along(backend, text, size)[-1], row) for size in (1, *BATCHES))


def fuzz(subject: Subject) -> str:
    """Random drafts and removals in three sequences leave the caches as if the kept texts alone had
    been decoded."""
    chance = np.random.default_rng(1)
    with _backends(subject) as backends:
        fresh = backends(1)
        allowed = _allowed(fresh)
        backend = backends(3)
        texts: list[list[int]] = [[], [], []]
        n_rows = 0
        for n_round in range(24):
            together = [s for s in range(3) if chance.random() < 0.7] or [0]
            batch = Batch()
            before = [len(each) for each in texts]
            for sequence in together:
                if chance.random() < 0.1:
                    backend.remove(sequence)
                    texts[sequence] = []
                    before[sequence] = 0
                n_new = int(chance.integers(1, 8)) if texts[sequence] else 40
                if texts[sequence]:
                    backend.checkpoint(sequence)
                for token in chance.integers(3, 250, n_new):
                    wants = bool(texts[sequence]) and n_new < 40
                    batch.add(int(token), len(texts[sequence]), (sequence,), wants)
                    texts[sequence].append(int(token))
                batch.wants_logits[-1] = True
            found = backend.decode(batch).copy()
            wanted = [i for i, wants in enumerate(batch.wants_logits) if wants]
            last = {batch.sequences[i][0]: row for row, i in enumerate(wanted)}
            for sequence, row in last.items():
                if n_round % 4 == 3:
                    expected = _along(fresh, texts[sequence], 16)[-1]
                    by = movement(found[row], expected)
                    if by > allowed and not subject.kernels:
                        # Some texts are moved further than others.
                        moved = _moved_by(fresh, texts[sequence], expected)
                        allowed = max(allowed, SLACK * moved + ROUNDING)
                    _require(
                        by <= allowed,
                        f"a row moved by {by:.2g} in round {n_round} ({allowed:.2g} allowed)",
                    )
                    n_rows += 1
                if before[sequence]:  # the checkpoint
                    kept = int(chance.integers(before[sequence], len(texts[sequence]) + 1))
                    backend.remove(sequence, kept)
                    del texts[sequence][kept:]
    return f"{n_rows} rows"


def can_branch(subject: Subject) -> bool:
    """Whether trees are possible."""
    with _backends(subject) as backends:
        return backends(1).rollback == "cells"


#: The checks by name, in the order in which they run. `load` is first, because all others need it.
CHECKS: MappingProxyType[str, Callable[[Subject], str]] = MappingProxyType(
    {
        "load": load,
        "n-gram": lambda subject: _greedy(subject, "ngram"),
        "model": lambda subject: _greedy(subject, subject.near),
        "wrong draft": lambda subject: _greedy(subject, subject.wrong),
        "tree": lambda subject: _greedy(subject, subject.near, "3,2,1"),
        "full context": full_context,
        "four sequences": parallel,
        "rows": rows,
        "fuzz": fuzz,
    }
)
