"""Build hooks of the package: its kernels, or a whole wheel that needs no compiler; metadata."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Set by scripts/build_wheel.py: a folder whose files belong into the wheel, llama.cpp among them,
#: and the platform that they were compiled for.
BUNDLE = "SPECGEN_BUNDLE"
PLATFORM = "SPECGEN_BUNDLE_PLATFORM"
#: What Linux calls the processors that there are such wheels for.
MACHINES = ("x86_64", "aarch64")
#: Set by a release: the repository's address, for the links on the package's page.
REPOSITORY = "SPECGEN_REPOSITORY"
#: A link of README.md to a file of the repository, an image or not.
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")


class KernelsBuildHook(BuildHookInterface[Any]):
    """Compiles the kernels into the package. Without them the wheel is pure Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the wheel's files and tag, before its files are collected."""
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


class MetadataHook(MetadataHookInterface):
    """Gives the package its dependencies, its links and its readme.

    The wheels that carry llama.cpp do without llama-cpp-python on the platforms that there are such
    wheels for; the marker tells those who read one wheel's metadata and resolve for several
    platforms. The readme's links to files become links to the files of this version, if the
    repository is known.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dependencies and the readme, when the metadata are read."""
        elsewhere = ""
        if os.environ.get(BUNDLE):
            others = " and ".join(f"platform_machine != '{machine}'" for machine in MACHINES)
            elsewhere = f"; sys_platform != 'linux' or ({others})"
        metadata["dependencies"] = [
            f"{each}{elsewhere}" if each.startswith("llama-cpp-python") else each
            for each in self.config["dependencies"]
        ]
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository := os.environ.get(REPOSITORY, "").rstrip("/"):
            tag = f"v{metadata['version']}"
            files = f"{repository}/blob/{tag}"
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": f"{files}/docs/using.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            readme = _LINK.sub(
                lambda link: (
                    f"{link['image']}[{link['text']}]"
                    f"({repository}/{'raw' if link['image'] else 'blob'}/{tag}/{link['path']})"
                ),
                readme,
            )
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def _load(path: Path) -> ModuleType:
    """Load a module from its file: in pip's build, its folder is not on Python's path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
