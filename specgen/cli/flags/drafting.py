"""The options of drafting: how much is drafted, and how drafts are verified."""

from __future__ import annotations

import math
from typing import Any

from typer import Option

from specgen.cli.flags.groups import group, panel, utf8
from specgen.errors import UsageError
from specgen.options import (
    DRAFT_TEMPERATURE,
    FIXED_LENGTH,
    FIXED_NGRAMS,
    FIXED_P_MIN,
    LONGEST_DRAFT,
    NGRAMS,
    DraftOptions,
    TreeShape,
    parse_tree,
)

_DRAFTING = panel(
    "Drafting",
    policy=Option(
        "--policy",
        envvar="SPECGEN_POLICY",
        help="How much to draft: cost (as long as it is expected to save time, by measured costs and "
        "acceptance rates), threshold (until the whole draft is too unlikely, by an adaptive bound), or "
        "fixed (by --draft-max and --draft-p-min alone).",
    ),
    max_tokens=Option(
        "--draft-max",
        "--draft-n",
        min=0,
        max=128,
        help="The most tokens to draft in a round; 0 drafts nothing.",
        show_default=f"{LONGEST_DRAFT}, or {FIXED_LENGTH} with --policy fixed",
    ),
    tree=Option(
        "--tree",
        metavar="auto|off|3,2,1|4x5",
        help="Whether drafts branch: auto (where it is expected to save time; needs --policy cost), off "
        "(chains), a fixed number of children at each depth (3,2,1), or a number of independent drafts "
        "and their length (4x5). A fixed shape is drafted in every round.",
    ),
    tree_depth=Option(
        "--tree-depth",
        min=1,
        help="The greatest depth of a tree, in tokens; --draft-max limits all tokens of the tree.",
        show_default=False,
    ),
    min_tokens=Option(
        "--draft-min",
        "--draft-n-min",
        min=0,
        help="Do not use drafts with fewer tokens. (Sampled drafts are always used: dropping them would "
        "bias the answer.)",
    ),
    p_min=Option(
        "--draft-p-min",
        min=0.0,
        max=1.0,
        help="Stop drafting where the draft's most likely token has a lower probability.",
        show_default=f"0, or {FIXED_P_MIN} with --policy fixed",
    ),
    temperature=Option(
        "--draft-temp",
        min=0.01,
        help="Temperature at which a draft model samples; it does not change the answer's distribution.",
        show_default=f"{DRAFT_TEMPERATURE} times the target's",
    ),
    top_k=Option(
        "--draft-top-k",
        min=0,
        help="Top-k with which a draft model samples; it does not change the answer's distribution.",
        show_default="the target's",
    ),
    verifier=Option(
        "--verifier",
        help="How drafts are verified; all ways keep the target's distribution: match (a seed gives the "
        "same text as without a draft), residual, block, spectr (for independent drafts), or auto (match "
        "with a seed, else the one that accepts most).",
    ),
    translate=Option(
        "--translate",
        help="For a draft model with another vocabulary: auto translates its text, off refuses the model.",
    ),
    mask=Option(
        "--draft-mask",
        parser=utf8,
        metavar="auto|off|TOKEN",
        help="The mask token of a parallel draft model (PARD), which predicts all tokens of a draft in one "
        "decode: its number or its text. auto takes what the file says, off drafts one token after the other.",
    ),
)
_REPETITIONS = panel(
    "Repetitions",
    ngrams=Option(
        "--ngrams/--no-ngrams",
        help="Also draft repetitions of the text so far, beside a draft model. With --policy cost the more "
        "promising of the two drafts, else repetitions come first.",
        show_default="with --policy cost",
    ),
    ngram_min=Option(
        "--ngram-min",
        min=1,
        help="The shortest run of tokens that counts as a repetition.",
        show_default=f"{NGRAMS[0]}, or {FIXED_NGRAMS[0]} with --policy fixed",
    ),
    ngram_max=Option(
        "--ngram-max",
        min=1,
        max=64,
        help="The longest run of tokens that is compared; longer ones count the same.",
        show_default=f"{NGRAMS[1]}, or {FIXED_NGRAMS[1]} with --policy fixed",
    ),
)
_LOOKUPS = panel(
    "Other texts",
    lookup_files=Option(
        "--lookup-file",
        "--lookup-cache-static",
        "-lcs",
        metavar="FILE|FOLDER",
        help="Also draft repetitions of these texts: a code base, earlier answers (JSON Lines or text). May "
        "be given several times.",
        show_default=False,
    ),
    lookup_store=Option(
        "--lookup-store",
        help="Keep prompts and answers on this disk, in the cache folder, and also draft repetitions of "
        "earlier ones. Without it nothing is kept.",
    ),
)


@group(DraftOptions, _DRAFTING, _REPETITIONS, _LOOKUPS)
def drafting(*, tree: str = str(DraftOptions().tree), **others: Any) -> DraftOptions:
    """Return the options of drafting. Raise `UsageError`."""
    options = DraftOptions(tree=tree_shape(tree), **others)
    shortest, longest = options.ngram_min, options.ngram_max
    if shortest is not None and longest is not None and shortest > longest:
        raise UsageError(
            f"--ngram-min {shortest} is larger than --ngram-max {longest}",
            hint="give a smaller --ngram-min, or a larger --ngram-max",
        )
    shape, n_most = options.tree, options.max_tokens
    if shape.is_fixed and n_most is not None and n_most < shape.n_nodes:
        raise UsageError(
            f"--tree {shape} has {shape.n_nodes} tokens, but --draft-max allows {n_most}",
            hint="use a smaller shape, or leave --draft-max out",
        )
    if options.temperature is not None and not math.isfinite(options.temperature):
        raise UsageError(f"--draft-temp is {options.temperature}: give a number")
    return options


def tree_shape(text: str) -> TreeShape:
    """Parse a shape in the form of --tree. Raise `UsageError`."""
    try:
        return parse_tree(text)
    except ValueError as error:
        raise UsageError(f"--tree: {error}") from None
