"""Check that kernels/ggml/ggml_internals.h agrees with GGML's own headers.

    python -m scripts.check_ggml [VERSION] [--source FOLDER]

VERSION is a release of llama-cpp-python, by default the one that specgen requires. Its source is
downloaded once (scripts/ggml_source.py); with --source, an unpacked one is used instead. Give a
newer version to see what an upgrade would change: see docs/kernels.md, "When llama.cpp moves". It
needs a C++ compiler, and installs nothing.
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
#: The program that compares, below the folder of the kernels.
PROGRAM = "tests/ggml_layout_check.cpp"
#: What it checks, as messages name it.
HEADER = "kernels/ggml/ggml_internals.h"
#: -O1, because inline functions of GGML's headers would otherwise need GGML's libraries.
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the declarations with the headers of one version, and report the result."""
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
    print(f"{HEADER} agrees with ggml {version}")


def check(root: Path, kernels: Path = KERNELS) -> str:
    """Compare the declarations with the headers of an unpacked llama-cpp-python.

    Args:
        root: The root of the unpacked source.
        kernels: The folder of the kernels.

    Returns:
        The version of GGML.

    Raises:
        BuildError: They differ; its `output` lists the differences.
    """
    version = ggml_source.ggml_version(root)
    differs = f"{HEADER} differs from the headers of ggml {version}"
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / "check"
        command = [*build_kernels.compiler(os.environ), *FLAGS, f'-DGGML_VERSION="{version}"']
        command.append(f"-I{kernels}")
        for name in ("include", "src"):
            command += ["-isystem", os.fspath(root / ggml_source.GGML / name)]
        command += [os.fspath(kernels / PROGRAM), "-o", os.fspath(program)]
        # Most differences show while the program is compiled, the others when it runs.
        try:
            build_kernels.run(command)
        except BuildError as error:
            raise BuildError(differs, error.output) from None
        ended = subprocess.run([program], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BuildError(differs, ended.stderr)
    return version


if __name__ == "__main__":
    main()
