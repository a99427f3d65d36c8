"""A request for one answer, and its settings: samplers, grammar, drafting, and when it ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from specgen.drafters.interface import CacheSlot
from specgen.errors import SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, Piece
from specgen.llama import LlamaModel
from specgen.method.answer_state import AnswerState
from specgen.option_values import checked_value, required, shown_value
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
    """The options of a request, and the objects that were built from them."""

    #: The options of samplers as the user gave them. (Those in `sampler` may have more biases.)
    sampling: SamplerOptions
    #: When the answer ends, and which form it has.
    generation: GenerationOptions
    #: How much is drafted, and how drafts are verified.
    drafting: DraftOptions
    #: The samplers, built from `sampling`.
    sampler: Sampler
    #: The initial state of the grammar; None without a grammar.
    grammar: GrammarState | None
    #: The marks around thoughts that may precede an answer with a grammar: the grammar applies only
    #: after them. None if there is no grammar, or if the grammar covers the thoughts itself.
    thoughts: ThoughtMarks | None = None

    @staticmethod
    def of(
        model: LlamaModel,
        sampling: SamplerOptions,
        generation: GenerationOptions,
        drafting: DraftOptions,
        thoughts: ThoughtMarks | None = None,
    ) -> RequestSettings:
        """Build the samplers and the grammar of a request.

        Args:
            model: The target.
            sampling: How tokens are chosen.
            generation: When the answer ends, and its grammar.
            drafting: How much is drafted, and how drafts are verified.
            thoughts: The marks around thoughts before the answer: the grammar applies after them.

        Raises:
            UsageError: If an option is invalid for this model.
        """
        sampler = _sampler(model, sampling, ignore_eos=generation.ignore_eos)
        grammar = None
        wanted = generation.grammar
        if wanted is not None:
            # The grammar has to see where thoughts end, so the text shows the marks of thoughts.
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
        """Return these settings with some options changed.

        An argument that is None leaves the options as they are. The samplers and the grammar are
        built again only if their options change.

        Args:
            model: The target.
            sampling: How tokens are chosen.
            generation: When the answer ends.
            n_drafted_max: The maximum number of tokens to draft in a round.
            verifier: How drafts are verified.
            thoughts: The marks around the thoughts that the answer may have; None if it has none.

        Raises:
            UsageError: If an option is invalid.
        """
        if sampling is None:
            sampling = self.sampling
        if generation is None:
            generation = self.generation
        required("sampling", SamplerOptions, sampling)
        required("generation", GenerationOptions, generation)
        drafting = self._changed_drafting(n_drafted_max, verifier)
        if thoughts is not None:
            grammar = generation.grammar
            if grammar is None or thoughts.begin in grammar.text:
                thoughts = None  # any text is allowed, or the grammar covers the thoughts itself
        old_generation = self.generation
        is_unchanged = (
            sampling == self.sampling
            and thoughts == self.thoughts
            and generation.grammar == old_generation.grammar
            and generation.ignore_eos == old_generation.ignore_eos
            and generation.shown_controls == old_generation.shown_controls
        )
        if is_unchanged:
            return replace(self, generation=generation, drafting=drafting)
        return RequestSettings.of(model, sampling, generation, drafting, thoughts)

    @property
    def verifier(self) -> VerifierName:
        """How drafts are verified.

        ``auto`` becomes ``match`` if the user gave a seed and draft lengths depend on measured
        times: with ``match``, the text does not depend on the drafts, so the seed reproduces it.
        """
        has_seed = self.sampling.seed >= 0
        if has_seed and self.drafting.is_by_cost and self.drafting.verifier == "auto":
            return "match"
        return self.drafting.verifier

    def _changed_drafting(
        self, n_drafted_max: int | None, verifier: VerifierName | None
    ) -> DraftOptions:
        """Return the drafting options with those that are not None changed."""
        drafting = self.drafting
        if verifier is not None:
            drafting = replace(drafting, verifier=verifier)
        if n_drafted_max is not None:
            n_drafted_max = int(checked_value("n_drafted_max", int, n_drafted_max, {"min": 0}))
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
    """Build the samplers for answers of a model.

    Raises:
        UsageError: If a biased token is not in the model's vocabulary.
    """
    vocabulary = model.vocabulary
    for token, _ in options.logit_bias:
        if not 0 <= token < vocabulary.n_tokens:
            raise UsageError(
                f"logit_bias: there is no token {token}: "
                f"{model.name} has {vocabulary.n_tokens} tokens"
            )
    if ignore_eos:
        end_biases = tuple((token, -math.inf) for token in vocabulary.end_tokens())
        options = replace(options, logit_bias=options.logit_bias + end_biases)
    breakers = None
    if options.dry_multiplier > 0.0:
        breakers = DryBreakers.of(vocabulary, options.dry_breakers)
    return Sampler(options, breakers)


@dataclass(slots=True, eq=False)
class Slot(CacheSlot):
    """A slot in all caches, with the request that it serves.

    After a request, its text stays in the caches, so that the next one may reuse its prefix.
    """

    #: The request being served; None while the slot is free.
    request: Request | None = None
    #: The index of the last request that was served here; -1 before the first.
    used_last: int = -1
    #: The user's first message in that request (`Prompt.subject`).
    subject: str = ""
    #: The scheduler's age at that request (`Scheduler.take_next`).
    age: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of tokens of an answer, under the names of OpenAI's API."""

    #: The tokens of the prompt.
    prompt_tokens: int
    #: The tokens of the answer.
    completion_tokens: int
    #: The tokens of the prompt that were in the cache, and did not have to be decoded.
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """The tokens of the prompt and the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(eq=False, repr=False)
class Request:
    """A request for one answer of an engine: waiting, being served, or done."""

    #: The number among the engine's requests, from 0. Its events have it as their `sequence`.
    index: int
    #: The text before the answer.
    prompt: Prompt
    #: The options of the request, and the samplers and the grammar that were built from them.
    settings: RequestSettings
    #: The seed in use, even if the user gave none.
    seed: int
    #: Whether to draft for this answer.
    drafts: bool = True
    #: The place in the caches; None unless the request is being served.
    slot: Slot | None = None
    #: The state of the answer; None unless the request is being served.
    answer: AnswerState | None = None
    #: The same as `summary`; None until the answer is finished, and if it fails.
    finished: FinishedEvent | None = None
    #: The error that ended the answer early; None if there was none.
    failure: SpecgenError | None = None
    #: Whether the answer is to end at the next step.
    is_cancelled: bool = False
    #: Measures the load by other programs since the request was started; None before that.
    load_of_others: LoadOfOthers | None = None
    #: Events that `Engine.stream` has not yielded yet.
    events: deque[Event] = field(default_factory=deque)
    #: The tokens of the answer so far with their log-probabilities; empty unless the option
    #: `logprobs` asks for them.
    logprobs: list[Piece] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return one line: the state, the prompt and the answer, both cut."""
        shown = f"Request {self.index} ({self.state}): {shown_value(self.prompt.text)}"
        if self.failure is not None:
            return f"<{shown} -> {type(self.failure).__name__}: {self.failure.message}>"
        if self.finished is None:
            return f"<{shown}>"
        return f"<{shown} -> {shown_value(self.text)}, {self.finished.n_tokens} tokens>"

    def add_events(self, events: Iterable[Event]) -> None:
        """Queue events for `Engine.stream`, and keep the log-probabilities that are wanted."""
        for event in events:
            self.events.append(event)
            if isinstance(event, CommittedEvent) and self.settings.generation.logprobs is not None:
                self.logprobs.extend(event.pieces)

    def take_events(self) -> tuple[list[Event], bool]:
        """Remove the events so far, and return them, and whether they are the last ones."""
        # Read before the events are taken, since another thread may finish the answer meanwhile.
        are_last = self.is_done
        taken: list[Event] = []
        while self.events:
            taken.append(self.events.popleft())
        return taken, are_last

    @property
    def state(self) -> Literal["waiting", "prefill", "decoding", "done"]:
        """What the engine is doing with the request."""
        if self.is_done:
            return "done"
        if self.answer is None:
            return "waiting"
        return "decoding" if self.answer.is_started else "prefill"

    @property
    def is_done(self) -> bool:
        """Whether the request has ended, with an answer or with an error."""
        return self.finished is not None or self.failure is not None

    @property
    def running(self) -> AnswerState:
        """The state of the answer. Only a request that is being served has one."""
        assert self.answer is not None, "it is served"
        return self.answer

    @property
    def text(self) -> str:
        """The complete answer. If it follows a grammar, the thoughts before it are removed.

        Raises:
            SpecgenError: If the answer failed.
            RuntimeError: If the answer is not finished yet.
        """
        finished = self.summary
        # `thoughts` are set only with a grammar: the text is then what the grammar describes.
        if self.settings.thoughts is not None:
            _, answer = split_thought(self.prompt.text, finished.text)
            return answer
        return finished.text

    @property
    def usage(self) -> Usage:
        """The numbers of tokens.

        Raises:
            SpecgenError: If the answer failed.
            RuntimeError: If the answer is not finished yet.
        """
        finished = self.summary
        return Usage(
            prompt_tokens=finished.n_prompt_tokens,
            completion_tokens=finished.n_tokens,
            cached_tokens=finished.n_cached_tokens,
        )

    @property
    def summary(self) -> FinishedEvent:
        """The reason why the answer ended, and its figures.

        Raises:
            SpecgenError: If the answer failed.
            RuntimeError: If the answer is not finished yet.
        """
        if self.failure is not None:
            raise self.failure
        if self.finished is None:
            raise RuntimeError(f"answer {self.index} is not done")
        return self.finished
