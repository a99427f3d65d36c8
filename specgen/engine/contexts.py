"""The contexts of a session's models and their sizes: tokens, rows and sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specgen.backend.llama import LlamaBackend, LlamaModel
from specgen.backend.llama.context_opening import n_native_sequences
from specgen.engine.draft_stack import CONTEXT_STEP, DraftStack
from specgen.engine.model_costs import ModelCosts
from specgen.errors import PromptError
from specgen.options import SessionOptions

#: Tokens of room where no size is given: for an answer of unlimited length, or for a prompt with its answer.
_ROOM = 4096


@dataclass(frozen=True, slots=True)
class SessionContexts:
    """Opens contexts of a target and of its draft model, as large as the options need."""

    options: SessionOptions
    target: LlamaModel
    drafts: DraftStack
    costs: ModelCosts
    clock: Callable[[], float]

    @property
    def n_rows_max(self) -> int:
        """The most rows of a round's batch: the draft, and the token before it."""
        return 1 + self.options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft: 1 where drafts are chains."""
        draft, drafting = self.drafts.model, self.options.drafting
        is_chain = self.target.has_recurrent_state or self.drafts.source == "none"
        if is_chain or not drafting.grows_trees:
            return 1
        if draft is not None and not (draft.branches or drafting.adds_ngrams):
            return 1
        return max(1, drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The most of llama.cpp's sequences that one answer needs in a context."""
        draft = self.drafts.model
        n_target = n_native_sequences(self.target, self.n_branches_max)
        if draft is None:
            return n_target
        n_branches = self.n_rows_max + 1 if draft.branches else 1
        return max(n_target, n_native_sequences(draft.model, n_branches))

    def n_ctx_for(self, n_prompt: int, max_tokens: int | None = None) -> int:
        """Return the size of the target's context in tokens, for a prompt and an answer of `max_tokens`
        (None: as the options say). Raises `PromptError` if the prompt does not fit."""
        n_train = self.target.n_ctx_train
        if self.options.target_context.n_ctx is None:
            n_answer = max_tokens if max_tokens is not None else self.options.generation.max_tokens
            n_ctx = n_prompt + (n_answer if n_answer >= 0 else _ROOM)
            n_ctx += self.options.drafting.n_max
            n_ctx = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP
            n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            hint = f"{self.target.name} was trained with a context of {n_train}"
        else:
            n_ctx = usual_n_ctx(self.options, self.target)
            hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if n_prompt > n_ctx:
            raise PromptError(
                f"the prompt has {n_prompt} tokens, but the context has {n_ctx}", hint
            )
        return n_ctx

    @contextlib.contextmanager
    def opened(
        self, n_ctx: int, *, drafts: bool, n_parts: int
    ) -> Iterator[tuple[LlamaBackend, LlamaBackend | None]]:
        """Open contexts as `Session.contexts` describes."""
        self.target.check_parallel(n_parts)
        with contextlib.ExitStack() as stack:
            target = LlamaBackend(
                self.target,
                self.costs.context_options(),
                n_ctx=n_ctx * n_parts,
                clock=self.clock,
                n_sequences=self.n_branches_max * n_parts,
                n_outputs=self.n_rows_max * n_parts,
                n_rollback=self.n_rows_max - 1,
                n_branches=self.n_branches_max,
            )
            stack.callback(target.close)
            draft = None
            if drafts and self.drafts.model is not None:
                contexts = self.drafts.contexts(n_ctx, self.n_rows_max, n_parts=n_parts, n_models=1)
                (draft,) = stack.enter_context(contexts)
            yield target, draft


def usual_n_ctx(options: SessionOptions, target: LlamaModel) -> int:
    """Return the default size, in tokens, of a context for a prompt and its answer: the options'
    size (0: the target's training context), or else 4096, or the training context if that is less."""
    n_train, wanted = target.n_ctx_train, options.target_context.n_ctx
    if wanted is not None:
        return wanted or n_train or _ROOM
    return min(_ROOM, n_train) if n_train > 0 else _ROOM


__all__ = ["SessionContexts", "usual_n_ctx"]
