"""The speed-up that a draft would bring, computed without running it with the target.

The target answers a few prompts plainly, once, and its batches are timed. Each draft is then replayed on these answers:
proposed tokens that agree with the answer count as accepted, and a round costs the measured time of a batch of its size.
So a dozen drafts can be tried in only their own time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specgen.errors import BackendError, PromptError
from specgen.llama import LlamaBackend
from specgen.measure.prompts import NOW
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import TargetStates, draft_alone
from specgen.method.policy import RoundPlan, RoundResult
from specgen.session.answer_loop import AnswerLoop
from specgen.session.calibration import (
    Costs,
    measure_if_new,
    speedup,
    time_batch,
    timed_batch_sizes,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.system.arrays import Hidden
from specgen.text.answer_state import AnswerState, Tally

if TYPE_CHECKING:
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session

#: After each answer, the first sizes of batches are timed so often, but for a single row, which the answer itself times;
#: larger sizes once.
_N_OFTEN, _N_REPEATS = 6, 3


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """A prompt as it was given, and the tokens of the target's own answer at temperature 0, with the token that
    ends it."""

    prompt: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A target without a draft: its answers, generated in contexts of `n_ctx` tokens, and the median seconds of decodes
    by their rows. `chat` says whether the prompts used its template (None: if it has one). `skipped` are the numbers,
    from 1 on, of prompts that do not fit into the context."""

    answers: tuple[TargetAnswer, ...]
    skipped: tuple[int, ...]
    n_ctx: int
    batch_s: dict[int, float]
    chat: bool | None = None

    @property
    def costs(self) -> Costs:
        return Costs(self.batch_s)

    @property
    def token_s(self) -> float:
        return self.batch_s[1]


@dataclass(frozen=True, slots=True)
class Replay:
    """A drafter's rounds for one answer, without the token that came from the prompt's decode. `start_s` is the
    draft model's decode of the prompt; the tally's `target_s` are the target's batches by their measured costs, and
    `token_s` is that of a token in plain decoding."""

    n_tokens: int
    tally: Tally
    start_s: float
    token_s: float

    @property
    def speedup(self) -> float:
        return speedup(self.n_tokens, self.tally.target_s + self.tally.draft_s, self.token_s)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """The figures of a draft over all answers together; the decodes of prompts do not count. `start_s` are the
    seconds of the draft model's decode of a prompt. Figures that do not exist, since nothing was drafted, are None."""

    speedup: float
    worst_speedup: float
    tokens_per_s: float
    acceptance_rate: float | None
    mean_accepted_length: float
    draft_token_s: float | None
    start_s: float


def measure_target(
    session: Session,
    prompts: Sequence[str],
    *,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Baseline | None:
    """Let the target answer the prompts at temperature 0 without a draft, and time its batches up to the most rows of
    a round. None if interrupted. Raise `PromptError` if no prompt fits into the context, no answer is longer than a
    token, or the context has no room to time the batches; and `MemoryLimitError`."""
    fitting, skipped = fitting_prompts(session, enumerate(prompts, 1), chat)
    n_ctx = max(session.context_size(len(prompt.tokens)) for prompt in fitting.values())
    sizes = timed_batch_sizes(session.n_rows_max)
    samples: defaultdict[int, list[float]] = defaultdict(list)
    answers: list[TargetAnswer] = []
    with session.contexts(n_ctx, drafts=False) as (target, _):
        for number, prompt in fitting.items():
            progress(len(answers), len(fitting))
            target.remove(0)
            generation = DrafterFactory(session).sequence(prompt, n_ctx, (), 0, plain=True)
            list(AnswerLoop(target, session.clock, interrupted).run(generation))
            if interrupted():
                return None
            n_prompt = generation.n_prompt
            answers.append(TargetAnswer(prompts[number - 1], tuple(generation.tokens[n_prompt:])))
            samples[1] += generation.tally.target_s_by_rows[1]
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
    """Return the figures of the loaded draft for its target; None if interrupted. Raise `MemoryLimitError` or
    `BackendError` if the draft model cannot be run."""
    if session.draft is not None and session.draft.reads == "cache":
        raise BackendError(
            f"{session.draft_name}: it reads the target's cache, so it cannot draft for kept answers",
            hint="`specgen bench` measures it",
        )
    replays: list[Replay] = []
    with session.contexts(baseline.n_ctx) as (target, drafts):
        measure_if_new(session, target, drafts)
        for answer in baseline.answers:
            progress(len(replays), len(baseline.answers))
            if interrupted():
                return None
            prompt = session.prompts.of_text(answer.prompt, chat=baseline.chat, now=NOW)
            for draft in drafts:
                draft.remove(0)
            generation = DrafterFactory(session).sequence(prompt, baseline.n_ctx, drafts, 0)
            tokens, states = (*prompt.tokens, *answer.tokens), None
            if generation.trail is not None and generation.trail.all_rows:
                read_states(target, tokens, generation.trail)
            elif generation.trail is not None:
                states = _states_of_answer(target, tokens, len(prompt.tokens))
            replays.append(replay(generation, answer, baseline, session.clock, states))
    return summarise(replays)


def replay(
    generation: AnswerState,
    answer: TargetAnswer,
    baseline: Baseline,
    clock: Callable[[], float],
    states: Hidden | None = None,
) -> Replay:
    """Replay the rounds of a known answer with the drafter of `generation`, which is at the end of its prompt, and
    then at the end of the answer. `clock` is read around each proposal. For drafts from the target's last state,
    `states` are those from which it chose each token of the answer, float32[n_tokens, n_embd]."""
    cascade, policy, trail = generation.cascade, generation.policy, generation.trail
    tokens, costs = answer.tokens, baseline.costs
    tally, start_s = Tally(), 0.0
    if cascade is not None:
        # The draft model decodes the prompt for a proposal that is not used: so the rounds have only costs that grow
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
        if trail is not None and states is not None and last < len(states):
            n_read = generation.n_prompt + last
            trail.keep_states(states[last : last + 1], generation.tokens, n_read)
        n_rows = 1 + len(draft)
        target_s = costs.rows_s(n_rows)
        result = RoundResult(
            plan, draft, path, seconds, target_s, n_rows, committed, whole, model_s=seconds
        )
        policy.observe(result)
        if cascade is not None:
            cascade.observe(result)
        tally.add_round(result)
    return Replay(len(tokens) - 1, tally, start_s, baseline.token_s)


def summarise(replays: Sequence[Replay]) -> DraftFigures:
    """Return the figures of all answers together. Answers of a single token do not count."""
    counted = [replay for replay in replays if replay.tally.n_rounds]
    tallies = [replay.tally for replay in counted]
    n_tokens = sum(replay.n_tokens for replay in counted)
    n_drafted = sum(tally.n_drafted for tally in tallies)
    n_positions = sum(sum(tally.drafted_by_depth.values()) for tally in tallies)
    draft_s = sum(tally.draft_s for tally in tallies)
    seconds = draft_s + sum(tally.target_s for tally in tallies)
    return DraftFigures(
        speedup=speedup(n_tokens, seconds, counted[0].token_s),
        worst_speedup=min(replay.speedup for replay in counted),
        tokens_per_s=n_tokens / seconds,
        acceptance_rate=sum(t.n_accepted for t in tallies) / n_positions if n_positions else None,
        mean_accepted_length=n_tokens / sum(tally.n_rounds for tally in tallies),
        draft_token_s=draft_s / n_drafted if n_drafted else None,
        start_s=sum(replay.start_s for replay in counted) / len(counted),
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
    """Return the prompts that fit into the context with `n_more` tokens by their numbers, and the numbers of the
    others. Raise `PromptError` if none fits."""
    prompts = {n: session.prompts.of_text(text, chat=chat, now=NOW) for n, text in texts}

    def problem(prompt: Prompt) -> PromptError | None:
        try:
            session.context_size(len(prompt.tokens) + n_more)
        except PromptError as error:
            return error
        return None

    failures = {n: error for n, prompt in prompts.items() if (error := problem(prompt))}
    if len(failures) == len(prompts):
        raise next(iter(failures.values()), PromptError("there are no prompts"))
    return {n: each for n, each in prompts.items() if n not in failures}, tuple(failures)


def _states_of_answer(target: LlamaBackend, tokens: Sequence[int], n_prompt: int) -> Hidden:
    """Return the final hidden states from which each token of an answer was chosen, float32[n_tokens, n_embd]."""
    pieces: list[Hidden] = []
    first, last, start = n_prompt - 1, len(tokens) - 1, 0
    ends = [*range(target.n_batch, first, target.n_batch), first]
    for end in (*ends, *range(first + target.n_outputs, last, target.n_outputs), last):
        batch = Batch()
        for position in range(start, end):
            batch.add(tokens[position], position, (0,), end > first)
        if end > first:
            pieces.append(target.decode_hidden(batch)[1].copy())
        elif len(batch):
            target.decode(batch)
        start = end
    target.remove(0)
    return np.concatenate(pieces)


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
            trail.keep_states(hidden, tokens, start + len(batch))
    finally:
        target.remove(0)
