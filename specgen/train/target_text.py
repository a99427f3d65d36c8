"""A target's own answers, from which drafts are made.

The first half of this module lets the target answer prompts, several at once, and reads each answer
again to record the hidden states and the likeliest tokens. A folder holds a file for each answer,
``000123.npz``: the prompt, its tokens and those of the answer, and for each token of the answer the
target's final hidden state before it and the likeliest tokens there.

The second half turns answers into what a draft trains on: in its own tokens, and packed into rows
of one length, several short answers to a row.
"""

from __future__ import annotations

import contextlib
import datetime
import math
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
from specgen.session.prompts import Prompt, Prompts
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
#: The number of tokens in a row of training texts: most answers fit with their prompt.
N_COLUMNS = 384
#: The most tokens of context before a part of a kept answer.
_N_BEFORE = 192
#: One prompt in so many is for judging drafts, not for training them.
_HELD_BACK_EVERY = 10

_Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """An answer of the target."""

    prompt: str
    prompt_tokens: tuple[int, ...]
    #: The tokens of the answer, including the one that ended it.
    tokens: tuple[int, ...]
    #: Whether the answer is for judging, not for learning.
    is_held_back: bool


class TargetText:
    """The answers in a folder.

    Args:
        folder: The folder that `write_text` wrote to.
        prompts: The prompts whose answers count; None for all.

    Raises:
        ModelFileError: If a file is damaged.
    """

    def __init__(self, folder: Path, prompts: Collection[str] | None = None) -> None:
        wanted = None if prompts is None else frozenset(prompts)
        self.answers: list[TargetAnswer] = []
        self._paths: list[Path] = []
        for path in sorted(folder.glob(_FILES)):
            answer = _read_answer(path)
            if wanted is None or answer.prompt in wanted:
                self.answers.append(answer)
                self._paths.append(path)

    def hidden(self, index: int) -> NDArray[np.float16]:
        """Return the final hidden states before each token of an answer.

        Returns:
            float16[n_tokens, n_embd].
        """
        return _arrays(self._paths[index], "hidden")[0]

    def top(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the target's likeliest tokens for each token of an answer.

        Returns:
            The tokens, the likeliest first, and their probabilities: int32 and float16[n_tokens,
            N_TOP].
        """
        tokens, probabilities = _arrays(self._paths[index], "top_tokens", "top_probabilities")
        return tokens, probabilities


def _arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    try:
        with path.open("rb") as file, np.load(file) as saved:
            return [saved[name] for name in names]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        hint = f"delete {path}: it will be generated again"
        raise ModelFileError(f"{path}: not a stored answer", hint) from error


def _read_answer(path: Path) -> TargetAnswer:
    prompt, prompt_tokens, tokens, held_back = _arrays(
        path,
        "prompt",
        "prompt_tokens",
        "tokens",
        "is_held_back",
    )
    return TargetAnswer(
        prompt.tobytes().decode("utf-8", "replace"),
        tuple(prompt_tokens.tolist()),
        tuple(tokens.tolist()),
        bool(held_back),
    )


def is_held_back(index: int) -> bool:
    """Return whether the prompt with this number, from 0, is for judging: every tenth is."""
    return index % _HELD_BACK_EVERY == _HELD_BACK_EVERY - 1


# --- the target writes ------------------------------------------------------------------------


def write_text(
    session: Session,
    options: TextOptions,
    folder: Path,
    budget: Budget,
    n_least: int = 0,
    latest_s: float = 0.0,
) -> int:
    """Let the target answer prompts until there is enough text, no prompt left, or no time.

    Prompts that have an answer in the folder are not answered again. If interrupted, finished
    answers stay.

    Args:
        session: The target.
        options: The prompts, and how much text is enough.
        folder: Where answers are written.
        budget: The time.
        n_least: The fewest new tokens. If there are fewer when the time is over, the target goes
            on until `latest_s`, and the beginnings of unfinished answers are kept as well.
        latest_s: See `n_least`.

    Returns:
        The number of tokens that there are, old ones included.

    Raises:
        PairError: If the target has a recurrent state.
        OutputError: If the folder cannot be written to, or another process is writing there.
        ModelFileError: If a file in the folder is damaged.
        UsageError: If an answer does not fit into the target's context.
        MemoryLimitError: If there is too little memory for a context.
    """
    if session.target.has_recurrent_state:
        why = "has a recurrent state: its hidden states cannot be read"
        raise PairError(f"{session.target.name} {why}")
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = OutputError(f"{folder}: another process is writing there", "wait until it is done")
    with locked(folder / "lock", busy):
        return _TextWriter(session, options, folder, budget, n_least, latest_s).write()


class _TextWriter:
    """Lets a target answer prompts, and writes a file for each answer; see `write_text`."""

    def __init__(
        self,
        session: Session,
        options: TextOptions,
        folder: Path,
        budget: Budget,
        n_least: int,
        latest_s: float,
    ) -> None:
        self._session = session
        self._options = options
        self._folder = folder
        self._budget = budget
        self._latest_s = latest_s
        answered = TargetText(folder, options.prompts).answers
        self._known = {answer.prompt for answer in answered}
        #: The tokens that there are.
        self._n_tokens = sum(len(answer.tokens) for answer in answered)
        #: The fewest tokens that there should be.
        self._n_least = self._n_tokens + n_least
        #: The number of the latest file.
        self._number = max((int(path.stem) for path in folder.glob(_FILES)), default=-1)

    def write(self) -> int:
        """Write answers; return the number of tokens that there are."""
        self._tell_progress()
        if self._n_tokens >= self._options.n_tokens:
            return self._n_tokens
        prompts = self._unanswered()
        if not prompts:
            return self._n_tokens
        session = self._session
        max_tokens = self._options.max_tokens
        lengths = [len(prompt.tokens) for prompt in prompts.values()]
        n_ctx = _context_size(session, lengths, max_tokens)
        reader = LlamaBackend(
            session.target,
            session.costs.context_options(),
            n_ctx=n_ctx,
            clock=session.clock,
            n_outputs=_N_ROWS,
        )
        with (
            contextlib.closing(reader),
            Engine(
                session,
                interrupted=self._is_over,
                n_parallel=self._options.n_parallel,
                n_ctx=n_ctx,
            ) as engine,
        ):
            requests = {
                engine.insert(prompt): index
                for index, prompt in prompts.items()
                if len(prompt.tokens) + max_tokens <= n_ctx
            }
            self._answer(engine, requests, reader)
        return self._n_tokens

    def _unanswered(self) -> dict[int, Prompt]:
        """Return the prompts that have no answer yet, by their indices.

        Of ten prompts, the one for judging comes first: there is something to judge by however few
        answers there are.
        """
        texts = self._options.prompts
        order = sorted(
            range(len(texts)),
            key=lambda index: (index // _HELD_BACK_EVERY, not is_held_back(index)),
        )
        indices = {texts[index]: index for index in order if texts[index] not in self._known}
        return {index: self._session.prompts.of_text(text) for text, index in indices.items()}

    def _answer(
        self,
        engine: Engine,
        requests: dict[Request, int],
        reader: LlamaBackend,
    ) -> None:
        """Generate answers to `requests`, with the indices of their prompts, and write them."""
        is_last = False
        while requests and not is_last and self._n_tokens < self._options.n_tokens:
            # When the time is over and there is too little text, a last step makes the engine,
            # which asks `_is_over` as well, end all answers where they are.
            is_last = self._is_over()
            if is_last and (self._budget.interrupted() or self._n_tokens >= self._n_least):
                return
            engine.step()
            for request in [each for each in requests if each.is_done]:
                index = requests.pop(request)
                tokens = _answer_tokens(self._session, request, keeps_cut=is_last)
                if tokens is None:
                    continue
                answer = TargetAnswer(
                    self._options.prompts[index],
                    request.prompt.tokens,
                    tokens,
                    is_held_back(index),
                )
                self._number += 1
                _write_answer(self._folder / f"{self._number:06d}.npz", answer, reader)
                self._n_tokens += len(tokens)
                self._tell_progress()

    def _is_over(self) -> bool:
        until_s = self._budget.until_s
        if self._n_tokens < self._n_least:
            until_s = max(self._latest_s, until_s)
        return self._budget.interrupted() or self._budget.clock() > until_s

    def _tell_progress(self) -> None:
        self._budget.progress(self._n_tokens, self._options.n_tokens)


def _context_size(
    session: Session,
    lengths: Sequence[int],
    max_tokens: int,
) -> int:
    """Return the tokens of a context in which nine of ten prompts fit with their answers."""
    n_prompt = sorted(lengths)[int(0.9 * (len(lengths) - 1))]
    n_ctx = math.ceil((n_prompt + max_tokens) / 256) * 256
    n_train = session.target.n_ctx_train
    if n_train and n_ctx > n_train:
        raise UsageError(
            f"answers of {max_tokens} tokens do not fit into the target's context of {n_train}"
        )
    return n_ctx


def _answer_tokens(
    session: Session,
    request: Request,
    *,
    keeps_cut: bool,
) -> _Tokens | None:
    """Return the tokens of a complete answer, including the one that ended it.

    An answer that was cut off by the time limit counts if `keeps_cut`, unless it is very short.
    """
    finished = request.finished
    if request.failure is not None or finished is None or not finished.token_ids:
        return None
    tokens = finished.token_ids
    if finished.finish_reason == "stop":
        vocabulary = session.target.vocabulary
        for token in vocabulary.end_tokens():
            if vocabulary.token_text(token) == finished.stopped_by:
                return (*tokens, token)
        return tokens
    is_kept = finished.finish_reason == "length" or (keeps_cut and len(tokens) >= _SHORTEST)
    return tokens if is_kept else None


def _write_answer(
    path: Path,
    answer: TargetAnswer,
    reader: LlamaBackend,
) -> None:
    hidden, top_tokens, top_probabilities = [], [], []
    for logits, states in read_answer(reader, answer.prompt_tokens, answer.tokens):
        tokens, probabilities = _likeliest(logits)
        hidden.append(states.astype(np.float16))
        top_tokens.append(tokens)
        top_probabilities.append(probabilities)
    with write_errors(path), new_beside(path) as new:
        with new.open("wb") as file:
            np.savez(
                file,
                prompt=np.frombuffer(answer.prompt.encode("utf-8", "replace"), np.uint8),
                prompt_tokens=np.array(answer.prompt_tokens, np.int32),
                tokens=np.array(answer.tokens, np.int32),
                is_held_back=np.array(answer.is_held_back),
                hidden=np.concatenate(hidden),
                top_tokens=np.concatenate(top_tokens),
                top_probabilities=np.concatenate(top_probabilities),
            )
        new.replace(path)


def read_answer(
    backend: LlamaBackend,
    prompt: Sequence[int],
    answer: Sequence[int],
) -> Iterator[tuple[Logits, NDArray[np.float32]]]:
    """Yield the logits and final hidden states before each token of an answer, in order.

    Yields:
        float32[n, n_vocab] and float32[n, n_embd] for the next `n` tokens, at most
        `backend.n_outputs`. Both are overwritten by the next ones.
    """
    if backend.length(0):
        backend.remove(0)
    text = [*prompt, *answer[:-1]]
    # The last token of the prompt predicts the first of the answer.
    n_before = len(prompt) - 1
    for start in range(0, n_before, backend.n_batch):
        end = min(start + backend.n_batch, n_before)
        backend.decode(Batch.of(text[start:end], start))
    n_rows = backend.n_outputs
    for start in range(n_before, len(text), n_rows):
        yield backend.decode_hidden(Batch.of(text[start : start + n_rows], start, n_rows))


def _likeliest(logits: Logits) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the likeliest tokens of each row and their probabilities, [n, N_TOP] each.

    Columns beyond a small vocabulary are zeros.
    """
    n_top = min(N_TOP, logits.shape[1])
    tokens = np.zeros((len(logits), N_TOP), np.int32)
    probabilities = np.zeros((len(logits), N_TOP), np.float16)
    for row, row_logits in enumerate(logits):
        # Sorting only the largest is much faster than sorting the whole vocabulary.
        top = np.argpartition(row_logits, -n_top)[-n_top:]
        top = top[np.argsort(-row_logits[top], kind="stable")]
        exponentials = np.exp(row_logits - row_logits[top[0]])
        tokens[row, :n_top] = top
        probabilities[row, :n_top] = exponentials[top] / exponentials.sum()
    return tokens, probabilities


# --- texts as a draft reads them -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingText:
    """An answer of the target in the draft's tokens, after the prompt that the draft sees."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    #: Whether it is for judging, not for learning.
    is_held_back: bool
    #: The target's likeliest tokens for each token of the answer, if they are known; see
    #: `TargetText.top`.
    top_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    #: The probabilities of these.
    top_probabilities: NDArray[np.float16] | None = field(default=None, compare=False)

    def length(self, n_columns: int) -> int:
        """Return how many tokens of it fit into a row."""
        return min(n_columns, len(self.prompt_tokens) + len(self.answer_tokens))


def training_texts(
    text: TargetText,
    target: LlamaModel,
    draft: LlamaModel,
    now: datetime.datetime,
) -> list[TrainingText]:
    """Return the target's answers as a draft reads them.

    A draft with another vocabulary reads them in its own template and tokens. The target's
    likeliest tokens are then unknown.

    Args:
        text: The answers.
        target: The model that wrote them.
        draft: The model that reads them.
        now: The time that templates may put into prompts.

    Raises:
        PromptError: If a template cannot be applied to a prompt.
    """
    translation = _translation(target, draft)
    prompts = Prompts(target, draft if translation is not None else None)
    found = []
    for index, answer in enumerate(text.answers):
        prompt = prompts.of_text(answer.prompt, now=now)
        if translation is None:
            top = text.top(index)
            new = TrainingText(prompt.tokens, answer.tokens, answer.is_held_back, *top)
        else:
            own = _translated(translation, prompt.tokens, answer.tokens, prompt.draft_tokens)
            new = TrainingText(*own, answer.is_held_back)
        if new.prompt_tokens and new.answer_tokens:
            found.append(new)
    return found


def kept_texts(
    target: LlamaModel,
    draft: LlamaModel,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer] = (),
) -> list[TrainingText]:
    """Return kept answers as a draft reads them; a long answer becomes several texts.

    Those of `judging` are held back.
    """
    translation = _translation(target, draft)
    digest = draft.vocabulary.digest()
    found: list[TrainingText] = []
    for number, answer in enumerate((*learning, *judging)):
        prompt = answer.prompt
        tokens = answer.answer
        if max((*prompt, *tokens), default=0) >= target.vocabulary.n_tokens:
            continue  # the answer of another model with the same name and size
        if translation is not None:
            draft_prompt = answer.draft_prompt if answer.draft_vocabulary == digest else None
            prompt, tokens = _translated(translation, prompt, tokens, draft_prompt)
        if prompt and tokens:
            for before, part in _parts(prompt, tokens):
                found.append(TrainingText(before, part, is_held_back=number >= len(learning)))
    return found


def _translation(target: LlamaModel, draft: LlamaModel) -> Translation | None:
    """Return the translation to a draft's tokens; None if the vocabularies are the same."""
    try:
        check_pair(target.vocabulary, draft.vocabulary, target.name, draft.name)
    except PairError:
        return Translation(target.vocabulary, draft.vocabulary)
    return None


def _translated(
    translation: Translation,
    prompt: _Tokens,
    answer: _Tokens,
    draft_prompt: Sequence[int] | None,
) -> tuple[_Tokens, _Tokens]:
    """Return a prompt and an answer in the draft's tokens."""
    text = translation.text(prompt, draft_prompt)
    n_prompt = len(text.tokens)
    text.follow([*prompt, *answer])
    return tuple(text.tokens[:n_prompt]), tuple(text.tokens[n_prompt:])


def _parts(prompt: _Tokens, answer: _Tokens) -> Iterator[tuple[_Tokens, _Tokens]]:
    """Yield parts of an answer that fill a row each, with the end of the text before them."""
    text = (*prompt, *answer)
    start = len(prompt)
    while start < len(text):
        n_before = min(start, _N_BEFORE)
        part = text[start : start + N_COLUMNS - n_before]
        yield text[start - n_before : start], part
        start += len(part)


# --- rows of one length --------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """Texts packed into rows of one length, several short ones to a row."""

    #: int32[n_rows, n_columns].
    tokens: NDArray[np.int32]
    #: Which of its row's texts a token belongs to, from 1; 0 is padding. int32[n_rows, n_columns].
    texts: NDArray[np.int32]
    #: The position of a token in its text: int32[n_rows, n_columns].
    positions: NDArray[np.int32]
    #: The next token, if it is one of an answer, else -1: int32[n_rows, n_columns].
    labels: NDArray[np.int32]
    #: The target's likeliest next tokens: int32[n_rows, n_columns, n_top]. `n_top` is 0 if they
    #: are not known of all texts.
    top_tokens: NDArray[np.int32]
    #: The probabilities of these: float32[n_rows, n_columns, n_top].
    top_probabilities: NDArray[np.float32]

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    @property
    def n_labels(self) -> int:
        """The number of tokens of answers that are predicted."""
        return int(np.count_nonzero(self.labels >= 0))

    def pick(self, rows: NDArray[np.int64]) -> PackedRows:
        """Return some of the rows."""
        return PackedRows(*(array[rows] for array in self))  # type: ignore[arg-type]


def pack_split(texts: Sequence[TrainingText]) -> tuple[PackedRows, PackedRows]:
    """Return rows to learn from, and rows of held-back texts."""
    learnt = [text for text in texts if not text.is_held_back]
    judged = [text for text in texts if text.is_held_back]
    return pack(learnt), pack(judged)


def pack(texts: Sequence[TrainingText], n_columns: int = N_COLUMNS) -> PackedRows:
    """Pack texts into few rows.

    Answers that are too long are cut, and texts whose prompts are too long are left out.
    """
    rows = _distributed(texts, n_columns)
    n_top = N_TOP if all(text.top_tokens is not None for text in texts) else 0
    shape = (len(rows), n_columns)
    packed = PackedRows(
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
            end = start + text.length(n_columns)
            tokens = (*text.prompt_tokens, *text.answer_tokens)[: end - start]
            packed.tokens[row, start:end] = tokens
            packed.texts[row, start:end] = number
            packed.positions[row, start:end] = np.arange(end - start)
            # The last token of the prompt predicts the first of the answer.
            n_prompt = len(text.prompt_tokens)
            predicting = np.s_[row, start + n_prompt - 1 : end - 1]
            packed.labels[predicting] = tokens[n_prompt:]
            if n_top and text.top_tokens is not None and text.top_probabilities is not None:
                n_answer = len(tokens) - n_prompt
                packed.top_tokens[predicting] = text.top_tokens[:n_answer]
                packed.top_probabilities[predicting] = text.top_probabilities[:n_answer]
            start = end
    return packed


def _distributed(texts: Sequence[TrainingText], n_columns: int) -> list[list[TrainingText]]:
    """Distribute texts over rows: each, the longest first, into the first row with enough space."""
    fitting = [text for text in texts if len(text.prompt_tokens) < n_columns]
    rows: list[list[TrainingText]] = []
    free: list[int] = []
    for text in sorted(fitting, key=lambda text: -text.length(n_columns)):
        length = text.length(n_columns)
        row = next((row for row, n_free in enumerate(free) if n_free >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(n_columns)
        rows[row].append(text)
        free[row] -= length
    return rows
