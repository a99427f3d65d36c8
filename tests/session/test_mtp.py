"""A target's own MTP layers: whether a file has some, and what drafts with them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specgen.drafters.mtp import MtpChainDrafter
from specgen.drafters.states import LayerDrafter
from specgen.errors import ModelFileError, PairError, UsageError
from specgen.events import FinishedEvent
from specgen.llama import LlamaBackend
from specgen.llama.draft_contexts import MtpContext
from specgen.llama.mtp_layers import mtp_of, why_no_mtp
from specgen.measure.trial import read_states
from specgen.method.backend import Batch
from specgen.method.draft import Draft
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    Grammar,
    SamplerOptions,
    SessionOptions,
    parse_tree,
)
from specgen.session.engine import Engine
from specgen.session.session import Session
from specgen.text.hidden_trail import HiddenTrail
from tests.helpers.cli import Specgen
from tests.helpers.mtp import MtpArchitecture, split_mtp_model, write_mtp_model
from tests.helpers.states_drafts import PROMPT, answer, watched_drafts
from tests.tiny import TinyConfig, write_tiny_model

ARCHITECTURES: tuple[MtpArchitecture, ...] = ("glm4moe", "qwen35", "mimo2")
CONTEXT = ContextOptions(n_threads=1)
FIXED = DraftOptions(
    policy="fixed", max_tokens=3, p_min=0.0, tree=parse_tree("off"), ngrams=False, verifier="match"
)

with_every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
with_one_and_several_layers = pytest.mark.parametrize("architecture", ["glm4moe", "mimo2"])


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    for architecture in ARCHITECTURES:
        write_mtp_model(folder / f"{architecture}.gguf", architecture, of_state=0.3)
    return folder


@contextmanager
def loaded(
    file: Path,
    sampler: SamplerOptions | None = None,
    draft: DraftSource = "mtp",
    **generation: Any,
) -> Iterator[Session]:
    options = SessionOptions(
        target=file,
        draft=draft,
        sampler=sampler or SamplerOptions(temperature=0.0),
        drafting=FIXED,
        generation=GenerationOptions(**{"max_tokens": 40, "ignore_eos": True, **generation}),
        target_context=CONTEXT,
        draft_context=CONTEXT,
    )
    with Session(options, time.perf_counter) as models:
        yield models


def plain(models: Session, prompt: str = PROMPT) -> FinishedEvent:
    models.change_draft("none")
    return answer(models, prompt)


# --- files


def test_what_has_no_layers_says_why(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "plain.gguf", TinyConfig())
    write_mtp_model(tmp_path / "removed.gguf", keep_layer=False)
    unknown = {"llama.nextn_predict_layers": 1}
    write_tiny_model(tmp_path / "unknown.gguf", TinyConfig(), metadata=unknown)
    (tmp_path / "text.gguf").write_text("text")
    assert why_no_mtp(tmp_path / "plain.gguf") == "it has no MTP layers"
    assert why_no_mtp(tmp_path / "unknown.gguf") == "its MTP layers were removed from the file"
    assert why_no_mtp(tmp_path / "text.gguf") == "it is not a GGUF file"
    with pytest.raises(PairError, match=r"removed.gguf: its MTP layers were removed"):
        Session(SessionOptions(target=tmp_path / "removed.gguf", draft="mtp"), time.perf_counter)


# --- files of layers alone


@pytest.fixture(scope="session")
def parted(files: Path) -> Path:
    """Each model in two files: without its MTP layers, and these alone."""
    folder = files / "parted"
    folder.mkdir()
    for architecture in ARCHITECTURES:
        target = folder / f"{architecture}.gguf"
        split_mtp_model(files / target.name, target, folder / f"mtp-{target.name}")
    return folder


@with_every_architecture
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_layers_alone_draft_as_those_of_the_whole_model(
    files: Path,
    parted: Path,
    architecture: MtpArchitecture,
    temperature: float,
    proposed: dict[tuple[int, ...], Draft],
) -> None:
    name = f"{architecture}.gguf"
    sampler = SamplerOptions(temperature=temperature, seed=4)
    # (The tiny model of this kind has a window in its MTP layers only, without which llama.cpp refuses it.)
    target = (files if architecture == "mimo2" else parted) / name
    said = []
    pairs: list[tuple[Path, DraftSource]] = [
        (files / name, "mtp"),
        (target, parted / f"mtp-{name}"),
    ]
    for file, draft in pairs:
        with loaded(file, sampler=sampler, draft=draft) as models:
            proposed.clear()
            tokens = answer(models).token_ids
            said.append((tokens, {text: each.tokens for text, each in proposed.items()}))
            assert plain(models).token_ids == tokens
    assert len(said[0][1]) > 5
    assert said[0] == said[1]


def test_layers_that_do_not_fit_are_refused(parted: Path, tmp_path: Path) -> None:
    layers = parted / "mtp-glm4moe.gguf"

    def opened(target: Path, **changed: Any) -> Session:
        options = SessionOptions(target=target, **{"draft": layers, **changed})
        return Session(options, time.perf_counter)

    with pytest.raises(PairError, match="its MTP layers are of a glm4moe, not of a qwen35"):
        opened(parted / "qwen35.gguf")
    wide = write_mtp_model(tmp_path / "wide.gguf", n_embd=96, n_ff=128)
    with pytest.raises(PairError, match="reads hidden states of 64 values, the target's have 96"):
        opened(wide)
    other = write_mtp_model(tmp_path / "other.gguf", tokenizer="spm")
    with pytest.raises(PairError, match="mtp-glm4moe.gguf cannot draft for other.gguf"):
        opened(other)
    with pytest.raises(ModelFileError, match="MTP layers, and not the model that they belong to"):
        opened(layers, draft="none")
    with pytest.raises(UsageError, match="takes no draft of its own"):
        opened(parted / "glm4moe.gguf", helpers=("ngram",))


def test_layers_beside_a_target_are_found(files: Path, parted: Path, tmp_path: Path) -> None:
    assert mtp_of(files / "glm4moe.gguf") == "mtp"
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


# --- drafts


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], Draft]:
    """What was drafted behind each text."""
    return watched_drafts(monkeypatch, LayerDrafter, MtpChainDrafter)


def drafted_anew(models: Session, text: Sequence[int], n: int) -> list[int]:
    """The likeliest tokens behind a text, each from an empty cache: all rows in one batch, those of the text with
    the target's states, the others with the states of what drafted the token before."""
    with models.contexts(512) as (target, (draft,)):
        assert isinstance(draft, MtpContext)
        trail = HiddenTrail(512)
        read_states(target, text[:-1], trail)
        states = [trail.after(position - 1) for position in range(len(text))]
        tokens: list[int] = []
        while len(tokens) < n:
            whole = [*text, *tokens]
            batch = Batch()
            for position, token in enumerate(whole):
                batch.add(token, position, (0,), position == len(whole) - 1)
                batch.hidden.append(states[position])
            layer = draft.layers[min(len(tokens), len(draft.layers) - 1)]
            layer.remove(0)
            tokens.append(int(layer.decode(batch)[-1].argmax()))
            states.append(layer.state(0))
        return tokens


@with_every_architecture
def test_drafts_are_what_the_whole_text_anew_gives(
    files: Path, architecture: MtpArchitecture, proposed: dict[tuple[int, ...], Draft]
) -> None:
    """Whatever was accepted, dropped or read before."""
    with loaded(files / f"{architecture}.gguf") as models:
        said = answer(models)
        assert said.n_drafted > said.n_accepted > 0
        assert len(proposed) > 5
        for text, draft in proposed.items():
            assert len(draft)
            assert list(draft.tokens) == drafted_anew(models, text, len(draft))


@with_every_architecture
def test_prefixes_and_answers_at_once_change_no_draft(
    files: Path, architecture: MtpArchitecture, proposed: dict[tuple[int, ...], Draft]
) -> None:
    prompts = [f"{PROMPT}{more}" for more in ("", " a", " a b", "", " c", " a b c")]
    with loaded(files / f"{architecture}.gguf", max_tokens=12) as models:
        with Engine(models, n_parallel=2, n_ctx=128) as engine:
            said = engine.answers(prompts)
        n_checked = 0
        for text, draft in list(proposed.items())[::3]:
            anew = drafted_anew(models, text, max(1, len(draft)))
            n_checked += anew[: len(draft)] == list(draft.tokens)
        # Where a kept text goes on, one state is missing: a few drafts may differ.
        assert n_checked >= 0.8 * len(range(0, len(proposed), 3))
        models.change_draft("none")
        with Engine(models, n_parallel=2, n_ctx=128) as engine:
            assert engine.answers(prompts) == said


def test_no_row_is_decoded_twice_and_no_logits_go_unread(
    files: Path, monkeypatch: pytest.MonkeyPatch, proposed: dict[tuple[int, ...], Draft]
) -> None:
    batches: list[Batch] = []
    decode = LlamaBackend.decode

    def watched(self: LlamaBackend, batch: Batch) -> Any:
        if isinstance(self, MtpContext):
            batches.append(batch.part(0, len(batch)))
        return decode(self, batch)

    monkeypatch.setattr(LlamaBackend, "decode", watched)
    with loaded(files / "glm4moe.gguf") as models:
        answer(models)
    n_read = max(len(text) for text in proposed)
    n_drafted = sum(len(draft) - 1 for draft in proposed.values())
    assert sum(len(batch) for batch in batches) == n_read + n_drafted
    assert all(sum(batch.wants_logits) == 1 for batch in batches)


@with_one_and_several_layers
def test_a_grammar_holds(files: Path, architecture: MtpArchitecture) -> None:
    grammar = Grammar("gbnf", 'root ::= ("ab" [c-h] "---" [a-h]){12}')
    with loaded(files / f"{architecture}.gguf", grammar=grammar, ignore_eos=False) as models:
        fast = answer(models)
        assert fast.n_forced > 0
        assert fast.n_drafted > 0
        assert fast.token_ids == plain(models).token_ids


# --- the command line


def test_the_command_line_finds_the_layers(
    files: Path, specgen: Specgen, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(files / "glm4moe.gguf")
    found = specgen("run", "-m", target, "-n", "8", "--raw", PROMPT)
    assert found.code == 0
    assert "drafting with the target's own MTP layers" in found.err
    named = specgen("run", "-m", target, "--draft", "mtp", "-n", "8", "--raw", PROMPT)
    assert named.out == found.out


def test_the_command_line_finds_layers_beside_the_target(parted: Path, specgen: Specgen) -> None:
    target = str(parted / "glm4moe.gguf")
    found, named, without = (
        specgen("run", "-m", target, *draft, "--policy", "fixed", "-n", "8", "--raw", PROMPT)
        for draft in ((), ("--draft", "mtp"), ("--draft", "none"))
    )
    assert "drafting with mtp-glm4moe.gguf" in found.err  # or not drafting, if costs say so
    assert "acceptance rate" in named.err
    assert found.out == named.out == without.out
