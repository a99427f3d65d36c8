"""The options of samplers, and how options are declared (`specgen.options`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args


def option(default: Any, spellings: str, help: str, **settings: Any) -> Any:  # noqa: A002
    """Declare a field that is an option, the readable one of its `spellings` first. `panel` is its
    heading in the help; `parse` makes its value of the text, or of a tuple's texts. Other settings
    are those of `typer.Option`.
    """
    return field(
        default=default, metadata={"spellings": spellings.split(), "help": help, **settings}
    )


def utf8(given: Any) -> Any:
    """Return texts as they are. Raise `ValueError` unless they are UTF-8: other bytes arrive as
    lone surrogates.
    """
    try:
        (given if isinstance(given, str) else "".join(given)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return given


#: The samplers by llama.cpp's names, in its order.
SamplerName: TypeAlias = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"
]
DEFAULT_SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
#: llama.cpp's letters for them, and its other names.
_LETTERS = dict(zip("edskypmxt", DEFAULT_SAMPLERS, strict=True))
_ALIASES: dict[str, SamplerName] = {
    **{name: name for name in DEFAULT_SAMPLERS},
    **{name.replace("_", "-"): name for name in DEFAULT_SAMPLERS},
    **{name.replace("_", ""): name for name in DEFAULT_SAMPLERS},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical": "typ_p",
    "typical-p": "typ_p",
}
#: Logits are float32: factors near its largest number (3e38) would make infinities.
LARGEST_FACTOR = 1e30
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def _parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    found = []
    for text in texts:
        match = re.fullmatch(r"(\d+)([+-].+)", text)
        try:
            token_id, bias = (int(match[1]), float(match[2])) if match else (-1, math.nan)
        except ValueError:
            token_id, bias = -1, math.nan
        if token_id < 0 or not (bias == -math.inf or abs(bias) <= LARGEST_FACTOR):
            raise ValueError(
                f"{text} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS, as 15043+1 or 15043-inf"
            )
        found.append((token_id, bias))
    return tuple(found)


def _parse_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts, with their escapes replaced as llama.cpp replaces them."""
    if "" in texts:
        raise ValueError("a breaker is empty; for no breakers at all, give none")
    if "none" in texts:
        return ()
    return tuple(
        re.sub(r"\\([nrt\"'\\])", lambda found: _ESCAPES[found[1]], text) for text in utf8(texts)
    )


_sampling = partial(option, panel="Sampling")
_repetition = partial(option, panel="Sampling: against repetition")
_more_sampling = partial(option, panel="Sampling: more of llama.cpp's samplers")
_share = partial(_more_sampling, min=0.0, max=1.0)


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """How a token is drawn from logits. Names and meaning are llama.cpp's; the temperature comes
    last, as there.
    """

    temperature: float = _sampling(
        0.0, "--temp --temperature", "Temperature; 0 takes the most likely token.", min=0.0
    )
    top_k: int = _sampling(40, "--top-k", "Keep the k most likely tokens; 0 keeps all.", min=0)
    top_p: float = _sampling(
        0.95, "--top-p", "Keep the most likely tokens that together reach p.", min=0.0, max=1.0
    )
    min_p: float = _sampling(
        0.05, "--min-p", "Drop tokens less likely than p times the likeliest.", min=0.0, max=1.0
    )
    seed: int = _sampling(
        -1, "--seed -s", "Seed of the random numbers; -1 picks one.", min=-1, max=2**63 - 1
    )
    #: One that is not named does nothing; without the temperature, tokens are drawn at temperature
    #: 1.
    samplers: tuple[SamplerName, ...] = _sampling(
        DEFAULT_SAMPLERS,
        "--samplers --sampler-seq --sampling-seq",
        "The samplers to use, in order: names with ; between, or llama.cpp's letters, as edskypmxt.",
        metavar="NAMES|LETTERS",
        show_default="; ".join(DEFAULT_SAMPLERS),
        parse=lambda texts: parse_samplers(";".join(texts)),
    )
    logit_bias: tuple[tuple[int, float], ...] = _sampling(
        (),
        "--logit-bias -l",
        "Make a token more or less likely, as 15043+1 or 15043-inf; may be repeated.",
        metavar="TOKEN_ID(+|-)BIAS",
        parse=_parse_biases,
    )
    repeat_last_n: int = _repetition(
        64, "--repeat-last-n", "Last tokens that the penalties look at; -1 is all.", min=-1
    )
    repeat_penalty: float = _repetition(
        1.0, "--repeat-penalty", "Divide the logits of tokens that occurred; 1 is off.", min=0.01
    )
    presence_penalty: float = _repetition(
        0.0, "--presence-penalty", "Subtract this from logits of tokens that occurred."
    )
    frequency_penalty: float = _repetition(
        0.0, "--frequency-penalty", "The same, for each time that they occurred."
    )
    #: DRY: a token that makes a repetition of n tokens longer loses multiplier * base ** (n -
    #: allowed length).
    dry_multiplier: float = _repetition(
        0.0, "--dry-multiplier", "DRY: penalty of extending a repetition; 0 is off.", min=0.0
    )
    dry_base: float = _repetition(
        1.75, "--dry-base", "DRY: growth of the penalty with each token.", min=0.0
    )
    dry_allowed_length: int = _repetition(
        2, "--dry-allowed-length", "DRY: repetitions of fewer tokens are free.", min=0
    )
    dry_last_n: int = _repetition(
        64, "--dry-penalty-last-n", "DRY: last tokens to look at; -1 is all, 0 is off.", min=-1
    )
    dry_breakers: tuple[str, ...] = _repetition(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker",
        "DRY: repetitions end at this text; may be repeated, replaces the defaults; none leaves none.",
        metavar="TEXT",
        show_default=r"\n : \" *",
        parse=_parse_breakers,
    )
    typical_p: float = _share(
        1.0, "--typical --typical-p", "Keep the most typical tokens that together reach p."
    )
    top_n_sigma: float = _more_sampling(
        -1.0,
        "--top-nsigma --top-n-sigma",
        "Keep logits within n standard deviations of the largest.",
    )
    xtc_probability: float = _share(
        0.0, "--xtc-probability", "XTC: chance that the likeliest tokens are left out; 0 is off."
    )
    xtc_threshold: float = _share(
        0.1, "--xtc-threshold", "XTC: all but the last that reach this are; over 0.5 is off."
    )
    dynatemp_range: float = _more_sampling(
        0.0, "--dynatemp-range", "Dynamic temperature: how far it moves; 0 is off.", min=0.0
    )
    dynatemp_exponent: float = _more_sampling(
        1.0, "--dynatemp-exp", "Dynamic temperature: exponent of the entropy.", min=0.0
    )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken that the samplers leave."""
        return (
            self.temperature <= 0.0
            and self.dynatemp_range <= 0.0
            and "temperature" in self.samplers
        )


def parse_samplers(text: str) -> tuple[SamplerName, ...]:
    """Parse samplers in llama.cpp's spellings: names or aliases between semicolons or commas, or
    letters (``edskypmxt``). No name is no sampler. Raise `ValueError`, with the message to show.
    """
    names = [name.strip() for name in text.replace(",", ";").lower().split(";")]
    names = [name for name in names if name]
    if len(names) == 1 and names[0] not in _ALIASES and set(names[0]) <= set(_LETTERS):
        return tuple(_LETTERS[letter] for letter in names[0])
    for name in names:
        if name not in _ALIASES:
            known = ", ".join(f"{name} ({letter})" for letter, name in _LETTERS.items())
            raise ValueError(f"there is no sampler {name!r}; the samplers are {known}")
    return tuple(_ALIASES[name] for name in names)
