"""The check of a GGUF file before llama.cpp reads it.

For some damaged files llama.cpp ends the process, and a server would lose all answers in progress.
"""

from __future__ import annotations

import os
from pathlib import Path

from specgen import __version__
from specgen.errors import BackendError, ModelFileError
from specgen.llama.gguf_file import GgufMetadata
from specgen.models.file_kinds import (
    N_HEAD_BYTES,
    OTHER_BYTE_ORDER,
    FileKind,
    has_other_byte_order,
    kind_of,
    piece_of_file,
)
from specgen.models.files import check_model_path, parts_of
from specgen.system.files import KeptResults, digest_of, version_of
from specgen.system.quantities import human_bytes

_GGUF_MAGIC = b"GGUF"
_ADAPTER = FileKind(
    "a LoRA adapter, not a model",
    "merge it into its model with llama.cpp's llama-export-lora, and give the merged file",
)
_MMPROJ = FileKind("an encoder of images or sound (mmproj)", "give the model that it belongs to")
_IMATRIX = FileKind(
    "an importance matrix (imatrix), which is for quantizing a model",
    "give the model that it belongs to",
)
_CONTROL_VECTOR = FileKind(
    "a control vector, not a model",
    "give the model that it belongs to; specgen applies no control vectors",
)
_IMAGE_MODEL = FileKind(
    "a model of images or video, not of text",
    "use it with ComfyUI or stable-diffusion.cpp, and give specgen a language model",
)
_VOCABULARY = FileKind(
    "a vocabulary without weights",
    "give the model itself: such files are for llama.cpp's tests of tokenizers",
)
#: Kinds of GGUF files that are not models, by their metadata "general.type".
_KINDS_BY_TYPE = {"adapter": _ADAPTER, "mmproj": _MMPROJ, "imatrix": _IMATRIX}
#: Kinds of GGUF files that are not models, by their architecture.
_KINDS_BY_ARCHITECTURE = {
    "clip": _MMPROJ,
    "controlvector": _CONTROL_VECTOR,
    "imatrix": _IMATRIX,
    # As ComfyUI-GGUF names them.
    **dict.fromkeys(
        (
            *("aura", "cosmos", "flux", "hidream", "hyvid", "ltxv", "lumina2"),
            *("qwen_image", "sd1", "sd3", "sdxl", "wan"),
        ),
        _IMAGE_MODEL,
    ),
}
#: The beginnings of the names of tensors of image models, whose files may lack an architecture.
_IMAGE_TENSORS = ("model.diffusion_model.", "first_stage_model.", "double_blocks.", "joint_blocks.")
_FETCH_AGAIN = "fetch or convert the model again"
#: Only the weights of files of at least this size are searched for zeros.
_MIN_SEARCHED_BYTES = 1 << 20
#: The number of places in the second half of a file that are searched for other bytes than zeros.
_N_PLACES = 16
_LARGEST_FLOAT = 3.4e38
#: The minimum and the maximum of some metadata. Other values end the process in llama.cpp.
_BOUNDS = {
    "block_count": (1, 512),  # LLAMA_MAX_LAYERS
    "attention.layer_norm_epsilon": (0, _LARGEST_FLOAT),
    "attention.layer_norm_rms_epsilon": (0, _LARGEST_FLOAT),
    "attention.group_norm_epsilon": (0, _LARGEST_FLOAT),
    "hyper_connection.epsilon": (0, _LARGEST_FLOAT),
    "rope.freq_base": (0, _LARGEST_FLOAT),
    "rope.freq_base_swa": (0, _LARGEST_FLOAT),
    "rope.scaling.factor": (0, _LARGEST_FLOAT),
}
#: The maximum number of bytes of a token that a message shows.
_N_SHOWN_BYTES = 60
#: The name of the file in the cache folder that lists the checked files.
FILE_NAME = "checked.json"
#: The keys (`checked_key`) of the files that passed the check.
_passed = KeptResults(None)


def remember_checks(folder: Path | None) -> None:
    """Remember checked files in a folder, so that each is checked only once; None: nowhere."""
    global _passed  # noqa: PLW0603 - like the choice of kernels, it holds for the process
    _passed = KeptResults(None if folder is None else folder / FILE_NAME)


def check_file(path: Path) -> None:
    """Check that llama.cpp can read a file without ending the process.

    Raises:
        ModelFileError: If it is not the first GGUF file of a model, or has metadata for which
            llama.cpp would end the process.
    """
    check_model_path(path)
    try:
        for part in parts_of(path):
            _check_magic(part)
        if checked_key(path) not in _passed.read():
            check_metadata(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def _check_magic(path: Path) -> None:
    """Raise `ModelFileError` if a file does not begin as a GGUF file does."""
    piece = piece_of_file(path.name)
    if piece is not None:
        raise _error_for(path, piece)
    with path.open("rb") as file:
        head = file.read(N_HEAD_BYTES)
    if not head.startswith(_GGUF_MAGIC):
        raise _error_for(path, kind_of(head))
    if has_other_byte_order(head):
        raise _error_for(path, OTHER_BYTE_ORDER)


def _error_for(path: Path, kind: FileKind) -> ModelFileError:
    return ModelFileError(f"{path}: {kind.description}", kind.hint)


def check_metadata(path: Path) -> None:
    """Check the metadata of a file, even if it passed before, and remember that it passed.

    Raises:
        ModelFileError: As `check_file` does.
    """
    parts = parts_of(path)
    try:
        metadata = GgufMetadata(path)
    except BackendError:
        # llama.cpp will report the reason, without ending the process, when it loads the file.
        return
    with metadata:
        kind = _kind_in(metadata, n_parts=len(parts))
        if kind is not None:
            raise _error_for(path, kind)
        _check_tokens(path, metadata)
        _check_values(path, metadata)
    for part in parts:
        _check_complete(part)
    _passed.add({checked_key(path): True})


def _kind_in(metadata: GgufMetadata, n_parts: int) -> FileKind | None:
    """Return what a GGUF file is that is not a model; None if it may be one.

    Args:
        metadata: The metadata of the file, or of the first file of a model.
        n_parts: The number of files of the model by its name.
    """
    architecture = metadata.text("general.architecture")
    kind = _KINDS_BY_TYPE.get(metadata.text("general.type"))
    kind = kind or _KINDS_BY_ARCHITECTURE.get(architecture)
    if kind is not None:
        return kind
    if metadata.text("adapter.type"):
        return _ADAPTER
    if any(tensor.name.startswith(_IMAGE_TENSORS) for tensor in metadata.tensors()):
        return _IMAGE_MODEL
    n_declared = metadata.number("split.count")
    if n_declared > 1 and n_parts == 1:
        number = metadata.number("split.no") + 1
        name = f"NAME-{number:05d}-of-{n_declared:05d}.gguf"
        return FileKind(
            f"file {number} of {n_declared} of a split model, but its name does not say so",
            f"put all files into one folder and name them like {name}, and give the first",
        )
    # The first file of a split model may have no tensors.
    if n_parts == 1 and metadata.n_tensors == 0:
        return _VOCABULARY
    return None


def _check_complete(path: Path) -> None:
    """Raise `ModelFileError` if a GGUF file ends before its last tensor."""
    try:
        metadata = GgufMetadata(path)
    except BackendError:
        return
    with metadata:
        needed_bytes = metadata.end_of_tensors
    n_bytes = path.stat().st_size
    if n_bytes < needed_bytes:
        # Rounded to three digits, the size so far may be the same as the size of the whole file.
        missing = human_bytes(needed_bytes - n_bytes)
        raise ModelFileError(
            f"{path}: an unfinished download: {missing} of {human_bytes(needed_bytes)} are missing",
            "fetch the file again",
        )


def check_weights(path: Path) -> None:
    """Check that the second half of a model's file is not zeros.

    Some programs reserve the room for a download first, so that an unfinished one has its size.

    Raises:
        ModelFileError: If it is.
    """
    for part in parts_of(path):
        if _ends_with_zeros(part):
            what = "the second half of the file has only zeros: an unfinished download"
            raise ModelFileError(f"{part}: {what}", "fetch the file again")


def _ends_with_zeros(path: Path) -> bool:
    """Return whether the second half of a file is zeros, as far as some places tell."""
    n_bytes = path.stat().st_size
    if n_bytes < _MIN_SEARCHED_BYTES:
        return False
    with path.open("rb") as file:
        for place in range(_N_PLACES):
            file.seek(n_bytes - N_HEAD_BYTES - place * n_bytes // (2 * _N_PLACES))
            if any(file.read(N_HEAD_BYTES)):
                return False
    return True


def _check_tokens(path: Path, metadata: GgufMetadata) -> None:
    """Check that no two tokens are the same, which llama.cpp asserts (empty ones may be).

    Raises:
        ModelFileError: If two are.
    """
    ids: dict[bytes, int] = {}
    for token_id, token in enumerate(metadata.texts("tokenizer.ggml.tokens")):
        if not token:
            continue
        first_id = ids.setdefault(token, token_id)
        if first_id != token_id:
            shown = token[:_N_SHOWN_BYTES].decode("utf-8", "replace")
            raise ModelFileError(
                f"{path}: damaged: tokens {first_id} and {token_id} are both {shown!r}",
                _FETCH_AGAIN,
            )


def _check_values(path: Path, metadata: GgufMetadata) -> None:
    """Raise `ModelFileError` if a value is outside of its bounds in `_BOUNDS`."""
    # Only keys of the file's own architecture matter to llama.cpp.
    architecture = metadata.text("general.architecture")
    for key, (minimum, maximum) in _BOUNDS.items():
        name = f"{architecture}.{key}"
        value = metadata.value(name)
        if value is not None and not minimum <= value <= maximum:
            raise ModelFileError(f"{path}: damaged: {name} is {value:g}", _FETCH_AGAIN)


def checked_key(path: Path) -> str:
    """Return the key of a file in the list of checked files.

    It changes with the versions of the model's files, and with this check's.
    """
    parts = [version_of(part) for part in parts_of(path)]
    check = [__version__, *version_of(Path(__file__))]
    return digest_of([os.fspath(path.resolve()), parts, check])
