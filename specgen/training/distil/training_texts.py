"""The target's text as a draft model reads it, and in rows of one length for training."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specgen.decoding.drafters.translation import Translation
from specgen.engine.pairing import check_pair
from specgen.engine.prompts import Prompts
from specgen.errors import PairError
from specgen.llama import LlamaModel
from specgen.training.distil.soft_labels import SoftLabels
from specgen.training.texts import N_TOP, TargetText


@dataclass(frozen=True, slots=True)
class TrainingText:
    """An answer of the target in the draft's tokens, after the prompt that the draft sees."""

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
    template, and answers and the target's likely tokens in its own tokens, if it has another vocabulary.

    `now` is the date that some templates write. Raise `PromptError` if the target's template does not take
    a prompt.
    """
    has_own_tokens = not _share_vocabulary(target, draft)
    translation = Translation(target.vocabulary, draft.vocabulary)
    soft_labels = SoftLabels(translation)
    found = []
    for index, answer in enumerate(text.answers):
        top = text.top(index)
        own_draft = draft if has_own_tokens else None
        prompt = Prompts(target, own_draft).of_text(answer.prompt, now=now)
        if has_own_tokens:
            own = translation.text(prompt.tokens, prompt.draft_tokens)
            n_prompt = len(own.tokens)
            own.follow([*prompt.tokens, *answer.tokens])
            prompt_tokens, tokens = own.tokens[:n_prompt], own.tokens[n_prompt:]
            top = soft_labels.translate(answer.tokens, *top, tokens)
        else:
            prompt_tokens, tokens = list(prompt.without_head().tokens), list(answer.tokens)
        if prompt_tokens and tokens:
            found.append(
                TrainingText(tuple(prompt_tokens), tuple(tokens), answer.is_held_back, *top)
            )
    return found


def _share_vocabulary(target: LlamaModel, draft: LlamaModel) -> bool:
    try:
        check_pair(target.vocabulary, draft.vocabulary, target.name, draft.name)
    except PairError:
        return False
    return True


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
    #: What the target thought of that token's position: its likeliest tokens and their probabilities,
    #: int32 and float32[n_rows, n_columns, n_top]; n_top is 0 where it is not known of all texts.
    top_tokens: NDArray[np.int32]
    top_probabilities: NDArray[np.float32]

    @property
    def n_labels(self) -> int:
        return int(np.count_nonzero(self.labels >= 0))

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: NDArray[np.int64]) -> Rows:
        """Return some of the rows."""
        return Rows(
            self.tokens[rows],
            self.texts[rows],
            self.positions[rows],
            self.labels[rows],
            self.top_tokens[rows],
            self.top_probabilities[rows],
        )


def pack(texts: Sequence[TrainingText], n_columns: int) -> Rows:
    """Put texts into as few rows as the longest-first order makes.

    What of an answer reaches beyond a row is cut off; texts whose prompt does are left out.
    """
    rows: list[list[TrainingText]] = []
    room: list[int] = []
    for text in sorted(texts, key=lambda text: -_length(text, n_columns)):
        length = _length(text, n_columns)
        if len(text.prompt_tokens) >= n_columns:
            continue
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(n_columns)
        rows[row].append(text)
        room[row] -= length
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
