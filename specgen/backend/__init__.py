"""What computes logits: llama.cpp (`specgen.backend.llama`) or a fake (`specgen.backend.fake`)."""

from specgen.backend.base import Backend, Batch, Rollback, Vocabulary

__all__ = ["Backend", "Batch", "Rollback", "Vocabulary"]
