"""Propose the drafts of a round for all sequences. Decodes of one draft model share batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specgen.arrays import Logits
from specgen.backend.base import Backend, Batch
from specgen.core.draft import NO_DRAFT, Draft
from specgen.drafters import Ask, Drafting
from specgen.errors import BackendError


@dataclass
class Proposal:
    """The drafting of one sequence, and its result."""

    drafting: Drafting
    draft: Draft = NO_DRAFT
    #: The error that ended the drafting; there is then no draft.
    error: Exception | None = None
    #: Seconds of the model's decodes, and of all drafting. Of shared batches, only this sequence's share
    #: counts.
    model_s: float = 0.0
    seconds: float = 0.0
    #: The decode that it waits for; None at the end.
    ask: Ask | None = None


def propose_together(draftings: Sequence[Drafting], clock: Callable[[], float]) -> list[Proposal]:
    """Make drafts side by side. In each step, the decodes that they need in one cache become one batch.

    `clock` returns seconds. A drafting that raises gets an `error`, and the others go on. The error of a
    decode is raised in all draftings that asked for it.
    """
    proposals = [Proposal(drafting) for drafting in draftings]
    for proposal in proposals:
        _resume(proposal, None, clock)
    most: dict[int, int] = {}
    while waiting := [proposal for proposal in proposals if proposal.ask is not None]:
        asked = _first_batch(waiting)
        backend = id(asked[0][1].backend)
        # The largest number of the round: most of its decodes serve that many sequences.
        most[backend] = max(len(asked), most.get(backend, 0))
        _decode_together(asked, most[backend], clock)
    return proposals


def refuse_nonsense(proposal: Proposal, n_max: int, n_vocab: int) -> None:
    """Turn a proposal that is not a draft of at most `n_max` tokens below `n_vocab` into an error. In the
    target's batch it would be an error of all sequences. (`Draft` itself checks the parents of nodes.)"""
    draft: object = proposal.draft
    if not isinstance(draft, Draft):
        problem = f"{type(draft).__name__}: no draft"
    elif len(draft) > n_max:
        problem = f"{len(draft)} tokens, {n_max} at most were asked for"
    else:
        wrong = [token for token in draft.tokens if not _is_token(token, n_vocab)]
        if not wrong:
            return
        problem = f"there is no token {wrong[0]!r}"
    proposal.draft, proposal.error = (
        NO_DRAFT,
        BackendError(f"the drafter proposed nonsense: {problem}"),
    )


def _is_token(token: object, n_vocab: int) -> bool:
    return isinstance(token, (int, np.integer)) and bool(0 <= token < n_vocab)


def _first_batch(waiting: Sequence[Proposal]) -> list[tuple[Proposal, Ask]]:
    """Return the proposals that wait for a decode in the same cache as the first one, as many as fit into
    one batch."""
    found: list[tuple[Proposal, Ask]] = []
    backend: Backend | None = None
    n_rows = n_wanted = 0
    for proposal in waiting:
        ask = proposal.ask
        assert ask is not None
        backend = backend or ask.backend
        n_rows += len(ask.batch)
        n_wanted += sum(ask.batch.wants_logits)
        is_full = n_wanted > backend.n_outputs or n_rows > max(backend.n_batch, backend.n_outputs)
        if found and (ask.backend is not backend or is_full):
            n_rows -= len(ask.batch)
            n_wanted -= sum(ask.batch.wants_logits)
            continue
        found.append((proposal, ask))
    return found


def _decode_together(
    asked: Sequence[tuple[Proposal, Ask]], n_sharing: int, clock: Callable[[], float]
) -> None:
    """Decode the rows that several drafts need in one batch, and resume each draft with its logits."""
    backend, costs = asked[0][1].backend, asked[0][1].costs
    batch = asked[0][1].batch
    if len(asked) > 1:
        batch = Batch()
        for _, ask in asked:
            batch.tokens += ask.batch.tokens
            batch.positions += ask.batch.positions
            batch.sequences += ask.batch.sequences
            batch.wants_logits += ask.batch.wants_logits
    started, before_s = clock(), backend.decode_s
    error: Exception | None = None
    logits: Logits | None = None
    try:
        logits = backend.decode(batch)
        costs.observe(len(batch), backend.decode_s - before_s, n_sharing)
    except Exception as raised:  # noqa: BLE001 - it is raised again in each drafter
        error = raised
    model_s, seconds = backend.decode_s - before_s, clock() - started
    first_row = 0
    for proposal, ask in asked:
        share = len(ask.batch) / len(batch)
        proposal.model_s += share * model_s
        proposal.seconds += share * seconds
        if logits is None:
            _resume(proposal, error, clock)
            continue
        n_rows = sum(ask.batch.wants_logits)
        _resume(proposal, logits[first_row : first_row + n_rows], clock)
        first_row += n_rows


def _resume(
    proposal: Proposal, sent: Logits | Exception | None, clock: Callable[[], float]
) -> None:
    """Resume a drafting with its logits or an error, up to its next decode or its end."""
    started = clock()
    try:
        if isinstance(sent, Exception):
            proposal.ask = proposal.drafting.throw(sent)
        elif sent is None:
            proposal.ask = next(proposal.drafting)
        else:
            proposal.ask = proposal.drafting.send(sent)
    except StopIteration as ended:
        proposal.ask, proposal.draft = None, ended.value
    except Exception as error:  # noqa: BLE001 - also a bug in a drafter
        proposal.ask, proposal.error = None, error
    proposal.seconds += clock() - started
