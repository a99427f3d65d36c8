"""``specgen draft``: finds the best draft for a target, or makes one."""

from __future__ import annotations

import typer

from specgen.cli.draft_find import find
from specgen.cli.draft_learn import forget, learn
from specgen.cli.draft_make import data, make

app = typer.Typer(
    name="draft", help="Find, make or train the best draft for a target.", no_args_is_help=True
)
for command in (find, make, data, learn, forget):
    app.command()(command)
