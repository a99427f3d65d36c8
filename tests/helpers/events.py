"""A builder for event streams: a test describes rounds, and gets their events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specgen.events import (
    CommittedEvent,
    DraftedEvent,
    DraftNode,
    Event,
    FinishedEvent,
    FinishReason,
    NoticeEvent,
    Piece,
    PrefillEvent,
    PromptEvent,
    ReasonCount,
    RejectedBranch,
    TokenKind,
    VerifiedEvent,
)


@dataclass
class Script:
    """Collects the events of one answer. Each round takes `round_s`."""

    draft: str = "draft.gguf"
    round_s: float = 0.1
    events: list[Event] = field(default_factory=list)
    n_rounds: int = 0
    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    drafted_by_depth: Counter[int] = field(default_factory=Counter)
    accepted_by_depth: Counter[int] = field(default_factory=Counter)
    rounds_by_tokens: Counter[int] = field(default_factory=Counter)
    #: Why the next rounds draft as they do: the name of the reason, and the reason in words.
    reason: tuple[str, str] | None = None
    undrafted: dict[str, ReasonCount] = field(default_factory=dict)

    @property
    def time_s(self) -> float:
        return self.n_rounds * self.round_s

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, CommittedEvent))

    def prompt(self, n_tokens: int = 12, temperature: float = 0.0) -> Script:
        event = PromptEvent(
            sequence=0,
            time_s=0.0,
            text="Say hello.",
            n_prompt_tokens=n_tokens,
            target="t.gguf",
            draft=self.draft,
            translated=False,
            kernels="llama.cpp",
            n_ctx=512,
            sampler={"temperature": temperature, "seed": 1},
            verifier="auto",
            grammar=None,
        )
        return self._add(event)

    def prefill(self, n_prefilled: int, time_s: float, left_s: float) -> Script:
        """Add an event of the prefill."""
        n_tokens = next(e.n_prompt_tokens for e in self.events if isinstance(e, PromptEvent))
        return self._add(PrefillEvent(0, time_s, n_prefilled, n_tokens, left_s))

    def plain(self, text: str) -> Script:
        """Add a round without a draft."""
        self.n_rounds += 1
        if self.reason is not None:
            name, words = self.reason
            n_before = self.undrafted[name].n_rounds if name in self.undrafted else 0
            self.undrafted[name] = ReasonCount(name, words, n_before + 1)
        return self._commit([Piece(1, text, "plain", "target")])

    def because(self, name: str, words: str) -> Script:
        """Set the reason of the next rounds."""
        self.reason = name, words
        return self

    def round(self, drafted: Sequence[str], accepted: int, own: str) -> Script:
        """Add a round with a chain, of which the first `accepted` tokens are accepted.

        `own` is the target's token after them.
        """
        parents = tuple(range(-1, len(drafted) - 1))
        return self.tree(drafted, parents, tuple(range(accepted)), own)

    def tree(
        self, drafted: Sequence[str], parents: Sequence[int], path: Sequence[int], own: str
    ) -> Script:
        """Add a round with a tree, of which `path` is accepted. `own` is the target's token."""
        self.n_rounds += 1
        nodes = tuple(
            DraftNode(index, text, parent, "model", 0.5)
            for index, (text, parent) in enumerate(zip(drafted, parents, strict=True))
        )
        rejected = _rejected(drafted, parents, path)
        last = path[-1] if path else -1
        kind: TokenKind = "corrected" if last in parents else "bonus"
        self._add(DraftedEvent(0, self.time_s, self.n_rounds, nodes))
        self._add(
            VerifiedEvent(0, self.time_s, self.n_rounds, tuple(path), rejected, 99, kind),
        )
        self._count(parents, path)
        kept = [Piece(node, drafted[node], "accepted", "model") for node in path]
        return self._commit([*kept, Piece(99, own, kind, "target")])

    def notice(self, message: str, detail: str = "") -> Script:
        return self._add(NoticeEvent(0, self.time_s, message, detail))

    def finish(self, reason: FinishReason = "stop", stopped_by: str | None = None) -> Script:
        return self._add(self.finished(reason, stopped_by))

    def finished(
        self, reason: FinishReason = "stop", stopped_by: str | None = None
    ) -> FinishedEvent:
        wall_s = self.time_s + 0.5
        return FinishedEvent(
            sequence=0,
            time_s=wall_s,
            text=self.text,
            token_ids=tuple(range(self.n_tokens)),
            finish_reason=reason,
            stopped_by=stopped_by,
            n_prompt_tokens=12,
            n_tokens=self.n_tokens,
            n_rounds=self.n_rounds,
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
            acceptance_rate=self.n_accepted / self.n_drafted if self.n_drafted else None,
            mean_accepted_length=self.n_tokens / self.n_rounds if self.n_rounds else None,
            accepted_by_depth=tuple(n for _, n in sorted(self.accepted_by_depth.items())),
            drafted_by_depth=tuple(n for _, n in sorted(self.drafted_by_depth.items())),
            rounds_by_tokens=tuple(
                self.rounds_by_tokens[n] for n in range(max(self.rounds_by_tokens, default=-1) + 1)
            ),
            tokens_per_s=self.n_tokens / self.time_s if self.n_rounds else None,
            time_to_first_token_s=0.5,
            prompt_s=0.4,
            draft_s=0.2 * wall_s,
            target_s=0.75 * wall_s,
            loop_s=0.05 * wall_s,
            undrafted=tuple(self.undrafted.values()),
            wall_s=wall_s,
        )

    def _add(self, event: Event) -> Script:
        self.events.append(event)
        return self

    def _commit(self, pieces: Sequence[Piece]) -> Script:
        self.n_tokens += len(pieces)
        self.rounds_by_tokens[len(pieces) - 1] += 1
        text = "".join(piece.text for piece in pieces)
        name, words = self.reason or (None, None)
        return self._add(
            CommittedEvent(
                0, self.time_s, self.n_rounds, tuple(pieces), text, self.n_tokens, name, words
            )
        )

    def _count(self, parents: Sequence[int], path: Sequence[int]) -> None:
        self.n_drafted += len(parents)
        self.n_accepted += len(path)
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        self.drafted_by_depth.update(set(depths))
        self.accepted_by_depth.update(range(len(path)))


def _rejected(
    drafted: Sequence[str], parents: Sequence[int], path: Sequence[int]
) -> tuple[RejectedBranch, ...]:
    """The branches from the accepted path to each rejected leaf."""
    branches = []
    for leaf in range(len(drafted)):
        if leaf in parents or leaf in path:
            continue
        nodes: list[int] = []
        node = leaf
        while node >= 0 and node not in path:
            nodes.insert(0, node)
            node = parents[node]
        branches.append(RejectedBranch(tuple(nodes), "".join(drafted[index] for index in nodes)))
    return tuple(branches)
