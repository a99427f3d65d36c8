"""Build the events of a finished round."""

from __future__ import annotations

import dataclasses
from collections import abc

from specgen.events import CommittedEvent, DraftNode, Piece, RejectedBranch, TokenKind, TokenLogprob
from specgen.method.draft import ROOT, Draft
from specgen.method.policy import Reason
from specgen.method.verify import Verdict
from specgen.system.arrays import Logits
from specgen.text.sampling.rows import log_probabilities, most_likely
from specgen.text.sequence import Sequence


def next_kind(draft: Draft, verdict: Verdict) -> TokenKind:
    """Return the kind of the target's own token: plain, corrected, or a bonus after a whole branch."""
    if len(draft) == 0:
        return "plain"
    last = verdict.path[-1] if verdict.path else ROOT
    return "corrected" if draft.children(last) else "bonus"


def with_logprobs(sequence: Sequence, piece: Piece, row: Logits) -> Piece:
    """Return the piece with the target's log-probabilities, if they were asked for. `row` holds the
    logits, float32[n_vocab]."""
    n_top = sequence.options.logprobs
    if n_top is None:
        return piece
    top = most_likely(row, n_top)
    own, *others = log_probabilities(row, [piece.token_id, *top])
    token_bytes = sequence.vocabulary.token_bytes
    return dataclasses.replace(
        piece,
        logprob=own,
        top_logprobs=tuple(
            TokenLogprob(token, token_bytes(token).decode("utf-8", "replace"), logprob)
            for token, logprob in zip(top, others, strict=True)
        ),
    )


def committed(
    sequence: Sequence, now_s: float, pieces: abc.Sequence[Piece], reason: Reason | None = None
) -> CommittedEvent:
    """Return the event of pieces that became part of the answer; `reason` is that of the round's plan."""
    return CommittedEvent(
        sequence=sequence.index,
        time_s=now_s,
        round=sequence.tally.n_rounds,
        pieces=tuple(pieces),
        text="".join(piece.text for piece in pieces),
        n_tokens=sequence.n_answer,
        reason=None if reason is None else reason.name,
        reason_text=None if reason is None else str(reason),
    )


def draft_nodes(sequence: Sequence, draft: Draft) -> tuple[DraftNode, ...]:
    """Return the nodes of a draft as an event shows them."""
    token_bytes = sequence.vocabulary.token_bytes
    return tuple(
        DraftNode(token, token_bytes(token).decode("utf-8", "replace"), parent, origin, probability)
        for token, parent, origin, probability in zip(
            draft.tokens, draft.parents, draft.origins, draft.probabilities, strict=True
        )
    )


def rejected_branches(
    sequence: Sequence, draft: Draft, verdict: Verdict
) -> tuple[RejectedBranch, ...]:
    """Return the rejected branches of a draft, one for each leaf: the nodes from where its branch left the
    accepted path.

    It is called before the commit: if the accepted path ends in the middle of a character, a branch's text
    starts there.
    """
    if len(verdict.path) == len(draft):
        return ()
    kept = set(verdict.path)
    token_bytes = sequence.vocabulary.token_bytes
    branches = []
    for leaf in draft.leaves():
        path = draft.path(leaf)
        lost = tuple(node for node in path if node not in kept)
        if lost:
            before = b"".join(token_bytes(draft.tokens[node]) for node in path[: -len(lost)])
            data = b"".join(token_bytes(draft.tokens[node]) for node in lost)
            branches.append(RejectedBranch(lost, sequence.text.preview(before, data)))
    return tuple(branches)
