"""Prompt lookup: draft what followed an earlier occurrence of the text's ending, in the text itself,
in files or in earlier answers.

(Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al., arXiv:2304.04487; counts of what followed:
Hu et al., "SAM Decoding", arXiv:2411.10666.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from specgen.drafters.kind import DraftKind, DraftRequest, DraftSetup, LoadedDraft
from specgen.drafters.suffix_array import MAX_MATCH, MAX_PLACES, Match, Matches, SuffixArray
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import Drafter, Drafting, ready
from specgen.method.policy import RoundPlan, RoundResult
from specgen.method.tables import FREE, Price

#: The origins of nodes that are drafted from the text itself, and from corpora.
TEXT_ORIGIN: Final = "ngram"
LOOKUP_ORIGIN: Final = "lookup"
#: A corpus is followed if its match is longer than the text's own by at least this many tokens.
_CLEARLY_LONGER = 2
#: The token that followed last is drafted, unless another one followed this many times as often.
#: This was the best of the rules that were tried in answers, prose and code, if by little.
_CLEARLY_OFTENER = 3
#: A token's odds for each token of the match and each occurrence that it followed, and how much each
#: other occurrence takes from them; fitted to the same texts.
_ODDS_A_TOKEN = 0.35
_DISSENT = 2.0
#: Branches end where their paths are less likely than this; and later nodes than this many get no
#: children.
_LEAST_CHANCE = 0.03
_MAX_NODES = 64
#: The most occurrences of an n-gram among which the longest match is looked for, the latest.
_MOST_SEARCHED = 1024
#: The most continuations that are drafted at one position of a tree without a fixed shape.
_N_BRANCHES = 3


class _Guess(NamedTuple):
    token: int
    confidence: float


class _Node(NamedTuple):
    guess: _Guess
    parent: int
    origin: str
    #: The probability that it and all before it follow.
    chance: float


def confidence(length: int, n_agreeing: int, n_occurrences: int) -> float:
    """Estimate the probability, in (0, 1), that a token follows if it followed `n_agreeing` of the
    `n_occurrences` occurrences of the last `length` tokens. It grows with the length and the agreement."""
    dissent = 1.0 + _DISSENT * (n_occurrences - n_agreeing)
    odds = _ODDS_A_TOKEN * length * n_agreeing / dissent
    return odds / (1.0 + odds)


class TextIndex(Matches):
    """A text to which tokens are added, and from whose end they are taken back. It finds endings of at least
    `min_match` tokens."""

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        super().__init__(self._tokens)
        #: By the n-grams of `min_match` tokens: the indices of the tokens that follow them, in order.
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        """Return the number of tokens in the text."""
        return len(self._tokens)

    def extend(self, token: int) -> None:
        """Add a token to the end of the text."""
        self._tokens.append(token)
        if len(self._tokens) > self._min_match:
            self._places[self._before_last()].append(len(self._tokens) - 1)

    def rewind(self, n_tokens: int) -> None:
        """Take back all of the text's tokens but the first `n_tokens`."""
        while len(self._tokens) > max(0, n_tokens):
            if len(self._tokens) > self._min_match:
                self._places[self._before_last()].pop()
            self._tokens.pop()

    def longest(self, ending: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of `ending` that is followed by something in the text; of
        many occurrences the latest."""
        tokens, length, n_most = self._tokens, self._min_match, min(len(ending), MAX_MATCH)
        places: list[int] = []
        for at in reversed(self._places.get(tuple(ending[-length:]), [])[-_MOST_SEARCHED:]):
            if at < length or tokens[at - length : at] != ending[-length:]:
                continue
            n_before = length
            while length < min(at, n_most) and tokens[at - 1 - length] == ending[-1 - length]:
                length += 1
            if length > n_before:
                places.clear()
            if len(places) < MAX_PLACES:
                places.append(at)
            elif length == n_most:
                break
        return Match(length, tuple(places)) if places else None

    def _before_last(self) -> tuple[int, ...]:
        return tuple(self._tokens[-1 - self._min_match : -1])


class SuffixDrafter(Drafter):
    """Drafts, token by token, the likeliest continuation of the longest earlier occurrence of the
    text's ending. That ending includes the draft so far.

    Nothing is drafted if fewer than `min_match` tokens match; a match of more than `max_match`
    tokens counts as one of `max_match`. `corpora` are followed where their match is clearly longer
    than the text's own; among equally long matches, the last corpus is followed. It does not ask
    the plan: a draft of any length costs microseconds, and its probabilities show where to cut it.

    With `n_children` above 1 the draft is a tree: where occurrences went on in different ways, the
    likeliest few of these become branches, each with what followed it. The nodes with the
    likeliest paths are kept. `n_deepest` bounds the depth.
    """

    def __init__(
        self,
        min_match: int,
        max_match: int,
        corpora: Sequence[SuffixArray] = (),
        *,
        n_children: int = 1,
        n_deepest: int | None = None,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"matches of {min_match} to {max_match} tokens")
        self._min_match = min_match
        self._max_match = max_match
        self._corpora = tuple(corpora)
        self._n_children = n_children
        self._n_deepest = n_deepest
        self._text = TextIndex(min_match)

    @property
    def name(self) -> str:
        return TEXT_ORIGIN

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        return ready(self._look_up_text(context, plan.n_max))

    def _look_up_text(self, context: Sequence[int], n_max: int) -> Draft:
        text, n_deepest = self._text, min(n_max, self._n_deepest or n_max)
        for token in context[len(text) :]:
            text.extend(token)
        ending = list(context[-MAX_MATCH:])
        n_before, nodes = len(ending), list[_Node]()
        own = text.longest(ending)
        others = [corpus.longest(ending) for corpus in self._corpora]
        #: Where nodes may get more children: the node or root, the ending there, its match, and the path's chance.
        places = [(ROOT, ending, own, 1.0)]
        while len(nodes) < n_deepest:
            guess, origin = self._look_up(others, own.length if own else 0), LOOKUP_ORIGIN
            if guess is None and own is not None:
                guess, origin = self._likeliest(text.followers(own), own.length), TEXT_ORIGIN
            if guess is None:
                break
            chance = places[-1][-1] * guess.confidence
            nodes.append(_Node(guess, len(nodes) - 1, origin, chance))
            ending = [*ending, guess.token]
            own = text.longer(own, ending)
            found = zip(self._corpora, others, strict=True)
            others = [corpus.longer(match, ending) for corpus, match in found]
            places.append((len(nodes) - 1, ending, own, chance))
        if not nodes:
            return NO_DRAFT
        if self._n_children == 1:
            return _draft(nodes)
        for node, ending, match, before in places:  # the list grows meanwhile
            if len(ending) - n_before >= n_deepest or match is None:
                continue
            known = {each.guess.token for each in nodes if each.parent == node}
            for guess in self._all_that_followed(match)[: self._n_children]:
                chance = before * guess.confidence
                if guess.token in known or chance < _LEAST_CHANCE:
                    continue
                nodes.append(_Node(guess, node, TEXT_ORIGIN, chance))
                if len(nodes) < _MAX_NODES:
                    longer = [*ending, guess.token]
                    places.append((len(nodes) - 1, longer, text.longer(match, longer), chance))
        order = sorted(range(len(nodes)), key=lambda node: -nodes[node].chance)
        return _draft(nodes).only(order[:n_max])

    def _all_that_followed(self, match: Match) -> list[_Guess]:
        """Return the tokens that followed a match in the text, likeliest first."""
        followers = self._text.followers(match)
        counted = [(count, place, token) for token, (count, place) in followers.items()]
        n_all, length = len(match.places), min(match.length, self._max_match)
        return [
            _Guess(token, confidence(length, count, n_all))
            for count, _, token in sorted(counted, reverse=True)
        ]

    def observe(self, result: RoundResult) -> None:
        pass

    def rewind(self, n_tokens: int) -> None:
        self._text.rewind(n_tokens)

    def _look_up(self, matches: Sequence[Match | None], n_matched: int) -> _Guess | None:
        """Return the likeliest token after the longest match in the corpora, if that match is clearly longer
        than `n_matched`."""
        n_least = max(n_matched + _CLEARLY_LONGER, self._min_match)
        found = [
            (match.length, number, match)
            for number, match in enumerate(matches)
            if match is not None and n_least <= min(match.length, self._max_match)
        ]
        if not found:
            return None
        _, number, match = max(found, key=lambda each: each[:2])
        return self._likeliest(self._corpora[number].followers(match), match.length)

    def _likeliest(self, followers: Mapping[int, tuple[int, int]], length: int) -> _Guess:
        """Choose among tokens, each with its number of occurrences and the place of the last one."""
        token = max(followers, key=lambda each: followers[each][1])
        most = max(followers, key=followers.__getitem__)
        if followers[most][0] >= _CLEARLY_OFTENER * followers[token][0]:
            token = most
        n_all = sum(count for count, _ in followers.values())
        return _Guess(token, confidence(min(length, self._max_match), followers[token][0], n_all))


def _draft(nodes: Sequence[_Node]) -> Draft:
    return Draft(
        tuple(node.guess.token for node in nodes),
        tuple(node.parent for node in nodes),
        tuple(node.origin for node in nodes),
        tuple(node.guess.confidence for node in nodes),
        (None,) * len(nodes),
    )


class LoadedNgrams(LoadedDraft):
    """N-grams of the text itself, and of the texts to look up."""

    is_free = True
    can_draw = False
    origin = TEXT_ORIGIN

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(TEXT_ORIGIN, TEXT_ORIGIN)
        self._setup = setup
        self.why_chains = setup.why_chains

    def drafter(self, request: DraftRequest) -> SuffixDrafter:
        n_children, n_deepest = 1, None
        if request.branches:
            n_children, n_deepest = _N_BRANCHES, request.n_deepest
            if request.shape.is_fixed:
                n_children, n_deepest = max(request.shape.numbers), request.shape.n_levels
        shortest, longest = self._setup.drafting.ngrams_of
        corpora = self._setup.corpora
        return SuffixDrafter(shortest, longest, corpora, n_children=n_children, n_deepest=n_deepest)


KIND = DraftKind(
    TEXT_ORIGIN,
    matches=lambda source: source == TEXT_ORIGIN,
    open=lambda _source, setup: LoadedNgrams(setup),
    suits=lambda _target: True,
)
