"""Builders for answers on the fake backend, and drafters for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.interface import DraftRequest
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.translated import PrefixPipeline, TranslatedDrafter, Translation
from specgen.events import Event
from specgen.method.answer_loop import AnswerLoop
from specgen.method.answer_state import AnswerState
from specgen.method.backend import Batch
from specgen.method.cascade import Cascade
from specgen.method.cost_table import FREE, CostTable, Price
from specgen.method.draft import NO_DRAFT, ROOT, Branches, Draft
from specgen.method.drafter import Drafter, Drafting, ready
from specgen.method.policy import FixedPolicy, Policy, RoundPlan, RoundResult
from specgen.method.sampling_pipeline import SamplingPipeline
from specgen.method.text_state import TextState
from specgen.method.verifiers import AutoVerifier, Verifier
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions, TreeShape, parse_tree
from specgen.session.drafter_factory import draft_sampling
from specgen.system.arrays import Logits
from specgen.text.grammar.base import GrammarState
from specgen.text.sampling.chain import Sampler
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, Language, random_language

GREEDY = SamplerOptions()
N_VOCAB = 12
PROMPT = (3, 1, 4, 1, 5)


class Clock:
    """A clock that advances by one second each time it is read."""

    def __init__(self) -> None:
        self._readings = itertools.count()

    def __call__(self) -> float:
        return float(next(self._readings))


class NoDrafter(Drafter):
    """A drafter that drafts nothing. Drafters for tests inherit from it and override `draft`."""

    name = "nothing"

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return ready(self.draft(context, plan.n_max))

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        return NO_DRAFT

    def observe(self, result: RoundResult) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        pass


@dataclass
class TreeDrafter(NoDrafter):
    """Drafts random trees, some branches of which follow the target's language."""

    language: Language
    #: The maximum number of leaves.
    n_branches: int
    #: The probability that a node gets the language's most likely token. Siblings always differ.
    right: float
    rng: np.random.Generator
    name: str = "tree"

    def draft(self, context: Sequence[int], n_max: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        n_leaves = 1
        for _ in range(int(self.rng.integers(1, n_max + 1))):
            parent = int(self.rng.integers(ROOT, len(tokens)))
            siblings = {tokens[i] for i in range(len(tokens)) if parents[i] == parent}
            adds_leaf = parent in parents if tokens else False
            if adds_leaf and n_leaves == self.n_branches:
                continue
            row = self.language(tuple(context) + self._tokens_to(tokens, parents, parent))
            best = int(row.argmax())
            if self.rng.random() >= self.right or best in siblings:
                free = [t for t in range(len(row)) if t not in siblings]
                best = int(self.rng.choice(free))
            if adds_leaf:
                n_leaves += 1
            tokens.append(best)
            parents.append(parent)
        n = len(tokens)
        return Draft(tuple(tokens), tuple(parents), ("tree",) * n, (None,) * n, (None,) * n)

    @staticmethod
    def _tokens_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> tuple[int, ...]:
        path: list[int] = []
        while node != ROOT:
            path.append(tokens[node])
            node = parents[node]
        return tuple(reversed(path))


class WrappedDrafter(Drafter):
    """Forwards every call to another drafter. Subclasses override some methods."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.hidden_states = inner.hidden_states

    @property
    def name(self) -> str:
        return self.inner.name

    def price(self, n_context: int) -> Price:
        return self.inner.price(n_context)

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return self.inner.propose(context, plan, n_drafted)

    def observe(self, result: RoundResult) -> None:
        self.inner.observe(result)

    def rewind(self, n_tokens: int) -> None:
        self.inner.rewind(n_tokens)


class FailingDrafter(WrappedDrafter):
    """Works for `n_good` proposals, and then raises an error."""

    def __init__(self, inner: Drafter, n_good: int, error: Exception) -> None:
        super().__init__(inner)
        self._n_good = n_good
        self._error = error

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        if self._n_good == 0:
            raise self._error
        self._n_good -= 1
        return (yield from super().propose(context, plan, n_drafted))


class NonsenseDrafter(WrappedDrafter):
    """Works for `n_good` proposals, and then returns something else.

    `nonsense` makes it from a draft and from the number of tokens that was asked for.
    """

    def __init__(
        self, inner: Drafter, n_good: int, nonsense: Callable[[Draft, int], object]
    ) -> None:
        super().__init__(inner)
        self._n_good = n_good
        self._nonsense = nonsense

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        draft = yield from super().propose(context, plan, n_drafted)
        self._n_good -= 1
        return draft if self._n_good >= 0 else cast(Draft, self._nonsense(draft, plan.n_max))


class DeafDrafter(WrappedDrafter):
    """Fails when it is given the result of its first round."""

    def observe(self, result: RoundResult) -> None:
        raise ZeroDivisionError("observed a round")


@dataclass
class Timed:
    """A backend whose decodes take the simulated time of a cost table."""

    inner: FakeBackend
    costs: CostTable
    decode_s: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def decode(self, batch: Batch) -> Logits:
        self.decode_s += self.costs.seconds(len(batch))
        return self.inner.decode(batch)


@dataclass
class Setup:
    """The settings of an answer on the fake backend. `run` generates it."""

    language: Language = field(default_factory=lambda: random_language(N_VOCAB, seed=7))
    vocabulary: FakeVocabulary = field(default_factory=lambda: FakeVocabulary.letters(N_VOCAB))
    #: A drafter, several of them, or a function that makes them for a text.
    drafter: Drafter | Cascade | Callable[[TextState], Drafter | Cascade] | None = None
    sampler: SamplerOptions = GREEDY
    grammar: GrammarState | None = None
    drafting: DraftOptions = field(
        default_factory=lambda: DraftOptions(policy="fixed", max_tokens=4, p_min=0.0)
    )
    #: Makes the policy; None for drafts of a fixed length, as in `drafting`.
    policy: Callable[[DraftOptions], Policy] | None = None
    options: GenerationOptions = field(default_factory=lambda: GenerationOptions(max_tokens=40))
    n_ctx: int = 256
    n_batch: int = 64
    seed: int = 0
    prompt: Sequence[int] = PROMPT
    n_branches: int = 8
    verifier: Verifier | None = None
    target: FakeBackend = field(init=False)

    def generation(self, index: int = 0) -> AnswerState:
        state = TextState(self.prompt, self.grammar)
        return AnswerState(
            vocabulary=self.vocabulary,
            options=self.options,
            n_ctx=self.n_ctx,
            cascade=drafters_of(self.drafter(state) if callable(self.drafter) else self.drafter),
            policy=(self.policy or FixedPolicy)(self.drafting),
            verifier=self.verifier or AutoVerifier(),
            sampling=SamplingPipeline(Sampler(self.sampler), state),
            text_state=state,
            rng=np.random.default_rng(self.seed),
            branches=Branches(first=index * self.n_branches, n_branches=self.n_branches),
            index=index,
        )

    def backend(self, n_generations: int = 1) -> FakeBackend:
        self.target = FakeBackend(
            self.vocabulary,
            self.language,
            n_ctx=self.n_ctx * n_generations,
            n_batch=self.n_batch,
            n_sequences=self.n_branches * n_generations,
        )
        return self.target

    def run(
        self, interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[AnswerState, list[Event]]:
        loop = AnswerLoop(self.backend(), Clock(), interrupted)
        generation = self.generation()
        events = list(loop.run(generation))
        events += [loop.finish(generation, CostTable())]
        return generation, events


def read_prompt(loop: AnswerLoop, generation: AnswerState) -> None:
    while not (generation.is_started or generation.is_finished):
        loop.prefill(generation)


def plain_answer(setup: Setup) -> tuple[int, ...]:
    """The tokens of the answer without drafts."""
    generation, _ = replace(setup, drafter=None).run()
    return tuple(generation.tokens[generation.n_prompt :])


def drafters_of(drafter: Drafter | Cascade | None) -> Cascade | None:
    """The cascade of an answer with this drafter. N-grams are free, and are asked first."""
    if drafter is None or isinstance(drafter, Cascade):
        return drafter
    return Cascade(drafter) if isinstance(drafter, SuffixDrafter) else Cascade(model=drafter)


def draft_request(
    state: TextState | None = None,
    sampler: SamplerOptions | SamplingPipeline = GREEDY,
    *,
    seed: int = 99,
    **fields: Any,
) -> DraftRequest:
    """A request for drafts with these samplers. Drafts are sampled if the samplers are random.

    Args:
        state: The text; None for the prompt of `Setup`.
        sampler: The samplers.
        seed: The seed of the draft's generator.
        fields: Other fields of the request.
    """
    state = state or TextState(PROMPT)
    if not isinstance(sampler, SamplerOptions):
        return DraftRequest(state, sampler, np.random.default_rng(seed), **fields)
    chain = Sampler(sampler)
    fields = {"is_sampled": chain.is_random, **fields}
    return DraftRequest(
        state, SamplingPipeline(chain, state), np.random.default_rng(seed), **fields
    )


def tree_request(
    shape: str | TreeShape,
    sampler: SamplerOptions = GREEDY,
    state: TextState | None = None,
    *,
    draws: bool = False,
    **fields: Any,
) -> DraftRequest:
    """A request for draft trees of a shape. `sampler` is the target's."""
    shape = parse_tree(shape) if isinstance(shape, str) else shape
    shaped = (
        sampler
        if draws
        else draft_sampling(sampler, DraftOptions(tree=shape), is_sampled=False, can_branch=True)
    )
    return draft_request(state, shaped, is_sampled=draws, can_branch=True, shape=shape, **fields)


def model_drafter(
    language: Language,
    vocabulary: FakeVocabulary,
    sampler: SamplerOptions = GREEDY,
    *,
    n_ctx: int = 256,
    n_batch: int = 64,
    seed: int = 99,
    state: TextState | None = None,
    costs: CostTable | None = None,
    n_shared_tokens: int | None = None,
) -> tuple[ModelDrafter, FakeBackend]:
    """A draft model and its backend.

    It needs the state of the text if samplers depend on earlier tokens, and costs if the policy
    does.
    """
    backend = FakeBackend(vocabulary, language, n_ctx=n_ctx, n_batch=n_batch, n_sequences=1)
    request = draft_request(state, sampler, seed=seed, costs=costs or CostTable())
    n_shared = vocabulary.n_tokens if n_shared_tokens is None else n_shared_tokens
    return ModelDrafter(backend, request, n_shared_tokens=n_shared), backend


def tree_drafter(
    language: Language,
    vocabulary: FakeVocabulary,
    shape: str,
    sampler: SamplerOptions = GREEDY,
    *,
    draws: bool = False,
    n_ctx: int = 256,
    seed: int = 99,
    state: TextState | None = None,
    costs: CostTable | None = None,
    n_sequences: int = 40,
    n_levels_max: int | None = None,
) -> tuple[ModelDrafter, FakeBackend]:
    """A draft model that drafts trees of a shape, and its backend. `sampler` is the target's."""
    backend = FakeBackend(vocabulary, language, n_ctx=n_ctx, n_batch=64, n_sequences=n_sequences)
    costs = costs or CostTable()
    request = tree_request(
        shape, sampler, state, draws=draws, seed=seed, costs=costs, n_levels_max=n_levels_max
    )
    return ModelDrafter(backend, request, n_shared_tokens=vocabulary.n_tokens), backend


def translated_drafter(
    translation: Translation,
    language: Language,
    vocabulary: FakeVocabulary,
    state: TextState,
    *,
    ignore_eos: bool = False,
    n_ctx: int = 256,
    n_batch: int = 64,
    seed: int = 99,
) -> tuple[TranslatedDrafter, FakeBackend]:
    """A draft model with another vocabulary, as `StandaloneDraft` makes it, and its backend."""
    backend = FakeBackend(vocabulary, language, n_ctx=n_ctx, n_batch=n_batch, n_sequences=1)
    text = translation.text(state.tokens, None)
    shaper = PrefixPipeline(
        translation.draft_lexicon, vocabulary.end_tokens() if ignore_eos else ()
    )
    request = draft_request(TextState(()), shaper, seed=seed)
    inner = ModelDrafter(backend, request, n_shared_tokens=vocabulary.n_tokens)
    return TranslatedDrafter(inner, translation, text, shaper), backend


def ngram_drafter() -> SuffixDrafter:
    return SuffixDrafter(1, 3)
