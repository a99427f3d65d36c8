"""A target's own answers: written with its hidden states and likeliest tokens, and read as rows to
train on.

A folder holds a file for each answer, ``000123.npz``: the prompt, its tokens and those of the
answer, and for each token of the answer the target's final hidden state before it and the likeliest
tokens there.
"""

from __future__ import annotations

import contextlib
import datetime
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.translated import Translation
from specgen.drafters.vocabularies import check_pair
from specgen.errors import ModelFileError, OutputError, PairError, UsageError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.method.backend import Batch
from specgen.session.engine import Engine
from specgen.session.kept_answers import KeptAnswer
from specgen.session.prompts import Prompts
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.system.files import locked, new_beside, write_errors
from specgen.train.training_loop import Budget, TextOptions

#: The number of likeliest tokens that are kept for each position.
N_TOP = 16
#: The number of rows for which llama.cpp computes hidden states and logits at once.
_N_ROWS = 64
_FILES = "[0-9]*.npz"
#: The fewest tokens of an answer that was not finished.
_SHORTEST = 8
#: The number of tokens in a row, and the most before a part of a kept answer: most answers fit with
#: their prompt.
N_COLUMNS, _N_BEFORE = 384, 192

_Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """An answer of the target: its tokens, including the one that ended it."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    #: Whether the answer is for judging, not for learning.
    is_held_back: bool


class TargetText:
    """The answers in a folder: all, or those to some `prompts`. Raises `ModelFileError` for a
    damaged file.
    """

    def __init__(self, folder: Path, prompts: Collection[str] | None = None) -> None:
        found = [(_read_answer(path), path) for path in sorted(folder.glob(_FILES))]
        wanted = None if prompts is None else frozenset(prompts)
        kept = [each for each in found if wanted is None or each[0].prompt in wanted]
        self.answers = [answer for answer, _ in kept]
        self._paths = [path for _, path in kept]

    def hidden(self, index: int) -> NDArray[np.float16]:
        """Return the target's final hidden states before each token of an answer: float16[n_tokens,
        n_embd].
        """
        return _arrays(self._paths[index], "hidden")[0]

    def top(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the likeliest tokens at each position and their probabilities: int32 and
        float16[n_tokens, N_TOP].
        """
        tokens, probabilities = _arrays(self._paths[index], "top_tokens", "top_probabilities")
        return tokens, probabilities


def _arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file) as saved:
            return [saved[name] for name in names]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ModelFileError(f"{path}: is no answer", f"delete {path}: it is made again") from error


def _read_answer(path: Path) -> TargetAnswer:
    names = ("prompt", "prompt_tokens", "tokens", "is_held_back")
    prompt, *texts, held_back = _arrays(path, *names)
    prompt_tokens, tokens = (tuple(text.tolist()) for text in texts)
    text = prompt.tobytes().decode("utf-8", "replace")
    return TargetAnswer(text, prompt_tokens, tokens, bool(held_back))


def is_held_back(index: int) -> bool:
    """Return whether the prompt with this number, from 0, is for judging: every tenth is."""
    return index % 10 == 9


def write_text(
    session: Session,
    options: TextOptions,
    folder: Path,
    budget: Budget,
    n_least: int = 0,
    latest_s: float = 0.0,
) -> int:
    """Let the target answer prompts that have no answer yet, until there is enough text, no prompt
    or no time; return the number of tokens there are. Finished answers stay if interrupted. If
    there are less than `n_least` new tokens, it goes on until `latest_s`, and keeps beginnings of
    answers, too. Raise `OutputError`, `MemoryLimitError`, `UsageError`, `PairError` for a recurrent
    target, and `ModelFileError` if a file is damaged.
    """
    if session.target.has_recurrent_state:
        why = "has a recurrent state: its hidden states cannot be read"
        raise PairError(f"{session.target.name} {why}")
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = OutputError(f"{folder}: another process is writing there", "wait until it is done")
    with locked(folder / "lock", busy):
        n_tokens, max_tokens = options.n_tokens, options.max_tokens
        answered = TargetText(folder, options.prompts).answers
        n_have = sum(len(answer.tokens) for answer in answered)
        budget.progress(n_have, n_tokens)
        known = {answer.prompt for answer in answered}
        n_least += n_have

        def is_over() -> bool:
            until_s = budget.until_s if n_have >= n_least else max(latest_s, budget.until_s)
            return budget.interrupted() or budget.clock() > until_s

        # Of ten prompts, that for judging comes first: there is something to judge by however few
        # answers there are.
        order = sorted(
            enumerate(options.prompts), key=lambda each: (each[0] // 10, not is_held_back(each[0]))
        )
        left = {
            text: (session.prompts.of_text(text), is_held_back(index))
            for index, text in order
            if text not in known and n_have < n_tokens
        }
        if not left:
            return n_have
        n_ctx = _context_size(session, [len(each.tokens) for each, _ in left.values()], max_tokens)
        sizes: dict[str, Any] = {"n_parallel": options.n_parallel, "n_ctx": n_ctx}
        number = max((int(path.stem) for path in folder.glob(_FILES)), default=-1)
        reader = LlamaBackend(
            session.target,
            session.costs.context_options(),
            n_ctx=n_ctx,
            clock=session.clock,
            n_outputs=_N_ROWS,
        )
        with contextlib.closing(reader), Engine(session, interrupted=is_over, **sizes) as engine:
            waiting = {
                engine.insert(prompt): (text, is_judged)
                for text, (prompt, is_judged) in left.items()
                if len(prompt.tokens) + max_tokens <= n_ctx
            }
            is_last = False
            while waiting and not is_last and n_have < n_tokens:
                is_last = is_over()
                if is_last and (budget.interrupted() or n_have >= n_least):
                    break
                engine.step()
                for done in [answer for answer in waiting if answer.is_done]:
                    text, is_judged = waiting.pop(done)
                    answer = _whole_answer(session, done, text, is_judged, keeps_cut=is_last)
                    if answer is not None:
                        number += 1
                        _write_answer(folder / f"{number:06d}.npz", answer, reader)
                        n_have += len(answer.tokens)
                        budget.progress(n_have, n_tokens)
    return n_have


def _write_answer(path: Path, answer: TargetAnswer, reader: LlamaBackend) -> None:
    pieces = [
        (states.astype(np.float16), *_likeliest(logits))
        for logits, states in read_answer(reader, answer.prompt_tokens, answer.tokens)
    ]
    hidden, top_tokens, top_probabilities = map(np.concatenate, zip(*pieces, strict=True))
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


def read_answer(
    backend: LlamaBackend, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[tuple[Logits, NDArray[np.float32]]]:
    """Yield logits and final hidden states before each token of an answer, in pieces, valid until
    the next.
    """
    if backend.length(0):
        backend.remove(0)
    text, n_before, n_rows = [*prompt, *answer[:-1]], len(prompt) - 1, backend.n_outputs
    for start in range(0, n_before, backend.n_batch):
        end = min(start + backend.n_batch, n_before)
        backend.decode(Batch.of(text[start:end], start))
    for start in range(n_before, len(text), n_rows):
        yield backend.decode_hidden(Batch.of(text[start : start + n_rows], start, n_rows))


def _likeliest(logits: Logits) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
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


def _context_size(session: Session, lengths: Sequence[int], max_tokens: int) -> int:
    """Return a context size, in tokens, in which nine of ten prompts of these lengths fit with
    their answers.
    """
    n_prompt = sorted(lengths)[int(0.9 * (len(lengths) - 1))]
    n_ctx = -(-(n_prompt + max_tokens) // 256) * 256
    n_train = session.target.n_ctx_train
    if n_train and n_ctx > n_train:
        raise UsageError(f"{max_tokens} tokens an answer: the target has room for {n_train}")
    return n_ctx


def _whole_answer(
    session: Session, request: Request, text: str, is_judged: bool, *, keeps_cut: bool
) -> TargetAnswer | None:
    finished = request.finished
    if request.failure is not None or finished is None or not finished.token_ids:
        return None
    tokens = finished.token_ids
    if finished.finish_reason == "stop":
        vocabulary, end = session.target.vocabulary, finished.stopped_by
        ends = [token for token in vocabulary.end_tokens() if vocabulary.token_text(token) == end]
        tokens = (*tokens, *ends[:1])
    elif finished.finish_reason != "length" and not (keeps_cut and len(tokens) >= _SHORTEST):
        return None
    return TargetAnswer(text, request.prompt.tokens, tokens, is_judged)


# --- texts as a draft reads them, in rows of one length ---------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingText:
    """An answer of the target in the draft's tokens, behind the prompt that the draft sees."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    #: Whether it is for judging, not for learning.
    is_held_back: bool
    #: What the target found likeliest at each position of the answer, if it is known; see
    #: `TargetText.top`.
    top_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    top_probabilities: NDArray[np.float16] | None = field(default=None, compare=False)

    def length(self, n_columns: int) -> int:
        return min(n_columns, len(self.prompt_tokens) + len(self.answer_tokens))


def training_texts(
    text: TargetText, target: LlamaModel, draft: LlamaModel, now: datetime.datetime
) -> list[TrainingText]:
    """Return the target's answers as a draft reads them: in its own template and tokens, if its
    vocabulary is another one (what the target found likely is then unknown). `now` is for
    templates. Raise `PromptError`.
    """
    translation = _translation(target, draft)
    prompts = Prompts(target, draft if translation is not None else None)
    found = []
    for index, answer in enumerate(text.answers):
        prompt = prompts.of_text(answer.prompt, now=now)
        if translation is None:
            own = prompt.tokens, answer.tokens
            found.append(TrainingText(*own, answer.is_held_back, *text.top(index)))
        else:
            own = _translated(translation, prompt.tokens, answer.tokens, prompt.draft_tokens)
            found.append(TrainingText(*own, answer.is_held_back))
    return [each for each in found if each.prompt_tokens and each.answer_tokens]


def kept_texts(
    target: LlamaModel,
    draft: LlamaModel,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer] = (),
) -> list[TrainingText]:
    """Return kept answers as a draft reads them, to learn from and to judge by; long ones are
    several texts.
    """
    translation, digest = _translation(target, draft), draft.vocabulary.digest()
    found: list[TrainingText] = []
    for number, answer in enumerate((*learning, *judging)):
        if max((*answer.prompt, *answer.answer), default=0) >= target.vocabulary.n_tokens:
            continue  # the answer of another model with the same name and size
        prompt, tokens = answer.prompt, answer.answer
        if translation is not None:
            draft_prompt = answer.draft_prompt if answer.draft_vocabulary == digest else None
            prompt, tokens = _translated(translation, prompt, tokens, draft_prompt)
        if prompt and tokens:
            parts = _parts(prompt, tokens)
            found += (TrainingText(*part, is_held_back=number >= len(learning)) for part in parts)
    return found


def _translation(target: LlamaModel, draft: LlamaModel) -> Translation | None:
    try:
        check_pair(target.vocabulary, draft.vocabulary, target.name, draft.name)
    except PairError:
        return Translation(target.vocabulary, draft.vocabulary)
    return None


def _translated(
    translation: Translation, prompt: _Tokens, answer: _Tokens, draft_prompt: Sequence[int] | None
) -> tuple[_Tokens, _Tokens]:
    text = translation.text(prompt, draft_prompt)
    n_prompt = len(text.tokens)
    text.follow([*prompt, *answer])
    return tuple(text.tokens[:n_prompt]), tuple(text.tokens[n_prompt:])


def _parts(prompt: _Tokens, answer: _Tokens) -> Iterator[tuple[_Tokens, _Tokens]]:
    """Yield each part of an answer that fills a row, behind the end of the text before it."""
    text, start = (*prompt, *answer), len(prompt)
    while start < len(text):
        n_before = min(start, _N_BEFORE)
        part = text[start : start + N_COLUMNS - n_before]
        yield text[start - n_before : start], part
        start += len(part)


class Rows(NamedTuple):
    """Texts one after the other in rows of one length, arrays of [n_rows, n_columns]. `texts` says
    which of its row's texts a token belongs to (0: padding); `labels` are the tokens behind, of
    answers, else -1; what the target found likely is [n_rows, n_columns, n_top], n_top being 0
    where that is not known of all.
    """

    tokens: NDArray[np.int32]
    texts: NDArray[np.int32]
    positions: NDArray[np.int32]
    labels: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_probabilities: NDArray[np.float32]

    @property
    def n_rows(self) -> int:
        return len(self.tokens)

    @property
    def n_labels(self) -> int:
        return int(np.count_nonzero(self.labels >= 0))

    def pick(self, rows: NDArray[np.int64]) -> Rows:
        return Rows(*(array[rows] for array in self))  # type: ignore[arg-type]


def pack_split(texts: Sequence[TrainingText]) -> tuple[Rows, Rows]:
    learnt, judged = (
        [text for text in texts if text.is_held_back == is_judged] for is_judged in (False, True)
    )
    return pack(learnt), pack(judged)


def pack(texts: Sequence[TrainingText], n_columns: int = N_COLUMNS) -> Rows:
    """Put texts into few rows, the longest first; an answer is cut at the end, and too long a
    prompt left out.
    """
    rows: list[list[TrainingText]] = []
    free: list[int] = []
    fitting = (text for text in texts if len(text.prompt_tokens) < n_columns)
    for text in sorted(fitting, key=lambda text: -text.length(n_columns)):
        length = text.length(n_columns)
        row = next((row for row, left in enumerate(free) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(n_columns)
        rows[row].append(text)
        free[row] -= length
    n_top = N_TOP if all(text.top_tokens is not None for text in texts) else 0
    shape = len(rows), n_columns
    found = Rows(
        tokens=np.zeros(shape, np.int32),
        texts=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        labels=np.full(shape, -1, np.int32),
        top_tokens=np.zeros((*shape, n_top), np.int32),
        top_probabilities=np.zeros((*shape, n_top), np.float32),
    )
    for row, row_texts in enumerate(rows):
        start = 0
        for number, text in enumerate(row_texts, 1):
            length = text.length(n_columns)
            part = np.s_[row, start : start + length]
            found.tokens[part] = (*text.prompt_tokens, *text.answer_tokens)[:length]
            found.texts[part] = number
            found.positions[part] = np.arange(length)
            # The last token of a prompt predicts the first of the answer.
            first = start + len(text.prompt_tokens) - 1
            last = start + length - 1
            found.labels[row, first:last] = found.tokens[row, first + 1 : last + 1]
            if n_top and text.top_tokens is not None and text.top_probabilities is not None:
                found.top_tokens[row, first:last] = text.top_tokens[: last - first]
                found.top_probabilities[row, first:last] = text.top_probabilities[: last - first]
            start += length
    return found
