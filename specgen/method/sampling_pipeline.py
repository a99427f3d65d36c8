"""From a row of logits to the distribution of the next token."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.method.text_state import TextState
from specgen.system.arrays import Logits, best
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.raw_probabilities import likeliest


class SamplingPipeline:
    """Turns a row of logits into the distribution of the next token, by the samplers and the
    grammar.
    """

    def __init__(self, sampler: Sampler, state: TextState) -> None:
        self._sampler = sampler
        self._state = state
        self._looks_back = sampler.n_history != 0 or state.has_grammar

    def distribution(self, logits: Logits, path: Sequence[int] = ()) -> Distribution:
        """Return the distribution after the text and `path`, float32[n_vocab]. Raise
        `BackendError`.
        """
        if not self._looks_back:
            return self._sampler.distribution(logits)
        grammar = self._state.grammar(path)
        forced = grammar.forced() if grammar is not None else None
        if forced is not None:
            # The mask alone may allow several end tokens: drafter and verifier take the same one.
            return Distribution.certain(forced)
        return self._sampler.distribution(
            logits if grammar is None else grammar.adjust_logits(logits),
            self._state.history(path, self._sampler.n_history),
            None if grammar is None or grammar.is_free else grammar.allows,
        )

    def likeliest(
        self, logits: Logits, path: Sequence[int], n: int
    ) -> tuple[list[int], list[float]]:
        """Return the n likeliest tokens after the text and `path`, and their probabilities."""
        grammar = self._state.grammar(path) if self._state.has_grammar else None
        if n <= self._sampler.n_likeliest and (grammar is None or grammar.is_free):
            return likeliest(logits, n)
        source = self.distribution(logits, path)
        order = best(source.probs, n)
        scale = self.top_probability(logits, path) / source.probs[order[0]]
        return source.token_ids[order].tolist(), (source.probs[order] * scale).tolist()

    def top_probability(self, logits: Logits, path: Sequence[int] = ()) -> float:
        """Return a token's largest probability: 1 if the grammar forces it, else that at
        temperature 1.
        """
        return 1.0 if self._state.forced(path) is not None else likeliest(logits, 1)[1][0]
