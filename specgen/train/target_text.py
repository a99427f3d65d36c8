"""A target's own answers with its hidden states and likeliest tokens: the text that drafts are made from.

A folder holds ``answers.jsonl``, one answer a line, and two arrays with a row for each token of the answers:
``hidden.f16``, the target's final hidden state before the token, and ``top.bin``, the likeliest tokens there.
All three are only appended to. If a process is killed, the next one continues after the last answer that is
complete in all three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from specgen.system.json_lines import (
    AppendedFile,
    DamagedLineError,
    locked,
    take_lines,
    to_line,
    write_errors,
)
from specgen.train.training_loop import Budget

#: The number of likeliest tokens that are kept for each position.
N_TOP = 16
#: Every tenth prompt is for judging, not for learning.
HELD_BACK_EVERY = 10
#: The number of rows for which llama.cpp computes hidden states and logits at once.
_N_ROWS = 64
_HIDDEN, _TOP, _ANSWERS = "hidden.f16", "top.bin", "answers.jsonl"
_TOP_ROW = np.dtype([("tokens", "<i4", N_TOP), ("probabilities", "<f2", N_TOP)])


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

    Raises `ModelFileError` if the files are damaged."""

    def __init__(self, folder: Path, n_embd: int, prompts: Collection[str] | None = None) -> None:
        self._folder = folder
        self._n_embd = n_embd
        written = _whole_answers(folder, n_embd)[0]
        ends = np.cumsum([len(answer.tokens) for answer in written], dtype=np.int64).tolist()
        self._n_rows = ends[-1] if ends else 0
        wanted = None if prompts is None else frozenset(prompts)
        kept = [
            (answer, slice(end - len(answer.tokens), end))
            for answer, end in zip(written, ends, strict=True)
            if wanted is None or answer.prompt in wanted
        ]
        self.answers = [answer for answer, _ in kept]
        self._rows = [rows for _, rows in kept]

    @cached_property
    def _hidden(self) -> NDArray[np.float16]:
        shape = (self._n_rows, self._n_embd)
        return np.memmap(self._folder / _HIDDEN, np.float16, "r", shape=shape)

    @cached_property
    def _top(self) -> NDArray[Any]:
        return np.memmap(self._folder / _TOP, _TOP_ROW, "r", shape=(self._n_rows,))

    def hidden(self, index: int) -> NDArray[np.float16]:
        """Return the target's final hidden states (after the last norm) before each token of an answer:
        float16[n_tokens, n_embd]. Row 0 belongs to the prompt's last token."""
        return self._hidden[self._rows[index]]

    def top(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the likeliest tokens at each position of an answer, best first, and their probabilities at
        temperature 1: int32[n_tokens, N_TOP] and float16[n_tokens, N_TOP]."""
        rows = self._top[self._rows[index]]
        return rows["tokens"], rows["probabilities"]


def is_held_back(index: int) -> bool:
    """Return whether the prompt with this number, from 0, is for judging."""
    return index % HELD_BACK_EVERY == HELD_BACK_EVERY - 1


def bytes_of(n_tokens: int, n_embd: int) -> int:
    """Return the approximate size on the disk of `n_tokens` tokens of text."""
    return n_tokens * (2 * n_embd + _TOP_ROW.itemsize + 8)


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
    """Appends answers to a folder, with the target's hidden states and likeliest tokens. `resources` close
    what it opens."""

    def __init__(self, folder: Path, loaded: Session, resources: contextlib.ExitStack) -> None:
        self._loaded, self._resources = loaded, resources
        n_embd = loaded.target.n_embd
        self.answers, n_bytes = _whole_answers(folder, n_embd)
        n_rows = sum(len(answer.tokens) for answer in self.answers)

        def opened(name: str, size: int) -> AppendedFile:
            file = resources.enter_context(AppendedFile.opened(folder / name))
            file.cut(size)
            return file

        self._lines = opened(_ANSWERS, n_bytes)
        self._hidden = opened(_HIDDEN, n_rows * n_embd * 2)
        self._top = opened(_TOP, n_rows * _TOP_ROW.itemsize)
        self._backend: LlamaBackend | None = None

    def add(self, answer: TargetAnswer) -> None:
        """Let the target read an answer, and append it; its line in ``answers.jsonl`` is written last."""
        hidden, top = [], []
        for logits, states in self._read(answer.prompt_tokens, answer.tokens):
            hidden.append(states.astype(np.float16))
            top.append(_likeliest(logits))
        self._hidden.append(np.concatenate(hidden).tobytes())
        self._top.append(np.concatenate(top).tobytes())
        line = {
            "prompt": answer.prompt,
            "prompt_tokens": answer.prompt_tokens,
            "tokens": answer.tokens,
            "held_back": answer.is_held_back,
        }
        self._lines.append(to_line(line))
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


def _likeliest(logits: Logits) -> NDArray[Any]:
    """Return the likeliest tokens and their probabilities for each row of logits, float32[n, n_vocab]."""
    n_top = min(N_TOP, logits.shape[1])
    rows = np.zeros(len(logits), _TOP_ROW)
    for row, out in zip(logits, rows, strict=True):
        top = np.argpartition(row, -n_top)[-n_top:]
        top = top[np.argsort(-row[top], kind="stable")]
        scaled = np.exp(row - row[top[0]])
        out["tokens"][:n_top] = top
        out["probabilities"][:n_top] = scaled[top] / scaled.sum()
    return rows


def _whole_answers(folder: Path, n_embd: int) -> tuple[list[TargetAnswer], int]:
    """Return the answers that have all their rows in both arrays, and the size of their lines in bytes."""
    path = folder / _ANSWERS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    answers: list[TargetAnswer] = []

    def take(line: Any) -> None:
        prompt, held_back = line["prompt"], line["held_back"]
        if not isinstance(prompt, str) or not isinstance(held_back, bool):
            raise TypeError
        prompt_tokens, tokens = _tokens(line["prompt_tokens"]), _tokens(line["tokens"])
        answers.append(TargetAnswer(prompt, prompt_tokens, tokens, held_back))

    try:
        n_bytes = take_lines(data, take)
    except DamagedLineError as error:
        hint = f"delete {folder}: it is made again"
        raise ModelFileError(f"{path}: line {error.number} is no answer", hint) from error
    n_rows = min(_size(folder / _HIDDEN) // (2 * n_embd), _size(folder / _TOP) // _TOP_ROW.itemsize)
    ends = np.cumsum([len(answer.tokens) for answer in answers])
    n_whole = int(np.searchsorted(ends, n_rows, side="right"))
    if n_whole < len(answers):
        n_bytes = sum(len(line) + 1 for line in data.split(b"\n")[:n_whole])
    return answers[:n_whole], n_bytes


def _tokens(value: Any) -> tuple[int, ...]:
    if not value or not all(isinstance(token, int) and token >= 0 for token in value):
        raise ValueError
    return tuple(value)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


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
