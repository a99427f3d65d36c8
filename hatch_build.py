"""Hooks of the package's build: its kernels, or all that a wheel without a compiler needs, and its dependencies."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Set by scripts/build_wheel.py: a folder whose files belong into the wheel, llama.cpp among them, and the
#: platform that they were compiled for.
BUNDLE = "SPECGEN_BUNDLE"
PLATFORM = "SPECGEN_BUNDLE_PLATFORM"


class KernelsBuildHook(BuildHookInterface[Any]):
    """Compiles the kernels into the package. Without them the wheel is pure Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files of the wheel are collected."""
        if bundle := os.environ.get(BUNDLE):
            build_data["force_include"][bundle] = "/"
            platform = os.environ[PLATFORM]
        else:
            build_kernels = _load(Path(self.root) / "scripts" / "build_kernels.py")
            if build_kernels.build(Path(self.root), os.environ) is None:
                return
            build_data["artifacts"].append(f"/{build_kernels.LIBRARY}")
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


class DependenciesHook(MetadataHookInterface):
    """Gives the package its dependencies. The wheel that carries llama.cpp does without llama-cpp-python on
    the platform that it is for; the marker tells those who resolve for several platforms at once."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Called when the metadata are read."""
        elsewhere = ""
        if os.environ.get(BUNDLE):
            elsewhere = "; sys_platform != 'linux' or platform_machine != 'x86_64'"
        metadata["dependencies"] = [
            f"{each}{elsewhere}" if each.startswith("llama-cpp-python") else each
            for each in self.config["dependencies"]
        ]


def _load(path: Path) -> ModuleType:
    """The module in a file: where pip builds the package, its folder is not on Python's path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
