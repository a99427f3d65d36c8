"""A target's own answers with its hidden states and likeliest tokens: the text that drafts are made from.

A folder holds a file for each answer, ``000123.npz``: the prompt, its tokens and those of the answer, and for each token
of the answer the target's final hidden state before it and the likeliest tokens there.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specgen.errors import ModelFileError, OutputError, PairError, UsageError
from specgen.llama import LlamaBackend
from specgen.method.backend import Batch
from specgen.session.engine import Engine
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.system.files import new_beside
from specgen.system.json_lines import locked, write_errors
from specgen.train.training_loop import Budget

#: The number of likeliest tokens that are kept for each position.
N_TOP = 16
#: Every tenth prompt is for judging, not for learning.
HELD_BACK_EVERY = 10
#: The number of rows for which llama.cpp computes hidden states and logits at once.
_N_ROWS = 64
_FILES = "[0-9]*.npz"


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """An answer of the target: its tokens, including the one that ended it."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    #: Whether the answer is for judging, not for learning.
    is_held_back: bool


class TargetText:
    """The answers in a folder, for reading: all of them, or those to some `prompts`.

    Raises `ModelFileError` if a file is damaged."""

    def __init__(self, folder: Path, prompts: Collection[str] | None = None) -> None:
        found = [(_read_answer(path), path) for path in sorted(folder.glob(_FILES))]
        wanted = None if prompts is None else frozenset(prompts)
        kept = [each for each in found if wanted is None or each[0].prompt in wanted]
        self.answers = [answer for answer, _ in kept]
        self._paths = [path for _, path in kept]

    def hidden(self, index: int) -> NDArray[np.float16]:
        """Return the target's final hidden states (after the last norm) before each token of an answer:
        float16[n_tokens, n_embd]. Row 0 belongs to the prompt's last token."""
        return _arrays(self._paths[index], "hidden")[0]

    def top(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the likeliest tokens at each position of an answer, best first, and their probabilities at
        temperature 1: int32[n_tokens, N_TOP] and float16[n_tokens, N_TOP]."""
        tokens, probabilities = _arrays(self._paths[index], "top_tokens", "top_probabilities")
        return tokens, probabilities


def _arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Return arrays of an answer's file. Raise `ModelFileError`."""
    try:
        with path.open("rb") as file, np.load(file) as saved:
            return [saved[name] for name in names]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ModelFileError(f"{path}: is no answer", f"delete {path}: it is made again") from error


def _read_answer(path: Path) -> TargetAnswer:
    names = ("prompt", "prompt_tokens", "tokens", "is_held_back")
    prompt, prompt_tokens, tokens, held_back = _arrays(path, *names)
    text = prompt.tobytes().decode("utf-8", "replace")
    return TargetAnswer(
        text, tuple(prompt_tokens.tolist()), tuple(tokens.tolist()), bool(held_back)
    )


def is_held_back(index: int) -> bool:
    """Return whether the prompt with this number, from 0, is for judging."""
    return index % HELD_BACK_EVERY == HELD_BACK_EVERY - 1


def bytes_of(n_tokens: int, n_embd: int) -> int:
    """Return the approximate size on the disk of `n_tokens` tokens of text."""
    return n_tokens * (2 * n_embd + 6 * N_TOP + 8)


def write_text(
    loaded: Session,
    prompts: Sequence[str],
    folder: Path,
    budget: Budget,
    *,
    n_tokens: int,
    n_parallel: int,
    max_tokens: int,
) -> int:
    """Let the target answer prompts until the folder holds `n_tokens` tokens of answers to them, or no
    prompts or time are left. Return the number of tokens of answers to these prompts in the folder.

    Prompts that have an answer in the folder are skipped. Up to `n_parallel` prompts are answered at once,
    each with at most `max_tokens` tokens. The budget's `progress` gets the tokens so far and `n_tokens`. An
    interrupted call keeps the finished answers. Raises `OutputError`, `MemoryLimitError`, `UsageError` if `max_tokens` do
    not fit the target's context, `PairError` if the target has a recurrent state, and `ModelFileError` if the
    folder's files are damaged.
    """
    if loaded.target.has_recurrent_state:
        raise PairError(
            f"{loaded.target.name} has a recurrent state: its hidden states cannot be read"
        )
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = OutputError(f"{folder}: another process is writing there", "wait until it is done")
    with locked(folder / "lock", busy), contextlib.ExitStack() as resources:
        writer = _Writer(folder, loaded, resources)
        asked = frozenset(prompts)
        answered = {answer.prompt for answer in writer.answers if answer.prompt in asked}
        left = [
            (text, is_held_back(index))
            for index, text in enumerate(prompts)
            if text not in answered
        ]
        n_have = sum(len(answer.tokens) for answer in writer.answers if answer.prompt in answered)
        budget.progress(n_have, n_tokens)
        if n_have >= n_tokens or not left:
            return n_have
        n_ctx = _context_size(loaded, [text for text, _ in left], max_tokens)
        with Engine(
            loaded, n_parallel=n_parallel, n_ctx=n_ctx, interrupted=budget.is_over
        ) as engine:
            waiting: dict[Request, tuple[str, bool]] = {}
            while (left or waiting) and not budget.is_over() and n_have < n_tokens:
                while left and len(waiting) < n_parallel:
                    text, is_judged = left.pop(0)
                    prompt = loaded.prompts.of_text(text)
                    if len(prompt.tokens) + max_tokens <= n_ctx:
                        waiting[engine.insert(prompt)] = text, is_judged
                engine.step()
                for done in [answer for answer in waiting if answer.is_done]:
                    text, is_judged = waiting.pop(done)
                    answer = _whole_answer(loaded, done, text, is_judged)
                    if answer is not None:
                        writer.add(answer)
                        n_have += len(answer.tokens)
                        budget.progress(n_have, n_tokens)
    return n_have


class _Writer:
    """Writes answers to a folder, with the target's hidden states and likeliest tokens. `resources` close
    what it opens."""

    def __init__(self, folder: Path, loaded: Session, resources: contextlib.ExitStack) -> None:
        self._folder, self._loaded, self._resources = folder, loaded, resources
        self.answers = TargetText(folder).answers
        self._number = max((int(path.stem) for path in folder.glob(_FILES)), default=-1)
        self._backend: LlamaBackend | None = None

    def add(self, answer: TargetAnswer) -> None:
        """Let the target read an answer, and write it."""
        pieces = [
            (states.astype(np.float16), *_likeliest(logits))
            for logits, states in self._read(answer.prompt_tokens, answer.tokens)
        ]
        hidden, top_tokens, top_probabilities = map(np.concatenate, zip(*pieces, strict=True))
        self._number += 1
        path = self._folder / f"{self._number:06d}.npz"
        with write_errors(path), new_beside(path) as new:
            with new.open("wb") as file:
                np.savez(
                    file,
                    prompt=np.frombuffer(answer.prompt.encode("utf-8", "replace"), np.uint8),
                    prompt_tokens=np.array(answer.prompt_tokens, np.int32),
                    tokens=np.array(answer.tokens, np.int32),
                    is_held_back=np.array(answer.is_held_back),
                    hidden=hidden,
                    top_tokens=top_tokens,
                    top_probabilities=top_probabilities,
                )
            new.replace(path)
        self.answers.append(answer)

    def _read(
        self, prompt: Sequence[int], answer: Sequence[int]
    ) -> Iterator[tuple[Logits, NDArray[np.float32]]]:
        """Yield the logits and the final hidden states before each token of an answer, in pieces:
        float32[n, n_vocab] and float32[n, n_embd], valid until the next piece."""
        backend = self._backend_for(len(prompt) + len(answer))
        if backend.length(0):
            backend.remove(0)
        before = prompt[:-1]
        for start in range(0, len(before), backend.n_batch):
            piece = before[start : start + backend.n_batch]
            backend.decode(_rows(piece, start, wanted=False))
        text = [prompt[-1], *answer[:-1]]
        for start in range(0, len(text), _N_ROWS):
            piece = text[start : start + _N_ROWS]
            yield backend.decode_hidden(_rows(piece, len(before) + start, wanted=True))

    def _backend_for(self, n_tokens: int) -> LlamaBackend:
        if self._backend is None or self._backend.n_ctx < n_tokens:
            self._backend = LlamaBackend(
                self._loaded.target,
                self._loaded.costs.context_options(),
                n_ctx=_rounded(n_tokens, 1024),
                clock=self._loaded.clock,
                n_outputs=_N_ROWS,
            )
            self._resources.callback(self._backend.close)
        return self._backend


def _rows(tokens: Sequence[int], position: int, *, wanted: bool) -> Batch:
    n = len(tokens)
    return Batch(list(tokens), list(range(position, position + n)), [(0,)] * n, [wanted] * n)


def _likeliest(logits: Logits) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the likeliest tokens and their probabilities for each row of logits, float32[n, n_vocab]."""
    n_top = min(N_TOP, logits.shape[1])
    tokens = np.zeros((len(logits), N_TOP), np.int32)
    probabilities = np.zeros((len(logits), N_TOP), np.float16)
    for row, logit in enumerate(logits):
        top = np.argpartition(logit, -n_top)[-n_top:]
        top = top[np.argsort(-logit[top], kind="stable")]
        scaled = np.exp(logit - logit[top[0]])
        tokens[row, :n_top] = top
        probabilities[row, :n_top] = scaled[top] / scaled.sum()
    return tokens, probabilities


def _context_size(loaded: Session, texts: Sequence[str], max_tokens: int) -> int:
    """Return a context size, in tokens, in which nine of ten prompts fit with their answers."""
    lengths = sorted(len(loaded.prompts.of_text(text).tokens) for text in texts)
    n_prompt = lengths[int(0.9 * (len(lengths) - 1))]
    n_ctx = _rounded(n_prompt + max_tokens, 256)
    n_train = loaded.target.n_ctx_train
    if n_train and n_ctx > n_train:
        raise UsageError(f"{max_tokens} tokens an answer: the target has room for {n_train}")
    return n_ctx


def _rounded(n_tokens: int, step: int) -> int:
    return -(-n_tokens // step) * step


def _whole_answer(
    loaded: Session, request: Request, text: str, is_judged: bool
) -> TargetAnswer | None:
    """Return the answer of a request that is done; None if it is empty or did not end by itself."""
    finished = request.finished
    if request.failure is not None or finished is None or not finished.token_ids:
        return None
    tokens = finished.token_ids
    if finished.finish_reason == "stop":
        vocabulary, end = loaded.target.vocabulary, finished.stopped_by
        ends = [token for token in vocabulary.end_tokens() if vocabulary.token_text(token) == end]
        tokens = (*tokens, *ends[:1])
    elif finished.finish_reason != "length":
        return None
    return TargetAnswer(text, request.prompt.tokens, tokens, is_judged)
