"""A target's own answers, from which drafts are made.

The first half of this module lets the target answer prompts, several at once, and decodes each
answer a second time to record hidden states and likeliest tokens. Each answer is stored in a file
such as ``000123.npz``: the prompt, the tokens of the prompt and of the answer, and for each token
of the answer the final hidden state that predicted it and the likeliest tokens at that position.

The second half turns answers into training data for a draft: translated to the draft's tokens, and
packed into rows of equal length, several short answers to a row.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.translated import Translation
from specgen.drafters.vocabularies import check_pair
from specgen.errors import ModelFileError, OutputError, PairError, UsageError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.native_context import rounded_n_ctx
from specgen.method.backend import Batch
from specgen.session.engine import Engine
from specgen.session.kept_answers import KeptAnswer
from specgen.session.prompts import Prompt, Prompts
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import FILE_DAMAGE, Logits
from specgen.system.files import locked, new_beside, write_errors
from specgen.train.training_loop import Budget, TextOptions

#: The number of likeliest tokens that are kept for each position.
N_TOP = 16
#: The maximum number of rows for which llama.cpp computes hidden states and logits at once.
_N_ROWS = 64
#: The names of the answers' files.
_FILE_PATTERN = "[0-9]*.npz"
#: An answer that was cut off by the time limit needs at least this many tokens to be stored.
_MIN_CUT_TOKENS = 8
#: The number of tokens in a row of training data: most answers fit together with their prompt.
N_COLUMNS = 384
#: The maximum number of tokens of context before each part of a long kept answer.
_MAX_CONTEXT_TOKENS = 192
#: One in ten prompts is held back: drafts are judged on its answer, not trained on it.
_HELD_BACK_EVERY = 10

_Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """An answer of the target."""

    #: The prompt as text, without the chat template.
    prompt: str
    #: The tokens of the prompt in the chat template.
    prompt_tokens: tuple[int, ...]
    #: The tokens of the answer, including the one that ended it.
    tokens: tuple[int, ...]
    #: Whether drafts are judged on the answer, instead of trained on it.
    is_held_back: bool


class TargetText:
    """The answers that are stored in a folder.

    Hidden states and likeliest tokens are large, and are read only on request.

    Args:
        folder: The folder that `write_text` wrote to.
        prompts: Other prompts' answers are ignored, and a prompt's index decides whether it is held
            back. None to use all answers, as they were written.

    Raises:
        ModelFileError: If a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[str] | None = None,
    ) -> None:
        self.answers: list[TargetAnswer] = []
        #: The file of each answer.
        self._paths: list[Path] = []
        indices = {prompt: index for index, prompt in enumerate(prompts or ())}
        for path in sorted(folder.glob(_FILE_PATTERN)):
            answer = _read_answer(path)
            if prompts is not None:
                index = indices.get(answer.prompt)
                if index is None:
                    continue
                # It may have been written for another list of prompts. Drafts are compared on the
                # prompts that this list holds back, so they must not be trained on them.
                answer = replace(answer, is_held_back=is_held_back(index))
            self.answers.append(answer)
            self._paths.append(path)

    def hidden(self, index: int) -> NDArray[np.float16]:
        """Return the final hidden states that predicted the tokens of `answers[index]`.

        Returns:
            float16[n_tokens, n_embd].
        """
        return _arrays(self._paths[index], "hidden")[0]

    def top(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return the target's likeliest tokens at each position of `answers[index]`.

        Returns:
            The tokens, int32[n_tokens, N_TOP], the likeliest first, and their probabilities,
            float16[n_tokens, N_TOP].
        """
        tokens, probabilities = _arrays(self._paths[index], "top_tokens", "top_probabilities")
        return tokens, probabilities


def _arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Read some of the arrays that are stored in an answer's file."""
    try:
        with path.open("rb") as file, np.load(file) as saved:
            return [saved[name] for name in names]
    except FILE_DAMAGE as error:
        hint = f"delete {path}: it will be generated again"
        raise ModelFileError(f"{path}: not a stored answer", hint) from error


def _read_answer(path: Path) -> TargetAnswer:
    """Read an answer without its hidden states and likeliest tokens."""
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
    """Return whether the prompt with this index is held back: the last of every ten is."""
    return index % _HELD_BACK_EVERY == _HELD_BACK_EVERY - 1


# --- the target writes ------------------------------------------------------------------------


def write_text(
    session: Session,
    options: TextOptions,
    folder: Path,
    budget: Budget,
    n_min: int = 0,
    latest_s: float = 0.0,
) -> int:
    """Let the target answer prompts until there is enough text, no prompt left, or no time.

    Prompts that have an answer in the folder are not answered again. If interrupted, the answers
    that were finished by then are kept.

    Args:
        session: The target.
        options: The prompts, and how much text is enough.
        folder: Where answers are written.
        budget: The time limit, interruption, and a function that shows the progress in tokens.
        n_min: The minimum number of new tokens. If there are fewer when the time is over, the
            target goes on until `latest_s`, and then unfinished answers are stored as well.
        latest_s: The end of this extension, by the budget's clock.

    Returns:
        The number of answer tokens in the folder for these prompts, including earlier ones.

    Raises:
        PairError: If the target has a recurrent state.
        OutputError: If the folder cannot be written to, or another process is writing to it.
        ModelFileError: If a file in the folder is damaged.
        UsageError: If no prompt fits into the target's context with its answer.
        MemoryLimitError: If there is too little memory for a context.
    """
    if session.target.has_recurrent_state:
        raise PairError(
            f"{session.target.name} has a recurrent state: its hidden states cannot be read"
        )
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    busy = OutputError(f"{folder}: another process is writing there", "wait until it is done")
    with locked(folder / "lock", busy):
        return _TextWriter(session, options, folder, budget, n_min, latest_s).write()


class _TextWriter:
    """Lets a target answer prompts, and writes a file for each answer; see `write_text`."""

    def __init__(
        self,
        session: Session,
        options: TextOptions,
        folder: Path,
        budget: Budget,
        n_min: int,
        latest_s: float,
    ) -> None:
        self._session = session
        self._options = options
        self._folder = folder
        self._budget = budget
        #: The time, by the budget's clock, until which the target goes on for `n_min` tokens.
        self._latest_s = latest_s
        stored_answers = TargetText(folder, options.prompts).answers
        self._answered_prompts = {answer.prompt for answer in stored_answers}
        #: The numbers of tokens of the prompts that have an answer.
        self._answered_lengths = [len(answer.prompt_tokens) for answer in stored_answers]
        #: The number of answer tokens stored so far.
        self._n_tokens = sum(len(answer.tokens) for answer in stored_answers)
        #: Below this number of stored tokens, the target goes on until `latest_s`.
        self._n_tokens_min = self._n_tokens + n_min
        #: The number in the name of the latest file.
        self._number = max((int(path.stem) for path in folder.glob(_FILE_PATTERN)), default=-1)

    def write(self) -> int:
        """Write answers, and return the number of stored tokens."""
        self._tell_progress()
        if self._n_tokens >= self._options.n_tokens:
            return self._n_tokens
        prompts = self._unanswered_prompts()
        if not prompts:
            return self._n_tokens
        session = self._session
        max_tokens = self._options.max_tokens
        # Answered prompts count, too: those that are left may be only the longest.
        lengths = [*self._answered_lengths, *(len(prompt.tokens) for prompt in prompts.values())]
        n_ctx = _context_size(session, lengths, max_tokens)
        # The few prompts that are too long for the context are left out.
        fitting = {
            index: prompt
            for index, prompt in prompts.items()
            if len(prompt.tokens) + max_tokens <= n_ctx
        }
        if not fitting:
            return self._n_tokens
        reader = LlamaBackend(
            session.target,
            session.costs.context_options(),
            n_ctx=n_ctx,
            clock=session.clock,
            n_outputs=_N_ROWS,
        )
        # The engine generates answers, the reader decodes finished ones again for hidden states.
        with (
            contextlib.closing(reader),
            Engine(
                session,
                interrupted=self._is_over,
                n_parallel=self._options.n_parallel,
                n_ctx=n_ctx,
            ) as engine,
        ):
            requests = {engine.insert(prompt): index for index, prompt in fitting.items()}
            self._answer(engine, requests, reader)
        return self._n_tokens

    def _unanswered_prompts(self) -> dict[int, Prompt]:
        """Return the prompts that have no answer yet, by their indices, in the order to answer.

        In each group of ten the held-back prompt comes first, so that drafts can be judged even if
        time allows only a few answers.
        """
        texts = self._options.prompts
        order = sorted(
            range(len(texts)),
            key=lambda index: (index // _HELD_BACK_EVERY, not is_held_back(index)),
        )
        # By text, so that a prompt given twice is answered once.
        indices = {
            texts[index]: index for index in order if texts[index] not in self._answered_prompts
        }
        return {index: self._session.prompts.of_text(text) for text, index in indices.items()}

    def _answer(
        self,
        engine: Engine,
        requests: dict[Request, int],
        reader: LlamaBackend,
    ) -> None:
        """Generate answers and write each to its file as soon as it is finished.

        Args:
            engine: The engine that the requests were inserted into.
            requests: The requests, with the indices of their prompts. Finished ones are removed.
            reader: What decodes finished answers for their hidden states.
        """
        is_last_step = False
        while requests and not is_last_step and self._n_tokens < self._options.n_tokens:
            is_last_step = self._is_over()
            has_enough = self._n_tokens >= self._n_tokens_min
            if is_last_step and (self._budget.interrupted() or has_enough):
                return
            # In a last step, the engine, which calls `_is_over` too, ends all answers unfinished.
            engine.step()
            for request in [request for request in requests if request.is_done]:
                index = requests.pop(request)
                tokens = _answer_tokens(self._session, request, keeps_unfinished=is_last_step)
                if tokens is not None:
                    self._store(index, request.prompt.tokens, tokens, reader)

    def _store(
        self,
        index: int,
        prompt_tokens: _Tokens,
        tokens: _Tokens,
        reader: LlamaBackend,
    ) -> None:
        """Write the answer to the prompt with this index to a new file."""
        prompt = self._options.prompts[index]
        answer = TargetAnswer(prompt, prompt_tokens, tokens, is_held_back(index))
        self._number += 1
        _write_answer(self._folder / f"{self._number:06d}.npz", answer, reader)
        self._n_tokens += len(tokens)
        self._tell_progress()

    def _is_over(self) -> bool:
        """Return whether generation should end: after `latest_s` if there is too little text."""
        until_s = self._budget.until_s
        if self._n_tokens < self._n_tokens_min:
            until_s = max(self._latest_s, until_s)
        return self._budget.interrupted() or self._budget.clock() > until_s

    def _tell_progress(self) -> None:
        self._budget.progress(self._n_tokens, self._options.n_tokens)


def _context_size(
    session: Session,
    lengths: Sequence[int],
    max_tokens: int,
) -> int:
    """Return the size of a context in which nine of ten prompts fit with their answers.

    It is at most the size that the target was trained with, even if fewer prompts fit then.

    Args:
        session: The target.
        lengths: The numbers of tokens of all prompts.
        max_tokens: The maximum number of tokens in an answer.

    Raises:
        UsageError: If no prompt fits with its answer.
    """
    n_prompt = sorted(lengths)[int(0.9 * (len(lengths) - 1))]
    n_ctx = rounded_n_ctx(n_prompt + max_tokens)
    n_train = session.target.n_ctx_train
    if not n_train or n_ctx <= n_train:
        return n_ctx
    if min(lengths) + max_tokens > n_train:
        raise UsageError(
            f"answers of {max_tokens} tokens do not fit into the target's context of {n_train}"
        )
    return n_train


def _answer_tokens(
    session: Session,
    request: Request,
    *,
    keeps_unfinished: bool,
) -> _Tokens | None:
    """Return the tokens of an answer, including the end token, which requests leave out.

    Args:
        session: The target.
        request: The request of the answer, which is done.
        keeps_unfinished: Whether to return an answer that was cut off by the time limit, too.

    Returns:
        The tokens, or None if the answer failed, is empty, or was cut off (see `keeps_unfinished`)
        and is not kept, or is too short.
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
    if finished.finish_reason == "length":  # as long as `max_tokens` allows
        return tokens
    if keeps_unfinished and len(tokens) >= _MIN_CUT_TOKENS:
        return tokens
    return None


def _write_answer(
    path: Path,
    answer: TargetAnswer,
    reader: LlamaBackend,
) -> None:
    """Decode an answer for its hidden states and likeliest tokens, and write all to a file."""
    hidden = []
    top_tokens = []
    top_probabilities = []
    for logits, states in read_answer(reader, answer.prompt_tokens, answer.tokens):
        tokens, probabilities = _top_tokens(logits)
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
    """Decode a prompt and an answer, and yield the logits that predict the answer's tokens.

    Yields:
        The logits, float32[n, n_vocab], and the final hidden states, float32[n, n_embd], that
        predict the next `n` tokens, at most `backend.n_outputs`. The next ones overwrite both.
    """
    if backend.length(0):
        backend.remove(0)
    # Each token is predicted by the one before it, so nothing needs the last token itself.
    text = [*prompt, *answer[:-1]]
    # Prefill all of the prompt but its last token, which predicts the first token of the answer.
    n_prefill = len(prompt) - 1
    for start in range(0, n_prefill, backend.n_batch):
        end = min(start + backend.n_batch, n_prefill)
        backend.decode(Batch.of(text[start:end], start))
    n_rows = backend.n_outputs
    for start in range(n_prefill, len(text), n_rows):
        yield backend.decode_hidden(Batch.of(text[start : start + n_rows], start, n_rows))


def _top_tokens(logits: Logits) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Return the likeliest tokens of each row, the likeliest first, and their probabilities.

    If the vocabulary has fewer than N_TOP tokens, the remaining columns are zeros.

    Args:
        logits: float32[n_rows, n_vocab].

    Returns:
        int32[n_rows, N_TOP] and float16[n_rows, N_TOP].
    """
    n_rows, n_vocab = logits.shape
    n_top = min(N_TOP, n_vocab)
    tokens = np.zeros((n_rows, N_TOP), np.int32)
    probabilities = np.zeros((n_rows, N_TOP), np.float16)
    for row, row_logits in enumerate(logits):
        # Select the largest logits, then sort only these: faster than sorting the whole row.
        top = np.argpartition(row_logits, -n_top)[-n_top:]
        top = top[np.argsort(-row_logits[top], kind="stable")]
        # Softmax over the whole row, relative to its largest logit so that nothing overflows.
        exponentials = np.exp(row_logits - row_logits[top[0]])
        tokens[row, :n_top] = top
        probabilities[row, :n_top] = exponentials[top] / exponentials.sum()
    return tokens, probabilities


# --- texts in the draft's tokens -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A prompt and the target's answer, both in the draft's tokens."""

    #: The tokens of the prompt.
    prompt_tokens: tuple[int, ...]
    #: The tokens of the answer.
    answer_tokens: tuple[int, ...]
    #: Whether the draft is judged on the text, instead of trained on it.
    is_held_back: bool
    #: The target's likeliest tokens at each position of the answer, int32[n_answer, N_TOP]; None
    #: if unknown.
    top_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    #: The probabilities of these tokens, float16[n_answer, N_TOP]; None if unknown.
    top_probabilities: NDArray[np.float16] | None = field(default=None, compare=False)

    def length(self, n_columns: int) -> int:
        """Return the number of tokens that the text takes in a row of `n_columns`."""
        return min(n_columns, len(self.prompt_tokens) + len(self.answer_tokens))


def training_texts(
    text: TargetText,
    target: LlamaModel,
    draft: LlamaModel,
    now: datetime.datetime,
) -> list[TrainingText]:
    """Return the target's answers in a draft's tokens.

    If the draft has another vocabulary, its own chat template and tokens are used, and the target's
    likeliest tokens are unknown. A text whose prompt or answer is empty is left out.

    Args:
        text: The answers.
        target: The model that wrote them.
        draft: The model to be trained.
        now: The current time, for chat templates that mention it.

    Raises:
        PromptError: If a template cannot be applied to a prompt.
    """
    translation = _translation(target, draft)
    prompts = Prompts(target, draft if translation is not None else None)
    texts = []
    for index, answer in enumerate(text.answers):
        prompt = prompts.of_text(answer.prompt, now=now)
        if translation is None:
            top_tokens, top_probabilities = text.top(index)
            training_text = TrainingText(
                prompt.tokens,
                answer.tokens,
                answer.is_held_back,
                top_tokens,
                top_probabilities,
            )
        else:
            draft_prompt, draft_answer = _translated(
                translation,
                prompt.tokens,
                answer.tokens,
                prompt.draft_tokens,
            )
            training_text = TrainingText(draft_prompt, draft_answer, answer.is_held_back)
        if training_text.prompt_tokens and training_text.answer_tokens:
            texts.append(training_text)
    return texts


def kept_texts(
    target: LlamaModel,
    draft: LlamaModel,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer] = (),
) -> list[TrainingText]:
    """Return kept answers in a draft's tokens; a long answer becomes several texts.

    Args:
        target: The model that wrote the answers.
        draft: The model to be trained.
        learning: The answers to learn from.
        judging: The answers to judge the draft on: their texts are held back.
    """
    translation = _translation(target, draft)
    draft_vocabulary = draft.vocabulary.digest()
    texts: list[TrainingText] = []
    for index, answer in enumerate((*learning, *judging)):
        prompt = answer.prompt
        tokens = answer.answer
        if max((*prompt, *tokens), default=0) >= target.vocabulary.n_tokens:
            continue  # the answer of another model with the same name and size
        if translation is not None:
            draft_prompt = None
            if answer.draft_vocabulary == draft_vocabulary:
                draft_prompt = answer.draft_prompt
            prompt, tokens = _translated(translation, prompt, tokens, draft_prompt)
        if prompt and tokens:
            held_back = index >= len(learning)
            for context, part in _parts(prompt, tokens):
                texts.append(TrainingText(context, part, is_held_back=held_back))
    return texts


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
    """Return a prompt and an answer in the draft's tokens.

    Args:
        translation: The translation to the draft's vocabulary.
        prompt: The prompt in the target's tokens.
        answer: The answer in the target's tokens.
        draft_prompt: The prompt in the draft's template and tokens; None to translate `prompt`.
    """
    text = translation.text(prompt, draft_prompt)
    n_prompt = len(text.tokens)
    text.follow([*prompt, *answer])
    return tuple(text.tokens[:n_prompt]), tuple(text.tokens[n_prompt:])


def _parts(prompt: _Tokens, answer: _Tokens) -> Iterator[tuple[_Tokens, _Tokens]]:
    """Split an answer so that each part, with the context before it, fits into a row.

    Yields:
        The context, which is the end of the text before the part, and the part.
    """
    text = (*prompt, *answer)
    start = len(prompt)
    while start < len(text):
        n_context = min(start, _MAX_CONTEXT_TOKENS)
        part = text[start : start + N_COLUMNS - n_context]
        yield text[start - n_context : start], part
        start += len(part)


# --- rows of equal length ------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """Texts packed into rows of equal length, several short texts to a row."""

    #: int32[n_rows, n_columns].
    tokens: NDArray[np.int32]
    #: The number, from 1, of the text in its row that a token belongs to; 0 for padding:
    #: int32[n_rows, n_columns].
    texts: NDArray[np.int32]
    #: The position of a token in its text: int32[n_rows, n_columns].
    positions: NDArray[np.int32]
    #: The next token to predict, or -1 where the next token is not part of an answer:
    #: int32[n_rows, n_columns].
    labels: NDArray[np.int32]
    #: The target's likeliest next tokens: int32[n_rows, n_columns, n_top]. `n_top` is 0 if they
    #: are unknown for any of the texts.
    top_tokens: NDArray[np.int32]
    #: The probabilities of these tokens: float32[n_rows, n_columns, n_top].
    top_probabilities: NDArray[np.float32]

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self.tokens)

    @property
    def n_labels(self) -> int:
        """The number of answer tokens to predict."""
        return int(np.count_nonzero(self.labels >= 0))

    def pick(self, rows: NDArray[np.int64]) -> PackedRows:
        """Return the rows with these indices."""
        return PackedRows(*(array[rows] for array in self))  # type: ignore[arg-type]


def pack_split(texts: Sequence[TrainingText]) -> tuple[PackedRows, PackedRows]:
    """Return the rows to learn from, and the rows of held-back texts to judge on."""
    learning = [text for text in texts if not text.is_held_back]
    held_back = [text for text in texts if text.is_held_back]
    return pack(learning), pack(held_back)


def pack(texts: Sequence[TrainingText], n_columns: int = N_COLUMNS) -> PackedRows:
    """Pack texts into as few rows as is easy.

    A text that is longer than a row is cut off at the row's end; if its prompt alone fills the row,
    the text is left out.
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
            # Each token of the answer is a label of the position before it, so labels begin at
            # the last token of the prompt.
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
    """Distribute texts over rows: first-fit bin packing, the longest texts first."""
    fitting_texts = [text for text in texts if len(text.prompt_tokens) < n_columns]
    rows: list[list[TrainingText]] = []
    # The number of unused columns of each row.
    n_free: list[int] = []
    for text in sorted(fitting_texts, key=lambda text: -text.length(n_columns)):
        length = text.length(n_columns)
        row = next((row for row, n in enumerate(n_free) if n >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            n_free.append(n_columns)
        rows[row].append(text)
        n_free[row] -= length
    return rows
