"""The walk-through: a line for each round.

It shows what was drafted, what the target accepted, and how long the round took.
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
    RejectedBranch,
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
    "✓ accepted  ✗ rejected\n"
    "→ corrected: the target's token instead  + bonus: its token after an accepted draft\n"
    "· plain: without a draft  = forced: the only token that the grammar allows"
)
_VERBOSE_LEGEND = "\n41|3: probabilities in percent, by draft and target"
_HEADING = "round      ms  tokens  "


class RoundsRenderer(Renderer):
    """Prints the rounds of one answer.

    Args:
        console: where to print them.
        notice: prints notices; without it they are not shown.
        verbose: whether to print probabilities, and why each round drafted what it did.
    """

    def __init__(
        self,
        console: Console,
        notice: Callable[[NoticeEvent], None] | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        self._console = console
        self._notice = notice
        self._verbose = verbose
        self._styles = styles_on(console)
        self._rounds = RoundReader()
        #: When the last round ended.
        self._last_s = 0.0
        self._has_heading = False
        #: Whether the bound of the threshold policy was explained in words.
        self._is_bound_explained = False
        #: What was printed last, since only changes are printed.
        self._reason = ""
        self._origin = ""
        self._guesses = ""

    def handle(self, event: Event) -> None:
        completed = self._rounds.read(event)
        if completed is not None:
            if not self._has_heading:  # it comes after the notices before the answer
                self._has_heading = True
                legend = _LEGEND
                if self._verbose:
                    legend += _VERBOSE_LEGEND
                self._print(self._faint(f"{legend}\n{_HEADING}"))
            self._show(completed)
        elif isinstance(event, NoticeEvent) and self._notice is not None:
            self._notice(event)
        elif isinstance(event, FinishedEvent):
            self.close()
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._last_s = event.time_s

    def _finish(self) -> None:
        self._console.file.flush()

    def _show(self, completed: Round) -> None:
        event = completed.committed
        # The target's token is in the place of one branch, which is in the line; the other rejected
        # branches are below it.
        inline = _replaced_branch(completed)
        tokens = self._tokens_of(completed, inline) + self._remarks(completed)
        ms = f"{1000 * (event.time_s - self._last_s):.1f}" if event.round else ""
        start = f"{event.round or '':>5} {ms:>7} {len(event.pieces):>7}  "
        self._lay_out(self._faint(start), tokens)
        self._show_other_branches(completed, inline)

        words = event.reason_text or ""
        has_draft = bool(completed.nodes)
        if event.reason not in (None, self._reason) and (self._verbose or not has_draft):
            self._say(words if has_draft else f"nothing drafted: {words}")
        if completed.guesses != self._guesses:
            self._say(completed.guesses)
        self._reason = event.reason or self._reason
        self._guesses = completed.guesses

    def _tokens_of(self, completed: Round, inline: RejectedBranch | None) -> list[Text]:
        """Return the committed tokens, with the `inline` branch before the one that replaced it."""
        n_accepted = len(completed.accepted)
        tokens: list[Text] = []
        for position, piece in enumerate(completed.committed.pieces):
            node = None
            if position < n_accepted:
                node = completed.nodes[completed.accepted[position]]
            if inline is not None and position == n_accepted:
                tokens += self._branch(completed, inline, instead=piece)
            tokens.append(self._token(piece.kind, piece, node, piece.logprob))
        return tokens

    def _remarks(self, completed: Round) -> list[Text]:
        """Return the bound that ended the draft, and who drafted, if that is new."""
        if not completed.nodes:
            return []
        remarks: list[Text] = []
        event = completed.committed
        if event.reason == "threshold":
            words = event.reason_text or ""
            if self._is_bound_explained:
                words = f"≥ {words.rpartition(' ')[2]}"
            self._is_bound_explained = True
            remarks.append(self._faint(words))
        origin = completed.nodes[0].origin
        if origin != self._origin:
            self._origin = origin
            remarks.append(self._faint(f"by {origin}"))
        return remarks

    def _show_other_branches(self, completed: Round, inline: RejectedBranch | None) -> None:
        """Print rejected branches in a line each, from where they leave those already shown."""
        shown: set[int] = set()
        if inline is not None:
            shown.update(inline.nodes)
        for branch in completed.rejected:
            if branch is inline:
                continue
            n_shared = len(shown.intersection(branch.nodes))
            shown.update(branch.nodes)
            depth = completed.position_of(branch) + n_shared
            start = " " * len(_HEADING) + "  " * depth + "└ "
            self._lay_out(self._faint(start), self._branch(completed, branch)[n_shared:])

    def _say(self, words: str) -> None:
        texts = [self._faint(word) for word in words.split()]
        self._lay_out(self._faint(" " * len(_HEADING)), texts, gap=" ")

    def _branch(
        self,
        completed: Round,
        branch: RejectedBranch,
        instead: Piece | None = None,
    ) -> list[Text]:
        """Return the tokens of a rejected branch.

        The target's probability of the first is known if it is listed with the token that came
        `instead`.
        """
        tokens: list[Text] = []
        for index in branch.nodes:
            node = completed.nodes[index]
            logprob = None
            if instead is not None and not tokens:
                logprobs = {each.token_id: each.logprob for each in instead.top_logprobs}
                logprob = logprobs.get(node.token_id)
            tokens.append(self._token("rejected", node, node, logprob))
        return tokens

    def _token(
        self,
        kind: str,
        token: Piece | DraftNode,
        node: DraftNode | None,
        target_logprob: float | None,
    ) -> Text:
        shown = clean_line(token.text.removeprefix(" "))
        if not shown.strip():
            shown = "␣" * len(token.text) or f"(token {token.token_id}, no text)"
        text = Text.assemble(f"{_MARKS[kind]} ", (shown, self._styles[kind]))
        if node is not None and node.n_walks > 1:
            text.append(f" ({node.n_walks} drafts)", self._styles["faint"])
        if self._verbose:
            text.append(_probabilities(node, target_logprob), self._styles["faint"])
        return text

    def _lay_out(self, start: Text, tokens: Sequence[Text], gap: str = "  ") -> None:
        """Print a line; on a terminal, what does not fit continues below the first token."""
        columns = self._console.width if self._console.is_terminal else math.inf
        n_start = start.cell_len
        line = start
        for token in tokens:
            is_full = line.cell_len + token.cell_len > columns
            if is_full and line.cell_len > n_start:
                self._print(line)
                line = Text(" " * n_start)
            line = Text.assemble(line, token, gap)
        self._print(line)

    def _faint(self, text: str) -> Text:
        return Text(text, self._styles["faint"])

    def _print(self, line: Text) -> None:
        line.rstrip()
        self._console.print(line, soft_wrap=True)


def _replaced_branch(completed: Round) -> RejectedBranch | None:
    """Return the first rejected branch that starts after the last accepted token."""
    n_accepted = len(completed.accepted)
    for branch in completed.rejected:
        if completed.position_of(branch) == n_accepted:
            return branch
    return None


def _probabilities(node: DraftNode | None, target_logprob: float | None) -> str:
    """Return the draft's and the target's probability of a token, as far as they are known."""
    draft = "–"
    target = "–"
    if node is not None and node.probability is not None:
        draft = f"{100 * node.probability:.0f}"
    if target_logprob is not None:
        target = f"{100 * math.exp(target_logprob):.0f}"
    if draft == target == "–":
        return ""
    return f" {draft}|{target}"
