"""The prompt for a text with a gap: fill-in-the-middle (2207.14255).

Models are trained for it on texts whose parts are marked with tokens of their own:

    <PRE> prefix <SUF> suffix <MID>    Qwen2.5-Coder, StarCoder, DeepSeek-Coder, CodeLlama, Granite
    [SUFFIX] suffix [PREFIX] prefix    Codestral

Qwen2.5-Coder (2409.12186) and Granite know repositories too, before that: <REPO> name, then <SEP> path and
text of each file, and at last <SEP> and the path of the file with the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specgen.backend.llama import LlamaModel
from specgen.backend.llama.vocabulary import LlamaVocabulary
from specgen.engine.prompts import Prompt
from specgen.errors import UsageError

#: Codestral's tokens for prefix and suffix. They come with the suffix first, and without a third one.
_CODESTRAL = ("[PREFIX]", "[SUFFIX]")
#: Where such control tokens stand in a vocabulary.
_N_FIRST = 64
#: The part of the room that is a prefix's where prefix and suffix are too long together: what stands
#: before a gap says more about it than what follows. (llama.cpp's server divides it so.)
_PREFIX_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file that stands in the prompt before the text with the gap."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap between `prefix` and `suffix`, in a file of this name, beside other files of a
    repository."""

    prefix: str
    suffix: str
    name: str = "file"
    context: tuple[ContextFile, ...] = ()
    repository: str = "repository"


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The prompt for a gap, and what there was no room for, in words."""

    prompt: Prompt
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A vocabulary's tokens for texts with a gap; -1 for one that it does not have."""

    prefix: int = -1
    suffix: int = -1
    middle: int = -1
    repository: int = -1
    separator: int = -1

    @staticmethod
    def of(vocabulary: LlamaVocabulary) -> InfillTokens | None:
        """The tokens of a vocabulary, if it has those that are needed."""
        found = InfillTokens(**vocabulary.infill_tokens())
        if min(found.prefix, found.suffix, found.middle) >= 0:
            return found
        if min(found.prefix, found.suffix) >= 0:
            entry = vocabulary.token_text(found.prefix)
            return InfillTokens(found.prefix, found.suffix) if entry == _CODESTRAL[0] else None
        # llama.cpp does not know these by their entries.
        n_first = min(_N_FIRST, vocabulary.n_tokens)
        first = {vocabulary.token_text(token): token for token in range(n_first)}
        if all(entry in first for entry in _CODESTRAL):
            return InfillTokens(*(first[entry] for entry in _CODESTRAL))
        return None

    @property
    def knows_files(self) -> bool:
        """Whether there are tokens for the files of a repository."""
        return min(self.repository, self.separator) >= 0


#: Those of a model that knows no gaps.
_NONE = InfillTokens()


def infill_prompt(
    model: LlamaModel, own_draft: LlamaModel | None, gap: Gap, n_room: int
) -> InfillPrompt:
    """What the target's text for a gap begins after, in `n_room` tokens at most.

    Names of control tokens in the texts are plain text. What there is no room for is left out: of the
    other files the first ones, then the far ends of prefix and suffix. A draft model with another
    vocabulary, `own_draft`, sees the same in its own tokens; one that knows no gaps sees the suffix
    and behind it the prefix, which it continues.

    Raises `UsageError` if the model knows no gaps.
    """
    tokens = InfillTokens.of(model.vocabulary)
    if tokens is None:
        raise UsageError(
            f"{model.name} has no tokens for fill-in-the-middle",
            hint="take a model that was trained for it, such as Qwen2.5-Coder or StarCoder2",
        )
    writer = _Writer(model.vocabulary, tokens, n_room)
    written = writer.write(gap)
    text = "".join(map(model.vocabulary.control_text, written))
    draft_tokens = None
    if own_draft is not None:
        own = InfillTokens.of(own_draft.vocabulary) or _NONE
        draft_tokens = tuple(_Writer(own_draft.vocabulary, own, n_room).write(gap))
    return InfillPrompt(Prompt(text, tuple(written), draft_tokens), tuple(writer.left_out))


class _Writer:
    """Writes gaps as a model expects them, in `n_room` tokens at most."""

    def __init__(self, vocabulary: LlamaVocabulary, tokens: InfillTokens, n_room: int) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._n_room = self._n_left = n_room
        #: What there was no room for, in words.
        self.left_out: list[str] = []

    def write(self, gap: Gap) -> list[int]:
        """The tokens of a prompt, and what was left out of it in `left_out`."""
        start = [self._vocabulary.special_tokens()["bos"]] if self._vocabulary.add_bos else []
        self._n_left -= len(start)
        if not gap.context:
            return [*start, *self._gap(gap)]
        head: list[int] = []
        if self._tokens.knows_files:
            head = [self._tokens.repository, *self._plain(f"{gap.repository}\n")]
        # The gap's own file has a heading where others come before it.
        heading = self._heading(gap.name)
        n_headings = len(head) + len(heading)
        self._n_left -= n_headings
        own = self._gap(gap) if self._n_left > n_headings else None
        files = self._files(gap.context) if own is not None else []
        if own is not None and files:
            return [*start, *head, *files, *heading, *own]
        # The headings are for nothing, and the gap may have their room.
        self._n_left = self._n_room - len(start)
        self.left_out = []
        own = self._gap(gap)
        self.left_out += [file.name for file in gap.context]
        return [*start, *own]

    def _gap(self, gap: Gap) -> list[int]:
        prefix, suffix = self._plain(gap.prefix), self._plain(gap.suffix)
        tokens = self._tokens
        self._n_left -= sum(token >= 0 for token in (tokens.prefix, tokens.suffix, tokens.middle))
        n_prefix, n_suffix = _lengths(len(prefix), len(suffix), max(0, self._n_left))
        self._n_left -= n_prefix + n_suffix
        if n_prefix < len(prefix):
            self.left_out.append(f"the first {len(prefix) - n_prefix} tokens before the gap")
        if n_suffix < len(suffix):
            self.left_out.append(f"the last {len(suffix) - n_suffix} tokens behind the gap")
        prefix, suffix = prefix[len(prefix) - n_prefix :], suffix[:n_suffix]
        if tokens.middle < 0:
            return [*_known(tokens.suffix), *suffix, *_known(tokens.prefix), *prefix]
        return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]

    def _files(self, files: Sequence[ContextFile]) -> list[int]:
        """Other files, as many of the last ones as there is room for."""
        kept: list[int] = []
        for number in range(len(files), 0, -1):
            file = files[number - 1]
            written = [*self._heading(file.name), *self._plain(file.text)]
            if len(written) > self._n_left:
                self.left_out += [each.name for each in files[:number]]
                break
            self._n_left -= len(written)
            kept = [*written, *kept]
        return kept

    def _heading(self, name: str) -> list[int]:
        """A mark and the name of a file; an empty line where there is no such mark."""
        if not self._tokens.knows_files:
            return self._plain("\n\n")
        return [self._tokens.separator, *self._plain(f"{name}\n")]

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)


def _lengths(n_prefix: int, n_suffix: int, n_room: int) -> tuple[int, int]:
    """How many tokens of prefix and suffix there is room for; what one does not need the other may
    have."""
    n_suffix_kept = min(n_suffix, max(n_room - n_prefix, n_room - int(_PREFIX_SHARE * n_room)))
    return min(n_prefix, n_room - n_suffix_kept), n_suffix_kept


def _known(token: int) -> list[int]:
    return [token] if token >= 0 else []


__all__ = ["ContextFile", "Gap", "InfillPrompt", "InfillTokens", "infill_prompt"]
