"""A prompt cache file: the text that the contexts held when a process ended, with what they had computed of it, so that
the next process does not read it again (llama.cpp's `--prompt-cache`). It has a text for the target, and for a draft that
reads its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specgen.errors import UsageError
from specgen.models.files import size_of
from specgen.session.prefix_store import MAGIC, CachedContext, SavedText, write_text
from specgen.system.files import new_beside, write_errors


class PromptCache:
    """A prompt cache file. Raises `UsageError` if the file is of another kind, or cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restored: list[list[int]] = []
        begin = b""
        try:
            with path.open("rb") as file:
                begin = file.read(len(MAGIC))
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise UsageError(f"--prompt-cache {path}: there is no such folder") from None
        except OSError as error:
            raise UsageError(f"--prompt-cache {path}: {error.strerror}") from error
        if begin not in (b"", MAGIC):
            hint = "name another file; this one is not overwritten"
            raise UsageError(f"--prompt-cache {path}: this file is no prompt cache", hint)

    def restore(self, contexts: Sequence[CachedContext]) -> str:
        """Let the contexts, the target's first, hold the file's text. Return why they cannot; empty if they can."""
        damaged, offset, size = f"{self._path} is damaged: it is made anew", 0, size_of(self._path)
        for context in contexts:
            if offset == size:
                break
            saved = SavedText.read(self._path, offset)
            if saved is None:
                return damaged
            offset, backend = saved.end, context.backend
            if saved.key != context.key or len(saved.tokens) > backend.n_ctx:
                if context is contexts[0]:
                    return f"{self._path} was made with another model or other settings: it is made anew"
                continue  # a draft model that changed reads the prompt again
            is_taken = saved.restore(backend, 0)
            if is_taken is None:
                return damaged
            if not is_taken:
                return f"{self._path}: llama.cpp does not take its state: the prompt is read again"
        self._restored = [list(context.backend.text(0)) for context in contexts]
        return ""

    def save(self, contexts: Sequence[CachedContext]) -> None:
        """Write the file, if the texts changed. Raise `OutputError`."""
        texts = [list(context.backend.text(0)) for context in contexts]
        if not texts[0] or texts == self._restored:
            return
        with write_errors(self._path), new_beside(self._path) as new:
            for context, text in zip(contexts, texts, strict=True):
                write_text(new, context.key, text, context.backend.saved_text(0))
            new.replace(self._path)
