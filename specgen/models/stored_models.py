"""The models of all programs on this disk, and the names that find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specgen.errors import UnknownModelError
from specgen.models.files import identify
from specgen.models.hub_names import locate
from specgen.models.other_programs import HUB_PREFIX, OWN_PREFIX, PROGRAMS, StoredModel
from specgen.models.registry import CatalogueModel, Registry

#: Ollama's tag of a model whose name is given without a tag.
_LATEST = ":latest"


def stored_models(prefix: str | None = None) -> list[StoredModel]:
    """Return the models that programs keep on this disk, each name once.

    Args:
        prefix: The prefix of the program whose models are returned; None is all programs.
    """
    prefixes = PROGRAMS if prefix is None else (prefix,)
    models: dict[str, StoredModel] = {}
    for each in prefixes:
        for model in PROGRAMS[each].models():
            # The stores of a program are read in the order in which it looks for models itself.
            models.setdefault(model.name, model)
    return list(models.values())


class RegistryModelFinder:
    """Finds the files of registry models, even in the stores of other programs.

    Names and sizes decide: no file is read. The stores are listed once, and only if a model is in
    neither specgen's folder nor the hub's cache: listing them takes milliseconds.
    """

    def __init__(self) -> None:
        #: The usable models of other programs; None before they are listed.
        self._stored: list[StoredModel] | None = None

    def find(self, model: CatalogueModel) -> Path | None:
        """Return the file of a model; None if it is not on this disk."""
        path = locate(model)
        if path is not None:
            return path
        if self._stored is None:
            self._stored = [stored for stored in stored_models() if not stored.problem]
        for stored in self._stored:
            file = identify(stored.path)
            if file is not None and model.is_in(file):
                return stored.path
        return None


def find_on_disk(model: CatalogueModel) -> Path | None:
    """Return the file of a registry model, as `RegistryModelFinder.find` does."""
    return RegistryModelFinder().find(model)


def servable_models(registry: Registry) -> dict[str, Path]:
    """Return the first files of the models on this disk, by short names that differ.

    The name is the one in the registry or in the program, with the program's prefix if an earlier
    model has that name. Models that are unusable according to the program are left out.
    """
    files: dict[str, Path] = {}
    for entry in registry.models.values():
        path = locate(entry)
        if path is not None:
            files[entry.name] = path
    known_paths = set(files.values())
    for model in stored_models():
        if model.path in known_paths or model.problem:
            continue
        name = model.name if model.own_name in files else model.own_name
        files[name] = model.path
    return files


def prefix_of(name: str) -> str | None:
    """Return the prefix of a program in a name, as in "ollama:NAME"; None if it has none."""
    prefix, separator, own_name = name.partition(":")
    return prefix if separator and own_name and prefix in PROGRAMS else None


def other_program_of(name: str) -> str | None:
    """Return the program, other than Hugging Face's, that a name with its prefix belongs to."""
    prefix = prefix_of(name)
    return None if prefix in (None, HUB_PREFIX) else PROGRAMS[prefix].title


def find_stored(name: str) -> StoredModel | None:
    """Return the model that a name means.

    The name may be the one in the program, or a part of it that no other model has: a file without
    its folders or ".gguf", a name without its tag. Upper and lower case are the same.

    Args:
        name: The name, with the prefix of a program or without.

    Returns:
        None if there is no such model.

    Raises:
        UnknownModelError: If the name means several models that differ. It lists their names.
    """
    prefix = prefix_of(name)
    wanted = name if prefix is None else name.partition(":")[2]
    wanted = wanted.casefold().removesuffix(".gguf")
    spellings = {model: _spellings(model) for model in stored_models(prefix)}
    found = [model for model, known in spellings.items() if wanted in known.complete]
    if not found:
        found = [model for model, known in spellings.items() if wanted in known.short]
    # Copies of the same file are the same model.
    if len({identify(model.path) for model in found}) > 1:
        candidates = " or ".join(model.name for model in found)
        raise UnknownModelError(f'"{name}" may be {candidates}', "give one of these names")
    return found[0] if found else None


def named_stored(name: str) -> StoredModel:
    """Return the model that a name with the prefix of a program means.

    Raises:
        UnknownModelError: If there is no such model, or there are several that differ.
    """
    model = find_stored(name)
    if model is None:
        prefix = name.partition(":")[0]
        place = f"of {PROGRAMS[prefix].title} on this disk"
        if prefix == OWN_PREFIX:
            place = "in your model-folders"
        hint = "`specgen models list` shows the models on this disk"
        raise UnknownModelError(f'there is no model "{name}" {place}', hint)
    return model


def shown_name(path: Path) -> str:
    """Return the name of a model's file for users; Ollama's files have Ollama's names."""
    if path.name.startswith("sha256-"):
        for model in stored_models("ollama"):
            if model.path == path:
                return model.name
    return path.name


@dataclass(frozen=True, slots=True)
class _Spellings:
    """What a user may call a model."""

    #: Names that mean this model, even if another one has them as a short name.
    complete: set[str]
    #: Names that mean it unless they mean another one as well.
    short: set[str]


def _spellings(model: StoredModel) -> _Spellings:
    """Return what a user may call a model, without the prefix and in lower case."""
    name = model.own_name.casefold()
    complete = {name, name.removesuffix(_LATEST)}
    short = {model.path.name.casefold().removesuffix(".gguf")}
    for spelling in (name, name.partition(":")[0]):
        short.update(_ends_of(spelling))
    return _Spellings(complete, short)


def _ends_of(name: str) -> Iterator[str]:
    """Yield a name without none, one, two and so on of its folders."""
    parts = PurePosixPath(name).parts
    for index in range(len(parts)):
        yield "/".join(parts[index:])
