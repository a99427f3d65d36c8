"""Prompt lookup: draft what followed an earlier occurrence of the text's ending, in the text
itself, in files or in earlier answers (Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al.,
arXiv:2304.04487; counts of what followed: Hu et al., "SAM Decoding", arXiv:2411.10666).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from specgen.drafters.interface import DraftKind, DraftRequest, DraftSetup, LoadedDraft
from specgen.drafters.lookup_texts import (
    MAX_MATCH,
    MAX_PLACES,
    EarlierTexts,
    Match,
    Matches,
    SuffixArray,
    load_corpus,
)
from specgen.method.cost_table import FREE, Price
from specgen.method.draft import NO_DRAFT, ROOT, Draft
from specgen.method.drafter import Drafter, Drafting
from specgen.method.policy import RoundPlan

#: The origins of nodes that are drafted from the text itself, and from corpora.
TEXT_ORIGIN, LOOKUP_ORIGIN = "ngram", "lookup"
#: A corpus is followed if its match is longer than the text's own by so many tokens.
_CLEARLY_LONGER = 2
#: The token that followed last is drafted, unless another followed so many times as often.
_CLEARLY_OFTENER = 3
#: A token's odds for each token of the match and occurrence that it followed, and what each other
#: one takes from them.
_ODDS_A_TOKEN, _DISSENT = 0.35, 2.0
_MOST_SEARCHED = 1024  # the latest occurrences of an n-gram, among which the longest match is
_N_BRANCHES = 3  # the most continuations at one position of a tree without a fixed shape


class TextIndex(Matches):
    """A text that grows and is taken back. It finds endings of at least `min_match` tokens; of many
    the latest.
    """

    def __init__(self, min_match: int) -> None:
        self._min_match = min_match
        self._tokens: list[int] = []
        super().__init__(self._tokens)
        #: By the n-grams of `min_match` tokens: the indices of the tokens that follow them, in
        #: order.
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def follow(self, text: Sequence[int]) -> None:
        tokens, n = self._tokens, self._min_match
        for token in text[len(tokens) :]:
            if len(tokens) >= n:
                self._places[tuple(tokens[-n:])].append(len(tokens))
            tokens.append(token)

    def rewind(self, n_tokens: int) -> None:
        tokens, n = self._tokens, self._min_match
        while len(tokens) > max(0, n_tokens):
            tokens.pop()
            if len(tokens) >= n:
                self._places[tuple(tokens[-n:])].pop()

    def longest(self, ending: Sequence[int]) -> Match | None:
        tokens, length, n_most = self._tokens, self._min_match, min(len(ending), MAX_MATCH)
        places: list[int] = []
        for at in reversed(self._places.get(tuple(ending[-length:]), [])[-_MOST_SEARCHED:]):
            if tokens[max(0, at - length) : at] != ending[-length:]:
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


def confidence(length: int, n_agreeing: int, n_occurrences: int) -> float:
    """Estimate how likely a token follows that followed `n_agreeing` of the occurrences of the last
    `length` tokens.
    """
    dissent = 1.0 + _DISSENT * (n_occurrences - n_agreeing)
    odds = _ODDS_A_TOKEN * length * n_agreeing / dissent
    return odds / (1.0 + odds)


class _Guess(NamedTuple):
    token: int
    origin: str
    confidence: float


class SuffixDrafter(Drafter):
    """Drafts, token by token, the likeliest continuation of the longest earlier occurrence of the
    ending.

    Nothing is drafted if fewer than `min_match` tokens match; a match of more than `max_match`
    tokens counts as one of `max_match`. `corpora` are followed where their match is clearly longer
    than the text's own; of equally long matches that in the last corpus. It does not ask the plan:
    a draft costs microseconds, and its probabilities show where to cut it. With `n_children` above
    1 the draft is a tree of at most `n_deepest` levels, of the likeliest paths.
    """

    name = TEXT_ORIGIN

    def __init__(
        self,
        min_match: int,
        max_match: int,
        corpora: Sequence[Matches] = (),
        *,
        n_children: int = 1,
        n_deepest: int | None = None,
    ) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._n_children, self._n_deepest = n_children, n_deepest
        self._text = TextIndex(min_match)
        #: Where matches are looked for: the text itself first.
        self._sources: tuple[Matches, ...] = (self._text, *corpora)

    def price(self, n_context: int) -> Price:
        return FREE

    def propose(self, context: Sequence[int], plan: RoundPlan, n_drafted: int = 0) -> Drafting:
        yield from ()  # nothing is decoded
        self._text.follow(context)
        n_max, ending, chance, node = plan.n_max, list(context[-MAX_MATCH:]), 1.0, ROOT
        n_deepest = len(ending) + min(n_max, self._n_deepest or n_max)
        matches = [source.longest(ending) for source in self._sources]
        nodes: list[tuple[int, _Guess]] = []
        # What may come next, likeliest path first: its chance, a number, parent, guess, and what
        # stands before it.
        heap: list[tuple[float, int, int, _Guess, list[int], list[Match | None]]] = []
        numbers = count()
        while len(nodes) < n_max:
            for guess in self._guesses(matches) if len(ending) < n_deepest else ():
                path = (-chance * guess.confidence, next(numbers), node, guess, ending, matches)
                heappush(heap, path)
            if not heap:
                break
            chance, _, parent, guess, ending, matches = heappop(heap)
            node, chance = len(nodes), -chance
            nodes.append((parent, guess))
            ending = [*ending, guess.token]
            found = zip(self._sources, matches, strict=True)
            matches = [source.longer(match, ending) for source, match in found]
        if not nodes:
            return NO_DRAFT
        parents, guesses = zip(*nodes, strict=True)
        tokens, origins, confidences = zip(*guesses, strict=True)
        return Draft(tokens, parents, origins, confidences, (None,) * len(nodes))

    def rewind(self, n_tokens: int) -> None:
        self._text.rewind(n_tokens)

    def _guesses(self, matches: Sequence[Match | None]) -> list[_Guess]:
        """Return the tokens that are drafted after these matches, one of each source, likeliest
        first.
        """
        n_own = matches[0].length if matches[0] is not None else 0
        n_least = max(n_own + _CLEARLY_LONGER, self._min_match)
        longer = [
            (match.length, number)
            for number, match in enumerate(matches)
            if number and match is not None and n_least <= min(match.length, self._max_match)
        ]
        number = max(longer, default=(0, 0))[1]
        match = matches[number]
        if match is None:
            return []
        followers = self._sources[number].followers(match)
        tokens = sorted(followers, key=followers.__getitem__, reverse=True)
        latest = max(followers, key=lambda token: followers[token][1])
        if followers[tokens[0]][0] < _CLEARLY_OFTENER * followers[latest][0]:
            tokens.remove(latest)
            tokens.insert(0, latest)
        length, n_all = min(match.length, self._max_match), len(match.places)
        origin = LOOKUP_ORIGIN if number else TEXT_ORIGIN
        return [
            _Guess(token, origin, confidence(length, followers[token][0], n_all))
            for token in tokens[: self._n_children]
        ]


class LoadedNgrams(LoadedDraft):
    """N-grams of the text itself, and of the texts to look up: files, and earlier answers. Raises
    `UsageError`.
    """

    is_free = True
    can_draw = False
    origin = TEXT_ORIGIN

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(TEXT_ORIGIN, TEXT_ORIGIN)
        self.why_chains = setup.why_chains
        self._drafting = drafting = setup.drafting
        corpora: list[SuffixArray] = []
        self._earlier: EarlierTexts | None = None
        if drafting.lookup_files or drafting.lookup_store:
            vocabulary, cache = setup.target.vocabulary, setup.cache
            kind = vocabulary.digest()
            if drafting.lookup_files:
                folder = cache / "lookup" if cache is not None else None
                corpora.append(load_corpus(drafting.lookup_files, vocabulary, kind, folder))
            if drafting.lookup_store and cache is not None:
                self._earlier = EarlierTexts(cache / "texts", kind)
                corpora += self._earlier.arrays()
        self._corpora = tuple(corpora)

    def keep_text(self, tokens: Sequence[int]) -> None:
        if self._earlier is not None:
            self._earlier.add(tokens)

    def drafter(self, request: DraftRequest) -> SuffixDrafter:
        n_children, n_deepest = 1, None
        if request.branches:
            n_children, n_deepest = _N_BRANCHES, request.n_deepest
            if request.shape.is_fixed:
                n_children, n_deepest = max(request.shape.numbers), request.shape.n_levels
        return SuffixDrafter(
            *self._drafting.ngrams_of, self._corpora, n_children=n_children, n_deepest=n_deepest
        )


KIND = DraftKind(
    TEXT_ORIGIN,
    matches=lambda source: source == TEXT_ORIGIN,
    open=lambda _source, setup: LoadedNgrams(setup),
    suits=lambda _target: True,
)
