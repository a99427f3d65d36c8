"""GGUF files: their metadata, read by the functions of gguf.h, their MTP layers, and the check
before llama.cpp reads a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specgen import __version__
from specgen.errors import BackendError, ModelFileError
from specgen.llama.library import forget_log, ggml
from specgen.models.files import check_model_path, parts_of
from specgen.system.files import KeptResults, digest_of, version_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: Types of values in gguf.h.
_STRING, _ARRAY = 8, 9
#: The functions that read numbers of 32 bits, by the type.
_READERS: dict[int | None, tuple[str, Any]] = {
    4: ("gguf_get_val_u32", ctypes.c_uint32),
    5: ("gguf_get_val_i32", ctypes.c_int32),
    6: ("gguf_get_val_f32", ctypes.c_float),
}
#: A file's architecture is found in so many of its first bytes.
_N_SEARCHED = 4096


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file, without its data. It is valid as long as the metadata that it comes from."""

    handle: int
    name: str
    #: GGML's number of its type, and its shape, GGML's first dimension first.
    type: int
    shape: tuple[int, ...]
    n_bytes: int


class _InitParameters(ctypes.Structure):
    """gguf_init_params of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("tensors", ctypes.POINTER(ctypes.c_void_p)))


class GgufMetadata:
    """The metadata of a GGUF file, as a context manager. Raises `BackendError` if it is none."""

    def __init__(self, file: Path) -> None:
        read = ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _InitParameters)
        self._tensors = ctypes.c_void_p()
        forget_log()
        tensors = ctypes.pointer(self._tensors)
        self.handle = read(os.fsencode(file), _InitParameters(True, tensors))
        if not self.handle:
            raise BackendError(f"{file}: not a GGUF file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        ggml("gguf_free", None, ctypes.c_void_p)(self.handle)
        ggml("ggml_free", None, ctypes.c_void_p)(self._tensors)

    def find(self, key: str) -> int:
        find = ggml("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        return int(find(self.handle, key.encode()))

    def get(self, name: str, result: Any, key: str) -> Any:
        if (index := self.find(key)) < 0:
            return None
        return ggml(name, result, ctypes.c_void_p, ctypes.c_int64)(self.handle, index)

    def value(self, key: str) -> float | None:
        reader = _READERS.get(self.get("gguf_get_kv_type", ctypes.c_int, key))
        return None if reader is None else float(self.get(*reader, key))

    def number(self, key: str) -> int:
        return int(self.value(key) or 0)

    def length(self, key: str) -> int | None:
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _ARRAY:
            return None
        return int(self.get("gguf_get_arr_n", ctypes.c_size_t, key))

    def array(self, key: str, of: type[ctypes.c_bool | ctypes.c_int32]) -> list[int]:
        n = self.length(key) or 0
        data = self.get("gguf_get_arr_data", ctypes.c_void_p, key) if n else None
        return list((of * n).from_address(data)) if data else []

    def text(self, key: str) -> str:
        if self.get("gguf_get_kv_type", ctypes.c_int, key) != _STRING:
            return ""
        value: bytes = self.get("gguf_get_val_str", ctypes.c_char_p, key) or b""
        return value.decode("utf-8", "replace")

    def texts(self, key: str) -> Iterator[bytes]:
        if self.length(key) is None or self.get("gguf_get_arr_type", ctypes.c_int, key) != _STRING:
            return
        about = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t)
        text, index = ggml("gguf_get_arr_str", ctypes.c_char_p, *about), self.find(key)
        for number in range(self.length(key) or 0):
            yield text(self.handle, index, number) or b""

    def tensors(self) -> Iterator[GgufTensor]:
        following = ggml("ggml_get_next_tensor", ctypes.c_void_p, *2 * (ctypes.c_void_p,))
        name = ggml("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        n_bytes = ggml("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
        about = (ctypes.c_void_p, ctypes.c_int64)
        kind = ggml("gguf_get_tensor_type", ctypes.c_int, *about)
        shape = ggml("gguf_get_tensor_ne", ctypes.POINTER(ctypes.c_int64), *about)
        find = ggml("gguf_find_tensor", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
        tensor = ggml("ggml_get_first_tensor", ctypes.c_void_p, ctypes.c_void_p)(self._tensors)
        while tensor:
            index = find(self.handle, name(tensor))
            yield GgufTensor(
                tensor,
                name(tensor).decode("utf-8", "replace"),
                kind(self.handle, index),
                tuple(shape(self.handle, index)[:4]),
                n_bytes(tensor),
            )
            tensor = following(self._tensors, tensor)


@contextlib.contextmanager
def opened_parts(file: Path) -> Iterator[tuple[GgufMetadata, list[GgufTensor]]]:
    with ExitStack() as resources:
        parts = [resources.enter_context(GgufMetadata(part)) for part in parts_of(file)]
        yield parts[0], [tensor for part in parts for tensor in part.tensors()]


def architecture_of(path: Path) -> str:
    """Return the architecture that a file names in its first bytes; empty if it names none or
    cannot be read.
    """
    with contextlib.suppress(OSError, struct.error), path.open("rb") as file:
        _, _, rest = file.read(_N_SEARCHED).partition(b"general.architecture")
        kind, length = struct.unpack_from("<IQ", rest)
        if kind == _STRING:
            return rest[12 : 12 + length].decode("utf-8", "replace")
    return ""


# --- multi-token prediction (MTP) layers -------------------------------------------------------------

# They stand behind the last layer of a model, and were trained with it: from a token and the
# model's hidden state before it they predict the next one (DeepSeek-V3, arXiv:2412.19437, section
# 2.2). GGUF files call them NextN; some makers put them into a file of their own (`mtp-*.gguf`),
# with copies of the embeddings and the output matrix.

#: The architectures whose MTP layers llama.cpp computes.
_MTP_ARCHITECTURES = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa"),
        *("glm4moe", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
        "step35",
    )
)
#: Those with more than one MTP layer: each drafts one token.
_SEVERAL_LAYERS = frozenset({"hy_v3", "mimo2", "step35"})
#: How files of MTP layers alone are named.
_PREFIX = "mtp-"
#: In other files the key of their number stands in so many of the first bytes.
_N_MTP_SEARCHED = 2**16
_N_LAYERS_KEY = b".nextn_predict_layers"
_FIRST_OF_TRUNK = "blk.0.attn_norm.weight"


def holds_mtp_only(path: Path) -> bool:
    """Return whether a file holds MTP layers for another file's model; False if it cannot be read."""
    with contextlib.suppress(OSError, BackendError):
        with path.open("rb") as file:
            begin = file.read(_N_MTP_SEARCHED)
        if not path.name.startswith(_PREFIX) and _N_LAYERS_KEY not in begin:
            return False
        names = _layers_of(path).tensors
        return _FIRST_OF_TRUNK not in names and any(".nextn." in name for name in names)
    return False


def mtp_of(target: Path) -> Path | Literal["mtp"] | None:
    """Return "mtp" if the target's own MTP layers draft, else the file beside it that fits, and is
    named most alike.
    """
    if not why_no_mtp(target):
        return "mtp"
    files = sorted(
        path for path in target.parent.glob(f"{_PREFIX}*.gguf") if path.name != target.name
    )
    shape = None
    with contextlib.suppress(OSError, BackendError):
        shape = _layers_of(target).shape
    fitting = [path for path in files if holds_mtp_only(path) and _layers_of(path).shape == shape]

    def likeness(path: Path) -> int:
        pairs = zip(path.name.removeprefix(_PREFIX), target.name, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return max(fitting, key=likeness, default=None)


class _Layers(NamedTuple):
    """What a file's metadata say of its layers, and the names of its tensors."""

    architecture: str
    n_layers: int
    n_mtp: int
    n_embd: int
    tensors: frozenset[str]

    @property
    def shape(self) -> tuple[str, int, int]:
        return self.architecture, self.n_embd, self.n_layers - self.n_mtp


def _layers_of(path: Path) -> _Layers:
    """Read a file's metadata, once while it is the same (some 40 ms). Raise `OSError` or
    `BackendError`.
    """
    return _read_layers(path, version_of(path))


@lru_cache(maxsize=8)
def _read_layers(path: Path, _version: tuple[int, int, int]) -> _Layers:
    with opened_parts(path) as (about, tensors):
        architecture = about.text("general.architecture")
        n_layers, n_mtp, n_embd = (
            about.number(f"{architecture}.{key}")
            for key in ("block_count", "nextn_predict_layers", "embedding_length")
        )
        names = frozenset(tensor.name for tensor in tensors)
        return _Layers(architecture, n_layers, n_mtp, n_embd, names)


def why_no_mtp(path: Path) -> str:
    try:
        architecture, _, n_mtp, _, names = _layers_of(path)
    except (OSError, BackendError):
        return "it is not a GGUF file"
    if not n_mtp:
        return "it has no MTP layers"
    if not any(".nextn." in name for name in names):
        return "its MTP layers were removed from the file"
    if "token_embd.weight" not in names:
        return "it has only MTP layers, and not the model that they belong to"
    if architecture not in _MTP_ARCHITECTURES:
        return f"llama.cpp does not compute the MTP layers of its architecture ({architecture})"
    if n_mtp > 1 and architecture not in _SEVERAL_LAYERS:
        return f"llama.cpp computes a single MTP layer of its architecture ({architecture}), not {n_mtp}"
    return ""


# --- the check ------------------------------------------------------------------------------------

_GGUF_MAGIC = b"GGUF"
#: Types of files that are not models, and what to do with each.
_NO_MODELS = {
    "adapter": (
        "a LoRA adapter, not a model",
        "merge it into its model with llama.cpp's llama-export-lora, and give the merged file",
    ),
    "mmproj": ("an encoder of images or sound (mmproj)", "give the model that it belongs to"),
}
_AGAIN = "fetch or convert the model again"
#: Values of the metadata beyond these end the process in llama.cpp, a server with all of its
#: answers.
_LARGEST = 3.4e38
_BOUNDS = {
    "block_count": (1, 512),  # LLAMA_MAX_LAYERS
    "attention.layer_norm_epsilon": (0, _LARGEST),
    "attention.layer_norm_rms_epsilon": (0, _LARGEST),
    "attention.group_norm_epsilon": (0, _LARGEST),
    "hyper_connection.epsilon": (0, _LARGEST),
    "rope.freq_base": (0, _LARGEST),
    "rope.freq_base_swa": (0, _LARGEST),
    "rope.scaling.factor": (0, _LARGEST),
}
#: The most bytes of a token that a message shows.
_SHOWN = 60
#: The name of the list of checked files in the cache folder.
FILE_NAME = "checked.json"
#: The files that passed, each in the version that was checked.
_passed = KeptResults(None)


def remember_checks(folder: Path | None) -> None:
    """Remember checked files in a folder from now on, so that each file is checked only once; None
    remembers none.
    """
    global _passed  # noqa: PLW0603 - like the choice of kernels, it holds for the process
    _passed = KeptResults(None if folder is None else folder / FILE_NAME)


def check_file(path: Path) -> None:
    """Raise `ModelFileError` if a file is no GGUF of a model, or has metadata that end the process
    in llama.cpp.
    """
    check_model_path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
        if not magic:
            raise ModelFileError(f"{path}: the file is empty", hint="fetch it again")
        if magic != _GGUF_MAGIC:
            raise ModelFileError(
                f"{path}: not a GGUF file (it begins with {magic.decode('latin-1')!r})",
                hint="llama.cpp's convert_hf_to_gguf.py turns Hugging Face models into GGUF",
            )
        if _key(path) not in _passed.read():
            check_metadata(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def check_metadata(path: Path) -> None:
    """Check the metadata of a file, as `check_file` does, however often it was checked before."""
    try:
        metadata = GgufMetadata(path)
    except BackendError:  # llama.cpp says why when it loads the file
        return
    with metadata:
        if (found := _NO_MODELS.get(metadata.text("general.type"))) is not None:
            raise ModelFileError(f"{path}: {found[0]}", hint=found[1])
        _check_tokens(path, metadata)
        _check_values(path, metadata)
    _passed.add({_key(path): True})


def _check_tokens(path: Path, metadata: GgufMetadata) -> None:
    seen: dict[bytes, int] = {}
    for token, spelling in enumerate(metadata.texts("tokenizer.ggml.tokens")):
        if spelling and seen.setdefault(spelling, token) != token:
            shown = spelling[:_SHOWN].decode("utf-8", "replace")
            why = f"damaged: tokens {seen[spelling]} and {token} are both {shown!r}"
            raise ModelFileError(f"{path}: {why}", _AGAIN)


def _check_values(path: Path, metadata: GgufMetadata) -> None:
    architecture = metadata.text("general.architecture")  # a file may have keys of others
    for key, (least, most) in _BOUNDS.items():
        name = f"{architecture}.{key}"
        value = metadata.value(name)
        if value is not None and not least <= value <= most:
            raise ModelFileError(f"{path}: damaged: {name} is {value:g}", _AGAIN)


def _key(path: Path) -> str:
    return digest_of([os.fspath(path.resolve()), *version_of(path), __version__])
