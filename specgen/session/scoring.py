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
from specgen.method.backend import Batch
from specgen.session.prompts import Prompt
from specgen.session.session import CONTEXT_STEP, Session
from specgen.system.arrays import Logits
from specgen.text.sampling.raw_probabilities import likely_tokens

#: The maximum number of rows with logits in a batch. The logits of a row may take a megabyte.
_N_SCORED_ROWS = 64

#: The likeliest tokens at a position, in descending order, then some others.
LikelyTokens: TypeAlias = tuple[TokenLogprob, ...]
#: Makes a context manager in which a batch is decoded.
Turn: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, and the tokens that were likely at its position."""

    #: The token, with the target's log-probability.
    token: TokenLogprob
    #: The target's likeliest tokens, then the token itself and the guesses.
    target: LikelyTokens
    #: The same for the draft model, in its own tokens. None without a draft model whose
    #: probabilities depend on the text alone, and where none of its tokens begins.
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
    turn: Turn = contextlib.nullcontext

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
        text = ScorableText(self.session.target, tokens, range(len(prompt.tokens), n_tokens))
        target = self._likely_tokens(None, text, guesses)
        draft = self._likely_tokens_of_draft(prompt, answer, guesses)
        return [
            _scored_token(token_id, target[position], draft.get(position))
            for position, token_id in enumerate(answer)
        ]

    def _likely_tokens_of_draft(
        self,
        prompt: Prompt,
        answer: Sequence[int],
        guesses: Mapping[int, Sequence[int]],
    ) -> dict[int, LikelyTokens]:
        """Return the draft model's likely tokens by their position in the answer."""
        draft = self.session.draft
        if draft is None:
            return {}
        text = draft.scorable_text(prompt.tokens, prompt.draft_tokens, answer)
        if text is None:
            return {}
        if draft.own_vocabulary is not None:
            guesses = {}  # they are tokens of the target
        return self._likely_tokens(draft.timed, text, guesses)

    def _likely_tokens(
        self,
        key: Key | None,
        text: ScorableText,
        guesses: Mapping[int, Sequence[int]],
    ) -> dict[int, LikelyTokens]:
        """Return a model's likely tokens by their position in the answer.

        Args:
            key: Identifies the options of the model's contexts; None for the target.
            text: The text in the model's tokens.
            guesses: More tokens of the model, by their position.
        """
        vocabulary = text.model.vocabulary
        positions = {start: position for position, start in enumerate(text.starts)}
        likely: dict[int, LikelyTokens] = {}
        for start, row in self._rows(key, text):
            position = positions.get(start)
            if position is None:  # a token of the model begins here, but none of the target
                continue
            # The text may end here in the model's tokens.
            others = [*text.tokens[start : start + 1], *guesses.get(position, ())]
            known = [token_id for token_id in others if token_id < vocabulary.n_tokens]
            likely[position] = likely_tokens(row, self.n_top, known, vocabulary)
        return likely

    def _rows(self, key: Key | None, text: ScorableText) -> Iterator[tuple[int, Logits]]:
        """Decode a text, and yield the logits of the tokens from the answer's first one on.

        Each row of logits comes with the number of the model's tokens before it.
        """
        # A model cannot score more tokens than it has learnt positions for.
        n_most = text.model.limited_n_ctx(len(text.tokens))
        starts = [start for start in text.starts if start is not None and 0 < start <= n_most]
        if not starts:
            return
        n_rows = max(starts)
        context = LlamaBackend(
            text.model,
            self.session.costs.context_options(key),
            n_ctx=CONTEXT_STEP * -(-n_rows // CONTEXT_STEP),  # rounded up
            clock=self.session.clock,
            n_outputs=_N_SCORED_ROWS,
            n_rollback=0,
        )
        with contextlib.closing(context):
            for batch in _batches(text.tokens[:n_rows], min(starts) - 1, context.n_batch):
                with self.turn():
                    rows = context.decode(batch)
                first_start = batch.positions[0] + 1
                yield from enumerate(rows, first_start)


def _batches(
    tokens: Sequence[int],
    n_unscored: int,
    n_batch: int,
) -> Iterator[Batch]:
    """Yield the batches of a text: first those without logits, then those whose rows have logits.

    Args:
        tokens: The text.
        n_unscored: The number of its first tokens whose logits are not needed.
        n_batch: The maximum number of rows of a batch without logits.
    """
    for start in range(0, n_unscored, n_batch):
        end = min(start + n_batch, n_unscored)
        yield Batch.of(tokens[start:end], start)
    for start in range(n_unscored, len(tokens), _N_SCORED_ROWS):
        part = tokens[start : start + _N_SCORED_ROWS]
        yield Batch.of(part, start, n_wanted=len(part))


def _scored_token(
    token_id: int,
    target: LikelyTokens,
    draft: LikelyTokens | None,
) -> ScoredToken:
    own = next(each for each in target if each.token_id == token_id)
    return ScoredToken(own, target, draft)
