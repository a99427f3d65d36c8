"""Put specgen's `Llama` in the place of llama-cpp-python's, for libraries that import that."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from specgen.drop_in.grammar import LlamaGrammar
from specgen.drop_in.llama import Llama
from specgen.system.llama_build import BUNDLE, REQUIRED_VERSION, uses_bundle

__all__ = ["Llama", "LlamaGrammar", "install_as_llama_cpp"]

#: The modules of llama-cpp-python that libraries import classes from.
_MODULES = ("llama_cpp", "llama_cpp.llama", "llama_cpp.llama_grammar")


def install_as_llama_cpp() -> None:
    """Make ``from llama_cpp import Llama`` import specgen's `Llama`, in the whole process.

    Call it before the libraries that use llama-cpp-python are imported. Everything else in
    `llama_cpp` stays as it is. Without llama-cpp-python, a stand-in has the most important names.
    """
    if uses_bundle():
        # Another version of llama-cpp-python must not be loaded: its llama.cpp is another one.
        stand_in = stand_in_for(importlib.import_module(BUNDLE))
        sys.modules.update(dict.fromkeys(_MODULES, stand_in))
        return
    for name in _MODULES[:2]:
        module: Any = importlib.import_module(name)
        module.Llama = Llama


def stand_in_for(low_level: ModuleType) -> ModuleType:
    """Return a module in the place of llama-cpp-python.

    Args:
        low_level: The module with llama.cpp's functions, which it has, too.
    """
    module = ModuleType("llama_cpp", "specgen's stand-in for llama-cpp-python.")
    module.__spec__ = ModuleSpec("llama_cpp", None)  # importlib.util.find_spec needs one
    names: dict[str, Any] = {
        "Llama": Llama,
        "LlamaGrammar": LlamaGrammar,
        "LogitsProcessorList": list,
        "StoppingCriteriaList": list,
        "__version__": REQUIRED_VERSION,
    }
    vars(module).update({**vars(low_level), **vars(module), **names})
    return module
