"""The kernels are tried on a model in a child process before it is loaded, so that a crash does not
end specgen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader

from specgen.errors import ModelFileError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.kernels import admission
from specgen.llama.kernels.admission import KernelStatus
from specgen.llama.kernels.attached import Kernels
from specgen.llama.kernels.kernel_trial import try_kernels
from specgen.llama.kernels.skeleton import write_skeleton
from specgen.llama.kernels.verdicts import VERDICTS, KernelTests
from specgen.options import KernelChoice
from specgen.system import processes
from specgen.system.processes import ChildTimeoutError, ask_child
from tests.helpers.cli import python
from tests.helpers.common import linux
from tests.helpers.kernels import stand_in
from tests.llama.test_kernels import in_process
from tests.tiny import TinyConfig, write_tiny_model

PROMPT = "def add(a, b): return a + b"

#: A child that dies according to a table, which has for each model the number of steps that it
#: begins and the signal that ends it (0: none). It notes each run in a log.
_CHILD = """
import json, os, pathlib, sys
log, table, library, size, file, steps = sys.argv[1:]
with open(log, "a") as runs:
    print(size, file=runs)
n_steps, end = json.loads(table).get(size, [9, 0])
pathlib.Path(steps).write_text("".join(f"step {n}\\n" for n in range(1, n_steps + 1)))
if end:
    os.kill(os.getpid(), end)
print(json.dumps({"problem": ""}))
"""
SEGV, KILL = 11, 9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf", TinyConfig())


class Tried:
    """Trials of a library on a model, with child processes that die at given steps."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self.library = folder / "library.so"
        self.library.write_bytes(b"a library")
        self.cache = folder / "cache"
        self._log = folder / "log"
        self._log.write_text("")
        self.dying({})

    def dying(self, table: Mapping[str, Sequence[int]]) -> None:
        self._command = [*python(_CHILD), str(self._log), json.dumps(table)]

    @property
    def tests(self) -> KernelTests:
        """Those of another process, each time."""
        return KernelTests(self.library, self.cache, self._command)

    @property
    def runs(self) -> list[str]:
        return self._log.read_text().splitlines()


@pytest.fixture
def tried(tmp_path: Path, model: Path) -> Tried:
    return Tried(tmp_path, model)


# --- whether the kernels can compute a model ------------------------------------------------


@pytest.mark.parametrize(
    ("table", "problem", "n_runs"),
    [
        ({}, "", 1),
        # The kernels die: llama.cpp's code serves.
        ({"skeleton": [2, SEGV], "whole": [3, SEGV]}, "they died of SIGSEGV on step 3", 2),
        # A skeleton that llama.cpp cannot compute proves nothing.
        ({"skeleton": [2, SEGV]}, "", 2),
    ],
)
def test_llama_cpps_kernels_replace_those_that_crash(
    tried: Tried, table: dict[str, list[int]], problem: str, n_runs: int
) -> None:
    tried.dying(table)
    assert tried.tests.problem_of(tried.model) == problem
    assert tried.runs == ["skeleton", "whole"][:n_runs]
    assert [path.name for path in tried.cache.iterdir()] == [VERDICTS]


@pytest.mark.parametrize("is_hanging", [True, False], ids=["hanging", "held up once"])
def test_a_hanging_child_process_is_retried_and_then_a_dead_one(
    tried: Tried, monkeypatch: pytest.MonkeyPatch, is_hanging: bool
) -> None:
    n_asked = 0

    def slow(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
        nonlocal n_asked
        answer = ask_child(command, timeout_s)
        n_asked += 1
        if n_asked == 1 or is_hanging:
            raise ChildTimeoutError("no answer within 120 s")
        return answer

    tried.dying({"skeleton": [3, 0], "whole": [3, 0]})
    monkeypatch.setattr(processes, "ask_child", slow)
    problem = "no answer within 120 s on step 3" if is_hanging else ""
    assert tried.tests.problem_of(tried.model) == problem


def test_a_child_that_something_else_killed_decides_nothing(tried: Tried) -> None:
    """As the system does if memory runs out."""
    tried.dying({"skeleton": [1, KILL], "whole": [1, KILL]})
    tests = tried.tests
    assert tests.problem_of(tried.model) == ""
    n_before = len(tried.runs)
    tests.problem_of(tried.model)
    assert len(tried.runs) == 2 * n_before


def test_a_child_that_cannot_be_started_decides_nothing(tried: Tried) -> None:
    not_started = KernelTests(tried.library, tried.cache, ["/missing/python"])
    assert not_started.problem_of(tried.model) == ""
    tried.dying({"skeleton": [2, SEGV], "whole": [3, SEGV]})
    assert tried.tests.problem_of(tried.model) == "they died of SIGSEGV on step 3"


# --- stored results -------------------------------------------------------------------------


def test_a_model_is_tried_again_if_any_of_its_files_changes(tried: Tried, tmp_path: Path) -> None:
    parts = [tmp_path / f"large-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"a part")
    for content, n_runs in ((b"a part", 1), (b"another part", 2), (b"another part", 2)):
        if parts[1].read_bytes() != content:
            parts[1].write_bytes(content)
        tried.tests.problem_of(parts[0])
        assert len(tried.runs) == n_runs


def test_a_model_is_tried_once(tried: Tried) -> None:
    tried.dying({"skeleton": [2, SEGV], "whole": [2, SEGV]})
    for rerun, n_runs in ((False, 2), (False, 2), (True, 4)):
        assert tried.tests.problem_of(tried.model, rerun=rerun)
        assert len(tried.runs) == n_runs
    write_tiny_model(tried.model, replace(TinyConfig(), n_head_kv=1))
    assert tried.tests.problem_of(tried.model)
    assert len(tried.runs) == 6


# --- skeletons ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        TinyConfig(n_layer=12),
        TinyConfig(n_layer=12, n_vocab=5000, tensor_type="q8_0"),
        TinyConfig(architecture="qwen2", n_layer=9),
        TinyConfig(architecture="gemma3", n_layer=10, sliding_window=16),
        TinyConfig(architecture="lfm2", n_layer=12),
        TinyConfig(architecture="jamba", n_layer=12),
        TinyConfig(architecture="mamba2", n_layer=12),
        TinyConfig(architecture="qwen35", n_layer=12),
    ],
    ids=lambda config: f"{config.architecture}-{config.tensor_type}",
)
def test_llama_cpp_computes_a_skeleton_as_it_does_the_model(
    tmp_path: Path, config: TinyConfig
) -> None:
    model = write_tiny_model(tmp_path / "model.gguf", config)
    file = tmp_path / "skeleton.gguf"
    write_skeleton(model, file)
    assert n_layers(file) == 8
    steps = list(try_kernels(file, lambda: 0.0))
    assert steps[0] == "loading it"
    assert steps == list(try_kernels(model, lambda: 0.0))


def n_layers(file: Path) -> int:
    reader = GGUFReader(file)
    (count,) = (field for name, field in reader.fields.items() if name.endswith(".block_count"))
    found = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name[:4] == "blk."}
    assert found == {str(layer) for layer in range(count.contents())}
    return len(found)


def test_layers_that_predict_more_tokens_are_kept(tmp_path: Path) -> None:
    config, metadata = TinyConfig(n_layer=12), {"llama.nextn_predict_layers": 1}
    model = write_tiny_model(tmp_path / "model.gguf", config, metadata=metadata)
    write_skeleton(model, tmp_path / "skeleton.gguf")
    assert n_layers(tmp_path / "skeleton.gguf") == 9


# --- loading --------------------------------------------------------------------------------


@linux
def test_kernels_that_die_in_a_trial_are_off_for_the_model(tmp_path: Path, model: Path) -> None:
    """With a library that ends the process once its products are on, and one that does not."""
    dies = stand_in(tmp_path / "dies", macros=["PRODUCTS_DIE"])
    assert KernelTests(dies, tmp_path / "cache").problem_of(model) == "they died of SIGABRT"
    fine = stand_in(tmp_path / "fine")
    loading = """
import json, sys
from pathlib import Path
from specgen.llama import LlamaModel
from specgen.llama.kernels import attached

library, model = map(Path, sys.argv[1:])
kernels = attached.attach(library)
found = []
for told in ("", "they died", ""):
    attached.ask_before_loading(lambda _file: told)
    loaded = LlamaModel(model)
    kernels.enable(products=True, attention=True)
    problem = loaded.loaded.kernel_problem
    found.append([loaded.kernels, problem, loaded.has_equal_rows, kernels.computes_attention])
    loaded.close()
print(json.dumps(found))
"""
    assert in_process(loading, str(fine), str(model)) == [
        ["specgen avx2", "", True, True],
        ["llama.cpp", "they died", False, False],
        ["specgen avx2", "", False, False],  # attention is the same for all
    ]


def test_a_file_that_cannot_be_loaded_is_not_the_kernels_fault(
    tmp_path: Path, kernels: Kernels
) -> None:
    path = write_tiny_model(tmp_path / "half.gguf", TinyConfig(), keep_fraction=0.5)
    assert KernelTests(kernels.path, tmp_path / "cache").problem_of(path) == ""
    with pytest.raises(ModelFileError):
        LlamaModel(path)


@linux
def test_every_choice_of_kernels_tries_models(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[Path], str]] = []
    status = KernelStatus("specgen", "avx2", path=tried.library)
    monkeypatch.setattr(admission, "library_path", lambda: tried.library)
    monkeypatch.setattr(admission, "examine_kernels", lambda *_args, **_options: status)
    monkeypatch.setattr(admission, "attach", lambda _path: SimpleNamespace(instructions="avx2"))
    monkeypatch.setattr(admission, "ask_before_loading", asked.append)
    tried.dying({"skeleton": [1, SEGV], "whole": [1, SEGV]})
    assert tried.tests.problem_of(tried.model)  # the verdict is kept from now on
    wanted: list[KernelChoice] = ["auto", "specgen", "llama.cpp"]
    for each in wanted:
        admission.choose_kernels(each, tried.cache)
    auto, required = asked
    assert auto(tried.model)
    with pytest.raises(UsageError):
        required(tried.model)
