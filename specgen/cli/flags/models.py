"""Which models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_MODELS = "Models"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the user named; None where nothing was."""

    target: str | None
    draft: str | None
    pair: str | None


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
        str | None,
        typer.Option(
            "--draft",
            "--model-draft",
            "-md",
            metavar="FILE|NAME|ngram|none",
            help="What drafts: a GGUF file or a name; `ngram` continues repetitions of the text so "
            "far; `none` decodes plainly.",
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
    return ModelChoice(target, draft, pair)
