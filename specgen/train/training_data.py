"""Answers of a target as a draft model reads them, packed into rows of one length for training.

The answers are the text that the target wrote for training (`specgen.train.target_text`), with its likeliest
tokens, or answers that were kept for the user (`specgen.session.kept_answers`), without them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specgen.drafters.pairing import check_pair
from specgen.drafters.translated import Translation
from specgen.errors import PairError
from specgen.llama import LlamaModel
from specgen.session.kept_answers import KeptAnswer
from specgen.session.prompts import Prompts
from specgen.train.target_text import N_TOP, TargetText

#: The number of tokens in a row: most answers fit with their prompt.
N_COLUMNS = 384
#: The most tokens before a part of a kept answer that a row holds.
_N_BEFORE = 192


@dataclass(frozen=True, slots=True)
class TrainingText:
    """An answer of the target in the draft's tokens, behind the prompt that the draft sees."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: tuple[int, ...]
    #: Whether it is for judging, not for learning.
    is_held_back: bool
    #: The tokens that the target found likeliest at each position of the answer, and their probabilities, if
    #: they are known: int32[n_answer, N_TOP], float16[n_answer, N_TOP].
    top_tokens: NDArray[np.int32] | None = field(default=None, compare=False)
    top_probabilities: NDArray[np.float16] | None = field(default=None, compare=False)


def training_texts(
    text: TargetText, target: LlamaModel, draft: LlamaModel, now: datetime.datetime
) -> list[TrainingText]:
    """Return the target's answers as a draft model sees them while it drafts: prompts in its own chat
    template, and answers and what the target found likely in its own tokens, if it has another vocabulary.

    `now` is the date that some templates write. Raises `PromptError` if the target's template does not
    take a prompt.
    """
    translation = _translation(target, draft)
    soft_labels = None if translation is None else SoftLabels(translation)
    prompts = Prompts(target, draft if translation is not None else None)
    found = []
    for index, answer in enumerate(text.answers):
        top = text.top(index)
        prompt = prompts.of_text(answer.prompt, now=now)
        if translation is None or soft_labels is None:
            prompt_tokens, tokens = prompt.without_head().tokens, answer.tokens
        else:
            prompt_tokens, tokens = _translated(
                translation, prompt.tokens, answer.tokens, prompt.draft_tokens
            )
            top = soft_labels.translate(answer.tokens, *top, tokens)
        if prompt_tokens and tokens:
            found.append(TrainingText(prompt_tokens, tokens, answer.is_held_back, *top))
    return found


def kept_texts(
    target: LlamaModel,
    draft: LlamaModel,
    learning: Sequence[KeptAnswer],
    judging: Sequence[KeptAnswer] = (),
) -> list[TrainingText]:
    """Return kept answers to learn from, and others to judge by, as a draft reads them while it drafts.

    An answer that is longer than a row gives several texts.
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
    """Return the translation from the target's vocabulary to the draft's; None if they are the same."""
    try:
        check_pair(target.vocabulary, draft.vocabulary, target.name, draft.name)
    except PairError:
        return Translation(target.vocabulary, draft.vocabulary)
    return None


def _translated(
    translation: Translation,
    prompt: Sequence[int],
    answer: Sequence[int],
    draft_prompt: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return prompt and answer in the draft's tokens."""
    text = translation.text(prompt, draft_prompt)
    n_prompt = len(text.tokens)
    text.follow([*prompt, *answer])
    return tuple(text.tokens[:n_prompt]), tuple(text.tokens[n_prompt:])


def _parts(
    prompt: tuple[int, ...], answer: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each part of an answer that fills a row, behind the end of the text before it."""
    text, start = (*prompt, *answer), len(prompt)
    while start < len(text):
        n_before = min(start, _N_BEFORE)
        part = text[start : start + N_COLUMNS - n_before]
        yield text[start - n_before : start], part
        start += len(part)


class SoftLabels:
    """Translates the tokens that a target found likely, for a pair of vocabularies.

    The target's distribution is over its own tokens. Where a draft token starts at the start of a target token,
    each likely target token counts as the draft token that its text starts with, and the chosen target token
    counts as the draft token in the text. A draft token that starts inside of a chosen target token is certain:
    it gets all of the probability.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._draft_token = cache(translation.first_token)

    def translate(
        self,
        answer: Sequence[int],
        top_tokens: NDArray[np.int32],
        top_probabilities: NDArray[np.float16],
        draft_tokens: Sequence[int],
    ) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Return likely draft tokens and their probabilities for each of `draft_tokens`: int32 and
        float16[n_draft_tokens, n_top]. A token may occur twice in a row: its probability is the sum. Target
        tokens without a counterpart get the probability 0.

        `answer` is the text in target tokens, `draft_tokens` the same text in draft tokens. `top_tokens` and
        `top_probabilities` are the target's, int32 and float16[n_answer, n_top].
        """
        starts: dict[int, int] = {}
        text = bytearray()
        for index, token in enumerate(answer):
            starts.setdefault(len(text), index)
            text += self._translation.target.token_bytes(token)
        shape = len(draft_tokens), top_tokens.shape[1]
        tokens, probabilities = np.zeros(shape, np.int32), np.zeros(shape, np.float16)
        offset = 0
        for row, own in enumerate(draft_tokens):
            position = starts.get(offset)
            data = self._translation.draft.token_bytes(own)
            if not text.startswith(data, offset):  # bytes before it that the draft has no token for
                starts.clear()
                position = None
            offset += len(data)
            if position is None:
                tokens[row, 0], probabilities[row, 0] = own, 1.0
                continue
            for column, token in enumerate(top_tokens[position].tolist()):
                found = own if token == answer[position] else self._draft_token(token)
                if found >= 0:
                    tokens[row, column] = found
                    probabilities[row, column] = top_probabilities[position, column]
        return tokens, probabilities


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts one after the other in rows of one length; each array is [n_rows, n_columns]."""

    #: int32.
    tokens: NDArray[np.int32]
    #: Which text of its row a token belongs to; 0 is padding. int32.
    texts: NDArray[np.int32]
    #: Positions in the texts, from 0. int32.
    positions: NDArray[np.int32]
    #: The token behind each, where that is of an answer; else -1. int32.
    labels: NDArray[np.int32]
    #: What the target found likely at that token's position: tokens and their probabilities,
    #: int32 and float32[n_rows, n_columns, n_top]; n_top is 0 where it is not known of all texts.
    top_tokens: NDArray[np.int32]
    top_probabilities: NDArray[np.float32]

    @property
    def n_labels(self) -> int:
        return int(np.count_nonzero(self.labels >= 0))

    @property
    def arrays(self) -> tuple[NDArray[np.int32] | NDArray[np.float32], ...]:
        return tuple(getattr(self, name) for name in Rows.__slots__)

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: NDArray[np.int64]) -> Rows:
        return Rows(*(array[rows] for array in self.arrays))  # type: ignore[arg-type]


def pack_split(texts: Sequence[TrainingText]) -> tuple[Rows, Rows]:
    """Return rows of the texts to learn from, and rows of those that are held back."""
    return (
        pack([text for text in texts if not text.is_held_back]),
        pack([text for text in texts if text.is_held_back]),
    )


def pack(texts: Sequence[TrainingText], n_columns: int = N_COLUMNS) -> Rows:
    """Put texts into as few rows as the longest-first order makes.

    What of an answer reaches beyond a row is cut off; texts whose prompt does are left out.
    """
    rows: list[list[TrainingText]] = []
    free: list[int] = []
    for text in sorted(texts, key=lambda text: -_length(text, n_columns)):
        length = _length(text, n_columns)
        if len(text.prompt_tokens) >= n_columns:
            continue
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
            length = _length(text, n_columns)
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


def _length(text: TrainingText, n_columns: int) -> int:
    return min(n_columns, len(text.prompt_tokens) + len(text.answer_tokens))
