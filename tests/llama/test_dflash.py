"""DFlash and DSpark drafts: their files, and what is drafted with them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specgen.decoding.backend import Batch
from specgen.engine.engine import Engine
from specgen.engine.loaded_models import Models
from specgen.errors import ModelFileError, PairError
from specgen.events import DraftedEvent
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.dflash import DflashContext, DflashModel, is_dflash_file
from specgen.measure.bench.peers import SIMPLE, PeerError, find_program
from specgen.measure.proof.statistics import g_test
from specgen.options import SamplerOptions, TreeShape
from specgen.testing.tiny import TinyConfig, write_tiny_model
from specgen.testing.tiny.eagle import TinyDflash, write_tiny_dflash
from tests.helpers.eagle import (
    BIASED,
    CONFIG,
    CONTEXT,
    DRAWN,
    LETTERS,
    PROMPT,
    TARGETS,
    answered,
    drafts,
    drafts_of,
    joint,
    loaded,
    said,
)

#: Files of several makes. Those of the kind DSpark have a rank.
DRAFTS = {
    "whole": TinyDflash(layers=(1, 3)),
    "letters": TinyDflash(layers=(0, 2, 3), drafted=LETTERS),
    "shared": TinyDflash(has_embeddings=False, has_output=False),
    "window": TinyDflash(layers=(1, 2), drafted=LETTERS, sliding_window=8),
    "causal": TinyDflash(layers=(1,), drafted=LETTERS, causal=True),
    "sections": TinyDflash(layers=(2, 3), drafted=LETTERS, has_sections=True),
    "spark": TinyDflash(layers=(0, 1, 2, 3), drafted=LETTERS, rank=8),
    "spark, masks": TinyDflash(layers=(0, 2), drafted=LETTERS, rank=8, from_anchor=False),
}
WHOLE = ("whole", "shared")


def sampler_of(name: str) -> SamplerOptions:
    return SamplerOptions() if name in WHOLE else BIASED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash")
    for architecture in TARGETS:
        config = replace(CONFIG, architecture=architecture)
        write_tiny_model(folder / f"{architecture}.gguf", config)
    for name, draft in DRAFTS.items():
        write_tiny_dflash(folder / f"{name}.gguf", CONFIG, draft)
    return folder


def drafted_anew(opened: Models, text: Sequence[int], n: int) -> list[int]:
    """What is drafted behind a text by contexts that have seen nothing else."""
    eagle = opened.drafts.eagle
    assert eagle is not None
    model = eagle.model
    assert isinstance(model, DflashModel)
    with ExitStack() as stack:
        clock, n_rows = time.perf_counter, len(text) - 1
        target = LlamaBackend(opened.target, CONTEXT, n_ctx=256, clock=clock)
        stack.callback(target.close)
        draft = DflashContext(model, target, CONTEXT, n_ctx=256, clock=clock)
        stack.callback(draft.close)
        batch = Batch(list(text[:-1]), list(range(n_rows)), [(0,)] * n_rows, [False] * n_rows)
        _, read = target.decode_hidden(batch, all_rows=True)
        batch.hidden = list(read)
        assert not len(draft.decode(batch))
        block = Batch()
        n_masks = n - 1 if model.predicts_from_last else n
        for offset, token in enumerate([text[-1], *[model.mask] * n_masks]):
            block.add(token, n_rows + offset, (0,), True)
        made: list[int] = draft.decode(block)[-n:].argmax(axis=1).tolist()
        return made


def test_a_file_is_known_by_its_architecture(folder: Path) -> None:
    assert all(is_dflash_file(folder / f"{name}.gguf") for name in DRAFTS)
    assert not is_dflash_file(folder / "llama.gguf")


@pytest.mark.parametrize(
    ("target", "draft", "why"),
    [
        (TinyConfig(architecture="qwen2"), TinyDflash(), "does not hand out the layers' inputs"),
        (replace(CONFIG, n_embd=128), TinyDflash(), "it reads hidden states of 64 values"),
        (CONFIG, TinyDflash(layers=(1, 4)), "it reads layers 1, 4, the target has 4"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    tmp_path: Path, target: TinyConfig, draft: TinyDflash, why: str
) -> None:
    write_tiny_model(tmp_path / "t.gguf", target)
    write_tiny_dflash(tmp_path / "d.gguf", CONFIG, draft)
    with pytest.raises(PairError, match=f"d.gguf cannot draft for t.gguf: .*{why}"):
        loaded(tmp_path, "t", "d")


def test_blocks_of_one_token_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_dflash(tmp_path / "d.gguf", CONFIG, TinyDflash(n_block=1))
    target = LlamaModel(folder / "llama.gguf")
    with pytest.raises(ModelFileError, match="blocks of 1 tokens"):
        DflashModel(tmp_path / "d.gguf", target)
    target.close()


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_are_those_of_contexts_that_saw_nothing_else(
    folder: Path, target: str, name: str
) -> None:
    """So neither a mask nor anything that was refused is left in the draft's cache."""
    with loaded(folder, target, name, sampler=sampler_of(name)) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        events, finished = answered(opened)
        text = [*prompt.tokens, *finished.token_ids]
        found = list(drafts(events))
        assert len(found) > 10
        for n_tokens, draft in found[:-3]:
            anew = drafted_anew(opened, text[: len(prompt.tokens) + n_tokens], 3)
            assert draft == anew[: len(draft)]
            assert len(draft) == 3 or opened.target.vocabulary.is_end(draft[-1])


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_text_is_that_of_plain_decoding(folder: Path, target: str, name: str) -> None:
    with loaded(folder, target, name) as opened:
        _, finished = answered(opened)
    assert finished.token_ids == said(folder, target).token_ids
    assert finished.n_drafted > 0


def test_it_drafts_chains_whatever_the_shape(folder: Path) -> None:
    with loaded(folder, tree=TreeShape("levels", (3, 2))) as opened:
        (note,) = opened.notices(64)
        _, finished = answered(opened)
    assert note.endswith("drafting chains of 2 tokens")
    assert len(finished.drafted_by_depth) == 2
    assert finished.token_ids == said(folder, "llama").token_ids
    assert finished.n_accepted > 0


def test_n_grams_draft_beside_it(folder: Path) -> None:
    with loaded(folder, ngrams=True, n_tokens=120) as opened:
        events, finished = answered(opened)
    made = [event for event in events if isinstance(event, DraftedEvent)]
    origins = Counter(node.origin for event in made for node in event.nodes)
    assert min(origins["dflash"], origins["ngram"]) > 10
    assert finished.token_ids == said(folder, "llama", n_tokens=120).token_ids


@pytest.mark.parametrize("name", ["letters", "spark"])
def test_no_more_is_drafted_than_a_block_holds(folder: Path, name: str) -> None:
    with loaded(folder, draft=name) as opened:
        opened.change_drafting(replace(opened.options.drafting, max_tokens=16))
        events, finished = answered(opened)
    longest = max(len(draft) for _, draft in drafts(events))
    assert longest == DRAFTS[name].n_block - (name == "letters")
    assert finished.token_ids == said(folder, "llama").token_ids


@pytest.mark.parametrize("name", ["letters", "spark"])
def test_the_contexts_last_position_is_reached(folder: Path, name: str) -> None:
    with loaded(folder, draft=name, n_tokens=-1, n_ctx=64) as opened:
        _, finished = answered(opened)
    plain = said(folder, "llama", n_tokens=-1, n_ctx=64)
    assert finished.finish_reason == plain.finish_reason == "context"
    assert finished.token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["letters", "spark"])
@pytest.mark.parametrize("target", TARGETS)
def test_matching_keeps_a_seeds_text(folder: Path, target: str, name: str) -> None:
    for seed in range(3):
        sampler = replace(DRAWN, seed=seed)
        with loaded(folder, target, name, sampler=sampler, verifier="match") as opened:
            _, finished = answered(opened)
        assert finished.token_ids == said(folder, target, sampler=sampler).token_ids


@pytest.mark.parametrize("name", ["letters", "spark"])
@pytest.mark.parametrize("verifier", ["residual", "block"])
def test_sampled_text_fits_the_targets_distribution(folder: Path, name: str, verifier: str) -> None:
    """Draw two tokens behind the first in 2000 answers. False alarms: 1e-4 for each case."""
    with loaded(folder, draft=name, sampler=DRAWN, n_tokens=3, verifier=verifier) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        exact = joint(opened, prompt.tokens)
        with Engine(opened, n_ctx=64, n_parallel=4) as engine:
            requests = [engine.insert(prompt, sampling=replace(DRAWN, seed=n)) for n in range(2000)]
            for _ in engine.run():
                pass
    ends = [request.finished for request in requests if request.finished is not None]
    counts = Counter(end.token_ids for end in ends)
    assert sum(end.n_drafted for end in ends) >= 2000
    assert set(counts) <= set(exact)
    observed = np.array([counts[text] for text in exact])
    assert g_test(observed, np.array(list(exact.values()))).p_value > 1e-4


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target", ["llama", "lfm2"])
def test_answers_at_once_are_what_they_are_alone(folder: Path, target: str, name: str) -> None:
    prompts = [PROMPT, "abc", PROMPT + " be not", "for with", "abcd dcba abcd"]
    with loaded(folder, target, name) as opened:
        alone = [answered(opened, prompt) for prompt in prompts]
        with Engine(opened, n_ctx=128, n_parallel=3) as engine:
            texts = [opened.prompts.of_text(prompt, chat=False) for prompt in prompts]
            requests = [engine.insert(text) for text in texts]
            events = list(engine.run())
    for number, (request, (own, finished)) in enumerate(zip(requests, alone, strict=True)):
        assert request.finished is not None
        assert request.finished.token_ids == finished.token_ids
        together = [event for event in events if event.sequence == number]
        assert list(drafts(together)) == list(drafts(own))


@pytest.mark.parametrize("n_max", [1, 4])
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_llama_cpps_own_program_drafts_the_same(
    folder: Path, target: str, name: str, n_max: int
) -> None:
    try:
        program = find_program(SIMPLE)
    except PeerError as error:
        pytest.skip(error.message)
    sampler, kind = sampler_of(name), "draft-dspark" if DRAFTS[name].rank else "draft-dflash"
    theirs = drafts_of(program, folder, target, name, n_max, sampler, kind)
    with loaded(folder, target, name, sampler=sampler) as opened:
        opened.change_drafting(replace(opened.options.drafting, max_tokens=n_max))
        ours = dict(drafts(answered(opened)[0]))
    places = sorted(set(theirs) & set(ours))[:-n_max]  # the last ones are shorter
    assert len(places) > 10
    for place in places:  # specgen ends a draft with the end of the text
        assert ours[place] == theirs[place][: len(ours[place])]
