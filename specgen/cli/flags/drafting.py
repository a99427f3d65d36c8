"""The options of drafting: how much is drafted, and how drafts are verified."""

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
    """Parse a shape in the form of --tree. Raises `UsageError`."""
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
            help="How much to draft: cost (as long as it is expected to save time, by measured costs "
            "and acceptance rates), threshold (until the whole draft is too unlikely, by an adaptive "
            "bound), or fixed (by --draft-max and --draft-p-min alone).",
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
            help="The most tokens to draft in a round; 0 drafts nothing.",
            show_default=f"{LONGEST_DRAFT}, or {FIXED_LENGTH} with --policy fixed",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.max_tokens,
    tree: Annotated[
        str,
        typer.Option(
            "--tree",
            metavar="auto|off|3,2,1|4x5",
            help="Whether drafts branch: auto (where it is expected to save time; needs --policy "
            "cost), off (chains), a fixed number of children at each depth (3,2,1), or a number of "
            "independent drafts and their length (4x5). A fixed shape is drafted in every round.",
            rich_help_panel=_DRAFTING,
        ),
    ] = str(_DEFAULT.tree),
    tree_depth: Annotated[
        int | None,
        typer.Option(
            "--tree-depth",
            min=1,
            help="The greatest depth of a tree, in tokens; --draft-max limits all tokens of the tree.",
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
            help="Do not use drafts with fewer tokens. (Sampled drafts are always used: dropping "
            "them would bias the answer.)",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.min_tokens,
    draft_p_min: Annotated[
        float | None,
        typer.Option(
            "--draft-p-min",
            min=0.0,
            max=1.0,
            help="Stop drafting where the draft's most likely token has a lower probability.",
            show_default=f"0, or {FIXED_P_MIN} with --policy fixed",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.p_min,
    draft_temperature: Annotated[
        float | None,
        typer.Option(
            "--draft-temp",
            min=0.01,
            help="Temperature at which a draft model samples; it does not change the answer's "
            "distribution.",
            show_default=f"{DRAFT_TEMPERATURE} times the target's",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.temperature,
    draft_top_k: Annotated[
        int | None,
        typer.Option(
            "--draft-top-k",
            min=0,
            help="Top-k with which a draft model samples; it does not change the answer's distribution.",
            show_default="the target's",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.top_k,
    verifier: Annotated[
        VerifierName,
        typer.Option(
            "--verifier",
            help="How drafts are verified; all ways keep the target's distribution: match (a seed "
            "gives the same text as without a draft), residual, block, spectr (for independent "
            "drafts), or auto (match with a seed, else the one that accepts most).",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.verifier,
    translate: Annotated[
        TranslateMode,
        typer.Option(
            "--translate",
            help="For a draft model with another vocabulary: string translates its text, tokens "
            "drafts only tokens that both vocabularies have, auto uses the one that accepts more, "
            "off refuses the model.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.translate,
    weights: Annotated[
        DraftWeights,
        typer.Option(
            "--draft-weights",
            envvar="SPECGEN_DRAFT_WEIGHTS",
            help="auto drafts from a copy of the draft model in Q4_0 if it is faster on this CPU and "
            "predicts nearly the same tokens (made once, in seconds, and kept in the cache folder); "
            "own drafts from the file as it is.",
            rich_help_panel=_DRAFTING,
        ),
    ] = _DEFAULT.weights,
    ngrams: Annotated[
        bool | None,
        typer.Option(
            "--ngrams/--no-ngrams",
            help="Also draft repetitions of the text so far, beside a draft model. With --policy cost "
            "the more promising of the two drafts, else repetitions come first.",
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
            help="The longest run of tokens that is compared; longer ones count the same.",
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
            help="Also draft repetitions of these texts: a code base, earlier answers (JSON "
            "Lines or text). May be given several times.",
            show_default=False,
            rich_help_panel=_LOOKUPS,
        ),
    ] = None,
    lookup_store: Annotated[
        bool,
        typer.Option(
            "--lookup-store",
            help="Keep prompts and answers on this disk, in the cache folder, and also draft "
            "repetitions of earlier ones. Without it nothing is kept.",
            rich_help_panel=_LOOKUPS,
        ),
    ] = _DEFAULT.lookup_store,
) -> DraftOptions:
    """Return the options of drafting. Raises `UsageError`."""
    if ngram_min is not None and ngram_max is not None and ngram_min > ngram_max:
        raise UsageError(
            f"--ngram-min {ngram_min} is larger than --ngram-max {ngram_max}",
            hint="give a smaller --ngram-min, or a larger --ngram-max",
        )
    shape = tree_shape(tree)
    if shape.is_fixed and draft_max is not None and draft_max < shape.n_nodes:
        raise UsageError(
            f"--tree {shape} has {shape.n_nodes} tokens, but --draft-max allows {draft_max}",
            hint="use a smaller shape, or leave --draft-max out",
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
