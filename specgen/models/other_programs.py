"""The models that other programs keep on this disk, and those in the user's own folders.

Names are those that the programs use themselves. To find models, folders are listed and small
descriptions are read; no model file is opened, and nothing in a store is changed.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgen.models.files import SHARD
from specgen.models.hub_names import PREFIX, SHA256, cached_models, models_among
from specgen.models.own_folders import model_folders
from specgen.system.files import files_below, path_of, read_object
from specgen.system.folders import usable, user_folder

#: The prefix of the models in the Hugging Face cache.
HUB_PREFIX = PREFIX.removesuffix(":")
#: The prefix of models in the folders that config.toml names.
OWN_PREFIX = "folder"
#: Where Ollama's service keeps its models on Linux.
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
_OLLAMA_REGISTRY = "registry.ollama.ai"
_OLLAMA_NAMESPACE = "library"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"
#: The beginning of the name of a file that GPT4All has not downloaded completely.
_GPT4ALL_UNFINISHED = "incomplete"
#: llama.cpp's description of a model that its older versions downloaded: USER, REPO and the tag.
_LLAMA_CPP_MANIFEST = re.compile(r"manifest=(?P<repo>[^=]+=[^=]+)=(?P<tag>[^=]+)\.json")
#: The line of Jan's model.yml that names the file, relative to Jan's data folder.
_JAN_MODEL_PATH = re.compile(r"^model_path:\s*(?P<path>.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this disk, under the name that the program it belongs to has for it."""

    #: What precedes the name to tell programs apart, as in "ollama".
    prefix: str
    #: The name in the program.
    own_name: str
    #: The first file of the model, which may be missing or damaged.
    path: Path
    #: Why specgen cannot use the model, as far as the program's description of it tells.
    problem: str = ""

    @property
    def name(self) -> str:
        """The name with its prefix, which no model of another program has."""
        return f"{self.prefix}:{self.own_name}"

    @property
    def program(self) -> str:
        """The program that the model belongs to."""
        return PROGRAMS[self.prefix].title


# --- Ollama ---------------------------------------------------------------------------------------


def _ollama_models() -> Iterator[StoredModel]:
    """Yield Ollama's models. Each has a manifest, which lists the digests that name its files."""
    given = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    folders = [path_of(given)] if given else []
    folders += [_home() / ".ollama" / "models", _OLLAMA_SERVICE]
    for folder in folders:
        manifests = folder / "manifests"
        # A manifest is at HOST/NAMESPACE/MODEL/TAG.
        for manifest in _files(manifests, "*/*/*/*"):
            host, namespace, model, tag = manifest.relative_to(manifests).parts
            name = f"{model}:{tag}"
            if (host, namespace) != (_OLLAMA_REGISTRY, _OLLAMA_NAMESPACE):
                name = f"{namespace}/{name}"
            if host != _OLLAMA_REGISTRY:
                name = f"{host}/{name}"
            yield from _ollama_model(name, read_object(manifest), folder / "blobs")


def _ollama_model(
    name: str,
    manifest: dict[str, Any],
    blobs: Path,
) -> Iterator[StoredModel]:
    """Yield the model of a manifest, unless it has no file here, as models in the cloud have."""
    layers = manifest.get("layers")
    digests: dict[str, list[str]] = {}
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict):
            digest = str(layer.get("digest")).replace("sha256:", "sha256-")
            digests.setdefault(str(layer.get("mediaType")), []).append(digest)
    model_digests = digests.get(_OLLAMA_MODEL, [])
    if not model_digests or not SHA256.fullmatch(model_digests[0].removeprefix("sha256-")):
        return
    problem = ""
    if len(model_digests) > 1:
        problem = "its weights are in several files, which only Ollama can join"
    elif _OLLAMA_ADAPTER in digests:
        problem = "it has a LoRA adapter, which specgen does not apply"
    yield StoredModel("ollama", name, blobs / model_digests[0], problem)


# --- LM Studio, GPT4All and folders: the names are those of the files -----------------------------


def _lm_studio_models() -> Iterator[StoredModel]:
    """Yield LM Studio's models, at USER/REPO/FILE in its folder or the one that its user chose."""
    homes = [_home() / ".lmstudio", _home() / ".cache" / "lm-studio"]
    with suppress(OSError, UnicodeDecodeError):
        pointer = (_home() / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        if pointer:
            homes.insert(0, Path(pointer))
    for home in homes:
        chosen = read_object(home / "settings.json").get("downloadsFolder")
        if isinstance(chosen, str) and chosen:
            yield from _in_folder("lmstudio", Path(chosen))
        yield from _in_folder("lmstudio", home / "models")


def _gpt4all_models() -> Iterator[StoredModel]:
    """Yield the models of GPT4All and its Python package, also in the folder that users choose."""
    settings = configparser.ConfigParser(interpolation=None, strict=False)
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        config = user_folder(lambda folders: folders.user_config_path)
        settings.read(config / "nomic.ai" / "GPT4All.ini", encoding="utf-8")
    chosen = settings.get("General", "modelPath", fallback="")
    if chosen:
        yield from _in_folder("gpt4all", Path(chosen))
    data = user_folder(lambda folders: folders.user_data_path)
    yield from _in_folder("gpt4all", data / "nomic.ai" / "GPT4All")
    yield from _in_folder("gpt4all", _home() / ".cache" / "gpt4all")


def _own_models() -> Iterator[StoredModel]:
    """Yield the models in the folders that config.toml names."""
    for folder in model_folders():
        yield from _in_folder(OWN_PREFIX, folder)


def _in_folder(prefix: str, folder: Path) -> Iterator[StoredModel]:
    """Yield the GGUF models in a folder and its subfolders, named after their files."""
    paths = sorted(path for path in files_below(folder) if path.suffix.lower() == ".gguf")
    names = [path.relative_to(folder).as_posix() for path in paths]
    for files in models_among(names, with_drafts=True):
        path = folder / files[0]
        if prefix == "gpt4all" and path.name.startswith(_GPT4ALL_UNFINISHED):
            continue
        yield StoredModel(prefix, _without_suffix(files[0]), path)


def _without_suffix(name: str) -> str:
    """Return the name of a model's file without ".gguf" and the number of a part."""
    shard = SHARD.fullmatch(name)
    return shard["stem"] if shard is not None else name[: -len(".gguf")]


# --- llama.cpp ------------------------------------------------------------------------------------


def _llama_cpp_models() -> Iterator[StoredModel]:
    """Yield the models that llama.cpp downloaded.

    Newer versions lay their folder out like the Hugging Face cache. Older ones put all files into
    it, as USER_REPO_FILE, with a description of what USER/REPO:TAG means.
    """
    folder = usable(_llama_cpp_cache())
    for cached in cached_models(cache=folder):
        yield StoredModel("llama.cpp", str(cached.reference).removeprefix(PREFIX), cached.path)
    described: set[Path] = set()
    for manifest in _files(folder, "manifest=*.json"):
        match = _LLAMA_CPP_MANIFEST.fullmatch(manifest.name)
        gguf_file = read_object(manifest).get("ggufFile")
        if match is None or not isinstance(gguf_file, dict):
            continue
        repo = match["repo"].replace("=", "/")
        path = folder / f"{repo}/{gguf_file.get('rfilename')}".replace("/", "_")
        described.add(path)
        yield StoredModel("llama.cpp", f"{repo}:{match['tag']}", path)
    names = [path.name for path in _files(folder, "*.gguf")]
    for files in models_among(names, with_drafts=True):
        if folder / files[0] not in described:
            yield StoredModel("llama.cpp", _without_suffix(files[0]), folder / files[0])


def _llama_cpp_cache() -> Path:
    """Return the folder of llama.cpp's downloads."""
    given = os.environ.get("LLAMA_CACHE")
    if given:
        return path_of(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "")) / "llama.cpp"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "llama.cpp"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else _home() / ".cache") / "llama.cpp"


# --- Jan ------------------------------------------------------------------------------------------


def _jan_models() -> Iterator[StoredModel]:
    """Yield Jan's models: the folders with a model.yml, which names the file."""
    home = user_folder(lambda folders: folders.user_data_path, roaming=True) / "Jan"
    chosen = read_object(home / "settings.json").get("data_folder")
    data = Path(chosen) if isinstance(chosen, str) and chosen else home / "data"
    models = data / "llamacpp" / "models"
    for description in _files(models, "**/model.yml"):
        with suppress(OSError, UnicodeDecodeError):
            match = _JAN_MODEL_PATH.search(description.read_text(encoding="utf-8"))
            if match is not None:
                path = data / match["path"].strip("\"'")
                yield StoredModel("jan", description.parent.relative_to(models).as_posix(), path)


# --- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that keeps models on this disk."""

    #: The program's name.
    title: str
    #: Yields its models.
    models: Callable[[], Iterator[StoredModel]]


def _hub_models() -> Iterator[StoredModel]:
    for model in cached_models():
        yield StoredModel(HUB_PREFIX, str(model.reference).removeprefix(PREFIX), model.path)


#: The programs, by the prefix of their models' names.
PROGRAMS = {
    HUB_PREFIX: _Program("Hugging Face", _hub_models),
    "ollama": _Program("Ollama", _ollama_models),
    "lmstudio": _Program("LM Studio", _lm_studio_models),
    "llama.cpp": _Program("llama.cpp", _llama_cpp_models),
    "jan": _Program("Jan", _jan_models),
    "gpt4all": _Program("GPT4All", _gpt4all_models),
    OWN_PREFIX: _Program("own folder", _own_models),
}


def _home() -> Path:
    try:
        return usable(Path.home())
    except RuntimeError:
        return usable(Path("~"))


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files in a folder whose paths match a pattern; none if it cannot be listed."""
    with suppress(OSError):
        return sorted(path for path in folder.glob(pattern) if path.is_file())
    return []
