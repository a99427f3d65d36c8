"""Prompt lookup: draft without a model, by copying what followed the last tokens before.

Earlier occurrences of the last tokens are searched for in the text itself, in files and in earlier
answers (Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al., arXiv:2304.04487; counting what
followed: SAM Decoding, Hu et al., arXiv:2411.10666).
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
#: Another text is preferred to the text itself if its match is longer by at least this many tokens.
_CLEARLY_LONGER = 2
#: Each token of the match adds this much to the odds, times the number of agreeing occurrences.
_ODDS_PER_TOKEN = 0.35
#: Each occurrence that another token followed adds this much to the divisor of the odds.
_DISSENT = 2.0
#: The maximum number of continuations of one position, in a tree whose shape is not fixed.
_MAX_CHILDREN = 3


def confidence(
    length: int,
    n_agreeing: int,
    n_occurrences: int,
) -> float:
    """Estimate the probability that a token comes next.

    Args:
        length: The length of the match: how many of the last tokens occurred before.
        n_agreeing: The number of occurrences that were followed by this token.
        n_occurrences: The number of all occurrences.
    """
    dissent = 1.0 + _DISSENT * (n_occurrences - n_agreeing)
    odds = _ODDS_PER_TOKEN * length * n_agreeing / dissent
    return odds / (1.0 + odds)


class _Path(NamedTuple):
    """A path from the root of the draft to one of its nodes."""

    #: The last node, or `ROOT`.
    node: int
    #: The number of nodes on the path.
    depth: int
    #: The estimated probability that all tokens of the path are accepted.
    probability: float
    #: The last tokens of the text, then the tokens of the path.
    ending: list[int]
    #: The longest match of `ending` in each source; None if there is none.
    matches: list[Match | None]


class _Candidate(NamedTuple):
    """A token that may follow a path."""

    path: _Path
    token: int
    #: `TEXT_ORIGIN` or `LOOKUP_ORIGIN`.
    origin: str
    #: The estimated probability that the token comes next, if the path is accepted.
    confidence: float


class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrences of the text's last tokens.

    With `n_children` above 1, a draft is a tree of the likeliest paths. The drafter does not ask
    the plan where to stop: a draft takes microseconds, and the caller cuts it by its probabilities.

    Args:
        min_match: Nothing is drafted if fewer tokens match.
        max_match: A longer match counts as one of this length.
        corpora: Other texts to search. They are used if their match is clearly longer than that in
            the text itself. If several match equally well, the last of them is used.
        n_children: The maximum number of continuations of one position.
        n_deepest: The maximum number of levels; None if only the number of tokens is limited.
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
        """Draft the likeliest paths by best-first search.

        Each step adds the likeliest candidate after any path as a node, and then finds the
        candidates after that node. `n_drafted` does not matter here: tokens that another drafter
        proposed are continued like those of the text. `rewind` forgets those that are rejected.
        """
        yield from ()  # nothing is decoded
        self._text.follow(context)
        max_depth = min(plan.n_max, self._n_deepest or plan.n_max)
        ending = list(context[-MAX_MATCH:])
        path = _Path(
            node=ROOT,
            depth=0,
            probability=1.0,
            ending=ending,
            matches=[source.longest(ending) for source in self._sources],
        )
        nodes: list[_Candidate] = []
        # (negative probability of the path with the candidate, tie-breaker, candidate). A heap pops
        # its smallest item first: the likeliest candidate, among equals the first one pushed.
        heap: list[tuple[float, int, _Candidate]] = []
        tie_breakers = count()
        while len(nodes) < plan.n_max:
            if path.depth < max_depth:
                for candidate in self._candidates(path):
                    key = -path.probability * candidate.confidence
                    heappush(heap, (key, next(tie_breakers), candidate))
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
        """Forget all but the first `n_tokens` of the text. The other texts stay."""
        self._text.rewind(n_tokens)

    def _extend(
        self,
        candidate: _Candidate,
        *,
        node: int,
        probability: float,
    ) -> _Path:
        """Return the path that ends with a candidate, which becomes the node `node`."""
        path = candidate.path
        ending = [*path.ending, candidate.token]
        matches = [
            source.extend_match(match, ending)
            for source, match in zip(self._sources, path.matches, strict=True)
        ]
        return _Path(
            node,
            path.depth + 1,
            probability,
            ending,
            matches,
        )

    def _candidates(self, path: _Path) -> list[_Candidate]:
        """Return the tokens to draft after a path, the likeliest first."""
        index = self._best_source(path.matches)
        match = path.matches[index]
        if match is None:
            return []
        followers = self._sources[index].followers(match)
        length = min(match.length, self._max_match)
        origin = TEXT_ORIGIN if index == 0 else LOOKUP_ORIGIN
        candidates: list[_Candidate] = []
        for token in followers.ranked()[: self._n_children]:
            estimate = confidence(length, followers.counts[token], len(match.places))
            candidates.append(_Candidate(path, token, origin, estimate))
        return candidates

    def _best_source(self, matches: Sequence[Match | None]) -> int:
        """Return the index of the source to draft from.

        It is 0, the text itself, unless the match in another text is clearly longer. If several
        other texts have the longest match, it is the last of them.

        Args:
            matches: The longest match in each source.
        """
        text_match = matches[0]
        text_length = text_match.length if text_match is not None else 0
        min_length = max(text_length + _CLEARLY_LONGER, self._min_match)
        best = 0
        best_length = 0
        for index, match in enumerate(matches[1:], start=1):
            if match is None or min(match.length, self._max_match) < min_length:
                continue
            if match.length >= best_length:
                best = index
                best_length = match.length
        return best


class LoadedNgrams(LoadedDraft):
    """N-grams of the text itself, and of other texts to search: files, and earlier answers."""

    is_free = True
    can_draw = False
    origin = TEXT_ORIGIN

    def __init__(self, setup: DraftSetup) -> None:
        """Load the texts to search.

        Raises:
            UsageError: If a file of `--lookup-file` cannot be used.
        """
        super().__init__(TEXT_ORIGIN, TEXT_ORIGIN)
        self.why_chains = setup.why_chains
        self._drafting = setup.drafting
        self._corpora: list[SuffixArray] = []
        #: Where finished texts are stored, if the options ask for that.
        self._earlier: EarlierTexts | None = None
        if setup.drafting.lookup_files or setup.drafting.lookup_store:
            self._load_texts(setup)

    def _load_texts(self, setup: DraftSetup) -> None:
        """Load the files and the earlier answers that the options name."""
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
        """Return a drafter that drafts chains, or trees if the request allows branches."""
        n_children = 1
        n_deepest = None
        if request.branches and request.shape.is_fixed:
            n_children = max(request.shape.numbers)
            n_deepest = request.shape.n_levels
        elif request.branches:
            n_children = _MAX_CHILDREN
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
