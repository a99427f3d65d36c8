"""Where in an answer a mistake in verification would be most visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from specgen.events import DraftedEvent
from specgen.measure.exactness.finished_answers import plain_rows, raise_failure, tokens_of
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.session import Session
from specgen.text.sampling.distribution import Distribution

#: The number of tokens at the start of an answer that are searched for a place to sample from.
N_SEARCHED = 48


@dataclass(frozen=True, slots=True)
class Place:
    """A place in an answer where a token can be sampled."""

    #: The prompt's number.
    number: int
    #: The prompt.
    prompt: Prompt
    #: The answer's tokens before the place.
    answer: tuple[int, ...]
    #: The target's distribution at the place.
    exact: Distribution
    #: How visible mistakes in verification would be there. This is the probability of the rarest
    #: of three events: the drafted token is accepted, it is rejected, and the target does not
    #: choose its likeliest token.
    visibility: float


def find_places(
    session: Session,
    number: int,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> Iterator[Place]:
    """Answer a prompt, and yield the places where a token was drafted and sampled.

    Args:
        session: The session.
        number: The prompt's number.
        prompt: The prompt.
        seed: The seed of the answer.
        interrupted: Whether to stop.
    """
    answer, drafted_tokens = _drafted_answer(session, prompt, seed, interrupted)
    grammar = session.settings.grammar
    if grammar is not None:
        # The grammar begins with the answer. But `sampled_check` moves the answer's first tokens to
        # the prompt, except the last two before the place. So only the second token is sampled.
        drafted_tokens = {n: token for n, token in drafted_tokens.items() if n == 1}
    if not drafted_tokens or interrupted():
        return
    state = TextState(prompt.tokens, grammar)
    sampling = SamplingPipeline(session.settings.sampler, state)
    searched = answer[: max(drafted_tokens)]
    # The row at each position gives the token there, so the tokens before it are committed first.
    for position, row in enumerate(plain_rows(session, prompt.tokens, searched)):
        if position > 0:
            state.commit(answer[position - 1])
        # A token forced by the grammar is not sampled.
        if position in drafted_tokens and state.forced() is None:
            exact = sampling.distribution(row)
            accept_prob = exact.probability(drafted_tokens[position])
            max_prob = float(exact.probs.max())
            visibility = min(accept_prob, 1.0 - accept_prob, 1.0 - max_prob)
            yield Place(number, prompt, tuple(answer[:position]), exact, visibility)


def _drafted_answer(
    session: Session,
    prompt: Prompt,
    seed: int,
    interrupted: Callable[[], bool],
) -> tuple[list[int], dict[int, int]]:
    """Generate an answer, and record what was drafted in it.

    Returns:
        The answer's tokens, and the first token of each draft by its position in the answer. A
        draft for the answer's first token is left out.

    Raises:
        SpecgenError: If the answer or its drafter fails.
    """
    n_ctx = session.context_size(len(prompt.tokens) + N_SEARCHED)
    options = replace(session.options.generation, max_tokens=N_SEARCHED, stop=())
    with Engine(session, n_ctx=n_ctx, interrupted=interrupted) as engine:
        request = engine.insert(prompt, generation=options)
        request.seed = seed
        for _ in engine.run():
            pass
    raise_failure(request)
    answer: list[int] = []
    drafted_tokens: dict[int, int] = {}
    for event in request.events:
        if isinstance(event, DraftedEvent) and event.nodes and answer:
            drafted_tokens[len(answer)] = event.nodes[0].token_id
        answer += tokens_of([event])
    return answer, drafted_tokens
