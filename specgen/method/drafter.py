"""The interface of a drafter, and drafts that are made together for several sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np

from specgen.errors import BackendError
from specgen.method.backend import Backend, Batch
from specgen.method.draft import NO_DRAFT, Draft
from specgen.method.policy import RoundPlan, RoundResult, draft_up_to
from specgen.method.tables import FREE, CostTable, Price
from specgen.system.arrays import Hidden, Logits

if TYPE_CHECKING:
    from specgen.text.text_state import TextState


@dataclass(frozen=True, slots=True)
class Ask:
    """A batch that a drafter needs decoded before it goes on, and the cost table that learns from the decode."""

    backend: Backend
    batch: Batch
    costs: CostTable


#: A draft in progress: a generator that asks for decodes, is sent the logits of the rows that want them, and returns
#: the draft. The logits are valid until it asks for the next decode.
Drafting: TypeAlias = Generator[Ask, Logits, Draft]


class TargetStates(Protocol):
    """Takes the target's hidden states of one text from the loop, for a drafter that reads them: those of `all_rows`,
    of the prompt too, or the final states of the rows of rounds that have logits."""

    all_rows: ClassVar[bool]

    def keep_states(self, rows: Hidden, text: Sequence[int], n_read: int) -> None:
        """Add copies of the last rows, float32[n, n_embd], of the first `n_read` tokens of `text`."""
        ...


class Drafter(Protocol):
    """Proposes drafts for one sequence. If it fails, the loop goes on without it. It never changes the text, only how
    soon that comes. The code that opened its context also closes it. `name` is the origin of its tokens; `trail`
    takes the target's hidden states from the loop, if it reads any."""

    trail: TargetStates | None = None

    @property
    def name(self) -> str: ...

    def price(self, n_context: int) -> Price:
        """Return what drafting would cost now, after a text of `n_context` tokens."""
        ...

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft at most `plan.n_max` >= 1 tokens to follow `context`, as far as `plan.wants_token` and
        `plan.wants_decode` allow. `context` holds all committed tokens, prompt and answer, followed by `n_drafted`
        tokens that another drafter proposed. It is the caller's list, not to be kept. It only grows from call to
        call, unless `rewind` is called."""
        ...

    def observe(self, result: RoundResult) -> None:
        """Learn from the result of the last round; nothing by default."""
        del result

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these. Only n-grams and models, which
        draft for other drafters, are asked for this."""
        raise BackendError(f"{self.name} cannot go back to {n_tokens} tokens")


def ready(draft: Draft) -> Drafting:
    """Return a drafting that needs no decode."""
    yield from ()
    return draft


@dataclass
class Proposal:
    """The drafting of one sequence, and its result: a draft, or an error. `model_s` and `seconds` are those of the
    model's decodes and of all drafting, of shared batches this sequence's share. `ask` is the decode that it waits
    for."""

    drafting: Drafting
    draft: Draft = NO_DRAFT
    error: Exception | None = None
    model_s: float = 0.0
    seconds: float = 0.0
    ask: Ask | None = None

    def resume(self, sent: Logits | Exception | None, clock: Callable[[], float]) -> None:
        """Go on with what was asked for or an error, up to the next decode or the end."""
        started, self.ask = clock(), None
        try:
            if isinstance(sent, Exception):
                self.ask = self.drafting.throw(sent)
            else:
                self.ask = next(self.drafting) if sent is None else self.drafting.send(sent)
        except StopIteration as ended:
            self.draft = ended.value
        except Exception as error:  # noqa: BLE001 - also a bug in a drafter
            self.error = error
        self.seconds += clock() - started


def propose_together(
    draftings: Sequence[Drafting],
    clock: Callable[[], float],
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Proposal]:
    """Make drafts side by side. In each step, the decodes that they need in one cache become one batch.

    A drafting that raises gets an `error`, and the others go on; the error of a decode is raised in all draftings
    that asked for it. Once `interrupted` returns True between decodes, the draftings that are not done have no draft.
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


def draft_alone(drafting: Drafting) -> Draft:
    """Make a draft, or raise its error."""
    proposal = propose_together([drafting], lambda: 0.0)[0]
    if proposal.error is not None:
        raise proposal.error
    return proposal.draft


def refuse_nonsense(proposal: Proposal, n_max: int, n_vocab: int) -> None:
    """Turn a proposal that is not a draft of at most `n_max` tokens below `n_vocab` into an error: an invalid token in
    the shared batch would fail all answers."""
    draft: object = proposal.draft
    if isinstance(draft, Draft):
        tokens: Sequence[object] = draft.tokens
        are_tokens = all(isinstance(t, (int, np.integer)) and 0 <= t < n_vocab for t in tokens)
        if are_tokens and len(tokens) <= n_max:
            return
    what = f"{list(draft.tokens)}, {n_max} at most" if isinstance(draft, Draft) else repr(draft)
    proposal.draft = NO_DRAFT
    proposal.error = BackendError(f"the drafter proposed nonsense: {what}")


def _decode_next(
    waiting: Sequence[tuple[Proposal, Ask]], n_sharing: int, clock: Callable[[], float]
) -> None:
    """Decode the rows that the first waiting draft needs, and in the same batch those of others in the same cache, as
    many as fit; resume each draft with its logits."""
    backend, costs, batch = waiting[0][1].backend, waiting[0][1].costs, Batch()
    most, n_wanted = max(backend.n_batch, backend.n_outputs), 0
    together: list[tuple[Proposal, Ask]] = []
    for proposal, ask in waiting:
        n_more = sum(ask.batch.wants_logits)
        fits = len(batch) + len(ask.batch) <= most and n_wanted + n_more <= backend.n_outputs
        if ask.backend is backend and (fits or not together):  # the first one always gets its turn
            together.append((proposal, ask))
            batch.extend(ask.batch)
            n_wanted += n_more
    started, before_s = clock(), backend.decode_s
    result: Logits | Exception
    try:
        result = backend.decode(batch)
        costs.observe(len(batch), backend.decode_s - before_s, n_sharing)
    except Exception as error:  # noqa: BLE001 - it is raised again in each drafter
        result = error
    model_s, seconds, first = backend.decode_s - before_s, clock() - started, 0
    for proposal, ask in together:
        share, end = len(ask.batch) / len(batch), first + sum(ask.batch.wants_logits)
        proposal.model_s += share * model_s
        proposal.seconds += share * seconds
        proposal.resume(result if isinstance(result, Exception) else result[first:end], clock)
        first = end


class Cascade:
    """A drafter that costs nothing, one that decodes, or both, for one sequence.

    In each round `look_up` comes first: the proposal of `free` (n-grams) is known before the round is planned. Then
    `propose` carries out the plan: it proposes what was found, or lets the model draft. With `state`, nothing is
    found that its grammar forbids.
    """

    def __init__(
        self,
        free: Drafter | None = None,
        model: Drafter | None = None,
        *,
        state: TextState | None = None,
    ) -> None:
        self.free = free
        self.model = model
        #: The name of the drafter that decodes; None if there is none.
        self.model_name = None if model is None else model.name
        self._state = state

    def look_up(self, context: Sequence[int], n_max: int, n_drafted: int = 0) -> Draft:
        """Begin a round, and return what the free drafter finds to follow the text; at most `n_max` tokens.
        The last `n_drafted` tokens of `context` are drafted too."""
        if self.free is None or n_max < 1:
            return NO_DRAFT
        try:
            next(self.free.propose(context, draft_up_to(n_max), n_drafted))
        except StopIteration as ended:
            found: Draft = ended.value
        else:
            raise BackendError(f"{self.free.name} asks for a decode")
        if self._state is not None:
            found = self._state.within_grammar(found, context[len(context) - n_drafted :])
        return found

    def price(self, n_context: int) -> Price:
        """Return the price of the drafter that decodes, after a text of `n_context` tokens."""
        return FREE if self.model is None else self.model.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        """Draft as planned; see `Drafter.propose`. `look_up` was called for this round."""
        if self.model is None or plan.n_max < 1:
            return ready(plan.found)
        return self.model.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.observe(result)

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; another text follows these."""
        for drafter in (self.free, self.model):
            if drafter is not None:
                drafter.rewind(n_tokens)
