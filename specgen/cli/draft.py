"""``specgen draft``: find what drafts best for a target, or make it."""

from __future__ import annotations

import typer

from specgen.cli.draft_find import find
from specgen.cli.draft_make import data, make

app = typer.Typer(
    name="draft", help="Find or make what drafts best for a model.", no_args_is_help=True
)
for command in (find, make, data):
    app.command()(command)
