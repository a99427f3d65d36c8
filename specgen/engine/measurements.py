"""First-use measurements: how long decodes take, and how often a draft agrees with the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specgen.backend.base import Backend
from specgen.calibration.system_load import BUSY_SHARE, core_time, share_of_others
from specgen.calibration.timing import MIN_SIZES, complete, is_measured, timed_batch_sizes
from specgen.core.text_state import Shaper, TextState
from specgen.engine.agreement import N_KNOWN, N_TOKENS, TEXT, Walk, can_pay, sample_agreement
from specgen.engine.prompts import Prompt, tokenize
from specgen.options import SamplerOptions
from specgen.sampling import Sampler

if TYPE_CHECKING:
    from specgen.engine.session import Session

#: Batch sizes to time for a draft model: drafted tokens, the tokens of the last round, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)


def is_pair_measured(session: Session, draft: Path | None) -> bool:
    """Whether the costs of the target, up to the largest batch of a round, and of the draft model are
    known."""
    own = is_measured(session.costs.table(), session.n_rows_max)
    return own and (draft is None or is_measured(session.costs.table(draft)))


def measure_if_costs_decide(
    session: Session,
    target: Backend,
    draft: Backend | None,
    interrupted: Callable[[], bool] = lambda: False,
) -> float:
    """Call `measure_if_new` if there is a draft and costs decide how much is drafted; return 0 if not."""
    if not session.options.drafting.is_by_cost or session.draft_source == "none":
        return 0.0
    return measure_if_new(session, target, draft, interrupted)


def measure_if_new(
    session: Session,
    target: Backend,
    draft: Backend | None,
    interrupted: Callable[[], bool] = lambda: False,
) -> float:
    """Measure the costs of decodes and, if costs decide how much is drafted, how often a draft model
    agrees with the target. Results that are known are not measured again. The contexts must be empty.
    Return the seconds that this took; 0 if everything was known.

    If other programs slowed the measurement down (`session.was_busy`), its costs are used now but not
    kept: a table of a busy machine may say that no draft pays, and then no decode would correct it.
    Raises `KeyboardInterrupt` if `interrupted` returns True between decodes; that measurement is not
    kept."""
    started, path = session.clock(), session.draft_path
    is_known = is_pair_measured(session, path)
    if not is_known:
        before = core_time()
        sizes = timed_batch_sizes(max(MIN_SIZES, session.n_rows_max))
        complete(session.costs.table(), target, sizes, session.n_rows_max, interrupted)
        if draft is not None and path is not None:
            complete(session.costs.table(path), draft, _DRAFT_SIZES, interrupted=interrupted)
        share = share_of_others(before, core_time())
        session.was_busy = share is not None and share > BUSY_SHARE
        if session.was_busy:
            session.costs.do_not_keep(path)
    is_sampled = draft is not None and _sample_agreement(session, target, draft, interrupted)
    return session.clock() - started if is_sampled or not is_known else 0.0


def agreement_walk(session: Session, prompt: Prompt, draft: Backend) -> Walk:
    """Return a `Walk` of the draft model, in an empty context, through a text that begins with `prompt`.
    It counts how often the draft agrees with the target. The user's samplers do not matter: the most
    likely tokens are compared."""
    state = TextState(())
    drafter = session.model_drafter(
        prompt, (draft,), state, np.random.default_rng(0), _most_likely, branches=False
    )
    return Walk(drafter, state, session.chances(), is_translated=session.is_translated)


def _sample_agreement(
    session: Session, target: Backend, draft: Backend, interrupted: Callable[[], bool]
) -> bool:
    """Measure how often the draft model agrees with the target, unless that is known, or the draft could
    not pay even if it always agreed. Return whether anything was measured."""
    path, chances = session.draft_path, session.chances()
    is_known = "model" in chances and chances["model"].n_judged >= N_KNOWN
    if path is None or is_known or not session.options.drafting.is_by_cost:
        return False
    if not can_pay(
        session.costs.table(), session.costs.table(path), session.options.drafting.n_max
    ):
        return False
    tokens = tokenize(session.target_model.vocabulary, TEXT, parse_special=False)[:N_TOKENS]
    walk = agreement_walk(session, Prompt(TEXT, tuple(tokens[:1])), draft)
    try:
        return sample_agreement(target, walk, tokens, interrupted).n_places > 0
    finally:
        draft.remove(0)


def _most_likely(_sampler: Sampler, state: TextState) -> Shaper:
    """Return a shaper that keeps only the most likely token."""
    return Shaper(Sampler(SamplerOptions()), state)
