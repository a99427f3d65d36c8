"""Answers with drafts in another vocabulary, on the fake backend.

Target and draft use the same invented language with different tokens. Drafts are often right, and
the text must be that of plain decoding. `test_lossless.py` tests them above temperature 0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.translated import TranslatedDrafter, Translation
from specgen.events import Event, NoticeEvent
from specgen.method.answer_state import AnswerState
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan
from specgen.method.text_state import TextState
from specgen.options import DraftOptions, GenerationOptions
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, Language
from tests.helpers.fake_generations import GREEDY, Setup, WrappedDrafter, translated_drafter
from tests.helpers.vocabularies import ALPHABET, ByteLanguage, joined, spoken, texts, vocabulary

BYTES = [bytes((byte,)) for byte in sorted(set(ALPHABET.encode()))]
#: What tokens of two to six bytes may stand for: whole characters and parts of them.
LONGER = [ALPHABET.encode()[i : i + n] for n in range(2, 7) for i in range(len(ALPHABET.encode()))]
LONGER += [b"ab ", b"ba", b"aa", b" a", b" b", b"\n\n", b"\na", b" \n", "é中".encode()]


@functools.cache
def cut(
    seed: int, *, spells_all: bool = True, merges: bool = False, adds_space: bool = False
) -> FakeVocabulary:
    """A vocabulary for the language, cut at random."""
    rng = np.random.default_rng(seed)
    pieces = [LONGER[i] for i in rng.permutation(len(LONGER))[: int(rng.integers(4, 24))]]
    singles = BYTES if spells_all else [b for b in BYTES if b.isascii() and rng.random() < 0.7]
    names = ["</s>", "<|im_end|>", "<s>"] if seed % 2 else ["<|eos|>", "<|im_end|>"]
    return vocabulary(
        list(dict.fromkeys([*pieces, *singles])),
        names,
        eos=names[0],
        eot="<|im_end|>",
        adds_space=adds_space,
        merges=merges,
        add_bos=seed % 3 == 0,
    )


@functools.cache
def language_of(seed: int, vocabulary: FakeVocabulary, noise_seed: int) -> Language:
    return spoken(ByteLanguage(seed), vocabulary, seed=noise_seed)


@dataclass
class Pair:
    """A target and a draft with different vocabularies."""

    target: FakeVocabulary
    draft: FakeVocabulary
    language: int = 0
    draft_language: int = 0
    n_ctx: int = 256
    prompt: str = "ab é中 a"
    options: GenerationOptions = GenerationOptions(max_tokens=30)
    drafting: DraftOptions = DraftOptions(policy="fixed", max_tokens=4, p_min=0.0)

    def prompt_tokens(self) -> list[int]:
        tokens = self.target.tokenize(self.prompt, add_special=True, parse_special=True)
        return tokens or [0]

    def setup(self) -> Setup:
        never: tuple[tuple[int, float], ...] = ()
        if self.options.ignore_eos:  # as the session does it
            never = tuple((token, -np.inf) for token in self.target.end_tokens())
        return Setup(
            language_of(self.language, self.target, 0),
            self.target,
            sampler=replace(GREEDY, logit_bias=never),
            options=self.options,
            drafting=self.drafting,
            prompt=self.prompt_tokens(),
        )

    def run(self) -> tuple[AnswerState, list[Event], Watched]:
        setup = self.setup()
        watched: list[Watched] = []

        def make(state: TextState) -> Drafter:
            drafter, backend = translated_drafter(
                Translation(self.target, self.draft),
                language_of(self.draft_language, self.draft, 1),
                self.draft,
                state,
                ignore_eos=self.options.ignore_eos,
                n_ctx=self.n_ctx,
            )
            watched.append(Watched(drafter, backend, self.target))
            return watched[0]

        setup.drafter = make
        generation, events = setup.run()
        assert not [event for event in events if isinstance(event, NoticeEvent)], events
        watched[0].stats = generation.stats
        return generation, events, watched[0]

    def check(self) -> Watched:
        """Run with and without drafts; the texts must be one."""
        plain, (fast, _, watched) = self.setup().run()[0], self.run()
        assert (fast.tokens, fast.text.text) == (plain.tokens, plain.text.text)
        assert (fast.finish_reason, fast.stopped_by) == (plain.finish_reason, plain.stopped_by)
        return watched


class Watched(WrappedDrafter):
    """A translated drafter, and what each of its proposals cost."""

    def __init__(
        self, inner: TranslatedDrafter, backend: FakeBackend, target: FakeVocabulary
    ) -> None:
        super().__init__(inner)
        self.target = target
        #: Whether the draft can say every text.
        self.says_all = {*BYTES} <= {*backend.vocabulary.pieces}
        assert isinstance(inner.inner, ModelDrafter)
        self.translated, self.model, self.backend = inner, inner.inner, backend
        self.stats: Any = None
        self.n_proposals = self.n_slides = 0

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        text, n_skipped = self.translated.text, self.model.n_skipped
        draft = yield from super().propose(context, plan, n_drafted)
        assert len(draft) <= plan.n_max
        own = self.translated.drafted.tokens
        if not own:
            return draft
        self.n_proposals += 1
        self.n_slides += self.model.n_skipped != n_skipped
        if self.says_all:  # it reads the text, byte for byte
            pieces = list(map(self.backend.vocabulary.token_bytes, text.tokens))
            assert b"".join(pieces) + text.held_back == joined(self.target, context)
            assert text.ends == list(accumulate(map(len, pieces)))
        # Its cache holds the text as it is spelled now.
        left_out = slice(4, 4 + self.model.n_skipped)
        held = list(text.tokens)
        del held[left_out]
        assert self.backend.text(0)[: len(held)] == tuple(held)
        # The draft begins with the bytes that were taken back at the end of the text.
        assert joined(self.backend.vocabulary, own).startswith(text.held_back)
        return draft


# --- greedy text is that of plain decoding

pairs = st.builds(
    Pair,
    target=st.builds(cut, st.integers(0, 50), merges=st.booleans(), adds_space=st.booleans()),
    draft=st.builds(
        cut,
        st.integers(0, 50),
        spells_all=st.sampled_from([True, True, False]),
        merges=st.booleans(),
        adds_space=st.booleans(),
    ),
    language=st.integers(0, 5),
    draft_language=st.integers(0, 5),
    n_ctx=st.sampled_from([256, 256, 24, 12, 7]),
    prompt=texts(3).map(lambda text: "a" + text),
    options=st.builds(
        GenerationOptions,
        max_tokens=st.just(24),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), ("ab",), ("中", "b ")]),
    ),
    drafting=st.builds(
        DraftOptions,
        max_tokens=st.integers(1, 8),
        min_tokens=st.integers(0, 2),
        p_min=st.sampled_from([0.0, 0.3]),
    ),
)


@settings(max_examples=60)
@given(pairs)
# A spelling that changes from early on, and is the same tokens all the same.
@example(
    Pair(
        target=cut(6, adds_space=True),
        draft=cut(1, spells_all=False),
        language=2,
        prompt="aa",
        options=GenerationOptions(max_tokens=24),
        drafting=DraftOptions(policy="fixed", max_tokens=1, p_min=0.0),
    )
)
def test_greedy_text_equals_plain_text(pair: Pair) -> None:
    pair.check()


def test_drafts_in_another_vocabulary_are_accepted() -> None:
    counts: Counter[str] = Counter()
    endless = GenerationOptions(max_tokens=30, ignore_eos=True)
    for seed in range(12):
        pair = Pair(cut(seed), cut(100 + seed), seed, seed, options=endless)
        watched = pair.check()
        counts["drafted"] += watched.stats.n_drafted
        counts["accepted"] += watched.stats.n_accepted
        counts["decoded"] += watched.backend.n_decoded_rows
        counts["text"] += len(watched.translated.text.tokens) + watched.stats.n_rounds
        counts["wrong"] += replace(pair, draft_language=seed + 1).check().stats.n_accepted
    assert counts["accepted"] > 0.27 * counts["drafted"] > 100
    assert counts["accepted"] > 1.3 * counts["wrong"] > 0
    # What is decoded: the text, what was refused, and the few tokens of a round that are spelled
    # anew.
    assert counts["decoded"] < counts["text"] + counts["drafted"] - counts["accepted"]


@pytest.mark.parametrize("n_ctx", [10, 16, 30])
def test_drafting_continues_when_the_text_outgrows_the_drafts_context(n_ctx: int) -> None:
    options = GenerationOptions(max_tokens=60, ignore_eos=True)
    pair = Pair(cut(1), cut(101), 1, 1, n_ctx=n_ctx, options=options)
    watched = pair.check()
    assert watched.n_slides >= 1
    assert watched.n_proposals >= watched.stats.n_rounds - 1
    assert watched.stats.n_accepted > 0.6 * watched.stats.n_drafted > 20
    # Sliding costs about one more token of prompt for each token of text.
    whole = replace(pair, n_ctx=256).check()
    n_said = len(watched.translated.text.tokens)
    assert watched.backend.n_decoded_rows < whole.backend.n_decoded_rows + 1.5 * n_said


def test_half_characters_are_finished_by_the_draft() -> None:
    """The target has a token for each byte; the draft has complete characters only."""
    target = vocabulary(BYTES, ["</s>"])
    characters = vocabulary([character.encode() for character in ALPHABET], ["</s>"])
    options = GenerationOptions(max_tokens=60, ignore_eos=True)
    watched = Pair(target, characters, 1, 1, options=options).check()
    assert watched.stats.n_accepted > 0.5 * watched.stats.n_drafted
