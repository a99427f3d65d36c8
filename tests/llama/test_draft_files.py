"""Files of drafts that use their target's states: which targets they fit, the errors for others,
and how they are found.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.drafters.kinds import find_kind
from specgen.errors import BackendError, ModelFileError, PairError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.mtp_layers import mtp_of, why_no_mtp
from specgen.llama.paired_drafts import DflashModel, EagleModel
from specgen.measure.draft_trial import measure_target, try_draft
from specgen.measure.prompts import given_prompts
from specgen.options import DraftSource, SamplerOptions, SessionOptions, TreeShape
from specgen.session.session import Session
from tests.helpers.cli import Specgen
from tests.helpers.gemma4_assistant import write_assistant, write_gemma4
from tests.helpers.mtp import split_mtp_model, write_mtp_model
from tests.helpers.states_drafts import (
    CONFIG,
    DFLASHES,
    EAGLES,
    PROMPT,
    answered,
    drafts,
    loaded,
    write_files,
)
from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.eagle import TinyDflash, TinyEagle, write_tiny_dflash, write_tiny_eagle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_files(tmp_path_factory.mktemp("models"))
    write_gemma4(folder / "gemma4.gguf")
    write_assistant(folder / "assistant.gguf")
    for architecture in ("glm4moe", "qwen35", "mimo2"):
        write_mtp_model(folder / f"whole {architecture}.gguf", architecture, of_state=0.3)
    return folder


@pytest.fixture(scope="module")
def parted(folder: Path) -> Path:
    """Models with MTP layers in two files each: without these layers, and they alone."""
    parted = folder / "parted"
    parted.mkdir()
    for name in ("glm4moe", "qwen35", "mimo2"):
        target, layers = parted / f"{name}.gguf", parted / f"mtp-{name}.gguf"
        split_mtp_model(folder / f"whole {name}.gguf", target, layers)
    return parted


def opened(target: Path, draft: DraftSource, **options: Any) -> Session:
    return Session(SessionOptions(target=target, draft=draft, **options), time.perf_counter)


# --- what a file is, and what it fits


def test_a_file_is_known_by_its_architecture(folder: Path, tmp_path: Path) -> None:
    def kind_name(path: Path) -> str | None:
        kind = find_kind(path)
        return kind.name if kind is not None else None

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
        (replace(CONFIG, n_embd=128), EAGLES["letters"], "of 64 values, the target's have 128"),
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
        (TinyConfig(), "assistant", "drafts for Gemma 4, and not for llama"),
        ("gemma4", "wide assistant", "hidden states"),
        ("gemma4 of two heads", "assistant", "the keys of the target's last two layers"),
        ("parted/qwen35", "parted/mtp-glm4moe", "MTP layers are of a glm4moe, not of a qwen35"),
        ("wide mtp", "parted/mtp-glm4moe", "of 64 values, the target's have 96"),
        ("mtp of words", "parted/mtp-glm4moe", "tokenizers are of different kinds"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    folder: Path,
    parted: Path,
    tmp_path: Path,
    target: TinyConfig | str,
    draft: TinyEagle | TinyDflash | str,
    said: str,
) -> None:
    write_assistant(folder / "wide assistant.gguf", n_target=96)
    write_gemma4(folder / "gemma4 of two heads.gguf", n_head_kv=2)
    write_mtp_model(folder / "wide mtp.gguf", n_embd=96, n_ff=128)
    write_mtp_model(folder / "mtp of words.gguf", tokenizer="spm")
    files: dict[str, Any] = {"t": target, "d": draft}
    for name, file in files.items():
        path = tmp_path / f"{name}.gguf"
        if isinstance(file, TinyConfig):
            write_tiny_model(path, file)
        elif isinstance(file, TinyDflash):
            write_tiny_dflash(path, CONFIG, file)
        elif isinstance(file, TinyEagle):
            write_tiny_eagle(path, CONFIG, file)
        else:
            shutil.copy(folder / f"{file}.gguf", path)
    with pytest.raises(PairError, match=re.escape(said)) as refused:
        opened(tmp_path / "t.gguf", tmp_path / "d.gguf")
    assert "d.gguf cannot draft for t.gguf: " in refused.value.message


def test_a_target_that_decodes_elsewhere_is_refused(folder: Path) -> None:
    options = SessionOptions(target=folder / "llama.gguf", draft=folder / "letters.gguf")
    with pytest.raises(PairError, match="which are computed elsewhere"):
        Session(options, time.perf_counter, vocabulary_only=True)


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_eagle(tmp_path / "e.gguf", CONFIG, replace(EAGLES["letters"], has_output=False))
    write_tiny_dflash(tmp_path / "d.gguf", CONFIG, TinyDflash(n_block=1))
    target = LlamaModel(folder / "llama.gguf")
    with pytest.raises(ModelFileError, match="there is no output matrix"):
        EagleModel(tmp_path / "e.gguf", target)
    with pytest.raises(ModelFileError, match="blocks of 1 tokens"):
        DflashModel(tmp_path / "d.gguf", target)
    target.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("whole", "eagle3"), ("dflash whole", "dflash"), ("assistant", "gemma4-assistant")],
)
def test_a_draft_file_is_accepted_neither_as_a_target_nor_for_a_draft(
    folder: Path, name: str, kind: str
) -> None:
    file, target = folder / f"{name}.gguf", folder / "llama.gguf"
    for options in (
        SessionOptions(target=file),
        SessionOptions(target=target, draft=target, further_drafts=(file,)),
    ):
        with pytest.raises(ModelFileError, match=rf"a draft of one target \({kind}\)") as refused:
            Session(options, time.perf_counter)
        assert "--draft" in (refused.value.hint or "")


def test_trials_of_what_reads_the_cache_are_refused(folder: Path) -> None:
    with loaded(folder, "gemma4", "none", sampler=SamplerOptions()) as session:
        baseline = measure_target(session, given_prompts([PROMPT]))
        assert baseline is not None
        session.change_draft(folder / "assistant.gguf")
        with pytest.raises(BackendError, match=r"assistant.gguf: it reads the target's cache"):
            try_draft(session, baseline)


# --- MTP layers


def test_a_model_without_mtp_layers_is_rejected_with_the_reason(
    parted: Path, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "plain.gguf", TinyConfig())
    write_mtp_model(tmp_path / "removed.gguf", keep_layer=False)
    unknown = {"llama.nextn_predict_layers": 1}
    write_tiny_model(tmp_path / "unknown.gguf", TinyConfig(), metadata=unknown)
    (tmp_path / "text.gguf").write_text("text")
    assert why_no_mtp(tmp_path / "plain.gguf") == "it has no MTP layers"
    assert why_no_mtp(tmp_path / "unknown.gguf") == "its MTP layers were removed from the file"
    assert why_no_mtp(tmp_path / "text.gguf") == "it is not a GGUF file"
    with pytest.raises(PairError, match=r"removed.gguf: its MTP layers were removed"):
        opened(tmp_path / "removed.gguf", "mtp")
    with pytest.raises(ModelFileError, match="MTP layers, and not the model that they belong to"):
        opened(parted / "mtp-glm4moe.gguf", "none")
    with pytest.raises(UsageError, match="cannot have a draft of its own"):
        opened(parted / "glm4moe.gguf", parted / "mtp-glm4moe.gguf", further_drafts=("ngram",))


def test_layers_beside_a_target_are_found(folder: Path, parted: Path, tmp_path: Path) -> None:
    assert mtp_of(folder / "whole glm4moe.gguf") == "mtp"
    for architecture in ("glm4moe", "qwen35"):
        target = parted / f"{architecture}.gguf"
        assert mtp_of(target) == parted / f"mtp-{target.name}"
    target = tmp_path / "big-2.gguf"
    shutil.copy(parted / "glm4moe.gguf", target)
    assert mtp_of(target) is None
    for name in ("mtp-a.gguf", "mtp-big-2-Q8_0.gguf", "mtp-big-1-Q8_0.gguf"):
        shutil.copy(parted / "mtp-glm4moe.gguf", tmp_path / name)
    (tmp_path / "mtp-big-2.gguf").write_text("no model")
    assert mtp_of(target) == tmp_path / "mtp-big-2-Q8_0.gguf"


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35", "mimo2"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_layers_alone_draft_as_those_of_the_whole_model(
    folder: Path, parted: Path, architecture: str, temperature: float
) -> None:
    sampler = SamplerOptions(temperature=temperature, seed=4)
    # (The tiny model of this kind has a window in its MTP layers only, without which llama.cpp
    # refuses it.)
    target = f"parted/{architecture}" if architecture != "mimo2" else f"whole {architecture}"
    said = []
    for file, draft in (
        (f"whole {architecture}", "mtp"),
        (target, f"parted/mtp-{architecture}"),
        (target, "none"),
    ):
        with loaded(folder, file, draft, sampler=sampler, verifier="match") as session:
            events, finished = answered(session)
        said.append((finished.token_ids, list(drafts(events))))
    assert len(said[0][1]) > 5
    assert said[0] == said[1]
    assert said[2] == (said[0][0], [])


# --- the command line


@pytest.mark.parametrize(
    ("target", "draft", "notice"),
    [
        ("llama", ("-md", "whole"), ""),
        ("gemma4", ("-md", "assistant"), ""),
        ("whole glm4moe", (), "drafting with the target's own MTP layers"),
        ("parted/glm4moe", (), "drafting with mtp-glm4moe.gguf"),  # or not, if costs say so
    ],
)
def test_the_command_line_takes_and_finds_drafts(
    specgen: Specgen, folder: Path, parted: Path, target: str, draft: tuple[str, ...], notice: str
) -> None:
    given = [name if name.startswith("-") else str(folder / f"{name}.gguf") for name in draft]
    common = ("-m", str(folder / f"{target}.gguf"), "-n", "12", "--raw", PROMPT)
    drafted = specgen("run", *given, "--policy", "fixed", *common)
    plain = specgen("run", "--draft", "none", *common)
    assert (plain.code, drafted.code) == (0, 0)
    assert notice in drafted.err
    assert drafted.out == plain.out


# --- blocks


def test_a_block_drafts_chains_for_any_shape(folder: Path) -> None:
    with loaded(folder, draft="dflash letters", tree=TreeShape("levels", (3, 2))) as session:
        (note,) = session.notices(64)
        _, finished = answered(session)
        session.change_draft("none")
        assert finished.token_ids == answered(session)[1].token_ids
    assert note.endswith("drafting chains of 2 tokens")
    assert len(finished.drafted_by_depth) == 2
    assert finished.n_accepted > 0


@pytest.mark.parametrize("name", ["dflash letters", "spark"])
def test_no_more_is_drafted_than_a_block_holds(folder: Path, name: str) -> None:
    with loaded(folder, draft=name) as session:
        session.change_drafting(replace(session.options.drafting, max_tokens=16))
        events, _ = answered(session)
    longest = max(len(draft) for _, draft in drafts(events))
    assert longest == DFLASHES[name].n_block - (name == "dflash letters")
