"""From a row of logits to the distribution of the next token."""

from __future__ import annotations

from collections.abc import Sequence

from specgen.method.text_state import TextState
from specgen.system.arrays import Logits, best
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.distribution import Distribution
from specgen.text.sampling.raw_probabilities import likeliest


class SamplingPipeline:
    """Applies samplers and grammar to a row of logits, to get the distribution of the next token.

    A row, float32[n_vocab], has the logits after the text and the `drafted` tokens that follow it.
    """

    def __init__(self, sampler: Sampler, state: TextState) -> None:
        self._sampler = sampler
        self._state = state
        self._depends_on_text = sampler.n_history != 0 or state.has_grammar

    def distribution(
        self,
        logits: Logits,
        drafted: Sequence[int] = (),
    ) -> Distribution:
        """Return the distribution of the token after the text and `drafted`.

        Raises:
            BackendError: If the grammar allows no token, or a logit is not a number.
        """
        if not self._depends_on_text:
            return self._sampler.distribution(logits)
        n_history = self._sampler.n_history
        grammar = self._state.grammar(drafted)
        if grammar is None:
            return self._sampler.distribution(logits, self._state.history(drafted, n_history))
        forced = grammar.forced()
        if forced is not None:
            # Where several end tokens are allowed, drafter and verifier must choose the same one.
            return Distribution.certain(forced)
        return self._sampler.distribution(
            grammar.adjust_logits(logits),
            self._state.history(drafted, n_history),
            None if grammar.is_free else grammar.allows,
        )

    def likeliest(
        self,
        logits: Logits,
        drafted: Sequence[int],
        n: int,
    ) -> tuple[list[int], list[float]]:
        """Return the n most likely tokens after the text and `drafted`, and their probabilities.

        The probabilities are those at temperature 1: they tell how sure the model is.
        """
        grammar = self._state.grammar(drafted) if self._state.has_grammar else None
        if n <= self._sampler.n_likeliest and (grammar is None or grammar.is_free):
            return likeliest(logits, n)
        source = self.distribution(logits, drafted)
        order = best(source.probs, n)
        # The samplers choose the tokens. Their probabilities are rescaled, so that the first one
        # has the largest probability of the row.
        scale = self.top_probability(logits, drafted) / source.probs[order[0]]
        return source.token_ids[order].tolist(), (source.probs[order] * scale).tolist()

    def top_probability(
        self,
        logits: Logits,
        drafted: Sequence[int] = (),
    ) -> float:
        """Return the largest probability of any token at temperature 1, without the samplers.

        If the grammar forces the next token, the result is 1.
        """
        if self._state.forced(drafted) is not None:
            return 1.0
        _, (top,) = likeliest(logits, 1)
        return top
