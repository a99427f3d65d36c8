"""Writes random models of all architectures that llama.cpp runs, for `make architectures`.

llama.cpp's own tests make such models (`tests/test-llama-archs.cpp`). scripts/random_models.cpp
includes that source and is linked to the installed llama.cpp, so only one file is compiled, in
seconds. The source is the one that the installed llama-cpp-python was built from::

    python -m scripts.build_architectures FOLDER [--source FOLDER]

FOLDER gets `NAME-f32.gguf` and `NAME-q4_k.gguf` (1.3 GB in all), the same in `other-seed/` for a
model that says something else, and `models.json`: the version of llama-cpp-python, and of every
architecture the reason why llama.cpp makes no model of it, or nothing. Nothing is done where they
are there.
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
#: Below llama.cpp's folder: where headers are.
INCLUDED = (".", "include", "ggml/include", "common", "src")
SEED, OTHER_SEED = 1, 2
#: What the other seed is for: a draft that is always wrong.
OTHER = "llama"
#: Seconds that one model may take; most take a tenth.
TIMEOUT_S = 120


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Write models of all of llama.cpp's architectures."
    )
    parser.add_argument("folder", type=Path, help="where to")
    parser.add_argument(
        "--source", type=Path, help="an unpacked llama-cpp-python of the installed version"
    )
    arguments = parser.parse_args(argv)
    try:
        build(arguments.folder.resolve(), arguments.source)
    except build_kernels.BuildError as error:
        sys.exit(f"{error.output}the models are not made: {error}")
    except build_peers.BuildError as error:
        sys.exit(f"the models are not made: {error}")
    except FetchError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"the models are not made: {error.message}{hint}")


def build(folder: Path, source: Path | None = None) -> None:
    """Write the models into `folder`, if they are not there.

    Raises `BuildError` of scripts/build_kernels.py or scripts/build_peers.py, or `FetchError`.
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
        why_not = write(generator, OTHER, OTHER_SEED, vocabulary, folder / "other-seed")
        if why_not:
            raise build_kernels.BuildError(f"{OTHER}: {why_not}")
    models = dict(zip(names, reasons, strict=True))
    text = json.dumps({**stamp, "models": models}, indent=1)
    (folder / STAMP).write_text(text + "\n", encoding="utf-8")


def is_built(folder: Path, stamp: dict[str, str]) -> bool:
    """Whether `folder` has the models that would be written now."""
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(found, dict) or any(found.get(key) != stamp[key] for key in stamp):
        return False
    made = [name for name, reason in found["models"].items() if not reason]
    return all((folder / f"{name}-q4_k.gguf").is_file() for name in made)


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
            # What of the tests is not used is dropped before it is linked: -O1 does that.
            *("-std=c++17", "-O1", "-w"),
            *(f"-I{llama / name}" for name in INCLUDED),
            str(SOURCE),
            *("-o", str(generator)),
            *(f"-L{native}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{native}"),
        ]
    )
    return generator


def write(generator: Path, name: str, seed: int, vocabulary: Path, folder: Path) -> str:
    """Write a model in both types. Returns why that is not possible, or nothing."""
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
        code, said = ended.returncode, ended.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        code, said = -1, [f"it took longer than {TIMEOUT_S} seconds"]
    if code == 0:
        return ""
    for file in files:
        file.unlink(missing_ok=True)
    cause = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
    if "GGML_ASSERT" in cause:
        return cause.rpartition("/")[2]
    return cause.rpartition("error loading model: ")[2] or f"it ended with {code}"


if __name__ == "__main__":
    main()
