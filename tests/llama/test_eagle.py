"""EAGLE-3 drafts: their files, what they compute, and what is drafted with them."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from specgen.decoding.backend import Batch
from specgen.decoding.hidden_trail import HiddenTrail
from specgen.engine.engine import Engine
from specgen.engine.loaded_models import Models
from specgen.errors import ModelFileError, PairError, UsageError
from specgen.events import DraftedEvent, NoticeEvent
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.eagle import HOOKED, EagleContext, EagleModel, EagleTrail, is_eagle_file
from specgen.measure.bench.peers import SIMPLE, PeerError, find_program
from specgen.measure.proof import SampledPlan, check_sampled
from specgen.measure.proof.statistics import g_test
from specgen.measure.selection.tuning import Tuner
from specgen.options import (
    SamplerOptions,
    SessionOptions,
    TreeShape,
)
from specgen.testing.tiny import TinyConfig, write_tiny_model
from specgen.testing.tiny.eagle import TinyEagle, write_tiny_eagle
from tests.helpers.cli import Specgen, complaint
from tests.helpers.eagle import (
    BIASED,
    CHAIN,
    CONFIG,
    CONTEXT,
    DRAWN,
    LETTERS,
    PROMPT,
    TARGETS,
    TREE,
    answered,
    drafts,
    drafts_of,
    joint,
    loaded,
    said,
)

#: Files of several makes: with and without a vocabulary of their own, embeddings, an output matrix, another
#: size, and norms at other places.
DRAFTS = {
    "whole": TinyEagle(layers=(1, 2, 3)),
    "letters": TinyEagle(layers=(0, 2, 3), drafted=LETTERS),
    "wide": TinyEagle(
        (0, 1, 3), n_embd=128, n_head=4, drafted=LETTERS[::-1], norm_before_fc=True, seed=7
    ),
    "shared": TinyEagle(
        has_embeddings=False, has_output=False, norm_before_fc=True, norm_before_residual=True
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    for architecture in TARGETS:
        write_tiny_model(
            folder / f"{architecture}.gguf", replace(CONFIG, architecture=architecture)
        )
    for name, draft in DRAFTS.items():
        write_tiny_eagle(folder / f"{name}.gguf", CONFIG, draft)
    return folder


def drafted_anew(opened: Models, text: Sequence[int], n: int) -> list[int]:
    """What is drafted behind a text by contexts that have seen nothing else."""
    eagle = opened.drafts.eagle
    assert eagle is not None
    with ExitStack() as stack:
        clock, n_rows = time.perf_counter, len(text) - 1
        target = LlamaBackend(opened.target, CONTEXT, n_ctx=256, clock=clock)
        stack.callback(target.close)
        draft = EagleContext(eagle.model, target, CONTEXT, n_ctx=256, clock=clock)
        stack.callback(draft.close)
        batch = Batch(list(text[:-1]), list(range(n_rows)), [(0,)] * n_rows, [False] * n_rows)
        _, read = target.decode_hidden(batch, all_rows=True)
        batch = Batch(list(text[1:]), batch.positions, batch.sequences, [False] * n_rows)
        batch.hidden, batch.wants_logits[-1] = list(draft.encode(read)), True
        made: list[int] = []
        while True:
            made.append(int(draft.decode(batch)[-1].argmax()))
            if len(made) == n:
                return made
            batch = Batch([made[-1]], [n_rows + len(made) - 1], [(0,)], [True], [draft.state(0)])


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_known_by_its_architecture(folder: Path, tmp_path: Path) -> None:
    assert all(is_eagle_file(folder / f"{name}.gguf") for name in DRAFTS)
    assert not is_eagle_file(folder / "llama.gguf")
    named = write_tiny_model(tmp_path / "t.gguf", replace(CONFIG, name="eagle3"))
    assert not is_eagle_file(named)
    (tmp_path / "no.gguf").write_bytes(b"eagle3")
    assert not is_eagle_file(tmp_path / "no.gguf")
    assert not is_eagle_file(tmp_path / "missing.gguf")


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        (TinyConfig(architecture="qwen2"), TinyEagle(), "does not hand out the layers' inputs"),
        (
            replace(CONFIG, n_embd=128),
            DRAFTS["letters"],
            "it reads hidden states of 64 values, the target's have 128",
        ),
        (TinyConfig(n_layer=3), DRAFTS["letters"], "it reads layers 0, 2, 3, the target has 3"),
        (
            CONFIG,
            replace(DRAFTS["shared"], n_embd=128, n_head=4),
            "it lacks embeddings and an output matrix, and its hidden states have 128 values",
        ),
        (replace(CONFIG, tokenizer="spm"), DRAFTS["letters"], "tokenizers are of different kinds"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    tmp_path: Path, target: TinyConfig, draft: TinyEagle, said: str
) -> None:
    write_tiny_model(tmp_path / "t.gguf", target)
    write_tiny_eagle(tmp_path / "d.gguf", CONFIG, draft)
    with pytest.raises(PairError, match=re.escape(said)) as refused, loaded(tmp_path, "t", "d"):
        pass
    assert refused.value.message.startswith("d.gguf cannot draft for t.gguf: ")


def test_a_target_that_decodes_elsewhere_is_refused(folder: Path) -> None:
    options = SessionOptions(target=folder / "llama.gguf", draft=folder / "letters.gguf")
    with pytest.raises(PairError, match="which are computed elsewhere"):
        Models(options, time.perf_counter, vocabulary_only=True)


def test_a_draft_takes_no_draft_of_its_own(folder: Path) -> None:
    path = folder / "letters.gguf"
    options = SessionOptions(target=folder / "llama.gguf", draft=path, helpers=(path,))
    with pytest.raises(UsageError, match="takes no draft of its own"):
        Models(options, time.perf_counter)


def test_a_part_of_the_vocabulary_without_its_output_matrix_is_damaged(
    folder: Path, tmp_path: Path
) -> None:
    write_tiny_eagle(tmp_path / "d.gguf", CONFIG, replace(DRAFTS["letters"], has_output=False))
    target = LlamaModel(folder / "llama.gguf")
    with pytest.raises(ModelFileError, match="there is no output matrix"):
        EagleModel(tmp_path / "d.gguf", target)
    target.close()


def test_the_command_line_takes_it_as_a_draft(specgen: Specgen, folder: Path) -> None:
    target, draft = folder / "llama.gguf", folder / "whole.gguf"
    common = ("-n", "12", "--temp", "0", "--raw", "abc")
    plain = specgen("run", "-m", target, "--draft", "none", *common)
    drafted = specgen("run", "-m", target, "-md", draft, *common)
    assert (plain.code, drafted.code) == (0, 0)
    assert drafted.out == plain.out


def test_the_command_line_refuses_a_target_without_hooks_in_a_line(
    specgen: Specgen, folder: Path, tmp_path: Path
) -> None:
    target = write_tiny_model(tmp_path / "q.gguf", replace(CONFIG, architecture="qwen2"))
    result = specgen("run", "-m", target, "-md", folder / "whole.gguf", "--raw", "abc")
    assert "q.gguf" in (said := complaint(result, PairError.exit_code))
    assert "(qwen2)" in said


def test_a_draft_is_no_target(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"a draft of one target \(eagle3\)") as refused:
        LlamaModel(folder / "whole.gguf")
    assert "--draft" in (refused.value.hint or "")


# --- what is drafted ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("target", TARGETS)
def test_drafts_are_those_of_contexts_that_saw_nothing_else(
    folder: Path, target: str, name: str
) -> None:
    """So nothing that was refused is left in the draft's cache, and accepted tokens have the target's
    states there."""
    sampler = BIASED if name in {"letters", "wide"} else SamplerOptions()
    with loaded(folder, target, name, sampler=sampler) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        events, finished = answered(opened)
        text = [*prompt.tokens, *finished.token_ids]
        found = list(drafts(events))
        assert len(found) > 10
        for n_tokens, draft in found[:-3]:
            whole = drafted_anew(opened, text[: len(prompt.tokens) + n_tokens], 3)
            assert draft == whole[: len(draft)], n_tokens
            assert len(draft) == 3 or opened.target.vocabulary.is_end(draft[-1])
        if name in {"letters", "wide"}:
            assert 0 < finished.n_accepted < finished.n_drafted


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("tree", [CHAIN, TREE, TreeShape("walks", (2, 3))], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_greedy_text_is_that_of_plain_decoding(
    folder: Path, target: str, tree: TreeShape, name: str
) -> None:
    with loaded(folder, target, name, tree=tree) as opened:
        events, finished = answered(opened)
    assert finished.token_ids == said(folder, target).token_ids
    assert finished.n_drafted > 0
    if name in {"letters", "wide"}:
        assert finished.n_accepted > 0
        branched = any(
            isinstance(event, DraftedEvent) and len({node.parent for node in event.nodes}) < 3
            for event in events
        )
        assert branched or tree != TREE


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=str)
def test_verify_finds_no_defect(folder: Path, tree: TreeShape) -> None:
    with loaded(folder, tree=tree, sampler=DRAWN, n_tokens=12) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        plan = SampledPlan(depth=2, level=1e-4, n_draws=400)
        result = check_sampled(opened, prompt, plan, seed=1)
    assert result is not None
    assert result.fits
    assert not result.rows.is_defect
    assert result.n_drafted > 400


def test_tune_counts_how_often_it_agrees(folder: Path) -> None:
    """At each place of the target's answers: the random draft is right at some."""
    with loaded(folder) as opened:
        opened.change_drafting(replace(opened.options.drafting, policy="cost"))
        found = Tuner(opened).run(folder / "letters.gguf", [], ["abc", "the cat"], chat=False)
    assert found is not None
    assert found.draft is not None
    agreement = found.draft.agreement
    assert agreement.n_places == sum(len(answer.tokens) for answer in found.baseline.answers)
    assert 0 < agreement.n_agreed < agreement.n_places


def test_n_grams_draft_beside_it(folder: Path) -> None:
    with loaded(folder, ngrams=True, n_tokens=120) as opened:
        events, finished = answered(opened)
    origins = Counter(
        node.origin for event in events if isinstance(event, DraftedEvent) for node in event.nodes
    )
    assert origins["eagle3"] > 10
    assert origins["ngram"] > 10
    assert finished.token_ids == said(folder, "llama", n_tokens=120).token_ids


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=str)
def test_the_contexts_last_position_is_reached(folder: Path, tree: TreeShape) -> None:
    with loaded(folder, tree=tree, n_tokens=-1, n_ctx=64) as opened:
        _, finished = answered(opened)
    plain = said(folder, "llama", n_tokens=-1, n_ctx=64)
    assert finished.finish_reason == plain.finish_reason == "context"
    assert finished.token_ids == plain.token_ids


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_matching_keeps_a_seeds_text(folder: Path, target: str, tree: TreeShape) -> None:
    for seed in range(3):
        sampler = replace(DRAWN, seed=seed)
        with loaded(folder, target, tree=tree, sampler=sampler, verifier="match") as opened:
            _, finished = answered(opened)
        assert finished.token_ids == said(folder, target, sampler=sampler).token_ids
        assert finished.n_accepted > 0


@pytest.mark.parametrize("verifier", ["residual", "block"])
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=str)
def test_sampled_text_fits_the_targets_distribution(
    folder: Path, tree: TreeShape, verifier: str
) -> None:
    """Draw two tokens behind the first in 2000 answers. False alarms: 1e-4 for each case."""
    with loaded(folder, tree=tree, sampler=DRAWN, n_tokens=3, verifier=verifier) as opened:
        prompt = opened.prompts.of_text(PROMPT, chat=False)
        exact = joint(opened, prompt.tokens)
        counts: Counter[tuple[int, ...]] = Counter()
        n_drafted = 0
        with Engine(opened, n_ctx=64, n_parallel=4) as engine:
            requests = [engine.insert(prompt, sampling=replace(DRAWN, seed=n)) for n in range(2000)]
            for _ in engine.run():
                pass
        for request in requests:
            assert request.finished is not None
            counts[request.finished.token_ids] += 1
            n_drafted += request.finished.n_drafted
    assert n_drafted >= 2000
    assert set(counts) <= set(exact)
    observed = np.array([counts[text] for text in exact])
    assert g_test(observed, np.array(list(exact.values()))).p_value > 1e-4


# --- several answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=str)
def test_answers_at_once_are_what_they_are_alone(
    folder: Path, target: str, tree: TreeShape
) -> None:
    prompts = [PROMPT, "abc", PROMPT + " be not", "for with", "abcd dcba abcd"]
    with loaded(folder, target, tree=tree) as opened:
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


@pytest.mark.parametrize("n_left_out", [0, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_prompt_that_continues_a_kept_text_is_drafted_as_anew(
    folder: Path, target: str, n_left_out: int
) -> None:
    with loaded(folder, target) as opened, Engine(opened, n_ctx=256) as engine:
        first = opened.prompts.of_text(PROMPT, chat=False)
        request = engine.insert(first)
        events = list(engine.run())
        assert request.finished is not None
        answer = request.finished.token_ids
        tokens = (*first.tokens, *answer[: len(answer) - n_left_out], *LETTERS)
        second = replace(first, tokens=tokens)
        request = engine.insert(second)
        events = list(engine.run())
        assert request.finished is not None
        is_kept = request.finished.n_cached_tokens > len(first.tokens)
        # A recurrent state does not go back within a text.
        assert is_kept or (n_left_out and target in {"lfm2", "qwen35"})
        text = [*tokens, *request.finished.token_ids]
        found = list(drafts(events))
        assert len(found) > 10
        for n_tokens, draft in found[:-3]:
            assert draft == drafted_anew(opened, text[: len(tokens) + n_tokens], 3)[: len(draft)]


def test_an_answer_without_a_draft_leaves_a_gap_that_costs_no_answer(folder: Path) -> None:
    with loaded(folder) as opened, Engine(opened, n_ctx=256) as engine:
        first = opened.prompts.of_text(PROMPT, chat=False)
        plain = engine.insert(first, draft=False)
        list(engine.run())
        assert plain.finished is not None
        second = replace(first, tokens=(*first.tokens, *plain.finished.token_ids, *LETTERS))
        request = engine.insert(second)
        events = list(engine.run())
        assert request.finished is not None
        assert request.finished.n_drafted > 0
        assert not [each for each in events if isinstance(each, NoticeEvent) and each.detail]
    with loaded(folder, draft="none") as opened, Engine(opened, n_ctx=256) as engine:
        expected = engine.insert(second)
        list(engine.run())
        assert expected.finished is not None
        assert request.finished.token_ids == expected.finished.token_ids


# --- contexts and trails --------------------------------------------------------------------------


def test_rows_are_the_same_in_batches_of_every_shape(folder: Path) -> None:
    """Also if only some of more rows than llama.cpp computes logits of at once want them."""
    n = 100
    target = LlamaModel(folder / "llama.gguf")
    model = EagleModel(folder / "letters.gguf", target)
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 200, n).tolist()
    hidden = list(rng.normal(0.0, 1.0, (n, 64)).astype(np.float32))
    rows, states = {}, {}
    for n_together, wanted in product((1, 7, n), ({99}, {3, 60, 99})):
        backend = LlamaBackend(target, CONTEXT, n_ctx=256, clock=time.perf_counter)
        context = EagleContext(
            model, backend, CONTEXT, n_ctx=256, clock=time.perf_counter, n_outputs=4
        )
        found = []
        for start in range(0, n, n_together):
            places = list(range(start, min(n, start + n_together)))
            batch = Batch(
                [tokens[place] for place in places],
                places,
                [(0,)] * len(places),
                [place in wanted for place in places],
                [hidden[place] for place in places],
            )
            found += [row.copy() for row in context.decode(batch)]
        assert len(found) == len(wanted)
        rows[n_together, len(wanted)], states[n_together, len(wanted)] = found, context.state(0)
        context.close()
        backend.close()
    for key, found in rows.items():
        np.testing.assert_array_equal(found[-1], rows[1, 1][-1], err_msg=str(key))
        np.testing.assert_array_equal(found, rows[1, key[1]], err_msg=str(key))
        np.testing.assert_array_equal(states[key], states[1, 1])
    model.close()
    target.close()


def test_a_trail_encodes_what_is_read_and_only_once() -> None:
    encoded: list[float] = []

    def encode(read: np.ndarray) -> np.ndarray:
        encoded.extend(read[:, 0].tolist())
        return -read[:, :1]

    def rows(*values: float) -> np.ndarray:
        return np.array([[value, 0.0, 0.0] for value in values], np.float32)

    text = list(range(20))
    trail, other = EagleTrail(8, encode), EagleTrail(8, encode)
    trail.take_rows(rows(0, 1, 2), text, 3)
    trail.take_rows(rows(3, 4), text, 5)
    trail.rewind(4)
    assert not encoded
    assert [float(trail.after(n)[0]) for n in range(4)] == [0, -1, -2, -3]  # type: ignore[index]
    assert encoded == [0, 1, 2, 3]
    trail.take_rows(rows(14, 15), text, 6)  # from another text
    other.begin([0, 1, 2, 3, 4, 9], [trail])
    assert (other.n_read, float(other.after(4)[0])) == (5, -14)  # type: ignore[index]
    assert float(trail.after(5)[0]) == -15  # type: ignore[index]
    assert encoded == [0, 1, 2, 3, 14, 14, 15]
    trail.take_rows(rows(*range(6, 14)), text, 14)
    assert trail.first == 6
    assert float(trail.after(13)[0]) == -13  # type: ignore[index]
    assert isinstance(trail, HiddenTrail)


def test_the_architectures_are_those_whose_graphs_hand_out_inputs() -> None:
    """An architecture that is not hooked would end the process; so none is added lightly."""
    assert {"llama", "qwen3", "gpt-oss", "gemma4"} <= HOOKED
    assert HOOKED.isdisjoint({"qwen2", "gemma3", "mamba", "qwen4exp", "deepseek2"})


# --- llama.cpp's own program ----------------------------------------------------------------------


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
    sampler = BIASED if name in {"letters", "wide"} else SamplerOptions()
    theirs = drafts_of(program, folder, target, name, n_max, sampler)
    with loaded(folder, target, name, sampler=sampler) as opened:
        opened.change_drafting(replace(opened.options.drafting, max_tokens=n_max))
        ours = dict(drafts(answered(opened)[0]))
    places = sorted(set(theirs) & set(ours))[:-n_max]  # the last ones are shorter
    assert len(places) > 10
    for place in places:  # specgen ends a draft with the end of the text
        assert ours[place] == theirs[place][: len(ours[place])]
