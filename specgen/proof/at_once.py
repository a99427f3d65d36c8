"""Are several answers at once the texts of plain decoding, too?

Answers that share a cache and a batch can spoil each other in ways that an answer alone cannot show: a rollback
may need cells that another text has got, and a shared prefix may miss some. So prompts are answered
several at once by the engine that `specgen batch` and `specgen serve` use, with drafts, and compared with plain
answers that were made alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice

from specgen.engine.answer import Answer
from specgen.engine.draft_stack import CONTEXT_STEP
from specgen.engine.engine import Engine
from specgen.engine.generation import Generation
from specgen.engine.loop import Loop
from specgen.engine.prompts import Prompt
from specgen.engine.session import Session
from specgen.errors import PromptError
from specgen.proof.drafting_plans import DraftingPlan
from specgen.proof.greedy import Comparison, GreedyResult, PlainAnswers, Watch
from specgen.proof.loop_events import check_drafting
from specgen.testing.bugs import Bug

#: How many answers are made at once. The third may get what the first left, while the second goes on.
N_AT_ONCE = 3
#: Prompts are made longer than a sliding window of up to so many tokens.
_LONGEST_WINDOW = 1024


def check_at_once(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    interrupted: Callable[[], bool] = lambda: False,
    bug: Bug | None = None,
    answers: PlainAnswers | None = None,
    way: DraftingPlan | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare speculative answers, `N_AT_ONCE` of them at once, with plain ones.

    Prompts are repeated if there are fewer. If layers have a sliding window, the prompts get a common
    beginning that is as long, where the context has room for it: before the end of the window nothing can
    be lost. `progress` receives the number of answers that are done, and of all: plain ones and those at once.
    The other parameters are those of `check_greedy`.
    """
    if not prompts:
        return
    way = way or DraftingPlan(session.options.drafting)
    session.change_drafting(way.drafting)
    answers = answers if answers is not None else PlainAnswers()
    numbers = [number % len(prompts) for number in range(max(len(prompts), N_AT_ONCE))]
    prompts = _beyond_window(session, prompts)
    n_ctx = _room(session, prompts)
    with session.contexts(n_ctx, drafts=False) as (target, _):
        loop = Loop(target, session.clock, interrupted)
        plain = []
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts) + len(numbers))
            target.remove(0)
            plain.append(answers.of(session, loop, prompt, n_ctx))
            if interrupted():
                return
    generations: list[Generation] = []
    watches: list[Watch] = []

    def prepare(answer: Answer, generation: Generation) -> None:
        watch = Watch(session.settings.sampler, generation.state, plain[numbers[answer.index]])
        generation.shaper = watch
        way.prepare(generation)
        if bug is not None:
            bug.plant(generation)
        generations.append(generation)
        watches.append(watch)

    comparison = Comparison(session, n_ctx, way)
    with Engine(
        session, n_parallel=N_AT_ONCE, n_ctx=n_ctx, interrupted=interrupted, prepare=prepare
    ) as engine:
        if bug is not None:
            bug.plant_in_cache(engine.target)
        engine.take_notices()
        asked = [engine.submit(prompts[number]) for number in numbers]
        for _ in engine.run():
            done = len(prompts) + sum(answer.is_done for answer in asked)
            progress(done, len(prompts) + len(numbers))
    if interrupted():
        return
    for answer in asked:
        if answer.failure is not None:
            raise answer.failure
    for answer, number, generation, watch in zip(asked, numbers, generations, watches, strict=True):
        events = list(answer.events)
        check_drafting(events)
        yield comparison.result(
            number + 1,
            prompts[number],
            plain[number],
            watch,
            generation.tally,
            events,
            bug,
            n_at_once=N_AT_ONCE,
        )


def _beyond_window(session: Session, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts behind as many tokens as the target's sliding window has, if it has one and the
    context has room for them."""
    n = session.target_model.n_window
    if not 0 < n <= _LONGEST_WINDOW:
        return prompts
    before = tuple(islice(cycle(chain.from_iterable(prompt.tokens for prompt in prompts)), n))
    longer = [
        replace(
            prompt,
            tokens=(*before, *prompt.tokens),
            head=range(prompt.head.start + n, prompt.head.stop + n),
        )
        for prompt in prompts
    ]
    n_more = session.options.generation.max_tokens + 1
    try:
        session.context_size(max(len(prompt.tokens) for prompt in longer) + n_more)
    except PromptError:
        return prompts
    return longer


def _room(session: Session, prompts: Sequence[Prompt]) -> int:
    """Return the size in tokens of each answer's context: that of the options, but no more than is used."""
    n_prompt = max(len(prompt.tokens) for prompt in prompts)
    options = session.options
    n_used = n_prompt + options.generation.max_tokens + options.drafting.n_max
    n_used = -(-n_used // CONTEXT_STEP) * CONTEXT_STEP
    return min(session.context_size(n_prompt), n_used)


__all__ = ["N_AT_ONCE", "check_at_once"]
