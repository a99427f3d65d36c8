"""How much is drafted, and how drafts are judged."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from specgen.errors import UsageError
from specgen.options import DRAFT_TEMPERATURE, DraftOptions, TranslateMode, VerifierName

_DEFAULT = DraftOptions()
_DRAFTING = "Drafting"


def drafting(
    draft_max: Annotated[
        int,
        typer.Option(
            "--draft-max",
            "--draft-n",
            min=0,
            max=128,
            help="The most tokens to draft a round; 0 decodes plainly.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.max_tokens,
    draft_min: Annotated[
        int,
        typer.Option(
            "--draft-min",
            "--draft-n-min",
            min=0,
            help="Drafts shorter than this are not used. (A draft drawn at random always is: "
            "dropping it for what it says would bias the answer.)",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.min_tokens,
    draft_p_min: Annotated[
        float,
        typer.Option(
            "--draft-p-min",
            min=0.0,
            max=1.0,
            help="Stop drafting where the draft's most likely token is less likely than this.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.p_min,
    draft_temperature: Annotated[
        float | None,
        typer.Option(
            "--draft-temp",
            min=0.01,
            help="Temperature of a draft model's draws; the answer does not depend on it.",
            show_default=f"{DRAFT_TEMPERATURE} times the target's",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.temperature,
    draft_top_k: Annotated[
        int | None,
        typer.Option(
            "--draft-top-k",
            min=0,
            help="Top-k of a draft model's draws; the answer does not depend on it.",
            show_default="the target's",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.top_k,
    verifier: Annotated[
        VerifierName,
        typer.Option(
            "--verifier",
            help="How drafts are judged, all of them exactly: match (a seed's text is the same "
            "as without a draft), residual, block, or auto (what accepts most).",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.verifier,
    translate: Annotated[
        TranslateMode,
        typer.Option(
            "--translate",
            help="A draft model with another vocabulary: string translates what it says, tokens "
            "drafts what both can say in one token, auto takes what accepts more, off refuses it.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.translate,
    ngrams: Annotated[
        bool,
        typer.Option(
            "--ngrams",
            help="Beside a draft model: continue repetitions of the text so far where there are "
            "any, and ask the model only where there are none.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.ngrams,
    ngram_min: Annotated[
        int,
        typer.Option(
            "--ngram-min",
            min=1,
            help="The shortest run of tokens that counts as a repetition.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.ngram_min,
    ngram_max: Annotated[
        int,
        typer.Option(
            "--ngram-max",
            min=1,
            max=64,
            help="The longest run of tokens that is looked for.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.ngram_max,
) -> DraftOptions:
    """The options of drafting. Raises `UsageError`."""
    if ngram_min > ngram_max:
        raise UsageError(
            f"--ngram-min {ngram_min} is larger than --ngram-max {ngram_max}",
            hint="n-grams are looked for from the longest to the shortest",
        )
    if draft_temperature is not None and not math.isfinite(draft_temperature):
        raise UsageError(f"--draft-temp is {draft_temperature}: give a number")
    return DraftOptions(
        max_tokens=draft_max,
        min_tokens=draft_min,
        p_min=draft_p_min,
        ngrams=ngrams,
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        verifier=verifier,
        temperature=draft_temperature,
        top_k=draft_top_k,
        translate=translate,
    )
