"""What a model's file tells about the model, without loading it."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from specgen.llama.cache_types import bytes_per_value
from specgen.llama.gguf_file import opened_parts
from specgen.llama.library import llama_cpp, native
from specgen.models.files import parts_of
from specgen.models.hub_names import SHA256
from specgen.options import CacheType
from specgen.system.files import version_of

_FILE_TYPE_PREFIX = "LLAMA_FTYPE_"
#: The embeddings of positions, in architectures that learn them, such as GPT-2.
_POSITIONS = "position_embd.weight"


class StoredTensor(NamedTuple):
    """A tensor of a model's files."""

    #: GGML's number for its type.
    type: int
    #: The number of its weights.
    n_weights: int
    #: The size of its data.
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as its file describes it. What the file does not tell is empty, or 0."""

    #: The architecture, as the file names it.
    architecture: str = ""
    #: The number of its weights.
    n_parameters: int = 0
    #: The type of most weights, as the file names it, such as ``Q4_K_M``.
    weight_type: str = ""
    #: The size of its files.
    n_bytes: int = 0
    #: The time of the last change of its file, in seconds since 1970.
    modified_s: float = 0.0
    #: 64 hexadecimal digits that change with the file.
    digest: str = "0" * 64
    #: The licence, as the file names it.
    license: str = ""
    #: Its default chat template.
    chat_template: str = ""
    #: The number of tokens that it was trained with.
    n_ctx_train: int = 0
    #: The length of its hidden states.
    n_embd: int = 0
    #: The number of its tokens.
    n_vocab: int = 0
    #: All metadata but lists, by key.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: The lists of numbers or booleans in the metadata of its architecture, by key.
    lists: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: The tensors of all its files, by name.
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def number(self, key: str) -> int:
        """Return a whole number of the architecture's metadata; 0 if the file does not have it."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return int(value) if isinstance(value, (int, float)) else 0

    def numbers(self, key: str) -> Sequence[int]:
        """Return a list of the architecture's metadata, such as a number for each layer.

        It is empty if the file does not have it, or has the same number for all layers.
        """
        return self.lists.get(f"{self.architecture}.{key}", ())

    def cache_bytes(
        self,
        n_ctx: int,
        type_k: CacheType,
        type_v: CacheType,
    ) -> int:
        """Estimate the size of the KV cache for a context of `n_ctx` tokens, in bytes."""
        heads = "attention.head_count"
        n_heads = max(1, self.number(heads), *self.numbers(heads))
        head_size = self.n_embd // n_heads
        key_size = self.number("attention.key_length") or head_size
        value_size = self.number("attention.value_length") or head_size

        # The heads of keys and values in all layers. (Without attention, there are none.)
        n_kv_heads = sum(self.numbers("attention.head_count_kv"))
        if n_kv_heads == 0:  # the same number for all layers
            n_in_each_layer = self.number("attention.head_count_kv") or self.number(heads)
            n_kv_heads = n_in_each_layer * self.number("block_count")

        key_bytes = key_size * bytes_per_value(type_k)
        value_bytes = value_size * bytes_per_value(type_v)
        return int(n_ctx * n_kv_heads * (key_bytes + value_bytes))

    @property
    def has_learned_positions(self) -> bool:
        """Whether it has an embedding for each position of its training context.

        Then it cannot compute later positions: llama.cpp ends the process.
        """
        return _POSITIONS in self.tensors


def describe_model(file: Path) -> ModelDescription:
    """Return the description of a model.

    Reading a file takes about 40 ms, so the description is cached until the file changes.

    Raises:
        BackendError: If one of its files is not a GGUF file.
        OSError: If one of them cannot be accessed.
    """
    return _describe(file, version_of(file))


@functools.lru_cache(maxsize=256)
def _describe(file: Path, version: tuple[int, int, int]) -> ModelDescription:
    with opened_parts(file) as (about, parts_tensors):
        architecture = about.text("general.architecture")
        metadata = about.single_values()
        keys = [key for key in about.names() if key.startswith(f"{architecture}.")]
        tensors = {
            tensor.name: StoredTensor(tensor.type, math.prod(tensor.shape), tensor.n_bytes)
            for tensor in parts_tensors
        }
        return ModelDescription(
            architecture,
            n_parameters=sum(tensor.n_weights for tensor in tensors.values()),
            weight_type=_weight_type(metadata.get("general.file_type"), tensors.values()),
            n_bytes=sum(part.stat().st_size for part in parts_of(file)),
            modified_s=file.stat().st_mtime,
            digest=_digest(file, version),
            license=about.text("general.license"),
            chat_template=about.text("tokenizer.chat_template"),
            n_ctx_train=about.number(f"{architecture}.context_length"),
            n_embd=about.number(f"{architecture}.embedding_length"),
            n_vocab=about.length("tokenizer.ggml.tokens") or 0,
            metadata=metadata,
            lists={key: numbers for key in keys if (numbers := about.numbers(key))},
            tensors=tensors,
        )


def _weight_type(file_type: object, tensors: Iterable[StoredTensor]) -> str:
    """Return the type of the weights that the file names, or else the one with most bytes.

    Args:
        file_type: llama.cpp's number for the type that the file names, if it names one.
        tensors: The tensors.
    """
    name = _file_type_names().get(file_type)
    if name is not None:
        return name
    n_bytes_by_type: collections.Counter[int] = collections.Counter()
    for tensor in tensors:
        n_bytes_by_type[tensor.type] += tensor.n_bytes
    if not n_bytes_by_type:
        return ""
    ((number, _),) = n_bytes_by_type.most_common(1)
    type_name: bytes = native.ggml_type_name(number)
    return type_name.decode().upper()


@functools.cache
def _file_type_names() -> dict[object, str]:
    """Return the names of llama.cpp's types of files, such as ``Q4_K_M``, by their numbers."""
    names: dict[object, str] = {}
    for constant in dir(llama_cpp):
        if constant.startswith(_FILE_TYPE_PREFIX):
            name = constant.removeprefix(_FILE_TYPE_PREFIX)
            name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
            names[getattr(llama_cpp, constant)] = name
    return names


def _digest(file: Path, version: tuple[int, int, int]) -> str:
    """Return the digest of a file's content if its name is that, or else of its name and version.

    The content itself is not read: that would take minutes.
    """
    name = file.resolve().name
    if SHA256.fullmatch(name):  # the name of a file in the Hugging Face cache
        return name
    return hashlib.sha256(repr((file.name, version[1:])).encode()).hexdigest()
