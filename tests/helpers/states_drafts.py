"""What tests of drafts that read the target's hidden states or its cache share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specgen.events import FinishedEvent, NoticeEvent
from specgen.method.draft import Draft
from specgen.method.drafter import Drafting
from specgen.method.policy import RoundPlan
from specgen.session.engine import generate
from specgen.session.session import Session

PROMPT = "abc fed cab. abcd"


def answer(models: Session, prompt: str = PROMPT) -> FinishedEvent:
    """The end of an answer without notices."""
    events = list(generate(models, models.prompts.of_text(prompt)))
    assert not [event for event in events if isinstance(event, NoticeEvent)]
    assert isinstance(events[-1], FinishedEvent)
    return events[-1]


def watched_drafts(patch: pytest.MonkeyPatch, *kinds: type[Any]) -> dict[tuple[int, ...], Draft]:
    """What these drafters draft from now on, by the text before it."""
    found: dict[tuple[int, ...], Draft] = {}

    def watch(kind: type[Any]) -> None:
        propose = kind.propose

        def watched(
            self: Any, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0
        ) -> Drafting:
            draft: Draft = yield from propose(self, context, plan, n_drafted)
            found[tuple(context)] = draft
            return draft

        patch.setattr(kind, "propose", watched)

    for kind in kinds:
        watch(kind)
    return found
