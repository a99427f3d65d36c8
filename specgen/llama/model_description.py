"""What a model's file tells about the model, without loading it."""

from __future__ import annotations

import collections
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgen.llama.gguf_file import GgufMetadata, GgufTensor, opened_parts
from specgen.llama.library import llama_cpp, native
from specgen.models.files import parts_of
from specgen.models.hub_names import SHA256
from specgen.system.files import version_of

_FILE_TYPE_PREFIX = "LLAMA_FTYPE_"


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
    #: All metadata but lists, by key.
    metadata: Mapping[str, Any] = field(default_factory=dict)


def describe_model(file: Path) -> ModelDescription:
    """Return the description of a model. It is cached until the file changes.

    Raises:
        BackendError: If one of its files is not a GGUF file.
        OSError: If one of them cannot be accessed.
    """
    return _describe(file, version_of(file))


@functools.lru_cache(maxsize=1000)
def _describe(file: Path, version: tuple[int, int, int]) -> ModelDescription:
    files = parts_of(file)
    with opened_parts(file) as (metadata, tensors):
        architecture = metadata.text("general.architecture")
        return ModelDescription(
            architecture,
            n_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
            weight_type=_weight_type(metadata, tensors),
            n_bytes=sum(part.stat().st_size for part in files),
            modified_s=file.stat().st_mtime,
            digest=_digest(file, version),
            license=metadata.text("general.license"),
            chat_template=metadata.text("tokenizer.chat_template"),
            n_ctx_train=metadata.number(f"{architecture}.context_length"),
            n_embd=metadata.number(f"{architecture}.embedding_length"),
            metadata=metadata.single_values(),
        )


def _weight_type(metadata: GgufMetadata, tensors: Sequence[GgufTensor]) -> str:
    """Return the type of the weights that the file names, or else the one with most bytes."""
    name = _file_type_names().get(metadata.value("general.file_type"))
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
def _file_type_names() -> dict[float | None, str]:
    """Return the names of llama.cpp's types of files, such as ``Q4_K_M``, by their numbers."""
    names: dict[float | None, str] = {}
    for constant in dir(llama_cpp):
        if constant.startswith(_FILE_TYPE_PREFIX):
            name = constant.removeprefix(_FILE_TYPE_PREFIX)
            name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
            names[float(getattr(llama_cpp, constant))] = name
    return names


def _digest(file: Path, version: tuple[int, int, int]) -> str:
    """Return the digest of a file's content if its name is that, or else of its name and version.

    The content itself is not read: that would take minutes.
    """
    name = file.resolve().name
    if SHA256.fullmatch(name):  # the name of a file in the Hugging Face cache
        return name
    return hashlib.sha256(repr((file.name, version[1:])).encode()).hexdigest()
