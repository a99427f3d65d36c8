"""Compute the speed-up of a draft without running the target for each draft.

The target answers a few prompts without drafts, once, and its batches are timed. Each draft is then
replayed on these answers: proposed tokens that agree with the answer count as accepted, and each
round is charged the measured time of a batch of its size. Trying a dozen drafts therefore only
takes the time of the drafts themselves.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specgen.errors import BackendError, PromptError
from specgen.measure.prompts import FIXED_NOW, BenchPrompt
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
from specgen.system.quantities import is_gain, measured_speedup
from specgen.train.target_text import read_answer

if TYPE_CHECKING:
    from specgen.llama.context import LlamaBackend
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session

#: After each answer every batch size is timed once, but the smallest ones this many times.
_N_REPEATS = 3
#: The number of smallest batch sizes, which includes the size 1.
_N_SMALL_SIZES = 6


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The target's greedy answer to a prompt."""

    #: The prompt's text.
    prompt: str
    #: The answer's tokens, including the end-of-text token if the target generated it.
    tokens: tuple[int, ...]
    #: The kind of task: the prompt's category.
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was measured of a target without a draft."""

    #: The target's answers to the prompts that fit in the context.
    answers: tuple[TrialAnswer, ...]
    #: The numbers of the prompts that do not fit in the context, as in their file.
    skipped: tuple[int, ...]
    #: The context size of all answers.
    n_ctx: int
    #: The median time of one decode, by its number of rows.
    batch_s: dict[int, float]
    #: Whether the chat template was used; None if it was used because the target has one.
    chat: bool | None = None

    @property
    def costs(self) -> PairCosts:
        """The costs of the target's batches, without those of a draft."""
        return PairCosts(self.batch_s)

    @property
    def token_s(self) -> float:
        """Seconds per token in plain decoding."""
        return self.batch_s[1]


@dataclass(frozen=True, slots=True)
class Replay:
    """The figures of one answer that was replayed with a drafter."""

    #: The number of the answer's tokens after the first one, which the prefill gives.
    n_tokens: int
    #: The statistics of the rounds. `target_s` is the sum of the measured costs of their batches.
    stats: AnswerStats
    #: Seconds for the draft's prefill.
    start_s: float
    #: Seconds per token in plain decoding.
    token_s: float
    #: The kind of task.
    kind: str = ""

    @property
    def speedup(self) -> float:
        """The speed-up over plain decoding, without the prefills."""
        return self.token_s * self.n_tokens / (self.stats.target_s + self.stats.draft_s)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """The figures of a draft over all answers."""

    #: The geometric mean of the answers' speed-ups over plain decoding, without the prefills.
    speedup: float
    #: The lowest speed-up of an answer.
    worst_speedup: float
    #: The highest speed-up of an answer.
    best_speedup: float
    #: The number of answers.
    n_answers: int
    #: Tokens per second, without the prefills.
    tokens_per_s: float
    #: Accepted tokens per drafted position; None if nothing was drafted.
    acceptance_rate: float | None
    #: Tokens per round.
    mean_accepted_length: float
    #: Seconds per drafted token; None if nothing was drafted.
    draft_token_s: float | None
    #: Mean seconds for the draft's prefill.
    start_s: float
    #: The figures of each kind of task, if there are several.
    kinds: Mapping[str, DraftFigures] = field(default_factory=dict)

    @property
    def gain(self) -> str:
        """The speed-up and its range in words."""
        return measured_speedup(self.speedup, self.worst_speedup, self.best_speedup, self.n_answers)

    @property
    def is_gain(self) -> bool:
        """Whether the speed-up is more than noise."""
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

    The times are also stored in the session's cost table.

    Args:
        session: A session with a greedy sampler and without a draft.
        prompts: The prompts; those that do not fit in the context are skipped.
        chat: Whether to use the chat template; None to use it if the target has one.
        interrupted: Whether to stop.
        progress: Receives the number of finished answers, and of all answers.

    Returns:
        The baseline; None if interrupted.

    Raises:
        MemoryLimitError: If there is not enough memory.
        PromptError: If no prompt fits in the context, no answer is longer than one token, or the
            context has no room to time the largest batch.
    """
    numbered_prompts = {prompt.number: prompt for prompt in prompts}
    texts = [(number, prompt.text) for number, prompt in numbered_prompts.items()]
    fitting, skipped = fitting_prompts(session, texts, chat)
    n_ctx = max(session.context_size(len(prompt.tokens)) for prompt in fitting.values())

    timings = _BatchTimings.of(session)
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
            bench_prompt = numbered_prompts[number]
            answers.append(TrialAnswer(bench_prompt.text, tokens, bench_prompt.category))

            # Larger batches are timed after every answer, since a machine's speed changes.
            timings.add_plain_rounds(generation.stats)
            if not timings.measure(target, generation.tokens, interrupted):
                return None

    batch_s = timings.medians_s(n_ctx)
    for size, seconds in batch_s.items():
        session.costs.table().set_seconds(size, seconds)
    return Baseline(tuple(answers), skipped, n_ctx, batch_s, chat)


@dataclass(frozen=True, slots=True)
class _BatchTimings:
    """The measured times of the target's decodes, by their number of rows.

    The times of single rows come from the answers, whose rounds have one row each, so only larger
    batches are decoded to be timed.
    """

    #: The batch sizes whose times are needed, in ascending order; the first is 1.
    sizes: Sequence[int]
    #: The batch sizes to decode after each answer, some of them several times.
    sizes_per_answer: Sequence[int]
    #: The measured times in seconds, by batch size.
    samples_s: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, session: Session) -> _BatchTimings:
        """Return the timings of a session's target, without any sample yet."""
        if session.target.is_streamed:  # each batch takes seconds, whatever its size
            sizes = sorted({1, session.n_rows_max})
            return cls(sizes, sizes[1:])
        sizes = timed_batch_sizes(session.n_rows_max)
        small_sizes = sizes[1:_N_SMALL_SIZES]
        return cls(sizes, [*sizes[1:], *(_N_REPEATS - 1) * small_sizes])

    def add_plain_rounds(self, stats: AnswerStats) -> None:
        """Add the times of an answer's rounds, each of which decoded one row."""
        self.samples_s[1] += stats.target_s_by_rows[1]

    def measure(
        self,
        target: Backend,
        text: Sequence[int],
        interrupted: Callable[[], bool],
    ) -> bool:
        """Decode batches of all larger sizes after the text in the cache, and add their times.

        Args:
            target: The target's context.
            text: The tokens that the batches consist of.
            interrupted: Whether to stop.

        Returns:
            Whether all of them were decoded; False if interrupted.
        """
        for size in self.sizes_per_answer:
            if interrupted():
                return False
            seconds = time_batch(target, text, size)
            if seconds is not None:
                self.samples_s[size].append(seconds)
        return True

    def medians_s(self, n_ctx: int) -> dict[int, float]:
        """Return the median time in seconds of each batch size.

        Args:
            n_ctx: The context size, for the error message.

        Raises:
            PromptError: If a batch size was never timed.
        """
        if not self.samples_s[1]:
            raise PromptError("no answer is longer than a token: there is nothing to draft")
        if any(not self.samples_s[size] for size in self.sizes):
            raise PromptError(
                f"a context of {n_ctx} tokens has no room to time batches of {self.sizes[-1]} rows",
                hint="use a larger --ctx-size, or a smaller --draft-max",
            )
        return {size: statistics.median(self.samples_s[size]) for size in self.sizes}


def try_draft(
    session: Session,
    baseline: Baseline,
    *,
    interrupted: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> DraftFigures | None:
    """Replay the session's draft on the target's known answers.

    Args:
        session: A session with a greedy sampler and the draft to try.
        baseline: The target's answers and costs.
        interrupted: Whether to stop.
        progress: Receives the number of replayed answers, and of all answers.

    Returns:
        The figures of the draft; None if interrupted.

    Raises:
        BackendError: If the draft reads the target's cache, which a replay does not fill.
    """
    if session.draft is not None and session.draft.reads_target_cache:
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
            prompt = session.prompts.of_text(answer.prompt, chat=baseline.chat, now=FIXED_NOW)
            for draft in drafts:
                draft.remove(0)
            generation = DrafterFactory(session).new_answer(prompt, baseline.n_ctx, drafts, 0)
            states = _states_for_replay(target, prompt.tokens, answer.tokens, generation)
            replays.append(replay(generation, answer, baseline, session.clock, states))
    return summarise(replays)


def _states_for_replay(
    target: LlamaBackend,
    prompt: Sequence[int],
    answer: Sequence[int],
    generation: AnswerState,
) -> Hidden | None:
    """Decode a known answer with the target, if the draft reads the target's hidden states.

    Some drafts read the states of all tokens. They are stored in the draft's buffer at once. Other
    drafts read only the last state before each round, which `replay` stores round by round.

    Args:
        target: The target, whose context is empty before and after.
        prompt: The prompt's tokens.
        answer: The answer's tokens.
        generation: The answer that is replayed, with the buffer of hidden states.

    Returns:
        float32[n_tokens, n_embd], the hidden state from which the target chose each token of the
        answer; None unless the draft reads only the last state before each round.
    """
    hidden_states = generation.hidden_states
    if hidden_states is None:
        return None
    if hidden_states.reads_all_rows:
        store_states(target, (*prompt, *answer), hidden_states)
        return None
    pieces = read_answer(target, prompt, answer)
    states = np.concatenate([hidden.copy() for _, hidden in pieces])
    target.remove(0)
    return states


def replay(
    generation: AnswerState,
    answer: TrialAnswer,
    baseline: Baseline,
    clock: Callable[[], float],
    states: Hidden | None = None,
) -> Replay:
    """Replay a known answer with the drafter of `generation`.

    Args:
        generation: A new answer to the same prompt, which is filled with the known tokens.
        answer: The known answer.
        baseline: The costs of the target's batches.
        clock: Returns the time in seconds.
        states: float32[n_tokens, n_embd], the hidden state from which the target chose each token;
            None unless the draft reads the target's last state.
    """
    tokens = answer.tokens
    cascade = generation.cascade
    hidden_states = generation.hidden_states
    stats = AnswerStats()
    start_s = 0.0
    if cascade is not None:
        # Make the draft read the prompt now, for a proposal that is thrown away, so that the time
        # of its prefill is not part of the first round.
        started_s = clock()
        draft_alone(cascade.propose(generation.tokens, RoundPlan("fixed", 1)))
        start_s = clock() - started_s
    # The first token comes from the target's prefill, before any round.
    generation.commit(tokens[0])
    n_done = 1
    while n_done < len(tokens):
        result = _draft_round(generation, clock)

        # Commit the accepted tokens, and the target's token after them if the answer has one.
        result.path = agreeing_path(result.draft, tokens[n_done:])
        last = n_done + len(result.path)
        result.committed = tuple(tokens[n_done : last + 1])
        for token in result.committed:
            generation.commit(token)
        n_done = len(generation.tokens) - generation.n_prompt

        # Give the draft the state from which the target chose the last committed token.
        if hidden_states is not None and states is not None and last < len(states):
            n_read = generation.n_prompt + last
            hidden_states.keep_states(states[last : last + 1], generation.tokens, n_read)

        # Charge the target's batch, which was not decoded, and let the policy and drafts learn.
        result.n_rows = 1 + len(result.draft)
        result.target_s = baseline.costs.seconds(result.n_rows)
        generation.policy.observe(result)
        if cascade is not None:
            cascade.observe(result)
        stats.add_round(result)
    return Replay(len(tokens) - 1, stats, start_s, baseline.token_s, answer.kind)


def _draft_round(generation: AnswerState, clock: Callable[[], float]) -> RoundResult:
    """Return a round with its draft and the time of drafting, but without the target's part."""
    cascade = generation.cascade
    if cascade is None:
        return RoundResult(RoundPlan("off"))
    started_s = clock()
    offer = generation.offer(generation.policy.n_max)
    plan = generation.policy.plan(offer)
    proposed = draft_alone(cascade.propose(generation.tokens, plan))
    draft = plan.stop.cut(proposed)  # only the nodes that are worth verifying
    seconds = clock() - started_s
    return RoundResult(
        plan,
        draft,
        draft_s=seconds,
        # The policy learns from all proposals, even if they are not verified.
        proposed=(offer.found, proposed),
        model_s=seconds,
    )


def summarise(replays: Sequence[Replay]) -> DraftFigures:
    """Return the figures of all replayed answers together, and of each kind of task.

    Answers of one token are left out, since they have no rounds.
    """
    replays = [each for each in replays if each.stats.n_rounds]
    speedups = [each.speedup for each in replays]
    all_stats = [each.stats for each in replays]
    n_tokens = sum(each.n_tokens for each in replays)
    n_rounds = sum(stats.n_rounds for stats in all_stats)
    n_drafted = sum(stats.n_drafted for stats in all_stats)
    n_accepted = sum(stats.n_accepted for stats in all_stats)
    # Siblings compete for one position, so acceptance is counted per position, not per token.
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
    """Return the accepted nodes of a draft, given that the target's next tokens are `tokens`."""
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
    n_extra_tokens: int = 1,
) -> tuple[dict[int, Prompt], tuple[int, ...]]:
    """Tokenize the prompts, and separate those that fit in the context from the others.

    Args:
        session: The session.
        texts: The prompts' numbers and texts.
        chat: Whether to use the chat template; None to use it if the target has one.
        n_extra_tokens: The number of tokens for which the context needs room after the prompt.

    Returns:
        The prompts that fit, by number, and the numbers of the others.

    Raises:
        PromptError: If no prompt fits.
    """
    prompts: dict[int, Prompt] = {}
    errors: dict[int, PromptError] = {}
    for number, text in texts:
        prompt = session.prompts.of_text(text, chat=chat, now=FIXED_NOW)
        try:
            session.context_size(len(prompt.tokens) + n_extra_tokens)
            prompts[number] = prompt
        except PromptError as error:
            errors[number] = error
    if not prompts:
        raise next(iter(errors.values()), PromptError("there are no prompts"))
    return prompts, tuple(errors)


def store_states(
    target: Backend,
    tokens: Sequence[int],
    hidden_states: HiddenStateSink,
) -> None:
    """Decode tokens with the target, and store the hidden state of each for the draft.

    Args:
        target: The target, whose context is empty before and after.
        tokens: The tokens of the prompt and the answer.
        hidden_states: Receives the states.
    """
    try:
        for start in range(0, len(tokens), target.n_batch):
            batch = Batch.of(tokens[start : start + target.n_batch], start, 1)
            _, hidden = target.decode_hidden(batch, all_rows=True)
            hidden_states.keep_states(hidden, tokens, start + len(batch))
    finally:
        target.remove(0)
