"""EAGLE-3, DFlash and DSpark drafts: their files, what they compute, and what is drafted with them."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from specgen.drafters.kinds import find_kind
from specgen.errors import ModelFileError, PairError
from specgen.llama import LlamaBackend, LlamaModel
from specgen.llama.draft_contexts import EagleContext
from specgen.llama.draft_models import DflashModel, EagleModel
from specgen.method.backend import Batch
from specgen.options import (
    SessionOptions,
    TreeShape,
)
from specgen.session.session import Session
from tests.helpers.cli import Specgen
from tests.helpers.common import EXACT
from tests.helpers.eagle import (
    CONFIG,
    DFLASHES,
    EAGLES,
    answered,
    drafts,
    loaded,
    write_files,
)
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyDflash, TinyEagle, write_tiny_dflash, write_tiny_eagle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("models"))


# --- files ----------------------------------------------------------------------------------------


def kind_name(path: Path) -> str | None:
    kind = find_kind(path)
    return kind.name if kind is not None else None


def test_a_file_is_known_by_its_architecture(folder: Path, tmp_path: Path) -> None:
    assert all(kind_name(folder / f"{name}.gguf") == "eagle3" for name in EAGLES)
    assert all(kind_name(folder / f"{name}.gguf") == "dflash" for name in DFLASHES)
    assert kind_name(folder / "llama.gguf") == "model"
    named = write_tiny_model(tmp_path / "t.gguf", replace(CONFIG, name="eagle3"))
    assert kind_name(named) == "model"
    (tmp_path / "no.gguf").write_bytes(b"eagle3")
    assert kind_name(tmp_path / "no.gguf") == "model"
    assert kind_name(tmp_path / "missing.gguf") == "model"


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        (TinyConfig(architecture="qwen2"), TinyEagle(), "does not hand out the layers' inputs"),
        (
            replace(CONFIG, n_embd=128),
            EAGLES["letters"],
            "it reads hidden states of 64 values, the target's have 128",
        ),
        (TinyConfig(n_layer=3), EAGLES["letters"], "it reads layers 0, 2, 3, the target has 3"),
        (
            CONFIG,
            replace(EAGLES["shared"], n_embd=128, n_head=4),
            "it lacks embeddings and an output matrix, and its hidden states have 128 values",
        ),
        (replace(CONFIG, tokenizer="spm"), EAGLES["letters"], "tokenizers are of different kinds"),
        (TinyConfig(architecture="qwen2"), TinyDflash(), "does not hand out the layers' inputs"),
        (replace(CONFIG, n_embd=128), TinyDflash(), "it reads hidden states of 64 values"),
        (CONFIG, TinyDflash(layers=(1, 4)), "it reads layers 1, 4, the target has 4"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    tmp_path: Path, target: TinyConfig, draft: TinyEagle | TinyDflash, said: str
) -> None:
    write_tiny_model(tmp_path / "t.gguf", target)
    if isinstance(draft, TinyDflash):
        write_tiny_dflash(tmp_path / "d.gguf", CONFIG, draft)
    else:
        write_tiny_eagle(tmp_path / "d.gguf", CONFIG, draft)
    with pytest.raises(PairError, match=re.escape(said)) as refused, loaded(tmp_path, "t", "d"):
        pass
    assert refused.value.message.startswith("d.gguf cannot draft for t.gguf: ")


def test_a_target_that_decodes_elsewhere_is_refused(folder: Path) -> None:
    options = SessionOptions(target=folder / "llama.gguf", draft=folder / "letters.gguf")
    with pytest.raises(PairError, match="which are computed elsewhere"):
        Session(options, time.perf_counter, vocabulary_only=True)


def test_a_part_of_the_vocabulary_without_its_output_matrix_is_damaged(
    folder: Path, tmp_path: Path
) -> None:
    write_tiny_eagle(tmp_path / "d.gguf", CONFIG, replace(EAGLES["letters"], has_output=False))
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


@pytest.mark.parametrize(("name", "kind"), [("whole", "eagle3"), ("dflash whole", "dflash")])
def test_a_draft_is_no_target_and_drafts_for_no_draft(folder: Path, name: str, kind: str) -> None:
    file, target = folder / f"{name}.gguf", folder / "llama.gguf"
    for options in (
        SessionOptions(target=file),
        SessionOptions(target=target, draft=target, helpers=(file,)),
    ):
        with pytest.raises(ModelFileError, match=rf"a draft of one target \({kind}\)") as refused:
            Session(options, time.perf_counter)
        assert "--draft" in (refused.value.hint or "")


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
        backend = LlamaBackend(target, EXACT, n_ctx=256, clock=time.perf_counter)
        context = EagleContext(model, backend, EXACT, n_ctx=256, clock=time.perf_counter)
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


# --- blocks of tokens ------------------------------------------------------------------------------


def test_blocks_of_one_token_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_dflash(tmp_path / "d.gguf", CONFIG, TinyDflash(n_block=1))
    target = LlamaModel(folder / "llama.gguf")
    with pytest.raises(ModelFileError, match="blocks of 1 tokens"):
        DflashModel(tmp_path / "d.gguf", target)
    target.close()


def test_it_drafts_chains_whatever_the_shape(folder: Path) -> None:
    with loaded(folder, draft="dflash letters", tree=TreeShape("levels", (3, 2))) as opened:
        (note,) = opened.notices(64)
        _, finished = answered(opened)
        opened.change_draft("none")
        assert finished.token_ids == answered(opened)[1].token_ids
    assert note.endswith("drafting chains of 2 tokens")
    assert len(finished.drafted_by_depth) == 2
    assert finished.n_accepted > 0


@pytest.mark.parametrize("name", ["dflash letters", "spark"])
def test_no_more_is_drafted_than_a_block_holds(folder: Path, name: str) -> None:
    with loaded(folder, draft=name) as opened:
        opened.change_drafting(replace(opened.options.drafting, max_tokens=16))
        events, _ = answered(opened)
    longest = max(len(draft) for _, draft in drafts(events))
    assert longest == DFLASHES[name].n_block - (name == "dflash letters")
