r"""The prompt for a text with a gap: fill-in-the-middle (2207.14255).

Models are trained for it on texts in which special tokens mark prefix, suffix and middle:

    <PRE> prefix <SUF> suffix <MID>    most models: see below
    [SUFFIX] suffix [PREFIX] prefix    Codestral (`encode_fim` of mistral-common)

Qwen2.5-Coder (2409.12186), CodeLlama (2308.12950), StarCoder (2305.06161), StarCoder2 (2402.19173), DeepSeek-Coder
(2401.14196) and Granite (2405.04324) have the order prefix, suffix, middle. CodeLlama and Codestral are trained with
SentencePiece's space before the prefix, and with none before the suffix.

Two models have special tokens for the other files of a repository:

    <|repo_name|>name\n <|file_sep|>path\ntext ... <|file_sep|>path\n <PRE> prefix ...    Qwen2.5-Coder
    <repo_name>name <file_sep>path\ntext ... <file_sep> <PRE> path\nprefix ...            StarCoder2

For the other models, the prefix starts with the texts of the other files, without their names.
"""

from __future__ import annotations

from dataclasses import dataclass

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.prompt import Prompt

#: Tokens that llama.cpp does not recognise: Codestral's prefix and suffix, StarCoder2's repository and file.
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
    """A gap between `prefix` and `suffix` in the file `name`; `context` are other files of the repository."""

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
    #: Whether the file's name comes after the prefix's mark, and no line break after the repository's.
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
    """Return the tokens of a model for texts with a gap. Raise `UsageError` if it was not trained for gaps."""
    tokens = InfillTokens.of(model.vocabulary)
    if tokens is None:
        hint = "use a model that was trained for it, such as Qwen2.5-Coder or StarCoder2"
        raise UsageError(f"{model.name} has no tokens for fill-in-the-middle", hint)
    return tokens


def infill_prompt(
    model: LlamaModel, own_draft: LlamaModel | None, gap: Gap, n_room: int
) -> tuple[Prompt, list[str]]:
    """Return the prompt for a gap, of at most `n_room` tokens, and what did not fit: the first other files go first,
    then the far ends of prefix and suffix. `own_draft`, a model with another vocabulary, gets the same, or if it was
    not trained for gaps the suffix, then the prefix. Raise `UsageError` if the target was not trained."""
    tokens = check_infill(model)
    written, left_out = _Writer(model.vocabulary, tokens, n_room).write(gap)
    draft_tokens = None
    if own_draft is not None:
        own = InfillTokens.of(own_draft.vocabulary) or InfillTokens()
        draft_tokens = tuple(_Writer(own_draft.vocabulary, own, n_room).write(gap)[0])
    text = "".join(map(model.vocabulary.control_text, written))
    return Prompt(text, tuple(written), draft_tokens, ends=tokens.ends), left_out


class _Writer:
    """Writes prompts for gaps as a model expects them, of at most `n_room` tokens."""

    def __init__(self, vocabulary: LlamaVocabulary, tokens: InfillTokens, n_room: int) -> None:
        self._vocabulary, self._tokens = vocabulary, tokens
        self._inside = vocabulary.tokenize_inside
        self._bos = [vocabulary.special_tokens()["bos"]] if vocabulary.add_bos else []
        marks = (tokens.prefix, tokens.suffix, tokens.middle)
        self._n_room = max(0, n_room - len(self._bos) - sum(mark >= 0 for mark in marks))

    def write(self, gap: Gap) -> tuple[list[int], list[str]]:
        """Return the tokens of a prompt, and descriptions of the texts that did not fit."""
        head, heading, begin = self._headings(gap)
        n_headings = len(head) + len(heading) + len(begin)
        n_left, inside = self._n_room - n_headings, self._inside
        if gap.context and n_left > n_headings:
            prefix, suffix, left_out = around_gap(inside(gap.prefix), inside(gap.suffix), n_left)
            files, n_lost = self._files(gap.context, n_left - len(prefix) - len(suffix))
            if files:
                left_out += [file.name for file in gap.context[:n_lost]]
                before, first = [*head, *files, *heading], [*begin, *prefix]
                if not self._tokens.knows_files:
                    before, first = [], [*files, *prefix]
                return self._parts(before, first, suffix), left_out
        prefix = self._vocabulary.tokenize(gap.prefix, add_special=False, parse_special=False)
        prefix, suffix, left_out = around_gap(prefix, inside(gap.suffix), self._n_room)
        left_out += [file.name for file in gap.context]
        return self._parts([], prefix, suffix), left_out

    def _files(self, context: tuple[ContextFile, ...], n_room: int) -> tuple[list[int], int]:
        """Return the last files, which are the nearest, as far as there is room, and how many others there are."""
        files: list[int] = []
        for n_lost in range(len(context), 0, -1):
            file = context[n_lost - 1]
            text = self._inside(file.text if self._tokens.knows_files else f"{file.text}\n\n")
            if self._tokens.knows_files:
                text = [self._tokens.separator, *self._inside(f"{file.name}\n"), *text]
            if len(text) + len(files) > n_room:
                return files, n_lost
            files = [*text, *files]
        return files, 0

    def _parts(self, before: list[int], prefix: list[int], suffix: list[int]) -> list[int]:
        tokens = self._tokens
        if tokens.middle >= 0:
            gap = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
        elif tokens.prefix >= 0:
            gap = [tokens.suffix, *suffix, tokens.prefix, *prefix]
        else:
            gap = [*suffix, *prefix]
        return [*self._bos, *before, *gap]

    def _headings(self, gap: Gap) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens before the first file, before the file with the gap, and before its prefix."""
        tokens, inside = self._tokens, self._inside
        if not tokens.knows_files:
            return [], [], []
        if tokens.as_starcoder2:
            head = [tokens.repository, *inside(gap.repository)]
            return head, [tokens.separator], inside(f"{gap.name}\n")
        head = [tokens.repository, *inside(f"{gap.repository}\n")]
        return head, [tokens.separator, *inside(f"{gap.name}\n")], []


def around_gap(
    prefix: list[int], suffix: list[int], n_room: int
) -> tuple[list[int], list[int], list[str]]:
    """Return as much of prefix and suffix, next to the gap, as there is room for, and what is left out."""
    most = max(n_room - len(prefix), n_room - int(_PREFIX_SHARE * n_room))
    n_suffix = min(len(suffix), most)
    n_prefix = min(len(prefix), n_room - n_suffix)
    left_out = []
    if n_prefix < len(prefix):
        left_out.append(f"the first {len(prefix) - n_prefix} tokens before the gap")
    if n_suffix < len(suffix):
        left_out.append(f"the last {len(suffix) - n_suffix} tokens behind the gap")
    return prefix[len(prefix) - n_prefix :], suffix[:n_suffix], left_out
