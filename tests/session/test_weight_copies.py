"""Copies of draft models: made where they are quicker, kept, and given up where they are not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from specgen.errors import BackendError, MemoryLimitError
from specgen.events import CommittedEvent, PromptEvent
from specgen.llama import LlamaBackend, LlamaModel, requantize
from specgen.options import ContextOptions, DraftOptions, GenerationOptions, SessionOptions
from specgen.session.calibration import weight_copies as copies
from specgen.session.calibration.memory import Memory
from specgen.session.calibration.weight_copies import Comparison, Copies, distance_on
from specgen.session.engine import generate
from specgen.session.loaded_models import Models
from specgen.system.llama_build import Build
from tests.helpers.cli import Cli, events_of
from tests.tiny import TinyConfig, write_tiny_model

TARGET = TinyConfig(logit_scale=6.0, n_vocab=384, n_embd=64, tensor_type="f16")
CONTEXT = ContextOptions(n_threads=1)
PROMPT = "def add(a, b): return a + b # and the sum is the sum is"

#: Seconds of a batch, of the model's own weights and of a copy's.
Seconds = tuple[float, float]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are not worth a copy; here they are."""
    monkeypatch.delenv("SPECGEN_DRAFT_WEIGHTS")
    monkeypatch.setattr(copies, "LEAST_BYTES", 0)
    # With so few weights, they say something else in so few bits.
    monkeypatch.setattr(copies, "MOST_DISTANCE", 1.0)
    build = Build(version="", llama_version="", system_info="", gpu_offload=False, devices=())
    monkeypatch.setattr(copies, "build", lambda: build)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "draft.gguf", TARGET.draft(0.02))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "drafts"


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Let batches take so long: of the model's own weights, and of the copy's."""

    def set_seconds(own_s: float, copy_s: float) -> None:
        began: list[object] = []

        def begin(backend: object) -> list[int]:
            began.append(backend)
            return [0]

        def time_batch(backend: object, text: Sequence[int], n_rows: int) -> float:
            place = next(i for i, each in enumerate(began[-2:]) if each is backend)
            return n_rows * (own_s, copy_s)[place]

        monkeypatch.setattr(copies, "begin", begin)
        monkeypatch.setattr(copies, "time_batch", time_batch)

    set_seconds(2.0, 1.0)
    return set_seconds


def opened(folder: Path | None, memory: Memory) -> Copies:
    return Copies(folder, memory, time.perf_counter)


def compare(draft: Path, copies_: Copies, context: ContextOptions = CONTEXT) -> Comparison | None:
    with closing(LlamaModel(draft)) as model:
        return copies_.compare(model, context, PROMPT)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# --- a copy


def test_a_copy_is_the_same_model_in_fewer_bits(draft: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    requantize(draft, copy, 1)
    with closing(LlamaModel(draft)) as own, closing(LlamaModel(draft, weights=copy)) as other:
        assert other.size_bytes < 0.5 * own.size_bytes
        assert other.path == draft
        assert other.name == own.name
        assert other.vocabulary.digest() == own.vocabulary.digest()
        assert other.metadata("general.architecture") == own.metadata("general.architecture")


def test_what_cannot_be_copied_is_an_error(draft: Path, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.gguf"
    nonsense.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(BackendError, match="cannot requantise"):
        requantize(nonsense, tmp_path / "copy.gguf", 1)
    with pytest.raises(BackendError, match="cannot requantise"):
        requantize(draft, tmp_path / "no folder" / "copy.gguf", 1)


# --- whether one is taken


def test_a_quicker_copy_is_kept_and_taken(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    found = opened(folder, memory)
    assert found.of(draft, CONTEXT) is None
    compared = compare(draft, found)
    assert compared is not None
    assert compared.is_taken
    assert compared.share == pytest.approx(0.5)
    assert found.of(draft, CONTEXT) == compared.copy
    assert compared.copy.is_file()
    assert files(folder) == [compared.copy.name]
    assert compare(draft, found) is None, "it is known"
    assert opened(folder, memory).of(draft, CONTEXT) == compared.copy
    assert "draft.gguf" in compared.note
    assert "0.50" in compared.note
    assert "\n" not in compared.note


def test_a_slower_one_is_not_and_not_tried_again(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    takes(1.0, 0.9)  # quicker, but by less than what it says worse costs
    memory = Memory()
    compared = compare(draft, opened(folder, memory))
    assert compared is not None
    assert not compared.is_taken
    assert files(folder) == []
    takes(2.0, 1.0)
    again = opened(folder, memory)
    assert compare(draft, again) is None
    assert again.of(draft, CONTEXT) is None


def test_one_that_says_something_else_is_not_taken(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    monkeypatch.setattr(copies, "MOST_DISTANCE", 0.2)
    monkeypatch.setattr(copies, "distance_on", lambda own, other, text: 0.3)
    compared = compare(draft, opened(folder, memory))
    assert compared is not None
    assert not compared.is_taken
    assert files(folder) == []
    assert memory.weights(draft, CONTEXT) == "own"


def test_the_distance_is_that_of_what_may_come_next(tmp_path: Path) -> None:
    found = []
    for noise in (0.0, 0.02, 1.5):
        paths = [
            write_tiny_model(tmp_path / f"{noise}-{number}.gguf", config)
            for number, config in enumerate((TARGET, TARGET.draft(noise)))
        ]
        with contextlib.ExitStack() as stack:
            backends = []
            for path in paths:
                model = stack.enter_context(closing(LlamaModel(path)))
                backend = LlamaBackend(
                    model, CONTEXT, n_ctx=64, clock=time.perf_counter, n_outputs=7
                )
                backends.append(stack.enter_context(closing(backend)))
            own, other = backends
            found.append(distance_on(own, other, PROMPT))
    assert found[0] == 0.0
    assert 0.0 < found[1] < 0.2
    assert 0.7 < found[2] <= 1.0


def test_what_is_found_is_remembered_for_the_machine(
    draft: Path, folder: Path, tmp_path: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory(tmp_path / "learnt.json", {"cpu": "x"})
    compare(draft, opened(folder, memory))
    memory.write()
    same = Memory(tmp_path / "learnt.json", {"cpu": "x"})
    assert opened(folder, same).of(draft, CONTEXT) is not None
    other = opened(folder, Memory(tmp_path / "learnt.json", {"cpu": "y"}))
    assert other.of(draft, CONTEXT) is None, "another machine may have other favourites"
    assert compare(draft, other) is not None
    assert len(files(folder)) == 1


def test_a_used_copy_has_a_time_of_use_and_is_the_same_file(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    """Checks, trials and packed weights are remembered for the time of the file's last change."""
    memory = Memory()
    compare(draft, opened(folder, memory))
    copy = opened(folder, memory).of(draft, CONTEXT)
    assert copy is not None
    os.utime(copy, (1, 1))
    assert opened(folder, memory).of(draft, CONTEXT) == copy
    assert copy.stat().st_mtime == 1
    assert copy.stat().st_atime > 1


def test_another_model_of_the_same_name_has_a_copy_of_its_own(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    first = compare(draft, opened(folder, memory))
    write_tiny_model(draft, TARGET.draft(0.5))
    os.utime(draft, ns=(1, 1))
    found = opened(folder, memory)
    assert found.of(draft, CONTEXT) is None, "that copy is of what was there before"
    second = compare(draft, found)
    assert first is not None
    assert second is not None
    assert first.copy != second.copy


def test_a_copy_that_was_deleted_is_made_again(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    compare(draft, opened(folder, memory))
    shutil.rmtree(folder)
    found = opened(folder, memory)
    assert found.of(draft, CONTEXT) is None
    assert compare(draft, found) is not None
    assert found.of(draft, CONTEXT) is not None


def test_without_a_folder_there_are_none(
    draft: Path, takes: Callable[[float, float], None]
) -> None:
    found = opened(None, Memory())
    assert compare(draft, found) is None
    assert found.of(draft, CONTEXT) is None


@pytest.mark.parametrize(
    ("name", "value"), [("LEAST_BYTES", 10**9), ("_MOST_BYTES", 1000), ("_FREE", 1e18)]
)
def test_too_small_too_large_or_no_room(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: float,
) -> None:
    memory = Memory()
    with monkeypatch.context() as patched:
        patched.setattr(copies, name, value)
        assert compare(draft, opened(folder, memory)) is None
        assert files(folder) == []
    assert compare(draft, opened(folder, memory)) is not None, "nothing was decided"


def test_weights_on_a_gpu_are_left_alone(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = Build(version="", llama_version="", system_info="", gpu_offload=True, devices=())
    monkeypatch.setattr(copies, "build", lambda: build)
    assert compare(draft, opened(folder, Memory())) is None
    on_cpu = replace(CONTEXT, n_gpu_layers=0)
    assert compare(draft, opened(folder, Memory()), on_cpu) is not None


def test_one_that_cannot_be_made_is_not_tried_again(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(model: Path, copy: Path, n_threads: int) -> None:
        copy.write_bytes(b"half of it")
        raise BackendError("no such type")

    memory = Memory()
    with monkeypatch.context() as patched:
        patched.setattr(copies, "requantize", fail)
        assert compare(draft, opened(folder, memory)) is None
    assert files(folder) == []
    assert memory.weights(draft, CONTEXT) == "own"
    assert compare(draft, opened(folder, memory)) is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("requantize", OSError(errno.EIO, os.strerror(errno.EIO))),
        ("LlamaBackend", MemoryLimitError("a context of 128 tokens needs about 0.1 GiB")),
    ],
)
def test_a_failure_that_may_pass_is_forgotten_with_the_session(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    memory = Memory()
    told: list[str] = []
    found = Copies(folder, memory, time.perf_counter, told.append)
    with monkeypatch.context() as patched:
        patched.setattr(copies, name, fail)
        assert compare(draft, found) is None
    assert memory.weights(draft, CONTEXT) is None, "nothing was decided"
    assert compare(draft, found) is None
    assert len(told) == 1, "it is not tried again in this session"
    compared = compare(draft, opened(folder, memory))
    assert compared is not None
    assert compared.is_taken
    found.forget(draft, CONTEXT)
    assert compare(draft, found) is not None, "tuning tries anew"


def test_a_disk_that_becomes_full_decides_nothing(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage, free = shutil.disk_usage(draft.parent), [2**40]

    def fill(model: Path, copy: Path, n_threads: int) -> None:
        free.append(4096)
        raise BackendError("iostream error")  # all that llama.cpp says

    memory = Memory()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=free[-1]))
        patched.setattr(copies, "requantize", fill)
        assert compare(draft, opened(folder, memory)) is None
    assert files(folder) == []
    assert memory.weights(draft, CONTEXT) is None
    assert compare(draft, opened(folder, memory)) is not None


def test_a_copy_that_cannot_be_loaded_goes(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    compared = compare(draft, opened(folder, memory))
    assert compared is not None
    compared.copy.write_bytes(b"GGUF" + bytes(100))
    found = opened(folder, Memory())
    assert compare(draft, found) is None
    assert files(folder) == []
    found.forget(draft, CONTEXT)
    assert compare(draft, found) is not None, "another one is made"


@pytest.mark.skipif(sys.platform != "linux", reason="needs file names of any bytes")
def test_a_file_name_that_is_not_utf_8_is_no_obstacle(
    draft: Path, folder: Path, takes: Callable[[float, float], None]
) -> None:
    renamed = draft.rename(draft.with_name(os.fsdecode(b"caf\xe9.gguf")))
    memory = Memory()
    compared = compare(renamed, opened(folder, memory))
    assert compared is not None
    assert opened(folder, memory).of(renamed, CONTEXT) == compared.copy


def test_ctrl_c_leaves_nothing(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(model: Path, copy: Path, n_threads: int) -> None:
        copy.write_bytes(b"half of it")
        raise KeyboardInterrupt

    memory = Memory()
    with monkeypatch.context() as patched:
        patched.setattr(copies, "requantize", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(draft, opened(folder, memory))
    assert files(folder) == []
    assert compare(draft, opened(folder, memory)) is not None, "nothing was decided"


def test_those_not_used_for_longest_go(
    draft: Path,
    folder: Path,
    takes: Callable[[float, float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder.mkdir(parents=True)
    now = time.time()
    for name, age in (
        ("old.q4_0.gguf", 300),
        ("used.q4_0.gguf", 100),
        ("a.new", 9999),
        ("b.new", 9),
    ):
        (folder / name).write_bytes(bytes(1000))
        os.utime(folder / name, (now - age, now - age))
    (folder / "notes.txt").write_text("not ours")
    with closing(LlamaModel(draft)) as model:
        monkeypatch.setattr(copies, "MOST_KEPT_BYTES", model.size_bytes + 1500)
        compared = opened(folder, Memory()).compare(model, CONTEXT, PROMPT)
    assert compared is not None
    assert files(folder) == sorted(["b.new", compared.copy.name, "notes.txt", "used.q4_0.gguf"])


# --- on the command line


def test_the_command_line_says_once_what_it_made(
    cli: Cli, takes: Callable[[float, float], None]
) -> None:
    own = cli.run("--temp", "0", "--draft-weights", "own", PROMPT)
    assert own.code == 0
    assert "copy" not in own.err
    first = cli.run("--temp", "0", PROMPT)
    notes = [line for line in first.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "draft.gguf drafts from a copy in Q4_0" in notes[0]
    assert "--draft-weights own" in notes[0]
    again = cli.run("--temp", "0", PROMPT)
    assert again.code == 0
    assert "copy" not in again.err
    assert own.out == first.out == again.out != ""
    (told, *_) = events_of(cli.run("--json", PROMPT))
    assert told["draft_weights"] == "q4_0"
    (told, *_) = events_of(cli.run("--json", "--draft-weights", "own", PROMPT))
    assert told["draft_weights"] is None


def test_quiet_says_nothing_of_it(cli: Cli, takes: Callable[[float, float], None]) -> None:
    assert cli.run("--quiet", PROMPT).err == ""


# --- in a session


def session_options(tmp_path: Path, draft: Path, **drafting: object) -> SessionOptions:
    target = write_tiny_model(tmp_path / "target.gguf", TARGET)
    return SessionOptions(
        target=target,
        draft=draft,
        drafting=DraftOptions(policy="fixed", max_tokens=4, **drafting),  # type: ignore[arg-type]
        generation=GenerationOptions(max_tokens=40),
        cache=tmp_path / "cache",
    )


def answer(loaded: Models) -> tuple[str | None, str]:
    """The type of the weights that drafted, and the text."""
    events = list(generate(loaded, loaded.prompts.of_text(PROMPT), estimate_gain=False))
    told = next(event for event in events if isinstance(event, PromptEvent))
    return told.draft_weights, "".join(e.text for e in events if isinstance(e, CommittedEvent))


def test_a_session_drafts_from_the_copy_and_says_the_same(
    tmp_path: Path, draft: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    options = session_options(tmp_path, draft)
    told: list[str] = []
    with Models(options, time.perf_counter, memory, told.append) as loaded:
        assert told == ["comparing draft.gguf with a copy in Q4_0"]
        assert [copied.model for copied in loaded.drafts.copied] == ["draft.gguf"]
        assert loaded.costs.context_options(draft).weights == "q4_0"
        assert loaded.costs.context_options().weights is None
        table = loaded.costs.table(draft)
        with_copy = answer(loaded)
    with Models(options, time.perf_counter, memory) as loaded:
        assert loaded.drafts.copied == []
        assert answer(loaded) == with_copy
    own_options = session_options(tmp_path, draft, weights="own")
    with Models(own_options, time.perf_counter, memory) as loaded:
        assert loaded.costs.table(draft) is not table, "other weights have other costs"
        own = answer(loaded)
    assert with_copy[0] == "q4_0"
    assert own[0] is None
    assert with_copy[1] == own[1] != ""


def test_tuning_compares_anew(
    tmp_path: Path, draft: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    options = session_options(tmp_path, draft)
    takes(1.0, 2.0)
    with Models(options, time.perf_counter, memory) as loaded:
        assert loaded.drafts.copied == []
        assert len(loaded.drafts.compared) == 1
        takes(2.0, 1.0)
        loaded.change_draft(draft)
        assert len(loaded.drafts.compared) == 1, "it is known"
        loaded.costs.forget_weights(draft)
        loaded.change_draft(draft)
        assert len(loaded.drafts.copied) == 1
        assert loaded.costs.context_options(draft).weights == "q4_0"


def test_a_damaged_copy_is_thrown_away(
    tmp_path: Path, draft: Path, takes: Callable[[float, float], None]
) -> None:
    memory = Memory()
    options = session_options(tmp_path, draft)
    with Models(options, time.perf_counter, memory) as loaded:
        copy = loaded.drafts.copied[0].copy
        expected = answer(loaded)[1]
    copy.write_bytes(b"GGUF" + bytes(100))
    with Models(options, time.perf_counter, memory) as loaded:
        assert loaded.drafts.copied == [] or loaded.drafts.copied[0].copy.is_file()
        assert answer(loaded)[1] == expected


def test_a_session_that_keeps_nothing_makes_none(
    tmp_path: Path, draft: Path, takes: Callable[[float, float], None]
) -> None:
    options = replace(session_options(tmp_path, draft), cache=None)
    with Models(options, time.perf_counter) as loaded:
        assert loaded.drafts.copied == []
        assert answer(loaded)[0] is None
