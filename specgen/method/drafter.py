"""What a drafter is to the loop, and drafts that are made together for several sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.method.backend import Backend, Batch
from specgen.method.cost_table import CostTable, Price
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy import RoundPlan, RoundResult
from specgen.system.arrays import Hidden, Logits


@dataclass(frozen=True, slots=True)
class Ask:
    """A batch that a drafter needs decoded before it goes on, and the cost table that learns from
    the decode.
    """

    backend: Backend
    batch: Batch
    costs: CostTable


#: A draft in progress: a generator that asks for decodes, is sent the logits of the rows that want
#: them, and returns the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]
Clock: TypeAlias = Callable[[], float]


class HiddenStateSink(Protocol):
    """Takes the target's hidden states of one text from the loop, for a drafter that reads them.
    With `all_rows` these are the states of every row, the prompt's too; else the final states of
    rows that have logits, in rounds only.
    """

    all_rows: ClassVar[bool]

    def keep_states(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        """Add copies of the last rows, float32[n, n_embd], of the first `n_read` tokens of `text`."""


class Drafter(Protocol):
    """Proposes drafts for one sequence. It never changes the text, only how soon that comes; if it
    fails, the loop goes on without it. `name` is the origin of its tokens; `trail` takes the
    target's hidden states, if it reads any.
    """

    hidden_states: HiddenStateSink | None = None

    @property
    def name(self) -> str: ...

    def price(self, n_context: int) -> Price:
        """Return what drafting would cost now, after a text of `n_context` tokens."""
        ...

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft at most `plan.n_max` >= 1 tokens to follow `context`, as far as
        `plan.after_draft_step` allows. `context` holds all committed tokens, followed by
        `n_drafted` tokens that another drafter proposed. It is the caller's list, and only grows
        from call to call, unless `rewind` is called.
        """
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last round; nothing by default."""
        del result

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`. Only drafters that serve other drafters
        are asked to.
        """
        raise BackendError(f"{self.name} cannot go back to {n_tokens} tokens")


def ready(draft: Draft) -> Drafting:
    yield from ()
    return draft


@dataclass
class Proposal:
    """The drafting of one sequence, the decode that it waits for, and its result: a draft, or an
    error. `model_s` and `seconds` are those of the model's decodes and of all drafting, of shared
    batches this sequence's share.
    """

    drafting: Drafting
    draft: Draft = NO_DRAFT
    error: Exception | None = None
    model_s: float = 0.0
    seconds: float = 0.0
    ask: Ask | None = None

    def resume(self, logits: Logits | None, clock: Clock) -> None:
        """Go on with what was asked for, up to the next decode or the end."""
        started, self.ask = clock(), None
        try:
            self.ask = next(self.drafting) if logits is None else self.drafting.send(logits)
        except StopIteration as ended:
            self.draft = ended.value
        except Exception as error:  # noqa: BLE001 - also a bug in a drafter
            self.error = error
        self.seconds += clock() - started


def propose_together(
    draftings: Sequence[Drafting], clock: Clock, interrupted: Callable[[], bool] = lambda: False
) -> list[Proposal]:
    """Make drafts side by side: the decodes that they need in one cache become one batch. A
    drafting that raises gets an `error`, and the others go on; the error of a decode is that of all
    that asked for it. Once `interrupted` returns True between decodes, the draftings that are not
    done have no draft.
    """
    proposals = [Proposal(drafting) for drafting in draftings]
    for proposal in proposals:
        proposal.resume(None, clock)
    n_sharing = sum(proposal.ask is not None for proposal in proposals)
    while waiting := [(each, each.ask) for each in proposals if each.ask is not None]:
        if interrupted():
            for proposal, _ in waiting:
                proposal.drafting.close()
            break
        _decode_next(waiting, n_sharing, clock)
    return proposals


def _decode_next(waiting: Sequence[tuple[Proposal, Ask]], n_sharing: int, clock: Clock) -> None:
    """Decode what the first draft waits for, and what fits of others in the same cache; resume
    these with logits.
    """
    (first, asked), *others = waiting
    backend, batch, n_wanted = asked.backend, asked.batch, sum(asked.batch.wants_logits)
    together = [(first, asked, n_wanted)]  # the first one always gets its turn
    most = max(backend.n_batch, backend.n_outputs)
    if others:
        batch = Batch()
        batch.extend(asked.batch)
    for proposal, ask in others:
        end, n_rows = n_wanted + sum(ask.batch.wants_logits), len(batch) + len(ask.batch)
        if ask.backend is backend and n_rows <= most and end <= backend.n_outputs:
            together.append((proposal, ask, end))
            batch.extend(ask.batch)
            n_wanted = end
    started, before_s, start = clock(), backend.decode_s, 0
    n_rows = len(batch.tokens)
    try:
        logits = backend.decode(batch)
        asked.costs.observe(n_rows, backend.decode_s - before_s, n_sharing)
    except Exception as error:  # noqa: BLE001 - drafting ends, and not the answers
        for proposal, _, _ in together:
            proposal.ask, proposal.error = None, error
        return
    model_s, seconds = backend.decode_s - before_s, clock() - started
    for proposal, ask, end in together:
        share = len(ask.batch.tokens) / n_rows
        proposal.model_s += share * model_s
        proposal.seconds += share * seconds
        proposal.resume(logits[start:end], clock)
        start = end


def draft_alone(drafting: Drafting) -> Draft:
    """Make a draft, or raise its error."""
    (proposal,) = propose_together([drafting], lambda: 0.0)
    if proposal.error is not None:
        raise proposal.error
    return proposal.draft


def nonsense(draft: object, n_max: int, n_vocab: int) -> BackendError | None:
    """Return the error of a proposal that is no draft of at most `n_max` tokens: all answers of a
    batch would fail.
    """
    tokens: Sequence[object] = draft.tokens if isinstance(draft, Draft) else [draft]
    are_tokens = all(isinstance(t, (int, np.integer)) and 0 <= t < n_vocab for t in tokens)
    if isinstance(draft, Draft) and are_tokens and len(tokens) <= n_max:
        return None
    return BackendError(f"the drafter proposed nonsense: {[*tokens]}, {n_max} at most")
