"""Every option of a run: its default, and its spellings and help on the command line.

An option is a field that is declared with `option_fields.option`. The options of samplers are in
`sampler_options`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal, TypeAlias

from specgen.errors import UsageError
from specgen.option_fields import option, utf8
from specgen.option_values import Options
from specgen.sampler_options import DEFAULT_SAMPLERS as DEFAULT_SAMPLERS
from specgen.sampler_options import SamplerName as SamplerName
from specgen.sampler_options import SamplerOptions as SamplerOptions

#: What drafts: the file of a draft model, "ngram" for repetitions of the text so far, or "none".
DraftSource: TypeAlias = Path | str
CacheType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"
]
FlashAttention: TypeAlias = Literal["auto", "on", "off"]
VerifierName: TypeAlias = Literal["auto", "match", "residual", "block", "spectr"]
PolicyName: TypeAlias = Literal["cost", "threshold", "fixed"]
TranslateMode: TypeAlias = Literal["auto", "off"]
KernelChoice: TypeAlias = Literal["auto", "specgen", "llama.cpp"]
SourceChoice: TypeAlias = Literal["auto", "hub", "pypi"]
#: The memory for a target's weights: so many bytes; whatever they need; or what is available.
WeightsMemory: TypeAlias = int | Literal["all", "auto"]
Show: TypeAlias = Literal["accepted", "all", "rounds", "none"]

#: The default temperature of the draft model, relative to the target's. It is lower, because a
#: small model is less sure even where it is right.
DRAFT_TEMPERATURE = 0.85
#: The default length of drafts with the policy `fixed`.
FIXED_LENGTH = 3
#: The default minimum probability of a drafted token with the policy `fixed`.
FIXED_P_MIN = 0.5
#: The default maximum length of drafts with other policies. Longer drafts are rarely accepted as a
#: whole.
LONGEST_DRAFT = 16
#: The same for a target that is read from disk in each pass: there a row costs next to nothing. In
#: replays, 64 tokens are 26% faster than 16, and 6% faster than 48. More than 60 leave too few of
#: llama.cpp's sequences for four answers at once; with more answers, drafts are shorter.
LONGEST_STREAMED_DRAFT = 60
#: The default lengths of the shortest and the longest n-gram with the policy `fixed`.
FIXED_NGRAMS = (4, 8)
#: The same with other policies.
NGRAMS = (1, 32)


# --- drafting


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of a draft."""

    #: ``auto``: a tree where that should save time; ``off``: a chain; ``levels``: a tree with a
    #: fixed number of children at each depth; ``walks``: independent drafts.
    kind: Literal["auto", "off", "levels", "walks"]
    #: For ``levels``, the number of children at each depth; for ``walks``, their number and length.
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            UsageError: If there is no such shape.
        """
        numbers: Any = self.numbers  # whatever the caller gave
        match self.kind, numbers:
            case ("auto" | "off", ()) | ("walks", (int(), int())):
                is_shape = True
            case "levels", (int(), *_):
                is_shape = True
            case _:
                is_shape = False
        if not is_shape or not all(isinstance(n, int) and n > 0 for n in numbers):
            raise UsageError(
                f"TreeShape({self.kind!r}, {numbers!r}) is not a shape",
                hint='DraftOptions also accepts "auto", "off", "3,2,1" and "4x5"',
            )
        object.__setattr__(self, "numbers", tuple(numbers))

    @property
    def is_fixed(self) -> bool:
        """Whether the shape of drafts is fixed, instead of chosen for each draft."""
        return self.kind in {"levels", "walks"}

    @property
    def n_nodes(self) -> int:
        """The number of tokens in a draft of a fixed shape."""
        # For levels, the number of nodes in each level; for walks, the last one is that of all.
        products = list(accumulate(self.numbers, mul))
        return products[-1] if self.kind == "walks" else sum(products)

    @property
    def n_levels(self) -> int:
        """The number of levels of a draft of a fixed shape."""
        return self.numbers[1] if self.kind == "walks" else len(self.numbers)

    def __str__(self) -> str:
        if not self.is_fixed:
            return self.kind
        separator = "x" if self.kind == "walks" else ","
        return separator.join(map(str, self.numbers))


AUTO_TREE = TreeShape("auto")
#: The maximum number of tokens in a fixed shape. More rows of logits are rarely worth their memory.
LARGEST_TREE = 64


def parse_tree(text: str) -> TreeShape:
    """Parse a shape in the spelling of `--tree`.

    Raises:
        ValueError: If it is not a shape, or too large. The error has the message for the user.
    """
    text = text.strip().lower()
    if text == "auto":
        return AUTO_TREE
    if text == "off":
        return TreeShape("off")
    kind: Literal["levels", "walks"] = "walks" if "x" in text else "levels"
    numbers = text.split("x" if kind == "walks" else ",")
    are_numbers = all(re.fullmatch("[1-9][0-9]{0,2}", number) for number in numbers)
    if not are_numbers or (kind == "walks" and len(numbers) != 2):
        raise ValueError(
            f"{text!r} is not a shape: give auto, off, the number of children at each depth "
            "(3,2,1), or independent drafts and their length (4x5)"
        )
    shape = TreeShape(kind, tuple(map(int, numbers)))
    if len(numbers) > LARGEST_TREE or shape.n_nodes > LARGEST_TREE:
        raise ValueError(f"{text!r} has more than {LARGEST_TREE} tokens; give a smaller shape")
    return shape


_drafting = partial(option, panel="Drafting")
_ngrams = partial(option, panel="Repetitions")
_lookup = partial(option, panel="Other texts")


@dataclass(frozen=True, slots=True)
class DraftOptions(Options):
    """How much is drafted in a round, and how drafts are verified.

    Raises:
        UsageError: If a value is invalid, or two options contradict each other.
    """

    policy: PolicyName = _drafting(
        "cost",
        "--policy",
        "How much to draft: cost (as long as it should save time), threshold (until the whole "
        "draft becomes too unlikely), or fixed (set by --draft-max and --draft-p-min).",
        envvar="SPECGEN_POLICY",
    )
    max_tokens: int | None = _drafting(
        None,
        "--draft-max --draft-n",
        "Maximum number of tokens to draft in a round; 0 drafts nothing.",
        min=0,
        max=128,
        show_default=f"{LONGEST_DRAFT}, or {FIXED_LENGTH} with --policy fixed, or "
        f"{LONGEST_STREAMED_DRAFT} for a target larger than memory",
    )
    tree: TreeShape = _drafting(
        AUTO_TREE,
        "--tree",
        "Whether drafts branch: auto (where that should save time, with --policy cost), off, the "
        "number of children at each depth (3,2,1), or independent drafts and their length (4x5).",
        metavar="auto|off|3,2,1|4x5",
        parse=parse_tree,
    )
    tree_depth: int | None = _drafting(
        None,
        "--tree-depth",
        "Maximum depth of a tree.",
        min=1,
        show_default=False,
    )
    min_tokens: int = _drafting(
        0,
        "--draft-min --draft-n-min",
        "Discard drafts with fewer tokens, unless they were sampled.",
        min=0,
    )
    p_min: float | None = _drafting(
        None,
        "--draft-p-min",
        "Stop drafting where the most likely token has a lower probability.",
        min=0.0,
        max=1.0,
        show_default=f"0, or {FIXED_P_MIN} with --policy fixed",
    )
    temperature: float | None = _drafting(
        None,
        "--draft-temp",
        "Temperature of the draft model.",
        min=0.01,
        show_default=f"{DRAFT_TEMPERATURE} times the target's",
    )
    top_k: int | None = _drafting(
        None,
        "--draft-top-k",
        "Top-k of the draft model.",
        min=0,
        show_default="the target's",
    )
    verifier: VerifierName = _drafting(
        "auto",
        "--verifier",
        "How drafts are verified: match (a seed gives the same text as without drafts), residual, "
        "block, spectr (for independent drafts), or auto (match with a seed, otherwise the best).",
    )
    translate: TranslateMode = _drafting(
        "auto",
        "--translate",
        "Translate the text of a draft model with another vocabulary (auto), or refuse such a "
        "model (off).",
    )
    mask: str = _drafting(
        "auto",
        "--draft-mask",
        "The mask token of a parallel draft model (PARD), by number or text; auto uses the file's, "
        "off drafts one token at a time.",
        metavar="auto|off|TOKEN",
        parse=utf8,
    )
    ngrams: bool | None = _ngrams(
        None,
        "--ngrams/--no-ngrams",
        "With a draft model, also draft repetitions of the text so far.",
        show_default="on with --policy cost",
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
        max=32,
        show_default=f"{NGRAMS[1]}, or {FIXED_NGRAMS[1]} with --policy fixed",
    )
    lookup_files: tuple[Path, ...] = _lookup(
        (),
        "--lookup-file --lookup-cache-static -lcs",
        "Also draft repetitions of these texts (plain text or JSON Lines); may be repeated.",
        metavar="FILE|FOLDER",
        show_default=False,
    )
    lookup_store: bool = _lookup(
        False,
        "--lookup-store",
        "Keep prompts and answers in the cache folder, and draft from them.",
    )

    def check_together(self) -> None:
        """Check that the lengths of n-grams, and those of drafts, do not contradict each other."""
        shortest = self.ngram_min
        longest = self.ngram_max
        if shortest is not None and longest is not None and shortest > longest:
            raise UsageError(
                f"the shortest n-gram ({shortest}) is longer than the longest one ({longest})",
                hint="give a smaller --ngram-min, or a larger --ngram-max",
            )
        shape = self.tree
        n_max = self.max_tokens
        if shape.is_fixed and n_max is not None and n_max < shape.n_nodes:
            raise UsageError(
                f"a draft of the shape {shape} has {shape.n_nodes} tokens, more than the maximum "
                f"of {n_max}",
                hint="use a smaller shape, or leave --draft-max out",
            )

    @property
    def n_max(self) -> int:
        """The maximum number of tokens in a draft."""
        if self.tree.is_fixed:
            return self.tree.n_nodes
        if self.max_tokens is not None:
            return max(0, self.max_tokens)
        return FIXED_LENGTH if self.policy == "fixed" else LONGEST_DRAFT

    @property
    def grows_trees(self) -> bool:
        """Whether drafts may branch: in a requested shape, or where that should save time."""
        return self.tree.is_fixed or (self.tree.kind == "auto" and self.policy == "cost")

    @property
    def stops_below(self) -> float:
        """Drafting stops if the draft model's most likely token is less likely than this."""
        if self.p_min is not None:
            return self.p_min
        return FIXED_P_MIN if self.policy == "fixed" else 0.0

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """The lengths of the shortest and the longest n-gram.

        If only one of them is set, it overrides the default of the other where they conflict.
        """
        shortest, longest = FIXED_NGRAMS if self.policy == "fixed" else NGRAMS
        if self.ngram_min is not None:
            shortest = self.ngram_min
            longest = max(shortest, longest)
        if self.ngram_max is not None:
            longest = self.ngram_max
            shortest = min(shortest, longest)
        return shortest, longest

    @property
    def adds_ngrams(self) -> bool:
        """Whether repetitions are drafted in addition to a draft model's tokens."""
        return self.is_by_cost if self.ngrams is None else self.ngrams

    @property
    def policy_in_use(self) -> PolicyName:
        """The policy that decides how much is drafted; for a requested shape it is `fixed`."""
        return "fixed" if self.tree.is_fixed else self.policy

    @property
    def is_by_cost(self) -> bool:
        """Whether the policy in use is `cost`."""
        return self.policy_in_use == "cost"


# --- the machine


@dataclass(frozen=True, slots=True)
class Workers:
    """Machines that compute layers of a model, through llama.cpp's RPC."""

    #: The address of each machine, as ``host:port``.
    endpoints: tuple[str, ...]
    #: The share of the model for each of their devices, in order. If empty, the shares follow from
    #: their free memory.
    tensor_split: tuple[float, ...] = ()
    #: Whether the logits are computed on this machine. Then only hidden states, which are smaller,
    #: have to be sent.
    output_here: bool = False
    #: The maximum number of seconds that a call waits for a machine. It is not compared, since it
    #: does not change what a decode costs.
    timeout_s: float = field(default=60.0, compare=False)


def parse_size(text: str) -> int:
    """Parse a size such as 500M or 20G; a number without a unit is in MiB, as in llama.cpp.

    Returns:
        The size in bytes.

    Raises:
        ValueError: If it is not a size. The error has the message for the user.
    """
    size = text.strip().lower()
    if size.isdigit():
        size = f"{size}mib"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", size)
    if match is None:
        raise ValueError(f"{text!r} is not a size: give one like 500M or 20G")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    exponent = " kmgt".index(unit or " ")
    n_bytes = float(number) * base**exponent
    if math.isinf(n_bytes):
        raise ValueError("the size is too large: give one like 500M or 20G")
    return int(n_bytes)


def parse_weights_memory(text: str) -> WeightsMemory:
    """Parse the memory for weights: a size, or one of the words.

    Raises:
        ValueError: If it is neither. The error has the message for the user.
    """
    word = text.strip().lower()
    if word == "all":
        return "all"
    if word == "auto":
        return "auto"
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size, all or auto: give one like 10G") from None


def _checked_weights_memory(given: WeightsMemory) -> WeightsMemory:
    """Return the memory for weights.

    Raises:
        ValueError: If it is negative.
    """
    if isinstance(given, int) and given < 0:
        raise ValueError(f"{given} bytes: give a size like 10G, all or auto")
    return given


def parse_gpu_layers(text: str) -> int | str:
    """Parse a number of layers on the GPU, in llama.cpp's spellings.

    Returns:
        -1 for all layers; other texts as they are, to be checked as numbers.

    Raises:
        ValueError: If the number is to follow from the GPU's memory. The error has the message for
            the user.
    """
    word = text.strip().lower()
    if word == "all":
        return -1
    if word == "auto":
        raise ValueError(f"{text!r}: specgen does not measure what fits; give all or a number")
    return text


_machine = partial(option, panel="Machine")


@dataclass(frozen=True, slots=True)
class ContextOptions(Options):
    """How a model is loaded, and how its context is created.

    Raises:
        UsageError: If a value is invalid.
    """

    n_ctx: int | None = _machine(
        None,
        "--ctx-size -c",
        "Context size in tokens; 0 is the size that the model was trained with.",
        min=0,
        show_default=(
            "what is needed; at most 4096 in chat and serve, in fim what is prefilled in 5 s"
        ),
    )
    n_batch: int = _machine(
        512,
        "--batch-size -b",
        "Prompt tokens to decode at once.",
        min=1,
        max=8192,
    )
    n_threads: int | None = _machine(
        None,
        "--threads -t",
        "Threads for decoding.",
        min=1,
        max=1024,
        show_default="what `specgen tune` found best, or the physical cores that it may use",
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
        "Layers of the target on the GPU; -1 also means all.",
        min=-1,
        metavar="N|all",
        parse=parse_gpu_layers,
    )
    flash_attention: FlashAttention = _machine("auto", "--flash-attn -fa", "Flash attention.")
    cache_type_k: CacheType = _machine("f16", "--cache-type-k -ctk", "Type of the cached keys.")
    cache_type_v: CacheType = _machine("f16", "--cache-type-v -ctv", "Type of the cached values.")
    weights_memory: WeightsMemory = _machine(
        "auto",
        "--weights-memory",
        "Memory for the target's weights: a size such as 10G, or auto for what is free. The rest "
        "is read from disk in every pass; all refuses a target that does not fit.",
        metavar="SIZE|all|auto",
        parse=parse_weights_memory,
        check=_checked_weights_memory,
    )
    #: Other machines that compute layers of the model.
    workers: Workers | None = None
    #: A chat template (Jinja) that replaces the model's own. In Python it may also be a name, such
    #: as "chatml".
    chat_template: str | None = field(default=None, compare=False)
    #: Additional variables for the chat template.
    template_variables: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class KernelOptions(Options):
    """Which kernels compute on the CPU, and whether weights packed for specgen's are stored."""

    choice: KernelChoice = _machine(
        "auto",
        "--kernels",
        "Which kernels to use on the CPU; auto means specgen's if they were built and pass their "
        "test.",
        envvar="SPECGEN_KERNELS",
    )
    packed_cache: Literal["auto", "off"] = _machine(
        "auto",
        "--packed-cache",
        "Keep the weights on disk in the form that specgen's kernels read: auto (if there is "
        "space), or off.",
        envvar="SPECGEN_PACKED_CACHE",
    )


@dataclass(frozen=True, slots=True)
class Contexts:
    """The context options of the two models, and the kernels that both of them use."""

    #: The target's context options.
    target: ContextOptions
    #: The draft's context options.
    draft: ContextOptions
    #: Which kernels compute on the CPU.
    kernels: KernelOptions = KernelOptions()


# --- prompts


_prompt = partial(option, panel="Prompt")


@dataclass(frozen=True, slots=True)
class PrefixOptions(Options):
    """Which prefixes of prompts are stored on disk, so that the next process can skip them."""

    kept: Literal["shared", "all", "off"] = _prompt(
        "shared",
        "--prefix-store",
        "Which computed prefixes of long prompts to store on disk: agents' instructions, and what "
        "two prompts have in common (shared), all, or none (off).",
        envvar="SPECGEN_PREFIX_STORE",
    )
    max_bytes: int | None = _prompt(
        None,
        "--prefix-store-size",
        "Maximum size of the store; the least recently used prefixes are deleted first.",
        metavar="SIZE",
        parse=parse_size,
        show_default="a tenth of the free disk space, at most 20G",
    )


# --- answers


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that an answer, or calls of functions in it, must have."""

    #: The language of the grammar: llama.cpp's GBNF, JSON Schema, or llguidance's variant of Lark.
    form: Literal["gbnf", "json_schema", "lark"]
    #: The grammar in that language.
    text: str
    #: Whether the answer has to be a call.
    is_call: bool = False
    #: If not empty, the grammar describes what follows each such mark, and other text is free.
    mark: str = ""
    #: Whether a mark counts only at the beginning of the text.
    is_first: bool = False
    #: A pattern for the beginning of a text that is a call without a mark. Such a call follows the
    #: grammar's rule `bare`. If empty, there are no such calls.
    bare_start: str = ""


def _checked_stops(stops: Sequence[str]) -> Sequence[str]:
    """Return the texts that end an answer.

    Raises:
        ValueError: If one is empty or not UTF-8. The error has the message for the user.
    """
    if "" in stops:
        raise ValueError("a text is empty: every answer would end before it began")
    return tuple(utf8(stops))


_answer = partial(option, panel="Answer")


@dataclass(frozen=True, slots=True)
class GenerationOptions(Options):
    """When an answer ends, and what is reported about it.

    Raises:
        UsageError: If a value is invalid.
    """

    max_tokens: int = _answer(
        -1,
        "--max-tokens --predict --n-predict -n",
        "Maximum number of tokens to generate; -1 goes on until the text ends or the context is "
        "full. -2 means the same.",
        min=-2,
        check=lambda n: max(n, -1),
        aliases="max_completion_tokens max_output_tokens",
    )
    stop: tuple[str, ...] = _answer(
        (),
        "--stop --reverse-prompt -r",
        "End the answer before this text; may be repeated.",
        metavar="TEXT",
        parse=_checked_stops,
        check=_checked_stops,
        aliases="stop_sequences",
    )
    ignore_eos: bool = _answer(False, "--ignore-eos", "Never choose an end-of-text token.")
    logprobs: int | None = _answer(
        None,
        "--logprobs",
        "With --json: report the log-probabilities of each token and of the N most likely ones.",
        min=0,
        max=100,
        metavar="N",
        show_default="none",
        aliases="n_probs top_logprobs",
    )
    #: The grammar that the answer follows, if there is one.
    grammar: Grammar | None = None
    #: Control tokens, by their entries in the token table, that are shown in the text, so that the
    #: grammar can contain them.
    shown_controls: tuple[str, ...] = ()
    #: If positive, the answer ends before any line but the first that begins with fewer spaces and
    #: tabs than this.
    n_indent: int = 0
    #: Whether a prefix of the prompt may be taken from the cache.
    uses_cache: bool = True
    #: Whether there is an event for each chunk of the prompt that is prefilled.
    reports_prefill: bool = False
    #: Whether these events include the log-probabilities of the prompt's tokens. Tokens from the
    #: cache have none.
    prompt_logprobs: bool = False


# --- models and sessions


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The models that the user named."""

    #: The target; None if it was not named.
    target: str | None
    #: The draft; None if it was not named.
    draft: str | None
    #: The name of a pair of a target and a draft; None if it was not named.
    pair: str | None
    #: What drafts for the draft model, then what drafts for that one, and so on.
    further_drafts: tuple[str, ...] = ()


def staged(
    target: str | None,
    drafts: Sequence[str],
    pair: str | None,
) -> ModelChoice:
    """Return the choice of models in which each draft drafts for the one before it.

    Args:
        target: The name of the target, for which the first draft drafts.
        drafts: The names of the drafts.
        pair: The name of a pair of a target and a draft.

    Raises:
        UsageError: If one of the drafts could not be used.
    """
    if "none" in drafts and len(drafts) > 1:
        raise UsageError("--draft none drafts nothing, so it goes with no other --draft")
    if "ngram" in drafts[:-1]:
        raise UsageError("--draft ngram needs no draft of its own: give it last, after the models")
    draft = drafts[0] if drafts else None
    return ModelChoice(target, draft, pair, further_drafts=tuple(drafts[1:]))


@dataclass(frozen=True, slots=True)
class SessionOptions(Options):
    """Everything that decides what a session does."""

    #: The model file of the target.
    target: Path
    #: What drafts.
    draft: DraftSource = "ngram"
    #: How the tokens of answers are sampled, unless a request says otherwise.
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    #: How much is drafted, and how drafts are verified.
    drafting: DraftOptions = field(default_factory=DraftOptions)
    #: When answers end, unless a request says otherwise.
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    #: How the target is loaded, and how its context is created.
    target_context: ContextOptions = field(default_factory=ContextOptions)
    #: The same for the draft.
    draft_context: ContextOptions = field(default_factory=ContextOptions)
    #: What drafts for the draft model, then what drafts for that one, and so on; n-grams come last.
    further_drafts: tuple[DraftSource, ...] = ()
    #: The folder for lookup indexes; None disables them.
    cache: Path | None = None
    #: The folder for the target's answers and what drafters learnt from them; None: these are not
    #: kept.
    learning: Path | None = None
    #: The file for the computed state of a prompt, so that the next session can skip its prefill;
    #: None: it is not kept.
    prompt_cache: Path | None = None
    #: Which prefixes of prompts are stored in the folder `cache`; None: no prefixes.
    prefixes: PrefixOptions | None = None
    #: Whether phrases that several answers have in common are stored in the folder `cache`.
    phrase_store: bool = False

    def check_together(self) -> None:
        """Check that only the target is given a limit on the memory of its weights."""
        if self.draft_context.weights_memory != "auto":
            raise UsageError(
                "draft_context: a draft always stays in memory, so leave weights_memory out"
            )
