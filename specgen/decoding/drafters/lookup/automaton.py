"""Repetitions in a text: a suffix automaton of its tokens.

(Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985; for drafts:
Hu et al., "SAM Decoding", arXiv:2411.10666.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: The state of the empty string.
_START = 0
_NONE = -1
#: The most states, from the longest string on, whose counts a new token updates. There are more only
#: where a text repeats itself this often in a row; some occurrences of the shorter strings are then not
#: counted.
N_COUNTED = 64


class Cursor(NamedTuple):
    """A position in the automaton: a string of `length` tokens that occurs in the text, and its
    state. All strings of a state end at the same positions of the text."""

    state: int
    length: int


NOWHERE = Cursor(_START, 0)


class SuffixAutomaton:
    """All strings of a text to which tokens are added, each with the tokens that followed it and
    how often.

    Adding a token takes constant time (amortised), and so does a step of a cursor, however long
    the text is. The automaton has at most two states and three transitions a token. Taking tokens
    back undoes exactly what adding them did, and costs as much.
    """

    def __init__(self, tokens: Iterable[int] = (), *, n_counted: int = N_COUNTED) -> None:
        self._n_counted = n_counted
        # For each state: the state behind each following token, the state of the longest suffix that
        # ends at other positions too, the length of its longest string, its number of occurrences, and
        # the index of the last token of its latest occurrence.
        self._followers: list[dict[int, int]] = [{}]
        self._links = [_NONE]
        self._lengths = [0]
        self._counts = [0]
        self._ends = [_NONE]
        # For each token, to take it back: the token, the state of the whole text up to it, the state
        # that it split into two, if any (the shorter part is the state after the text's), and the
        # length of `_replaced_ends` before it.
        self._tokens: list[int] = []
        self._states: list[int] = []
        self._split_states: list[int] = []
        self._n_replaced: list[int] = []
        #: The ends of states that were replaced by new ends.
        self._replaced_ends: list[int] = []
        for token in tokens:
            self.extend(token)

    def __len__(self) -> int:
        """Return the number of tokens in the text."""
        return len(self._tokens)

    @property
    def size(self) -> tuple[int, int]:
        """The number of states, and that of transitions between them."""
        return len(self._links), sum(map(len, self._followers))

    def extend(self, token: int) -> None:
        """Add a token to the end of the text."""
        all_followers, links, lengths = self._followers, self._links, self._lengths
        counts, ends = self._counts, self._ends
        index = len(self._tokens)
        state = self._states[-1] if index else _START
        new = len(links)
        all_followers.append({})
        lengths.append(index + 1)
        counts.append(1)
        ends.append(index)
        while state >= 0:
            followers = all_followers[state]
            if token in followers:
                break
            followers[token] = new
            state = links[state]
        link, split = _START, _NONE
        if state >= 0:
            link = all_followers[state][token]
            length = lengths[state] + 1
            if lengths[link] != length:
                # Only the strings of that state up to this length end here too.
                split, link = link, new + 1
                all_followers.append(all_followers[split].copy())
                lengths.append(length)
                counts.append(counts[split])
                ends.append(ends[split])
        links.append(link)
        if split >= 0:
            links.append(links[split])
            links[split] = link
            while state >= 0 and all_followers[state].get(token) == split:
                all_followers[state][token] = link
                state = links[state]
        self._tokens.append(token)
        self._states.append(new)
        self._split_states.append(split)
        replaced = self._replaced_ends
        self._n_replaced.append(len(replaced))
        for _ in range(self._n_counted):
            if link <= 0:
                break
            replaced.append(ends[link])
            ends[link] = index
            counts[link] += 1
            link = links[link]

    def rewind(self, n_tokens: int) -> None:
        """Take back all of the text's tokens but the first `n_tokens`."""
        while len(self._tokens) > max(0, n_tokens):
            self._take_back()

    def cursor(self) -> Cursor:
        """Return the longest ending of the text that also occurs earlier in it, followed by a token."""
        if not self._states:
            return NOWHERE
        state = self._links[self._states[-1]]
        return Cursor(state, self._lengths[state])

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """Return the longest ending of the cursor's string and `token` that occurs in the text, followed by
        a token."""
        state, length = cursor
        links, lengths = self._links, self._lengths
        while (next_state := self._followers[state].get(token)) is None:
            state = links[state]
            if state < 0:
                return NOWHERE
            length = lengths[state]
        if next_state == self._states[-1]:  # occurs only at the text's end, where nothing follows
            next_state = links[next_state]
            return Cursor(next_state, min(length + 1, lengths[next_state]))
        return Cursor(next_state, length + 1)

    def shorter(self, cursor: Cursor) -> Cursor:
        """Return the longest ending of the cursor's string that occurs more often in the text."""
        state = self._links[cursor.state]
        return Cursor(state, self._lengths[state]) if state >= 0 else NOWHERE

    def followers(self, cursor: Cursor) -> Mapping[int, int]:
        """Return the tokens that follow the cursor's string in the text, each with the state of the string
        and the token, for `count` and `end`. The mapping belongs to the automaton: do not change it."""
        return self._followers[cursor.state]

    def count(self, state: int) -> int:
        """Return how often a state's strings occur in the text."""
        return self._counts[state]

    def end(self, state: int) -> int:
        """Return the index of the last token of the latest occurrence of a state's strings."""
        return self._ends[state]

    def _take_back(self) -> None:
        """Undo the last `extend`, in the opposite order."""
        all_followers, links, ends = self._followers, self._links, self._ends
        token, new = self._tokens.pop(), self._states.pop()
        split, n_replaced = self._split_states.pop(), self._n_replaced.pop()
        replaced = self._replaced_ends
        state = links[new]
        for index in range(n_replaced, len(replaced)):
            ends[state] = replaced[index]
            self._counts[state] -= 1
            state = links[state]
        del replaced[n_replaced:]
        state = self._states[-1] if self._states else _START
        while state >= 0 and all_followers[state].get(token) == new:
            del all_followers[state][token]
            state = links[state]
        if split >= 0:
            part = new + 1
            while state >= 0 and all_followers[state].get(token) == part:
                all_followers[state][token] = split
                state = links[state]
            links[split] = links[part]
        for values in (all_followers, links, self._lengths, self._counts, ends):
            del values[new:]
