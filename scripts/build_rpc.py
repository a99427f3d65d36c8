"""Build llama.cpp's RPC backend as a separate library, for `specgen worker` and `--rpc`.

Wheels of llama-cpp-python are built without it. Building all of llama.cpp again would take minutes.
But GGML can load the backend at run time, and it consists of only two source files. These are
compiled in seconds, from the source distribution of the installed version::

    python -m scripts.build_rpc [--force] [--source FOLDER]

The library, `specgen/llama/libspecgen-rpc.so`, is linked to the GGML of that llama-cpp-python and
works with no other version. The build needs a C++ compiler. If llama-cpp-python was built with
-DGGML_RPC=on, it already has the backend, and nothing is built.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts import build_kernels, build_peers, ggml_source
from specgen.errors import FetchError
from specgen.system.llama_build import LIBRARY, STAMP, protocol_in, stamp_of

FOLDER = Path(__file__).resolve().parent.parent / "specgen" / "llama"
#: The source files, below the folder of GGML.
SOURCES = ("src/ggml-rpc/ggml-rpc.cpp", "src/ggml-rpc/transport.cpp")
#: The flags that GGML's own build uses for a backend that is loaded at run time. `compile_command`
#: adds -fno-dse, for the reason that scripts/cmake_args.py gives.
FLAGS = (
    *("-O2", "-std=c++17", "-fPIC", "-pthread", "-shared"),
    *("-DGGML_BACKEND_DL", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build llama.cpp's RPC backend for specgen.")
    parser.add_argument("--force", action="store_true", help="compile it even if it is up to date")
    parser.add_argument(
        "--source", type=Path, help="an unpacked llama-cpp-python of the installed version"
    )
    arguments = parser.parse_args(argv)
    try:
        print(build(FOLDER, arguments.source, force=arguments.force))
    except build_kernels.BuildError as error:
        sys.exit(f"{error.output}the RPC backend was not built: {error}")
    except build_peers.BuildError as error:
        sys.exit(f"the RPC backend was not built: {error}")
    except FetchError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"the RPC backend was not built: {error.message}{hint}")


def build(folder: Path, source: Path | None = None, *, force: bool = False) -> Path:
    """Build the RPC backend into `folder`, unless it is up to date, and return its path.

    Raises:
        BuildError: The one of scripts/build_kernels.py, or the one of scripts/build_peers.py.
        FetchError: The source cannot be downloaded.
    """
    version = build_peers.installed_version()
    native = native_folder()
    installed = native / "libggml-rpc.so"
    if installed.is_file():
        return installed
    library = folder / LIBRARY
    if not force and library.is_file() and stamp_of(library).get("version") == version:
        return library
    if not sys.platform.startswith("linux"):
        raise build_kernels.BuildError(
            f"this script supports only Linux, and this is {sys.platform}; "
            "build llama.cpp with -DGGML_RPC=on in CMAKE_ARGS instead"
        )
    command = build_kernels.compiler(os.environ)
    root = source if source is not None else ggml_source.fetch(version)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        linked = Path(work) / LIBRARY
        build_kernels.say(f"building llama.cpp's RPC backend with {shlex.join(command)}")
        build_kernels.run(compile_command(command, root / ggml_source.GGML, native, linked))
        linked.replace(library)
    protocol = protocol_in(root / ggml_source.GGML / "include" / "ggml-rpc.h")
    stamp = {"version": version, "protocol": protocol}
    (folder / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    return library


def native_folder() -> Path:
    """The folder where the installed llama-cpp-python finds its libraries. Raises `BuildError`."""
    if elsewhere := os.environ.get("LLAMA_CPP_LIB_PATH"):
        return Path(elsewhere)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise build_kernels.BuildError("llama-cpp-python is not installed: run make install")
    return Path(spec.origin).parent / "lib"


def compile_command(compiler: Sequence[str], ggml: Path, native: Path, library: Path) -> list[str]:
    """Return the command that compiles and links. Raises `BuildError` if a file is missing."""
    sources = [ggml / name for name in SOURCES]
    base = min(native.glob("libggml-base.so*"), key=lambda path: len(path.name), default=None)
    for needed in (*sources, base):
        if needed is None or not needed.is_file():
            raise build_kernels.BuildError(f"{needed or native / 'libggml-base.so'} is missing")
    assert base is not None
    flags = list(FLAGS)
    if build_kernels.knows(compiler, ("-fno-dse",)):
        flags.append("-fno-dse")
    folders = [f"-I{ggml / name}" for name in ("include", "src")]
    # No search path is needed: at run time, llama.cpp has already loaded a library of this name.
    return [
        *compiler,
        *flags,
        *folders,
        *map(os.fspath, sources),
        *("-o", os.fspath(library), os.fspath(base), "-Wl,-z,defs"),
    ]


if __name__ == "__main__":
    main()
