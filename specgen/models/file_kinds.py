"""What a file is that was given as a model and cannot be read as GGUF."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

#: The number of bytes at the beginning of a file that tell its kind.
N_HEAD_BYTES = 4096
#: The maximum number of characters of a text file that a message shows.
_MAX_SHOWN = 60
#: The first characters of web pages, in lower case.
_PAGE_STARTS = ("<!doctype html", "<html", "<head")
#: The maximum length of the JSON header of a safetensors file.
_MAX_HEADER_BYTES = 100_000_000
#: The end of the name of a piece of a GGUF file that was cut by other programs than llama.cpp:
#: "model.gguf-split-a", "model.gguf.part1of2".
_PIECE = re.compile(r"(?P<whole>.+\.gguf)[-._](split|part)[-._]?\w+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is instead of a model."""

    #: The end of the sentence "FILE: ...".
    description: str
    #: What to do.
    hint: str


_FETCH_AGAIN = "fetch the file again"
_CONVERT = (
    "llama.cpp's convert_hf_to_gguf.py turns Hugging Face models into GGUF; many have a repository "
    "with GGUF files, too"
)
EMPTY = FileKind("the file is empty", _FETCH_AGAIN)
_GIT_LFS = FileKind(
    "a Git LFS pointer, not the model itself",
    "run `git lfs pull` in its repository, or download the file",
)
_WEB_PAGE = FileKind(
    "a web page was saved instead of the model",
    "download the file itself: on Hugging Face, its address has /resolve/ instead of /blob/ "
    "(-hf USER/MODEL fetches it)",
)
_ZEROS = FileKind("it has only zeros: an unfinished download", _FETCH_AGAIN)
_SAFETENSORS = FileKind("a safetensors file, not GGUF", _CONVERT)
_PYTORCH = FileKind("a PyTorch checkpoint, not GGUF", _CONVERT)
_ARCHIVE = FileKind("an archive, not a model file", "unpack it, and give the .gguf file in it")
_OLD_GGML = FileKind(
    "a GGML file of 2023 or of whisper.cpp, not GGUF",
    "fetch the model as GGUF: llama.cpp cannot read the older format any more",
)
_PROGRAM = FileKind(
    "a program, not a model file",
    "if it is a llamafile, `unzip` gets the .gguf file out of it",
)
_OTHER_DATA = FileKind("a picture or a document, not a model file", "give a .gguf file")
_OLD_IMATRIX = FileKind(
    "an importance matrix (imatrix), which is for quantizing a model",
    "give the model that it belongs to",
)
OTHER_BYTE_ORDER = FileKind(
    "a GGUF file for machines with the other byte order",
    "fetch the usual (little-endian) file, or convert it with gguf-convert-endian",
)
#: Kinds by the bytes at the beginning of the file.
_MAGICS: tuple[tuple[bytes, FileKind], ...] = (
    (b"version https://git-lfs", _GIT_LFS),
    (b"PK\x03\x04", _ARCHIVE),
    (b"\x1f\x8b", _ARCHIVE),  # gzip
    (b"7z\xbc\xaf\x27\x1c", _ARCHIVE),
    (b"Rar!\x1a\x07", _ARCHIVE),
    (b"\xfd7zXZ\x00", _ARCHIVE),
    (b"\x28\xb5\x2f\xfd", _ARCHIVE),  # zstd
    (b"BZh", _ARCHIVE),
    (b"\x80\x02", _PYTORCH),  # pickle, as PyTorch wrote it before 2020
    (b"lmgg", _OLD_GGML),
    (b"fmgg", _OLD_GGML),
    (b"tjgg", _OLD_GGML),
    (b"algg", _OLD_GGML),
    (b"\x7fELF", _PROGRAM),
    (b"MZ", _PROGRAM),
    (b"\x89PNG", _OTHER_DATA),
    (b"\xff\xd8\xff", _OTHER_DATA),
    (b"%PDF-", _OTHER_DATA),
)


def piece_of_file(name: str) -> FileKind | None:
    """Return the kind of a file that is a piece of a model by its name; None if it is not."""
    match = _PIECE.fullmatch(name)
    if match is None:
        return None
    whole = match["whole"]
    return FileKind(
        "a piece of a model that was split into several files",
        f"join the pieces: cat {whole}?* > {whole}",
    )


def kind_of(head: bytes) -> FileKind:
    """Return what a file is that is not GGUF.

    Args:
        head: The beginning of the file, up to `N_HEAD_BYTES`.
    """
    if not head:
        return EMPTY
    if not any(head):
        return _ZEROS
    for magic, kind in _MAGICS:
        if head.startswith(magic):
            if kind is _ARCHIVE and b"data.pkl" in head:
                return _PYTORCH
            return kind
    if _is_safetensors(head):
        return _SAFETENSORS
    if _is_imatrix(head):
        return _OLD_IMATRIX
    text = _text_in(head)
    if text.lower().startswith(_PAGE_STARTS):
        return _WEB_PAGE
    if text:
        shown = text.partition("\n")[0].strip()[:_MAX_SHOWN]
        return FileKind(
            f"a text file, not a model: it begins with {shown!r}",
            "if it was downloaded, that may be the server's answer: fetch it again (Hugging Face "
            "wants a token in HF_TOKEN for some models)",
        )
    return FileKind(f"not a GGUF file (it begins with {head[:4].decode('latin-1')!r})", _CONVERT)


def has_other_byte_order(head: bytes) -> bool:
    """Return whether the version in the header of a GGUF file has its bytes in reverse order."""
    version = head[4:8]
    return len(version) == 4 and struct.unpack("=I", version)[0] & 0xFFFF == 0


def _is_safetensors(head: bytes) -> bool:
    """Return whether a file begins with the length of a JSON header, and then the header."""
    if len(head) < 9:
        return False
    (n_bytes,) = struct.unpack_from("<Q", head)
    return n_bytes <= _MAX_HEADER_BYTES and head[8:9] == b"{"


def _is_imatrix(head: bytes) -> bool:
    """Return whether a file begins as an imatrix did before GGUF.

    That is the number of its entries, and then the length and the name of the first tensor.
    """
    if len(head) < 8:
        return False
    (n_name_bytes,) = struct.unpack_from("<i", head, 4)
    name = head[8 : 8 + max(0, n_name_bytes)]
    return len(name) == n_name_bytes and name.endswith(b".weight")


def _text_in(head: bytes) -> str:
    """Return the beginning of a text file, without white space before it; "" for other files."""
    # The beginning of a longer file may end within a character.
    errors = "ignore" if len(head) == N_HEAD_BYTES else "strict"
    try:
        text = head.decode("utf-8-sig", errors)
    except UnicodeDecodeError:
        return ""
    is_text = all(char.isprintable() or char in "\t\n\f\r" for char in text)
    return text.lstrip() if is_text else ""
