"""Prompt lookup: draft without a model, by copying what followed the last tokens before.

Earlier occurrences of the last tokens are searched for in the text itself, in files and in earlier
answers (Saxena, "Prompt Lookup Decoding", 2023; LLMA, Yang et al., arXiv:2304.04487; counting what
followed: SAM Decoding, Hu et al., arXiv:2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter
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
from specgen.drafters.ngram_counts import Evidence, NgramCounts, Place, TextChances
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
#: The maximum number of continuations of one position, in a tree whose shape is not fixed.
_MAX_CHILDREN = 3
#: In such a tree, paths that are less likely are hardly ever worth a row of the target's batch.
_MIN_PROBABILITY = 0.04


@dataclass(frozen=True, slots=True)
class _Source:
    """A text, or several, in which matches are searched for."""

    #: Finds matches in it.
    index: SuffixIndex
    #: Where its continuations come from; for the text itself, that depends on the position.
    place: Place
    #: `TEXT_ORIGIN` or `LOOKUP_ORIGIN`.
    origin: str


class _Continuation(NamedTuple):
    """A token that followed an earlier occurrence of the last tokens."""

    #: The token.
    token: int
    #: `TEXT_ORIGIN` or `LOOKUP_ORIGIN`.
    origin: str
    #: What is known about it, from which its probability follows.
    evidence: Evidence


class _Path(NamedTuple):
    """A path from the root of the draft to one of its nodes."""

    #: The last node, or `ROOT`.
    node: int
    #: The number of nodes on the path.
    n_nodes: int
    #: The probability that all tokens of the path are accepted.
    probability: float
    #: The last tokens of the text, then the tokens of the path.
    ending: list[int]
    #: The longest match of `ending` in each source; None if there is none.
    matches: list[Match | None]


class _Candidate(NamedTuple):
    """A token that may follow a path."""

    #: The path that it may follow.
    path: _Path
    #: The token.
    token: int
    #: `TEXT_ORIGIN` or `LOOKUP_ORIGIN`.
    origin: str
    #: The probability that the token comes next, if the path is accepted.
    chance: float


class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrences of the text's last tokens.

    With `n_children` above 1, a draft is a tree of the likeliest paths. The drafter does not ask
    the plan where to stop: a draft takes microseconds, and the caller cuts it by its probabilities.
    These are counted (`ngram_counts.py`): with every token of the answer, the drafter learns which
    continuations came true.

    Args:
        min_match: Nothing is drafted if fewer tokens match.
        max_match: A longer match counts as one of this length.
        files: Other texts to search.
        earlier: Earlier texts to search.
        phrases: Phrases to search.
        n_prompt: The number of tokens before the answer.
        counts: What was counted in all texts; the drafter adds to it.
        n_children: The maximum number of continuations of one position.
        n_levels_max: The maximum number of levels; None if only the number of tokens is limited.
        min_probability: Paths that are less likely are not drafted.
    """

    name = TEXT_ORIGIN

    def __init__(
        self,
        min_match: int,
        max_match: int,
        *,
        files: Sequence[SuffixIndex] = (),
        earlier: Sequence[SuffixIndex] = (),
        phrases: SuffixIndex | None = None,
        n_prompt: int = 0,
        counts: NgramCounts | None = None,
        n_children: int = 1,
        n_levels_max: int | None = None,
        min_probability: float = 0.0,
    ) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._n_prompt = n_prompt
        self._n_children = n_children
        self._n_levels_max = n_levels_max
        self._min_probability = min_probability
        self._chances = TextChances(counts if counts is not None else NgramCounts())
        self._text = TextIndex(min_match)
        #: Where matches are searched for.
        self._sources = [
            _Source(self._text, "answer", TEXT_ORIGIN),
            *(_Source(index, "earlier", LOOKUP_ORIGIN) for index in earlier),
            *(_Source(index, "file", LOOKUP_ORIGIN) for index in files),
        ]
        if phrases is not None:
            self._sources.append(_Source(phrases, "phrase", LOOKUP_ORIGIN))
        #: The longest match of the text's last tokens in each source.
        self._matches: list[Match | None] = [None] * len(self._sources)

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
        self._follow(context)
        n_levels_max = min(plan.n_max, self._n_levels_max or plan.n_max)
        path = _Path(
            node=ROOT,
            n_nodes=0,
            probability=1.0,
            ending=list(context[-MAX_MATCH:]),
            matches=self._matches,
        )
        nodes: list[_Candidate] = []
        # (negative probability of the path with the candidate, tie-breaker, candidate). A heap pops
        # its smallest item first: the likeliest candidate, among equals the first one pushed.
        heap: list[tuple[float, int, _Candidate]] = []
        tie_breakers = count()
        while len(nodes) < plan.n_max:
            if path.n_nodes < n_levels_max:
                for candidate in self._candidates(path):
                    probability = path.probability * candidate.chance
                    if probability >= self._min_probability:
                        heappush(heap, (-probability, next(tie_breakers), candidate))
            if not heap:
                break
            key, _, candidate = heappop(heap)
            path = self._extend_path(candidate, node=len(nodes), probability=-key)
            nodes.append(candidate)
        if not nodes:
            return NO_DRAFT
        return Draft(
            tokens=tuple(node.token for node in nodes),
            parents=tuple(node.path.node for node in nodes),
            origins=tuple(node.origin for node in nodes),
            probabilities=tuple(node.chance for node in nodes),
            distributions=(None,) * len(nodes),
            is_calibrated=True,
        )

    def rewind(self, n_tokens: int) -> None:
        """Forget all but the first `n_tokens` of the text. What was counted stays."""
        self._text.rewind(n_tokens)
        ending = self._text.last(MAX_MATCH)
        self._matches = [source.index.longest(ending) for source in self._sources]

    def _follow(self, context: Sequence[int]) -> None:
        """Add the new tokens of a text, and learn which of them the matches predicted.

        The text that the drafter begins with (the prompt) is only added.
        """
        if not len(self._text):
            self._text.follow(context)
            ending = context[-MAX_MATCH:]
            self._matches = [source.index.longest(ending) for source in self._sources]
            return
        for end in range(len(self._text) + 1, len(context) + 1):
            token = context[end - 1]
            for continuation in self._continuations(self._matches):
                came_next = continuation.token == token
                self._chances.learn(continuation.evidence, came_next=came_next)
            self._text.add(token)
            ending = context[max(0, end - MAX_MATCH) : end]
            self._matches = self._extend_matches(self._matches, ending)

    def _extend_path(
        self,
        candidate: _Candidate,
        *,
        node: int,
        probability: float,
    ) -> _Path:
        """Return the path that ends with a candidate, which becomes the node `node`."""
        path = candidate.path
        ending = [*path.ending, candidate.token]
        return _Path(
            node=node,
            n_nodes=path.n_nodes + 1,
            probability=probability,
            ending=ending,
            matches=self._extend_matches(path.matches, ending),
        )

    def _extend_matches(
        self,
        matches: Sequence[Match | None],
        ending: Sequence[int],
    ) -> list[Match | None]:
        """Return the longest match of `ending` in each source.

        Args:
            matches: The longest matches of `ending` without its last token.
            ending: The last tokens.
        """
        return [
            source.index.extend_match(match, ending)
            for source, match in zip(self._sources, matches, strict=True)
        ]

    def _candidates(self, path: _Path) -> list[_Candidate]:
        """Return the tokens to draft after a path, the likeliest first."""
        likeliest: dict[int, _Candidate] = {}
        for token, origin, evidence in self._continuations(path.matches):
            chance = self._chances.chance(evidence)
            known = likeliest.get(token)
            if known is None or chance > known.chance:
                likeliest[token] = _Candidate(path, token, origin, chance)
        candidates = sorted(likeliest.values(), key=attrgetter("chance"), reverse=True)
        return candidates[: self._n_children]

    def _continuations(self, matches: Sequence[Match | None]) -> Iterator[_Continuation]:
        """Yield the most promising tokens that follow the matches in each source.

        If several sources have the same token, it comes several times.
        """
        for source, match in zip(self._sources, matches, strict=True):
            if match is None:
                continue
            length = min(match.length, self._max_match)
            if length < self._min_match:
                continue
            followers = source.index.followers(match)
            n_wanted = max(_MAX_CHILDREN, self._n_children)
            for token in followers.ranked()[:n_wanted]:
                place = source.place
                if place == "answer" and followers.latest[token] < self._n_prompt:
                    place = "prompt"
                n_followed = followers.counts[token]
                evidence = Evidence.of(place, length, n_followed, len(match.places))
                yield _Continuation(token, source.origin, evidence)


class LoadedNgrams(LoadedDraft):
    """N-grams of the text itself, and of other texts to search: files, and earlier answers."""

    is_free = True
    can_sample = False
    origin = TEXT_ORIGIN

    def __init__(self, setup: DraftSetup) -> None:
        """Load the texts to search.

        Raises:
            UsageError: If a file of `--lookup-file` cannot be used.
        """
        super().__init__(TEXT_ORIGIN, TEXT_ORIGIN)
        self.why_chains = setup.why_chains
        self._drafting = setup.drafting
        #: The texts of `--lookup-file`.
        self._files: list[SuffixArray] = []
        #: The texts of earlier answers.
        self._earlier_texts: tuple[SuffixArray, ...] = ()
        #: Where finished texts are stored, if the options ask for that.
        self._store: EarlierTexts | None = None
        if setup.drafting.lookup_files or setup.drafting.lookup_store:
            self._load_texts(setup)

    def _load_texts(self, setup: DraftSetup) -> None:
        """Load the files and the earlier answers that the options name."""
        vocabulary = setup.target.vocabulary
        fingerprint = vocabulary.digest()
        files = setup.drafting.lookup_files
        if files:
            folder = setup.cache / "lookup" if setup.cache is not None else None
            self._files.append(load_corpus(files, vocabulary, fingerprint, folder))
        if setup.drafting.lookup_store and setup.cache is not None:
            self._store = EarlierTexts(setup.cache / "texts", fingerprint)
            self._earlier_texts = self._store.arrays()

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Store a finished text, if `--lookup-store` asks for that."""
        if self._store is not None:
            self._store.add(tokens)

    def drafter(self, request: DraftRequest) -> SuffixDrafter:
        """Return a drafter that drafts chains, or trees if the request allows branches."""
        n_children = 1
        n_levels_max = None
        min_probability = 0.0
        if request.can_branch and request.shape.is_fixed:
            n_children = max(request.shape.numbers)
            n_levels_max = request.shape.n_levels
        elif request.can_branch:
            n_children = _MAX_CHILDREN
            n_levels_max = request.n_levels_max
            min_probability = _MIN_PROBABILITY
        phrases = request.phrases.index if request.phrases is not None else None
        min_match, max_match = self._drafting.ngram_lengths
        return SuffixDrafter(
            min_match,
            max_match,
            files=self._files,
            earlier=self._earlier_texts,
            phrases=phrases,
            n_prompt=len(request.prompt),
            counts=request.ngram_counts,
            n_children=n_children,
            n_levels_max=n_levels_max,
            min_probability=min_probability,
        )


KIND = DraftKind(
    TEXT_ORIGIN,
    matches=lambda source: source == TEXT_ORIGIN,
    open=lambda _source, setup: LoadedNgrams(setup),
    suits=lambda _target: True,
)
