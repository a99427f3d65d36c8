"""Decide which prefix of a prompt can be reused from a cache or from the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specgen.errors import RollbackError
from specgen.llama import LlamaBackend
from specgen.session.prefix_store import PrefixStore, positions_of_control_tokens
from specgen.session.prompt_cache import PromptCache
from specgen.session.prompts import Prompt
from specgen.session.request import Slot
from specgen.session.saved_text import CachedContext
from specgen.session.session import Session
from specgen.system.folders import prefixes_folder

#: For shorter prompts, no state is saved at a message boundary: prefilling them again is cheap.
_MIN_PROMPT_WITH_STOPS = 128


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How to prefill a prompt, after its known prefix was put into the slot."""

    #: The number of tokens of the prefix that were loaded from the disk.
    n_loaded: int = 0
    #: Lengths of the prompt, in tokens, at which prefill has to pause so that the state can be
    #: saved there.
    stops: tuple[int, ...] = ()


class PrefixReuse:
    """The prefixes of texts that an engine's target has in its cache and on the disk.

    On the disk there may be a file that the user names (`PromptCache`), and a store of prefixes
    (`PrefixStore`), depending on the options.
    """

    def __init__(self, session: Session, target: LlamaBackend) -> None:
        """Load the user's file, if the options name one, and open the store.

        Args:
            session: The session with the options.
            target: The target's context.

        Raises:
            UsageError: If the user's file exists and is not a prompt cache.
        """
        self._session = session
        self._target = target
        #: A message about why the user's file is not used; empty if it is used, or not wanted.
        self.notice = ""
        #: The length of the last prompt in the sequence that is written to the user's file.
        self._n_last_prompt = 0
        #: Writes the files when the engine closes.
        self._resources = contextlib.ExitStack()
        options = session.options
        context = CachedContext.of(target, options.target_context)
        if options.prompt_cache is not None:
            self.notice = self._open_prompt_cache(options.prompt_cache, context)
        self._store = self._open_store(context)

    def close(self) -> None:
        """Write the user's file, and wait until the prefix store has written its entries.

        Raises:
            OutputError: If the user's file cannot be written.
        """
        self._resources.close()

    def begin(
        self,
        slot: Slot,
        prompt: Prompt,
        *,
        uses_cache: bool,
    ) -> PrefillPlan:
        """Put the longest known prefix of a prompt into a slot, and plan the prefill of the rest.

        Args:
            slot: Where the prompt will be prefilled. Anything else that it holds is dropped.
            prompt: The prompt. Its last token is never reused, because its logits are needed.
            uses_cache: Whether a prefix may be reused at all.
        """
        draft = self._session.draft
        # Some drafts read the target's hidden state of the last reused token, which may no longer
        # be available: decode that token again.
        n_redecoded = 0
        if draft is not None and draft.reads_all_rows:
            n_redecoded = 1
        if not uses_cache:
            # A text of one token has no prefix to reuse, so this empties the slot.
            slot.share_prefix(self._target, prompt.tokens[:1], n_redecoded=n_redecoded)
            return PrefillPlan()

        n = len(prompt.tokens)
        if slot.branches(self._target).first == 0:
            self._n_last_prompt = n
        n_held = slot.share_prefix(self._target, prompt.tokens, n_redecoded=n_redecoded)
        marks: list[int] = []
        if n > _MIN_PROMPT_WITH_STOPS:
            marks = positions_of_control_tokens(self._target.vocabulary, prompt.tokens)
        n_loaded = 0
        stops: list[int] = []
        if self._store is not None:
            n_loaded = self._store.extend(slot, prompt, marks, n_held, n_redecoded)
            stops += self._store.stops(slot.branches(self._target).first)
        if self._target.rollback != "cells":
            # Such a cache can only return to places where its state was saved. Other prompts may
            # diverge from this one after a prefix that was loaded, after the instructions, and
            # before the turn of the answer.
            stops += [n_loaded, prompt.n_instructions, *marks[-1:]]
        return PrefillPlan(n_loaded, tuple(stop for stop in stops if 0 < stop < n))

    def store(
        self,
        slot: Slot,
        prefill_s: Callable[[int], float],
    ) -> None:
        """Store the text of a slot on the disk, if prefill has just reached the end of a prefix.

        Args:
            slot: Where a prompt is being prefilled.
            prefill_s: Returns how many seconds the prefill of a number of tokens takes.
        """
        if self._store is not None:
            self._store.store(slot.branches(self._target).first, prefill_s)

    def _open_prompt_cache(
        self,
        path: Path,
        context: CachedContext,
    ) -> str:
        """Load the user's file (`--prompt-cache`), and have it written when the engine closes.

        Returns:
            A message about why the file is not used; empty if it is, or if it does not exist yet.

        Raises:
            UsageError: If the file exists and is not a prompt cache.
        """
        why_not = ""
        if self._target.model.is_remote:
            why_not = "is on other machines"
        if self._target.rollback != "cells":
            why_not = "has a recurrent state, which cannot go back to the end of a prompt"
        if why_not:
            return f"--prompt-cache has no effect: {self._session.target.name} {why_not}"
        cache = PromptCache(path)
        notice = cache.restore(context)
        self._resources.callback(self._save_prompt_cache, cache, context)
        return notice

    def _save_prompt_cache(
        self,
        cache: PromptCache,
        context: CachedContext,
    ) -> None:
        """Write the last text to the user's file.

        A context that cannot go back could not reuse the prompt in a text with the answer. So only
        the prompt is written, without its last token, whose logits are needed.

        Raises:
            OutputError: If the file cannot be written.
        """
        n_reusable = self._n_last_prompt - 1
        if not context.goes_back and 0 < n_reusable < context.backend.length(0):
            with contextlib.suppress(RollbackError):  # the cells of the window are gone
                context.backend.remove(0, n_reusable)
        cache.save(context)

    def _open_store(self, context: CachedContext) -> PrefixStore | None:
        """Return the store of prefixes; None if the options or a remote target exclude it."""
        options = self._session.options
        prefix_options = options.prefixes
        if prefix_options is None or prefix_options.kept == "off" or options.cache is None:
            return None
        if self._target.model.is_remote:
            return None
        folder = prefixes_folder(options.cache)
        store = PrefixStore(folder, prefix_options, context, self._session.clock)
        self._resources.callback(store.close)
        return store
