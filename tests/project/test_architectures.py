"""The checks of all architectures, on specgen's own tiny models, and the code that runs them.

`make architectures` runs the same checks on all of llama.cpp's architectures, and needs its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from specgen.errors import ModelFileError
from specgen.llama.kernels.attached import Kernels
from tests.architectures import exceptions, run
from tests.architectures.checks import CHECKS, CheckFailedError, Subject
from tests.architectures.exceptions import EXCEPTIONS, KnownException, exception_for
from tests.architectures.run import Result
from tests.tiny import Architecture, TensorType, TinyConfig, write_tiny_model

ARCHITECTURES = tuple(name for name in get_args(Architecture) if name != "bert")
WINDOW = 32


def tiny(folder: Path, architecture: Architecture, kind: TensorType) -> Subject:
    """A tiny model, a draft that agrees with it every other time, and one of other weights."""
    window = WINDOW if architecture in {"gemma3", "lfm2"} else 0
    config = TinyConfig(architecture=architecture, tensor_type=kind, sliding_window=window)
    return Subject(
        path=write_tiny_model(folder / "target.gguf", config),
        near=write_tiny_model(folder / "near.gguf", config.draft(0.1)),
        wrong=write_tiny_model(folder / "wrong.gguf", TinyConfig(seed=9)),
        kernels=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tiny_model_passes_all_checks(
    kernels: Kernels, tmp_path: Path, architecture: Architecture, kind: TensorType
) -> None:
    subject = tiny(tmp_path, architecture, kind)
    for check in CHECKS.values():
        check(subject)


def test_an_encoder_is_refused(kernels: Kernels, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        CHECKS["load"](tiny(tmp_path, "bert", "f32"))


@pytest.mark.parametrize("check", ["rows", "fuzz"])
def test_rows_that_depend_on_the_batch_fail(kernels: Kernels, tmp_path: Path, check: str) -> None:
    """llama.cpp's own code does not make the same bits."""
    subject = tiny(tmp_path, "llama", "f32")
    kernels.enable(products=False, attention=False)
    allowed: dict[str, Any] = {} if check == "rows" else {"_allowed": lambda _backend: 0.0}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in allowed.items():
            patched.setattr(f"tests.architectures.checks.{name}", value)
        with pytest.raises(CheckFailedError, match="batches of 8|a row moved"):
            CHECKS[check](subject)


def test_every_check_runs_in_the_child() -> None:
    assert tuple(CHECKS) == run.CHECKS
    assert run.CHECKS[0] == "load"


# --- a crash ends one check


def test_the_death_of_a_child_process_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child process really dies, because there is no such check."""
    monkeypatch.setattr(run, "CHECKS", ("nonsense", "load"))
    monkeypatch.setattr(run, "KINDS", ("f32",))
    monkeypatch.setattr(run, "WHO", ("llama.cpp",))
    write_tiny_model(tmp_path / "m-f32.gguf", TinyConfig())
    dead, alive = run.results_of("m", tmp_path, tmp_path / "cache")
    said = "ended with 1: KeyError: 'nonsense'"
    assert (dead.check, dead.ok, dead.detail) == ("nonsense", False, said)
    assert (alive.check, alive.ok, alive.can_branch) == ("load", True, True)


# --- known exceptions


def test_failures_are_known_exceptions_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownException(("a", "b"), ("rows",), "reason")
    monkeypatch.setattr(exceptions, "EXCEPTIONS", (known,))
    monkeypatch.setattr(run, "EXCEPTIONS", (known,))
    cases = (("a", "rows", False), ("a", "fuzz", False), ("b", "rows", True))
    results = [Result(name, "f32", "specgen", check, ok, "why") for name, check, ok in cases]
    assert list(run.unexpected(results)) == ["a, f32, computed by specgen: fuzz fails: why"]
    assert list(run.unnecessary(results)) == ["b: rows works: remove it from the known exceptions"]


def test_the_exceptions_are_about_checks_that_there_are() -> None:
    for each in EXCEPTIONS:
        assert set(each.checks) <= {"make", *run.CHECKS}
        assert each.reason
    assert exception_for("clip", "specgen", "make")
    assert not exception_for("llama", "specgen", "rows")
