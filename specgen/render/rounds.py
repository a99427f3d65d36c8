"""The walk-through of an answer, with a line for each round.

A line shows what was drafted, what the target accepted, and how long the round took.
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

#: The sign before each token, by its kind.
_SIGNS = {
    "accepted": "✓",
    "rejected": "✗",
    "corrected": "→",
    "bonus": "+",
    "plain": "·",
    "forced": "=",
}
#: Its lines fit into 80 columns.
_LEGEND = (
    "✓ accepted  ✗ rejected  → corrected: the target's token instead\n"
    "+ bonus: the target's token after an accepted draft\n"
    "· plain: without a draft  = forced: the only token that the grammar allows"
)
_VERBOSE_LEGEND = "\n41|3: probabilities in percent, by draft and target"
#: The heading of the columns; tokens start after it.
_HEADING = "round      ms  tokens  "


class RoundsRenderer(Renderer):
    """Prints the rounds of one answer.

    Args:
        console: Where to print them.
        notice: Prints notices; None to not show them.
        verbose: Whether to print probabilities, and why each round drafted what it did.
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
        #: When the last round, or the prefill, ended.
        self._last_s = 0.0
        self._has_heading = False
        #: Whether the bound of the threshold policy was explained in words.
        self._is_bound_explained = False
        # The last values of what is only printed when it changes.
        self._last_reason = ""
        self._last_origin = ""
        self._last_guesses = ""

    def handle(self, event: Event) -> None:
        round_events = self._rounds.read(event)
        if round_events is not None:
            if not self._has_heading:  # printed with the first round, after any earlier notices
                self._has_heading = True
                self._print_heading()
            self._print_round(round_events)
        elif isinstance(event, NoticeEvent) and self._notice is not None:
            self._notice(event)
        elif isinstance(event, FinishedEvent):
            self.close()
        # These two events come during a round, all others between rounds.
        if not isinstance(event, (DraftedEvent, VerifiedEvent)):
            self._last_s = event.time_s

    def _finish(self) -> None:
        self._console.file.flush()

    def _print_heading(self) -> None:
        """Print the legend, and the heading of the columns."""
        legend = _LEGEND
        if self._verbose:
            legend += _VERBOSE_LEGEND
        # On a narrow terminal, it is broken between words.
        is_whole = not self._console.is_terminal
        self._console.print(self._faint(legend), soft_wrap=is_whole)
        self._print(self._faint(_HEADING))

    def _print_round(self, round_events: Round) -> None:
        """Print the line of a round, and the remarks that belong below it."""
        event = round_events.committed
        # The branch that the target's token replaced is printed within the line, before that token.
        # The other rejected branches are printed below the line.
        inline = _replaced_branch(round_events)
        tokens = self._tokens_of(round_events, inline) + self._take_new_remarks(round_events)
        # Tokens before the first round are shown without a number and a time.
        ms = f"{1000 * (event.time_s - self._last_s):.1f}" if event.round else ""
        start = f"{event.round or '':>5} {ms:>7} {len(event.pieces):>7}  "
        self._print_tokens(self._faint(start), tokens)
        self._print_other_branches(round_events, inline)

        # Say why this much, or nothing, was drafted, and what a second draft guessed, if it is new.
        reason_text = event.reason_text or ""
        is_new_reason = event.reason not in (None, self._last_reason)
        if is_new_reason and not round_events.nodes:
            self._print_sentence(f"nothing drafted: {reason_text}")
        elif is_new_reason and self._verbose:
            self._print_sentence(reason_text)
        if round_events.guesses != self._last_guesses:
            self._print_sentence(round_events.guesses)
        self._last_reason = event.reason or self._last_reason
        self._last_guesses = round_events.guesses

    def _tokens_of(
        self,
        round_events: Round,
        inline: RejectedBranch | None,
    ) -> list[Text]:
        """Return the committed tokens, with the `inline` branch before its replacement."""
        n_accepted = len(round_events.accepted)
        tokens: list[Text] = []
        for position, piece in enumerate(round_events.committed.pieces):
            node = None
            if position < n_accepted:
                node = round_events.nodes[round_events.accepted[position]]
            if inline is not None and position == n_accepted:
                tokens += self._branch_tokens(round_events, inline, instead=piece)
            tokens.append(self._token(piece.kind, piece, node, piece.logprob))
        return tokens

    def _take_new_remarks(self, round_events: Round) -> list[Text]:
        """Return the probability bound of the draft, and the drafter if it has changed.

        What is returned counts as printed, so that later rounds do not repeat it.
        """
        if not round_events.nodes:
            return []
        remarks: list[Text] = []
        event = round_events.committed
        if event.reason == "threshold":
            bound = event.reason_text or ""
            if self._is_bound_explained:
                # After the first time only the number at the end of the text is shown.
                bound = f"≥ {bound.rpartition(' ')[2]}"
            self._is_bound_explained = True
            remarks.append(self._faint(bound))
        origin = round_events.nodes[0].origin
        if origin != self._last_origin:
            self._last_origin = origin
            remarks.append(self._faint(f"by {origin}"))
        return remarks

    def _print_other_branches(
        self,
        round_events: Round,
        inline: RejectedBranch | None,
    ) -> None:
        """Print all rejected branches except `inline`, each on a line indented by its depth.

        Nodes at the start of a branch that were already printed with another one are left out.
        """
        shown_nodes: set[int] = set()
        if inline is not None:
            shown_nodes.update(inline.nodes)
        for branch in round_events.rejected:
            if branch is inline:
                continue
            n_shared = len(shown_nodes.intersection(branch.nodes))
            shown_nodes.update(branch.nodes)
            depth = round_events.position_of(branch) + n_shared
            start = " " * len(_HEADING) + "  " * depth + "└ "
            self._print_tokens(
                self._faint(start), self._branch_tokens(round_events, branch)[n_shared:]
            )

    def _print_sentence(self, sentence: str) -> None:
        """Print a sentence below the tokens, broken between words."""
        words = [self._faint(word) for word in sentence.split()]
        self._print_tokens(self._faint(" " * len(_HEADING)), words, gap=" ")

    def _branch_tokens(
        self,
        round_events: Round,
        branch: RejectedBranch,
        instead: Piece | None = None,
    ) -> list[Text]:
        """Return the tokens of a rejected branch.

        Args:
            round_events: The round.
            branch: The branch.
            instead: The token that replaced the branch, if there is one. If the target's most
                likely tokens are listed with it, they may include the branch's first token, whose
                target probability is then known.
        """
        tokens: list[Text] = []
        for index in branch.nodes:
            node = round_events.nodes[index]
            target_logprob = None
            if instead is not None and not tokens:  # only for the first token
                logprobs = {each.token_id: each.logprob for each in instead.top_logprobs}
                target_logprob = logprobs.get(node.token_id)
            tokens.append(self._token("rejected", node, node, target_logprob))
        return tokens

    def _token(
        self,
        kind: str,
        token: Piece | DraftNode,
        node: DraftNode | None,
        target_logprob: float | None,
    ) -> Text:
        """Return a token with its sign, and its probabilities if they are printed.

        Args:
            kind: The token's kind, or "rejected".
            token: The token.
            node: The node of the draft that proposed the token, if any.
            target_logprob: The target's log-probability of the token, if it is known.
        """
        shown = clean_line(token.text.removeprefix(" "))
        if not shown.strip():  # white space is shown as signs
            shown = "␣" * len(token.text) or f"(token {token.token_id}, no text)"
        text = Text.assemble(f"{_SIGNS[kind]} ", (shown, self._styles[kind]))
        # Several independent drafts may contain the node (`--verifier spectr`).
        if node is not None and node.n_walks > 1:
            text.append(f" ({node.n_walks} drafts)", self._styles["faint"])
        if self._verbose:
            text.append(_probabilities(node, target_logprob), self._styles["faint"])
        return text

    def _print_tokens(
        self,
        start: Text,
        tokens: Sequence[Text],
        gap: str = "  ",
    ) -> None:
        """Print a line of tokens; on a terminal, it continues below its first token if necessary.

        Args:
            start: The text before the first token.
            tokens: The tokens.
            gap: The space after each token.
        """
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


def _replaced_branch(round_events: Round) -> RejectedBranch | None:
    """Return the branch that the target's token replaced; None if there is none.

    It is the first rejected branch that starts right after the last accepted token.
    """
    n_accepted = len(round_events.accepted)
    for branch in round_events.rejected:
        if round_events.position_of(branch) == n_accepted:
            return branch
    return None


def _probabilities(node: DraftNode | None, target_logprob: float | None) -> str:
    """Return the probabilities of a token in percent, as in the legend; empty if none is known."""
    draft_percent = "–"
    target_percent = "–"
    if node is not None and node.probability is not None:
        draft_percent = f"{100 * node.probability:.0f}"
    if target_logprob is not None:
        target_percent = f"{100 * math.exp(target_logprob):.0f}"
    if draft_percent == target_percent == "–":
        return ""
    return f" {draft_percent}|{target_percent}"
