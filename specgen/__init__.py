"""specgen: faster generation from local GGUF models by lossless speculative decoding.

docs/python.md describes the Python interface.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.api import AnswerOptions, Model, ModelChat, load
    from specgen.drop_in.grammar import LlamaGrammar
    from specgen.drop_in.install import install_as_llama_cpp
    from specgen.drop_in.llama import Llama
    from specgen.errors import (
        BackendError,
        FetchError,
        MemoryLimitError,
        ModelFileError,
        PairError,
        PromptError,
        SpecgenError,
        UnknownModelError,
        UsageError,
    )
    from specgen.events import (
        CommittedEvent,
        DraftedEvent,
        FinishedEvent,
        NoticeEvent,
        PrefillEvent,
        PromptEvent,
        VerifiedEvent,
    )
    from specgen.options import (
        ContextOptions,
        DraftOptions,
        GenerationOptions,
        SamplerOptions,
        SessionOptions,
        TreeShape,
    )
    from specgen.session.engine import Engine
    from specgen.session.prompts import Prompt
    from specgen.session.prompts.template import Message
    from specgen.session.request import Request, Usage
    from specgen.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "AnswerOptions",
    "BackendError",
    "CommittedEvent",
    "ContextOptions",
    "DraftOptions",
    "DraftedEvent",
    "Engine",
    "FetchError",
    "FinishedEvent",
    "GenerationOptions",
    "Llama",
    "LlamaGrammar",
    "MemoryLimitError",
    "Message",
    "Model",
    "ModelChat",
    "ModelFileError",
    "NoticeEvent",
    "PairError",
    "PrefillEvent",
    "Prompt",
    "PromptError",
    "PromptEvent",
    "Request",
    "SamplerOptions",
    "Session",
    "SessionOptions",
    "SpecgenError",
    "TreeShape",
    "UnknownModelError",
    "Usage",
    "UsageError",
    "VerifiedEvent",
    "__version__",
    "install_as_llama_cpp",
    "load",
]

#: Where the public names are looked up, in this order: the last ones import llama.cpp's bindings.
_MODULES = (
    "specgen.errors",
    "specgen.events",
    "specgen.options",
    "specgen.api",
    "specgen.session.request",
    "specgen.drop_in.install",
)


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that `import specgen` is quick."""
        if name in __all__:
            for module_name in _MODULES:
                module = importlib.import_module(module_name)
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
