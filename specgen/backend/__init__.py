"""The interface to a model and its KV cache. It is implemented by llama.cpp (`specgen.backend.llama`)
and by a fake for tests (`specgen.testing.fake_backend`)."""

from specgen.backend.base import Backend, Batch, Rollback, Vocabulary

__all__ = ["Backend", "Batch", "Rollback", "Vocabulary"]
