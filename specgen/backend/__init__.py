"""What computes logits: llama.cpp (`specgen.backend.llama`) or a fake (`specgen.testing.fake_backend`)."""

from specgen.backend.base import Backend, Batch, Rollback, Vocabulary

__all__ = ["Backend", "Batch", "Rollback", "Vocabulary"]
