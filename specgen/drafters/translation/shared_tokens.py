"""The tokens that two vocabularies share, and sampling among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specgen.drafters.translation.string_translation import ControlTokens, Lexicon
from specgen.method.backend import Vocabulary
from specgen.method.draft import ROOT, Draft
from specgen.system.arrays import Logits, TokenArray
from specgen.text.sampling import Distribution, NoTokenAllowedError
from specgen.text.text_state import Shaper


class SharedTokens:
    """Token-level intersection of a target's and a draft's vocabulary (Timor et al.,
    arXiv:2502.05202, Algorithm 4): tokens that stand for the same bytes, and those that end
    a text or a turn in the same role. Each token has one counterpart at most.
    """

    def __init__(
        self,
        target: Vocabulary,
        target_lexicon: Lexicon,
        draft: Vocabulary,
        draft_lexicon: Lexicon,
        to_target: ControlTokens,
    ) -> None:
        of_draft = {
            token: counterpart
            for data, token in draft_lexicon.tokens.items()
            if (counterpart := target_lexicon.find(data)) is not None
        }
        taken = set(of_draft.values())
        for token, counterpart in _ends(target, draft, to_target):
            if counterpart not in taken:
                of_draft[token] = counterpart
                taken.add(counterpart)
        self.n_target = target.n_tokens
        #: The shared tokens' ids, int64[n_shared] both, in the order of the target's.
        pairs = sorted((counterpart, token) for token, counterpart in of_draft.items())
        self.target_ids: TokenArray = np.array([pair[0] for pair in pairs], np.int64)
        self.draft_ids: TokenArray = np.array([pair[1] for pair in pairs], np.int64)
        self._of_draft = np.full(draft.n_tokens, -1, np.int64)
        self._of_draft[self.draft_ids] = self.target_ids
        self._of_target = np.full(target.n_tokens, -1, np.int64)
        self._of_target[self.target_ids] = self.draft_ids

    def __len__(self) -> int:
        return len(self.target_ids)

    def target_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the target's ids of the draft's tokens, all of which are shared."""
        return [int(self._of_draft[token]) for token in tokens]

    def to_draft(self, distribution: Distribution) -> Distribution | None:
        """Return a distribution over the draft's tokens for one over the target's, restricted to the shared
        tokens; None if it has no shared token."""
        return over_counterparts(self._of_target, distribution)

    def translate(self, draft: Draft) -> Draft:
        """Translate a draft to the target's tokens. Branches end before tokens that are not shared.

        A shared token that was drawn from the whole vocabulary has the distribution that is
        restricted to the shared tokens: the fact that a shared token was drawn does not show which
        one.
        """
        kept: list[int] = []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if self._of_draft[token] >= 0 and (parent == ROOT or parent in kept):
                kept.append(node)
        draft = draft.only(kept)
        sources = (
            source and over_counterparts(self._of_draft, source) for source in draft.distributions
        )
        return replace(
            draft, tokens=tuple(self.target_tokens(draft.tokens)), distributions=tuple(sources)
        )


class SharedShaper:
    """Applies the target's samplers to the draft's logits of the shared tokens.

    The samplers see a row of the target's length, and the text in the target's tokens. So penalties,
    biases and grammars mean the same in the draft as for the target.
    """

    def __init__(self, shared: SharedTokens, shaper: Shaper) -> None:
        self._shared = shared
        self._shaper = shaper
        self._row = np.full(shared.n_target, -np.inf, np.float32)
        #: The target's tokens that another drafter put between the text and this draft.
        self.before: Sequence[int] = ()

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        """Return the distribution over the draft's tokens after `path`, whose tokens are shared, from the
        draft's logits, float32[n_draft_vocab]. Raise `NoTokenAllowedError` if no token is left."""
        shared = self._shared
        # The samplers leave the row as they find it, so the other tokens stay impossible.
        self._row[shared.target_ids] = logits[shared.draft_ids]
        found = self._shaper.distribution(self._row, self._path(path))
        renamed = shared.to_draft(found)
        if renamed is None:  # a grammar forces a token that is not shared
            raise NoTokenAllowedError
        return renamed

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float:
        return self._shaper.top_probability(logits, self._path(path))

    def _path(self, path: Sequence[int]) -> list[int]:
        """Return all tokens after the text, in the target's tokens; `path` is in the draft's."""
        return [*self.before, *self._shared.target_tokens(path)]


def _ends(target: Vocabulary, draft: Vocabulary, to_target: ControlTokens) -> list[tuple[int, int]]:
    """Return the draft's end tokens with their counterparts, the surest pairs first: those with the same
    name, then those with the same role."""
    own, theirs = draft.special_tokens(), target.special_tokens()

    def doubt(pair: tuple[int, int]) -> int:
        token, counterpart = pair
        if draft.token_text(token) == target.token_text(counterpart):
            return 0
        has_role = any((own[role], theirs[role]) == pair for role in ("eos", "eot"))
        return 1 if has_role else 2

    pairs = [(token, to_target.find(token)) for token in draft.end_tokens()]
    return sorted(((a, b) for a, b in pairs if b is not None), key=doubt)


def over_counterparts(counterparts: TokenArray, source: Distribution) -> Distribution | None:
    """Return the distribution of the counterparts of `source`'s tokens, given that there is one; None if no
    token has one. `counterparts` is int64[n_vocab], by token; -1 is none."""
    token_ids, probs = counterparts[source.token_ids], source.probs
    kept = np.flatnonzero((token_ids >= 0) & (probs > 0.0))
    if not len(kept):
        return None
    kept = kept[token_ids[kept].argsort()]
    probs = probs[kept]
    return Distribution(
        token_ids[kept], probs if len(kept) == len(source.probs) else probs / probs.sum()
    )
