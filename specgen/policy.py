"""How much is worth drafting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specgen.draft import Draft
from specgen.options import DraftOptions


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What became of a round: what a policy and a drafter can learn from."""

    draft: Draft
    #: The accepted nodes.
    path: tuple[int, ...]
    #: Seconds in the draft model and in the target, and the rows that the target decoded.
    draft_s: float
    target_s: float
    n_rows: int


class Policy(Protocol):
    """Decides, before and while a drafter drafts, how far it goes.

    To keep drawn drafts unbiased, `wants_more` is asked *before* a token is drawn and sees
    only the distribution's largest probability, not the token; and `admits` lets every
    draft that was drawn at random pass.
    """

    @property
    def needs_probability(self) -> bool:
        """Whether `wants_more` looks at the probability: it costs a pass over the logits."""
        ...

    def room(self) -> int:
        """The most tokens to draft this round; 0 decodes without a draft."""
        ...

    def wants_more(self, n_drafted: int, top_probability: float) -> bool:
        """Whether to draft a token that is at best this likely, after `n_drafted` others."""
        ...

    def admits(self, draft: Draft) -> bool:
        """Whether a finished draft is worth verifying."""
        ...

    def observe(self, report: RoundReport) -> None: ...


class FixedPolicy:
    """A fixed draft length, with a stop where the draft becomes unsure (llama.cpp's rule)."""

    def __init__(self, options: DraftOptions) -> None:
        self._options = options

    @property
    def needs_probability(self) -> bool:
        return self._options.p_min > 0.0

    def room(self) -> int:
        return self._options.max_tokens

    def wants_more(self, n_drafted: int, top_probability: float) -> bool:
        return n_drafted < self._options.max_tokens and top_probability >= self._options.p_min

    def admits(self, draft: Draft) -> bool:
        return draft.is_drawn or len(draft) >= self._options.min_tokens

    def observe(self, report: RoundReport) -> None:
        pass
