"""A prompt cache file: the text that the contexts held when a process ended, with what they had computed of it, so that
the next process does not read it again (llama.cpp's `--prompt-cache`): one file that the user names, where
`prefix_store.py` chooses by itself what is worth keeping."""

from __future__ import annotations

from pathlib import Path

from specgen.errors import UsageError
from specgen.models.files import size_of
from specgen.session.prefix_store import MAGIC, CachedContext, SavedText, write_text
from specgen.system.files import new_beside, write_errors


class PromptCache:
    """A prompt cache file. Raises `UsageError` if the file is of another kind, or cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restored: list[int] = []
        begin = b""
        try:
            with path.open("rb") as file:
                begin = file.read(len(MAGIC))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error
        if begin not in (b"", MAGIC):
            hint = "name another file; this one is not overwritten"
            raise UsageError(f"--prompt-cache {path}: this file is no prompt cache", hint)

    def restore(self, context: CachedContext) -> str:
        """Let the context hold the file's text. Return why it cannot; empty if it can, or if there is no file yet."""
        if not size_of(self._path):
            return ""
        saved, backend = SavedText.read(self._path), context.backend
        is_taken = None
        if saved is not None:
            if saved.key != context.key or len(saved.tokens) > backend.n_ctx:
                return (
                    f"{self._path} was made with another model or other settings: it is made anew"
                )
            is_taken = saved.restore(backend, 0)
        if is_taken is None:
            return f"{self._path} is damaged: it is made anew"
        if not is_taken:
            return f"{self._path}: llama.cpp refused the saved state: the prompt is read again"
        self._restored = list(backend.text(0))
        return ""

    def save(self, context: CachedContext) -> None:
        """Write the file, if the text changed. Raise `OutputError`."""
        text = list(context.backend.text(0))
        if text and text != self._restored:
            with write_errors(self._path), new_beside(self._path) as new:
                write_text(new, context.key, text, context.backend.saved_text(0))
                new.replace(self._path)
