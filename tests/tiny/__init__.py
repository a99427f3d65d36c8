"""Write tiny GGUF models with random weights, for tests and for `specgen doctor`.

Their text makes no sense, but they are complete: a tokenizer that takes any text, a transformer (or
a state-space model, a mixture of both, or an encoder) that llama.cpp loads and decodes like any
other, and an output distribution that depends on the whole context. A file takes some milliseconds
to write and is the same for the same `TinyConfig`.

>>> target = TinyConfig(seed=1)
>>> draft = target.draft(noise=0.1)  # agrees with the target often, not always
>>> path = write_tiny_model("target.gguf", target)  # doctest: +SKIP
"""

from tests.tiny.config import CHATML_TEMPLATE, Architecture, TensorType, TinyConfig, TokenizerKind
from tests.tiny.file import write_tiny_model
from tests.tiny.vocabulary import TinyVocabulary, tiny_vocabulary

__all__ = [
    "CHATML_TEMPLATE",
    "Architecture",
    "TensorType",
    "TinyConfig",
    "TinyVocabulary",
    "TokenizerKind",
    "tiny_vocabulary",
    "write_tiny_model",
]
