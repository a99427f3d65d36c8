"""Every error that specgen raises on purpose, and its exit code.

Any other exception is a bug and keeps its traceback. `make docs` writes docs/exit-codes.md from
this module: the docstrings say when the errors are raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

#: Ctrl-C (128 + SIGINT): the text so far was shown, and the next run resumes a download. SIGTERM
#: gives 143.
EXIT_INTERRUPTED = 130
#: The reader of standard output closed the pipe (128 + SIGPIPE, as a shell reports it).
EXIT_BROKEN_PIPE = 141

#: How similar to an unknown name a known one must be to be suggested, from 0 to 1. At 0.7, a field
#: `store` of a request would be taken for `stream`.
_MIN_SIMILARITY = 0.75


class SpecgenError(Exception):
    """The base of every error that is raised on purpose.

    A subclass without an exit code of its own has that of its parent.
    """

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        #: What happened, in one line for the user.
        self.message = message
        #: What to do next; None if that is not known.
        self.hint = hint


class UsageError(SpecgenError, exit_code=2):
    """An option has an invalid value, or two options cannot be used together."""


class PromptError(SpecgenError, exit_code=3):
    """The prompt is empty, unreadable, not text, or longer than the context."""


class PromptLengthError(PromptError):
    """The prompt has more tokens (`n_tokens`) than the context or a limit allows (`n_most`)."""

    def __init__(self, message: str, n_tokens: int, n_most: int) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.n_most = n_most


class ModelFileError(SpecgenError, exit_code=4):
    """A model file is missing, truncated, not GGUF, or of a model that cannot generate text."""


class PairError(SpecgenError, exit_code=5):
    """The draft does not fit the target: another vocabulary, or heads for another target.

    A draft with another vocabulary is only refused if it cannot be translated.
    """


class UnknownModelError(SpecgenError, exit_code=6):
    """No model, pair or Hugging Face repository has this name."""


class FetchError(SpecgenError, exit_code=7):
    """A download failed, or delivered a different file than expected."""


class MemoryLimitError(SpecgenError, exit_code=8):
    """There is not enough memory for the model or its context."""


class BackendError(SpecgenError, exit_code=9):
    """llama.cpp is missing or broken, or refused to decode."""


class NoTokenAllowedError(BackendError):
    """The grammar allows no token at all."""

    def __init__(self) -> None:
        super().__init__(
            "the grammar allows no token here",
            hint="a rule of the grammar cannot be completed with this model's tokens; change the "
            "grammar",
        )


class RollbackError(BackendError):
    """The cache could not remove tokens of a sequence."""


class DecodeEndedError(BackendError):
    """A decode was stopped early, because its result is no longer needed."""


class OutputError(SpecgenError, exit_code=10):
    """The output could not be written."""


class DefectError(SpecgenError, exit_code=11):
    """`specgen verify` found text that is not the target's own, or nothing was drafted to check."""


class BatchError(SpecgenError, exit_code=12):
    """Some lines of `specgen batch` could not be answered; their results have the reasons."""


class WorkerLostError(SpecgenError, exit_code=13):
    """A worker of `--rpc` died, was silent for too long, or cannot be reached.

    The text so far stays valid.
    """


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: whether the user meant a similar one.

    Args:
        name: The unknown name.
        known_names: The names that the user may have meant.

    Returns:
        A question after a space, such as `` (did you mean max_tokens?)``; "" if no known name is
        similar.
    """
    similar_names = difflib.get_close_matches(name, list(known_names), n=1, cutoff=_MIN_SIMILARITY)
    if not similar_names:
        return ""
    return f" (did you mean {similar_names[0]}?)"
