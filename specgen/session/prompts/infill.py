r"""The prompt for filling a gap in a text: fill-in-the-middle (arXiv:2207.14255).

Models are trained for it with special tokens that mark the prefix, the suffix and the middle:

    <PRE> prefix <SUF> suffix <MID>    most models: see below
    [SUFFIX] suffix [PREFIX] prefix    Codestral (`encode_fim` of mistral-common)

Qwen2.5-Coder (arXiv:2409.12186), CodeLlama (arXiv:2308.12950), StarCoder (arXiv:2305.06161),
StarCoder2 (arXiv:2402.19173), DeepSeek-Coder (arXiv:2401.14196) and Granite (arXiv:2405.04324) use
the order prefix, suffix, middle. CodeLlama and Codestral are trained with SentencePiece's leading
space before the prefix, and without one before the suffix.

Two models have special tokens for other files of the repository:

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

#: Codestral's tokens for prefix and suffix, which llama.cpp does not recognize.
_CODESTRAL = ("[PREFIX]", "[SUFFIX]")
#: StarCoder2's tokens for repository and file, which llama.cpp does not recognize.
_STARCODER2 = ("<repo_name>", "<file_sep>")
#: Tokens of StarCoder2, CodeGemma and CodeLlama that end a middle, but are not end-of-text tokens
#: for llama.cpp.
_ENDS = ("<file_sep>", "<|file_separator|>", "▁<EOT>")
#: The share of the prompt for the prefix if prefix and suffix are too long. It is the larger part,
#: as in llama.cpp's server, because the prefix tells more about the middle.
_PREFIX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ContextFile:
    """Another file of the repository, which the prompt contains before the file with the gap."""

    #: Its path in the repository.
    name: str
    #: Its content.
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap in a file."""

    #: The text before the gap.
    prefix: str
    #: The text after the gap.
    suffix: str
    #: The name of the file.
    name: str = "file"
    #: Other files of the repository, the most relevant last.
    context: tuple[ContextFile, ...] = ()
    #: The name of the repository.
    repository: str = "repository"


@dataclass(frozen=True, slots=True)
class FileTokens:
    """The special tokens of a vocabulary for the files of a repository."""

    #: Precedes the name of the repository.
    repository: int
    #: Precedes each file.
    separator: int
    #: Whether to use StarCoder2's format, not Qwen2.5-Coder's: the name of the file with the gap
    #: comes after the prefix token, and there is no line break after the repository's name.
    as_starcoder2: bool


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The special tokens of a vocabulary for fill-in-the-middle."""

    #: Precedes the prefix.
    prefix: int
    #: Precedes the suffix.
    suffix: int
    #: Precedes the middle. None if there is no such token: the suffix comes first, and the middle
    #: directly follows the prefix.
    middle: int | None
    #: None if the vocabulary has no tokens for files.
    files: FileTokens | None
    #: The tokens that end a middle. All special tokens here do, since none can be a part of it.
    ends: frozenset[int]

    @staticmethod
    def of(vocabulary: LlamaVocabulary) -> InfillTokens | None:
        """Return the tokens of a vocabulary; None if it has none for fill-in-the-middle."""
        roles = vocabulary.infill_tokens()  # -1 for a token that it lacks
        prefix = roles["fim_pre"]
        suffix = roles["fim_suf"]
        middle: int | None = roles["fim_mid"]
        # Codestral's model files may name no tokens, or its two and an unused third one.
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
    """Return the tokens of a model for fill-in-the-middle.

    Raises:
        UsageError: If the model has no such tokens.
    """
    tokens = InfillTokens.of(model.vocabulary)
    if tokens is None:
        hint = "use a model that was trained for it, such as Qwen2.5-Coder or StarCoder2"
        raise UsageError(f"{model.name} has no tokens for fill-in-the-middle", hint)
    return tokens


def infill_prompt(
    model: LlamaModel,
    translated_draft: LlamaModel | None,
    gap: Gap,
    n_max: int,
) -> tuple[Prompt, list[str]]:
    """Return the prompt for filling a gap.

    If not everything fits, other files are left out, the first ones first; then the prefix and the
    suffix are cut at their far ends.

    Args:
        model: The target.
        translated_draft: A draft with another vocabulary. It gets the same prompt in its own
            tokens. If it has none for fill-in-the-middle, it gets the suffix and then the prefix.
        gap: The texts around the gap.
        n_max: The maximum number of tokens of the prompt.

    Returns:
        The prompt; descriptions of what was left out because it did not fit.

    Raises:
        UsageError: If the target has no tokens for fill-in-the-middle.
    """
    infill_tokens = check_infill(model)
    tokens, left_out = _InfillWriter(model.vocabulary, infill_tokens, gap).write(n_max)
    draft_tokens = None
    if translated_draft is not None:
        draft_infill_tokens = InfillTokens.of(translated_draft.vocabulary)
        draft_writer = _InfillWriter(translated_draft.vocabulary, draft_infill_tokens, gap)
        draft_tokens = tuple(draft_writer.write(n_max)[0])
    text = "".join(map(model.vocabulary.control_text, tokens))
    return Prompt(
        text,
        tuple(tokens),
        draft_tokens,
        ends=infill_tokens.ends,
    ), left_out


@dataclass(frozen=True, slots=True)
class _Headings:
    """Tokens with the names of the repository and of the file with the gap; empty without marks."""

    #: Before the first other file.
    before_files: list[int] = field(default_factory=list)
    #: Before the file with the gap.
    before_gap_file: list[int] = field(default_factory=list)
    #: Between the prefix token and the prefix.
    before_prefix: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.before_files) + len(self.before_gap_file) + len(self.before_prefix)


@dataclass(frozen=True, slots=True)
class _TextsAround:
    """The texts around a gap, cut to a number of tokens."""

    #: The last tokens before the gap.
    prefix: list[int]
    #: The first tokens after the gap.
    suffix: list[int]
    #: Descriptions of what was cut off.
    left_out: list[str]

    @staticmethod
    def fitting(
        prefix: list[int],
        suffix: list[int],
        n_max: int,
    ) -> _TextsAround:
        """Cut the far ends of prefix and suffix, so that `n_max` tokens remain in total."""
        # The suffix may take its share, and whatever a short prefix leaves; the prefix the rest.
        n_suffix_max = max(n_max - len(prefix), n_max - int(_PREFIX_SHARE * n_max))
        n_suffix = min(len(suffix), n_suffix_max)
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

    #: The vocabulary.
    vocabulary: LlamaVocabulary
    #: Its special tokens for gaps; None for a model that was not trained for them.
    tokens: InfillTokens | None
    #: The gap to fill.
    gap: Gap

    @property
    def files(self) -> FileTokens | None:
        return None if self.tokens is None else self.tokens.files

    def write(self, n_max: int) -> tuple[list[int], list[str]]:
        """Return a prompt of at most `n_max` tokens, and descriptions of what was left out."""
        vocabulary = self.vocabulary
        gap = self.gap
        bos = [vocabulary.special_tokens()["bos"]] if vocabulary.add_bos else []
        n_max = max(0, n_max - len(bos) - self._n_marks())

        # Without other files, the texts around the gap have all the room.
        prefix = vocabulary.tokenize(gap.prefix, add_special=False, parse_special=False)
        suffix = vocabulary.tokenize_inside(gap.suffix)
        around = _TextsAround.fitting(prefix, suffix, n_max)
        headings = _Headings()
        files: list[int] = []
        n_files_left_out = len(gap.context)
        # With other files, headings take some of it. Nothing is worth that if no file fits, or if
        # the headings would take more than half.
        all_headings = self._headings()
        n_texts_max = n_max - all_headings.n_tokens
        if gap.context and n_texts_max > all_headings.n_tokens:
            # After other files, the prefix does not begin a text, so it may be tokenized otherwise.
            prefix_after_files = vocabulary.tokenize_inside(gap.prefix)
            around_with_files = _TextsAround.fitting(prefix_after_files, suffix, n_texts_max)
            n_files_max = (
                n_texts_max - len(around_with_files.prefix) - len(around_with_files.suffix)
            )
            files, n_files_left_out = self._fitting_files(n_files_max)
            if files:
                around = around_with_files
                headings = all_headings

        left_out = around.left_out + [file.name for file in gap.context[:n_files_left_out]]
        if self.files is None:  # without marks, the other files are part of the prefix
            text = self._with_marks([*files, *around.prefix], around.suffix)
            return [*bos, *text], left_out
        text = self._with_marks([*headings.before_prefix, *around.prefix], around.suffix)
        before = [*headings.before_files, *files, *headings.before_gap_file]
        return [*bos, *before, *text], left_out

    def _n_marks(self) -> int:
        """Return the number of tokens that `_with_marks` adds."""
        if self.tokens is None:
            return 0
        return 2 if self.tokens.middle is None else 3

    def _with_marks(
        self,
        prefix: list[int],
        suffix: list[int],
    ) -> list[int]:
        """Return prefix and suffix in the order and with the special tokens of the model."""
        tokens = self.tokens
        if tokens is None:
            return [*suffix, *prefix]
        if tokens.middle is None:
            return [tokens.suffix, *suffix, tokens.prefix, *prefix]
        return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]

    def _headings(self) -> _Headings:
        """Return the headings in the format of the model; empty if it has none for files."""
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
        """Return the tokens of the other files that fit, and the number of files left out.

        The last files are the most relevant, so the first ones are left out.
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
