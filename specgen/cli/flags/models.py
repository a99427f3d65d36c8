"""The options that name the models."""

from __future__ import annotations

from typing import Annotated

import typer

from specgen.selection.model_choice import ModelChoice, staged

_MODELS = "Models"


def models(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--model",
            "-m",
            metavar="FILE|NAME",
            help="The target: a GGUF file, or a name from `specgen models list`.",
            show_default="the default pair's",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "--model-draft",
            "-md",
            metavar="FILE|NAME|ngram|none",
            help="What drafts: a GGUF file or a name; `ngram` (repetitions of the text so far); `heads` "
            "(made by `specgen draft make`); or `none` (plain decoding). A second --draft drafts for the "
            "first: a smaller model or `ngram`.",
            show_default="the pair's; with -m alone the one that `specgen draft find` or `specgen draft "
            "make` saved, a known partner on this disk, or ngram",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            "--pair",
            metavar="NAME",
            help="A target and its draft, by a name from `specgen models list`; fetched on first use.",
            show_default="the default pair, if no target is given",
            rich_help_panel=_MODELS,
        ),
    ] = None,
) -> ModelChoice:
    """Return the models as the user named them."""
    return staged(target, draft or [], pair)
