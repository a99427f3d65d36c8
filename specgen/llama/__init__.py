"""llama.cpp as a backend, through llama-cpp-python's low-level API.

No other package imports llama_cpp, and its failures become `SpecgenError`s here. The import takes a
quarter of a second, so it is made where a model is needed.
"""

from specgen.llama.context import LlamaBackend
from specgen.llama.library import LogSink, build, logging_to
from specgen.llama.model import LlamaModel
from specgen.llama.native_context import default_threads
from specgen.llama.vocabulary import LlamaVocabulary

__all__ = [
    "LlamaBackend",
    "LlamaModel",
    "LlamaVocabulary",
    "LogSink",
    "build",
    "default_threads",
    "logging_to",
]
