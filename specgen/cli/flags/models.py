"""Which models."""

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
            help="What drafts: a GGUF file or a name; `ngram` continues repetitions of the text so "
            "far; `none` decodes plainly. Given again, what drafts for the draft: a yet smaller "
            "model or `ngram`.",
            show_default="the pair's; for a target by itself what `specgen draft find` saved, "
            "a partner that is on this disk, or ngram",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            "--pair",
            metavar="NAME",
            help="A target with its draft from `specgen models list`, fetched on first use.",
            show_default="the default pair, if no target is given",
            rich_help_panel=_MODELS,
        ),
    ] = None,
) -> ModelChoice:
    """The models as the user named them."""
    return staged(target, draft or [], pair)
