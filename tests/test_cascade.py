"""Several drafters in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from specgen.backend.fake import FakeVocabulary, random_language
from specgen.draft import NO_DRAFT, Draft
from specgen.drafters import CascadeDrafter, Drafter, NgramDrafter
from specgen.events import DraftedEvent
from specgen.options import DraftOptions, SamplerOptions
from specgen.policy import FixedPolicy, Policy, RoundReport
from specgen.state import TextState
from tests.fakes import N_VOCAB, PROMPT, Setup, model_drafter

POLICY = FixedPolicy(DraftOptions(max_tokens=4, p_min=0.0))
LANGUAGE = random_language(N_VOCAB, seed=7)
LETTERS = FakeVocabulary.letters(N_VOCAB)


@dataclass
class Scripted:
    """Proposes what it is told to, and notes what it is told."""

    name: str
    drafts: list[Draft]
    model_s: float = 0.5
    told: list[str] = field(default_factory=list)

    def propose(self, context: Sequence[int], n_max: int, policy: Policy) -> Draft:
        self.told.append("propose")
        return self.drafts.pop(0)

    def observe(self, report: RoundReport) -> None:
        self.told.append(f"observe {report.path}")

    def rewind(self, n_tokens: int) -> None:
        self.told.append(f"rewind {n_tokens}")

    def close(self) -> None:
        self.told.append("close")


def test_the_first_that_has_a_draft_proposes_and_alone_hears_of_it() -> None:
    draft = Draft.chain([1, 2], "first")
    other = Draft.chain([3], "second")
    first, second = (
        Scripted("first", [draft, NO_DRAFT, NO_DRAFT]),
        Scripted("second", [other, NO_DRAFT]),
    )
    cascade = CascadeDrafter((first, second))
    report = RoundReport(draft, (0,), 0.0, 0.0, 3)
    assert cascade.propose([1], 4, POLICY) is draft
    cascade.observe(report)
    assert cascade.propose([1], 4, POLICY) is other
    cascade.observe(report)
    assert cascade.propose([1], 4, POLICY) is NO_DRAFT
    cascade.observe(report)
    assert first.told == ["propose", "observe (0,)", "propose", "propose"]
    assert second.told == ["propose", "observe (0,)", "propose"]
    assert (cascade.name, cascade.model_s) == ("first+second", 1.0)
    cascade.rewind(7)
    cascade.close()
    assert first.told[-2:] == second.told[-2:] == ["rewind 7", "close"]


def with_ngrams(sampler: SamplerOptions) -> Setup:
    def make(state: TextState) -> Drafter:
        model, _ = model_drafter(LANGUAGE, LETTERS, sampler, state=state)
        return CascadeDrafter((NgramDrafter(2, 3), model))

    return Setup(language=LANGUAGE, vocabulary=LETTERS, sampler=sampler, drafter=make)


def test_the_text_is_that_of_plain_decoding_and_both_take_part() -> None:
    setup = with_ngrams(SamplerOptions())
    fast, events = replace(setup).run()
    plain, _ = replace(setup, drafter=None).run()
    assert fast.tokens == plain.tokens
    drafted = [event for event in events if isinstance(event, DraftedEvent)]
    origins = {node.origin for event in drafted for node in event.nodes}
    assert origins == {"ngram", "model"}
    assert fast.tally.acceptance_rate is not None
    assert fast.tally.acceptance_rate > 0.5


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_its_text_with_drawn_drafts_too(seed: int) -> None:
    setup = with_ngrams(SamplerOptions(temperature=1.0, top_k=4, top_p=1.0, min_p=0.0))
    once, _ = replace(setup, seed=seed).run()
    again, _ = replace(setup, seed=seed).run()
    assert once.tokens == again.tokens
    assert once.tokens[: len(PROMPT)] == list(PROMPT)
    assert once.tally.n_accepted > 0
