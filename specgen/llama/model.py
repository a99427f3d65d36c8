"""A loaded GGUF model, and errors for files that are not usable models."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from specgen.errors import BackendError, ModelFileError, UsageError
from specgen.llama.gguf_file import (
    check_file,
    holds_mtp_only,
    opened_parts,
    why_no_mtp,
)
from specgen.llama.kernels.attached import LLAMA_CPP, WORKERS, attached
from specgen.llama.library import ggml, has_gpu, llama_cpp
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.llama.weights import lease_weights
from specgen.models.files import parts_of
from specgen.options import CacheType, Workers
from specgen.system.files import version_of

#: GGML's number of each KV cache type, and its bytes per value.
CACHE_TYPES: dict[CacheType, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "q4_0": (2, 18 / 32),
    "q4_1": (3, 20 / 32),
    "q5_0": (6, 22 / 32),
    "q5_1": (7, 24 / 32),
    "q8_0": (8, 34 / 32),
    "iq4_nl": (20, 18 / 32),
    "bf16": (30, 2.0),
}
#: Architectures with which llama.cpp computes a batch of several sequences wrong.
ONE_SEQUENCE = frozenset({"arwkv7", "plamo2", "rwkv6qwen2"})
#: Architectures of encoders that make embeddings, and llama.cpp's numbers of how hidden states are
#: pooled.
_ENCODERS = frozenset(
    (
        *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3"),
        *("modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe"),
    )
)
#: llama.cpp's LLAMA_ROPE_TYPE_NONE.
_NO_ROTATION = -1
_MEAN, _CLS, _LAST, _RANK = 1, 2, 3, 4
#: Why rows of models of an architecture depend on their batch, whatever computes.
_ROW_EXCEPTIONS = {
    "minimax-01": "llama.cpp computes its lightning attention in blocks as long as the batch "
    "(SCALE of q_decay_exp)",
    "chameleon": "llama.cpp excludes the tokens of images only in the first row of a batch "
    "(SET of result_output)",
}
#: Types without a packed form that llama.cpp multiplies otherwise from 8 rows on, by GGML's number.
_TILED_TYPES = frozenset({16, 17, 18, 19, 21, 22, 29})


class LlamaModel:
    """A GGUF model: its weights, which all models of the same file share, its vocabulary and
    metadata. `weights` is a copy of the file that is loaded in its place; `workers` hold its
    layers; with `mtp` its MTP layers are loaded too. With `vocabulary_only` no context can be made,
    and sizes are not known. Raises `ModelFileError`, `MemoryLimitError`, `WorkerLostError`.
    """

    def __init__(
        self,
        path: Path,
        *,
        weights: Path | None = None,
        n_gpu_layers: int = -1,
        vocabulary_only: bool = False,
        workers: Workers | None = None,
        mtp: bool = False,
    ) -> None:
        file = path if weights is None else weights
        check_file(file)
        self.path = path
        #: Why its MTP layers cannot draft; empty if they can.
        self.why_no_mtp = "its MTP layers are not loaded"
        if mtp and not vocabulary_only:
            remote = "its MTP layers cannot draft while workers (--rpc) compute it"
            self.why_no_mtp = why_no_mtp(file) or (remote if workers is not None else "")
        self.file = file
        #: The size and the time of each of its files now: they may be replaced while it is in use.
        self.versions = [version_of(part)[1:] for part in parts_of(file)]
        #: A chat template that replaces those of the file.
        self.own_template: str | None = None
        #: Whether it is closed: contexts of it decode nothing more.
        self.is_closed = False
        self.loaded = lease_weights(
            file,
            n_gpu_layers,
            vocabulary_only=vocabulary_only,
            workers=workers,
            mtp=not self.why_no_mtp,
        )
        handle = self.loaded.handle
        self.size_bytes = int(llama_cpp.llama_model_size(handle))
        self.n_layer = int(llama_cpp.llama_model_n_layer(handle))
        self.n_embd = int(llama_cpp.llama_model_n_embd(handle))
        #: The length of a hidden state that MTP layers read and write, and of an embedding.
        self.n_embd_out = int(llama_cpp.llama_model_n_embd_out(handle))
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(handle))
        #: The number of tokens that layers with a sliding window see; 0: there are none.
        self.n_window = int(llama_cpp.llama_model_n_swa(handle))
        #: Whether it has a state that every token changes, alone or (hybrid models) beside a cache
        #: of cells.
        self.has_recurrent_state = bool(
            llama_cpp.llama_model_is_recurrent(handle) or llama_cpp.llama_model_is_hybrid(handle)
        )
        n_on_gpu = 0 if vocabulary_only else n_gpu_layers
        #: What computes: `WORKERS`, or the kernels as `computing` names them, with llama.cpp for
        #: layers on a GPU.
        self.kernels = self._computing_with(n_on_gpu) if workers is None else WORKERS
        try:
            self._check_usable()
        except ModelFileError:
            self.close()
            raise

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def architecture(self) -> str:
        return self.metadata("general.architecture") or ""

    @property
    def pooling(self) -> int | None:
        """llama.cpp's number of how hidden states are pooled; None if this is no embedding model."""
        return pooling_in(self.architecture, self.number("pooling_type"))

    @property
    def n_mtp_layers(self) -> int:
        return 0 if self.why_no_mtp else self.number("nextn_predict_layers")

    @property
    def has_equal_rows(self) -> bool:
        """Whether the model is batch-invariant, also after a prompt that was decoded in any pieces."""
        return self.has_kernels and not self.row_exception

    @property
    def has_kernels(self) -> bool:
        if LLAMA_CPP in self.kernels or self.kernels == WORKERS:
            return False
        kernels = attached()
        return kernels is None or not kernels.lacks_attention

    def _computing_with(self, n_gpu_layers: int) -> str:
        on_cpu = self.loaded.key.kernels
        if n_gpu_layers == 0 or not has_gpu():
            return on_cpu
        n_layers = self.n_layer + 1  # llama.cpp counts the output layer too
        if not 0 < n_gpu_layers < n_layers:
            return f"{LLAMA_CPP} on the GPU"
        return f"{LLAMA_CPP} on the GPU ({n_gpu_layers} of {n_layers} layers), {on_cpu} on the CPU"

    @cached_property
    def row_exception(self) -> str:
        """Why rows of this model depend on their batch, whatever computes, with the operator; else
        empty.
        """
        if self.architecture in _ROW_EXCEPTIONS:
            return _ROW_EXCEPTIONS[self.architecture]
        with opened_parts(self.file) as (_, tensors):
            # Rows of the embeddings are only copied.
            types = {tensor.type for tensor in tensors if "token_embd" not in tensor.name}
        name_of = ggml("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
        tiled = " and ".join(sorted(name_of(kind).decode() for kind in types & _TILED_TYPES))
        how = f"adds up products of {tiled} weights in another order for 8 and more rows (MUL_MAT)"
        return f"llama.cpp {how}" if tiled else ""

    @property
    def is_remote(self) -> bool:
        return self.loaded.remote is not None

    @property
    def call(self) -> Callable[..., Any]:
        return self.loaded.call

    @property
    def handle(self) -> Any:
        self.check_open()
        return self.loaded.handle

    @property
    def vocabulary(self) -> LlamaVocabulary:
        self.check_open()
        return self.loaded.vocabulary

    def check_open(self) -> None:
        if self.is_closed:
            raise BackendError(f"{self.name} is closed")

    @property
    def why_one_sequence(self) -> str | None:
        if self.architecture not in ONE_SEQUENCE:
            return None
        return f"{self.name}: llama.cpp computes several sequences of this architecture ({self.architecture}) wrong"

    def check_parallel(self, n_answers: int) -> None:
        if n_answers > 1 and (why := self.why_one_sequence):
            raise UsageError(why, hint="make one answer at a time: --parallel 1")

    def metadata(self, key: str) -> str | None:
        read = partial(llama_cpp.llama_model_meta_val_str, self.handle, key.encode())
        if (n := read(None, 0)) < 0:
            return None
        buffer = ctypes.create_string_buffer(n + 1)
        read(buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the model's chat template (Jinja), or the one with this name: some files have one
        for tools.
        """
        if self.own_template is not None:
            return self.own_template
        key = name.encode() if name is not None else None
        template = llama_cpp.llama_model_chat_template(self.handle, key)
        return template.decode("utf-8", "replace") if template else None

    def cache_bytes(self, n_ctx: int, type_k: CacheType, type_v: CacheType) -> int:
        """Estimate the size of the KV cache for a context of n_ctx tokens, as if each layer were
        like the first, the only one that llama.cpp describes: too small for hybrid models that
        begin with a recurrent layer.
        """
        n_head_kv = int(llama_cpp.llama_model_n_head_kv(self.handle))
        head_size = self.n_embd // (int(llama_cpp.llama_model_n_head(self.handle)) or 1)
        size_k = self.number("attention.key_length") or head_size
        size_v = self.number("attention.value_length") or head_size
        a_token = size_k * CACHE_TYPES[type_k][1] + size_v * CACHE_TYPES[type_v][1]
        return int(n_ctx * self.n_layer * n_head_kv * a_token)

    def state_bytes(self) -> int:
        if not self.has_recurrent_state:
            return 0
        n_embd, n_layer = self.n_embd, self.n_layer
        if interval := self.number("full_attention_interval"):
            n_layer -= n_layer // interval
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        convolved = inner + 2 * self.number("ssm.group_count") * state
        a_layer = inner * state + max(0, self.number("ssm.conv_kernel") - 1) * convolved
        a_layer += max(0, self.number("shortconv.l_cache") - 1) * n_embd
        a_layer += self.number("wkv.head_size") * n_embd
        return 4 * n_layer * a_layer

    def number(self, key: str) -> int:
        value = self.metadata(f"{self.architecture}.{key}") or ""
        return int(value) if value.isdecimal() else 0

    def close(self) -> None:
        """Close the model: its contexts decode nothing more. The weights are freed with the last
        that uses them.
        """
        if not self.is_closed:
            self.is_closed = True
            self.loaded.release()

    def _check_usable(self) -> None:
        architecture = self.architecture
        rotated = self.metadata(f"{architecture}.rope.dimension_count")
        if rotated == "0" and int(llama_cpp.llama_model_rope_type(self.handle)) != _NO_ROTATION:
            # llama.cpp would never finish its first batch.
            raise ModelFileError(f"{self.path}: damaged: {architecture}.rope.dimension_count is 0")
        hint = "use a model that generates text"
        causal = self.metadata(f"{architecture}.attention.causal") or "true"
        if self.number("nextn_predict_layers") and holds_mtp_only(self.file):
            why = "MTP layers, and not the model that they belong to"
            raise ModelFileError(
                f"{self.path}: {why}", "give them as --draft, and their model as -m"
            )
        if llama_cpp.llama_model_has_encoder(self.handle):
            what = "an encoder-decoder or encoder-only model"
        elif llama_cpp.llama_model_is_diffusion(self.handle):
            what = "a diffusion model"
        elif not llama_cpp.llama_model_has_decoder(self.handle):
            what = "a model without a decoder"
        elif self.metadata(f"{architecture}.pooling_type") == str(_RANK):
            what = "a reranking model"
        elif self.pooling is not None:
            what = "an embedding model"
            hint += f"; `specgen serve -m {self.path}` answers /v1/embeddings with this one"
        elif causal == "false":
            what = "an embedding model"
        elif self.vocabulary.kind == 0:
            raise ModelFileError(f"{self.path}: the model has no vocabulary")
        else:
            return
        why = f"{what} ({architecture}); specgen generates text, token by token"
        raise ModelFileError(f"{self.path}: {why}", hint)


def pooling_in(architecture: str, pooling: int) -> int | None:
    if pooling in (_MEAN, _CLS, _LAST):
        return pooling
    return _MEAN if architecture in _ENCODERS and pooling != _RANK else None
