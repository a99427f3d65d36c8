"""specgen: faster generation from local GGUF models by lossless speculative decoding.

`load` opens a target and its draft; `docs/python.md` has examples. Names are imported when they are
first used, so that `import specgen` is quick.
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

#: The public names of each module.
_MODULES = {
    "specgen.api": "AnswerOptions Model load",
    "specgen.session.prompts.template": "Message",
    "specgen.session.engine": "Engine",
    "specgen.session.session": "Session",
    "specgen.session.prompts": "Prompt",
    "specgen.session.request": "Request",
    "specgen.errors": "BackendError FetchError MemoryLimitError ModelFileError PairError PromptError "
    "SpecgenError UnknownModelError UsageError",
    "specgen.events": "CommittedEvent DraftedEvent FinishedEvent NoticeEvent PromptEvent ReadingEvent "
    "VerifiedEvent",
    "specgen.options": "ContextOptions DraftOptions GenerationOptions SamplerOptions SessionOptions "
    "TreeShape",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

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
    "MemoryLimitError",
    "Message",
    "Model",
    "ModelFileError",
    "NoticeEvent",
    "PairError",
    "Prompt",
    "PromptError",
    "PromptEvent",
    "ReadingEvent",
    "Request",
    "SamplerOptions",
    "Session",
    "SessionOptions",
    "SpecgenError",
    "TreeShape",
    "UnknownModelError",
    "UsageError",
    "VerifiedEvent",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
