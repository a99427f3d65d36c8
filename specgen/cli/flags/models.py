"""Which models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from specgen.errors import UsageError

_MODELS = "Models"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What the user named; None where nothing was."""

    target: str | None
    draft: str | None
    pair: str | None
    #: What drafts for the draft, what for that one, and so on.
    helpers: tuple[str, ...] = ()


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


def staged(target: str | None, drafts: Sequence[str], pair: str | None) -> ModelChoice:
    """The models, `drafts` being what drafts for the target, what drafts for that, and so on.
    Raises `UsageError`."""
    if "none" in drafts and len(drafts) > 1:
        raise UsageError("--draft none drafts nothing, so it goes with no other --draft")
    if "ngram" in drafts[:-1]:
        raise UsageError("--draft ngram needs no draft of its own: give it last, after the models")
    return ModelChoice(target, drafts[0] if drafts else None, pair, tuple(drafts[1:]))
