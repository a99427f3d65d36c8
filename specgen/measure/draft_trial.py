"""The speed-up that a draft would bring, computed without running it with the target.

The target answers a few prompts plainly, once, and its batches are timed. Each draft is then
replayed on these answers: proposed tokens that agree with the answer count as accepted, and a round
costs the measured time of a batch of its size. So a dozen drafts can be tried in only their own
time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specgen.errors import BackendError, PromptError
from specgen.measure.prompts import NOW, BenchPrompt
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.answer_stats import AnswerStats
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import HiddenStateSink, draft_alone
from specgen.method.policy import RoundPlan, RoundResult
from specgen.session.calibration import (
    PairCosts,
    measure_costs,
    time_batch,
    timed_batch_sizes,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.system.arrays import Hidden
from specgen.system.quantities import is_gain, measured_gain
from specgen.train.target_text import read_answer

if TYPE_CHECKING:
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session

#: After each answer, the first sizes of batches are timed so often, and larger sizes once.
_N_OFTEN, _N_REPEATS = 6, 3


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """A prompt, the target's own greedy answer with the token that ends it, and the kind of task."""

    prompt: str
    tokens: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A target without a draft: its answers in contexts of `n_ctx` tokens, and the median seconds
    of decodes by their rows. `chat` says if its template was used (None: if it has one); `skipped`
    prompts, from 1 on, do not fit.
    """

    answers: tuple[TrialAnswer, ...]
    skipped: tuple[int, ...]
    n_ctx: int
    batch_s: dict[int, float]
    chat: bool | None = None

    @property
    def costs(self) -> PairCosts:
        return PairCosts(self.batch_s)

    @property
    def token_s(self) -> float:
        return self.batch_s[1]


@dataclass(frozen=True, slots=True)
class Replay:
    """A drafter's rounds for an answer, behind the prompt's token. `start_s` is the draft's decode
    of the prompt; the `target_s` of `stats` are batches by their measured costs, `token_s` is plain
    decoding's.
    """

    n_tokens: int
    stats: AnswerStats
    start_s: float
    token_s: float
    kind: str = ""

    @property
    def speedup(self) -> float:
        return self.token_s * self.n_tokens / (self.stats.target_s + self.stats.draft_s)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """The figures of a draft over all answers, its speed-up as their geometric mean, and those of
    each kind of task; None where nothing was drafted. Prompts only count in `start_s`.
    """

    speedup: float
    worst_speedup: float
    best_speedup: float
    n_answers: int
    tokens_per_s: float
    acceptance_rate: float | None
    mean_accepted_length: float
    draft_token_s: float | None
    start_s: float
    kinds: Mapping[str, DraftFigures] = field(default_factory=dict)

    @property
    def gain(self) -> str:
        return measured_gain(self.speedup, self.worst_speedup, self.best_speedup, self.n_answers)

    @property
    def is_gain(self) -> bool:
        return is_gain(self.speedup)


def measure_target(
    session: Session,
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Baseline | None:
    """Let the target, which has no draft, answer the prompts greedily, and time its batches. None
    if interrupted. Raise `MemoryLimitError`, or `PromptError` if no prompt fits, no answer is long
    enough, or nothing can be timed.
    """
    asked = dict(enumerate(prompts, 1))
    texts = [(number, prompt.text) for number, prompt in asked.items()]
    fitting, skipped = fitting_prompts(session, texts, chat)
    n_ctx = max(session.context_size(len(prompt.tokens)) for prompt in fitting.values())
    sizes = timed_batch_sizes(session.n_rows_max)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    answers: list[TrialAnswer] = []
    with session.contexts(n_ctx, drafts=False) as (target, _):
        for number, prompt in fitting.items():
            progress(len(answers), len(fitting))
            target.remove(0)
            generation = DrafterFactory(session).new_answer(prompt, n_ctx, (), 0)
            list(AnswerLoop(target, session.clock, interrupted).run(generation))
            if interrupted():
                return None
            n_prompt = generation.n_prompt
            text, kind = asked[number].text, asked[number].category
            answers.append(TrialAnswer(text, tuple(generation.tokens[n_prompt:]), kind))
            samples[1] += generation.stats.target_s_by_rows[1]
            # Batches are timed right after the single tokens, since a machine's speed changes.
            for size in (*sizes[1:], *(_N_REPEATS - 1) * sizes[1:_N_OFTEN]):
                if interrupted():
                    return None
                if (seconds := time_batch(target, generation.tokens, size)) is not None:
                    samples[size].append(seconds)
    if not samples[1]:
        raise PromptError("no answer is longer than a token: there is nothing to draft")
    if any(not samples[size] for size in sizes):
        raise PromptError(
            f"a context of {n_ctx} tokens has no room to time batches of {sizes[-1]} rows",
            hint="use a larger --ctx-size, or a smaller --draft-max",
        )
    batch_s = {size: statistics.median(samples[size]) for size in sizes}
    for size, seconds in batch_s.items():
        session.costs.table().set_seconds(size, seconds)
    return Baseline(tuple(answers), skipped, n_ctx, batch_s, chat)


def try_draft(
    session: Session,
    baseline: Baseline,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DraftFigures | None:
    if session.draft is not None and session.draft.reads == "cache":
        raise BackendError(
            f"{session.draft_name}: it reads the target's cache, so it cannot draft for kept answers",
            hint="`specgen bench` measures it",
        )
    replays: list[Replay] = []
    measure_costs(session)
    with session.contexts(baseline.n_ctx) as (target, drafts):
        for answer in baseline.answers:
            progress(len(replays), len(baseline.answers))
            if interrupted():
                return None
            prompt = session.prompts.of_text(answer.prompt, chat=baseline.chat, now=NOW)
            for draft in drafts:
                draft.remove(0)
            generation = DrafterFactory(session).new_answer(prompt, baseline.n_ctx, drafts, 0)
            tokens, states = (*prompt.tokens, *answer.tokens), None
            if generation.hidden_states is not None and generation.hidden_states.all_rows:
                read_states(target, tokens, generation.hidden_states)
            elif generation.hidden_states is not None:
                pieces = read_answer(target, prompt.tokens, answer.tokens)
                states = np.concatenate([hidden.copy() for _, hidden in pieces])
                target.remove(0)
            replays.append(replay(generation, answer, baseline, session.clock, states))
    return summarise(replays)


def replay(
    generation: AnswerState,
    answer: TrialAnswer,
    baseline: Baseline,
    clock: Callable[[], float],
    states: Hidden | None = None,
) -> Replay:
    """Replay a known answer with the drafter of `generation`. `states` are those from which the
    target chose each token, float32[n_tokens, n_embd], for drafts that read its last state.
    """
    cascade, policy, hidden_states = generation.cascade, generation.policy, generation.hidden_states
    tokens, costs = answer.tokens, baseline.costs
    stats, start_s = AnswerStats(), 0.0
    if cascade is not None:
        # The draft reads the prompt for a proposal that is not used: rounds cost only what grows
        # with the answer.
        started = clock()
        draft_alone(cascade.propose(generation.tokens, RoundPlan("fixed", 1)))
        start_s = clock() - started
    generation.commit(tokens[0])
    while (done := len(generation.tokens) - generation.n_prompt) < len(tokens):
        plan, draft, seconds = RoundPlan("off"), NO_DRAFT, 0.0
        whole: tuple[Draft, ...] = ()
        if cascade is not None:
            started = clock()
            offer = generation.offer(policy.n_max)
            plan = policy.plan(offer)
            proposed = draft_alone(cascade.propose(generation.tokens, plan))
            whole, draft = (offer.found, proposed), plan.stop.cut(proposed)
            seconds = clock() - started
        path = agreeing_path(draft, tokens[done:])
        last = done + len(path)
        committed = tuple(tokens[done : last + 1])
        for token in committed:
            generation.commit(token)
        if hidden_states is not None and states is not None and last < len(states):
            n_read = generation.n_prompt + last
            hidden_states.keep_states(states[last : last + 1], generation.tokens, n_read)
        n_rows = 1 + len(draft)
        target_s = costs.rows_s(n_rows)
        result = RoundResult(
            plan, draft, path, seconds, target_s, n_rows, committed, whole, model_s=seconds
        )
        policy.observe(result)
        if cascade is not None:
            cascade.observe(result)
        stats.add_round(result)
    return Replay(len(tokens) - 1, stats, start_s, baseline.token_s, answer.kind)


def summarise(replays: Sequence[Replay]) -> DraftFigures:
    """Return the figures of all answers, but those of one token, and of each kind if there are
    several.
    """
    counted = [replay for replay in replays if replay.stats.n_rounds]
    speedups, kinds = [replay.speedup for replay in counted], dict.fromkeys(r.kind for r in counted)
    all_stats = [replay.stats for replay in counted]
    n_tokens = sum(replay.n_tokens for replay in counted)
    n_drafted = sum(stats.n_drafted for stats in all_stats)
    n_positions = sum(sum(stats.drafted_by_depth.values()) for stats in all_stats)
    draft_s = sum(stats.draft_s for stats in all_stats)
    seconds = draft_s + sum(stats.target_s for stats in all_stats)
    return DraftFigures(
        speedup=statistics.geometric_mean(speedups),
        worst_speedup=min(speedups),
        best_speedup=max(speedups),
        n_answers=len(counted),
        tokens_per_s=n_tokens / seconds,
        acceptance_rate=sum(t.n_accepted for t in all_stats) / n_positions if n_positions else None,
        mean_accepted_length=n_tokens / sum(stats.n_rounds for stats in all_stats),
        draft_token_s=draft_s / n_drafted if n_drafted else None,
        start_s=sum(replay.start_s for replay in counted) / len(counted),
        kinds={
            kind: summarise([replay for replay in counted if replay.kind == kind])
            for kind in (kinds if len(kinds) > 1 else ())
        },
    )


def agreeing_path(draft: Draft, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a draft that a target accepts if its own next tokens are `tokens`."""
    path: tuple[int, ...] = ()
    for token in tokens:
        children = draft.children[path[-1] if path else ROOT]
        found = next((child for child in children if draft.tokens[child] == token), None)
        if found is None:
            break
        path += (found,)
    return path


def fitting_prompts(
    session: Session, texts: Iterable[tuple[int, str]], chat: bool | None, n_more: int = 1
) -> tuple[dict[int, Prompt], tuple[int, ...]]:
    """Return the prompts that fit with `n_more` tokens, and the numbers of others. Raise
    `PromptError`.
    """
    prompts: dict[int, Prompt] = {}
    failures: dict[int, PromptError] = {}
    for number, text in texts:
        prompt = session.prompts.of_text(text, chat=chat, now=NOW)
        try:
            session.context_size(len(prompt.tokens) + n_more)
            prompts[number] = prompt
        except PromptError as error:
            failures[number] = error
    if not prompts:
        raise next(iter(failures.values()), PromptError("there are no prompts"))
    return prompts, tuple(failures)


def read_states(target: Backend, tokens: Sequence[int], hidden_states: HiddenStateSink) -> None:
    """Add the target's states after each token to the trail of a draft that reads them all; the
    context is empty.
    """
    try:
        for start in range(0, len(tokens), target.n_batch):
            batch = Batch.of(tokens[start : start + target.n_batch], start, 1)
            _, hidden = target.decode_hidden(batch, all_rows=True)
            hidden_states.keep_states(hidden, tokens, start + len(batch))
    finally:
        target.remove(0)
