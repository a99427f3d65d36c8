"""A draft of EAGLE-3 drafts, from the inputs of three of the target's layers."""

from __future__ import annotations

from typing import Any

from specgen.decoding.drafters.mtp import MtpDrafter


class EagleDrafter(MtpDrafter):
    """Drafts with EAGLE-3 as `MtpDrafter` does with an MTP layer: from the target's states of accepted
    tokens, and the draft's own of drafted ones. But the text's first token has no row: there is no state
    before it."""

    def __init__(self, *arguments: Any, n_held: int = 0, **options: Any) -> None:
        super().__init__(*arguments, n_held=max(1, n_held), **options)
        self._cache.n_skipped = 1

    @property
    def name(self) -> str:
        return "eagle3"
