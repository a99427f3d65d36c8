"""The check of a GGUF file before llama.cpp reads it.

For some damaged files llama.cpp ends the process, and a server would lose all answers in progress.
"""

from __future__ import annotations

import os
from pathlib import Path

from specgen import __version__
from specgen.errors import BackendError, ModelFileError
from specgen.llama.gguf_file import GgufMetadata
from specgen.models.files import check_model_path
from specgen.system.files import KeptResults, digest_of, version_of

_GGUF_MAGIC = b"GGUF"
#: Types of GGUF files that are not models: a description and a hint for each.
_NOT_MODELS = {
    "adapter": (
        "a LoRA adapter, not a model",
        "merge it into its model with llama.cpp's llama-export-lora, and give the merged file",
    ),
    "mmproj": ("an encoder of images or sound (mmproj)", "give the model that it belongs to"),
}
_FETCH_AGAIN = "fetch or convert the model again"
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
        _check_magic(path)
        if checked_key(path) not in _passed.read():
            check_metadata(path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def _check_magic(path: Path) -> None:
    """Raise `ModelFileError` if a file does not begin as a GGUF file does."""
    with path.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if not magic:
        raise ModelFileError(f"{path}: the file is empty", "fetch it again")
    if magic != _GGUF_MAGIC:
        raise ModelFileError(
            f"{path}: not a GGUF file (it begins with {magic.decode('latin-1')!r})",
            "llama.cpp's convert_hf_to_gguf.py turns Hugging Face models into GGUF",
        )


def check_metadata(path: Path) -> None:
    """Check the metadata of a file, even if it passed before, and remember that it passed.

    Raises:
        ModelFileError: As `check_file` does.
    """
    try:
        metadata = GgufMetadata(path)
    except BackendError:
        # llama.cpp will report the reason, without ending the process, when it loads the file.
        return
    with metadata:
        file_type = metadata.text("general.type")
        if file_type in _NOT_MODELS:
            description, hint = _NOT_MODELS[file_type]
            raise ModelFileError(f"{path}: {description}", hint)
        _check_tokens(path, metadata)
        _check_values(path, metadata)
    _passed.add({checked_key(path): True})


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

    It changes with the file's version and with specgen's.
    """
    return digest_of([os.fspath(path.resolve()), *version_of(path), __version__])
