"""specgen's kernels: they are attached if they work, not used otherwise, and reported."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import UsageError
from specgen.llama.kernels import admission, verdicts
from specgen.llama.kernels.attached import Kernels, ggml_version
from specgen.llama.kernels.verdicts import VERDICTS, KernelTests, KernelVerdict
from specgen.system.folders import cache_folder
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION
from tests.helpers.cli import Cli, complaint, ended, events_of, python
from tests.helpers.common import ROOT, linux
from tests.helpers.kernels import stand_in

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b): return a + b"
PASSED = KernelVerdict("passed", "all is well", "avx2")


def answering(answer: KernelVerdict, log: Path | None = None) -> list[str]:
    """A child that gives an answer without testing anything, and notes each time it does."""
    noting = f"open({str(log)!r}, 'a').write('tested\\n'); " if log else ""
    return python(f"{noting}print({json.dumps(asdict(answer))!r})")


def in_process(program: str, *arguments: str) -> Any:
    """Run a program in a separate process, because kernels are attached for the whole process.

    Returns the JSON that it prints.
    """
    answer = ended(*arguments, code=program, timeout_s=300.0)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


ATTACH = """
import json, sys
from pathlib import Path
from specgen.llama.kernels import attached as kernels
from specgen.errors import BackendError

found = [kernels.computing()]
for path in sys.argv[1:]:
    try:
        attached = kernels.attach(Path(path))
    except BackendError as error:
        found.append(error.message)
        continue
    found += [kernels.computing(), attached.counts().n_products]
    attached.enable(products=False, attention=True)
    found += [kernels.computing(), attached.counts().n_products]
print(json.dumps(found))
"""


# --- attaching ------------------------------------------------------------------------------


@linux
def test_a_library_is_attached_once_and_switched_off_and_on(tmp_path: Path) -> None:
    path = str(stand_in(tmp_path))
    once = ["specgen avx2", 11, "llama.cpp", 1]
    assert in_process(ATTACH, path, path) == ["llama.cpp", *once, *once]


@linux
def test_the_reason_why_a_library_cannot_be_attached_is_reported(tmp_path: Path) -> None:
    refusing = stand_in(tmp_path / "a", problem="they are for ggml 0.0.0")
    incomplete = stand_in(tmp_path / "b", macros=["INCOMPLETE"])
    whole = stand_in(tmp_path / "c")
    empty = tmp_path / "empty.so"
    empty.write_bytes(b"")
    second = stand_in(tmp_path / "d")
    paths = [refusing, incomplete, empty, tmp_path / "missing.so", whole, second]
    _, *reasons, other = in_process(ATTACH, *map(str, paths))
    assert reasons[0] == "they are for ggml 0.0.0"
    assert "cannot be loaded" in reasons[1]
    assert "specgen_kernels_enable" in reasons[1]
    assert "cannot be loaded" in reasons[2]
    assert "cannot be loaded" in reasons[3]
    assert reasons[4] == "specgen avx2"
    assert "other kernels are attached" in other


# --- the self-test --------------------------------------------------------------------------


def self_tested(library: Path, folder: Path) -> KernelVerdict:
    return KernelTests(library, folder / "cache").self_test()


@linux
@pytest.mark.parametrize("is_fitting", [True, False])
def test_a_library_that_refuses_is_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fitting: bool
) -> None:
    """The error about a library for another llama.cpp tells how to get the right one."""
    built_for = [f'BUILT_FOR="{ggml_version()}"'] if is_fitting else []
    library = stand_in(tmp_path, problem="the reason", macros=built_for)
    monkeypatch.setattr(admission, "library_path", lambda: library)
    for _ in range(2):  # the second time as remembered
        status = admission.choose_kernels("auto", tmp_path / "cache")
        assert status.reason == "the reason"
        assert not status.is_broken
        assert status.hint is not None
        assert "--kernels llama.cpp" in status.hint
        assert (REBUILD in status.hint) == (not is_fitting)


@linux
def test_the_kernels_are_for_the_required_llama_cpp(tmp_path: Path) -> None:
    path = admission.library_path()
    if path is None:
        pytest.skip("the kernels were not built")
    assert path == ROOT / "specgen" / "llama" / "libspecgen-kernels.so"
    assert importlib.metadata.version("llama-cpp-python").partition("+")[0] == REQUIRED_VERSION
    library = ctypes.CDLL(str(path))
    library.specgen_kernels_built_for.restype = ctypes.c_char_p
    assert library.specgen_kernels_built_for().decode() == ggml_version()
    result = self_tested(path, tmp_path)
    assert result.outcome in ("passed", "refused"), result
    assert bool(result.instructions) == (result.outcome == "passed")


@linux
@pytest.mark.parametrize("n_bytes", [0, 100, 3000, 9000])
def test_a_truncated_library_does_not_pass(tmp_path: Path, n_bytes: int) -> None:
    path = stand_in(tmp_path)
    path.write_bytes(path.read_bytes()[:n_bytes])
    result = self_tested(path, tmp_path)  # it may be mapped beyond its end: SIGBUS
    assert result.outcome != "passed"
    assert "loaded" in result.message or "SIGBUS" in result.message


@linux
def test_a_crash_is_a_failed_test(tmp_path: Path) -> None:
    result = self_tested(stand_in(tmp_path, macros=["DIES"]), tmp_path)
    assert result.outcome == "failed"
    assert "SIGABRT" in result.message


# --- remembering ----------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that passes for the library, and no kernels in this process."""
    path = tmp_path / "libspecgen-kernels.so"
    path.write_bytes(b"a library")
    monkeypatch.setattr(admission, "library_path", lambda: path)
    return path


def n_tests(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_result_is_remembered_until_something_changes(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"

    def tested(*, rerun: bool = False) -> KernelVerdict:
        return KernelTests(library, cache, answering(PASSED, log)).self_test(rerun=rerun)

    for n in (1, 1):
        assert tested() == PASSED
        assert n_tests(log) == n
    with monkeypatch.context() as changed:
        changed.setenv(verdicts.INSTRUCTIONS_VARIABLE, "avx2")
        tested()
    with monkeypatch.context() as changed:
        changed.setattr(verdicts, "processor", lambda: "another CPU")
        tested()
    assert n_tests(log) == 3
    for content, n in ((b"another library", 4), (b"a library", 4)):
        library.write_bytes(content)
        tested()
        assert n_tests(log) == n
    tested(rerun=True)
    assert n_tests(log) == 5


@pytest.mark.parametrize(
    "command",
    [python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), ["/missing/python"]],
    ids=["killed", "not started"],
)
def test_a_self_test_that_something_else_stopped_is_not_remembered(
    tmp_path: Path, library: Path, command: list[str]
) -> None:
    """The system kills a process or starts none if memory runs out."""
    cache = tmp_path / "cache"
    assert KernelTests(library, cache, command).self_test().outcome == "failed"
    assert KernelTests(library, cache, answering(PASSED)).self_test() == PASSED


def test_a_broken_file_is_written_again(tmp_path: Path, library: Path) -> None:
    file, log = tmp_path / VERDICTS, tmp_path / "log"

    def tested(cache: Path) -> KernelVerdict:
        return KernelTests(library, cache, answering(PASSED, log)).self_test()

    file.write_text("nonsense")
    for _ in range(2):
        tested(tmp_path)
    assert n_tests(log) == 1
    document = json.loads(file.read_text())
    damaged: list[object] = [[], {"outcome": "passed", "message": 1}]
    for broken in damaged:
        document["results"] = dict.fromkeys(document["results"], broken)
        file.write_text(json.dumps(document))
        assert tested(tmp_path) == PASSED
    assert n_tests(log) == 3
    # A cache that cannot be written remembers nothing.
    assert tested(log).outcome == "passed"


# --- choosing -------------------------------------------------------------------------------


def test_a_library_that_was_not_built_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "library_path", lambda: None)
    status = admission.choose_kernels("auto", tmp_path)
    assert status.label == "llama.cpp"
    assert status.reason
    assert status.path is None
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "macosx-14.0-arm64")
    assert (
        admission.choose_kernels("auto", tmp_path).reason == "there are none for macosx-14.0-arm64"
    )
    with pytest.raises(UsageError, match="there are none for macosx"):
        admission.choose_kernels("specgen", tmp_path)
    assert admission.choose_kernels("llama.cpp", tmp_path).computes == "llama.cpp"


@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_kernels_that_fail_the_self_test_are_not_used(
    tmp_path: Path, library: Path, outcome: str
) -> None:
    KernelTests(library, tmp_path, answering(KernelVerdict(outcome, "the reason"))).self_test()
    status = admission.choose_kernels("auto", tmp_path)
    assert status.computes == "llama.cpp"
    assert status.path == library
    assert status.reason is not None
    assert "the reason" in status.reason
    assert status.is_broken == (outcome == "failed")
    with pytest.raises(UsageError, match="the reason") as caught:
        admission.choose_kernels("specgen", tmp_path)
    assert caught.value.hint is not None
    assert "--kernels llama.cpp" in caught.value.hint


# --- the command line -----------------------------------------------------------------------


@pytest.fixture
def refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are there, and not for this machine."""
    verdict = KernelVerdict("refused", "they are for ggml 0.0.0")
    KernelTests(library, cache_folder(), answering(verdict)).self_test()
    monkeypatch.setenv("SPECGEN_KERNELS", "auto")


def test_kernels_that_were_not_built_are_noted_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "library_path", lambda: None)
    for wanted, times in (("llama.cpp", 0), ("auto", 1), ("auto", 0)):
        result = cli.run(PROMPT, "--kernels", wanted)
        assert result.code == 0
        assert result.err.count("not using specgen's kernels: they were not built") == times
        assert result.err.count("SPECGEN_KERNELS_BUILD=required") == times
    told = events_of(cli.run(PROMPT, "--json"))[0]
    assert told["kernels"] == "llama.cpp"


@pytest.mark.usefixtures("refused")
def test_unusable_kernels_are_reported_once_and_an_error_if_requested(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli.run(PROMPT)
    assert result.code == 0
    assert result.err.count("note: not using specgen's kernels: they are for ggml 0.0.0\n") == 1
    for quiet in (("--quiet",), ("--kernels", "llama.cpp")):
        assert "kernels" not in cli.run(PROMPT, *quiet).err
    said = complaint(cli.run(PROMPT, "--kernels", "specgen"), 2)
    assert said.startswith("error: specgen's kernels cannot be used: they are for ggml 0.0.0")
    monkeypatch.setenv("SPECGEN_KERNELS", "specgen")
    assert complaint(cli.run(PROMPT), 2) == said


def test_measurements_are_stored_separately_for_each_kind_of_kernels(
    tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specgen.options import ContextOptions
    from specgen.session.measurement_store import Threads
    from specgen.session.open import open_measurements

    model, context = tmp_path / "model.gguf", ContextOptions()
    model.write_bytes(b"model")
    monkeypatch.setenv("SPECGEN_CACHE", str(tmp_path))
    known = open_measurements()
    known.keep_threads(model, context, Threads(2, 3))
    known.costs(model, context).table().set_seconds(1, 0.5)
    known.save()
    again = open_measurements()
    assert again.threads(model, context) == Threads(2, 3)
    assert again.costs(model, context).table()
    kernels.enable(products=False, attention=False)
    other = open_measurements()
    assert other.threads(model, context) is None
    assert not other.costs(model, context).table()
