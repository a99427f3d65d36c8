"""Decoder heads of tiny targets, made as `specgen draft make` makes them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specgen.options import ContextOptions
from specgen.session.session import Session
from specgen.train.head_training import TrainedHeads, train_heads
from specgen.train.target_text import TargetText, write_text
from specgen.train.training_loop import Budget, TextOptions
from tests.helpers import sessions

#: Tokens of the text that the heads are made from, and of an answer.
N_TOKENS, N_ANSWER = 3600, 60


def prompts(n: int = 80) -> list[str]:
    """Different strings of letters."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefgh ", k=24)) + str(number) for number in range(n)]


def counting() -> Callable[[], float]:
    """A clock that advances by one second each time it is read."""
    return iter(range(10**9)).__next__


def opened(target: Path) -> Session:
    """A target without a draft."""
    context = ContextOptions(n_threads=1, n_gpu_layers=0)  # quicker for tiny models
    return sessions.opened(target, context=context, n_tokens=N_ANSWER, ignore_eos=True)


def written(session: Session, folder: Path, texts: Sequence[str], n_tokens: int = N_TOKENS) -> int:
    """Let a target write its answers into a folder; return the number of tokens."""
    options = TextOptions(texts, n_tokens, N_ANSWER, n_parallel=8)
    return write_text(session, options, folder, Budget(time.monotonic))


def trained(
    session: Session, folder: Path, path: Path, seconds: float = 60.0
) -> TrainedHeads | None:
    """Heads trained on the text in a folder, and written to `path`."""
    budget = Budget(time.monotonic, time.monotonic() + seconds)
    target = session.options.target
    return train_heads(TargetText(folder), target, session.target, path, budget)


def make_heads(target: Path, path: Path, folder: Path, seconds: float = 60.0) -> TrainedHeads:
    """Train heads for a target on its own text, which is kept in `folder`; write them to `path`."""
    with opened(target) as loaded:
        written(loaded, folder, prompts())
        made = trained(loaded, folder, path, seconds)
    assert made is not None
    return made
