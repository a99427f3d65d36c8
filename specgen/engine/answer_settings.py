"""How the tokens of one answer are chosen and drafted, and when it ends, made ready for a target."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specgen.backend.llama import LlamaGrammar, LlamaModel
from specgen.constrain.grammar import GrammarState
from specgen.constrain.llguidance_grammar import LlguidanceGrammar
from specgen.errors import UsageError
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions, VerifierName
from specgen.sampling import DryBreakers, Sampler


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What one answer asks of samplers, grammar and drafts. Answers of the same settings share one
    object; it holds nothing that changes."""

    #: As they were asked for.
    sampling: SamplerOptions
    generation: GenerationOptions
    drafting: DraftOptions
    #: The samplers that are in use: `sampling`, with the biases that `generation` adds.
    in_use: SamplerOptions
    breakers: DryBreakers | None
    sampler: Sampler
    #: The grammar at the beginning of an answer.
    grammar: GrammarState | None

    @staticmethod
    def of(
        model: LlamaModel,
        sampling: SamplerOptions,
        generation: GenerationOptions,
        drafting: DraftOptions,
    ) -> AnswerSettings:
        """Build the samplers and the grammar. Raises `UsageError` if a token of a bias does not
        exist, or the grammar is not one."""
        vocabulary, in_use = model.vocabulary, sampling
        for token, _ in sampling.logit_bias:
            if not 0 <= token < vocabulary.n_tokens:
                raise UsageError(
                    f"--logit-bias: there is no token {token}: "
                    f"{model.name} has {vocabulary.n_tokens} tokens"
                )
        if generation.ignore_eos:
            never = tuple((token, -math.inf) for token in vocabulary.end_tokens())
            in_use = replace(in_use, logit_bias=in_use.logit_bias + never)
        breakers = None
        if in_use.dry_multiplier > 0.0:
            breakers = DryBreakers.of(vocabulary, in_use.dry_breakers)
        grammar = None
        if generation.grammar is not None:
            shown = vocabulary.showing(generation.shown_controls)
            if generation.grammar.form == "gbnf":
                grammar = LlamaGrammar(shown, generation.grammar.text).start
            else:
                grammar = LlguidanceGrammar(shown, generation.grammar).start
        return AnswerSettings(
            sampling, generation, drafting, in_use, breakers, Sampler(in_use, breakers), grammar
        )

    def changed(
        self,
        model: LlamaModel,
        sampling: SamplerOptions | None,
        generation: GenerationOptions | None,
        *,
        n_drafted_max: int | None,
        verifier: VerifierName | None,
    ) -> AnswerSettings:
        """The settings of an answer that asks for something else; what is None stays. Samplers and the
        grammar are built anew only where they change. Raises `UsageError` as `of` does, and if a number
        of drafted tokens is given where drafts have a fixed shape."""
        sampling, generation = sampling or self.sampling, generation or self.generation
        drafting = self.drafting
        if verifier is not None:
            drafting = replace(drafting, verifier=verifier)
        if n_drafted_max is not None:
            if drafting.tree.is_fixed:
                raise UsageError(
                    f"{n_drafted_max} drafted tokens: drafts have the fixed shape {drafting.tree}"
                )
            drafting = replace(drafting, max_tokens=min(n_drafted_max, drafting.n_max))
        as_before = (self.sampling, self.generation.grammar, self.generation.ignore_eos)
        is_as_before = (sampling, generation.grammar, generation.ignore_eos) == as_before
        if is_as_before and generation.shown_controls == self.generation.shown_controls:
            return replace(self, generation=generation, drafting=drafting)
        return AnswerSettings.of(model, sampling, generation, drafting)

    def most_likely(self) -> AnswerSettings:
        """The same samplers without chance: those of what drafts for a draft model."""
        in_use = replace(self.in_use, temperature=0.0, dynatemp_range=0.0)
        return replace(self, in_use=in_use, sampler=Sampler(in_use, self.breakers))

    @property
    def verifier(self) -> VerifierName:
        """How drafts are judged. A seed that was asked for gives the same text every time, also
        where the lengths of drafts depend on how long decodes take: drafts are then matched."""
        is_timed = self.drafting.is_by_cost and self.sampling.seed >= 0
        return "match" if self.drafting.verifier == "auto" and is_timed else self.drafting.verifier

    @property
    def kind_of_chances(self) -> str:
        """What acceptance rates depend on, besides the models, in words."""
        return f"temp {self.sampling.temperature:.1f}"
