"""Print the CMAKE_ARGS with which to build llama-cpp-python.

They are those of the user, with two additions:

- llama.cpp's library for images and the parts that only its programs need are left out, which saves
  half of the compile time. If CMAKE_ARGS defines LLAVA_BUILD, everything is built.
- With GCC, -fno-dse works around a bug of GCC 12 on CPUs with AMX. Its `_tile_loadconfig` is
  declared to read only 8 bytes. So dead store elimination drops the stores that fill the rest of
  the 64-byte tile configuration, and the first decode of more than one token crashes with an
  illegal instruction. The flag disables that optimisation and keeps AMX. Other compilers do not
  need the flag, and some do not know it.

This script needs only the standard library, because it runs before anything is installed::

    CMAKE_ARGS="$(python scripts/cmake_args.py)" pip install --no-cache-dir llama-cpp-python
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FLAG = "-fno-dse"
#: Leave out the library for images, and the library that llama.cpp's programs share.
WITHOUT_PROGRAMS = (
    "-DLLAVA_BUILD=OFF",
    f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={Path(__file__).resolve().with_name('only_llama.cmake')}",
)

#: A definition among CMake's arguments, with an optional type after the name.
_DEFINITION = re.compile(
    r"-D(?P<name>CMAKE_CXX_(?:FLAGS|COMPILER))(?::[A-Z]+)?=(?P<value>.*)", re.DOTALL
)


def split_definitions(cmake_args: str) -> list[str]:
    """Split CMAKE_ARGS into arguments, and join `-D NAME=VALUE` to `-DNAME=VALUE`."""
    words = shlex.split(cmake_args)
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "-D":
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def lookup(arguments: Sequence[str], name: str) -> str | None:
    """The value that the arguments give to a CMake variable. The last definition counts."""
    values = [
        match["value"]
        for argument in arguments
        if (match := _DEFINITION.fullmatch(argument)) and match["name"] == name
    ]
    return values[-1] if values else None


def compiler(arguments: Sequence[str], cxx: str | None) -> list[str]:
    """The command of the C++ compiler that CMake will use."""
    chosen = lookup(arguments, "CMAKE_CXX_COMPILER")
    if chosen:
        return [chosen]
    if cxx:
        return shlex.split(cxx)
    return [next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")]


def is_gcc(command: Sequence[str]) -> bool:
    """Whether the compiler is GCC itself, and not one that imitates it, such as Clang."""
    try:
        macros = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", "-"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    names = {line.split()[1] for line in macros.splitlines() if line.startswith("#define ")}
    return "__GNUC__" in names and not names & {"__clang__", "__INTEL_COMPILER", "__NVCOMPILER"}


def with_flag(arguments: Sequence[str], cxxflags: str | None) -> list[str]:
    """Add `FLAG` to the flags of the C++ compiler.

    CMake ignores the environment variable CXXFLAGS if CMAKE_CXX_FLAGS is defined. So if the
    arguments do not define it, the flags of the variable are included.
    """
    flags = lookup(arguments, "CMAKE_CXX_FLAGS")
    if flags is None:
        flags = cxxflags or ""
    if FLAG not in flags.split():
        flags = f"{flags} {FLAG}".strip()
    kept = [
        argument
        for argument in arguments
        if not ((match := _DEFINITION.fullmatch(argument)) and match["name"] == "CMAKE_CXX_FLAGS")
    ]
    return [*kept, f"-DCMAKE_CXX_FLAGS={flags}"]


def main() -> None:
    arguments = split_definitions(os.environ.get("CMAKE_ARGS", ""))
    command = compiler(arguments, os.environ.get("CXX"))
    if os.name != "nt" and shutil.which(command[0]) is None:
        sys.exit(
            f"no C++ compiler: {command[0]} cannot be found\n"
            "hint: install one (Debian and Ubuntu: apt install g++, Fedora: dnf install gcc-c++, "
            "macOS: xcode-select --install)"
        )
    if is_gcc(command):
        arguments = with_flag(arguments, os.environ.get("CXXFLAGS"))
    if not any(re.match(r"-DLLAVA_BUILD[:=]", argument) for argument in arguments):
        arguments = [*arguments, *WITHOUT_PROGRAMS]
    sys.stdout.write(shlex.join(arguments) + "\n")


if __name__ == "__main__":
    main()
