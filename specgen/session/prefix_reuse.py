"""What of a prompt need not be prefilled, because a cache or the disk has it already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specgen.llama import LlamaBackend
from specgen.session.prefix_store import PrefixStore, positions_of_control_tokens
from specgen.session.prompt_cache import PromptCache
from specgen.session.prompts import Prompt
from specgen.session.request import Slot
from specgen.session.saved_text import CachedContext
from specgen.session.session import Session
from specgen.system.folders import prefixes_folder

#: Shorter prompts are prefilled again: nothing is prepared for those that go on otherwise.
_LEAST_ANCHORED = 128


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where the prefill of a prompt begins and stops. What the slot holds is not prefilled."""

    #: How many of the tokens that the slot holds were loaded from the disk.
    n_loaded: int = 0
    #: Lengths of the prompt at which prefill stops, so that the state there can be kept.
    stops: tuple[int, ...] = ()


class PrefixReuse:
    """The prefixes that an engine's target holds in its cache and on the disk.

    On the disk are a file that the user names, and a store of prefixes, if the options ask for
    them.
    """

    def __init__(self, session: Session, target: LlamaBackend) -> None:
        self._session = session
        self._target = target
        #: Why the user's file is not used; empty if it is.
        self.notice = ""
        #: Writes what is to be kept, when the engine closes.
        self._resources = contextlib.ExitStack()
        options = session.options
        context = CachedContext.of(target, options.target_context)
        if options.prompt_cache is not None:
            self.notice = self._open_prompt_cache(options.prompt_cache, context)
        self._store = self._open_store(context)

    def close(self) -> None:
        """Write what is to be kept. Raise `OutputError` if the user's file cannot be written."""
        self._resources.close()

    def begin(
        self,
        slot: Slot,
        prompt: Prompt,
        *,
        uses_cache: bool,
    ) -> PrefillPlan:
        """Let a slot hold the longest known prefix of a prompt.

        Args:
            slot: Where the prompt will be prefilled. What it holds beyond the prefix is dropped.
            prompt: The prompt; its last token is always decoded.
            uses_cache: Whether any prefix may be reused.
        """
        draft = self._session.draft
        # The target's state of the last token may be gone, and such a draft reads it.
        n_again = 0
        if draft is not None and draft.reads in ("all states", "cache"):
            n_again = 1
        if not uses_cache:
            slot.share_prefix(self._target, prompt.tokens[:1], n_again=n_again)
            return PrefillPlan()

        n = len(prompt.tokens)
        n_held = slot.share_prefix(self._target, prompt.tokens, n_again=n_again)
        marks: list[int] = []
        if n > _LEAST_ANCHORED:
            marks = positions_of_control_tokens(self._target.vocabulary, prompt.tokens)
        n_loaded = 0
        stops: list[int] = []
        if self._store is not None:
            n_loaded = self._store.extend(slot, prompt, marks, n_held, n_again)
            stops.append(self._store.stop_at(slot.branches(self._target).first))
        if marks and self._target.rollback != "cells":
            # Such a cache cannot go back to any place. It keeps the state before the answer's
            # turn: the next prompt may continue from there otherwise than with this answer.
            stops.append(marks[-1])
        return PrefillPlan(n_loaded, tuple(stop for stop in stops if 0 < stop < n))

    def store(self, slot: Slot, prefill_s: Callable[[int], float]) -> None:
        """Store the prefix that a slot holds, if it is due.

        Args:
            slot: Where a prompt is prefilled.
            prefill_s: Returns the seconds of the prefill of so many tokens.
        """
        if self._store is not None:
            sequence = slot.branches(self._target).first
            self._store.store(sequence, prefill_s(self._store.stop_at(sequence)))

    def _open_prompt_cache(self, path: Path, context: CachedContext) -> str:
        """Load the user's file, and write it when the engine closes. Return why it is not used."""
        why_not = ""
        if self._target.model.is_remote:
            why_not = "is on other machines"
        if self._target.rollback != "cells":
            why_not = "has a recurrent state, which cannot go back to the end of a prompt"
        if why_not:
            return f"--prompt-cache has no effect: {self._session.target.name} {why_not}"
        cache = PromptCache(path)
        notice = cache.restore(context)
        self._resources.callback(cache.save, context)
        return notice

    def _open_store(self, context: CachedContext) -> PrefixStore | None:
        options = self._session.options
        wanted = options.prefixes
        if wanted is None or wanted.kept == "off" or options.cache is None:
            return None
        if self._target.model.is_remote:
            return None
        folder = prefixes_folder(options.cache)
        store = PrefixStore(folder, wanted, context, self._session.clock)
        self._resources.callback(store.close)
        return store
