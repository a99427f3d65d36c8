"""First-use measurements: how long decodes take, and how often a draft agrees with the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from specgen.drafters.kind import Key
from specgen.method.backend import Backend, HiddenBackend
from specgen.method.cost_table import CostTable
from specgen.session.agreement import N_KNOWN, N_TOKENS, TEXT, Walk, read_states, sample_agreement
from specgen.session.costs import (
    MIN_SIZES,
    Costs,
    complete,
    expected_gain,
    is_measured,
    timed_batch_sizes,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.prompts import Prompt, tokenize
from specgen.session.session import MAX_SEQUENCES, Session
from specgen.system.machine import LoadOfOthers, is_busy
from specgen.system.units import seconds_text
from specgen.text.hidden_trail import StatesBackend
from specgen.text.text_state import TextState

#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)
#: The numbers of answers at once that are considered. A larger number must give at least so many times the
#: tokens per second, since each answer needs memory.
_AT_ONCE, _LEAST_GAIN = (1, 2, 4, 8, 16), 1.05
#: The size, in tokens, of the contexts in which decodes are timed if their costs are not known: for answers at
#: once, and for a single one.
_N_CTX, _N_SHORT = 512, 256


def is_pair_measured(models: Session, draft: Key | None) -> bool:
    """Return whether the costs of the target, up to the largest batch of a round, and of a draft model
    are known."""
    own = is_measured(models.costs.table(), models.n_rows_max)
    return own and (draft is None or is_measured(models.costs.table(draft)))


def known_costs(models: Session, draft: Key) -> Costs | None:
    """Return the costs of the target and of a draft model; None if they are not known, or only for one
    size of batches."""
    if not is_pair_measured(models, draft):
        return None
    known = models.costs.table().known
    sizes = {n: seconds for n, seconds in known.items() if n <= models.n_rows_max}
    table = models.costs.table(draft)
    n_at_once = models.draft.n_at_once if models.draft is not None else 1
    token_s = table.seconds(n_at_once) / n_at_once
    return Costs(sizes, token_s) if len(sizes) > 1 else None


def measure_costs(models: Session, draft: Path) -> Costs | None:
    """Return the costs of the target and of its draft model `draft`. Costs that are not known are measured.
    None if a round has no room for a draft. Raises `MemoryLimitError` if the contexts do not fit into
    memory, and `BackendError` if a decode fails."""
    if not is_pair_measured(models, draft):
        with models.contexts(short_context(models)) as (target, drafts):
            measure_if_new(models, target, drafts)
    return known_costs(models, draft)


def short_context(models: Session) -> int:
    """Return the size, in tokens, of a context in which only costs are measured."""
    n_train = models.target.n_ctx_train
    return min(_N_SHORT, n_train) if n_train > 0 else _N_SHORT


def calibrate(models: Session, interrupted: Callable[[], bool] = lambda: False) -> str:
    """Measure what drafting costs here and how often the draft agrees with the target, if costs decide how much is
    drafted and this is not known, in short contexts of their own. Return a sentence that says so; empty if all
    was known. Raise what `measure_if_new` raises, and `MemoryLimitError`."""
    draft = models.draft
    if not models.options.drafting.is_by_cost or draft is None:
        return ""
    if is_pair_measured(models, draft.timed) and not _wants_agreement(models):
        return ""
    with models.contexts(short_context(models)) as (target, drafts):
        took_s = measure_if_new(models, target, drafts, interrupted)
    again = "; the machine was busy, so they will be measured again" * models.costs.was_busy
    took = seconds_text(took_s)
    return f"measured the costs of drafting and the expected acceptance in {took}{again}"


def measure_if_new(
    models: Session,
    target: Backend,
    drafts: Sequence[Backend],
    interrupted: Callable[[], bool] = lambda: False,
) -> float:
    """Measure the costs of decodes and, if costs decide how much is drafted, how often a draft model
    agrees with the target. Results that are known are not measured again. The contexts must be empty.
    Return the seconds that this took; 0 if everything was known.

    If other programs slowed the measurement down (`ModelCosts.was_busy`), its costs are kept for a few runs only:
    by the table of a busy machine perhaps no draft pays, and then no decode would correct it. Raise
    `KeyboardInterrupt` if `interrupted` returns True between decodes; that measurement is not kept."""
    started, costs = models.clock(), models.costs
    timed = models.draft.timed if models.draft is not None else None
    is_known = is_pair_measured(models, timed)
    if not is_known:
        load = LoadOfOthers()
        sizes = timed_batch_sizes(max(MIN_SIZES, models.n_rows_max))
        complete(costs.table(), target, sizes, models.n_rows_max, interrupted)
        if drafts and timed is not None:
            complete(costs.table(timed), drafts[0], _DRAFT_SIZES, interrupted=interrupted)
        costs.was_busy = is_busy(load.share)
        if costs.was_busy:
            costs.keep_briefly(timed)
    is_sampled = bool(drafts) and _sample_agreement(models, target, drafts, interrupted)
    return models.clock() - started if is_sampled or not is_known else 0.0


def fastest_parallel(
    models: Session, n_answers: int, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """Return the number of answers at once that gives most tokens per second, by the costs of the
    target's batches. Costs that are not known are measured now. Raise `MemoryLimitError`."""
    if n_answers < 2:
        return 1
    with models.contexts(_N_CTX) as (target, drafts):
        measure_if_new(models, target, drafts, interrupted)
    table = models.costs.table()
    n_most = min(n_answers, MAX_SEQUENCES // models.n_sequences_max)
    best = 1
    for n in _AT_ONCE:
        is_faster = n / table.seconds(n) > _LEAST_GAIN * best / table.seconds(best)
        if n <= n_most and is_faster:
            best = n
    return best


def target_costs(models: Session, interrupted: Callable[[], bool] = lambda: False) -> CostTable:
    """Return the costs of the target. If they are not known, they are measured now. Raise
    `MemoryLimitError`, and `KeyboardInterrupt` if interrupted."""
    if not is_measured(models.costs.table()):
        with models.contexts(short_context(models)) as (target, drafts):
            measure_if_new(models, target, drafts, interrupted)
    return models.costs.table()


def tokens_read_in(
    models: Session, seconds: float, interrupted: Callable[[], bool] = lambda: False
) -> int:
    """Return how many tokens of a prompt the target reads in `seconds`, by its costs. Raise what
    `target_costs` raises."""
    table = target_costs(models, interrupted)
    n_rows = max(table.known)
    return int(seconds * n_rows / table.seconds(n_rows))


def agreement_walk(models: Session, prompt: Prompt, drafts: Sequence[Backend]) -> Walk:
    """Return a `Walk` of the draft, in empty contexts, through a text that starts with `prompt`. It
    counts how often the draft agrees with the target. The most likely tokens are compared, whatever the
    user's samplers are."""
    factory, state = DrafterFactory(models), TextState(())
    drafter = factory.chain_drafter(prompt, drafts, state)
    is_translated = models.own_vocabulary is not None
    return Walk(drafter, state, factory.acceptance(), is_translated=is_translated)


def read_for(draft: Backend, target: Backend, tokens: Sequence[int]) -> None:
    """Let the target decode a text for a draft that reads its hidden states; do nothing for other drafts. The
    target's context must be empty, and is empty again afterwards."""
    if isinstance(draft, StatesBackend) and isinstance(target, HiddenBackend):
        read_states(target, tokens, draft.trails[0])


def _wants_agreement(models: Session) -> bool:
    """Return whether the draft's agreement with the target is to be measured: it is not known, and the draft would
    pay if it always agreed."""
    draft, acceptance = models.draft, DrafterFactory(models).acceptance()
    if draft is None or draft.timed is None or draft.reads == "cache":
        return False
    is_known = draft.origin in acceptance and acceptance[draft.origin].n_judged >= N_KNOWN
    if is_known or not models.options.drafting.is_by_cost:
        return False
    costs = known_costs(models, draft.timed)
    return costs is not None and expected_gain(costs, 1.0).speedup > 1.0


def _sample_agreement(
    models: Session,
    target: Backend,
    drafts: Sequence[Backend],
    interrupted: Callable[[], bool],
) -> bool:
    """Measure how often the draft agrees with the target, if that is wanted. Return whether anything was
    measured."""
    if not _wants_agreement(models):
        return False
    tokens = tokenize(models.target.vocabulary, TEXT, parse_special=False)[:N_TOKENS]
    walk = agreement_walk(models, Prompt(TEXT, tuple(tokens[:1])), drafts)
    read_for(drafts[0], target, tokens[: target.n_ctx])
    try:
        return sample_agreement(target, walk, tokens, interrupted).n_places > 0
    finally:
        for each in drafts:
            each.remove(0)
