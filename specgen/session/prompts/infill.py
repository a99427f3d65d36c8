r"""The prompt for a text with a gap: fill-in-the-middle (2207.14255).

Models are trained for it on texts in which special tokens mark prefix, suffix and middle:

    <PRE> prefix <SUF> suffix <MID>    most models: see below
    [SUFFIX] suffix [PREFIX] prefix    Codestral (`encode_fim` of mistral-common)

Qwen2.5-Coder (2409.12186), CodeLlama (2308.12950), StarCoder (2305.06161), StarCoder2 (2402.19173),
DeepSeek-Coder (2401.14196) and Granite (2405.04324) have the order prefix, suffix, middle.
CodeLlama and Codestral are trained with SentencePiece's space before the prefix, and with none
before the suffix.

Two models have special tokens for the other files of a repository:

    <|repo_name|>name\n <|file_sep|>path\ntext ... <|file_sep|>path\n <PRE> prefix ...    Qwen2.5-Coder
    <repo_name>name <file_sep>path\ntext ... <file_sep> <PRE> path\nprefix ...            StarCoder2

For the other models, the prefix starts with the texts of the other files, without their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.prompt import Prompt

#: Tokens that llama.cpp does not recognise: Codestral's prefix and suffix, StarCoder2's repository
#: and file.
_CODESTRAL = ("[PREFIX]", "[SUFFIX]")
_STARCODER2 = ("<repo_name>", "<file_sep>")
#: Tokens that end a middle, and no text for llama.cpp: of StarCoder2, CodeGemma and CodeLlama.
_ENDS = ("<file_sep>", "<|file_separator|>", "▁<EOT>")
#: The prefix's share of the room if both are too long, as in llama.cpp's server: it says more.
_PREFIX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ContextFile:
    """Another file, which the prompt contains before the text with the gap."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap between `prefix` and `suffix` in the file `name`; `context` are other files of the
    repository.
    """

    prefix: str
    suffix: str
    name: str = "file"
    context: tuple[ContextFile, ...] = ()
    repository: str = "repository"


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The special tokens of a vocabulary for texts with a gap; -1 for one that it lacks."""

    prefix: int = -1
    suffix: int = -1
    middle: int = -1
    repository: int = -1
    separator: int = -1
    #: Whether the file's name comes after the prefix's mark, and no line break after the
    #: repository's.
    as_starcoder2: bool = False
    #: The tokens that end a middle: no mark can be a part of it.
    ends: frozenset[int] = frozenset()

    @staticmethod
    def of(vocabulary: LlamaVocabulary) -> InfillTokens | None:
        found = vocabulary.infill_tokens()
        prefix, suffix, middle = found["fim_pre"], found["fim_suf"], found["fim_mid"]
        # A model file may name Codestral's two tokens, and an unused third one for the middle.
        if min(prefix, suffix, middle) < 0 or vocabulary.token_text(prefix) == _CODESTRAL[0]:
            prefix, suffix = map(vocabulary.control_token, _CODESTRAL)
            middle = -1
        if min(prefix, suffix) < 0:
            return None
        repository, separator = found["fim_rep"], found["fim_sep"]
        as_starcoder2 = separator < 0
        if as_starcoder2:
            repository, separator = map(vocabulary.control_token, _STARCODER2)
        ends = {*found.values(), prefix, suffix, *map(vocabulary.control_token, _ENDS)}
        return InfillTokens(
            prefix, suffix, middle, repository, separator, as_starcoder2, frozenset(ends - {-1})
        )

    @property
    def knows_files(self) -> bool:
        return min(self.repository, self.separator) >= 0


def check_infill(model: LlamaModel) -> InfillTokens:
    """Return the tokens of a model for texts with a gap. Raise `UsageError` if it was not trained
    for gaps.
    """
    tokens = InfillTokens.of(model.vocabulary)
    if tokens is None:
        hint = "use a model that was trained for it, such as Qwen2.5-Coder or StarCoder2"
        raise UsageError(f"{model.name} has no tokens for fill-in-the-middle", hint)
    return tokens


def infill_prompt(
    model: LlamaModel, own_draft: LlamaModel | None, gap: Gap, n_room: int
) -> tuple[Prompt, list[str]]:
    """Return the prompt for a gap, of at most `n_room` tokens, and what did not fit: the first
    other files go first, then the far ends of prefix and suffix. `own_draft`, a model with another
    vocabulary, gets the same, or if it was not trained for gaps the suffix, then the prefix. Raise
    `UsageError` if the target was not trained.
    """
    tokens = check_infill(model)
    written, left_out = _written(model.vocabulary, tokens, gap, n_room)
    draft_tokens = None
    if own_draft is not None:
        own = InfillTokens.of(own_draft.vocabulary) or InfillTokens()
        draft_tokens = tuple(_written(own_draft.vocabulary, own, gap, n_room)[0])
    text = "".join(map(model.vocabulary.control_text, written))
    return Prompt(text, tuple(written), draft_tokens, ends=tokens.ends), left_out


def _written(
    vocabulary: LlamaVocabulary, tokens: InfillTokens, gap: Gap, n_room: int
) -> tuple[list[int], list[str]]:
    inside, knows_files = vocabulary.tokenize_inside, tokens.knows_files
    bos = [vocabulary.special_tokens()["bos"]] if vocabulary.add_bos else []
    marks = (tokens.prefix, tokens.suffix, tokens.middle)
    n_room = max(0, n_room - len(bos) - sum(mark >= 0 for mark in marks))
    head, heading, begin = _headings(tokens, inside, gap) if knows_files else ([], [], [])
    n_headings = len(head) + len(heading) + len(begin)
    n_left, n_lost, files = n_room - n_headings, len(gap.context), list[int]()
    prefix = vocabulary.tokenize(gap.prefix, add_special=False, parse_special=False)
    prefix, suffix, left_out = _around_gap(prefix, inside(gap.suffix), n_room)
    if gap.context and n_left > n_headings:
        around = _around_gap(inside(gap.prefix), inside(gap.suffix), n_left)
        n_left -= len(around[0]) + len(around[1])
        while n_lost:  # the last files are the nearest
            file = gap.context[n_lost - 1]
            text = inside(file.text if knows_files else f"{file.text}\n\n")
            if knows_files:
                text = [tokens.separator, *inside(f"{file.name}\n"), *text]
            if len(text) + len(files) > n_left:
                break
            files, n_lost = [*text, *files], n_lost - 1
        if files:
            prefix, suffix, left_out = around
    if not files:
        head, heading, begin = [], [], []
    left_out += [file.name for file in gap.context[:n_lost]]
    before, prefix = [*head, *files, *heading], [*begin, *prefix]
    if not knows_files:
        before, prefix = [], [*files, *prefix]
    if tokens.middle >= 0:
        parts = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
    elif tokens.prefix >= 0:
        parts = [tokens.suffix, *suffix, tokens.prefix, *prefix]
    else:
        parts = [*suffix, *prefix]
    return [*bos, *before, *parts], left_out


def _headings(
    tokens: InfillTokens, inside: Callable[[str], list[int]], gap: Gap
) -> tuple[list[int], list[int], list[int]]:
    """Return the tokens before the first file, before the file with the gap, and before its prefix."""
    if tokens.as_starcoder2:
        head = [tokens.repository, *inside(gap.repository)]
        return head, [tokens.separator], inside(f"{gap.name}\n")
    head = [tokens.repository, *inside(f"{gap.repository}\n")]
    return head, [tokens.separator, *inside(f"{gap.name}\n")], []


def _around_gap(
    prefix: list[int], suffix: list[int], n_room: int
) -> tuple[list[int], list[int], list[str]]:
    most = max(n_room - len(prefix), n_room - int(_PREFIX_SHARE * n_room))
    n_suffix = min(len(suffix), most)
    n_prefix = min(len(prefix), n_room - n_suffix)
    left_out = []
    if n_prefix < len(prefix):
        left_out.append(f"the first {len(prefix) - n_prefix} tokens before the gap")
    if n_suffix < len(suffix):
        left_out.append(f"the last {len(suffix) - n_suffix} tokens behind the gap")
    return prefix[len(prefix) - n_prefix :], suffix[:n_suffix], left_out
