"""Kept answers as texts for training a draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specgen.decoding.backend import Vocabulary
from specgen.decoding.drafters.translation import Translation
from specgen.engine.kept_answers import KeptAnswer
from specgen.engine.pairing import check_pair
from specgen.errors import PairError
from specgen.llama import LlamaModel
from specgen.training.distil.training_texts import TrainingText

#: A row holds the end of the text so far (prompt and answer), and the next part of the answer.
N_COLUMNS = 384
_N_BEFORE = 192


class KeptTexts:
    """Turns kept answers into texts as a draft reads them while it drafts. Raises `ModelFileError`."""

    def __init__(self, target: LlamaModel, draft: LlamaModel) -> None:
        self._draft: Vocabulary = draft.vocabulary
        self._digest = draft.vocabulary.digest()
        self._n_tokens = target.vocabulary.n_tokens
        self._translation: Translation | None = None
        try:
            check_pair(target.vocabulary, draft.vocabulary, target.name, draft.name)
        except PairError:
            self._translation = Translation(target.vocabulary, draft.vocabulary)

    def texts(self, answers: Sequence[KeptAnswer], *, is_held_back: bool) -> list[TrainingText]:
        """Return the texts of some answers; an answer that is longer than a row gives several."""
        found: list[TrainingText] = []
        for answer in answers:
            if max((*answer.prompt_tokens, *answer.tokens), default=0) >= self._n_tokens:
                continue  # the answer of another model with the same name and size
            prompt, tokens = self._own(answer)
            if prompt and tokens:
                found += (
                    TrainingText(before, part, is_held_back)
                    for before, part in _parts(prompt, tokens)
                )
        return found

    def _own(self, answer: KeptAnswer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return prompt and answer in the draft's tokens."""
        if self._translation is None:
            return answer.prompt_tokens, answer.tokens
        draft_prompt = answer.draft_prompt if answer.draft_vocabulary == self._digest else None
        text = self._translation.text(answer.prompt_tokens, draft_prompt)
        n_prompt = len(text.tokens)
        text.follow([*answer.prompt_tokens, *answer.tokens])
        return tuple(text.tokens[:n_prompt]), tuple(text.tokens[n_prompt:])


def _parts(
    prompt: tuple[int, ...], answer: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield each part of an answer that fills a row, with the end of the text before it."""
    text, start = (*prompt, *answer), len(prompt)
    while start < len(text):
        n_before = min(start, _N_BEFORE)
        part = text[start : start + N_COLUMNS - n_before]
        yield text[start - n_before : start], part
        start += len(part)
