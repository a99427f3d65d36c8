"""What every test gets: directories of its own, and models to run."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

# Threads that wait for each other do not take the processor from another worker's; llama.cpp's
# runtime reads this once, when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from specgen.llama import native_context
from specgen.llama.kernels import admission
from specgen.llama.kernels.admission import library_path
from specgen.llama.kernels.verdicts import (
    INSTRUCTIONS_VARIABLE,
    VERDICTS,
    KernelTests,
    KernelVerdict,
)
from specgen.measure import threads
from specgen.system import machine, progress
from tests.helpers.cli import Cli, Specgen, in_process
from tests.helpers.fetch import WebServer, use_hub, web_server
from tests.helpers.sessions import folder_with
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

# How busy the machine is fails no test. (Where the variable CI is set, Hypothesis itself loads a
# profile that takes fixed examples: start from its default in both places.)
_untimed = settings(
    settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
#: `make fuzz` looks for examples that fail, other ones each time, and keeps what it finds in
#: .hypothesis.
settings.register_profile("search", _untimed, print_blob=True)
#: All else takes the same examples each time.
settings.register_profile("fixed", _untimed, derandomize=True, database=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis also tries the constants of our modules that are imported so far, which depend on
    the tests that ran before in this process. Leave them to the search."""
    if config.getoption("--hypothesis-profile") != "search":
        setattr(HypothesisProvider, "_local_constants", Constants())  # noqa: B010 - it is a property


if TYPE_CHECKING:
    from specgen.llama.kernels.attached import Kernels

#: The environment before any test touched it: real models are kept in the user's own cache.
_OWN_ENVIRONMENT = dict(os.environ)


@pytest.fixture(scope="session", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Who computes in tests is who computes for users: specgen's kernels where they can be used, or
    what the user's own SPECGEN_KERNELS asks for. They have to be attached before any test loads a
    model. Returns the folder that has the result of their self-test."""
    from specgen.llama.kernels.admission import choose_kernels, wanted_in
    from specgen.llama.kernels.attached import ask_before_loading

    folder = tmp_path_factory.mktemp("kernels")
    choose_kernels(wanted_in(_OWN_ENVIRONMENT), folder)
    ask_before_loading(None)
    return folder


_self_tests: dict[tuple[Path, str], KernelVerdict] = {}


_run_self_test = KernelTests.self_test


def _self_test_once(tests: KernelTests, *, rerun: bool = False) -> KernelVerdict:
    """The verdict on the library that was built, which is tested once in this process."""
    if rerun or tests.library != library_path():
        return _run_self_test(tests, rerun=rerun)
    key = tests.library, os.environ.get(INSTRUCTIONS_VARIABLE, "")
    if key not in _self_tests:
        _self_tests[key] = _run_self_test(tests)
    return _self_tests[key]


@pytest.fixture(autouse=True)
def attached_kernels() -> Iterator[Kernels | None]:
    """specgen's kernels, if they can be used here. After each test they are switched on or off as
    they were before it, whatever its command lines chose."""
    from specgen.llama.kernels.attached import attached

    found = attached()
    if found is None:
        yield None
        return
    before = found.computes_products, found.computes_attention
    yield found
    found.enable(products=before[0], attention=before[1])


@pytest.fixture
def kernels(attached_kernels: Kernels | None) -> Kernels:
    """specgen's kernels, switched on for this test."""
    if attached_kernels is None:
        pytest.skip("specgen's kernels cannot be used here")
    attached_kernels.enable(products=True, attention=True)
    return attached_kernels


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each test, which is there once something is written to it: thousands of
    `tmp_path` take longer to make than many tests."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_directories(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's configuration, models or caches."""
    home = next(_homes)
    for name in ("SPECGEN_CACHE", "SPECGEN_DATA", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    # Other programs keep their models in the home directory.
    monkeypatch.setenv("HOME", str(home / "home"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    # Nothing is piped into the commands.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    # A fixed draft length, because what the cost-based policy decides depends on the machine.
    monkeypatch.setenv("SPECGEN_POLICY", "fixed")
    # Measurements are kept whatever else runs on this machine.
    monkeypatch.setattr(machine, "core_time", lambda: None)
    # Progress is reported at the end only, however slow the machine is.
    monkeypatch.setattr(progress, "INTERVAL_S", math.inf)
    # Several test processes share the cores, so a test that wants more than one thread says so.
    monkeypatch.setattr(native_context, "default_threads", lambda: 1)
    # The kernels' self-test takes a second: run it once per process.
    monkeypatch.setattr(KernelTests, "self_test", _self_test_once)
    # The kernels are not tried out on each of the many test models.
    monkeypatch.setattr(admission, "ask_before_loading", lambda _ask: None)


@pytest.fixture
def tested_kernels(_kernels: Path, _own_directories: None) -> None:
    """The kernels' self-test is known in this test's cache: child processes need not make it."""
    result = _kernels / VERDICTS
    if result.exists():
        cache = Path(os.environ["SPECGEN_CACHE"])
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copy(result, cache)


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs, other tests among them, take nothing of the machine: what is measured is
    kept.
    """
    monkeypatch.setattr(machine, "share_of_others", lambda *_: 0.0)


@pytest.fixture
def quick_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are compared, but not for long: many are slow on a machine that is busy."""
    monkeypatch.setattr(threads, "THREADS_BUDGET_S", 0.05)
    monkeypatch.setattr(threads, "default_threads", lambda: 1)
    monkeypatch.setattr(threads, "thread_counts", lambda *_: [1, 2])


_TARGET = TinyConfig(logit_scale=6.0)
_BROKEN = TinyConfig(chat_template="{{ raise_exception('users only') }}")
#: A folder of tiny models: target, draft (close to it), bad (not), chat, other, bert.
tiny_models = folder_with(
    "session",
    target=_TARGET,
    draft=_TARGET.draft(0.02),
    bad=_TARGET.draft(1.5),
    chat=dataclasses.replace(_TARGET, chat_template=CHATML_TEMPLATE),
    other=TinyConfig(tokenizer="spm"),
    bert=TinyConfig(architecture="bert"),
    **{"broken template": _BROKEN},
)
_PLAIN = TinyConfig(logit_scale=6.0, n_ctx_train=2048, unprintable_scale=0.0)
_CHAT = dataclasses.replace(_PLAIN, chat_template=CHATML_TEMPLATE)
_DRAFT = _CHAT.draft(0.02)
#: A folder with a target and a draft that have a chat template and say what is printable and in one
#: line, a draft with another vocabulary, and a target without a template; all have room for 2048
#: tokens.
chat_models = folder_with("session", target=_CHAT, draft=_DRAFT, respelled=_DRAFT, plain=_PLAIN)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template, and with room for long answers: 1024 tokens."""
    config = TinyConfig(logit_scale=6.0, chat_template=CHATML_TEMPLATE, n_ctx_train=1024)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "t.gguf", config)


@pytest.fixture
def specgen(capsys: pytest.CaptureFixture[str]) -> Specgen:
    """Runs the command line in this process."""
    return in_process(capsys)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny_models: Path
) -> Cli:
    """Runs `specgen run` in this process, on tiny models."""
    return Cli(capsys, monkeypatch, tiny_models)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M, fetched into the user's own cache on first use (98 MB)."""
    return _fetched("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, most of whose layers have a sliding window of 512 tokens (253 MB)."""
    return _fetched("gemma-3-270m")


def _fetched(model: str) -> Path:
    """A real model in the user's own cache."""
    from specgen.models.download import fetch
    from specgen.models.registry import load_registry

    with pytest.MonkeyPatch.context() as environment:
        for name in ("SPECGEN_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
            if name in _OWN_ENVIRONMENT:
                environment.setenv(name, _OWN_ENVIRONMENT[name])
            else:
                environment.delenv(name, raising=False)
        return fetch(load_registry().model(model))


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A package index and hub, to which all requests go."""
    with web_server() as running:
        use_hub(monkeypatch, tmp_path, running)
        yield running
