"""The kernels are tried on a model in a child process before it is loaded: what kills them there does not kill
specgen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specgen.errors import BackendError, ModelFileError, UsageError
from specgen.llama import LlamaModel
from specgen.llama.kernel_checks import choice
from specgen.llama.kernel_checks.choice import KernelStatus
from specgen.llama.kernel_checks.model_support import FILE_NAME, ModelTrials
from specgen.llama.kernel_trial import skeleton_of, try_kernels
from specgen.llama.kernels import Kernels, KernelSupport, ask_before_loading
from specgen.system import child_process
from specgen.system.child_process import ChildTimeoutError, ask_child
from tests.helpers.cli import Cli
from tests.helpers.common import linux
from tests.helpers.kernels import stand_in
from tests.llama.test_kernels import in_process, python
from tests.tiny import TinyConfig, write_tiny_model

ALL = KernelSupport()
PROMPT = "def add(a, b): return a + b"

#: A child that dies as a table says: by its library's name, products and attention, the number of steps that it
#: begins and the signal that ends it (0: none). It notes each run in a log.
_CHILD = """
import json, os, pathlib, sys
log, table, library, file, steps, products, attention = sys.argv[1:]
key = (products + attention) if library else "plain"
with open(log, "a") as runs:
    print(key, pathlib.Path(file).name, file=runs)
n_steps, end = json.loads(table).get(key, [9, 0])
pathlib.Path(steps).write_text("".join(f"step {n}\\n" for n in range(1, n_steps + 1)))
if end:
    os.kill(os.getpid(), end)
print(json.dumps({"problem": ""}))
"""
SEGV, KILL = 11, 9


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model.gguf", TinyConfig())


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "library.so"
    path.write_bytes(b"a library")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("")
    return path


def dying(log: Path, table: Mapping[str, Sequence[int]] | None = None) -> list[str]:
    """The command of a child that dies as a table says."""
    return [*python(_CHILD), str(log), json.dumps(table or {})]


def runs(log: Path) -> list[str]:
    """What was tried: the kernels that were on, and the file."""
    return log.read_text().splitlines()


# --- which kernels can compute a model ------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "support", "tried"),
    [
        ({}, ALL, ["11"]),
        # The products die: llama.cpp's serve, and the kernels' attention.
        ({"11": [2, SEGV]}, KernelSupport(products=False), ["11", "plain", "01"]),
        (
            {"11": [2, SEGV], "01": [2, SEGV]},
            KernelSupport(products=False, attention=False),
            ["11", "plain", "01", "00"],
        ),
        # With attention alone it gets as far as llama.cpp, which dies of something else later.
        (
            {"11": [2, SEGV], "01": [7, SEGV], "plain": [7, SEGV]},
            KernelSupport(products=False),
            ["11", "plain", "01"],
        ),
        # llama.cpp dies where the kernels do: they are not the reason.
        ({"11": [7, SEGV], "plain": [7, SEGV]}, ALL, ["11", "plain"]),
    ],
)
def test_what_dies_is_left_to_llama_cpp(
    tmp_path: Path,
    model: Path,
    library: Path,
    log: Path,
    table: dict[str, list[int]],
    support: KernelSupport,
    tried: list[str],
) -> None:
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, table))
    found = trials.support_for(model)
    if support != ALL:
        assert found.problem == "they died of SIGSEGV on step 2"
    assert replace(found, problem="") == support
    assert runs(log) == [f"{kernels} skeleton.gguf" for kernels in tried]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [FILE_NAME]


def test_a_skeleton_that_llama_cpp_cannot_compute_proves_nothing(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    table = {"11": [2, SEGV], "plain": [2, SEGV]}
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, table))
    assert trials.support_for(model) == ALL
    assert [line.split()[1] for line in runs(log)] == 2 * ["skeleton.gguf"] + 2 * ["model.gguf"]


def test_a_model_that_only_a_process_without_kernels_computes_is_refused(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    table = {kernels: [2, SEGV] for kernels in ("11", "01", "00")}
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, table))
    for _ in range(2):
        with pytest.raises(BackendError, match="SIGSEGV on step 2") as caught:
            trials.support_for(model)
        assert "--kernels llama.cpp" in (caught.value.hint or "")
    assert len(runs(log)) == 4


def test_kernels_that_are_required_are_an_error_where_they_die(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    child = dying(log, {"11": [2, SEGV]})
    trials = ModelTrials(library, tmp_path / "cache", required=True, child=child)
    with pytest.raises(UsageError, match="cannot compute this model: they died of SIGSEGV"):
        trials.support_for(model)


def test_a_hanging_child_is_a_dead_one(
    tmp_path: Path, model: Path, library: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def hanging(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
        answer = ask_child(command, timeout_s)
        if command[-2] == "1":  # products
            raise ChildTimeoutError("no answer within 120 s")
        return answer

    monkeypatch.setattr(child_process, "ask_child", hanging)
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, {"11": [3, 0]}))
    problem = "no answer within 120 s on step 3"
    assert trials.support_for(model) == KernelSupport(products=False, problem=problem)


def test_a_child_that_was_held_up_once_is_asked_again(
    tmp_path: Path, model: Path, library: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up: list[str] = []

    def slow_once(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
        if not held_up:
            held_up.append("here")
            raise ChildTimeoutError("no answer within 120 s")
        return ask_child(command, timeout_s)

    monkeypatch.setattr(child_process, "ask_child", slow_once)
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, {}))
    assert trials.support_for(model) == ALL
    assert len(runs(log)) == 1


def test_a_child_that_something_else_killed_decides_nothing(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    """As the system does if memory runs out."""
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log, {"11": [1, KILL]}))
    assert trials.support_for(model) == ALL
    n_before = len(runs(log))
    trials.support_for(model)
    assert len(runs(log)) == 2 * n_before


# --- what is remembered ---------------------------------------------------------------------


def test_a_model_is_tried_once(tmp_path: Path, model: Path, library: Path, log: Path) -> None:
    cache, child = tmp_path / "cache", dying(log, {"11": [2, SEGV]})
    first = ModelTrials(library, cache, child=child).support_for(model)
    assert len(runs(log)) == 3
    again = ModelTrials(library, cache, child=child)  # as the next process does
    assert again.support_for(model) == first
    other = write_tiny_model(tmp_path / "other.gguf", TinyConfig(seed=1, name="another"))
    assert again.support_for(other) == first  # the same make
    assert len(runs(log)) == 3
    assert again.try_anew(model) == first.problem
    assert len(runs(log)) == 6


@pytest.mark.parametrize(
    "changes", [{"tensor_type": "q8_0"}, {"n_head_kv": 1}, {"architecture": "qwen2"}]
)
def test_a_model_of_another_make_is_tried(
    tmp_path: Path, model: Path, library: Path, log: Path, changes: dict[str, Any]
) -> None:
    trials = ModelTrials(library, tmp_path / "cache", child=dying(log))
    trials.support_for(model)
    write_tiny_model(model, replace(TinyConfig(), **changes))
    trials.support_for(model)
    assert len(runs(log)) == 2


def test_other_kernels_are_tried_again(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    ModelTrials(library, tmp_path / "cache", child=dying(log)).support_for(model)
    library.write_bytes(b"another library")
    ModelTrials(library, tmp_path / "cache", child=dying(log)).support_for(model)
    assert len(runs(log)) == 2


@pytest.mark.parametrize("content", ["", "nonsense", "[]", '{"results": 1}'])
def test_a_damaged_cache_costs_a_trial(
    tmp_path: Path, model: Path, library: Path, log: Path, content: str
) -> None:
    file = tmp_path / "cache" / FILE_NAME
    file.parent.mkdir()
    file.write_text(content)
    for _ in range(2):
        ModelTrials(library, file.parent, child=dying(log)).support_for(model)
    assert len(runs(log)) == 1
    document = json.loads(file.read_text())
    file.write_text(json.dumps({"results": {key: {"products": 1} for key in document["results"]}}))
    assert ModelTrials(library, file.parent, child=dying(log)).support_for(model) == ALL
    assert len(runs(log)) == 2


def test_a_cache_that_cannot_be_written_costs_a_trial_in_each_process(
    tmp_path: Path, model: Path, library: Path, log: Path
) -> None:
    cache = tmp_path / "file"
    cache.write_text("no folder")
    for n_runs in (1, 2):
        trials = ModelTrials(library, cache, child=dying(log))
        for _ in range(2):
            assert trials.support_for(model) == ALL
        assert len(runs(log)) == n_runs


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
    skeleton = skeleton_of(model)
    assert skeleton is not None
    assert skeleton.n_layers == 8
    file = tmp_path / "skeleton.gguf"
    skeleton.write(file)
    steps = list(try_kernels(file, lambda: 0.0))
    assert steps[0] == "loading it"
    assert steps == list(try_kernels(model, lambda: 0.0))


def test_layers_that_predict_more_tokens_are_kept(tmp_path: Path) -> None:
    config, metadata = TinyConfig(n_layer=12), {"llama.nextn_predict_layers": 1}
    skeleton = skeleton_of(write_tiny_model(tmp_path / "model.gguf", config, metadata=metadata))
    assert skeleton is not None
    assert skeleton.n_layers == 9
    assert b"blk.8.attn_q.weight" in skeleton.metadata
    assert b"blk.9." not in skeleton.metadata


def test_a_skeleton_is_small(tmp_path: Path) -> None:
    config = TinyConfig(n_embd=512, n_ff=4096, n_layer=12)
    model = write_tiny_model(tmp_path / "model.gguf", config)
    skeleton = skeleton_of(model)
    assert skeleton is not None
    assert skeleton.n_layers < 8
    assert skeleton.n_bytes < model.stat().st_size


def test_what_is_no_model_has_no_skeleton(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    model.rename(path)  # the second part is not there
    assert skeleton_of(path) is None
    path = tmp_path / "text.gguf"
    path.write_text("no model")
    assert skeleton_of(path) is None


# --- loading --------------------------------------------------------------------------------


@linux
def test_kernels_that_die_in_a_trial_are_off_for_the_model(tmp_path: Path, model: Path) -> None:
    """With a library that ends the process once its products are on, and one that does not."""
    dies = stand_in(tmp_path / "dies", macros=["PRODUCTS_DIE"])
    trials = ModelTrials(dies, tmp_path / "cache")
    assert trials.support_for(model) == KernelSupport(
        products=False, problem="they died of SIGABRT"
    )
    fine = stand_in(tmp_path / "fine")
    loading = """
import json, sys
from pathlib import Path
from specgen.llama import LlamaModel, kernels

library, model = map(Path, sys.argv[1:])
attached = kernels.attach(library)
found = []
for support in (
    kernels.KernelSupport(),
    kernels.KernelSupport(products=False, problem="they died"),
    kernels.KernelSupport(products=False, attention=False, problem="they died"),
    kernels.KernelSupport(),
):
    kernels.ask_before_loading(lambda _file: support)
    loaded = LlamaModel(model)
    attached.enable(products=True, attention=True)
    found.append([loaded.kernels, loaded.kernel_problem, loaded.has_equal_rows, attached.computes_attention])
    loaded.close()
print(json.dumps(found))
"""
    assert in_process(loading, str(fine), str(model)) == [
        ["specgen avx2", "", True, True],
        ["llama.cpp", "they died", False, True],
        ["llama.cpp", "they died", False, False],
        ["specgen avx2", "", False, False],  # attention is the same for all
    ]


def test_a_model_is_tried_with_the_kernels_that_were_built(
    tmp_path: Path, model: Path, kernels: Kernels
) -> None:
    trials = ModelTrials(kernels.path, tmp_path / "cache")
    assert trials.support_for(model) == ALL
    assert json.loads((tmp_path / "cache" / FILE_NAME).read_text())["results"]


def test_a_file_that_cannot_be_loaded_is_not_the_kernels_fault(
    tmp_path: Path, kernels: Kernels
) -> None:
    path = write_tiny_model(tmp_path / "half.gguf", TinyConfig(), keep_fraction=0.5)
    assert ModelTrials(kernels.path, tmp_path / "cache").support_for(path) == ALL
    with pytest.raises(ModelFileError):
        LlamaModel(path)


@pytest.fixture
def unsupported(kernels: Kernels) -> Iterator[None]:
    """All models are ones on which the kernels died."""
    assert kernels.computes_products
    problem = "they died of SIGSEGV on loading it"
    ask_before_loading(lambda _file: KernelSupport(products=False, problem=problem))
    yield
    ask_before_loading(None)


@pytest.mark.usefixtures("unsupported")
def test_a_run_says_that_llama_cpp_serves(cli: Cli) -> None:
    plain = cli.run(PROMPT, "--kernels", "llama.cpp")
    result = cli.run(PROMPT)
    assert (result.code, result.out) == (0, plain.out)
    for model in ("target.gguf", "draft.gguf"):
        note = f"note: {model}: llama.cpp's own code computes this model"
        (said,) = [line for line in result.err.splitlines() if line.startswith(note)]
        assert "they died of SIGSEGV on loading it" in said
        assert "`specgen doctor -m` tries again" in said
    assert "kernels" not in plain.err
    assert "died" not in cli.run(PROMPT, "--quiet").err


@linux
def test_every_choice_of_kernels_tries_models(
    tmp_path: Path, model: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModelTrials] = []
    status = KernelStatus("specgen", "avx2", path=library)
    monkeypatch.setattr(choice, "library_path", lambda: library)
    monkeypatch.setattr(choice, "examine_kernels", lambda *_args, **_options: status)
    attached = SimpleNamespace(instructions="avx2")
    monkeypatch.setattr("specgen.llama.kernels.attach", lambda _path: attached)
    monkeypatch.setattr(choice, "try_models", made.append)
    child = dying(tmp_path / "log", {"11": [1, SEGV]})
    choice.choose_kernels("auto", tmp_path, trial=child)
    choice.choose_kernels("specgen", tmp_path, trial=child)
    choice.choose_kernels("llama.cpp", tmp_path, trial=child)
    auto, required = made
    assert auto.support_for(model).problem
    with pytest.raises(UsageError):
        required.support_for(model)


# --- the doctor -----------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["", "they died of SIGSEGV on loading it"])
def test_the_doctor_tries_the_kernels_on_the_model(
    monkeypatch: pytest.MonkeyPatch, model: Path, problem: str
) -> None:
    from specgen.llama import kernel_checks as kernels
    from specgen.measure import doctor

    status = KernelStatus("specgen", "avx2", path=Path("library"), tested="all is well")
    monkeypatch.setenv("SPECGEN_KERNELS", "auto")
    monkeypatch.setattr(kernels, "examine_kernels", lambda *_args, **_options: status)
    monkeypatch.setattr(doctor, "TENSOR_TYPES", ())
    monkeypatch.setattr(ModelTrials, "try_anew", lambda _self, _file: problem)
    last = doctor.diagnose(model).checks[-1]
    assert last.name == "specgen's kernels on model.gguf"
    assert last.passed == (not problem)
    if problem:
        assert last.message == problem
        assert "report" in (last.hint or "")
