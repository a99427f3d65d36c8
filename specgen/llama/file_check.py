"""Check a model file before llama.cpp reads it, because some values of the metadata make an assertion
of llama.cpp end the process, or make it compute without end."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import ExitStack
from pathlib import Path

from specgen import __version__
from specgen.errors import BackendError, ModelFileError
from specgen.llama.gguf_metadata import GgufMetadata, parts_of
from specgen.llama.library import forget_log, llama_cpp
from specgen.system.files import KeptResults

_GGUF_MAGIC = b"GGUF"
#: Types of files that are not models, and what to do with each.
_NO_MODELS = {
    "adapter": (
        "a LoRA adapter, not a model",
        "merge it into its model with llama.cpp's llama-export-lora, and give the merged file",
    ),
    "mmproj": (
        "an encoder of images or sound (mmproj), not a model",
        "give the model that it belongs to",
    ),
}
#: The end of the names of all files but the first of a model in several.
_LATER_FILE = re.compile(r"(-(?!00001)\d{5}-of-)\d{5}\.gguf$")
#: Keys of values that are neither negative nor infinite.
_FINITE = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.group_norm_epsilon",
    "hyper_connection.epsilon",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
)
#: Keys of numbers of rotated dimensions.
_ROTATED = ("rope.dimension_count", "rope.dimension_count_swa")
#: llama.cpp's LLAMA_ROPE_TYPE_NONE.
_NO_ROTATION = -1
#: The key of the number of layers, and llama.cpp's LLAMA_MAX_LAYERS.
_LAYERS, _MOST_LAYERS = "block_count", 512
_AGAIN = "fetch or convert the model again"
#: The most bytes of a token that a message shows.
_SHOWN = 60


#: The name of the list of checked files in the cache folder, and the most of them in it.
FILE_NAME, _N_KEPT = "checked.json", 256
#: The files that passed, each in the version that was checked.
_passed = KeptResults(None, _N_KEPT)


def remember_checks(folder: Path | None) -> None:
    """Remember checked files in a folder from now on, so that each file is checked only once; None
    remembers none. If the list is damaged or cannot be written, files are checked again."""
    global _passed  # noqa: PLW0603 - like the choice of kernels, it holds for the process
    _passed = KeptResults(None if folder is None else folder / FILE_NAME, _N_KEPT)


def check_file(path: Path) -> None:
    """Raise `ModelFileError` if a file is not a GGUF, or has metadata that would end the process in
    llama.cpp or keep it there for ever."""
    _check_kind(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if not magic:
        raise ModelFileError(f"{path}: the file is empty", hint="fetch it again")
    if magic != _GGUF_MAGIC:
        raise ModelFileError(
            f"{path}: not a GGUF file (it begins with {magic.decode('latin-1')!r})",
            hint="llama.cpp's convert_hf_to_gguf.py turns Hugging Face models into GGUF",
        )
    if _key(path) not in _passed.read():
        check_metadata(path)


def _check_kind(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise ModelFileError(
            f"{path}: no such file",
            hint="give the path of a .gguf file, or a name that `specgen models list` shows",
        ) from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        inside = sorted(map(str, path.glob("*.gguf")))[:3]
        hint = f"name the file: {', '.join(inside)}" if inside else "it holds no .gguf file"
        raise ModelFileError(f"{path}: a directory, not a model file", hint=hint)
    if not stat.S_ISREG(mode):  # reading a pipe would block
        raise ModelFileError(
            f"{path}: a pipe or a device, not a model file", hint="give the path of a .gguf file"
        )
    parts = parts_of(path)
    if missing := [part.name for part in parts if not part.exists()]:
        raise ModelFileError(
            f"{path}: the model has {len(parts)} files, and {', '.join(missing)} is missing",
            hint="put all of them into one folder",
        )
    if (later := _LATER_FILE.search(path.name)) is not None:
        raise ModelFileError(
            f"{path}: a later file of a model in several",
            hint=f"give the first: {path.with_name(path.name.replace(later[1], '-00001-of-'))}",
        )


def check_metadata(path: Path) -> None:
    """Raise `ModelFileError` if a GGUF file has metadata that `check_file` refuses, however often it was
    checked before."""
    with ExitStack() as resources:
        try:
            metadata = GgufMetadata(resources, path)
        except BackendError:  # llama.cpp says why when it loads the file
            return
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
            raise ModelFileError(
                f"{path}: damaged: tokens {seen[spelling]} and {token} are both {shown!r}",
                hint=_AGAIN,
            )


def _check_values(path: Path, metadata: GgufMetadata) -> None:
    """Raise `ModelFileError` if a value of the file's own architecture is wrong. (A file may have keys of other
    architectures, or for a part of a model, which llama.cpp does not read.)"""
    architecture = metadata.text("general.architecture")
    for key in (_LAYERS, *_FINITE, *_ROTATED):
        name = f"{architecture}.{key}"
        if (value := metadata.value(name)) is None:
            continue
        if key == _LAYERS:
            is_wrong = not 1 <= value <= _MOST_LAYERS
        elif key in _FINITE:
            is_wrong = not 0.0 <= value < float("inf")
        else:
            is_wrong = value < 1 and _rotates(path)
        if is_wrong:
            raise ModelFileError(f"{path}: damaged: {name} is {value:g}", hint=_AGAIN)


def _rotates(path: Path) -> bool:
    """Return whether llama.cpp rotates anything in models of this architecture. If it rotates 0 dimensions, it
    never finishes its first batch."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    forget_log()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:  # llama.cpp says why when it loads the file
        return False
    try:
        return int(llama_cpp.llama_model_rope_type(model)) != _NO_ROTATION
    finally:
        llama_cpp.llama_model_free(model)


def _key(path: Path) -> str:
    try:
        about = path.stat()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from error
    name = os.fsencode(path.resolve())
    numbers = f"\0{about.st_ino} {about.st_size} {about.st_mtime_ns} {__version__}"
    return hashlib.sha256(name + numbers.encode()).hexdigest()
