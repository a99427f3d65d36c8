"""The options of the samplers, with llama.cpp's names."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from typer import Option

from specgen.cli.flags.groups import group, panel, utf8
from specgen.errors import UsageError
from specgen.options import SamplerName, SamplerOptions, parse_sampler_letters, parse_samplers

_DEFAULT = SamplerOptions()
#: Logits are float32: factors near its largest number (3e38) would make infinities.
_LARGEST = 1e30
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}

_MAIN = panel(
    "Sampling",
    temperature=Option(
        "--temp",
        "--temperature",
        min=0.0,
        help="Temperature; 0 takes the most likely token each time.",
    ),
    top_k=Option("--top-k", min=0, help="Keep the k most likely tokens; 0 keeps all."),
    top_p=Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Keep the most likely tokens that together reach p; 1 keeps all.",
    ),
    min_p=Option(
        "--min-p",
        min=0.0,
        max=1.0,
        help="Drop tokens less likely than p times the most likely one; 0 keeps all.",
    ),
    seed=Option(
        "--seed", "-s", min=-1, max=2**63 - 1, help="Seed of the random numbers; -1 picks one."
    ),
    samplers=Option(
        "--samplers",
        metavar="NAMES",
        help="The samplers to use, in order, separated by ;",
        show_default="; ".join(_DEFAULT.samplers),
    ),
    sampler_letters=Option(
        "--sampler-seq",
        "--sampling-seq",
        metavar="LETTERS",
        help="The same as llama.cpp's letters, for example edskypmxt.",
    ),
    logit_bias=Option(
        "--logit-bias",
        "-l",
        metavar="TOKEN_ID(+|-)BIAS",
        help="Make a token more or less likely, for example 15043+1 or 15043-inf; may be given several "
        "times.",
    ),
)
_REPETITION = panel(
    "Sampling: against repetition",
    repeat_last_n=Option(
        "--repeat-last-n",
        min=-1,
        help="How many of the last tokens the penalties look at; -1 is all.",
    ),
    repeat_penalty=Option(
        "--repeat-penalty",
        min=0.01,
        help="Divide (or, if negative, multiply) the logits of tokens that occurred; 1 is off.",
    ),
    presence_penalty=Option(
        "--presence-penalty",
        help="Subtract this from the logits of tokens that occurred; 0 is off.",
    ),
    frequency_penalty=Option(
        "--frequency-penalty",
        help="Subtract this for each time that a token occurred; 0 is off.",
    ),
    dry_multiplier=Option(
        "--dry-multiplier",
        min=0.0,
        help="DRY: penalty of a token that would extend a repetition; 0 is off.",
    ),
    dry_base=Option(
        "--dry-base",
        min=0.0,
        help="DRY: by how much the penalty grows for each token of the repetition.",
    ),
    dry_allowed_length=Option(
        "--dry-allowed-length", min=0, help="DRY: repetitions of fewer tokens are free."
    ),
    dry_last_n=Option(
        "--dry-penalty-last-n",
        min=-1,
        help="DRY: how many of the last tokens to look at; -1 is all, 0 is off.",
    ),
    dry_breakers=Option(
        "--dry-sequence-breaker",
        metavar="TEXT",
        parser=utf8,
        help="DRY: no repetition goes on across this text; may be given several times and replaces the "
        "defaults; none leaves none.",
        show_default=r"\n : \" *",
    ),
)
_MORE = panel(
    "Sampling: more of llama.cpp's samplers",
    typical_p=Option(
        "--typical",
        "--typical-p",
        min=0.0,
        max=1.0,
        help="Locally typical sampling: keep the most typical tokens that reach p; 1 is off.",
    ),
    top_n_sigma=Option(
        "--top-nsigma",
        "--top-n-sigma",
        help="Keep tokens within n standard deviations of the largest logit; -1 is off.",
    ),
    xtc_probability=Option(
        "--xtc-probability",
        min=0.0,
        max=1.0,
        help="XTC: chance that the most likely tokens are left out; 0 is off.",
    ),
    xtc_threshold=Option(
        "--xtc-threshold",
        min=0.0,
        max=1.0,
        help="XTC: which ones: all but the last that reach this probability; over 0.5 is off.",
    ),
    dynatemp_range=Option(
        "--dynatemp-range",
        min=0.0,
        help="Dynamic temperature: by how much it moves with the entropy; 0 is off.",
    ),
    dynatemp_exponent=Option(
        "--dynatemp-exp", min=0.0, help="Dynamic temperature: exponent of the entropy."
    ),
)


@group(SamplerOptions, _MAIN, _REPETITION, _MORE)
def sampling(
    *,
    samplers: str | None = None,
    sampler_letters: str | None = None,
    logit_bias: list[str] | None = None,
    dry_breakers: list[str] | None = None,
    **others: Any,
) -> SamplerOptions:
    """Return the options of the samplers. Raise `UsageError`."""
    options = SamplerOptions(
        samplers=_order(samplers, sampler_letters),
        logit_bias=tuple(_bias(text) for text in logit_bias or ()),
        dry_breakers=_breakers(dry_breakers),
        **others,
    )
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not abs(value) <= _LARGEST:
            option = sampling.spelling(field.name)
            is_large = math.isfinite(value)
            raise UsageError(
                f"{option} {value} is too large" if is_large else f"{option} is {value}",
                hint=f"give a number between {-_LARGEST:g} and {_LARGEST:g}",
            )
    return options


def _order(names: str | None, letters: str | None) -> tuple[SamplerName, ...]:
    if names is not None and letters is not None:
        raise UsageError("--samplers and --sampler-seq exclude each other", hint="use one of them")
    try:
        if names is not None:
            return parse_samplers(names)
        if letters is not None:
            return parse_sampler_letters(letters)
    except ValueError as error:
        option = "--samplers" if names is not None else "--sampler-seq"
        raise UsageError(f"{option}: {error}") from None
    return _DEFAULT.samplers


def _breakers(given: list[str] | None) -> tuple[str, ...]:
    """Return the texts, with their escapes (backslash and n, r, t, a quote or another backslash) replaced as
    llama.cpp replaces them."""
    if given is None:
        return _DEFAULT.dry_breakers
    if "" in given:
        raise UsageError(
            "--dry-sequence-breaker '' is empty", hint="for no breakers at all, give none"
        )
    if "none" in given:
        return ()
    return tuple(
        re.sub(r"\\([nrt\"'\\])", lambda found: _ESCAPES[found[1]], text) for text in given
    )


def _bias(text: str) -> tuple[int, float]:
    """Parse TOKEN_ID(+|-)BIAS, llama.cpp's form."""
    sign = next((index for index, letter in enumerate(text) if letter in "+-"), 0)
    try:
        token_id, bias = int(text[:sign]), float(text[sign:])
    except ValueError:
        token_id, bias = -1, math.nan
    if token_id < 0 or not (bias == -math.inf or abs(bias) <= _LARGEST):
        raise UsageError(
            f"--logit-bias {text} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS",
            hint="for example 15043+1, 15043-0.5 or 15043-inf",
        )
    return token_id, bias
