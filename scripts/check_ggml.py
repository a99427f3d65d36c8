"""Checks that kernels/ggml_internals.h agrees with GGML's own headers::

    python -m scripts.check_ggml [VERSION] [--source FOLDER]

VERSION is one of llama-cpp-python, by default the one that specgen requires. Its source is
downloaded once (scripts/ggml_source.py); with --source an unpacked one is read. Give the next
version to see what an upgrade would change: docs/kernels.md, "When llama.cpp moves". It needs a C++
compiler; nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts import build_kernels, ggml_source
from scripts.build_kernels import BuildError
from specgen.errors import FetchError
from specgen.system.llama_build import REQUIRED_VERSION

KERNELS = build_kernels.ROOT / build_kernels.SOURCES
#: Below the folder of the kernels.
PROGRAM = "tests/ggml_layout_check.cpp"
#: Functions in GGML's headers that nobody calls need GGML's libraries, unless the compiler drops
#: them.
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare the kernels' declarations with GGML's.")
    parser.add_argument(
        "version",
        nargs="?",
        default=REQUIRED_VERSION,
        help=f"of llama-cpp-python (default: {REQUIRED_VERSION})",
    )
    parser.add_argument("--source", type=Path, help="an unpacked llama-cpp-python")
    arguments = parser.parse_args(argv)
    try:
        root = arguments.source or ggml_source.fetch(arguments.version)
        version = check(root)
    except BuildError as error:
        sys.exit(f"{error.output}{error}")
    except FetchError as error:
        sys.exit(f"{error.message}\nhint: {error.hint}" if error.hint else error.message)
    print(f"kernels/ggml_internals.h agrees with ggml {version}")


def check(root: Path, kernels: Path = KERNELS) -> str:
    """Compare the declarations in a folder of kernels with an unpacked llama-cpp-python; returns
    the version of GGML. Raises `BuildError` where they differ; its `output` says in what.
    """
    version = ggml_source.ggml_version(root)
    headers = [root / ggml_source.GGML / name for name in ("include", "src")]
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "check"
        command = [*build_kernels.compiler(os.environ), *FLAGS, f'-DGGML_VERSION="{version}"']
        for folder in headers:
            command += ["-isystem", os.fspath(folder)]
        differs = f"kernels/ggml_internals.h differs from the headers of ggml {version}"
        try:
            build_kernels.run([*command, os.fspath(kernels / PROGRAM), "-o", os.fspath(program)])
        except BuildError as error:
            raise BuildError(differs, error.output) from None
        ended = subprocess.run([program], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BuildError(differs, ended.stderr)
    return version


if __name__ == "__main__":
    main()
