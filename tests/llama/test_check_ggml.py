"""scripts/check_ggml.py finds differences between the kernels' declarations and GGML's headers.

The headers are those of the required llama-cpp-python, downloaded once (scripts/ggml_source.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_ggml, ggml_source
from scripts.build_kernels import BuildError
from specgen.llama.kernels.admission import library_path
from specgen.system.llama_build import REQUIRED_VERSION

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernels are for Linux"
)


@pytest.fixture(scope="module")
def source() -> Path:
    """The source of the required llama-cpp-python."""
    return ggml_source.fetch(REQUIRED_VERSION)


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A copy of the kernels that a test may change."""
    return shutil.copytree(check_ggml.KERNELS, tmp_path / "kernels")


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file.name} has {old!r} {text.count(old)} times"
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_the_kernels_declare_what_ggml_has(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_ggml.main(["--source", str(source)])
    version = ggml_source.ggml_version(source)
    assert capsys.readouterr().out == f"kernels/ggml/ggml_internals.h agrees with ggml {version}\n"


MORE = "    virtual void more() = 0;"
WORK_SIZE = "    virtual bool work_size"
#: Changes of the declarations: the old text, the new text, and the message about it. The changes of
#: a group are compiled together, since none of them hides another.
WRONG = {
    "sizes and types": [
        ("int32_t flags;", "int32_t flags, more;", "ggml_tensor has another size"),
        ("int ith;  //", "int more, ith;  //", "ggml_compute_params::ith is elsewhere"),
        ("bool (*is_host)", "int (*is_host)", "is_host has another type"),
        ("backend_api_version = 2", "backend_api_version = 3", "have another interface"),
        ("n_ggml_types = ", "n_ggml_types = 1 + ", "more or fewer types"),
        ('built_for_ggml[] = "', 'built_for_ggml[] = "1', "another version of ggml"),
    ],
    # These are compared only if everything else agrees.
    "virtual functions": [
        (WORK_SIZE, f"{MORE}\n{WORK_SIZE}", "compute_forward is elsewhere in ggml's virtual"),
    ],
}


@pytest.mark.parametrize("group", WRONG)
def test_a_wrong_declaration_is_found(source: Path, kernels: Path, group: str) -> None:
    for old, new, _ in WRONG[group]:
        replace(kernels / "ggml" / "ggml_internals.h", old, new)
    with pytest.raises(BuildError) as caught:
        check_ggml.check(source, kernels)
    for _, _, complaint in WRONG[group]:
        assert complaint in caught.value.output


# --- another version at run time --------------------------------------------------------------

#: GGML's libraries, which the kernels find by their names in a process that has loaded them.
LIBRARIES = ("libggml-base.so.0", "libggml-cpu.so.0")
ATTACH = """
import ctypes, json, sys
*ggml, kernels = (ctypes.CDLL(path) for path in sys.argv[1:])
kernels.specgen_kernels_problem.restype = ctypes.c_char_p
kernels.ggml_backend_init.restype = ctypes.c_void_p
print(json.dumps([kernels.ggml_backend_init(), kernels.specgen_kernels_problem().decode()]))
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            'extern "C" const char *ggml_version() { return "9.8.7"; }',
            "they are for ggml {version}, and llama.cpp has ggml 9.8.7",
        ),
        ("", "they are for ggml {version}, and llama.cpp's has no function ggml_version"),
        (None, "they are for ggml {version}, and its libraries "),
    ],
)
def test_another_ggml_is_refused_by_name(
    source: Path, tmp_path: Path, code: str | None, reason: str
) -> None:
    library = library_path()
    if library is None:
        pytest.skip("the kernels were not built")
    loaded = []
    for name in LIBRARIES if code is not None else ():
        file = tmp_path / f"{name}.cpp"
        path = tmp_path / name
        file.write_text(code or "")
        command = ["c++", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path), str(file)]
        subprocess.run(command, check=True, timeout=120)
        loaded.append(str(path))
    answer = subprocess.run(
        [sys.executable, "-c", ATTACH, *loaded, str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    registration, problem = json.loads(answer.stdout)
    assert registration is None
    assert problem.startswith(reason.format(version=ggml_source.ggml_version(source)))
