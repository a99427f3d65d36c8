"""The speed-up of a draft, computed without running it together with the target.

The target answers a few prompts without drafts, once, and its batches are timed. Each draft is then
replayed on these answers: proposed tokens that agree with the answer count as accepted, and a round
costs the measured time of a batch of its size. So trying a dozen drafts only takes the time of the
drafts themselves.
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
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import HiddenStateSink, draft_alone, never
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

#: After each answer all batch sizes are timed once, but the smallest ones this often.
_N_REPEATS = 3
#: The number of smallest sizes, with single tokens.
_N_OFTEN = 6


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The target's greedy answer to a prompt."""

    prompt: str
    #: Its tokens, with the one that ends it.
    tokens: tuple[int, ...]
    #: The kind of task.
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A target without a draft."""

    answers: tuple[TrialAnswer, ...]
    #: The numbers of prompts that do not fit, from 1.
    skipped: tuple[int, ...]
    n_ctx: int
    #: The median seconds of decodes by their rows.
    batch_s: dict[int, float]
    #: Whether its chat template was used (None: if it has one).
    chat: bool | None = None

    @property
    def costs(self) -> PairCosts:
        """What batches cost."""
        return PairCosts(self.batch_s)

    @property
    def token_s(self) -> float:
        """The seconds of a token in plain decoding."""
        return self.batch_s[1]


@dataclass(frozen=True, slots=True)
class Replay:
    """The rounds of a drafter for an answer, after its first token."""

    n_tokens: int
    #: Its `target_s` are the measured costs of the batches.
    stats: AnswerStats
    #: The seconds of the draft's prefill.
    start_s: float
    #: The seconds of a token in plain decoding.
    token_s: float
    #: The kind of task.
    kind: str = ""

    @property
    def speedup(self) -> float:
        """The speed-up over plain decoding, without the prefill."""
        return self.token_s * self.n_tokens / (self.stats.target_s + self.stats.draft_s)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """The figures of a draft over all answers; None where nothing was drafted."""

    #: The geometric mean over the answers, without the prefill.
    speedup: float
    worst_speedup: float
    best_speedup: float
    n_answers: int
    tokens_per_s: float
    acceptance_rate: float | None
    mean_accepted_length: float
    #: The seconds to draft a token.
    draft_token_s: float | None
    #: The seconds of the draft's prefill.
    start_s: float
    #: The figures of each kind of task, if there are several.
    kinds: Mapping[str, DraftFigures] = field(default_factory=dict)

    @property
    def gain(self) -> str:
        """The speed-up in words."""
        return measured_gain(self.speedup, self.worst_speedup, self.best_speedup, self.n_answers)

    @property
    def is_gain(self) -> bool:
        """Whether the draft is faster beyond noise."""
        return is_gain(self.speedup)


def measure_target(
    session: Session,
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Baseline | None:
    """Let a target without a draft answer prompts greedily, and time its batches.

    Returns:
        The baseline; None if interrupted.

    Raises:
        MemoryLimitError: there is not enough memory.
        PromptError: no prompt fits, no answer is long enough, or nothing can be timed.
    """
    asked = dict(enumerate(prompts, 1))
    texts = [(number, prompt.text) for number, prompt in asked.items()]
    fitting, skipped = fitting_prompts(session, texts, chat)
    n_ctx = max(session.context_size(len(prompt.tokens)) for prompt in fitting.values())
    sizes = timed_batch_sizes(session.n_rows_max)
    often = sizes[1:_N_OFTEN]
    samples: defaultdict[int, list[float]] = defaultdict(list)
    answers: list[TrialAnswer] = []
    with session.contexts(n_ctx, drafts=False) as (target, _):
        for number, prompt in fitting.items():
            progress(len(answers), len(fitting))
            target.remove(0)
            generation = DrafterFactory(session).new_answer(prompt, n_ctx, (), 0)
            for _ in AnswerLoop(target, session.clock, interrupted).run(generation):
                pass
            if interrupted():
                return None
            tokens = tuple(generation.tokens[generation.n_prompt :])
            answers.append(TrialAnswer(asked[number].text, tokens, asked[number].category))
            samples[1] += generation.stats.target_s_by_rows[1]
            # Batches are timed right after the single tokens, since a machine's speed changes.
            for size in (*sizes[1:], *(_N_REPEATS - 1) * often):
                if interrupted():
                    return None
                seconds = time_batch(target, generation.tokens, size)
                if seconds is not None:
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
    interrupted: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DraftFigures | None:
    """Replay a session's draft on the answers of its target; None if interrupted."""
    if session.draft is not None and session.draft.reads == "cache":
        raise BackendError(
            f"{session.draft_name}: it reads the target's cache, so it cannot be replayed",
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
            states = None
            hidden_states = generation.hidden_states
            if hidden_states is not None and hidden_states.all_rows:
                read_states(target, (*prompt.tokens, *answer.tokens), hidden_states)
            elif hidden_states is not None:
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
    """Replay a known answer with the drafter of `generation`.

    Args:
        generation: a new answer to the same prompt.
        answer: the known answer.
        baseline: what batches of the target cost.
        clock: the time in seconds.
        states: float32[n_tokens, n_embd], the states from which the target chose each token, for
            drafts that read its last state.
    """
    tokens = answer.tokens
    cascade = generation.cascade
    hidden_states = generation.hidden_states
    stats = AnswerStats()
    start_s = 0.0
    if cascade is not None:
        # The draft's prefill, for a proposal that is not used: rounds only cost what grows with the
        # answer.
        started_s = clock()
        draft_alone(cascade.propose(generation.tokens, RoundPlan("fixed", 1)))
        start_s = clock() - started_s
    # The prefill gives the first token.
    generation.commit(tokens[0])
    n_done = 1
    while n_done < len(tokens):
        result = _draft_round(generation, clock)
        # Commit the accepted tokens, and the target's token after them.
        result.path = agreeing_path(result.draft, tokens[n_done:])
        last = n_done + len(result.path)
        result.committed = tuple(tokens[n_done : last + 1])
        for token in result.committed:
            generation.commit(token)
        n_done = len(generation.tokens) - generation.n_prompt
        if hidden_states is not None and states is not None and last < len(states):
            n_read = generation.n_prompt + last
            hidden_states.keep_states(states[last : last + 1], generation.tokens, n_read)
        # Account for the round, which the target did not decode.
        result.n_rows = 1 + len(result.draft)
        result.target_s = baseline.costs.rows_s(result.n_rows)
        generation.policy.observe(result)
        if cascade is not None:
            cascade.observe(result)
        stats.add_round(result)
    return Replay(len(tokens) - 1, stats, start_s, baseline.token_s, answer.kind)


def _draft_round(generation: AnswerState, clock: Callable[[], float]) -> RoundResult:
    """Draft as a round of the answer does."""
    cascade = generation.cascade
    if cascade is None:
        return RoundResult(RoundPlan("off"))
    started_s = clock()
    offer = generation.offer(generation.policy.n_max)
    plan = generation.policy.plan(offer)
    proposed = draft_alone(cascade.propose(generation.tokens, plan))
    draft = plan.stop.cut(proposed)
    seconds = clock() - started_s
    return RoundResult(
        plan, draft, draft_s=seconds, proposed=(offer.found, proposed), model_s=seconds
    )


def summarise(replays: Sequence[Replay]) -> DraftFigures:
    """Return the figures of all answers, except those of one token."""
    replays = [each for each in replays if each.stats.n_rounds]
    speedups = [each.speedup for each in replays]
    all_stats = [each.stats for each in replays]
    n_tokens = sum(each.n_tokens for each in replays)
    n_rounds = sum(stats.n_rounds for stats in all_stats)
    n_drafted = sum(stats.n_drafted for stats in all_stats)
    n_accepted = sum(stats.n_accepted for stats in all_stats)
    n_positions = sum(sum(stats.drafted_by_depth.values()) for stats in all_stats)
    draft_s = sum(stats.draft_s for stats in all_stats)
    target_s = sum(stats.target_s for stats in all_stats)

    by_kind: dict[str, list[Replay]] = defaultdict(list)
    for each in replays:
        by_kind[each.kind].append(each)
    kinds: dict[str, DraftFigures] = {}
    if len(by_kind) > 1:
        kinds = {kind: summarise(of_kind) for kind, of_kind in by_kind.items()}
    return DraftFigures(
        speedup=statistics.geometric_mean(speedups),
        worst_speedup=min(speedups),
        best_speedup=max(speedups),
        n_answers=len(replays),
        tokens_per_s=n_tokens / (draft_s + target_s),
        acceptance_rate=n_accepted / n_positions if n_positions else None,
        mean_accepted_length=n_tokens / n_rounds,
        draft_token_s=draft_s / n_drafted if n_drafted else None,
        start_s=sum(each.start_s for each in replays) / len(replays),
        kinds=kinds,
    )


def agreeing_path(draft: Draft, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of a draft that a target accepts if its next tokens are `tokens`."""
    path: list[int] = []
    node = ROOT
    for token in tokens:
        matching = [child for child in draft.children[node] if draft.tokens[child] == token]
        if not matching:
            break
        node = matching[0]
        path.append(node)
    return tuple(path)


def fitting_prompts(
    session: Session,
    texts: Iterable[tuple[int, str]],
    chat: bool | None,
    n_more: int = 1,
) -> tuple[dict[int, Prompt], tuple[int, ...]]:
    """Return the prompts that fit in the context with `n_more` tokens, and the others' numbers.

    Raises:
        PromptError: none fits.
    """
    prompts: dict[int, Prompt] = {}
    errors: dict[int, PromptError] = {}
    for number, text in texts:
        prompt = session.prompts.of_text(text, chat=chat, now=NOW)
        try:
            session.context_size(len(prompt.tokens) + n_more)
            prompts[number] = prompt
        except PromptError as error:
            errors[number] = error
    if not prompts:
        raise next(iter(errors.values()), PromptError("there are no prompts"))
    return prompts, tuple(errors)


def read_states(target: Backend, tokens: Sequence[int], hidden_states: HiddenStateSink) -> None:
    """Keep the target's hidden states after all tokens, for a draft that reads all of them.

    The target's context is empty before and after.
    """
    try:
        for start in range(0, len(tokens), target.n_batch):
            batch = Batch.of(tokens[start : start + target.n_batch], start, 1)
            _, hidden = target.decode_hidden(batch, all_rows=True)
            hidden_states.keep_states(hidden, tokens, start + len(batch))
    finally:
        target.remove(0)
