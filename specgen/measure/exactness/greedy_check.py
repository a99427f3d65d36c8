"""The greedy check: are the texts with and without drafts equal?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from specgen.measure.exactness.finished_answers import raise_failure, tokens_of
from specgen.measure.exactness.near_ties import Difference, find_difference
from specgen.measure.exactness.ways_to_draft import WayName
from specgen.measure.run_progress import StepProgress
from specgen.method.drafter import never
from specgen.session.calibration import calibrate
from specgen.session.engine import Engine
from specgen.session.prompts import Prompt
from specgen.session.request import Request
from specgen.session.session import Session


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """The comparison of one answer with drafts to plain decoding's answer."""

    #: The prompt's number.
    prompt: int
    #: How drafts were made.
    way: WayName
    #: The number of answers that were generated at once.
    n_at_once: int
    #: The number of tokens of plain decoding's answer.
    n_tokens: int
    #: The number of drafted tokens.
    n_drafted: int
    #: The number of drafted tokens that were accepted.
    n_accepted: int
    #: The first difference between the texts; None if all tokens are equal.
    difference: Difference | None = None

    @property
    def is_defect(self) -> bool:
        """Whether the texts differ in a way that rounding in batches does not explain."""
        return self.difference is not None and self.difference.is_defect


def plain_texts(
    session: Session,
    prompts: Mapping[int, Prompt],
    interrupted: Callable[[], bool] = never,
    progress: StepProgress = lambda _done, _total: None,
) -> dict[int, list[int]]:
    """Return the tokens of plain decoding's answers by prompt number; fewer if interrupted."""
    max_tokens = session.options.generation.max_tokens
    limited_prompts = [(prompt, max_tokens) for prompt in prompts.values()]
    answers = _answers(session, limited_prompts, 1, interrupted, draft=False)
    texts: list[list[int]] = []
    for answer in answers:
        texts.append(tokens_of(answer.events))
        progress(len(texts), len(prompts))
    return dict(zip(prompts, texts, strict=False))


def check_greedy(
    session: Session,
    prompts: Mapping[int, Prompt],
    plain: Mapping[int, Sequence[int]] | None = None,
    *,
    way: WayName | None = None,
    n_at_once: int = 1,
    interrupted: Callable[[], bool] = never,
    progress: StepProgress = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare greedy answers with drafts to plain decoding's answers.

    Args:
        session: A session with a greedy sampler.
        prompts: The prompts by number. If there are fewer than `n_at_once`, some are repeated.
        plain: The tokens of plain decoding's answers by prompt number; None to generate them first.
        way: The name of the way to draft, for the results; None for the session's policy.
        n_at_once: The number of answers generated at once. If there are several, some get a lower
            token limit, so that later answers reuse their cache cells.
        interrupted: Whether to stop.
        progress: Receives the number of finished answers, and of all answers.

    Yields:
        A result for each answer, up to the interruption if there is one.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    calibrate(session, interrupted)
    if plain is None:
        plain = plain_texts(session, prompts, interrupted)
    numbers = list(islice(cycle(prompts), max(len(prompts), n_at_once)))
    limits = _token_limits(session.options.generation.max_tokens, len(numbers), n_at_once)
    limited_prompts = [(prompts[number], n) for number, n in zip(numbers, limits, strict=True)]
    answers = _answers(session, limited_prompts, n_at_once, interrupted)
    for n_done, request in enumerate(answers):
        if interrupted() or request.finished is None:
            return
        number = numbers[n_done]
        limit = limits[n_done]
        expected = list(plain[number])
        if limit >= 0:
            del expected[limit:]
        yield GreedyResult(
            prompt=number,
            way=way or session.options.drafting.policy_in_use,
            n_at_once=n_at_once,
            n_tokens=len(expected),
            n_drafted=request.finished.n_drafted,
            n_accepted=request.finished.n_accepted,
            difference=find_difference(session, request, expected, n_at_once),
        )
        progress(n_done + 1, len(numbers))


def _token_limits(
    max_tokens: int,
    n_answers: int,
    n_at_once: int,
) -> list[int]:
    """Return the token limit of each answer, with fractions of `max_tokens` in turn.

    With three answers at once these are one third, two thirds, all, one third and so on. A negative
    `max_tokens` means no limit, for any of the answers.
    """
    if max_tokens < 1:
        return [max_tokens] * n_answers
    shares = [1 + n % n_at_once for n in range(n_answers)]
    return [max(1, max_tokens * share // n_at_once) for share in shares]


def _answers(
    session: Session,
    limited_prompts: Sequence[tuple[Prompt, int]],
    n_at_once: int,
    interrupted: Callable[[], bool],
    *,
    draft: bool = True,
) -> Iterator[Request]:
    """Answer prompts, and yield the finished requests in the order of the prompts.

    Args:
        session: The session.
        limited_prompts: The prompts, with their token limits.
        n_at_once: The number of answers generated at once.
        interrupted: Whether to stop.
        draft: Whether to draft.

    Raises:
        SpecgenError: If an answer or its drafter fails.
    """
    if not limited_prompts or interrupted():
        return
    n_ctx = session.context_size(max(len(prompt.tokens) for prompt, _ in limited_prompts))
    with Engine(
        session,
        n_parallel=n_at_once,
        n_ctx=n_ctx,
        interrupted=interrupted,
    ) as engine:
        options = session.options.generation
        requests = [
            engine.insert(prompt, generation=replace(options, max_tokens=max_tokens), draft=draft)
            for prompt, max_tokens in limited_prompts
        ]
        for request in requests:
            while not request.is_done:  # a failure may come without an event
                engine.step()
            raise_failure(request)
            yield request
