"""Drafts that read layers of tiny targets, with random weights.

So that a target accepts some tokens, most drafts can draft four tokens only, and the target is biased towards
these.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specgen.decoding.backend import Batch
from specgen.engine.engine import generate
from specgen.engine.loaded_models import Models
from specgen.events import CommittedEvent, DraftedEvent, Event, FinishedEvent, NoticeEvent
from specgen.llama import LlamaBackend
from specgen.options import (
    ContextOptions,
    DraftOptions,
    GenerationOptions,
    SamplerOptions,
    SessionOptions,
    TreeShape,
)
from specgen.testing.tiny import Architecture, TinyConfig, tiny_vocabulary

# f32 and no flash attention: rows are then equal in batches of every shape.
CONTEXT = ContextOptions(n_threads=1, flash_attention="off", cache_type_k="f32", cache_type_v="f32")
PROMPT = "the cat is in the else for with"
#: Cells, snapshots of recurrent states, and copies of them.
TARGETS: tuple[Architecture, ...] = ("llama", "qwen3", "lfm2", "qwen35")
CONFIG = TinyConfig(n_layer=4)
LETTERS = [tiny_vocabulary(CONFIG).tokens.index(letter) for letter in "abcd"]
BIASED = SamplerOptions(logit_bias=tuple((token, 30.0) for token in LETTERS))
DRAWN = replace(BIASED, temperature=1.0, top_k=4, top_p=1.0, min_p=0.0)


CHAIN, TREE = TreeShape("off"), TreeShape("levels", (3, 2, 1))


def loaded(
    folder: Path,
    target: str = "llama",
    draft: str = "letters",
    *,
    tree: TreeShape = CHAIN,
    sampler: SamplerOptions = BIASED,
    n_tokens: int = 60,
    ngrams: bool = False,
    n_ctx: int | None = None,
    verifier: str = "auto",
) -> Models:
    drafting = DraftOptions(
        policy="fixed", max_tokens=6 if tree.is_fixed else 3, p_min=0.0, ngrams=ngrams, tree=tree,
        verifier=verifier,  # type: ignore[arg-type]
    )  # fmt: skip
    options = SessionOptions(
        target=folder / f"{target}.gguf",
        draft="none" if draft == "none" else folder / f"{draft}.gguf",
        drafting=drafting,
        sampler=sampler,
        generation=GenerationOptions(max_tokens=n_tokens),
        target_context=replace(CONTEXT, n_ctx=n_ctx),
        draft_context=CONTEXT,
    )
    return Models(options, time.perf_counter)


def answered(opened: Models, prompt: str = PROMPT) -> tuple[list[Event], FinishedEvent]:
    """The events of an answer in which drafting did not fail."""
    events = list(generate(opened, opened.prompts.of_text(prompt, chat=False)))
    failed = [event for event in events if isinstance(event, NoticeEvent) and event.detail]
    assert not failed, failed[0].detail
    assert isinstance(events[-1], FinishedEvent)
    return events, events[-1]


def said(folder: Path, target: str, **options: object) -> FinishedEvent:
    """What a target says without a draft."""
    with loaded(folder, target, "none", **options) as opened:  # type: ignore[arg-type]
        return answered(opened)[1]


def drafts(events: Sequence[Event]) -> Iterator[tuple[int, list[int]]]:
    """The number of tokens of the answer before each draft, and the draft."""
    n_tokens = 0
    for event in events:
        if isinstance(event, CommittedEvent):
            n_tokens = event.n_tokens
        if isinstance(event, DraftedEvent):
            yield n_tokens, [node.token_id for node in event.nodes]


def joint(opened: Models, prompt: Sequence[int]) -> dict[tuple[int, ...], float]:
    """The probabilities of all texts of three letters behind a prompt."""
    backend = LlamaBackend(opened.target, CONTEXT, n_ctx=64, clock=time.perf_counter)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in found.items():
            whole = [*prompt, *text]
            n = len(whole)
            backend.remove(0)
            wants = [False] * (n - 1) + [True]
            row = backend.decode(Batch(whole, list(range(n)), [(0,)] * n, wants))[0]
            weights = np.exp(row[LETTERS].astype(float) - row[LETTERS].max())
            for letter, weight in zip(LETTERS, weights / weights.sum(), strict=True):
                longer[(*text, letter)] = probability * float(weight)
        found = longer
    backend.close()
    return found


def drafts_of(
    program: Path,
    folder: Path,
    target: str,
    name: str,
    n_max: int,
    sampler: SamplerOptions,
    kind: str = "draft-eagle3",
) -> dict[int, list[int]]:
    """What llama.cpp's program drafts, by the number of tokens of the answer before."""
    options = f"""--spec-type {kind} --spec-draft-n-max {n_max} --spec-draft-p-min 0 --temp 0 -n 60 -c 512 -t 1 -td 1 -lv 10
        -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32"""
    biases = [each for token, bias in sampler.logit_bias for each in ("-l", f"{token}+{bias:.0f}")]
    models = ["-m", str(folder / f"{target}.gguf"), "-md", str(folder / f"{name}.gguf")]
    command = [str(program), *models, *options.split(), *biases, "-p", PROMPT]
    output = b""
    for _ in range(8):  # its log is cut off now and then
        run = subprocess.run(command, capture_output=True, check=True, timeout=120)
        output = run.stdout + run.stderr
        if b"n_accept " in output:
            break
    pattern = rb"draft candidate   0, pos +\d+: +(\d+) |accepted (\d+)/\d+ draft"
    found: dict[int, list[int]] = {}
    place = 0
    for token, n_accepted in re.findall(pattern, output):
        if n_accepted:
            place += 1 + int(n_accepted)
        else:
            found.setdefault(place, []).append(int(token))
    return found
