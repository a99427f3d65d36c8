"""Every error that specgen raises on purpose, and the exit code of each.

The tree::

    SpecgenError                 1   (never raised itself)
    ├── UsageError               2   an option's value, or options that exclude each other
    ├── PromptError              3   empty, not UTF-8, unreadable, longer than the context
    │   └── PromptLengthError    3   certainly longer than the context, found before it is tokenized
    ├── ModelFileError           4   missing, truncated, not GGUF, of a kind that cannot generate
    ├── PairError                5   the draft does not fit the target
    ├── UnknownModelError        6   no model, pair or repository of that name
    ├── FetchError               7   a download failed, or gave another file
    ├── MemoryLimitError         8   the context does not fit
    ├── BackendError             9   llama.cpp is missing, broken, or refused to decode
    │   └── RollbackError        9   the cache could not drop tokens
    ├── OutputError             10   the answer could not be written
    ├── DefectError             11   `specgen verify` found text that the target would not generate
    ├── BatchError              12   some lines of `specgen batch` could not be answered
    └── WorkerLostError         13   a worker of `--rpc` died, was silent, or cannot be reached

A message is one line: what happened, with the value; the hint, where there is one, is
what to do about it. Whatever is not a `SpecgenError` is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar

#: Ctrl-C; the text so far was shown, and the next run resumes a download (128 + SIGINT, as a shell reports it). 143 for SIGTERM.
EXIT_INTERRUPTED = 130
#: The reader of stdout has closed the pipe (128 + SIGPIPE, as a shell reports it).
EXIT_BROKEN_PIPE = 141


class SpecgenError(Exception):
    """Base of everything raised on purpose.

    `message` is one line for the user; `hint`, if given, says what to do next.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecgenError):
    """An option has a value it cannot have, or two options exclude each other."""

    exit_code = 2


class PromptError(SpecgenError):
    """The prompt is empty, unreadable, not UTF-8, or longer than the context."""

    exit_code = 3


class PromptLengthError(PromptError):
    """The prompt has so many bytes that its tokens cannot fit into the context."""


class ModelFileError(SpecgenError):
    """A model file is missing, truncated, not GGUF, or cannot generate text."""

    exit_code = 4


class PairError(SpecgenError):
    """The draft does not fit the target: its vocabulary differs and is not translated, or it is a
    set of decoder heads for another target."""

    exit_code = 5


class UnknownModelError(SpecgenError):
    """No model, pair or repository of the hub has that name."""

    exit_code = 6


class FetchError(SpecgenError):
    """A download failed, or gave another file than was asked for."""

    exit_code = 7


class MemoryLimitError(SpecgenError):
    """There is not enough memory for the context."""

    exit_code = 8


class BackendError(SpecgenError):
    """llama.cpp is missing, broken, or refused to decode."""

    exit_code = 9


class RollbackError(BackendError):
    """The cache could not drop tokens of a sequence."""


class OutputError(SpecgenError):
    """The answer could not be written."""

    exit_code = 10


class DefectError(SpecgenError):
    """`specgen verify` found a defect (text that the target alone would not have said), or nothing was
    drafted, so that it showed nothing."""

    exit_code = 11


class BatchError(SpecgenError):
    """Some lines of `specgen batch` could not be answered; their results have the reasons."""

    exit_code = 12


class WorkerLostError(SpecgenError):
    """A machine that computes layers of the target (`--rpc`) died, was silent for too long, or cannot be
    reached. This process cannot decode any more; the text so far stays valid."""

    exit_code = 13
