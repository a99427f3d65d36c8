"""Decoder heads: small matrices, trained for one target, that draft from its last hidden state.

From the last hidden state and the next token they predict the next hidden state; from this they
predict the token after it, and so on (ReDrafter, Cheng et al., arXiv:2403.09919; EAGLE, Li et al.,
arXiv:2401.15077). `specgen.llama.decoder_heads` has the formula.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.drafters.expansion import Expansion, start_expansion
from specgen.drafters.interface import (
    NO_DRAFT,
    ROOT,
    Ask,
    CostTable,
    Drafter,
    Drafting,
    DraftKind,
    DraftRequest,
    DraftSetup,
    LoadedDraft,
    Price,
    RoundPlan,
    ready,
)
from specgen.errors import PairError
from specgen.llama import default_threads
from specgen.llama.decoder_heads import DecoderHeads, is_heads_file
from specgen.method.hidden_states import LastHiddenState
from specgen.system.arrays import Hidden, Logits
from specgen.text.vocabulary import Vocabulary

#: Nothing is drafted if more tokens than this are not yet decoded by the target. These are its own
#: last token, and those that a grammar or another drafter added.
_MAX_UNDECODED = 16
#: The numbers of nodes for which the expansion is timed.
_TIMED_WIDTHS = (1, 2, 4, 8)
#: The number of times that each is timed; the fastest time counts.
_N_REPEATS = 5


class HeadsDrafter(Drafter):
    """Drafts with decoder heads: a chain or a tree.

    There is no cache, and no model decodes anything: expanding a node takes two products with small
    matrices. Only the frequent tokens of the vocabulary are drafted.
    """

    name = "heads"

    def __init__(
        self,
        heads: DecoderHeads,
        request: DraftRequest,
        vocabulary: Vocabulary,
    ) -> None:
        self._heads = heads
        self._vocabulary = vocabulary
        self._request = request
        self._costs = request.costs
        self.hidden_states: LastHiddenState = LastHiddenState()
        #: A buffer for a row of logits. Those of infrequent tokens stay at minus infinity.
        self._row = np.full(heads.weights.n_vocab, -np.inf, np.float32)

    def price(self, n_context: int) -> Price:
        """Return the measured costs, which are the same for the first and each further token."""
        token_s = self._costs.seconds_each(1)
        return Price(token_s, token_s)

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft from the target's last hidden state, unless too many tokens follow it."""
        if self.hidden_states.last is None:
            return ready(NO_DRAFT)
        n_decoded, target_state = self.hidden_states.last
        undecoded = context[n_decoded:]
        if not 0 < len(undecoded) <= _MAX_UNDECODED:
            return ready(NO_DRAFT)
        state = self._heads.begin(target_state, undecoded[0])
        for token in undecoded[1:]:
            state = self._heads.advance(state, [token])
        draft = start_expansion(
            self.name,
            self._request,
            plan,
            context,
            n_drafted,
            self._vocabulary,
            plan.n_max,
        )
        return self._grow(draft, state)

    def _grow(self, draft: Expansion, first: Hidden) -> Drafting:
        """Grow a draft from the state after the text, float32[1, n]."""
        #: The state after each node, float32[1, n].
        states = {ROOT: first}

        def logits_after(nodes: Sequence[int]) -> Generator[Ask, Logits, Iterable[Logits]]:
            """Compute the states after nodes from those after their parents."""
            yield from ()  # no model decodes
            before = np.concatenate([states[draft.parents[node]] for node in nodes])
            after = self._heads.advance(before, [draft.tokens[node] for node in nodes])
            for index, node in enumerate(nodes):
                states[node] = after[index : index + 1]
            return self._rows(after)

        return draft.grow(next(self._rows(first)), logits_after)

    def _rows(self, states: Hidden) -> Iterator[Logits]:
        """Yield the logits after each state, float32[n_vocab], always in the same buffer."""
        before_s = self._heads.compute_s
        rows = self._heads.logits(states)
        self._costs.observe(len(rows), self._heads.compute_s - before_s)
        for row in rows:
            self._row[self._heads.weights.tokens] = row
            yield self._row


class LoadedHeads(LoadedDraft):
    """Loaded decoder heads for a target."""

    origin = "heads"

    def __init__(self, path: Path, setup: DraftSetup) -> None:
        """Load the heads, and measure what they cost.

        Raises:
            ModelFileError: If the file cannot be used.
            PairError: If the heads were not made for the target, or it has a recurrent state.
        """
        target = setup.target
        if target.has_recurrent_state:
            raise PairError(
                f"{target.name} has a recurrent state; decoder heads cannot draft for it",
                hint="use a draft model, or --draft ngram",
            )
        self._heads = DecoderHeads(path, setup.clock, setup.context.n_threads or default_threads())
        super().__init__(path.name, path)
        self._vocabulary = target.vocabulary
        weights = self._heads.weights
        made_for = (weights.n_vocab, weights.vocabulary, weights.n_embd)
        if made_for != (self._vocabulary.n_tokens, self._vocabulary.digest(), target.n_embd):
            self.close()
            raise PairError(
                f"{path.name}: made for {weights.target}, not for {target.name}",
                hint=f"`specgen draft make -m {target.path}` makes heads for this target",
            )
        self._costs = self._measure_costs(setup.clock)

    def drafter(self, request: DraftRequest) -> HeadsDrafter:
        request = replace(request, costs=self._costs)
        return HeadsDrafter(self._heads, request, self._vocabulary)

    def close(self) -> None:
        self._heads.close()

    def _measure_costs(self, clock: Callable[[], float]) -> CostTable:
        """Time the expansion of one and of several nodes, which takes a few milliseconds."""
        heads = self._heads
        state = heads.begin(np.zeros(heads.weights.n_embd, np.float32), 0)
        seconds: dict[int, float] = {}
        for n in _TIMED_WIDTHS:
            states = np.repeat(state, n, axis=0)
            for _ in range(_N_REPEATS):
                started_s = clock()
                heads.logits(heads.advance(states, [0] * n))
                took_s = clock() - started_s
                seconds[n] = min(took_s, seconds.get(n, took_s))
        return CostTable(seconds)


KIND = DraftKind(
    "heads",
    matches=lambda source: isinstance(source, Path) and is_heads_file(source),
    open=lambda source, setup: LoadedHeads(Path(source), setup),
)
