"""Drafts that read layers of tiny targets, with random weights.

So that a target accepts some tokens, most drafts can draft four tokens only, and the target is
biased towards these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specgen.events import CommittedEvent, DraftedEvent, Event, FinishedEvent, NoticeEvent
from specgen.options import DraftOptions, GenerationOptions, Grammar, SamplerOptions, TreeShape
from specgen.session.engine import generate
from specgen.session.session import Session
from tests.helpers.common import EXACT
from tests.helpers.sessions import finished, opened
from tests.tiny import Architecture, TinyConfig, tiny_vocabulary, write_tiny_model
from tests.tiny.eagle import TinyDflash, TinyEagle, write_tiny_dflash, write_tiny_eagle

PROMPT = "the cat is in the else for with"
#: Cells, snapshots of recurrent states, and copies of them.
TARGETS: tuple[Architecture, ...] = ("llama", "qwen3", "lfm2", "qwen35")
CONFIG = TinyConfig(n_layer=4)
LETTERS = [tiny_vocabulary(CONFIG).tokens.index(letter) for letter in "abcd"]
BIASED = SamplerOptions(logit_bias=tuple((token, 30.0) for token in LETTERS))
CHAIN = TreeShape("off")
#: EAGLE-3 files of several makes: with and without a vocabulary of their own, embeddings, an output
#: matrix, another size, and norms at other places.
EAGLES = {
    "whole": TinyEagle(layers=(1, 2, 3)),
    "letters": TinyEagle(layers=(0, 2, 3), drafted=LETTERS),
    "wide": TinyEagle(
        (0, 1, 3), n_embd=128, n_head=4, drafted=LETTERS[::-1], norm_before_fc=True, seed=7
    ),
    "shared": TinyEagle(
        has_embeddings=False, has_output=False, norm_before_fc=True, norm_before_residual=True
    ),
}
#: DFlash files of several makes. Those of the kind DSpark have a rank.
DFLASHES = {
    "dflash whole": TinyDflash(layers=(1, 3)),
    "dflash letters": TinyDflash(layers=(0, 2, 3), drafted=LETTERS),
    "dflash shared": TinyDflash(has_embeddings=False, has_output=False),
    "window": TinyDflash(layers=(1, 2), drafted=LETTERS, sliding_window=8),
    "causal": TinyDflash(layers=(1,), drafted=LETTERS, causal=True),
    "sections": TinyDflash(layers=(2, 3), drafted=LETTERS, has_sections=True),
    "spark": TinyDflash(layers=(0, 1, 2, 3), drafted=LETTERS, rank=8),
    "spark, masks": TinyDflash(layers=(0, 2), drafted=LETTERS, rank=8, from_anchor=False),
}


def write_files(folder: Path) -> Path:
    """Write all targets and drafts into a folder."""
    for target in TARGETS:
        write_tiny_model(folder / f"{target}.gguf", replace(CONFIG, architecture=target))
    for name, eagle in EAGLES.items():
        write_tiny_eagle(folder / f"{name}.gguf", CONFIG, eagle)
    for name, dflash in DFLASHES.items():
        write_tiny_dflash(folder / f"{name}.gguf", CONFIG, dflash)
    return folder


def loaded(
    folder: Path,
    target: str = "llama",
    draft: str = "letters",
    *,
    tree: TreeShape = CHAIN,
    sampler: SamplerOptions = BIASED,
    n_tokens: int = 60,
    ignore_eos: bool = False,
    grammar: Grammar | None = None,
    n_ctx: int | None = None,
    **drafting: Any,
) -> Session:
    """A session on a target with its draft: by default chains of three tokens, without n-grams."""
    fixed: dict[str, Any] = {"policy": "fixed", "p_min": 0.0}
    if not tree.is_fixed:
        fixed["max_tokens"] = 3
    asked: dict[str, Any] = {"ngrams": False, **({} if "policy" in drafting else fixed), **drafting}
    return opened(
        folder / f"{target}.gguf",
        draft if draft in ("none", "ngram", "mtp") else folder / f"{draft}.gguf",
        drafting=DraftOptions(tree=tree, **asked),
        sampler=sampler,
        generation=GenerationOptions(max_tokens=n_tokens, ignore_eos=ignore_eos, grammar=grammar),
        target_context=replace(EXACT, n_ctx=n_ctx),
    )


def answered(session: Session, prompt: str = PROMPT) -> tuple[list[Event], FinishedEvent]:
    """The events of an answer in which drafting did not fail."""
    events = list(generate(session, session.prompts.of_text(prompt, chat=False)))
    failed = [event for event in events if isinstance(event, NoticeEvent) and event.detail]
    assert not failed, failed[0].detail
    return events, finished(events)


def drafts(events: Sequence[Event]) -> Iterator[tuple[int, list[int]]]:
    """The number of tokens of the answer before each draft, and the draft."""
    n_tokens = 0
    for event in events:
        if isinstance(event, CommittedEvent):
            n_tokens = event.n_tokens
        if isinstance(event, DraftedEvent):
            yield n_tokens, [node.token_id for node in event.nodes]
