"""Prompt lookup: no model drafts, but an earlier occurrence of the text's last tokens.

Whatever followed these tokens before is proposed again. They are searched for in the text itself,
in files and in earlier answers (Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al.,
arXiv:2304.04487; counts of what followed: SAM Decoding, Hu et al., arXiv:2411.10666).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from specgen.drafters.interface import (
    FREE,
    NO_DRAFT,
    ROOT,
    Draft,
    Drafter,
    Drafting,
    DraftKind,
    DraftRequest,
    DraftSetup,
    LoadedDraft,
    Price,
    RoundPlan,
)
from specgen.drafters.lookup_texts import EarlierTexts, load_corpus
from specgen.drafters.suffix_index import (
    MAX_MATCH,
    Match,
    SuffixArray,
    SuffixIndex,
    TextIndex,
)

#: The origin of nodes that are drafted from the text itself.
TEXT_ORIGIN = "ngram"
#: The origin of nodes that are drafted from other texts.
LOOKUP_ORIGIN = "lookup"
#: A corpus is followed if its match is longer than the text's own by at least this many tokens.
_CLEARLY_LONGER = 2
#: How much each token of the match, times each occurrence that agrees, adds to the odds.
_ODDS_PER_TOKEN = 0.35
#: How much each occurrence that another token followed divides the odds.
_DISSENT = 2.0
#: The most continuations of one position, in a tree whose shape is not fixed.
_MOST_CHILDREN = 3


def confidence(
    length: int,
    n_agreeing: int,
    n_occurrences: int,
) -> float:
    """Estimate how likely a token comes next.

    Args:
        length: The number of the text's last tokens that occurred before.
        n_agreeing: The number of occurrences that the token followed.
        n_occurrences: The number of all occurrences.
    """
    dissent = 1.0 + _DISSENT * (n_occurrences - n_agreeing)
    odds = _ODDS_PER_TOKEN * length * n_agreeing / dissent
    return odds / (1.0 + odds)


class _Path(NamedTuple):
    """A path from the root of the draft to one of its nodes."""

    #: The last node, or `ROOT`.
    node: int
    #: The estimated probability that all tokens of the path are accepted.
    probability: float
    #: The last tokens of the text, and those of the path.
    ending: list[int]
    #: The longest match of `ending` in each source.
    matches: list[Match | None]


class _Candidate(NamedTuple):
    """A token that may follow a path."""

    path: _Path
    token: int
    origin: str
    confidence: float


class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrence of the text's last tokens.

    With `n_children` above 1 it drafts a tree of the likeliest paths. It does not ask the plan
    where to stop: a draft costs microseconds, and is cut afterwards by its probabilities.

    Args:
        min_match: Nothing is drafted where fewer tokens match.
        max_match: A longer match counts as one of this length.
        corpora: Other texts. They are followed where their match is clearly longer than the text's
            own; the last of them, if several match equally well.
        n_children: The most continuations of one position.
        n_deepest: The most levels of a draft; None: as many as there may be tokens.
    """

    name = TEXT_ORIGIN

    def __init__(
        self,
        min_match: int,
        max_match: int,
        corpora: Sequence[SuffixIndex] = (),
        *,
        n_children: int = 1,
        n_deepest: int | None = None,
    ) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._n_children = n_children
        self._n_deepest = n_deepest
        self._text = TextIndex(min_match)
        #: Where matches are searched for: the text itself first.
        self._sources: tuple[SuffixIndex, ...] = (self._text, *corpora)

    def price(self, n_context: int) -> Price:
        """Return `FREE`: nothing is decoded."""
        return FREE

    def propose(
        self,
        context: Sequence[int],
        plan: RoundPlan,
        n_drafted: int = 0,
    ) -> Drafting:
        """Draft the likeliest paths by best-first search."""
        yield from ()  # nothing is decoded
        self._text.follow(context)
        ending = list(context[-MAX_MATCH:])
        max_length = len(ending) + min(plan.n_max, self._n_deepest or plan.n_max)
        path = _Path(ROOT, 1.0, ending, [source.longest(ending) for source in self._sources])
        nodes: list[_Candidate] = []
        # The heap has (-probability, number, candidate): the likeliest candidate after any path
        # comes first, among equals the earliest.
        heap: list[tuple[float, int, _Candidate]] = []
        numbers = count()
        while len(nodes) < plan.n_max:
            if len(path.ending) < max_length:
                for candidate in self._candidates(path):
                    key = -path.probability * candidate.confidence
                    heappush(heap, (key, next(numbers), candidate))
            if not heap:
                break
            key, _, candidate = heappop(heap)
            path = self._extend(candidate, node=len(nodes), probability=-key)
            nodes.append(candidate)
        if not nodes:
            return NO_DRAFT
        return Draft(
            tokens=tuple(node.token for node in nodes),
            parents=tuple(node.path.node for node in nodes),
            origins=tuple(node.origin for node in nodes),
            probabilities=tuple(node.confidence for node in nodes),
            distributions=(None,) * len(nodes),
        )

    def rewind(self, n_tokens: int) -> None:
        """Forget all of the text but its first `n_tokens`; the corpora stay."""
        self._text.rewind(n_tokens)

    def _extend(self, candidate: _Candidate, *, node: int, probability: float) -> _Path:
        """Return the path that ends with a candidate."""
        path = candidate.path
        ending = [*path.ending, candidate.token]
        matches = [
            source.extend_match(match, ending)
            for source, match in zip(self._sources, path.matches, strict=True)
        ]
        return _Path(node, probability, ending, matches)

    def _candidates(self, path: _Path) -> list[_Candidate]:
        """Return the tokens to draft after a path, the likeliest first."""
        number = self._source_to_follow(path.matches)
        match = path.matches[number]
        if match is None:
            return []
        followers = self._sources[number].followers(match)
        length = min(match.length, self._max_match)
        origin = TEXT_ORIGIN if number == 0 else LOOKUP_ORIGIN
        candidates: list[_Candidate] = []
        for token in followers.ranked()[: self._n_children]:
            estimate = confidence(length, followers.counts[token], len(match.places))
            candidates.append(_Candidate(path, token, origin, estimate))
        return candidates

    def _source_to_follow(self, matches: Sequence[Match | None]) -> int:
        """Return the index of a source: 0, the text, unless a corpus's match is clearly longer."""
        own = matches[0]
        n_own = own.length if own is not None else 0
        n_least = max(n_own + _CLEARLY_LONGER, self._min_match)
        best = 0
        best_length = 0
        for number, match in enumerate(matches[1:], start=1):
            if match is None or min(match.length, self._max_match) < n_least:
                continue
            if match.length >= best_length:
                best = number
                best_length = match.length
        return best


class LoadedNgrams(LoadedDraft):
    """N-grams of the text itself, and of the texts to look up: files, and earlier answers."""

    is_free = True
    can_draw = False
    origin = TEXT_ORIGIN

    def __init__(self, setup: DraftSetup) -> None:
        """Load the texts to look up. Raise `UsageError`."""
        super().__init__(TEXT_ORIGIN, TEXT_ORIGIN)
        self.why_chains = setup.why_chains
        self._drafting = setup.drafting
        self._corpora: list[SuffixArray] = []
        #: Where finished texts are stored, if the options ask for that.
        self._earlier: EarlierTexts | None = None
        if setup.drafting.lookup_files or setup.drafting.lookup_store:
            self._load_texts(setup)

    def _load_texts(self, setup: DraftSetup) -> None:
        vocabulary = setup.target.vocabulary
        fingerprint = vocabulary.digest()
        files = setup.drafting.lookup_files
        if files:
            folder = setup.cache / "lookup" if setup.cache is not None else None
            self._corpora.append(load_corpus(files, vocabulary, fingerprint, folder))
        if setup.drafting.lookup_store and setup.cache is not None:
            self._earlier = EarlierTexts(setup.cache / "texts", fingerprint)
            self._corpora += self._earlier.arrays()

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text, if `--lookup-store` asks for that."""
        if self._earlier is not None:
            self._earlier.add(tokens)

    def drafter(self, request: DraftRequest) -> SuffixDrafter:
        """Return a drafter of chains, or of trees if the request allows branches."""
        n_children = 1
        n_deepest = None
        if request.branches and request.shape.is_fixed:
            n_children = max(request.shape.numbers)
            n_deepest = request.shape.n_levels
        elif request.branches:
            n_children = _MOST_CHILDREN
            n_deepest = request.n_deepest
        min_match, max_match = self._drafting.ngrams_of
        return SuffixDrafter(
            min_match,
            max_match,
            self._corpora,
            n_children=n_children,
            n_deepest=n_deepest,
        )


KIND = DraftKind(
    TEXT_ORIGIN,
    matches=lambda source: source == TEXT_ORIGIN,
    open=lambda _source, setup: LoadedNgrams(setup),
    suits=lambda _target: True,
)
