"""What a drafter is to the loop, and how the drafts of several sequences are made together."""

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

    backend: Backend
    batch: Batch
    #: The cost table that learns from the decode.
    costs: CostTable


#: A draft in progress: a generator that asks for decodes, is sent the logits of the rows that want
#: them, and returns the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]
#: Returns the seconds of a monotonic clock.
Clock: TypeAlias = Callable[[], float]


def never() -> bool:
    """Return False: nothing is interrupted."""
    return False


class HiddenStateSink(Protocol):
    """Takes the target's hidden states of one text from the loop, for a drafter that reads them."""

    #: Whether it takes the states of every row, also of the prompt's. Otherwise it takes the final
    #: states of rows that have logits, in rounds only.
    all_rows: ClassVar[bool]

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
            n_decoded: The number of tokens, from the beginning of the text, that are decoded.
        """


class Drafter(Protocol):
    """Proposes drafts for one sequence.

    It never changes the text, only how soon that comes. If it fails, the loop goes on without it.
    """

    #: Takes the target's hidden states, if the drafter reads any.
    hidden_states: HiddenStateSink | None = None

    @property
    def name(self) -> str:
        """The origin of its tokens."""

    def price(self, n_context: int) -> Price:
        """Return what drafting would cost now, after a text of `n_context` tokens."""

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft tokens that follow `context`, as far as `plan.after_draft_step` allows.

        Args:
            context: All committed tokens, then `n_drafted` tokens that another drafter proposed. It
                is the caller's list, and only grows from call to call, unless `rewind` is called.
            plan: The plan, which allows at most `plan.n_max` >= 1 tokens.
            n_drafted: The number of tokens at the end of `context` that are not committed.
        """

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last round; nothing by default."""
        del result

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text.

        Only drafters that serve other drafters are asked to.
        """
        raise BackendError(f"{self.name} cannot go back to {n_tokens} tokens")


def ready(draft: Draft) -> Drafting:
    """Return a draft in progress that needs no decode."""
    yield from ()
    return draft


@dataclass
class Proposal:
    """The drafting of one sequence, and its result."""

    drafting: Drafting
    #: The finished draft.
    draft: Draft = NO_DRAFT
    #: What the drafter, or one of its decodes, raised.
    error: Exception | None = None
    #: Seconds of the model's decodes, and of all drafting: of shared batches the sequence's share.
    model_s: float = 0.0
    seconds: float = 0.0
    #: The decode that the drafting waits for; None once it is done.
    ask: Ask | None = None

    def resume(self, logits: Logits | None, clock: Clock) -> None:
        """Continue with the logits that were asked for, up to the next decode or the end."""
        started_s = clock()
        self.ask = None
        try:
            self.ask = next(self.drafting) if logits is None else self.drafting.send(logits)
        except StopIteration as ended:
            self.draft = ended.value
        except Exception as error:  # noqa: BLE001 - also a bug in a drafter
            self.error = error
        self.seconds += clock() - started_s


def propose_together(
    draftings: Sequence[Drafting],
    clock: Clock,
    interrupted: Callable[[], bool] = never,
) -> list[Proposal]:
    """Make drafts side by side: the decodes that they need in one cache become one batch.

    A drafting that raises gets an `error`, and the others go on. The error of a decode is that of
    all draftings that asked for it. Once `interrupted` returns True between decodes, the draftings
    that are not done have no draft.
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


def _decode_next(
    waiting: Sequence[tuple[Proposal, Ask]],
    n_sharing: int,
    clock: Clock,
) -> None:
    """Decode what the first drafting waits for, with what fits of the others in the same cache."""
    together = _in_one_batch(waiting)
    _, first_ask = together[0]
    backend = first_ask.backend
    batch = first_ask.batch
    if len(together) > 1:
        batch = Batch()
        for _, ask in together:
            batch.extend(ask.batch)

    started_s = clock()
    decode_s_before = backend.decode_s
    try:
        logits = backend.decode(batch)
        model_s = backend.decode_s - decode_s_before
        first_ask.costs.observe(len(batch), model_s, n_sharing)
    except Exception as error:  # noqa: BLE001 - drafting ends, and not the answers
        for proposal, _ in together:
            proposal.ask = None
            proposal.error = error
        return
    seconds = clock() - started_s

    first_row = 0
    for proposal, ask in together:
        share = len(ask.batch) / len(batch)
        proposal.model_s += share * model_s
        proposal.seconds += share * seconds
        end_row = first_row + sum(ask.batch.wants_logits)
        proposal.resume(logits[first_row:end_row], clock)
        first_row = end_row


def _in_one_batch(waiting: Sequence[tuple[Proposal, Ask]]) -> list[tuple[Proposal, Ask]]:
    """Return the first drafting that waits, and those whose rows fit into its batch."""
    first, *others = waiting
    backend = first[1].backend
    n_rows_max = max(backend.n_batch, backend.n_outputs)
    n_rows = len(first[1].batch)
    n_wanted = sum(first[1].batch.wants_logits)
    together = [first]
    for proposal, ask in others:
        n_rows_then = n_rows + len(ask.batch)
        n_wanted_then = n_wanted + sum(ask.batch.wants_logits)
        has_room = n_rows_then <= n_rows_max and n_wanted_then <= backend.n_outputs
        if ask.backend is backend and has_room:
            together.append((proposal, ask))
            n_rows = n_rows_then
            n_wanted = n_wanted_then
    return together


def draft_alone(drafting: Drafting) -> Draft:
    """Make a draft, or raise its error."""
    (proposal,) = propose_together([drafting], lambda: 0.0)
    if proposal.error is not None:
        raise proposal.error
    return proposal.draft


def invalid_draft_error(
    draft: object,
    n_max: int,
    n_vocab: int,
) -> BackendError | None:
    """Return an error unless a proposal is a draft of at most `n_max` tokens of the vocabulary.

    Decoding anything else would fail for all answers of the batch.
    """
    tokens: Sequence[object] = draft.tokens if isinstance(draft, Draft) else [draft]
    are_tokens = all(isinstance(t, (int, np.integer)) and 0 <= t < n_vocab for t in tokens)
    if isinstance(draft, Draft) and are_tokens and len(tokens) <= n_max:
        return None
    return BackendError(f"the drafter proposed nonsense: {[*tokens]}, {n_max} at most")
