"""Notices before the first answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.engine.learnt_weights import Learnt, read_learnt

if TYPE_CHECKING:
    from specgen.engine.session import Session


def learnt_note(folder: Path | None, draft: Path) -> str:
    """Return the message that a draft model uses learnt weights, with its agreement before and after."""
    learnt = read_learnt(folder, draft) if folder is not None else Learnt()
    return (
        f"{draft.name} drafts with what it learnt from {learnt.n_answers} answers: on other answers it "
        f"agrees with the target at {learnt.agreement_after:.3f} of the places, before at "
        f"{learnt.agreement_before:.3f}"
    )


def opening_notices(session: Session, n_ctx: int, measured_s: float) -> Iterator[str]:
    """Yield a message for each of these: copies of weights in use, learnt weights, a tree shape that
    cannot be drafted, contexts of `n_ctx` tokens that are too long, and seconds spent on measuring."""
    yield from session.news_of_copies()
    if session.learnt_draft is not None and session.draft_path is not None:
        yield learnt_note(session.options.learning, session.draft_path)
    shape = session.options.drafting.tree
    if shape.is_fixed and session.draft_source != "none" and (why := session.why_chains):
        yield f"--tree {shape}: {why}: drafting chains of {shape.n_levels} tokens"
    target, draft = session.target_model, session.draft_model
    if 0 < target.n_ctx_train < n_ctx:
        yield (
            f"{target.name} was trained with {target.n_ctx_train} tokens of context, but the context "
            f"has {n_ctx}: expect poor text"
        )
    if draft is not None and 0 < draft.n_ctx_train < n_ctx:
        yield (
            f"{draft.name} was trained with {draft.n_ctx_train} tokens of context, the target's context "
            f"has {n_ctx}: of a longer text the draft sees only the latest part"
        )
    if measured_s:
        message = (
            f"measured the costs of drafting and the expected acceptance in {measured_s:.1f} s"
        )
        if session.was_busy:
            message += "; the machine was busy, so they are measured again the next time"
        yield message
