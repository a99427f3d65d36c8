"""DFlash and DSpark drafts: their files, and what is drafted with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specgen.drafters.kinds import find_kind
from specgen.errors import ModelFileError, PairError
from specgen.llama import LlamaModel
from specgen.llama.dflash import DflashModel
from specgen.options import TreeShape
from tests.helpers.eagle import (
    CONFIG,
    DFLASHES,
    answered,
    drafts,
    loaded,
    write_files,
)
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyDflash, write_tiny_dflash


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("models"))


def kind_name(path: Path) -> str | None:
    kind = find_kind(path)
    return kind.name if kind is not None else None


def test_a_file_is_known_by_its_architecture(folder: Path) -> None:
    assert all(kind_name(folder / f"{name}.gguf") == "dflash" for name in DFLASHES)
    assert kind_name(folder / "llama.gguf") == "model"


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
