"""Which rows the models decode: none that are in the cache already or are not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specgen.events import DraftedEvent, DraftNode, Event, NoticeEvent
from specgen.method.backend import Batch
from specgen.method.cascade import Cascade
from specgen.method.policy import FixedPolicy, Offer, RoundPlan
from specgen.method.stopping import DraftStep, StoppingRule
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions
from specgen.system.arrays import Logits
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, Language, noisy, random_language
from tests.helpers.fake_generations import GREEDY, N_VOCAB, PROMPT, Setup
from tests.registry import DRAFTERS as CASES
from tests.registry import ON_FAKES, Text

LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)
RANDOM = SamplerOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)


@dataclass
class Watched(FakeBackend):
    """Records each batch, and fails if a sequence is cut back further than necessary.

    Tokens that are removed must not be the ones that are decoded next.
    """

    batches: list[list[int]] = field(default_factory=list)
    #: The text up to and with each row that was decoded.
    texts: list[tuple[int, ...]] = field(default_factory=list)
    cut: tuple[int, ...] = ()

    def decode(self, batch: Batch) -> Logits:
        if self.cut:
            own = self.text(0)
            assert self.cut[: len(own)] == own
            assert self.cut[len(own)] != batch.tokens[0], f"{self.cut[len(own)]} was there"
        self.cut = ()
        logits = FakeBackend.decode(self, batch)
        self.batches.append(list(batch.tokens))
        self.texts += [self.text(0, position + 1) for position in batch.positions]
        return logits

    def remove(self, sequence: int, start: int = 0) -> None:
        # Of two cuts without a decode between them the first one counts.
        self.cut = self.cut or self.text(sequence)
        FakeBackend.remove(self, sequence, start)
        if self.cut == self.text(sequence):
            self.cut = ()


@dataclass
class Models:
    """The draft models of a text: their language, and their backends."""

    noise: float
    sampler: SamplerOptions = GREEDY
    n_guess: int = 3
    backends: list[Watched] = field(default_factory=list)

    def open(self, vocabulary: FakeVocabulary, language: Language) -> Watched:
        backend = Watched(vocabulary, language, n_ctx=256, n_batch=64, n_sequences=1)
        self.backends.append(backend)
        return backend

    def text(self, state: TextState) -> Text:
        language = noisy(LANGUAGE, self.noise)
        return Text(state, language, LETTERS, self.sampler, 99, self.n_guess, self.open)


class UpToTwo(StoppingRule):
    """A draft of at most two tokens of a model, which stops after a draft step for a third one."""

    def after_draft_step(
        self, n_drafted: int, cumulative_acceptance: float, confidence: float
    ) -> DraftStep:
        return DraftStep(n_drafted < 2, True, cumulative_acceptance)


class EitherDraft(FixedPolicy):
    """Takes three tokens of n-grams, or where they find fewer two of the model."""

    def plan(self, offer: Offer) -> RoundPlan:
        n_max = min(self.n_max, offer.n_max)
        found = offer.found.first(3)
        if n_max < 1:
            return RoundPlan("no room")
        if len(found) == 3:
            return RoundPlan("found", found=found, drafter=offer.drafter)
        return RoundPlan("model", n_max, stop=UpToTwo(), drafter=offer.drafter)


#: All that decodes with draft models in the target's own vocabulary, along one branch.
DRAFTERS = [name for name, case in CASES.items() if case.watched]
COMBINED = [name for name in DRAFTERS if CASES[name].kind is Cascade]
STAGED = [name for name in DRAFTERS if "staged" in name]
TWICE = [*STAGED, "all at once"]
in_every_way = pytest.mark.parametrize("name", DRAFTERS)


def setup(models: Models, name: str, n_draft: int, n_tokens: int = 60, p_min: float = 0.0) -> Setup:
    return Setup(
        language=LANGUAGE,
        vocabulary=LETTERS,
        sampler=models.sampler,
        drafter=lambda state: ON_FAKES[name](models.text(state)),
        policy=EitherDraft if name in COMBINED else None,
        drafting=DraftOptions(policy="fixed", max_tokens=n_draft, p_min=p_min),
        options=GenerationOptions(max_tokens=n_tokens),
    )


@in_every_way
@pytest.mark.parametrize("sampler", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("noise", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("n_draft", [1, 3, 6])
def test_no_cached_token_is_decoded_again(
    name: str, sampler: SamplerOptions, noise: float, n_draft: int
) -> None:
    models = Models(noise, sampler)
    made = setup(models, name, n_draft)
    generation, events = made.run()
    failed = [event.detail for event in events if isinstance(event, NoticeEvent)]
    assert not failed, failed[0]
    for backend in models.backends:
        # Of fewer tokens than three there is nothing to guess. All others take part.
        assert backend.texts or n_draft < 3
        wrong = len(backend.texts) - len(set(backend.texts))
        # A wrong guess about a draft model may be what the target generates.
        assert wrong == 0 or name in TWICE
    if name in COMBINED and n_draft == 6:
        assert {nodes[0].origin for nodes in drafts(events)} == {"ngram", "model"}
    # The target: the prompt, then one batch a round; the last token needs no decode.
    stats = generation.stats
    assert made.target.n_decodes == 1 + stats.n_rounds
    assert made.target.n_decoded_rows == len(PROMPT) + stats.n_rounds + stats.n_drafted


def test_committed_tokens_are_decoded_in_the_next_batch() -> None:
    """With a draft that is always right each round accepts all of it."""
    models = Models(noise=0.0)
    made = setup(models, "model", n_draft=4, n_tokens=25)
    generation, _ = made.run()
    text = generation.tokens[len(PROMPT) :]
    (draft,) = models.backends
    # The target's token; the draft; the target's token again, five tokens a round. The draft
    # model reads the last token that it drafted, and the target's, in one batch.
    expected = [[*PROMPT, text[0]]]
    for start in range(0, 20, 5):
        expected += [[token] for token in text[start + 1 : start + 4]]
        expected += [list(text[start + 4 : start + 6])]
    assert draft.batches[: len(expected)] == expected
    # The target reads its own token and the next draft in one batch.
    assert made.target.decoded[len(PROMPT) :] == text[: len(made.target.decoded) - len(PROMPT)]
    assert made.target.n_decodes == 1 + 25 // 5


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("sampler", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("n_guess", [1, 8])
@pytest.mark.parametrize("noise", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("p_min", [0.0, 0.4])
def test_guesses_change_the_batches_but_not_the_drafts(
    name: str, sampler: SamplerOptions, n_guess: int, noise: float, p_min: float
) -> None:
    """The drafts are those of the model alone, and so are their verdicts."""
    alone_too, staged = (Models(noise, sampler, n_guess) for _ in range(2))
    plain, plain_events = setup(alone_too, "model", 6, p_min=p_min).run()
    fast, events = setup(staged, name, 6, p_min=p_min).run()
    assert fast.tokens == plain.tokens
    assert drafts(events) == drafts(plain_events)
    backend = alone_too.backends[-1]
    guessed = staged.backends[-1]
    assert guessed.n_decodes <= backend.n_decodes
    n_right = backend.n_decodes - guessed.n_decodes
    assert n_right > 0 or name != "staged by a model" or noise > 0.0
    # What was guessed wrongly was read for nothing, the rest would have been read anyway.
    assert guessed.n_decoded_rows >= backend.n_decoded_rows


def drafts(events: Sequence[Event]) -> list[tuple[DraftNode, ...]]:
    return [event.nodes for event in events if isinstance(event, DraftedEvent)]
