"""How much is drafted, and how drafts are judged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from specgen.errors import UsageError
from specgen.options import (
    DRAFT_TEMPERATURE,
    FIXED_LENGTH,
    FIXED_NGRAMS,
    FIXED_P_MIN,
    LONGEST_DRAFT,
    NGRAMS,
    DraftOptions,
    DraftWeights,
    PolicyName,
    TranslateMode,
    TreeShape,
    VerifierName,
    parse_tree,
)

_DEFAULT = DraftOptions()
_DRAFTING = "Drafting"
_REPETITIONS = "Repetitions"
_LOOKUPS = "Other texts"


def tree_shape(text: str) -> TreeShape:
    """A shape as --tree has it. Raises `UsageError`."""
    try:
        return parse_tree(text)
    except ValueError as error:
        raise UsageError(f"--tree: {error}") from None


def drafting(
    policy: Annotated[
        PolicyName,
        typer.Option(
            "--policy",
            envvar="SPECGEN_POLICY",
            help="How much is drafted: cost (what is expected to save time, by measured costs and "
            "what was accepted so far), threshold (until the draft as a whole becomes too "
            "unlikely, by a bound that adapts), or fixed (--draft-max and --draft-p-min alone).",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.policy,
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max",
            "--draft-n",
            min=0,
            max=128,
            help="The most tokens to draft a round; 0 decodes plainly.",
            show_default=f"{LONGEST_DRAFT}, or {FIXED_LENGTH} with --policy fixed",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.max_tokens,
    tree: Annotated[
        str,
        typer.Option(
            "--tree",
            metavar="auto|off|3,2,1|4x5",
            help="Whether drafts branch: auto (where that is expected to save time, with --policy "
            "cost), off (chains), the children of each node by depth (3,2,1), or independent drafts "
            "and their length (4x5). A shape is drafted every round, whatever it costs.",
            rich_help_panel=_DRAFTING,
        ),
    ] = str(_DEFAULT.tree),
    tree_depth: Annotated[
        int | None,
        typer.Option(
            "--tree-depth",
            min=1,
            help="The most tokens from a tree's root down; --draft-max bounds all of its tokens.",
            show_default=False,
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.tree_depth,
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
        float | None,
        typer.Option(
            "--draft-p-min",
            min=0.0,
            max=1.0,
            help="Stop drafting where the draft's most likely token is less likely than this.",
            show_default=f"0, or {FIXED_P_MIN} with --policy fixed",
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
            "as without a draft), residual, block, spectr (independent drafts), or auto (what "
            "accepts most).",
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
    weights: Annotated[
        DraftWeights,
        typer.Option(
            "--draft-weights",
            envvar="SPECGEN_DRAFT_WEIGHTS",
            help="auto lets a draft model draft from a copy of it whose weights are requantised to "
            "Q4_0, if that is quicker on this CPU and says nearly the same (made once, in seconds, "
            "and kept in the cache folder); own drafts from the file as it is.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.weights,
    ngrams: Annotated[
        bool | None,
        typer.Option(
            "--ngrams/--no-ngrams",
            help="Beside a draft model, let repetitions of the text so far draft too: whichever "
            "promises more or, where costs do not decide, repetitions first.",
            show_default="with --policy cost",
            rich_help_panel=_REPETITIONS,
        ),
    ] = _DEFAULT.ngrams,
    ngram_min: Annotated[
        int | None,
        typer.Option(
            "--ngram-min",
            min=1,
            help="The shortest run of tokens that counts as a repetition.",
            show_default=f"{NGRAMS[0]}, or {FIXED_NGRAMS[0]} with --policy fixed",
            rich_help_panel=_REPETITIONS,
        ),
    ] = _DEFAULT.ngram_min,
    ngram_max: Annotated[
        int | None,
        typer.Option(
            "--ngram-max",
            min=1,
            max=64,
            help="A longer run of tokens counts as one of so many.",
            show_default=f"{NGRAMS[1]}, or {FIXED_NGRAMS[1]} with --policy fixed",
            rich_help_panel=_REPETITIONS,
        ),
    ] = _DEFAULT.ngram_max,
    lookup_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--lookup-file",
            "--lookup-cache-static",
            "-lcs",
            metavar="FILE|FOLDER",
            help="Let repetitions of these texts draft too: a code base, earlier answers (JSON "
            "Lines or text). May be given several times.",
            show_default=False,
            rich_help_panel=_LOOKUPS,
        ),
    ] = None,
    lookup_store: Annotated[
        bool,
        typer.Option(
            "--lookup-store",
            help="Keep prompts and answers on this disk, in the cache folder, and let repetitions "
            "of earlier ones draft too. Without it nothing is kept.",
            rich_help_panel=_LOOKUPS,
        ),
    ] = _DEFAULT.lookup_store,
) -> DraftOptions:
    """The options of drafting. Raises `UsageError`."""
    if ngram_min is not None and ngram_max is not None and ngram_min > ngram_max:
        raise UsageError(
            f"--ngram-min {ngram_min} is larger than --ngram-max {ngram_max}",
            hint="n-grams are looked for from the longest to the shortest",
        )
    shape = tree_shape(tree)
    if shape.is_fixed and draft_max is not None and draft_max < shape.n_nodes:
        raise UsageError(
            f"--tree {shape} has {shape.n_nodes} tokens, --draft-max allows {draft_max}",
            hint="take a smaller shape, or leave --draft-max out",
        )
    if draft_temperature is not None and not math.isfinite(draft_temperature):
        raise UsageError(f"--draft-temp is {draft_temperature}: give a number")
    return DraftOptions(
        policy=policy,
        max_tokens=draft_max,
        tree=shape,
        tree_depth=tree_depth,
        min_tokens=draft_min,
        p_min=draft_p_min,
        ngrams=ngrams,
        ngram_max=ngram_max,
        ngram_min=ngram_min,
        lookup_files=tuple(lookup_files or ()),
        lookup_store=lookup_store,
        verifier=verifier,
        temperature=draft_temperature,
        top_k=draft_top_k,
        translate=translate,
        weights=weights,
    )
