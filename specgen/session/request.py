"""A request for one answer, and its settings: samplers, grammar, drafting, and where the answer
ends.
"""

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
    """A request's options, and what was built of them; those of the `sampler` have more biases."""

    sampling: SamplerOptions
    generation: GenerationOptions
    drafting: DraftOptions
    sampler: Sampler
    grammar: GrammarState | None
    thoughts: ThoughtMarks | None = None

    @staticmethod
    def of(
        model: LlamaModel,
        sampling: SamplerOptions,
        generation: GenerationOptions,
        drafting: DraftOptions,
        thoughts: ThoughtMarks | None = None,
    ) -> RequestSettings:
        """Build the samplers and the grammar, which holds behind the answer's `thoughts`. Raise
        `UsageError`.
        """
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
        if (wanted := generation.grammar) is not None:
            marks = THOUGHT_CONTROLS if thoughts else ()
            controls = dict.fromkeys((*generation.shown_controls, *marks))
            generation = replace(generation, shown_controls=tuple(controls))
            shown = vocabulary.showing(generation.shown_controls)
            grammar = grammar_start(wanted, shown, thoughts)
        sampler = Sampler(in_use, breakers)
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
        """Return these settings with the given options changed; only what changes is rebuilt. Raise
        `UsageError`.
        """
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
        before, grammar = self.generation, generation.grammar
        if thoughts is not None and (grammar is None or thoughts.begin in grammar.text):
            thoughts = None  # they are part of the grammar, if there is one
        if (sampling, thoughts) == (self.sampling, self.thoughts) and (
            (generation.grammar, generation.ignore_eos, generation.shown_controls)
            == (before.grammar, before.ignore_eos, before.shown_controls)
        ):
            return replace(self, generation=generation, drafting=drafting)
        return RequestSettings.of(model, sampling, generation, drafting, thoughts)

    @property
    def verifier(self) -> VerifierName:
        """With ``auto``, drafts are matched if the user gave a seed and draft lengths depend on
        measured times: the seed then gives the same text every time.
        """
        is_timed = self.drafting.is_by_cost and self.sampling.seed >= 0
        return "match" if self.drafting.verifier == "auto" and is_timed else self.drafting.verifier


@dataclass(slots=True, eq=False)
class Slot(CacheSlot):
    """A slot of all caches, and the request that it serves; None while it is free. Its text stays
    in the caches.
    """

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
    #: Its place in the caches, and the state of its answer, while it is served.
    slot: Slot | None = None
    answer: AnswerState | None = None
    #: The summary, once it is finished; the error that ended it early.
    finished: FinishedEvent | None = None
    failure: SpecgenError | None = None
    is_cancelled: bool = False
    #: What other programs take of the machine since it began; None if that is not measured.
    load: LoadOfOthers | None = None
    #: Events that `Engine.stream` has not yielded yet.
    events: deque[Event] = field(default_factory=deque)

    @property
    def state(self) -> Literal["waiting", "reading", "decoding", "done"]:
        if self.finished is not None or self.failure is not None:
            return "done"
        if self.answer is None:
            return "waiting"
        return "decoding" if self.answer.is_started else "reading"

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def running(self) -> AnswerState:
        assert self.answer is not None, "it is served"
        return self.answer

    @property
    def text(self) -> str:
        """The whole answer, of one with a grammar without thoughts. Raise the error that ended it
        early.
        """
        if self.failure is not None:
            raise self.failure
        if self.finished is None:
            raise RuntimeError(f"answer {self.index} is not done")
        if self.settings.thoughts is not None:
            return split_thought(self.prompt.text, self.finished.text)[1]
        return self.finished.text
