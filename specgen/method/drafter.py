"""The interface between the loop and drafters, and drafting for several sequences at once."""

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
    """A batch that a drafter needs decoded before it can go on."""

    #: The context that decodes the batch.
    backend: Backend
    #: The rows to decode.
    batch: Batch
    #: The cost table that learns from the decode.
    costs: CostTable


#: A draft in progress: a generator that asks for decodes, is sent the logits of the rows that want
#: them, and returns the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]
#: Returns the seconds of a monotonic clock.
Clock: TypeAlias = Callable[[], float]


def never() -> bool:
    """Return False: the default for callbacks that can stop something."""
    return False


class HiddenStateSink(Protocol):
    """Takes the target's hidden states of one text from the loop, for a drafter that reads them."""

    #: Whether the drafter reads the states of every row, even those of the prompt. Otherwise it
    #: reads the final states of rows with logits, and only those of rounds.
    reads_all_rows: ClassVar[bool]

    def keep_states(
        self,
        rows: Hidden,
        text: Sequence[int],
        n_decoded: int,
    ) -> None:
        """Store copies of the states of the last rows that the target decoded.

        Args:
            rows: The states, float32[n, n_embd].
            text: The text's tokens.
            n_decoded: The number of tokens at the beginning of the text that are decoded by now.
                The last row belongs to the last of them.
        """


class Drafter(Protocol):
    """Proposes drafts for one sequence.

    A drafter never changes the text, only how fast it is generated. If it fails, the loop goes on
    without it.
    """

    #: Takes the target's hidden states, if the drafter reads any.
    hidden_states: HiddenStateSink | None = None

    @property
    def name(self) -> str:
        """The name that its tokens have as their origin."""

    def price(self, n_context: int) -> Price:
        """Return the current price of drafting after a text of `n_context` tokens."""

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft tokens that follow `context`, as far as `plan.after_draft_step` allows.

        Args:
            context: All committed tokens, then `n_drafted` tokens that another drafter proposed.
                The list belongs to the caller. It only grows from call to call, unless `rewind` is
                called.
            plan: The plan, which allows at most `plan.n_max` tokens, one or more.
            n_drafted: The number of tokens at the end of `context` that are not committed.
        """

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last round; nothing by default."""
        del result

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text.

        This is called only for drafters that draft for another drafter.

        Raises:
            BackendError: Always, unless a drafter overrides it.
        """
        raise BackendError(f"{self.name} cannot go back to {n_tokens} tokens")


def ready(draft: Draft) -> Drafting:
    """Return a draft in progress that is finished and needs no decode."""
    yield from ()  # makes this function a generator
    return draft


@dataclass
class Proposal:
    """The drafting of one sequence, and its result."""

    #: The generator that drafts.
    drafting: Drafting
    #: The finished draft.
    draft: Draft = NO_DRAFT
    #: The exception that the drafter or one of its decodes raised.
    error: Exception | None = None
    #: The seconds of decodes; of a shared batch, the sequence's share.
    model_s: float = 0.0
    #: The seconds of all drafting, including `model_s`.
    draft_s: float = 0.0
    #: The decode that the drafter waits for; None once the drafting has ended.
    ask: Ask | None = None

    def resume(self, logits: Logits | None, clock: Clock) -> None:
        """Continue up to the next decode or the end.

        Args:
            logits: The logits that the drafter asked for; None to start it.
            clock: The clock.
        """
        started_s = clock()
        self.ask = None
        try:
            ask = next(self.drafting) if logits is None else self.drafting.send(logits)
            if not isinstance(ask, Ask):
                raise BackendError(f"the drafter asked for {ask!r}, which is not a decode")
            self.ask = ask
        except StopIteration as ended:
            self.draft = ended.value
        except Exception as error:  # noqa: BLE001 - even a bug in a drafter
            self.error = error
        self.draft_s += clock() - started_s

    def close(self) -> None:
        """End the drafting if it has not ended, so that the drafter tidies up in its cache now.

        Otherwise it would do that when the generator is freed, perhaps in the middle of a later
        answer: the traceback of an error keeps it alive.
        """
        try:
            self.drafting.close()
        except Exception as error:  # noqa: BLE001 - even a bug in a drafter
            self.error = self.error or error


def propose_together(
    draftings: Sequence[Drafting],
    clock: Clock,
    interrupted: Callable[[], bool] = never,
) -> list[Proposal]:
    """Make several drafts at once: decodes that they need in the same cache become one batch.

    If a drafter raises, its proposal gets the `error`, and the others go on. If a decode fails, all
    proposals that waited for it get the error.

    Args:
        draftings: The drafts in progress.
        clock: The clock.
        interrupted: Called between decodes. Once it returns True, the drafts that are not finished
            stay empty.

    Returns:
        A proposal for each of `draftings`.
    """
    proposals = [Proposal(drafting) for drafting in draftings]
    try:
        for proposal in proposals:
            proposal.resume(None, clock)
        n_sharing = sum(proposal.ask is not None for proposal in proposals)
        while waiting := _waiting(proposals):
            if interrupted():
                break
            _decode_next(waiting, n_sharing, clock)
    finally:
        for proposal in proposals:
            proposal.close()
    return proposals


def _waiting(proposals: Sequence[Proposal]) -> list[tuple[Proposal, Ask]]:
    """Return the proposals that wait for a decode, each with that decode."""
    return [(proposal, proposal.ask) for proposal in proposals if proposal.ask is not None]


def _decode_next(
    waiting: Sequence[tuple[Proposal, Ask]],
    n_sharing: int,
    clock: Clock,
) -> None:
    """Decode what the first proposal waits for, together with others in the same cache.

    Args:
        waiting: The proposals that wait for a decode.
        n_sharing: The number of sequences that draft, for the cost table.
        clock: The clock.
    """
    members = _in_one_batch(waiting)
    _, first_ask = members[0]
    backend = first_ask.backend
    batch = first_ask.batch
    if len(members) > 1:
        batch = Batch()
        for _, ask in members:
            batch.extend(ask.batch)

    started_s = clock()
    decode_s_before = backend.decode_s
    try:
        logits = backend.decode(batch)
        model_s = backend.decode_s - decode_s_before
        first_ask.costs.observe(len(batch), model_s, n_sharing)
    except Exception as error:  # noqa: BLE001 - drafting ends, the answers go on
        for proposal, _ in members:
            proposal.ask = None
            proposal.error = error
        return
    seconds = clock() - started_s

    first_row = 0  # of the proposal's logits
    for proposal, ask in members:
        share = len(ask.batch) / len(batch)
        proposal.model_s += share * model_s
        proposal.draft_s += share * seconds
        end_row = first_row + sum(ask.batch.wants_logits)
        proposal.resume(logits[first_row:end_row], clock)
        first_row = end_row


def _in_one_batch(waiting: Sequence[tuple[Proposal, Ask]]) -> list[tuple[Proposal, Ask]]:
    """Return the first proposal that waits, and those whose decodes fit into the same batch."""
    first, *others = waiting
    _, first_ask = first
    backend = first_ask.backend
    n_rows_max = max(backend.n_batch, backend.n_outputs)
    n_rows = len(first_ask.batch)
    n_wanted = sum(first_ask.batch.wants_logits)
    members = [first]
    for proposal, ask in others:
        new_n_rows = n_rows + len(ask.batch)
        new_n_wanted = n_wanted + sum(ask.batch.wants_logits)
        has_room = new_n_rows <= n_rows_max and new_n_wanted <= backend.n_outputs
        if ask.backend is backend and has_room:
            members.append((proposal, ask))
            n_rows = new_n_rows
            n_wanted = new_n_wanted
    return members


def draft_alone(drafting: Drafting) -> Draft:
    """Finish a single draft, and return it. Any error of the drafter or of a decode is raised."""
    (proposal,) = propose_together([drafting], lambda: 0.0)
    if proposal.error is not None:
        raise proposal.error
    return proposal.draft


def invalid_draft_error(
    draft: object,
    n_max: int,
    n_vocab: int,
    n_branches: int,
) -> BackendError | None:
    """Return an error if a drafter did not return a draft that can be decoded and verified.

    Anything else would fail for all answers in the batch.

    Args:
        draft: What the drafter returned.
        n_max: The maximum number of tokens.
        n_vocab: The size of the vocabulary.
        n_branches: The maximum number of branches.

    Returns:
        The error; None if this is a draft of at most `n_max` tokens of the vocabulary.
    """
    tokens: Sequence[object] = draft.tokens if isinstance(draft, Draft) else [draft]
    are_tokens = all(isinstance(t, (int, np.integer)) and 0 <= t < n_vocab for t in tokens)
    if not isinstance(draft, Draft) or not are_tokens or len(tokens) > n_max:
        return BackendError(f"the drafter proposed nonsense: {[*tokens]}, {n_max} at most")
    n_leaves = len(draft.paths())
    if n_leaves > n_branches:
        return BackendError(f"the drafter proposed {n_leaves} branches, {n_branches} at most")
    for token, source in zip(draft.tokens, draft.distributions, strict=True):
        if source is not None and not source.probability(token) > 0.0:
            return BackendError(
                f"the drafter proposed token {token}, which its distribution does not have"
            )
    return None
