"""Decoder heads draft from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.drafters.expansion import expansion
from specgen.drafters.interface import DraftKind, DraftRequest, DraftSetup, LoadedDraft, Reads
from specgen.errors import PairError
from specgen.llama import default_threads
from specgen.llama.decoder_heads import DecoderHeads, is_heads_file
from specgen.method.cost_table import CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT
from specgen.method.drafter import Ask, Drafter, Drafting, ready
from specgen.method.hidden_states import LastHiddenState
from specgen.method.policy import RoundPlan
from specgen.system.arrays import Hidden, Logits
from specgen.text.vocabulary import Vocabulary

#: The most tokens behind those that the target has read: its own, and those that a grammar or
#: another drafter added.
_MOST_UNREAD = 16
#: The numbers of states whose looks are timed, and how often each is.
_LOOKS, _N_REPEATS = (1, 2, 4, 8), 5


class HeadsDrafter(Drafter):
    """Drafts with decoder heads: a chain or a tree.

    Heads start from the target's hidden state after its last decoded token; their input is the
    tokens after that one. There is no cache and no decode of a model: a look beyond a node is two
    products with small matrices. Tokens outside the frequent part of the vocabulary are never
    drafted.
    """

    name = "heads"

    def __init__(self, heads: DecoderHeads, request: DraftRequest, vocabulary: Vocabulary) -> None:
        self._heads, self._vocabulary = heads, vocabulary
        self._request, self._costs = request, request.costs
        self.hidden_states: LastHiddenState = LastHiddenState()
        #: A row of the target's logits, in which tokens that are not frequent stay at minus
        #: infinity.
        self._row = np.full(heads.weights.n_vocab, -np.inf, np.float32)

    def price(self, n_context: int) -> Price:
        look_s = self._costs.seconds_each(1)
        return Price(look_s, look_s)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        n_read, state = self.hidden_states.last or (len(context), self._row)
        unread, before = context[n_read:], context[len(context) - n_drafted :]
        if not 0 < len(unread) <= _MOST_UNREAD:
            return ready(NO_DRAFT)
        states = self._heads.begin(state, unread[0])
        for token in unread[1:]:
            states = self._heads.advance(states, [token])
        behind = {ROOT: states}
        made = expansion(self.name, self._request, plan, before, self._vocabulary, plan.n_max)

        def rows_beyond(nodes: Sequence[int]) -> Generator[Ask, Logits, Iterable[Logits]]:
            yield from ()
            parents = np.concatenate([behind[made.parents[node]] for node in nodes])
            reached = self._heads.advance(parents, [made.tokens[node] for node in nodes])
            behind.update((node, reached[index : index + 1]) for index, node in enumerate(nodes))
            return self._rows(reached)

        return made.grow(next(self._rows(states)), rows_beyond)

    def _rows(self, states: Hidden) -> Iterator[Logits]:
        """Yield the row of each state over the target's vocabulary, float32[n_vocab]. A row is
        valid until the next.
        """
        before_s = self._heads.compute_s
        rows = self._heads.logits(states)
        self._costs.observe(len(rows), self._heads.compute_s - before_s)
        for row in rows:
            self._row[self._heads.weights.tokens] = row
            yield self._row


class LoadedHeads(LoadedDraft):
    """Loaded decoder heads for a target."""

    reads: Reads = "last states"
    origin = "heads"

    def __init__(self, path: Path, setup: DraftSetup) -> None:
        target = setup.target
        if target.has_recurrent_state:
            raise PairError(
                f"{target.name} has a recurrent state; decoder heads cannot draft for it",
                hint="use a draft model, or --draft ngram",
            )
        self._heads = DecoderHeads(path, setup.clock, setup.context.n_threads or default_threads())
        super().__init__(path.name, path)
        weights, self._vocabulary = self._heads.weights, target.vocabulary
        made_for = (weights.n_vocab, weights.vocabulary, weights.n_embd)
        if made_for != (self._vocabulary.n_tokens, self._vocabulary.digest(), target.n_embd):
            self.close()
            raise PairError(
                f"{path.name}: made for {weights.target}, not for {target.name}",
                hint=f"`specgen draft make -m {target.path}` makes heads for this target",
            )
        self._costs = self._timed(setup.clock)

    def drafter(self, request: DraftRequest) -> HeadsDrafter:
        request = replace(request, costs=self._costs)
        return HeadsDrafter(self._heads, request, self._vocabulary)

    def close(self) -> None:
        self._heads.close()

    def _timed(self, clock: Callable[[], float]) -> CostTable:
        """Time looks beyond one and several nodes, which takes some milliseconds."""
        heads = self._heads
        states = heads.begin(np.zeros(heads.weights.n_embd, np.float32), 0)
        seconds: dict[int, float] = {}
        for n in _LOOKS:
            behind = np.repeat(states, n, axis=0)
            for _ in range(_N_REPEATS):
                started = clock()
                heads.logits(heads.advance(behind, [0] * n))
                took_s = clock() - started
                seconds[n] = min(took_s, seconds.get(n, took_s))
        return CostTable(seconds)


KIND = DraftKind(
    "heads",
    matches=lambda source: isinstance(source, Path) and is_heads_file(source),
    open=lambda source, setup: LoadedHeads(Path(source), setup),
)
