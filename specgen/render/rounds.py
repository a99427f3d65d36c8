"""The walk-through: a line for each round with what was drafted, what the target made of it, and
what it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from specgen.events import (
    DraftedEvent,
    DraftNode,
    Event,
    FinishedEvent,
    NoticeEvent,
    Piece,
    VerifiedEvent,
)
from specgen.render.rows import Round, RoundReader, clean_line, styles_on
from specgen.render.streams import Renderer

_MARKS = {
    "accepted": "✓",
    "rejected": "✗",
    "corrected": "→",
    "bonus": "+",
    "plain": "·",
    "forced": "=",
}
_LEGEND = (
    "✓ drafted and accepted  ✗ drafted and rejected\n"
    "→ the target's own instead  + its own after the whole draft\n"
    "· without a draft  = the only one that the grammar allows"
)
_HEAD = "round      ms  tokens  "


class RoundsRenderer(Renderer):
    """Prints the rounds of one answer; with `verbose` also the probabilities of tokens, and each
    reason.
    """

    def __init__(
        self,
        console: Console,
        notice: Callable[[NoticeEvent], None] | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        self._console, self._notice, self._verbose = console, notice, verbose
        self._styles = styles_on(console)
        self._rounds = RoundReader()
        self._last_s = 0.0
        self._has_head = self._is_bound_said = False
        self._reason = self._origin = self._guesses = ""

    def handle(self, event: Event) -> None:
        completed = self._rounds.read(event)
        if completed is not None:
            if not self._has_head:  # it stands behind what notices say before the answer
                self._has_head = True
                legend = _LEGEND + "\n41|3: in percent, by draft and target" * self._verbose
                self._print(Text(f"{legend}\n{_HEAD}", self._styles["faint"]))
            self._show(completed)
        elif isinstance(event, NoticeEvent) and self._notice is not None:
            self._notice(event)
        elif isinstance(event, FinishedEvent):
            self.close()
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._last_s = event.time_s

    def _finish(self) -> None:
        self._console.file.flush()

    def _show(self, found: Round) -> None:
        event, nodes, own = found.committed, found.nodes, len(found.accepted)
        places = [found.place(branch) for branch in found.rejected]
        # The branch in whose place the target's own token stands is in the line, and the others are
        # below it.
        inline = places.index(own) if own in places else None
        tokens: list[Text] = []
        words = event.reason_text or ""
        for place, piece in enumerate(event.pieces):
            node = nodes[found.accepted[place]] if place < own else None
            if inline is not None and place == own:
                tokens += self._branch(found, inline, piece)
            tokens.append(self._token(piece.kind, piece, node, piece.logprob))
        if event.reason == "threshold" and nodes:  # in words the first time, then only the bound
            bound = f"≥ {words.rpartition(' ')[2]}" if self._is_bound_said else words
            tokens.append(Text(bound, self._styles["faint"]))
            self._is_bound_said = True
        if nodes and nodes[0].origin != self._origin:
            self._origin = nodes[0].origin
            tokens.append(Text(f"by {self._origin}", self._styles["faint"]))
        ms = f"{1000 * (event.time_s - self._last_s):.1f}" if event.round else ""
        about = f"{event.round or '':>5} {ms:>7} {len(event.pieces):>7}  "
        self._lay_out(Text(about, self._styles["faint"]), tokens)
        shown = set(found.rejected[inline].nodes if inline is not None else ())
        for index, place in enumerate(places):
            if index != inline:  # from where it leaves those that are shown
                n_shared = len(shown.intersection(branch := found.rejected[index].nodes))
                shown.update(branch)
                start = f"{' ' * len(_HEAD)}{'  ' * (place + n_shared)}└ "
                rest = self._branch(found, index)[n_shared:]
                self._lay_out(Text(start, self._styles["faint"]), rest)
        if event.reason not in (None, self._reason) and (self._verbose or not nodes):
            self._say(words if nodes else f"nothing drafted: {words}")
        if found.guesses != self._guesses:
            self._say(found.guesses)
        self._reason, self._guesses = event.reason or self._reason, found.guesses

    def _say(self, words: str) -> None:
        told = [Text(word, self._styles["faint"]) for word in words.split()]
        self._lay_out(Text(" " * len(_HEAD)), told, gap=" ")

    def _branch(self, found: Round, index: int, instead: Piece | None = None) -> list[Text]:
        """Return the tokens of a rejected branch; the target's probability of the first may be that
        beside `instead`.
        """
        nodes = [found.nodes[node] for node in found.rejected[index].nodes]
        likeliest = instead.top_logprobs if instead is not None else ()
        first = {each.token_id: each.logprob for each in likeliest}.get(nodes[0].token_id)
        logprobs = (first, *[None] * len(nodes))
        return [
            self._token("rejected", node, node, logprob)
            for node, logprob in zip(nodes, logprobs, strict=False)
        ]

    def _token(
        self, kind: str, token: Piece | DraftNode, node: DraftNode | None, logprob: float | None
    ) -> Text:
        shown = clean_line(token.text.removeprefix(" "))
        if not shown.strip():
            shown = "␣" * len(token.text) or f"(token {token.token_id}, no text)"
        found = Text.assemble(f"{_MARKS[kind]} ", (shown, self._styles[kind]))
        if node is not None and node.n_walks > 1:
            found.append(f" ({node.n_walks} drafts)", self._styles["faint"])
        probability = None if node is None else node.probability
        if self._verbose and (probability is not None or logprob is not None):
            draft = "–" if probability is None else f"{100 * probability:.0f}"
            target = "–" if logprob is None else f"{100 * math.exp(logprob):.0f}"
            found.append(f" {draft}|{target}", self._styles["faint"])
        return found

    def _lay_out(self, start: Text, tokens: Sequence[Text], gap: str = "  ") -> None:
        """Print a line; on a terminal, what does not fit goes on below the first token."""
        n_start, columns = start.cell_len, self._console.width if self._console.is_terminal else 0
        line = start
        for token in tokens:
            if columns and n_start < line.cell_len and line.cell_len + token.cell_len > columns:
                self._print(line)
                line = Text(" " * n_start)
            line = Text.assemble(line, token, gap)
        self._print(line)

    def _print(self, line: Text) -> None:
        line.rstrip()
        self._console.print(line, soft_wrap=True)
