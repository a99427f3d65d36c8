"""Write random models of all architectures that llama.cpp supports, for `make architectures`.

llama.cpp's own tests create such models (`tests/test-llama-archs.cpp`). scripts/random_models.cpp
includes that source and is linked to the installed llama.cpp, so only one file is compiled, which
takes seconds. The source is the one that the installed llama-cpp-python was built from::

    python -m scripts.build_architectures FOLDER [--source FOLDER]

These files are written to FOLDER, unless they are already there:

- `NAME-f32.gguf` and `NAME-q4_k.gguf` for each architecture (1.3 GB in total);
- one architecture with another seed in `other-seed/`, as a draft that is always wrong;
- `models.json`: the version of llama-cpp-python, and for each architecture the reason why llama.cpp
  cannot create a model of it, or "".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts import build_kernels, build_peers, build_rpc
from specgen.errors import FetchError
from tests.tiny import CHATML_TEMPLATE, TinyConfig, write_tiny_model

SOURCE = Path(__file__).with_name("random_models.cpp")
STAMP = "models.json"
LLAMA = "vendor/llama.cpp"
#: The folders of headers, below llama.cpp's folder.
INCLUDED = (".", "include", "ggml/include", "common", "src")
SEED = 1
OTHER_SEED = 2
#: The architecture that is also written with the other seed, as a draft that is always wrong.
OTHER = "llama"
#: The seconds that one model may take. Most take a tenth of that.
TIMEOUT_S = 120


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Write models of all of llama.cpp's architectures."
    )
    parser.add_argument("folder", type=Path, help="where to write the models")
    parser.add_argument(
        "--source", type=Path, help="an unpacked llama-cpp-python of the installed version"
    )
    arguments = parser.parse_args(argv)
    try:
        build(arguments.folder.resolve(), arguments.source)
    except build_kernels.BuildError as error:
        sys.exit(f"{error.output}the models were not written: {error}")
    except build_peers.BuildError as error:
        sys.exit(f"the models were not written: {error}")
    except FetchError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"the models were not written: {error.message}{hint}")


def build(folder: Path, source: Path | None = None) -> None:
    """Write the models into `folder`, unless they are there.

    Raises:
        BuildError: The one of scripts/build_kernels.py, or the one of scripts/build_peers.py.
        FetchError: The source cannot be downloaded.
    """
    version = build_peers.installed_version()
    generator_sha = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    stamp = {"version": version, "generator": generator_sha}
    if is_built(folder, stamp):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        root = source if source is not None else build_peers.fetch(version, Path(work))
        generator = compile_generator(root, Path(work))
        vocabulary = write_tiny_model(
            folder / "vocabulary.gguf",
            TinyConfig(name="vocabulary", chat_template=CHATML_TEMPLATE),
        )
        names = build_kernels.run([str(generator), "list"]).split()
        build_kernels.say(f"writing models of {len(names)} architectures into {folder}")
        (folder / "other-seed").mkdir(exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            reasons = list(
                pool.map(lambda name: write(generator, name, SEED, vocabulary, folder), names)
            )
        reason = write(generator, OTHER, OTHER_SEED, vocabulary, folder / "other-seed")
        if reason:
            raise build_kernels.BuildError(f"{OTHER}: {reason}")
    models = dict(zip(names, reasons, strict=True))
    text = json.dumps({**stamp, "models": models}, indent=1)
    (folder / STAMP).write_text(text + "\n", encoding="utf-8")


def is_built(folder: Path, stamp: dict[str, str]) -> bool:
    """Whether `folder` already has the models that would be written."""
    try:
        existing = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(existing, dict) or any(existing.get(key) != stamp[key] for key in stamp):
        return False
    written = [name for name, reason in existing["models"].items() if not reason]
    return all((folder / f"{name}-q4_k.gguf").is_file() for name in written)


def compile_generator(root: Path, work: Path) -> Path:
    """Compile and link the generator. Raises `BuildError`."""
    llama = root / LLAMA
    tests = llama / "tests" / "test-llama-archs.cpp"
    if not tests.is_file():
        raise build_kernels.BuildError(f"{tests} is missing")
    command = build_kernels.compiler(os.environ)
    native = build_rpc.native_folder()
    generator = work / "random_models"
    build_kernels.say(f"building llama.cpp's generator of models with {shlex.join(command)}")
    build_kernels.run(
        [
            *command,
            # -O1 removes the unused parts of the tests, which would otherwise have to be linked.
            *("-std=c++17", "-O1", "-w"),
            *(f"-I{llama / name}" for name in INCLUDED),
            str(SOURCE),
            *("-o", str(generator)),
            *(f"-L{native}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{native}"),
        ]
    )
    return generator


def write(generator: Path, name: str, seed: int, vocabulary: Path, folder: Path) -> str:
    """Write a model in both weight types. Return the reason if that is not possible, or ""."""
    files = [folder / f"{name}-{kind}.gguf" for kind in ("f32", "q4_k")]
    command = [str(generator), "write", name, str(seed), str(vocabulary), *map(str, files)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT_S,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            check=False,
        )
        code = ended.returncode
        lines = ended.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        code = -1
        lines = [f"it took longer than {TIMEOUT_S} seconds"]
    if code == 0:
        return ""
    for file in files:
        file.unlink(missing_ok=True)
    last_line = lines[-1] if lines else ""
    cause = next((line for line in lines if "error" in line.lower()), last_line)
    if "GGML_ASSERT" in cause:
        return cause.rpartition("/")[2]
    return cause.rpartition("error loading model: ")[2] or f"it ended with {code}"


if __name__ == "__main__":
    main()
