"""Are several answers at once the texts of plain decoding, too?

Answers that share a cache and a batch can spoil each other in ways that an answer alone cannot show: a rollback
may need cells that another text has got, and a shared prefix may miss some. So prompts are answered
several at once by the engine that `specgen batch` and `specgen serve` use, with drafts, and compared with plain
answers that were made alone.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice

from specgen.decoding.loop import Loop
from specgen.decoding.sequence import Sequence
from specgen.engine.engine import Engine
from specgen.engine.loaded_models import CONTEXT_STEP, Models
from specgen.engine.prompts import Prompt
from specgen.engine.request import Request
from specgen.errors import PromptError
from specgen.measure.proof.drafting_plans import DraftingPlan
from specgen.measure.proof.greedy import Comparison, GreedyResult, PlainAnswer, PlainAnswers, Watch
from specgen.measure.proof.loop_events import check_drafting
from specgen.measure.proof.rows import batches_at_once_move
from specgen.testing.bugs import Bug

#: How many answers are made at once. The third may get what the first left, while the second goes on.
N_AT_ONCE = 3
#: Prompts are made longer than a sliding window of up to so many tokens.
_LONGEST_WINDOW = 1024


def check_at_once(
    loaded: Models,
    prompts: abc.Sequence[Prompt],
    *,
    interrupted: Callable[[], bool] = lambda: False,
    bug: Bug | None = None,
    answers: PlainAnswers | None = None,
    way: DraftingPlan | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[GreedyResult]:
    """Compare speculative answers, `N_AT_ONCE` of them at once, with plain ones. Some are shorter than others.

    Prompts are repeated if there are fewer. If layers have a sliding window, the prompts get a common
    beginning that is as long, where the context has room for it: before the end of the window nothing can
    be lost. `progress` receives the number of answers that are done, and of all: plain ones and those at once.
    The other parameters are those of `check_greedy`.
    """
    if not prompts:
        return
    way = way or DraftingPlan(loaded.options.drafting)
    loaded.change_drafting(way.drafting)
    answers = answers if answers is not None else PlainAnswers()
    numbers = [number % len(prompts) for number in range(max(len(prompts), N_AT_ONCE))]
    n_all = len(prompts) + len(numbers)
    prompts = _beyond_window(loaded, prompts)
    n_ctx = _room(loaded, prompts)
    plain: list[PlainAnswer] = []
    with loaded.contexts(n_ctx, drafts=False) as (target, _):
        loop = Loop(target, loaded.clock, interrupted)
        for prompt in prompts:
            progress(len(plain), n_all)
            target.remove(0)
            plain.append(answers.of(loaded, loop, prompt, n_ctx))
            if interrupted():
                return

    def done(n: int) -> None:
        progress(len(prompts) + n, n_all)

    # Some end earlier, so that others begin in their cells while the rest go on.
    n_most = loaded.options.generation.max_tokens
    lengths = [max(1, n_most * (1 + n % N_AT_ONCE) // N_AT_ONCE) for n in range(len(numbers))]
    wanted = [
        (prompts[number], _first(plain[number], length))
        for number, length in zip(numbers, lengths, strict=True)
    ]
    found = _answered(loaded, way, wanted, n_ctx, interrupted, bug, done)
    if interrupted():
        return

    @functools.cache
    def batches_move() -> float:
        some = wanted[:N_AT_ONCE]
        texts = [(prompt.tokens, each.tokens[:-1], each.rows) for prompt, each in some]
        return batches_at_once_move(loaded, n_ctx, texts)

    comparison = Comparison(loaded, n_ctx, way, batches_move)
    for number, (prompt, expected), one in zip(numbers, wanted, found, strict=True):
        yield comparison.result(
            number + 1,
            prompt,
            expected,
            one.watch,
            one.generation.tally,
            list(one.answer.events),
            bug,
            n_at_once=N_AT_ONCE,
        )


@dataclass(frozen=True, slots=True)
class _Answered:
    """A speculative answer, its sequence, and what its rows were."""

    answer: Request
    generation: Sequence
    watch: Watch


def _answered(
    loaded: Models,
    way: DraftingPlan,
    wanted: abc.Sequence[tuple[Prompt, PlainAnswer]],
    n_ctx: int,
    interrupted: Callable[[], bool],
    bug: Bug | None,
    done: Callable[[int], None],
) -> list[_Answered]:
    """Answer prompts, `N_AT_ONCE` of them at once, while their rows are compared with those of plain answers.
    Raise the first failure of an answer, or of its drafter."""
    found: list[_Answered] = []

    def prepare(answer: Request, generation: Sequence) -> None:
        watch = Watch(loaded.settings.sampler, generation.state, wanted[answer.index][1])
        generation.shaper = watch
        way.prepare(generation)
        if bug is not None:
            bug.plant(generation)
        found.append(_Answered(answer, generation, watch))

    with Engine(
        loaded, n_parallel=N_AT_ONCE, n_ctx=n_ctx, interrupted=interrupted, prepare=prepare
    ) as engine:
        if bug is not None:
            bug.plant_in_cache(engine.target)
        engine.take_notices()
        options = loaded.options.generation
        asked = [
            engine.insert(prompt, generation=replace(options, max_tokens=len(plain.tokens)))
            for prompt, plain in wanted
        ]
        for _ in engine.run():
            done(sum(answer.is_done for answer in asked))
    for answer in asked:
        if answer.failure is not None:
            raise answer.failure
        check_drafting(list(answer.events))
    return found


def _first(plain: PlainAnswer, n: int) -> PlainAnswer:
    """Return the first n tokens of an answer."""
    rows = {position: row for position, row in plain.rows.items() if position < n}
    return PlainAnswer(plain.tokens[:n], rows)


def _beyond_window(loaded: Models, prompts: abc.Sequence[Prompt]) -> abc.Sequence[Prompt]:
    """Return the prompts after as many tokens as the target's sliding window has, if it has one and the
    context has room for them."""
    n = loaded.target.n_window
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
    n_more = loaded.options.generation.max_tokens + 1
    try:
        loaded.context_size(max(len(prompt.tokens) for prompt in longer) + n_more)
    except PromptError:
        return prompts
    return longer


def _room(loaded: Models, prompts: abc.Sequence[Prompt]) -> int:
    """Return the size in tokens of each answer's context: that of the options, but no more than is used."""
    n_prompt = max(len(prompt.tokens) for prompt in prompts)
    options = loaded.options
    n_used = n_prompt + options.generation.max_tokens + options.drafting.n_max
    n_used = -(-n_used // CONTEXT_STEP) * CONTEXT_STEP
    return min(loaded.context_size(n_prompt), n_used)


__all__ = ["N_AT_ONCE", "check_at_once"]
