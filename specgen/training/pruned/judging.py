"""Measures how often a target without some of its blocks predicts the whole target's token.

One pass over some hundred tokens of the target's own answers judges a set of blocks. Its agreement is the
share of positions at which the likeliest token is the one that the target chose. (The objective of SWIFT,
Xia et al., arXiv:2410.06916, section 4.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from specgen.decoding.backend import Batch
from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.skipped_blocks import SkippingBackend
from specgen.options import ContextOptions
from specgen.training.texts import TargetAnswer

#: The most judged tokens of an answer, and the longest prompt: prompts take time and judge nothing.
_N_ANSWER = 96
_MOST_PROMPT = 96
#: The number of rows that are decoded at once.
_N_ROWS = 512


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A prompt, and the tokens of the answer that are judged."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1


def judged_texts(
    answers: Iterable[TargetAnswer], n_places: int, *, held_back: bool
) -> list[JudgedText]:
    """Return the prefixes of answers, with about `n_places` tokens together. Raise `UsageError` if there
    are none."""
    found: list[JudgedText] = []
    n_left = n_places
    for answer in answers:
        if answer.is_held_back != held_back or len(answer.prompt_tokens) > _MOST_PROMPT:
            continue
        tokens = answer.tokens[: min(_N_ANSWER, n_left)]
        found.append(JudgedText(answer.prompt_tokens, tokens))
        n_left -= len(tokens)
        if n_left <= 0:
            break
    if not found:
        raise UsageError(
            "there is no text to judge by", hint="let the target write more, to shorter prompts"
        )
    return found


class Judge:
    """Judges sets of left-out blocks by texts. Use it as a context manager. Raises `MemoryLimitError`."""

    def __init__(
        self,
        model: LlamaModel,
        context: ContextOptions,
        texts: Sequence[JudgedText],
        clock: Callable[[], float],
    ) -> None:
        self._batches = list(_batches(texts))
        self._backend = SkippingBackend(
            model,
            replace(context, n_batch=_N_ROWS),
            n_ctx=max(len(batch) for batch, _ in self._batches),
            clock=clock,
            n_sequences=max(len(set(batch.sequences)) for batch, _ in self._batches),
            n_outputs=max(len(said) for _, said in self._batches),
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._backend.close()

    @property
    def n_places(self) -> int:
        return sum(len(said) for _, said in self._batches)

    def agreement(self, left_out: frozenset[int]) -> float:
        """Return the share of positions at which the model without these blocks predicts the text's token."""
        n_agreed = 0
        for batch, said in self._batches:
            likeliest = self._backend.decode_without(batch, left_out).argmax(axis=1)
            n_agreed += int((likeliest == said).sum())
            for sequence in {sequence for (sequence,) in batch.sequences}:
                self._backend.remove(sequence)
        return n_agreed / self.n_places


def _batches(texts: Sequence[JudgedText]) -> Iterable[tuple[Batch, list[int]]]:
    """Yield batches of whole texts, each text a sequence, with the expected token of each row that wants
    logits."""
    batch, said, n_sequences = Batch(), list[int](), 0
    for text in texts:
        if len(batch) and len(batch) + text.n_rows > _N_ROWS:
            yield batch, said
            batch, said, n_sequences = Batch(), [], 0
        tokens = (*text.prompt, *text.tokens[:-1])
        for position, token in enumerate(tokens):
            batch.add(token, position, (n_sequences,), position >= len(text.prompt) - 1)
        said += text.tokens
        n_sequences += 1
    yield batch, said
