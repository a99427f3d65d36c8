"""specgen: faster generation from local GGUF models by lossless speculative decoding
(docs/python.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.api import AnswerOptions, Model, load
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
        PromptEvent,
        ReadingEvent,
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
    from specgen.session.request import Request
    from specgen.session.session import Session

__version__ = "0.1.0"

#: Where the public names are looked for, in this order: the last one imports llama.cpp's bindings.
_MODULES = ("specgen.errors", "specgen.events", "specgen.options", "specgen.api")

__all__ = ["AnswerOptions", "BackendError", "CommittedEvent", "ContextOptions", "DraftOptions"]
__all__ += ["DraftedEvent", "Engine", "FetchError", "FinishedEvent", "GenerationOptions"]
__all__ += ["MemoryLimitError", "Message", "Model", "ModelFileError", "NoticeEvent", "PairError"]
__all__ += ["Prompt", "PromptError", "PromptEvent", "ReadingEvent", "Request", "SamplerOptions"]
__all__ += ["Session", "SessionOptions", "SpecgenError", "TreeShape", "UnknownModelError"]
__all__ += ["UsageError", "VerifiedEvent", "__version__", "load"]


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(module)
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module 'specgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
