"""llama.cpp as a backend, through llama-cpp-python's low-level API.

This is the only package that imports llama_cpp. ctypes and its untyped values stay inside, and native
failures become `SpecgenError`s here. The import takes a quarter of a second, so other modules import
this package only when they need a model.
"""

from specgen.llama.context import LlamaBackend, default_threads
from specgen.llama.library import LogSink, build, logging_to
from specgen.llama.model import LlamaModel
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
