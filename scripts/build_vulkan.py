"""Build llama.cpp's Vulkan backend as a separate library, for `make gpu-test`.

GGML loads the library that the variable `GGML_BACKEND_PATH` names, so nothing else of llama.cpp has
to be compiled. The source is that of the installed llama-cpp-python (scripts/build_peers.py)::

    python -m scripts.build_vulkan [--source FOLDER]

It prints the library's path. It needs cmake, a C++ compiler, Vulkan's headers and glslc. Compiling
150 shaders takes a few minutes; compiled files are kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts import build_peers
from specgen.errors import SpecgenError

FOLDER = Path(__file__).resolve().parent.parent / "build" / "vulkan"
LIBRARY = "libggml-vulkan.so"
PACKAGES = (
    "on Debian: cmake g++ libvulkan-dev glslc spirv-headers, and mesa-vulkan-drivers to run it"
)
SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DGGML_CCACHE=OFF",
    "-DGGML_VULKAN=ON",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")),
)
#: The code for settings of a validation layer, which is not used here. It needs version 1.3.272 of
#: Vulkan's headers, and Debian 12 has an older one.
_LAYER_SETTINGS = re.compile(
    r"    std::vector<vk::LayerSettingEXT> settings = .*?layer_setting_info\(settings\);\n",
    re.DOTALL,
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build llama.cpp's Vulkan backend.")
    parser.add_argument(
        "--source", type=Path, help="an unpacked llama-cpp-python of the installed version"
    )
    try:
        print(build(FOLDER, parser.parse_args(argv).source))
    except build_peers.BuildError as error:
        sys.exit(f"the Vulkan backend was not built: {error}")
    except SpecgenError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.exit(f"the Vulkan backend was not built: {error.message}{hint}")


def build(folder: Path, source: Path | None = None) -> Path:
    """Build the library for the installed version into `folder`, unless it is there.

    Returns:
        The path of the library.

    Raises:
        BuildError: It cannot be built.
        FetchError: Its source cannot be downloaded.
    """
    version = build_peers.installed_version()
    library = folder / version / LIBRARY
    if library.is_file():
        return library
    for tool in ("cmake", "glslc"):
        if shutil.which(tool) is None:
            raise build_peers.BuildError(f"there is no {tool} ({PACKAGES})")
    work = folder / f"build-{version}"
    work.mkdir(parents=True, exist_ok=True)
    llama = (source or build_peers.fetch(version, work)).resolve() / "vendor" / "llama.cpp"
    suit_older_headers(llama / "ggml" / "src" / "ggml-vulkan" / "ggml-vulkan.cpp")
    # Without this, llama.cpp's build would take this project's commit for its own.
    environment = {**os.environ, "GIT_DIR": os.devnull}
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    build_peers.say("building llama.cpp's Vulkan backend, which takes a few minutes")
    built = work / "cmake"
    build_peers.run(["cmake", "-S", str(llama), "-B", str(built), *SETTINGS], environment)
    build_peers.run(["cmake", "--build", str(built), "--target", "ggml-vulkan"], environment)
    library.parent.mkdir(exist_ok=True)
    shutil.copy(built / "bin" / LIBRARY, library)
    return library


def suit_older_headers(file: Path) -> None:
    """Remove from llama.cpp's source what older Vulkan headers do not declare."""
    text = file.read_text(encoding="utf-8")
    text = _LAYER_SETTINGS.sub("", text).replace(
        ", extensions, &layer_setting_info)", ", extensions)"
    )
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
