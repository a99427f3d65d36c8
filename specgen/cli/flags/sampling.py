"""The options of the samplers, with llama.cpp's names."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from typing import Annotated

import typer

from specgen.cli.flags.text import utf8
from specgen.errors import UsageError
from specgen.options import (
    SamplerName,
    SamplerOptions,
    parse_sampler_letters,
    parse_samplers,
)

_DEFAULT = SamplerOptions()
_SAMPLING = "Sampling"
_REPETITION = "Sampling: against repetition"
_MORE = "Sampling: more of llama.cpp's samplers"
#: Logits are float32: factors near its largest number (3e38) would make infinities.
_LARGEST = 1e30
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def sampling(
    temperature: Annotated[
        float,
        typer.Option(
            "--temp",
            "--temperature",
            min=0.0,
            help="Temperature; 0 takes the most likely token each time.",
            rich_help_panel=_SAMPLING,
        ),
    ] = _DEFAULT.temperature,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k",
            min=0,
            help="Keep the k most likely tokens; 0 keeps all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = _DEFAULT.top_k,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Keep the most likely tokens that together reach p; 1 keeps all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = _DEFAULT.top_p,
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            min=0.0,
            max=1.0,
            help="Drop tokens less likely than p times the most likely one; 0 keeps all.",
            rich_help_panel=_SAMPLING,
        ),
    ] = _DEFAULT.min_p,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            "-s",
            min=-1,
            max=2**63 - 1,
            help="Seed of the random numbers; -1 picks one.",
            rich_help_panel=_SAMPLING,
        ),
    ] = _DEFAULT.seed,
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            metavar="NAMES",
            help="The samplers to use, in order, separated by ;",
            show_default="; ".join(_DEFAULT.samplers),
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    sampler_letters: Annotated[
        str | None,
        typer.Option(
            "--sampler-seq",
            "--sampling-seq",
            metavar="LETTERS",
            help="The same as llama.cpp's letters, for example edskypmxt.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            "-l",
            metavar="TOKEN_ID(+|-)BIAS",
            help="Make a token more or less likely, for example 15043+1 or 15043-inf; may be "
            "given several times.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    repeat_last_n: Annotated[
        int,
        typer.Option(
            "--repeat-last-n",
            min=-1,
            help="How many of the last tokens the penalties look at; -1 is all.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.repeat_last_n,
    repeat_penalty: Annotated[
        float,
        typer.Option(
            "--repeat-penalty",
            min=0.01,
            help="Divide (or, if negative, multiply) the logits of tokens that occurred; 1 is off.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.repeat_penalty,
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty",
            help="Subtract this from the logits of tokens that occurred; 0 is off.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.presence_penalty,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            "--frequency-penalty",
            help="Subtract this for each time that a token occurred; 0 is off.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.frequency_penalty,
    dry_multiplier: Annotated[
        float,
        typer.Option(
            "--dry-multiplier",
            min=0.0,
            help="DRY: penalty of a token that would extend a repetition; 0 is off.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.dry_multiplier,
    dry_base: Annotated[
        float,
        typer.Option(
            "--dry-base",
            min=0.0,
            help="DRY: by how much the penalty grows for each token of the repetition.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.dry_base,
    dry_allowed_length: Annotated[
        int,
        typer.Option(
            "--dry-allowed-length",
            min=0,
            help="DRY: repetitions of fewer tokens are free.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.dry_allowed_length,
    dry_last_n: Annotated[
        int,
        typer.Option(
            "--dry-penalty-last-n",
            min=-1,
            help="DRY: how many of the last tokens to look at; -1 is all, 0 is off.",
            rich_help_panel=_REPETITION,
        ),
    ] = _DEFAULT.dry_last_n,
    dry_breakers: Annotated[
        list[str] | None,
        typer.Option(
            "--dry-sequence-breaker",
            metavar="TEXT",
            parser=utf8,
            help="DRY: no repetition goes on across this text; may be given several times and "
            "replaces the defaults; none leaves none.",
            show_default=r"\n : \" *",
            rich_help_panel=_REPETITION,
        ),
    ] = None,
    typical_p: Annotated[
        float,
        typer.Option(
            "--typical",
            "--typical-p",
            min=0.0,
            max=1.0,
            help="Locally typical sampling: keep the most typical tokens that reach p; 1 is off.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.typical_p,
    top_n_sigma: Annotated[
        float,
        typer.Option(
            "--top-nsigma",
            "--top-n-sigma",
            help="Keep tokens within n standard deviations of the largest logit; -1 is off.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.top_n_sigma,
    xtc_probability: Annotated[
        float,
        typer.Option(
            "--xtc-probability",
            min=0.0,
            max=1.0,
            help="XTC: chance that the most likely tokens are left out; 0 is off.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.xtc_probability,
    xtc_threshold: Annotated[
        float,
        typer.Option(
            "--xtc-threshold",
            min=0.0,
            max=1.0,
            help="XTC: which ones: all but the last that reach this probability; over 0.5 is off.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.xtc_threshold,
    dynatemp_range: Annotated[
        float,
        typer.Option(
            "--dynatemp-range",
            min=0.0,
            help="Dynamic temperature: by how much it moves with the entropy; 0 is off.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.dynatemp_range,
    dynatemp_exponent: Annotated[
        float,
        typer.Option(
            "--dynatemp-exp",
            min=0.0,
            help="Dynamic temperature: exponent of the entropy.",
            rich_help_panel=_MORE,
        ),
    ] = _DEFAULT.dynatemp_exponent,
) -> SamplerOptions:
    """Return the options of the samplers. Raises `UsageError`."""
    options = SamplerOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        samplers=_order(samplers, sampler_letters),
        repeat_last_n=repeat_last_n,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        dry_multiplier=dry_multiplier,
        dry_base=dry_base,
        dry_allowed_length=dry_allowed_length,
        dry_last_n=dry_last_n,
        dry_breakers=_breakers(dry_breakers),
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        dynatemp_range=dynatemp_range,
        dynatemp_exponent=dynatemp_exponent,
        logit_bias=tuple(_bias(text) for text in logit_bias or ()),
    )
    _check_sizes(options)
    return options


def _check_sizes(options: SamplerOptions) -> None:
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not abs(value) <= _LARGEST:
            hint = typing.get_type_hints(sampling, include_extras=True)[field.name]
            option = hint.__metadata__[0].default  # where typer keeps the first spelling
            raise UsageError(
                f"{option} {value} is too large"
                if math.isfinite(value)
                else f"{option} is {value}",
                hint=f"give a number between {-_LARGEST:g} and {_LARGEST:g}",
            )


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
    if given is None:
        return _DEFAULT.dry_breakers
    if "" in given:
        raise UsageError(
            "--dry-sequence-breaker '' is empty", hint="for no breakers at all, give none"
        )
    if "none" in given:
        return ()
    return tuple(unescaped(text) for text in given)


def unescaped(text: str) -> str:
    """Return the text with its escapes (backslash and n, r, t, a quote or another backslash) replaced as
    llama.cpp replaces them."""
    return re.sub(r"\\([nrt\"'\\])", lambda match: _ESCAPES[match[1]], text)


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
