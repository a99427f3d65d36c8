"""The draft's text in the target's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from specgen.arrays import Logits
from specgen.backend.base import Vocabulary
from specgen.core.draft import ROOT, Draft
from specgen.core.text_state import Shaper, TextState
from specgen.drafters.translation.control_tokens import ControlTokens
from specgen.drafters.translation.lexicon import Lexicon
from specgen.drafters.translation.spelling import Speller
from specgen.drafters.translation.unicode import n_unfinished
from specgen.sampling import Distribution, Sampler, top_probability

#: A token, and the draft's probability for it, if there is one.
_Spelled = tuple[int, float | None]


class StringTranslation:
    """String-level translation (Timor et al., arXiv:2502.05202, Algorithm 2): spells the bytes that
    the draft proposes in the target's tokens, as the target's tokenizer would after the text so
    far.

    The result has no distributions: a verifier has to treat its tokens as chosen without chance,
    and judges them by matching.
    """

    def __init__(
        self, target: Vocabulary, draft: Vocabulary, to_target: ControlTokens, speller: Speller
    ) -> None:
        self._target = target
        self._draft = draft
        self._to_target = to_target
        self._speller = speller

    def translate(self, draft: Draft, before: bytes, held_back: bytes) -> Draft:
        """`draft` in the target's tokens. `before` is the end of the text so far; `held_back` is the
        end of `before`, and the draft's tokens begin with it."""
        tokens: list[int] = []
        parents: list[int] = []
        origins: list[str] = []
        probabilities: list[float | None] = []
        places: dict[tuple[int, int], int] = {}
        for leaf in draft.leaves():
            node = ROOT
            for token, probability in self._spell(draft, draft.path(leaf), before, held_back):
                if (node, token) not in places:
                    places[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    origins.append(draft.origins[leaf])
                    probabilities.append(probability)
                node = places[node, token]
        n = len(tokens)
        return Draft(
            tuple(tokens), tuple(parents), tuple(origins), tuple(probabilities), (None,) * n
        )

    def _spell(
        self, draft: Draft, path: Sequence[int], before: bytes, held_back: bytes
    ) -> Iterator[_Spelled]:
        """One branch of the draft as tokens of the target."""
        data = b""
        end: _Spelled | None = None
        starts: list[tuple[int, float | None]] = []
        for node in path:
            token, probability = draft.tokens[node], draft.probabilities[node]
            piece = self._draft.token_bytes(token)
            if not piece:
                counterpart = self._to_target.find(token) if self._draft.is_end(token) else None
                end = None if counterpart is None else (counterpart, probability)
                break
            starts.append((len(data) - len(held_back), probability))
            data += piece
        if not data.startswith(held_back):
            return
        data = data[len(held_back) :]
        # A part of a character is left out, since the whole character may be spelled differently;
        # unless the text itself has broken off in the middle of it.
        n_open = n_unfinished(before + data)
        if n_open <= len(data):
            data = data[: len(data) - n_open]
        n_spelled = 0
        spelling = self._speller.spell_after(before, data)
        for token, token_end in zip(spelling.tokens, spelling.ends, strict=True):
            if token_end - n_spelled != len(self._target.token_bytes(token)):
                return  # bytes in between have no token
            yield token, _product(starts, n_spelled, token_end)
            n_spelled = token_end
        if end is not None and n_spelled == len(data) and not n_open:
            yield end


def _product(starts: Sequence[tuple[int, float | None]], start: int, end: int) -> float | None:
    """The product of the probabilities of the draft's tokens that begin between two places; 1 if
    none does, None if one of the probabilities is unknown. Tokens that begin before the text's end,
    at negative places, count as beginning at 0."""
    found = [
        probability
        for offset, probability in starts
        if start <= max(0, offset) < end and (offset >= start or start == 0)
    ]
    known = [probability for probability in found if probability is not None]
    return math.prod(known) if len(known) == len(found) else None


class BeginningShaper(Shaper):
    """The draft's most likely text that begins with given bytes.

    The target's text may end in the middle of one of the draft's tokens. Without this shaper the
    draft would take the end of the text for the end of the token. For example, a model may spell
    a line break and the indentation of the next line as one token; after a line break that is a
    token by itself, it does not expect an indented line.
    """

    def __init__(self, sampler: Sampler, lexicon: Lexicon) -> None:
        super().__init__(sampler, TextState(()))
        self._lexicon = lexicon
        #: The bytes that the draft must begin with.
        self.beginning = b""

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        if path or not self.beginning:
            return super().distribution(logits, path)
        token_ids = self._lexicon.beginning_with(self.beginning)
        return Distribution.certain(int(token_ids[logits[token_ids].argmax()]))

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float:
        if path or not self.beginning:
            return super().top_probability(logits, path)
        return top_probability(logits[self._lexicon.beginning_with(self.beginning)])
