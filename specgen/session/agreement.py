"""Measure how often a draft model agrees with a target, before it drafts.

Without this measurement, a draft that never agrees with its target would be discovered only during the
first answer, which it would slow down. So both models decode a short text that we wrote. At each position
the target's most likely token is compared with the draft's. The agreement is the acceptance rate at
temperature 0, and close to it at higher temperatures (docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence

from specgen.method.backend import Backend, Batch
from specgen.method.drafter import Drafter, draft_alone
from specgen.method.policy import draft_up_to
from specgen.method.tables import AcceptanceRates
from specgen.text.hidden_trail import TargetStates
from specgen.text.text_state import TextState

#: Prose and code as a model may write them. Tokens that are easy and hard to predict have about the
#: proportions that they have in an answer.
TEXT = (
    "To add up the numbers in a list, go through the list and add each number to a total:\n\n"
    "```python\ndef add_up(numbers):\n    total = 0\n    for number in numbers:\n"
    "        total += number\n    return total\n```\n\n"
    "This function takes a list of numbers and returns the sum of the numbers in the list."
)
#: The number of tokens of the text that are read, and how many of them are read before the first
#: comparison.
N_TOKENS = 48
N_BEFORE = 12
#: A draft model whose statistics hold this many judged tokens is not measured again.
N_KNOWN = 20
#: The measurement ends after this many seconds of decoding if it has compared enough positions.
_BUDGET_S = 1.5
_N_ENOUGH = 24
#: Tokens that a draft with another vocabulary proposes at a position: a single one may be only the
#: beginning of a token of the target.
_N_TRANSLATED = 3


def sample_agreement(
    target: Backend,
    drafter: Drafter,
    state: TextState,
    tokens: Sequence[int],
    acceptance: MutableMapping[str, AcceptanceRates],
    *,
    is_translated: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> int:
    """Let a drafter propose a token at each position of a text, count in `acceptance`, by origin, how often it is the
    target's token, and return the number of positions. `state` is the text that the drafter follows; it starts empty.
    `is_translated` says that the drafter's vocabulary is not the target's.

    The target's context must be empty, and is empty again afterwards; the draft's context is not cleared. Raise
    `BackendError`, what the drafter raises, and `KeyboardInterrupt` if `interrupted` returns True between decodes."""
    plan = draft_up_to(_N_TRANSLATED if is_translated else 1, needs_confidence=True)
    before_s, n_compared = target.decode_s, 0
    tokens = tokens[: target.n_ctx]
    try:
        for position, expected in greedy_tokens(target, tokens, min(N_BEFORE, len(tokens))):
            for token in tokens[len(state.tokens) : position]:
                state.commit(token)
            draft = draft_alone(drafter.propose(state.tokens, plan))
            if draft.looks:
                origin = draft.origins[0] if len(draft) else drafter.name
                rates = acceptance.setdefault(origin, AcceptanceRates(origin))
                rates.see(draft.looks[0])
                if len(draft):
                    confidence = draft.probabilities[0]
                    if confidence is None or draft.distributions[0] is not None:
                        # The probability of a drawn token says how likely that token was to be drawn.
                        confidence = draft.looks[0]
                    rates.judge(confidence, accepted=draft.tokens[0] == expected)
                    n_compared += 1
            if interrupted():
                raise KeyboardInterrupt
            # Only the target's time counts: the draft is smaller.
            if n_compared >= _N_ENOUGH and target.decode_s - before_s > _BUDGET_S:
                break
    finally:
        target.remove(0)
    return n_compared


def greedy_tokens(target: Backend, tokens: Sequence[int], start: int) -> Iterator[tuple[int, int]]:
    """Yield (n, the target's most likely token after the first n tokens) for each n >= start. The
    tokens are decoded into an empty context, batch by batch, as the iterator advances."""
    done = 0
    while done < len(tokens):
        is_before = done < start - 1
        size = target.n_batch if is_before else min(target.n_outputs, target.n_batch)
        end = min(done + size, start - 1 if is_before else len(tokens))
        batch = Batch()
        for position in range(done, end):
            batch.add(tokens[position], position, (0,), not is_before)
        expected: list[int] = target.decode(batch).argmax(axis=1).tolist()
        yield from ((done + row + 1, token) for row, token in enumerate(expected))
        done = end


def read_states(target: Backend, tokens: Sequence[int], trail: TargetStates) -> None:
    """Add the target's states after each token of a text to the trail of a draft that reads them all. The target's
    context must be empty, and is empty again afterwards."""
    try:
        for start in range(0, len(tokens), target.n_batch):
            batch = Batch()
            for position in range(start, min(start + target.n_batch, len(tokens))):
                batch.add(tokens[position], position, (0,), False)
            batch.wants_logits[-1] = True
            _, hidden = target.decode_hidden(batch, all_rows=True)
            trail.take_rows(hidden, tokens, start + len(batch))
    finally:
        target.remove(0)
