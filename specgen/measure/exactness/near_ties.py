"""Where two greedy texts differ first, and whether rounding in batches explains that.

It does at a *near-tie*: the logits of the two tokens are closer than rounding moves them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specgen.measure.exactness.finished_answers import plain_rows, tokens_of
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.session.request import Request
from specgen.session.session import Session
from specgen.system.arrays import Logits
from specgen.text.overlap import common_prefix_length
from specgen.text.sampling.chain import Sampler

#: Logits may move up to this many times as far as in the batches that were tried.
SLACK = 4.0
#: The movement that a cache value rounded differently may cause, in standard deviations of a row.
ALWAYS_ALLOWED = 0.01
#: At a difference, plain decoding is repeated in batches of up to this many rows.
_MAX_BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two texts differ."""

    #: The number of equal tokens before it.
    position: int
    #: The text of plain decoding's token; empty if its answer ends there.
    plain: str
    #: The text of the token with drafts; empty if that answer ends there.
    drafted: str
    #: By how many logits plain decoding prefers its token.
    gap: float
    #: The largest gap that rounding in batches explains; 0 if rows are batch-invariant.
    allowed: float
    #: The smallest batch, in rows, in which plain decoding also chooses the token with drafts;
    #: None if there is no such batch.
    same_in_batches_of: int | None = None

    @property
    def is_defect(self) -> bool:
        """Whether the difference cannot be explained by rounding in batches."""
        return self.same_in_batches_of is None and self.gap >= self.allowed


def find_difference(
    session: Session,
    request: Request,
    plain_tokens: Sequence[int],
    n_at_once: int,
) -> Difference | None:
    """Find the first difference between two texts, and how much of it rounding explains.

    Args:
        session: The session that generated the texts.
        request: The finished answer with drafts.
        plain_tokens: Plain decoding's answer to the same prompt.
        n_at_once: The number of answers that were generated at once.

    Returns:
        The difference; None if the texts are equal.
    """
    drafted_tokens = tokens_of(request.events)
    if drafted_tokens == plain_tokens:
        return None
    position = common_prefix_length(plain_tokens, drafted_tokens)
    plain_text = _text_at(session, plain_tokens, position)
    drafted_text = _text_at(session, drafted_tokens, position)
    if position == min(len(plain_tokens), len(drafted_tokens)):
        # One text continues where the other ends: no choice of a token explains that.
        return Difference(position, plain_text, drafted_text, gap=math.inf, allowed=0.0)

    # Compute the logits of the choice alone, and as the last row of batches such as rounds decode.
    prompt = request.prompt.tokens
    answer = plain_tokens[:position]
    *_, row_alone = plain_rows(session, prompt, answer)
    rows_in_batches = _rows_in_batches(session, prompt, answer, n_at_once)

    state = TextState(prompt, session.settings.grammar)
    for token in answer:
        state.commit(token)
    sampling = SamplingPipeline(session.settings.sampler, state)
    drafted_token = drafted_tokens[position]
    sizes_with_same_choice = (
        size for size, row in rows_in_batches if sampling.distribution(row).mode == drafted_token
    )
    return Difference(
        position,
        plain_text,
        drafted_text,
        gap=_preference(session, state, row_alone, plain_tokens[position], drafted_token),
        allowed=_gap_by_rounding(session, row_alone, [row for _, row in rows_in_batches]),
        same_in_batches_of=next(sizes_with_same_choice, None),
    )


def _text_at(
    session: Session,
    tokens: Sequence[int],
    position: int,
) -> str:
    """Return the text of the token at a position; "" if the tokens end there."""
    if position >= len(tokens):
        return ""
    return session.target.vocabulary.token_text(tokens[position])


def _rows_in_batches(
    session: Session,
    prompt: Sequence[int],
    answer: Sequence[int],
    n_at_once: int,
) -> list[tuple[int, Logits]]:
    """Decode the last row of an answer in batches such as rounds decode.

    Returns:
        The size of each batch, in rows, and its last row of logits, float32[n_vocab].
    """
    rows: list[tuple[int, Logits]] = []
    for n_rows, n_outputs in _batches_of_rounds(session, n_at_once):
        *_, row = plain_rows(session, prompt, answer, n_rows, n_outputs)
        rows.append((n_rows, row))
    return rows


def _gap_by_rounding(
    session: Session,
    row_alone: Logits,
    rows_in_batches: Sequence[Logits],
) -> float:
    """Return the largest gap between two tokens that rounding in batches explains.

    Args:
        session: The session that decoded the rows.
        row_alone: float32[n_vocab], the logits that were computed for the row alone.
        rows_in_batches: The logits of the same row in batches.
    """
    max_movement = max((movement(row, row_alone) for row in rows_in_batches), default=0.0)
    if session.target.has_equal_rows and max_movement == 0.0:
        return 0.0
    return (SLACK * max_movement + ALWAYS_ALLOWED) * float(np.std(row_alone))


def _batches_of_rounds(session: Session, n_at_once: int) -> Iterator[tuple[int, int | None]]:
    """Yield the batches that rounds decode: the number of rows, and of rows with logits.

    The second number is None if all rows have logits.
    """
    max_rows = min(session.n_rows_max * n_at_once, _MAX_BATCH_ROWS)
    for n_rows in range(2, max_rows + 1):
        yield n_rows, None
    if session.target.has_recurrent_state or session.settings.grammar is not None:
        # Such rounds also decode batches with few logits, for which other kernels are used.
        yield max(2, max_rows), 1


def _preference(
    session: Session,
    state: TextState,
    logits: Logits,
    token: int,
    other: int,
) -> float:
    """Return by how many logits the target prefers a token to another one.

    Samplers that only leave out unlikely tokens are not applied. It is infinite if a logit bias or
    the grammar rules one of the tokens out.
    """
    greedy = session.settings.sampler
    # At temperature 1 the logarithm of a ratio of probabilities is the difference of logits.
    names = tuple(name for name in greedy.options.samplers if name in ("penalties", "dry"))
    options = replace(greedy.options, samplers=names)
    sampler = Sampler(options, greedy.breakers)
    distribution = SamplingPipeline(sampler, state).distribution(logits)
    token_prob = distribution.probability(token)
    other_prob = distribution.probability(other)
    if not token_prob or not other_prob:
        return math.inf
    return math.log(token_prob / other_prob)


def movement(one: Logits, other: Logits) -> float:
    """Return how far apart two rows of logits are.

    This is the standard deviation of their difference, relative to that of the `other` row.
    """
    spread = float(np.std(other, dtype=np.float64))
    return float(np.std(one - other, dtype=np.float64)) / spread if spread else 0.0
