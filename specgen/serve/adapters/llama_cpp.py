"""specgen's drafters inside llama-cpp-python: ``Llama(draft_model=SpecgenDraft(...))``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from specgen.errors import UsageError
from specgen.llama.file_check import remember_checks
from specgen.llama.kernels.admission import choose_kernels
from specgen.llama.kernels.attached import kernel_problem
from specgen.models import cache_folder, human_bytes
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    GenerationOptions,
    KernelChoice,
    KernelOptions,
    SamplerOptions,
    TreeShape,
    staged,
)
from specgen.serve.adapters.draft_rounds import DraftRounds
from specgen.session.files import find_models
from specgen.session.open import open_memory, session_options
from specgen.system.llama_build import REBUILD, REQUIRED_VERSION, uses_bundle
from specgen.text.tally import Tally

if TYPE_CHECKING:
    from llama_cpp import Llama


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class SpecgenDraft(LlamaDraftModel):
    """Drafts for one `Llama`. Open it before the `Llama`, and close it, or use it as a context manager.

    `target` is the model of the `Llama`; only its vocabulary is loaded. `draft` is a file or a name from
    `specgen models list`, with the same vocabulary or another one, or ``ngram``; if there are several, each
    drafts for the one before it. Beside a model n-grams draft too, unless `drafting` says otherwise. Drafts
    are chains of the most likely tokens; `Llama` accepts a token if it chooses the same one itself.

    `n_ctx` is the size of a draft model's context in tokens: of a longer text it sees the end. `context` says
    how the `Llama` has loaded the target (threads, layers on the GPU), for timing it, and `draft_context` how
    the draft models are loaded. `kernels` compute all models that are loaded from now on, the `Llama`'s too.
    `note` gets a sentence if drafting fails; by default that is a `RuntimeWarning`.

    Raises `UsageError`, also for a target with a recurrent state, `ModelFileError`, `PairError`,
    `UnknownModelError`, `FetchError` or `MemoryLimitError`.
    """

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | Sequence[str | Path],
        *,
        n_ctx: int = 4096,
        drafting: DraftOptions | None = None,
        context: ContextOptions | None = None,
        draft_context: ContextOptions | None = None,
        kernels: KernelChoice = "auto",
        note: Callable[[str], None] = _warn,
    ) -> None:
        if (
            uses_bundle()
        ):  # with two copies of GGML in a process, one's code would read the other's structures
            raise UsageError(
                f"specgen.serve.adapters.llama_cpp needs llama-cpp-python {REQUIRED_VERSION}",
                hint=REBUILD,
            )
        drafting = drafting or DraftOptions()
        if drafting.tree.is_fixed:
            raise UsageError(
                f"tree={drafting.tree}: Llama verifies chains only",
                hint="leave the tree out",
            )
        drafts = [draft] if isinstance(draft, (str, Path)) else list(draft)
        if not drafts:
            raise UsageError("no draft is given", hint='give a model, or "ngram", which needs none')
        sources = find_models(staged(str(target), [str(each) for each in drafts], None), quiet=True)
        remember_checks(cache_folder())
        choose_kernels(kernels, cache_folder())
        if problem := kernel_problem(sources.target):  # the Llama of the target is not ours
            choose_kernels("llama.cpp", cache_folder())
            note(f"not using specgen's kernels: in a trial of {sources.target.name} {problem}")
        options = session_options(
            sources,
            SamplerOptions(),
            replace(drafting, tree=TreeShape("off")),
            GenerationOptions(),
            Contexts(
                context or ContextOptions(),
                draft_context or ContextOptions(),
                KernelOptions(kernels),
            ),
        )
        self.rounds = DraftRounds(
            options, open_memory(), n_ctx=n_ctx, clock=time.perf_counter, note=note
        )

    def __enter__(self) -> SpecgenDraft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the drafter. May be called twice; a `Llama` that still uses it cannot generate."""
        self.rounds.close()

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_kwargs: Any) -> npt.NDArray[np.intc]:
        """Return the draft after the text `input_ids`, int32[n_tokens]: int32[n_drafted], which may be
        empty."""
        return np.array(self.rounds.next(input_ids.tolist()), dtype=np.intc)

    @property
    def name(self) -> str:
        """The drafter: a model's file name, ``ngram`` or ``none``."""
        return self.rounds.draft_name

    @property
    def tally(self) -> Tally:
        """The counts of drafted and accepted tokens so far, without the last round of each text: `Llama` does
        not report the end of a text."""
        return self.rounds.tally

    def check(self, llama: Llama) -> None:
        """Raise `UsageError` if `llama` would fail with this draft, or not use it.

        With a draft model, llama-cpp-python stores the logits of every token of a text, and has room for
        those of a batch only, unless it is opened with ``logits_all=True``: it then raises `ValueError`
        in a text of more than n_batch tokens, prompt and answer together. ``logits_all=True`` takes
        4 bytes for each token of the context and of the vocabulary.
        """
        if llama.draft_model is not self:
            raise UsageError(
                "Llama has another draft", hint="give Llama draft_model=<this SpecgenDraft>"
            )
        n_ctx, n_vocab, n_rows = llama.n_ctx(), llama.n_vocab(), len(llama.scores)
        if n_vocab != self.rounds.n_vocab:
            raise UsageError(
                f"Llama's model has {n_vocab} tokens, but the draft's target has {self.rounds.n_vocab}",
                hint="open the SpecgenDraft with the same target file as Llama",
            )
        n_room = len(llama.input_ids)
        if n_room < n_ctx:
            raise UsageError(
                f"Llama has room for {n_room} tokens in a context of {n_ctx}: with a draft it fails at "
                "the end of the context",
                hint=f"open Llama with n_ctx={n_ctx}",
            )
        if n_rows < n_ctx:
            raise UsageError(
                f"Llama has room for the logits of {n_rows} tokens, but a context of {n_ctx}: with a draft "
                "it fails in a longer text",
                hint=f"open Llama with logits_all=True, which takes {human_bytes(4 * n_ctx * n_vocab)}, "
                "or with a smaller n_ctx",
            )
