"""Propose the drafts of a round for all sequences; their decodes share batches."""

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
    """What came of a sequence's drafting."""

    drafting: Drafting
    draft: Draft = NO_DRAFT
    #: What ended it; there is then no draft.
    error: Exception | None = None
    #: Seconds in a model's decodes, of those in common this sequence's share, and of all drafting.
    model_s: float = 0.0
    seconds: float = 0.0
    #: What it waits for; None once it is over.
    ask: Ask | None = None


def propose_together(draftings: Sequence[Drafting], clock: Callable[[], float]) -> list[Proposal]:
    """Make drafts side by side; their decodes in a cache are one batch for each step.

    `clock` gives seconds. A drafting that raises has its `error`, and the others go on; a decode
    that fails is an error of all that asked for it.
    """
    proposals = [Proposal(drafting) for drafting in draftings]
    for proposal in proposals:
        _resume(proposal, None, clock)
    most: dict[int, int] = {}
    while waiting := [proposal for proposal in proposals if proposal.ask is not None]:
        asked = _first_batch(waiting)
        backend = id(asked[0][1].backend)
        most[backend] = max(len(asked), most.get(backend, 0))
        for _, ask in asked:  # by the round's largest crowd, which is most of its decodes
            ask.costs.n_sharing = most[backend]
        _decode_together(asked, clock)
    return proposals


def refuse_nonsense(proposal: Proposal, n_max: int, n_vocab: int) -> None:
    """Make what is no draft of `n_max` tokens at most, out of a vocabulary of so many, an error: in the
    target's batch it would be one of all sequences. (How nodes hang together, a `Draft` checks itself.)"""
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
    """Those that ask for a decode in the same cache as the first, as many as have room in a batch."""
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


def _decode_together(asked: Sequence[tuple[Proposal, Ask]], clock: Callable[[], float]) -> None:
    """Decode what several ask for, and let each go on with its rows."""
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
        costs.observe(len(batch), backend.decode_s - before_s)
    except Exception as raised:  # noqa: BLE001 - whose fault it is, is told by the drafters
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
    """Let a drafting go on with its rows, or with an error, up to its next decode or its end."""
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
    except Exception as error:  # noqa: BLE001 - a bug in a drafter too
        proposal.ask, proposal.error = None, error
    proposal.seconds += clock() - started
