"""N-grams and a model that draft together, and a draft for the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specgen.drafters.cascade import Cascade, Guesses
from specgen.drafters.model_drafter import ModelDrafter
from specgen.method.draft import NO_DRAFT, Distribution, Draft
from specgen.method.drafter import Drafting, draft_alone, ready
from specgen.method.policy import FixedPolicy, Reason, RoundPlan, RoundResult, draft_up_to
from specgen.method.tables import FREE, Price
from specgen.options import DraftOptions, SamplerOptions, parse_tree
from specgen.system.arrays import Logits
from specgen.text.hidden_trail import TargetStates
from specgen.text.sampling import Sampler
from specgen.text.text_state import Shaper, TextState
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, random_language
from tests.helpers.fake_generations import N_VOCAB, draft_request

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)
PRICE = Price(1.0, 0.5)
TEXT = [1, 2, 3]


@dataclass
class Scripted:
    """Proposes what it is told to, and notes what it is asked and told."""

    name: str
    drafts: list[Sequence[int]]
    price_s: Price = FREE
    told: list[object] = field(default_factory=list)
    states: TargetStates | None = None

    def price(self, n_context: int) -> Price:
        return self.price_s

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        self.told.append((list(context), plan.n_max))
        wanted = self.drafts.pop(0)
        n = 0
        while n < min(plan.n_max, len(wanted)) and plan.wants_token([0.9] * (n + 1)):
            n += 1
        return ready(Draft.chain(wanted[:n], self.name))

    def observe(self, result: RoundResult) -> None:
        self.told.append("observe")

    def rewind(self, n_tokens: int) -> None:
        self.told.append(f"rewind {n_tokens}")


def combined(ngrams: Sequence[int], model: Sequence[int]) -> tuple[Cascade, Scripted, Scripted]:
    free, dear = Scripted("ngram", [ngrams] * 3), Scripted("model", [model] * 3, PRICE)
    return Cascade(free, dear), free, dear


def propose(drafters: Cascade, context: Sequence[int], plan: RoundPlan) -> Draft:
    """What is drafted in a round, after the free drafter has looked."""
    drafters.look_up(context, 8)
    return draft_alone(drafters.propose(context, plan))


def model_first(n_max: int, *, extends: bool = False) -> RoundPlan:
    return RoundPlan(Reason("model"), n_max, extends=extends, drafter="model")


# --- who goes on


def test_nothing_goes_on_from_independent_walks() -> None:
    """Not even where all of them say the same."""
    drafters, free, model = combined([], [])
    walks = Draft((6, 7), (-1, 0), ("model",) * 2, (None,) * 2, (None,) * 2, ((0, 1), (0, 1)))
    free.drafts = [[], [8]]
    model.propose = lambda *_: ready(walks)  # type: ignore[method-assign]
    assert propose(drafters, TEXT, model_first(4, extends=True)) is walks


def test_ngrams_go_on_from_what_the_model_drafts() -> None:
    drafters, ngrams, _ = combined([], [6, 7])
    ngrams.drafts = [[], [8, 9]]
    draft = propose(drafters, TEXT, model_first(8, extends=True))
    assert draft.tokens == (6, 7, 8, 9)
    assert draft.origins == ("model", "model", "ngram", "ngram")
    # They forget at once what is not of the text yet.
    assert ngrams.told == [(TEXT, 8), ([*TEXT, 6, 7], 6), "rewind 3"]
    assert propose(combined([4], [6, 7])[0], TEXT, model_first(2, extends=True)).tokens == (6, 7)
    assert propose(combined([4], [6, 7])[0], TEXT, model_first(4)).tokens == (6, 7)
    assert propose(combined([4], [])[0], TEXT, model_first(4, extends=True)) == NO_DRAFT


# --- what stands before a draft


class Paths(Shaper):
    """A shaper that notes the paths that it is asked about."""

    def __init__(self, state: TextState) -> None:
        super().__init__(Sampler(SamplerOptions()), state)
        self.paths: list[tuple[int, ...]] = []

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        self.paths.append(tuple(path))
        return super().distribution(logits, path)


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_model_knows_what_stands_between_the_text_and_its_draft(is_tree: bool) -> None:
    """Penalties and grammars depend on it."""
    state = TextState(TEXT)
    shaper = Paths(state)
    backend = FakeBackend(LETTERS, LANGUAGE, n_ctx=64, n_sequences=4)
    request = draft_request(state, shaper, branches=is_tree, shape=parse_tree("1,1,1"))
    model = ModelDrafter(backend, request, n_shared_tokens=N_VOCAB)
    draft = draft_alone(model.propose([*TEXT, 4, 5], draft_up_to(3), 2))
    assert len(draft) == 3
    assert shaper.paths[:3] == [(4, 5, *draft.tokens[:n]) for n in range(3)]


def test_a_drafts_own_draft_knows_all_that_stands_before_it() -> None:
    class Noted(Scripted):
        def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
            self.told.append(n_drafted)
            return super().propose(context, plan)

    drafter = Noted("model", [[4]] * 2)
    guesses = Guesses(Cascade(model=drafter), Noting())
    after(guesses, [*TEXT, 7, 7], [9, 8], 5, 2)
    assert drafter.told[0] == 4


# --- a draft for the draft model


def after(
    guesses: Guesses, context: Sequence[int], drafted: Sequence[int], n_room: int, n_before: int = 0
) -> list[int]:
    """What is guessed; the drafters here need no decodes."""
    try:
        next(guesses.after(context, drafted, n_room, n_before))
    except StopIteration as ended:
        return list(ended.value)
    raise AssertionError("a decode was asked for")


class Noting(FixedPolicy):
    """Of up to three tokens; notes what it is told."""

    def __init__(self) -> None:
        super().__init__(DraftOptions(policy="fixed", max_tokens=3, p_min=0.0))
        self.results: list[RoundResult] = []

    def observe(self, result: RoundResult) -> None:
        self.results.append(result)


@pytest.mark.parametrize(
    ("said", "n_right", "told"),
    [
        ([9, 4, 5, 6, 7], 3, (4, 5, 6, 7)),
        ([9, 4, 5, 6], 3, (4, 5, 6)),
        ([9, 4, 8], 1, (4, 8)),
        ([9, 8], 0, (8,)),
    ],
)
def test_what_the_draft_model_says_is_what_becomes_of_a_guess(
    said: list[int], n_right: int, told: tuple[int, ...]
) -> None:
    drafter, policy = Scripted("model", [[4, 5, 6, 7]]), Noting()
    guesses = Guesses(Cascade(model=drafter), policy)
    assert list(after(guesses, TEXT, [9], 5)) == [4, 5, 6]
    assert drafter.told == [([*TEXT, 9], 3)]
    guesses.decoded(2.0)
    guesses.settle(said)
    guesses.settle(said)  # it is settled once
    (result,) = policy.results
    # What stands behind the last token that the model said is not judged.
    assert (result.draft.tokens, result.target_s) == ((4, 5, 6)[: len(told)], 2.0)
    assert (result.path, result.committed) == (tuple(range(n_right)), told)
    assert drafter.told[1:] == ["observe"]
    # A drafted token takes what the decode took, shared by those that came of it.
    assert guesses.token_s(9.0) == pytest.approx(2.0 / (n_right + 1))
    assert guesses.token_s(0.1) == 0.1
