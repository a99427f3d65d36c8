"""A file that the user names (`--prompt-cache`): the last text of a context, with its state."""

from __future__ import annotations

from pathlib import Path

from specgen.errors import UsageError
from specgen.models.files import size_of
from specgen.session.saved_text import (
    MAGIC,
    CachedContext,
    RestoreResult,
    SavedText,
    write_text,
)
from specgen.system.files import new_beside, write_errors


class PromptCache:
    """One text with its state in a file that the user named, as in llama.cpp."""

    def __init__(self, path: Path) -> None:
        """Check that the file does not exist yet, is empty, or is a prompt cache.

        Raises:
            UsageError: If the file is of another kind, or cannot be read.
        """
        self._path = path
        #: The text that was loaded from the file.
        self._restored: list[int] = []
        try:
            first_bytes = b""
            if path.is_file():
                with path.open("rb") as file:
                    first_bytes = file.read(len(MAGIC))
        except OSError as error:
            raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error
        is_folder_or_device = path.exists() and not path.is_file()
        if is_folder_or_device or first_bytes not in (b"", MAGIC):
            hint = "name another file; this one is not overwritten"
            raise UsageError(f"--prompt-cache {path}: this file is not a prompt cache", hint)

    def restore(self, context: CachedContext) -> str:
        """Load the file's text and state into the first sequence of a context.

        Returns:
            A message about why that failed; empty if it succeeded, or if there is no file yet.
        """
        if not size_of(self._path):
            return ""
        backend = context.backend
        result = RestoreResult.DAMAGED
        saved = SavedText.read(self._path)
        if saved is not None:
            if saved.key != context.key or len(saved.tokens) > backend.n_ctx:
                return (
                    f"{self._path} was made with another model or other settings: "
                    "it will be replaced"
                )
            result = saved.restore(backend, 0)
        if result is RestoreResult.DAMAGED:
            return f"{self._path} is damaged: it will be replaced"
        if result is RestoreResult.REFUSED:
            return f"{self._path}: llama.cpp refused the saved state: the prompt is prefilled again"
        self._restored = list(backend.text(0))
        return ""

    def save(self, context: CachedContext) -> None:
        """Write the text and the state of a context to the file, unless it contains that text.

        Raises:
            OutputError: If the file cannot be written.
        """
        text = list(context.backend.text(0))
        if text and text != self._restored:
            with write_errors(self._path), new_beside(self._path) as new:
                write_text(new, context.key, text, context.backend.saved_text(0))
                new.replace(self._path)
