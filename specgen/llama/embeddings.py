"""Embeddings: a text becomes one vector, pooled from the last hidden states of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from specgen.errors import BackendError, ModelFileError, PromptError, PromptLengthError
from specgen.llama.file_check import check_weights
from specgen.llama.library import check_threads, forget_log, last_error, llama_cpp
from specgen.llama.model import LlamaModel, pooling_in
from specgen.llama.model_description import describe_model
from specgen.llama.native_context import ContextSize, open_context
from specgen.options import ContextOptions
from specgen.system.arrays import Hidden

#: If the length of tokens is unknown, a text is refused without tokenizing it if it has more bytes
#: than this per token of the context.
_MAX_TOKEN_BYTES = 64


class EmbeddingModel(LlamaModel):
    """A model that makes embeddings; loading another model raises `ModelFileError`."""

    def _check_usable(self) -> None:
        check_weights(self.file)
        if self.pooling is None:
            raise ModelFileError(f"{self.path}: not an embedding model")
        if self.vocabulary.kind == 0:
            raise ModelFileError(f"{self.path}: the model has no vocabulary")


class Embedder:
    """An embedding model and its context."""

    def __init__(
        self,
        file: Path,
        options: ContextOptions,
        n_ctx: int,
    ) -> None:
        """Load a model and open a context.

        Args:
            file: The model's file.
            options: Threads, cache types, the size of batches, and where layers are computed.
            n_ctx: The maximum number of tokens of a text.

        Raises:
            ModelFileError: If the file is not an embedding model.
            MemoryLimitError: If the model or the context does not fit into memory.
        """
        with ExitStack() as resources:
            self.model = EmbeddingModel(
                file,
                n_gpu_layers=options.n_gpu_layers,
                workers=options.workers,
            )
            resources.callback(self.model.close)
            n_train = self.model.n_ctx_train
            # Some encoders have no positions after these: llama.cpp would end the process.
            self.n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            #: Whether a long text can be decoded in several batches. Else it must be in one.
            self._in_pieces = self._needs_last_state_only()
            self._n_batch = min(options.n_batch, self.n_ctx) if self._in_pieces else self.n_ctx
            size = ContextSize(
                n_ctx=self.n_ctx,
                n_rows=self._n_batch,
                n_outputs=1 if self._in_pieces else self.n_ctx,
                n_sequences=1,
                pooling=self.model.pooling,
            )
            self._handle = open_context(self.model, options, size, n_rollback=0).handle
            resources.callback(self.model.call, llama_cpp.llama_free, self._handle)
            self._resources = resources.pop_all()
        #: llama.cpp's pointer to the KV cache; null for encoders.
        self._memory = llama_cpp.llama_get_memory(self._handle)
        self.n_embd = self.model.n_embd_out

    def _needs_last_state_only(self) -> bool:
        """Whether the embedding is the last hidden state, and each token sees only earlier ones."""
        causal = self.model.metadata(f"{self.model.architecture}.attention.causal")
        takes_last = self.model.pooling == llama_cpp.LLAMA_POOLING_TYPE_LAST
        return takes_last and causal != "false"

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the model wants around it.

        Raises:
            PromptLengthError: If the text is too long.
            PromptError: If it is empty.
        """
        vocabulary = self.model.vocabulary
        n_bytes = len(text.encode())
        if n_bytes > self.n_ctx:
            # Refuse a text that cannot fit without tokenizing it, which may take long.
            n_min = vocabulary.min_token_count(text) or n_bytes // _MAX_TOKEN_BYTES
            if n_min > self.n_ctx:
                raise PromptLengthError(
                    f"{n_bytes} bytes, but the context has {self.n_ctx} tokens",
                    n_min,
                    self.n_ctx,
                )
        tokens = vocabulary.tokenize(text, add_special=True, parse_special=False)
        self.check(tokens)
        return tokens

    def check(self, tokens: Sequence[int]) -> None:
        """Check that tokens can be embedded.

        Raises:
            PromptLengthError: If there are more than the context holds.
            PromptError: If there are none, or a number is not a token.
        """
        if not tokens:
            raise PromptError("it is empty")
        if len(tokens) > self.n_ctx:
            raise PromptLengthError(
                f"{len(tokens)} tokens, but the context has {self.n_ctx}",
                len(tokens),
                self.n_ctx,
            )
        self.model.vocabulary.check(tokens)

    def embed(self, tokens: Sequence[int]) -> Hidden:
        """Return the embedding of a text, float32[n_embd], scaled to length 1.

        The arguments and the errors are those of `pooled`.
        """
        return unit(self.pooled(tokens))

    def pooled(self, tokens: Sequence[int]) -> Hidden:
        """Return the embedding of a text as the model makes it, float32[n_embd].

        Args:
            tokens: The result of `tokenize`, or tokens that `check` accepts.

        Raises:
            BackendError: If llama.cpp cannot compute it.
        """
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)
        if self._in_pieces:
            # With embeddings on, llama.cpp computes logits for each row of a batch. So they are on
            # only for the last token, which has a batch of its own.
            *before, last = tokens
            llama_cpp.llama_set_embeddings(self._handle, False)
            for start in range(0, len(before), self._n_batch):
                self._decode(before[start : start + self._n_batch])
            llama_cpp.llama_set_embeddings(self._handle, True)
            self._decode([last])
        else:
            self._decode(tokens)
        pointer = llama_cpp.llama_get_embeddings_seq(self._handle, 0)
        if not pointer:
            raise BackendError(f"{self.model.name}: llama.cpp has no embedding of this text")
        return np.ctypeslib.as_array(pointer, (self.n_embd,)).copy()

    def _decode(self, tokens: Sequence[int]) -> None:
        """Decode tokens in one batch; raise `BackendError` if llama.cpp fails."""
        check_threads()
        rows = (llama_cpp.llama_token * len(tokens))(*tokens)
        decode = llama_cpp.llama_decode if self._memory else llama_cpp.llama_encode
        forget_log()
        batch = llama_cpp.llama_batch_get_one(rows, len(tokens))
        if self.model.call(decode, self._handle, batch):
            raise BackendError(f"{self.model.name}: llama.cpp cannot decode this: {last_error()}")

    def close(self) -> None:
        """Free the context and the model."""
        self._resources.close()


def unit(values: Hidden) -> Hidden:
    """Return a vector, float32[n_embd], scaled to length 1; all zeros stay so.

    Raises:
        BackendError: If a value is not finite.
    """
    length = float(np.linalg.norm(values.astype(np.float64)))
    if not np.isfinite(length):
        raise BackendError("the embedding has values that are not finite")
    return (values / (length or 1.0)).astype(np.float32)


def pooling_of(file: Path) -> int | None:
    """Return llama.cpp's number for the pooling of a model file.

    Returns:
        None if it is not an embedding model, or the file cannot be read.
    """
    with contextlib.suppress(BackendError, OSError):
        model = describe_model(file)
        return pooling_in(model.architecture, model.number("pooling_type"))
    return None  # opening the file will report what is wrong
