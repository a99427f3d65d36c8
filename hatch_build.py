"""Builds the kernels when the package is built, and makes its wheel one for this platform."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsBuildHook(BuildHookInterface[Any]):
    """Compiles the kernels into the package. Without them the wheel is pure Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the files of the wheel are collected."""
        build_kernels = _load(Path(self.root) / "scripts" / "build_kernels.py")
        if build_kernels.build(Path(self.root), os.environ) is None:
            return
        build_data["artifacts"].append(f"/{build_kernels.LIBRARY}")
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """The module in a file: where pip builds the package, its folder is not on Python's path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
