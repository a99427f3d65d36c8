"""The options of samplers."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

from specgen.option_fields import LARGEST_FACTOR, option, utf8
from specgen.option_values import Options

#: The samplers by their names in llama.cpp, in its order.
SamplerName: TypeAlias = Literal[
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"
]
DEFAULT_SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
#: llama.cpp's letters for the samplers.
_LETTERS: dict[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
#: Other names for them in llama.cpp, which also accepts names with hyphens, and with words joined.
_ALIASES: dict[str, SamplerName] = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical": "typ_p",
    "typical-p": "typ_p",
}
_ALIASES |= {
    name.replace("_", separator): name for name in DEFAULT_SAMPLERS for separator in ("_", "-", "")
}
#: llama.cpp's escapes in sequence breakers.
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}
#: Smaller temperatures count as 0, as in llama.cpp, where they are float32: divided by them, scores
#: would become infinite.
SMALLEST_TEMPERATURE = 1e-38


def _parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    return tuple(_parse_bias(text) for text in texts)


def _parse_bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+)([+-].+)", text)
    if match is not None:
        with contextlib.suppress(ValueError):
            return int(match[1]), float(match[2])
    raise ValueError(f"{text} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043+1 or 15043-inf")


def _checked_biases(biases: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return biases if the samplers can add them to logits.

    Raises:
        ValueError: If they cannot. The error has the message for the user.
    """
    for token_id, bias in biases:
        if token_id < 0:
            raise ValueError(f"there is no token {token_id}")
        # Also refuses NaN, for which every comparison is false.
        if bias != -math.inf and not abs(bias) <= LARGEST_FACTOR:
            limits = f"between {-LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}, or -inf"
            raise ValueError(f"give a bias {limits}, not {bias}")
    return biases


def _parse_breakers(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse sequence breakers, with escapes as in llama.cpp; "none" means no breakers.

    A single text may also be a JSON list, as some programs send it.

    Raises:
        ValueError: If a breaker is empty or not UTF-8. The error has the message for the user.
    """
    if len(texts) == 1 and texts[0].startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            listed = json.loads(texts[0])
            return tuple(map(str, listed))
    if "" in texts:
        raise ValueError("a breaker is empty; for no breakers at all, give none")
    if "none" in texts:
        return ()
    return tuple(
        re.sub(r"\\([nrt\"'\\])", lambda match: _ESCAPES[match[1]], text) for text in utf8(texts)
    )


_sampling = partial(option, panel="Sampling")
_repetition = partial(option, panel="Sampling: against repetition")
_more_sampling = partial(option, panel="Sampling: more of llama.cpp's samplers")


@dataclass(frozen=True, slots=True)
class SamplerOptions(Options):
    """How tokens are sampled from logits, with llama.cpp's names and meanings.

    Raises:
        UsageError: If a value is invalid.
    """

    temperature: float = _sampling(
        0.0,
        "--temp --temperature",
        "Temperature; 0 always takes the most likely token.",
        min=0.0,
        check=lambda t: 0.0 if t < SMALLEST_TEMPERATURE else t,
    )
    top_k: int = _sampling(
        40,
        "--top-k",
        "Keep only the k most likely tokens; 0 keeps all.",
        min=-1,
        check=lambda k: max(k, 0),  # in other programs, -1 keeps all
    )
    top_p: float = _sampling(
        0.95,
        "--top-p",
        "Keep only the most likely tokens whose probabilities add up to p.",
        min=0.0,
        max=1.0,
    )
    min_p: float = _sampling(
        0.05,
        "--min-p",
        "Drop tokens less than p times as likely as the most likely one.",
        min=0.0,
        max=1.0,
    )
    seed: int = _sampling(
        -1,
        "--seed -s",
        "Seed of the random numbers; -1 picks one.",
        aliases="random_seed",
        min=-1,
        max=2**63 - 1,
    )
    #: A sampler that is not in the list is off. If "temperature" is not, the temperature is 1.
    samplers: tuple[SamplerName, ...] = _sampling(
        DEFAULT_SAMPLERS,
        "--samplers --sampler-seq --sampling-seq",
        "The samplers to use, in order: names separated by ;, or llama.cpp's letters, such as "
        "edskypmxt.",
        metavar="NAMES|LETTERS",
        show_default="; ".join(DEFAULT_SAMPLERS),
        parse=lambda texts: parse_samplers(";".join(texts)),
    )
    logit_bias: tuple[tuple[int, float], ...] = _sampling(
        (),
        "--logit-bias -l",
        "Make a token more or less likely, such as 15043+1 or 15043-inf; may be repeated.",
        metavar="TOKEN_ID(+|-)BIAS",
        parse=_parse_biases,
        check=_checked_biases,
    )
    repeat_last_n: int = _repetition(
        64,
        "--repeat-last-n",
        "Number of last tokens that the penalties look at; -1 means all.",
        min=-1,
    )
    repeat_penalty: float = _repetition(
        1.0,
        "--repeat-penalty",
        "Divide the logits of tokens that have already occurred by this; 1 is off.",
        min=0.01,
        aliases="repetition_penalty",
    )
    presence_penalty: float = _repetition(
        0.0,
        "--presence-penalty",
        "Subtract this from the logits of tokens that have already occurred.",
    )
    frequency_penalty: float = _repetition(
        0.0,
        "--frequency-penalty",
        "Subtract this from a token's logit for each time that it has occurred.",
    )
    #: DRY: a token that extends a repetition of n tokens loses
    #: multiplier * base ** (n - allowed length).
    dry_multiplier: float = _repetition(
        0.0,
        "--dry-multiplier",
        "DRY: the penalty for extending a repetition; 0 is off.",
        min=0.0,
    )
    dry_base: float = _repetition(
        1.75,
        "--dry-base",
        "DRY: the factor by which the penalty grows with each repeated token.",
        min=0.0,
    )
    dry_allowed_length: int = _repetition(
        2,
        "--dry-allowed-length",
        "DRY: repetitions of fewer tokens are not penalised.",
        min=0,
    )
    dry_last_n: int = _repetition(
        64,
        "--dry-penalty-last-n",
        "DRY: number of last tokens to look at; -1 means all, 0 is off.",
        min=-1,
    )
    dry_breakers: tuple[str, ...] = _repetition(
        ("\n", ":", '"', "*"),
        "--dry-sequence-breaker",
        "DRY: repetitions end at this text; may be repeated, and replaces the defaults; `none` "
        "means no breakers.",
        metavar="TEXT",
        show_default=r"\n : \" *",
        parse=_parse_breakers,
        aliases="dry_sequence_breakers",
    )
    typical_p: float = _more_sampling(
        1.0,
        "--typical --typical-p",
        "Keep only the most typical tokens whose probabilities add up to p.",
        min=0.0,
        max=1.0,
    )
    top_n_sigma: float = _more_sampling(
        -1.0,
        "--top-nsigma --top-n-sigma",
        "Keep only tokens with logits within n standard deviations of the largest.",
    )
    xtc_probability: float = _more_sampling(
        0.0,
        "--xtc-probability",
        "XTC: the probability that the most likely tokens are excluded; 0 is off.",
        min=0.0,
        max=1.0,
    )
    xtc_threshold: float = _more_sampling(
        0.1,
        "--xtc-threshold",
        "XTC: exclude all tokens at least this likely, except the least likely of them; over 0.5 "
        "is off.",
        min=0.0,
        max=1.0,
    )
    dynatemp_range: float = _more_sampling(
        0.0,
        "--dynatemp-range",
        "Dynamic temperature: how far it moves up and down; 0 is off.",
        min=0.0,
    )
    dynatemp_exponent: float = _more_sampling(
        1.0,
        "--dynatemp-exp",
        "Dynamic temperature: the exponent of the entropy.",
        min=0.0,
    )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token that the samplers leave is always taken."""
        has_temperature = "temperature" in self.samplers
        return has_temperature and self.temperature <= 0.0 and self.dynatemp_range <= 0.0


def parse_samplers(text: str) -> tuple[SamplerName, ...]:
    """Parse samplers in llama.cpp's spellings; an empty text means no samplers.

    Args:
        text: Names or aliases, separated by semicolons or commas, or letters (``edskypmxt``).

    Raises:
        ValueError: If there is no such sampler. The error has the message for the user.
    """
    words = [word.strip() for word in text.replace(",", ";").lower().split(";")]
    names = [word for word in words if word]
    # A single word that is not a name may consist of letters.
    if len(names) == 1 and names[0] not in _ALIASES and set(names[0]) <= set(_LETTERS):
        return tuple(_LETTERS[letter] for letter in names[0])
    for name in names:
        if name not in _ALIASES:
            known = ", ".join(f"{sampler} ({letter})" for letter, sampler in _LETTERS.items())
            raise ValueError(f"there is no sampler {name!r}; the samplers are {known}")
    return tuple(_ALIASES[name] for name in names)
