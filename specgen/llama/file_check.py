"""The check before llama.cpp reads a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from specgen import __version__
from specgen.errors import BackendError, ModelFileError
from specgen.llama.gguf_file import GgufMetadata
from specgen.system.files import KeptResults, digest_of, parts_of, version_of

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
    try:
        _check_kind(path)
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
    except FileNotFoundError:
        hint = "give the path of a .gguf file, or a name that `specgen models list` shows"
        raise ModelFileError(f"{path}: no such file", hint) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error


def _check_kind(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        inside = sorted(map(str, path.glob("*.gguf")))[:3]
        hint = f"name the file: {', '.join(inside)}" if inside else "it holds no .gguf file"
        raise ModelFileError(f"{path}: a directory, not a model file", hint=hint)
    if not stat.S_ISREG(mode):  # reading a pipe would block
        raise ModelFileError(
            f"{path}: a pipe or a device, not a model file", hint="give the path of a .gguf file"
        )
    parts = parts_of(path)
    if path.name != parts[0].name:
        raise ModelFileError(
            f"{path}: a later file of a model in several", f"give the first: {parts[0]}"
        )
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelFileError(
            f"{path}: the model has {len(parts)} files, and {', '.join(missing)} is missing",
            hint="put all of them into one folder",
        )


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
