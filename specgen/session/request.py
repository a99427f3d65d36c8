"""A request for one answer, and its settings: samplers, grammar, drafting, and its end."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from specgen.drafters.interface import CacheSlot
from specgen.errors import SpecgenError, UsageError
from specgen.events import Event, FinishedEvent
from specgen.llama import LlamaModel
from specgen.method.answer_state import AnswerState
from specgen.options import DraftOptions, GenerationOptions, SamplerOptions, VerifierName
from specgen.session.prompts import Prompt
from specgen.session.prompts.thoughts import THOUGHT_CONTROLS, split_thought
from specgen.system.machine import LoadOfOthers
from specgen.text.grammar.base import GrammarState
from specgen.text.grammar.free_text import ThoughtMarks, grammar_start
from specgen.text.sampling.chain import Sampler
from specgen.text.sampling.dry import DryBreakers


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """A request's options, and what was built of them."""

    #: As the user gave them; those of the `sampler` may have more biases.
    sampling: SamplerOptions
    generation: GenerationOptions
    drafting: DraftOptions
    sampler: Sampler
    #: The state of the grammar before the answer.
    grammar: GrammarState | None
    #: The marks of the thoughts after which the grammar holds.
    thoughts: ThoughtMarks | None = None

    @staticmethod
    def of(
        model: LlamaModel,
        sampling: SamplerOptions,
        generation: GenerationOptions,
        drafting: DraftOptions,
        thoughts: ThoughtMarks | None = None,
    ) -> RequestSettings:
        """Build the samplers and the grammar, which holds after the answer's `thoughts`.

        Raises:
            UsageError: An option is not valid for this model.
        """
        sampler = _sampler(model, sampling, ignore_eos=generation.ignore_eos)
        grammar = None
        wanted = generation.grammar
        if wanted is not None:
            marks = THOUGHT_CONTROLS if thoughts else ()
            controls = tuple(dict.fromkeys((*generation.shown_controls, *marks)))
            generation = replace(generation, shown_controls=controls)
            grammar = grammar_start(wanted, model.vocabulary.showing(controls), thoughts)
        return RequestSettings(sampling, generation, drafting, sampler, grammar, thoughts)

    def changed(
        self,
        model: LlamaModel,
        sampling: SamplerOptions | None = None,
        generation: GenerationOptions | None = None,
        *,
        n_drafted_max: int | None = None,
        verifier: VerifierName | None = None,
        thoughts: ThoughtMarks | None = None,
    ) -> RequestSettings:
        """Return these settings with some options changed; only what changes is built again.

        Args:
            model: The target.
            sampling: How tokens are chosen; None as here.
            generation: When the answer ends; None as here.
            n_drafted_max: The most tokens to draft in a round; None as here.
            verifier: How drafts are verified; None as here.
            thoughts: The marks of the thoughts that the answer may have.

        Raises:
            UsageError: An option is not valid.
        """
        sampling = sampling or self.sampling
        generation = generation or self.generation
        drafting = self._changed_drafting(n_drafted_max, verifier)
        if thoughts is not None:
            grammar = generation.grammar
            if grammar is None or thoughts.begin in grammar.text:
                thoughts = None  # they are free, or part of the grammar
        before = self.generation
        is_built = (
            sampling == self.sampling
            and thoughts == self.thoughts
            and generation.grammar == before.grammar
            and generation.ignore_eos == before.ignore_eos
            and generation.shown_controls == before.shown_controls
        )
        if is_built:
            return replace(self, generation=generation, drafting=drafting)
        return RequestSettings.of(model, sampling, generation, drafting, thoughts)

    @property
    def verifier(self) -> VerifierName:
        """How drafts are verified.

        With ``auto``, drafts are matched if the user gave a seed and draft lengths depend on
        measured times: the seed then gives the same text every time.
        """
        is_timed = self.drafting.is_by_cost and self.sampling.seed >= 0
        if is_timed and self.drafting.verifier == "auto":
            return "match"
        return self.drafting.verifier

    def _changed_drafting(
        self, n_drafted_max: int | None, verifier: VerifierName | None
    ) -> DraftOptions:
        drafting = self.drafting
        if verifier is not None:
            drafting = replace(drafting, verifier=verifier)
        if n_drafted_max is not None:
            if drafting.tree.is_fixed:
                raise UsageError(
                    f"{n_drafted_max} drafted tokens: drafts have the fixed shape {drafting.tree}"
                )
            drafting = replace(drafting, max_tokens=min(n_drafted_max, drafting.n_max))
        return drafting


def _sampler(
    model: LlamaModel,
    options: SamplerOptions,
    *,
    ignore_eos: bool,
) -> Sampler:
    """Build the samplers of a model's answer. Raise `UsageError` for tokens that it lacks."""
    vocabulary = model.vocabulary
    for token, _ in options.logit_bias:
        if not 0 <= token < vocabulary.n_tokens:
            raise UsageError(
                f"--logit-bias: there is no token {token}: "
                f"{model.name} has {vocabulary.n_tokens} tokens"
            )
    if ignore_eos:
        never = tuple((token, -math.inf) for token in vocabulary.end_tokens())
        options = replace(options, logit_bias=options.logit_bias + never)
    breakers = None
    if options.dry_multiplier > 0.0:
        breakers = DryBreakers.of(vocabulary, options.dry_breakers)
    return Sampler(options, breakers)


@dataclass(slots=True, eq=False)
class Slot(CacheSlot):
    """A slot of all caches, with the request that it serves. Its text stays in the caches."""

    #: None while the slot is free.
    request: Request | None = None
    #: The index of the last request that was served there; -1 before any.
    used_last: int = -1


@dataclass(eq=False)
class Request:
    """A request for an answer to an engine: waiting, being served, or done."""

    #: Its number among the engine's requests, from 0: the `sequence` of its events.
    index: int
    prompt: Prompt
    settings: RequestSettings
    seed: int
    #: Whether drafts are made for it.
    drafts: bool = True
    #: Its place in the caches, while it is served.
    slot: Slot | None = None
    #: The state of its answer, while it is served.
    answer: AnswerState | None = None
    #: The summary, once it is finished.
    finished: FinishedEvent | None = None
    #: The error that ended it early.
    failure: SpecgenError | None = None
    is_cancelled: bool = False
    #: What other programs take of the machine since it began; None if that is not measured.
    load: LoadOfOthers | None = None
    #: Events that `Engine.stream` has not yielded yet.
    events: deque[Event] = field(default_factory=deque)

    @property
    def state(self) -> Literal["waiting", "prefill", "decoding", "done"]:
        """What the engine does with it."""
        if self.is_done:
            return "done"
        if self.answer is None:
            return "waiting"
        return "decoding" if self.answer.is_started else "prefill"

    @property
    def is_done(self) -> bool:
        """Whether it has ended, with an answer or an error."""
        return self.finished is not None or self.failure is not None

    @property
    def running(self) -> AnswerState:
        """The state of its answer, while it is served."""
        assert self.answer is not None, "it is served"
        return self.answer

    @property
    def text(self) -> str:
        """The whole answer; of one that follows a grammar, without the thoughts before it.

        Raises:
            SpecgenError: What ended it early.
        """
        if self.failure is not None:
            raise self.failure
        if self.finished is None:
            raise RuntimeError(f"answer {self.index} is not done")
        if self.settings.thoughts is not None:
            return split_thought(self.prompt.text, self.finished.text)[1]
        return self.finished.text
