"""What computes logits: llama.cpp (`specgen.backend.llama`) or a fake (`specgen.backend.fake`)."""

from specgen.backend.base import Backend, Batch, Vocabulary

__all__ = ["Backend", "Batch", "Vocabulary"]
