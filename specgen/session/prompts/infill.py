r"""The prompt for a text with a gap: fill-in-the-middle (arXiv:2207.14255).

Models are trained for it on texts in which special tokens mark prefix, suffix and middle:

    <PRE> prefix <SUF> suffix <MID>    most models: see below
    [SUFFIX] suffix [PREFIX] prefix    Codestral (`encode_fim` of mistral-common)

Qwen2.5-Coder (arXiv:2409.12186), CodeLlama (arXiv:2308.12950), StarCoder (arXiv:2305.06161),
StarCoder2 (arXiv:2402.19173), DeepSeek-Coder (arXiv:2401.14196) and Granite (arXiv:2405.04324) have
the order prefix, suffix, middle. CodeLlama and Codestral are trained with SentencePiece's space
before the prefix, and with none before the suffix.

Two models have special tokens for the other files of a repository:

    Qwen2.5-Coder:  <|repo_name|>name\n <|file_sep|>path\ntext ... <|file_sep|>path\n
                    <PRE> prefix ...
    StarCoder2:     <repo_name>name <file_sep>path\ntext ... <file_sep>
                    <PRE> path\nprefix ...

For the other models, the prefix starts with the texts of the other files, without their names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specgen.errors import UsageError
from specgen.llama import LlamaModel
from specgen.llama.vocabulary import LlamaVocabulary
from specgen.session.prompts.prompt import Prompt

#: Tokens that llama.cpp does not recognise: Codestral's prefix and suffix, and StarCoder2's
#: repository and file.
_CODESTRAL = ("[PREFIX]", "[SUFFIX]")
_STARCODER2 = ("<repo_name>", "<file_sep>")
#: Tokens of StarCoder2, CodeGemma and CodeLlama that end a middle, and for llama.cpp end no text.
_ENDS = ("<file_sep>", "<|file_separator|>", "▁<EOT>")
#: The prefix's share of the prompt if prefix and suffix are too long, as in llama.cpp's server: it
#: says more than the suffix.
_PREFIX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ContextFile:
    """Another file, which the prompt contains before the text with the gap."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a file."""

    #: The texts before and after it.
    prefix: str
    suffix: str
    #: The file's name.
    name: str = "file"
    #: Other files of the repository; the last ones are the nearest.
    context: tuple[ContextFile, ...] = ()
    #: The repository's name.
    repository: str = "repository"


@dataclass(frozen=True, slots=True)
class FileTokens:
    """The special tokens of a vocabulary for the files of a repository."""

    repository: int
    separator: int
    #: Whether the name of the file with the gap comes after the prefix's mark, and no line break
    #: after the repository's name.
    as_starcoder2: bool


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The special tokens of a vocabulary for texts with a gap."""

    prefix: int
    suffix: int
    #: None: the suffix comes first, and the middle follows the prefix without a mark.
    middle: int | None
    #: None: files have no marks.
    files: FileTokens | None
    #: The tokens that end a middle: no mark can be a part of it.
    ends: frozenset[int]

    @staticmethod
    def of(vocabulary: LlamaVocabulary) -> InfillTokens | None:
        """Return the tokens of a vocabulary; None if it has none for gaps."""
        roles = vocabulary.infill_tokens()  # -1 for one that it lacks
        prefix = roles["fim_pre"]
        suffix = roles["fim_suf"]
        middle: int | None = roles["fim_mid"]
        # A model file may name Codestral's two tokens, and an unused third one for the middle.
        is_incomplete = min(prefix, suffix, roles["fim_mid"]) < 0
        if is_incomplete or vocabulary.token_text(prefix) == _CODESTRAL[0]:
            prefix, suffix = map(vocabulary.control_token, _CODESTRAL)
            middle = None
        if min(prefix, suffix) < 0:
            return None
        as_starcoder2 = roles["fim_sep"] < 0
        repository = roles["fim_rep"]
        separator = roles["fim_sep"]
        if as_starcoder2:
            repository, separator = map(vocabulary.control_token, _STARCODER2)
        files = None
        if min(repository, separator) >= 0:
            files = FileTokens(repository, separator, as_starcoder2)
        others = map(vocabulary.control_token, _ENDS)
        ends = {token for token in (*roles.values(), prefix, suffix, *others) if token >= 0}
        return InfillTokens(prefix, suffix, middle, files, frozenset(ends))


def check_infill(model: LlamaModel) -> InfillTokens:
    """Return the tokens of a model for gaps. Raise `UsageError` if it was not trained for them."""
    tokens = InfillTokens.of(model.vocabulary)
    if tokens is None:
        hint = "use a model that was trained for it, such as Qwen2.5-Coder or StarCoder2"
        raise UsageError(f"{model.name} has no tokens for fill-in-the-middle", hint)
    return tokens


def infill_prompt(
    model: LlamaModel,
    own_draft: LlamaModel | None,
    gap: Gap,
    n_max: int,
) -> tuple[Prompt, list[str]]:
    """Return the prompt for a gap, and what was left out because it did not fit.

    The first other files are left out first, then the far ends of prefix and suffix.

    Args:
        model: The target.
        own_draft: A draft with another vocabulary. It gets the same prompt in its own tokens, or
            the suffix and then the prefix if it was not trained for gaps.
        gap: The texts around the gap.
        n_max: The most tokens of the prompt.

    Raises:
        UsageError: The target was not trained for gaps.
    """
    tokens = check_infill(model)
    written, left_out = _InfillWriter(model.vocabulary, tokens, gap).write(n_max)
    draft_tokens = None
    if own_draft is not None:
        own = InfillTokens.of(own_draft.vocabulary)
        draft_tokens = tuple(_InfillWriter(own_draft.vocabulary, own, gap).write(n_max)[0])
    text = "".join(map(model.vocabulary.control_text, written))
    return Prompt(text, tuple(written), draft_tokens, ends=tokens.ends), left_out


@dataclass(frozen=True, slots=True)
class _Headings:
    """What marks the files of a repository, besides the separators before other files."""

    #: Before the first file, before the file with the gap, and after the mark of the prefix.
    before_files: list[int] = field(default_factory=list)
    before_gap_file: list[int] = field(default_factory=list)
    before_prefix: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.before_files) + len(self.before_gap_file) + len(self.before_prefix)


@dataclass(frozen=True, slots=True)
class _TextsAround:
    """What fits of the texts around a gap, as tokens, and what was left out, in words."""

    prefix: list[int]
    suffix: list[int]
    left_out: list[str]

    @staticmethod
    def fitting(
        prefix: list[int],
        suffix: list[int],
        n_max: int,
    ) -> _TextsAround:
        """Keep the ends of prefix and suffix at the gap, with `n_max` tokens in all."""
        n_suffix_most = max(n_max - len(prefix), n_max - int(_PREFIX_SHARE * n_max))
        n_suffix = min(len(suffix), n_suffix_most)
        n_prefix = min(len(prefix), n_max - n_suffix)
        left_out = []
        if n_prefix < len(prefix):
            left_out.append(f"the first {len(prefix) - n_prefix} tokens before the gap")
        if n_suffix < len(suffix):
            left_out.append(f"the last {len(suffix) - n_suffix} tokens after the gap")
        return _TextsAround(prefix[len(prefix) - n_prefix :], suffix[:n_suffix], left_out)


@dataclass(frozen=True, slots=True)
class _InfillWriter:
    """Writes the prompt for a gap in one vocabulary."""

    vocabulary: LlamaVocabulary
    #: None for a model that was not trained for gaps.
    tokens: InfillTokens | None
    gap: Gap

    @property
    def files(self) -> FileTokens | None:
        return None if self.tokens is None else self.tokens.files

    def write(self, n_max: int) -> tuple[list[int], list[str]]:
        """Return a prompt of at most `n_max` tokens, and what was left out."""
        vocabulary = self.vocabulary
        gap = self.gap
        bos = [vocabulary.special_tokens()["bos"]] if vocabulary.add_bos else []
        n_max = max(0, n_max - len(bos) - self._n_marks())

        # Without other files.
        prefix = vocabulary.tokenize(gap.prefix, add_special=False, parse_special=False)
        suffix = vocabulary.tokenize_inside(gap.suffix)
        around = _TextsAround.fitting(prefix, suffix, n_max)
        headings = _Headings()
        files: list[int] = []
        n_files_left_out = len(gap.context)
        # With other files, if one of them fits besides the headings.
        all_headings = self._headings()
        n_texts = n_max - all_headings.n_tokens
        if gap.context and n_texts > all_headings.n_tokens:
            continued = vocabulary.tokenize_inside(gap.prefix)
            with_files = _TextsAround.fitting(continued, suffix, n_texts)
            n_files = n_texts - len(with_files.prefix) - len(with_files.suffix)
            files, n_files_left_out = self._fitting_files(n_files)
            if files:
                around = with_files
                headings = all_headings

        left_out = around.left_out + [file.name for file in gap.context[:n_files_left_out]]
        if self.files is None:
            text = self._with_marks([*files, *around.prefix], around.suffix)
            return [*bos, *text], left_out
        text = self._with_marks([*headings.before_prefix, *around.prefix], around.suffix)
        before = [*headings.before_files, *files, *headings.before_gap_file]
        return [*bos, *before, *text], left_out

    def _n_marks(self) -> int:
        if self.tokens is None:
            return 0
        return 2 if self.tokens.middle is None else 3

    def _with_marks(self, prefix: list[int], suffix: list[int]) -> list[int]:
        tokens = self.tokens
        if tokens is None:
            return [*suffix, *prefix]
        if tokens.middle is None:
            return [tokens.suffix, *suffix, tokens.prefix, *prefix]
        return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]

    def _headings(self) -> _Headings:
        inside = self.vocabulary.tokenize_inside
        files = self.files
        gap = self.gap
        if files is None:
            return _Headings()
        if files.as_starcoder2:
            return _Headings(
                before_files=[files.repository, *inside(gap.repository)],
                before_gap_file=[files.separator],
                before_prefix=inside(f"{gap.name}\n"),
            )
        return _Headings(
            before_files=[files.repository, *inside(f"{gap.repository}\n")],
            before_gap_file=[files.separator, *inside(f"{gap.name}\n")],
        )

    def _fitting_files(self, n_max: int) -> tuple[list[int], int]:
        """Return the tokens of the other files that fit, and how many files are left out.

        The last files are the nearest to the gap, so the first are left out.
        """
        inside = self.vocabulary.tokenize_inside
        tokens: list[int] = []
        n_left_out = len(self.gap.context)
        for file in reversed(self.gap.context):
            if self.files is None:
                text = inside(f"{file.text}\n\n")
            else:
                name = inside(f"{file.name}\n")
                text = [self.files.separator, *name, *inside(file.text)]
            if len(text) + len(tokens) > n_max:
                break
            tokens = [*text, *tokens]
            n_left_out -= 1
        return tokens, n_left_out
