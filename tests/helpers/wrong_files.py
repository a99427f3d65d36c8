"""Files that are not models, but that users might pass as models."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.tiny import TinyConfig, write_tiny_model
from tests.tiny.file import add_metadata, write_and_close
from tests.tiny.vocabulary import tiny_vocabulary


@dataclass(frozen=True)
class WrongFile:
    """A kind of file that is not a model."""

    #: Writes such a file.
    write: Callable[[Path], object]
    #: A part of the error's message, which says what the file is.
    said: str
    #: A part of the hint, which says what to do.
    hint: str


def _with_bytes(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _gguf(
    metadata: Mapping[str, str | int],
    tensors: Mapping[str, tuple[int, ...]],
    path: Path,
) -> None:
    """Write a GGUF file; its metadata names the architecture, if it has one."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    write_and_close(writer)


def _vocabulary(path: Path) -> None:
    """Write a file like llama.cpp's ggml-vocab-*.gguf."""
    config = TinyConfig()
    writer = gguf.GGUFWriter(path, config.architecture)
    add_metadata(writer, config, tiny_vocabulary(config))
    write_and_close(writer)


def _model(change: Callable[[bytearray], Any], path: Path) -> None:
    """Write a model, then change its bytes."""
    data = bytearray(write_tiny_model(path, TinyConfig()).read_bytes())
    change(data)
    path.write_bytes(data)


def _cut(data: bytearray) -> None:
    del data[len(data) * 2 // 3 :]


def _reverse_version(data: bytearray) -> None:
    data[4:8] = data[4:8][::-1]


def _part_of_split(path: Path) -> None:
    """Write a part that `llama-gguf-split` made and somebody renamed."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("blk.3.attn_q.weight", np.ones((4, 4), np.float32))
    write_and_close(writer)


def _zipped(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    return data.getvalue()


def _safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def _old_imatrix() -> bytes:
    name = b"blk.0.attn_q.weight"
    return struct.pack("<ii", 1, len(name)) + name + struct.pack("<iif", 1, 1, 0.5)


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 98429536\n" % (64 * b"a")
_PAGE = b"\n<!DOCTYPE html>\n<html lang='en'><head><title>model.gguf - Hugging Face</title></head>"
_IN_FULL = "fetch the file again"
_OF_MODEL = "give the model that it belongs to"
#: Kinds of files by name.
WRONG_FILES: Mapping[str, WrongFile] = {
    "empty": WrongFile(partial(_with_bytes, b""), "the file is empty", _IN_FULL),
    "lfs": WrongFile(partial(_with_bytes, _LFS), "a Git LFS pointer", "git lfs pull"),
    "page": WrongFile(
        partial(_with_bytes, _PAGE), "a web page was saved instead of the model", "/resolve/"
    ),
    "refusal": WrongFile(
        partial(_with_bytes, b"Invalid username or password."), "'Invalid username or", "HF_TOKEN"
    ),
    "json": WrongFile(
        partial(_with_bytes, b'{"error": "Entry not found"}'), "a text file, not a model", "server"
    ),
    "zeros": WrongFile(
        partial(_with_bytes, bytes(100_000)), "only zeros: an unfinished download", _IN_FULL
    ),
    "cut": WrongFile(partial(_model, _cut), "an unfinished download: ", _IN_FULL),
    "safetensors": WrongFile(
        partial(_with_bytes, _safetensors()), "a safetensors file", "convert_hf_to_gguf.py"
    ),
    "pytorch": WrongFile(
        partial(_with_bytes, _zipped("archive/data.pkl", "archive/data/0")),
        "a PyTorch checkpoint",
        "convert_hf_to_gguf.py",
    ),
    "pickle": WrongFile(
        partial(_with_bytes, b"\x80\x02}q\x00."), "a PyTorch checkpoint", "convert_hf_to_gguf.py"
    ),
    "zip": WrongFile(
        partial(_with_bytes, _zipped("model.gguf")), "an archive, not a model file", "unpack it"
    ),
    "gzip": WrongFile(
        partial(_with_bytes, b"\x1f\x8b\x08\x00rest"), "an archive, not a model file", "unpack it"
    ),
    "ggml": WrongFile(partial(_with_bytes, b"tjgg\x03\0\0\0"), "a GGML file of 2023", "as GGUF"),
    "llamafile": WrongFile(
        partial(_with_bytes, b"MZqFpD='\n" + bytes(50)), "a program, not a model file", "unzip"
    ),
    "png": WrongFile(
        partial(_with_bytes, b"\x89PNG\r\n\x1a\n"), "a picture or a document", "a .gguf file"
    ),
    "old imatrix": WrongFile(
        partial(_with_bytes, _old_imatrix()), "an importance matrix (imatrix)", _OF_MODEL
    ),
    "imatrix": WrongFile(
        partial(_gguf, {"general.type": "imatrix"}, {"blk.0.attn_q.weight.in_sum2": (4,)}),
        "an importance matrix (imatrix)",
        _OF_MODEL,
    ),
    "control vector": WrongFile(
        partial(_gguf, {"general.architecture": "controlvector"}, {"direction.1": (8,)}),
        "a control vector, not a model",
        _OF_MODEL,
    ),
    "lora": WrongFile(
        partial(
            _gguf,
            {"general.architecture": "llama", "general.type": "adapter"},
            {"blk.0.attn_q.weight.lora_a": (4, 4)},
        ),
        "a LoRA adapter",
        "merge it",
    ),
    "old lora": WrongFile(
        partial(
            _gguf,
            {"general.architecture": "llama", "adapter.type": "lora"},
            {"blk.0.attn_q.weight.lora_a": (4, 4)},
        ),
        "a LoRA adapter",
        "merge it",
    ),
    "mmproj": WrongFile(
        partial(
            _gguf,
            {"general.architecture": "clip", "general.type": "mmproj"},
            {"v.patch_embd.weight": (4, 4)},
        ),
        "an encoder of images or sound (mmproj)",
        _OF_MODEL,
    ),
    "old mmproj": WrongFile(
        partial(_gguf, {"general.architecture": "clip"}, {"v.patch_embd.weight": (4, 4)}),
        "an encoder of images or sound (mmproj)",
        _OF_MODEL,
    ),
    "flux": WrongFile(
        partial(
            _gguf, {"general.architecture": "flux"}, {"double_blocks.0.img_attn.weight": (4, 4)}
        ),
        "a model of images or video",
        "stable-diffusion.cpp",
    ),
    "stable diffusion": WrongFile(
        partial(_gguf, {}, {"model.diffusion_model.out.0.weight": (4, 4)}),
        "a model of images or video",
        "stable-diffusion.cpp",
    ),
    "vocabulary": WrongFile(_vocabulary, "a vocabulary without weights", "give the model itself"),
    "part": WrongFile(_part_of_split, "file 2 of 3 of a split model", "NAME-00002-of-00003.gguf"),
    "big endian": WrongFile(
        partial(_model, _reverse_version), "the other byte order", "gguf-convert-endian"
    ),
    "noise": WrongFile(
        partial(_with_bytes, b"\xde\xad\xbe\xef" * 10), "not a GGUF file (it begins", "convert"
    ),
}
