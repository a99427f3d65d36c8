"""Fixtures of all tests: private directories, kernels, models, and the command line."""

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

# Threads that wait must not spin, because the test processes share the cores. llama.cpp's OpenMP
# runtime reads this only when it is loaded.
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

# No test may fail because the machine is busy. (If the variable CI is set, Hypothesis loads a
# profile with fixed examples by itself, so start from its default profile everywhere.)
_untimed = settings(
    settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
#: For `make fuzz`: searches for failing examples, new ones each time, and keeps them in
#: .hypothesis.
settings.register_profile("search", _untimed, print_blob=True)
#: For all other runs: the same examples each time.
settings.register_profile("fixed", _untimed, derandomize=True, database=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Make examples reproducible.

    Hypothesis also tries constants that it finds in our modules. Which modules have been imported
    depends on the tests that ran before in this process, so only the search uses these constants.
    """
    if config.getoption("--hypothesis-profile") != "search":
        setattr(HypothesisProvider, "_local_constants", Constants())  # noqa: B010 - it is a property


if TYPE_CHECKING:
    from specgen.llama.kernels.attached import Kernels

#: The environment before any test changed it. Real models are kept in the user's cache.
_ORIGINAL_ENVIRONMENT = dict(os.environ)


@pytest.fixture(scope="session", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Choose the kernels for the tests, before any test loads a model.

    These are the ones that users get: specgen's kernels if they can be used here, or those that
    SPECGEN_KERNELS names. Returns the folder with the result of their self-test.
    """
    from specgen.llama.kernels.admission import choose_kernels, wanted_in
    from specgen.llama.kernels.attached import ask_before_loading

    folder = tmp_path_factory.mktemp("kernels")
    choose_kernels(wanted_in(_ORIGINAL_ENVIRONMENT), folder)
    ask_before_loading(None)
    return folder


_self_tests: dict[tuple[Path, str], KernelVerdict] = {}


_run_self_test = KernelTests.self_test


def _self_test_once(tests: KernelTests, *, rerun: bool = False) -> KernelVerdict:
    """Run the self-test of the library that was built, but only once in this process."""
    if rerun or tests.library != library_path():
        return _run_self_test(tests, rerun=rerun)
    key = tests.library, os.environ.get(INSTRUCTIONS_VARIABLE, "")
    if key not in _self_tests:
        _self_tests[key] = _run_self_test(tests)
    return _self_tests[key]


@pytest.fixture(autouse=True)
def attached_kernels() -> Iterator[Kernels | None]:
    """specgen's kernels, or None if they cannot be used here.

    After each test they are enabled or disabled as before it, whatever the test chose.
    """
    from specgen.llama.kernels.attached import attached

    kernels = attached()
    if kernels is None:
        yield None
        return
    computed_products = kernels.computes_products
    computed_attention = kernels.computes_attention
    yield kernels
    kernels.enable(products=computed_products, attention=computed_attention)


@pytest.fixture
def kernels(attached_kernels: Kernels | None) -> Kernels:
    """specgen's kernels, enabled for this test. Skips the test if they cannot be used here."""
    if attached_kernels is None:
        pytest.skip("specgen's kernels cannot be used here")
    attached_kernels.enable(products=True, attention=True)
    return attached_kernels


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Paths of home folders, one for each test. They are created only when something is written.

    Creating a `tmp_path` for thousands of tests would take longer than many of the tests.
    """
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_directories(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tests from reading and writing the user's configuration, models and caches.

    Also remove what makes their results depend on the machine.
    """
    home = next(_homes)
    for name in ("SPECGEN_CACHE", "SPECGEN_DATA", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(home / name.lower()))
    # Other programs keep their models in the home directory.
    monkeypatch.setenv("HOME", str(home / "home"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    # Standard input is empty.
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    # A fixed draft length, because the decisions of the cost-aware policy depend on the machine.
    monkeypatch.setenv("SPECGEN_POLICY", "fixed")
    # Measurements are kept even if other programs use this machine.
    monkeypatch.setattr(machine, "core_time", lambda: None)
    # Progress is reported only at the end, however slow the machine is.
    monkeypatch.setattr(progress, "INTERVAL_S", math.inf)
    # Several test processes share the cores, so tests use one thread unless they ask for more.
    monkeypatch.setattr(native_context, "default_threads", lambda: 1)
    # The kernels' self-test takes a second, so it runs once per process.
    monkeypatch.setattr(KernelTests, "self_test", _self_test_once)
    # The kernels are not tried with each of the many test models.
    monkeypatch.setattr(admission, "ask_before_loading", lambda _ask: None)


@pytest.fixture
def tested_kernels(_kernels: Path, _own_directories: None) -> None:
    """Put the result of the kernels' self-test into this test's cache, for child processes."""
    result = _kernels / VERDICTS
    if result.exists():
        cache = Path(os.environ["SPECGEN_CACHE"])
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copy(result, cache)


@pytest.fixture
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no other program uses the machine, so that measurements are kept."""
    monkeypatch.setattr(machine, "share_of_others", lambda *_: 0.0)


@pytest.fixture
def quick_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numbers of threads be compared only briefly, because many are slow on a busy machine."""
    monkeypatch.setattr(threads, "THREADS_BUDGET_S", 0.05)
    monkeypatch.setattr(threads, "default_threads", lambda: 1)
    monkeypatch.setattr(threads, "thread_counts", lambda *_: [1, 2])


_TARGET = TinyConfig(logit_scale=6.0)
_BROKEN = TinyConfig(chat_template="{{ raise_exception('users only') }}")
#: A folder of tiny models: a target, a draft that often agrees with it, a bad draft that does not,
#: and others.
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
#: A folder of tiny models whose text is printable and on one line, with a context of 2048 tokens: a
#: target and a draft with a chat template, a draft with another vocabulary, and a target without a
#: template.
chat_models = folder_with("session", target=_CHAT, draft=_DRAFT, respelled=_DRAFT, plain=_PLAIN)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template, and with a context of 1024 tokens for long answers."""
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
    """SmolLM2-135M, downloaded into the user's cache on first use (98 MB)."""
    return _fetched("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, whose layers mostly have a sliding window of 512 tokens (253 MB)."""
    return _fetched("gemma-3-270m")


def _fetched(model: str) -> Path:
    """Download a real model into the user's cache, unless it is there, and return its path."""
    from specgen.models.download import fetch
    from specgen.models.registry import load_registry

    with pytest.MonkeyPatch.context() as environment:
        for name in ("SPECGEN_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
            if name in _ORIGINAL_ENVIRONMENT:
                environment.setenv(name, _ORIGINAL_ENVIRONMENT[name])
            else:
                environment.delenv(name, raising=False)
        return fetch(load_registry().model(model))


@pytest.fixture
def hub_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A local package index and hub, which receive all requests."""
    with web_server() as running:
        use_hub(monkeypatch, tmp_path, running)
        yield running
