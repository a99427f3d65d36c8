"""Score an answer afterwards: how likely each of its tokens was to the target and to the draft.

While an answer is generated, only the probabilities that decide its tokens are computed. Here all
of them are computed by one prefill of each model, in contexts of their own: the caches of an engine
stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from specgen.drafters.interface import Key, ScorableText
from specgen.errors import PromptLengthError
from specgen.events import TokenLogprob
from specgen.llama import LlamaBackend
from specgen.llama.native_context import rounded_n_ctx
from specgen.method.backend import Batch
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.sampling.raw_probabilities import likely_tokens

#: The maximum number of rows with logits in a batch. The logits of a row may take a megabyte.
_N_SCORED_ROWS = 64

#: The likeliest tokens at a position, in descending order, then some others.
LikelyTokens: TypeAlias = tuple[TokenLogprob, ...]
#: Makes a context manager in which a batch is decoded, so that others can decode in between.
DecodingTurn: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, and the tokens that were likely at its position."""

    #: The token, with the target's log-probability.
    token: TokenLogprob
    #: The target's likeliest tokens, then the token itself and the guesses.
    target: LikelyTokens
    #: The same for the draft model, in its own tokens. None without a draft model whose
    #: probabilities depend on the text alone.
    draft: LikelyTokens | None


@dataclass(frozen=True)
class AnswerScorer:
    """Computes the probabilities of an answer's tokens, at temperature 1 and before samplers."""

    #: The loaded models.
    session: Session
    #: The maximum number of tokens of a prompt and its answer.
    n_ctx: int
    #: The number of likeliest tokens at each position.
    n_top: int
    #: Makes a context manager in which each batch is decoded, so that others can take turns.
    turn: DecodingTurn = contextlib.nullcontext

    def score(
        self,
        prompt: Prompt,
        answer: Sequence[int],
        guesses: Mapping[int, Sequence[int]],
    ) -> list[ScoredToken]:
        """Return the probabilities of the tokens of an answer.

        Args:
            prompt: The prompt.
            answer: The tokens of the answer.
            guesses: More tokens whose probabilities are wanted, by their position in the answer.

        Raises:
            PromptLengthError: If the prompt and the answer are longer than `n_ctx`.
            PromptError: If the target lacks one of the tokens.
            MemoryLimitError: If the contexts do not fit into memory.
            BackendError: If a batch cannot be decoded.
        """
        tokens = (*prompt.tokens, *answer)
        for checked in (tokens, *guesses.values()):
            self.session.target.vocabulary.check(checked)
        n_tokens = len(tokens)
        if n_tokens > self.n_ctx:
            raise PromptLengthError(
                f"the prompt and the answer have {n_tokens} tokens, but the context has "
                f"{self.n_ctx}",
                n_tokens,
                self.n_ctx,
            )
        text = ScorableText.of(self.session.target, prompt.tokens, answer)
        wanted = {
            position: [token_id, *guesses.get(position, ())]
            for position, token_id in enumerate(answer)
        }
        target = self._likely_tokens(None, text, wanted)
        draft = self._likely_tokens_of_draft(prompt, answer, wanted)
        return [
            _scored_token(token_id, target[position], draft.get(position))
            for position, token_id in enumerate(answer)
        ]

    def _likely_tokens_of_draft(
        self,
        prompt: Prompt,
        answer: Sequence[int],
        wanted: Mapping[int, Sequence[int]],
    ) -> dict[int, LikelyTokens]:
        """Return the draft model's likely tokens by their position in the answer."""
        draft = self.session.draft
        if draft is None:
            return {}
        text = draft.scorable_text(prompt.tokens, prompt.draft_tokens, answer)
        if text is None:
            return {}
        if draft.own_vocabulary is not None:
            wanted = {}  # they are tokens of the target
        return self._likely_tokens(draft.cost_key, text, wanted)

    def _likely_tokens(
        self,
        key: Key | None,
        text: ScorableText,
        wanted: Mapping[int, Sequence[int]],
    ) -> dict[int, LikelyTokens]:
        """Return a model's likely tokens by their position in the answer.

        Args:
            key: Identifies the options of the model's contexts; None for the target.
            text: The answer in the model's tokens.
            wanted: More tokens of the model whose probabilities are wanted, by position.
        """
        vocabulary = text.model.vocabulary
        likely: dict[int, LikelyTokens] = {}
        for position, row in self._rows(key, text):
            known = [token for token in wanted.get(position, ()) if token < vocabulary.n_tokens]
            likely[position] = likely_tokens(row, self.n_top, known, vocabulary)
        return likely

    def _rows(
        self,
        key: Key | None,
        text: ScorableText,
    ) -> Iterator[tuple[int, Logits]]:
        """Decode a text; yield the positions in the answer with their logits, float32[n_vocab]."""
        # A model cannot score more tokens than it has learned positions for.
        lengths = [n_kept + len(new_tokens) for n_kept, new_tokens in text.steps]
        n_ctx = text.model.limited_n_ctx(max(lengths))
        context = LlamaBackend(
            text.model,
            self.session.costs.context_options(key),
            n_ctx=rounded_n_ctx(n_ctx),
            clock=self.session.clock,
            n_outputs=_N_SCORED_ROWS,
            n_rollback=0,
        )
        with contextlib.closing(context):
            reader = _TextReader(context, self.turn)
            for position, (n_kept, new_tokens) in enumerate(text.steps):
                if lengths[position] > n_ctx:
                    break
                yield from reader.step(position, n_kept, new_tokens)
            yield from reader.decode()


class _TextReader:
    """Decodes a text that grows step by step, in batches that are as large as possible.

    Args:
        context: An empty context.
        turn: Makes a context manager in which each batch is decoded.
    """

    def __init__(self, context: LlamaBackend, turn: DecodingTurn) -> None:
        self._context = context
        self._turn = turn
        #: The number of tokens of the text, including those of the batch.
        self._n_tokens = 0
        #: The tokens that are not decoded yet.
        self._batch = Batch()
        #: The positions in the answer whose logits the batch wants.
        self._positions: list[int] = []

    def step(
        self,
        position: int,
        n_kept: int,
        new_tokens: Sequence[int],
    ) -> Iterator[tuple[int, Logits]]:
        """Change the text, and yield positions and logits if a batch had to be decoded.

        Args:
            position: The position in the answer for which the logits after the text are wanted.
                If there are no new tokens, they are not computed.
            n_kept: The number of tokens of the text that stay.
            new_tokens: The tokens that follow them.
        """
        if n_kept < self._n_tokens:
            yield from self.decode()
            self._context.remove(0, n_kept)
            self._n_tokens = n_kept
        last = len(new_tokens) - 1
        for index, token in enumerate(new_tokens):
            if len(self._batch) == self._context.n_batch:
                yield from self.decode()
            self._batch.add(token, self._n_tokens, (0,), wants=index == last)
            self._n_tokens += 1
        if new_tokens:
            self._positions.append(position)
        if len(self._positions) == _N_SCORED_ROWS:
            yield from self.decode()

    def decode(self) -> Iterator[tuple[int, Logits]]:
        """Decode the batch, and yield its positions with their logits."""
        if not len(self._batch):
            return
        with self._turn():
            rows = self._context.decode(self._batch)
        yield from zip(self._positions, rows, strict=True)
        self._batch = Batch()
        self._positions = []


def _scored_token(
    token_id: int,
    target: LikelyTokens,
    draft: LikelyTokens | None,
) -> ScoredToken:
    own = next(each for each in target if each.token_id == token_id)
    return ScoredToken(own, target, draft)
