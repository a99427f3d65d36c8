"""The drafters, verifiers and architectures that the tests of invariants cover.

A new class in `specgen/drafters` or `verifiers.py`, or a new tiny architecture, must be added to
one of these tables. `tests/project/test_registered.py` fails until it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from specgen.drafters.autoregressive import ModelDrafter
from specgen.drafters.dflash import DflashDrafter
from specgen.drafters.eagle3 import EagleDrafter
from specgen.drafters.gemma4 import AssistantDrafter
from specgen.drafters.heads import HeadsDrafter
from specgen.drafters.hidden_state_drafts import LayerDrafter
from specgen.drafters.mtp import MtpChainDrafter
from specgen.drafters.ngram import SuffixDrafter
from specgen.drafters.parallel import ParallelDrafter
from specgen.drafters.staged import DraftGuesser, StagedDrafter
from specgen.drafters.translated import TranslatedDrafter, Translation
from specgen.method.cascade import Cascade
from specgen.method.drafter import Drafter
from specgen.method.policy import FixedPolicy
from specgen.method.text_state import TextState
from specgen.method.verifiers import (
    AutoVerifier,
    BlockVerifier,
    MatchVerifier,
    ResidualVerifier,
    SpecTrVerifier,
    Verifier,
)
from specgen.options import DraftOptions, SamplerOptions, TranslateMode, VerifierName
from specgen.system.arrays import Logits
from specgen.text.sampling.chain import Sampler
from tests.helpers.fake_backend import FakeBackend, FakeVocabulary, Language, noisy
from tests.helpers.fake_generations import (
    GREEDY,
    NoDrafter,
    TreeDrafter,
    draft_request,
    ngram_drafter,
    translated_drafter,
    tree_request,
)
from tests.tiny import Architecture

# --- drafters -------------------------------------------------------------------------------------


def open_fake(vocabulary: FakeVocabulary, language: Language) -> FakeBackend:
    return FakeBackend(vocabulary, language, n_ctx=256, n_batch=64, n_sequences=1)


@dataclass
class Text:
    """A text on the fake backend, for which a drafter is made."""

    state: TextState
    #: The language of the draft model.
    language: Language
    vocabulary: FakeVocabulary
    #: The target's samplers.
    sampler: SamplerOptions = GREEDY
    seed: int = 99
    #: The maximum number of tokens that are guessed for the draft model at once.
    n_guess: int = 3
    #: Opens the backend of a draft model. Tests that watch backends replace it.
    open_backend: Callable[[FakeVocabulary, Language], FakeBackend] = open_fake


Make: TypeAlias = Callable[[Text], Drafter | Cascade]


def model(text: Text, noise: float = 0.0, skipped_prefix: range = range(0)) -> ModelDrafter:
    return ModelDrafter(
        open_model(text, noise),
        draft_request(text.state, text.sampler, seed=text.seed, skipped_prefix=skipped_prefix),
        n_shared_tokens=text.vocabulary.n_tokens,
    )


def open_model(text: Text, noise: float) -> FakeBackend:
    language = noisy(text.language, noise) if noise else text.language
    return text.open_backend(text.vocabulary, language)


def staged(text: Text, drafters: Cascade, noise: float = 0.0) -> StagedDrafter:
    return StagedDrafter(
        open_model(text, noise),
        draft_request(text.state, text.sampler, seed=text.seed),
        n_shared_tokens=text.vocabulary.n_tokens,
        guesser=guesser(text, drafters),
    )


def guesser(text: Text, drafters: Cascade) -> DraftGuesser:
    return DraftGuesser(drafters, FixedPolicy(DraftOptions("fixed", text.n_guess, p_min=0.0)))


def by_ngrams(text: Text, noise: float = 0.0) -> StagedDrafter:
    return staged(text, Cascade(SuffixDrafter(1, 8)), noise)


def by_a_model(text: Text) -> StagedDrafter:
    return staged(text, Cascade(model=model(text, noise=0.5)))


def twice(text: Text) -> StagedDrafter:
    return staged(text, Cascade(model=by_ngrams(text, 0.5)))


def both(make: Callable[[Text], ModelDrafter]) -> Make:
    return lambda text: Cascade(SuffixDrafter(1, 8), make(text), text_state=text.state)


def random_tree(n_branches: int, right: float, seed: int) -> Make:
    return lambda t: TreeDrafter(t.language, n_branches, right, np.random.default_rng(seed))


def tree_model(text: Text, shape: str = "2,2", *, draws: bool = False) -> ModelDrafter:
    backend = FakeBackend(text.vocabulary, text.language, n_ctx=256, n_batch=64, n_sequences=8)
    request = tree_request(shape, text.sampler, text.state, draws=draws, seed=text.seed)
    return ModelDrafter(backend, request, n_shared_tokens=text.vocabulary.n_tokens)


def drawn_tree_model(text: Text) -> ModelDrafter:
    return tree_model(text, "2x3", draws=Sampler(text.sampler).is_random)


def parallel(text: Text) -> ParallelDrafter:
    """A parallel draft: it predicts a mask as if the most likely token were in its place."""
    mask = text.vocabulary.n_tokens - 1

    def language(tokens: tuple[int, ...]) -> Logits:
        n_text = len(tokens)
        while n_text and tokens[n_text - 1] == mask:
            n_text -= 1
        filled = tokens[:n_text]
        while len(filled) < len(tokens):
            filled += (int(text.language(filled).argmax()),)
        return text.language(filled)

    return ParallelDrafter(
        text.open_backend(text.vocabulary, language),
        draft_request(text.state, text.sampler, seed=text.seed, n_max=8),
        mask=mask,
        n_shared_tokens=text.vocabulary.n_tokens,
    )


def translated(text: Text) -> TranslatedDrafter:
    """A draft model whose vocabulary has the same tokens in reverse order."""
    own = text.vocabulary
    n = text.vocabulary.n_tokens
    other = replace(
        own, pieces=own.pieces[::-1], ends=frozenset(n - 1 - token for token in own.ends)
    )

    def language(tokens: tuple[int, ...]) -> Logits:
        return np.ascontiguousarray(text.language(tuple(n - 1 - t for t in tokens))[::-1])

    translation = Translation(own, other)
    return translated_drafter(translation, language, other, text.state, seed=text.seed)[0]


@dataclass(frozen=True)
class DrafterCase:
    """A drafter, and its properties."""

    #: The class that the case tests.
    kind: type[object]
    #: Makes the drafter on the fake backend; None if it needs hidden states.
    make: Make | None
    #: The draft for tiny models, as the suffix of a file or as a word; None if another case has it.
    tiny: str | None = None
    #: Whether it samples its tokens above temperature 0, and reports their distributions.
    draws: bool = False
    trees: bool = False
    #: Whether it needs the target's hidden states, which recurrent models do not provide.
    heads: bool = False
    translated: TranslateMode = "off"
    #: Whether it uses the grammar of the text, so that the grammar allows its drafts.
    grammar: bool = True
    #: Whether it decodes with draft models whose backends tests can watch.
    watched: bool = False


DRAFTERS: dict[str, DrafterCase] = {
    "model": DrafterCase(ModelDrafter, model, "draft", draws=True, watched=True),
    "ngram": DrafterCase(SuffixDrafter, lambda _text: ngram_drafter(), "ngram", grammar=False),
    "ngram and model": DrafterCase(Cascade, both(model), draws=True, watched=True),
    "staged by n-grams": DrafterCase(StagedDrafter, by_ngrams, draws=True, watched=True),
    "staged by a model": DrafterCase(StagedDrafter, by_a_model, draws=True, watched=True),
    "staged twice": DrafterCase(StagedDrafter, twice, draws=True, watched=True),
    "all at once": DrafterCase(Cascade, both(twice), draws=True, watched=True),
    "tree of guesses": DrafterCase(ModelDrafter, tree_model, trees=True),
    "drawn tree": DrafterCase(ModelDrafter, drawn_tree_model, draws=True, trees=True),
    "parallel": DrafterCase(ParallelDrafter, parallel, "parallel", draws=True),
    "after a skipped prefix": DrafterCase(
        ModelDrafter, lambda text: model(text, skipped_prefix=range(2)), draws=True
    ),
    "translated": DrafterCase(
        TranslatedDrafter, translated, "respelled", translated="auto", grammar=False
    ),
    "heads": DrafterCase(HeadsDrafter, None, "heads", draws=True, heads=True),
    # These need special targets, which test_lossless.py has.
    "an MTP layer": DrafterCase(LayerDrafter, None, draws=True, heads=True),
    "several MTP layers": DrafterCase(MtpChainDrafter, None, draws=True, heads=True),
    "EAGLE-3": DrafterCase(EagleDrafter, None, draws=True, heads=True),
    "Gemma 4 assistant": DrafterCase(AssistantDrafter, None, draws=True, heads=True),
    "DFlash": DrafterCase(DflashDrafter, None, draws=True, heads=True),
    # Drafters that only tests use: random trees, and no drafts.
    "random tree": DrafterCase(TreeDrafter, random_tree(3, 0.7, 5), trees=True, grammar=False),
    "wide random tree": DrafterCase(TreeDrafter, random_tree(8, 0.4, 6), trees=True, grammar=False),
    "nothing": DrafterCase(NoDrafter, lambda _text: NoDrafter()),
}
#: The cases that test each kind of draft, by its name in `specgen/drafters/kinds.py`.
KINDS_TESTED: dict[str, tuple[str, ...]] = {
    "ngram": ("ngram",),
    "model": ("model", "staged by a model", "tree of guesses", "parallel", "translated"),
    "heads": ("heads",),
    "mtp": ("an MTP layer", "several MTP layers"),
    "eagle3": ("EAGLE-3",),
    "dflash": ("DFlash",),
    "gemma4-assistant": ("Gemma 4 assistant",),
}
#: The cases on the fake backend and the cases for tiny models, by name.
ON_FAKES = {name: case.make for name, case in DRAFTERS.items() if case.make is not None}
ON_TINY = {name: case.tiny for name, case in DRAFTERS.items() if case.tiny is not None}

# --- verifiers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifierCase:
    """A verifier, and its properties."""

    make: Callable[[], Verifier]
    #: Whether it verifies drafts itself, instead of passing each one to another verifier.
    has_own_rules: bool = True
    #: Whether its rules are for drafts of several independent walks. It verifies all other drafts
    #: like `residual`.
    for_walks: bool = False


VERIFIERS: dict[VerifierName, VerifierCase] = {
    "match": VerifierCase(MatchVerifier),
    "residual": VerifierCase(ResidualVerifier),
    "block": VerifierCase(BlockVerifier),
    "spectr": VerifierCase(SpecTrVerifier, for_walks=True),
    "auto": VerifierCase(AutoVerifier, has_own_rules=False),
}
#: The verifiers with their own rules for chains and for trees.
JUDGES: dict[VerifierName, Callable[[], Verifier]] = {
    name: case.make for name, case in VERIFIERS.items() if case.has_own_rules and not case.for_walks
}

# --- architectures --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArchitectureCase:
    """A tiny architecture."""

    #: How its cache drops rejected tokens. Architectures with the same kind of cache differ in
    #: their layers.
    cache: str
    #: Whether it has a recurrent state.
    has_state: bool = False
    generates: bool = True


ARCHITECTURES: dict[Architecture, ArchitectureCase] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gpt2"), ArchitectureCase("attention")),
    "gemma3": ArchitectureCase("sliding window"),
    **dict.fromkeys(("mamba", "mamba2"), ArchitectureCase("recurrent", has_state=True)),
    **dict.fromkeys(("lfm2", "qwen35"), ArchitectureCase("hybrid, snapshots", has_state=True)),
    "jamba": ArchitectureCase("hybrid, copies", has_state=True),
    "bert": ArchitectureCase("none", generates=False),
}
#: The kinds of caches, each with the first architecture that has it: cells, cells of a sliding
#: window, recurrent states, snapshots of recurrent states, and copies of states with re-decoding.
CACHES: dict[str, Architecture] = {}
for _name, _case in ARCHITECTURES.items():
    if _case.generates:
        CACHES.setdefault(_case.cache, _name)
