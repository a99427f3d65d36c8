"""From files and options to a stream of events."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import secrets
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from specgen.backend.base import Backend, Vocabulary
from specgen.backend.llama import LlamaBackend, LlamaGrammar, LlamaModel, default_threads
from specgen.backend.llama.vocabulary import LlamaVocabulary
from specgen.backend.tree_batch import Slot
from specgen.calibration.acceptance import Chances
from specgen.calibration.cost_table import CostTable
from specgen.calibration.memory import Memory
from specgen.calibration.system_load import BUSY_SHARE, core_time, share_of_others
from specgen.calibration.threads import with_threads
from specgen.calibration.timing import MIN_SIZES, batch_sizes, complete, is_measured
from specgen.calibration.weight_copies import COPY_TYPE, Comparison, Copies
from specgen.constrain.grammar import GrammarState
from specgen.core.text_state import Shaper, TextState
from specgen.core.verifiers import make_verifier
from specgen.drafters import CombinedDrafter, ConstrainedDrafter, Drafter, SuffixDrafter
from specgen.drafters.lookup.array import SuffixArray
from specgen.drafters.lookup.corpus import load_corpus
from specgen.drafters.lookup.store import EarlierTexts
from specgen.engine.agreement import N_KNOWN, N_TOKENS, TEXT, Walk, can_pay, sample_agreement
from specgen.engine.draft_model import DraftModel, MakeShaper
from specgen.engine.generation import Generation
from specgen.engine.loop import Loop
from specgen.engine.prompts import (
    Prompt,
    chat_text,
    draft_chat_tokens,
    head_of,
    messages_of,
    tokenize,
)
from specgen.engine.slots import WHOLE, Part
from specgen.errors import ModelFileError, PromptError, UsageError
from specgen.events import Event, NoticeEvent, PromptEvent
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    SamplerOptions,
    TreeShape,
    VerifierName,
    WeightType,
)
from specgen.policy import CostAwarePolicy, FixedPolicy, Policy, ThresholdPolicy
from specgen.sampling import DryBreakers, Sampler

__all__ = ["DraftSource", "Prompt", "Session", "SessionOptions"]

#: Room for an answer of unlimited length where no context size is given, in tokens.
_ANSWER_ROOM = 4096
#: Context sizes are rounded up to a multiple of this, as llama.cpp does.
_CONTEXT_STEP = 256
#: The most tokens that are guessed of a draft.
_LONGEST_GUESS = 8
#: The most nodes that a draft model decodes at once while a tree grows.
_WIDEST = 8
#: The most ways to go on from one place that n-grams of a text propose.
_NGRAM_BRANCHES = 3
#: Sizes to time of a draft model: tokens one by one, what it has to catch up with, a prompt.
_DRAFT_SIZES = (1, 2, 3, 4, 8, 16, 64)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Everything that decides what a session does."""

    target: Path
    draft: DraftSource = "ngram"
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    drafting: DraftOptions = field(default_factory=DraftOptions)
    generation: GenerationOptions = field(default_factory=GenerationOptions)
    target_context: ContextOptions = field(default_factory=ContextOptions)
    draft_context: ContextOptions = field(default_factory=ContextOptions)
    #: What drafts for the draft model, what drafts for that one, and so on; n-grams come last.
    helpers: tuple[DraftSource, ...] = ()
    #: Where what is made of texts to look up is kept, and copies of draft models; None keeps nothing.
    cache: Path | None = None


class Session:
    """A target and what drafts for it, loaded. Use it as a context manager.

    Opening it raises `ModelFileError` or `PairError`; the models' weights stay loaded until
    it is closed, contexts are made for each generation. `memory` is what is known of these
    models on this machine, and learns more; whoever keeps it saves it. `tell` is told what else
    takes seconds while a draft is opened.
    """

    def __init__(
        self,
        options: SessionOptions,
        clock: Callable[[], float],
        memory: Memory | None = None,
        tell: Callable[[str], None] = lambda _what: None,
    ) -> None:
        self._options = options
        self._memory = memory if memory is not None else Memory()
        self._clock = clock
        #: Whether other programs took much of the machine when costs were measured.
        self.was_busy = False
        #: Draft models that were compared with copies in this session.
        self.compared: list[Comparison] = []
        self._n_told = 0
        folder = None
        if options.cache is not None and options.drafting.weights == "auto":
            folder = options.cache / "drafts"
        self._copies = Copies(folder, self._memory, clock, tell)
        self._resources = contextlib.ExitStack()
        self._draft_source: DraftSource = "none"
        self._draft: DraftModel | None = None
        self._grammar: GrammarState | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._target_model = LlamaModel(
                options.target, n_gpu_layers=options.target_context.n_gpu_layers
            )
            self._resources.callback(self._target_model.close)
            self._make_sampler()
            self.change_draft(options.draft)
            vocabulary = self._target_model.vocabulary
            self._open_lookups(vocabulary)
            if options.generation.grammar is not None:
                self._grammar = LlamaGrammar(vocabulary, options.generation.grammar).start
            on_error.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the models. May be called twice.

        Their weights are freed with the last context that was made from them: that of an answer
        which is not at its end is freed when the iterator is. The answer does not go on: the
        iterator raises `BackendError`."""
        self._close_draft()
        self._resources.close()

    def change_draft(self, source: DraftSource) -> None:
        """Let another draft take the place of the present one, which is closed; there must be
        no context of it. Raises `ModelFileError` or `PairError`; there is then no draft."""
        self._close_draft()
        if isinstance(source, Path):
            self._draft = self._stage((source, *self._options.helpers), self._target_model)
        self._draft_source = source

    def _stage(self, sources: Sequence[DraftSource], target: LlamaModel) -> DraftModel:
        """The first of the sources, which drafts for `target`, with the others as its helpers."""
        source, options = sources[0], self._options
        drafting = replace(options.drafting, verifier=self.verifier_name)
        if len(sources) > 1 or target is not self._target_model:  # stages draft chains
            drafting = replace(drafting, tree=TreeShape("off"))
        shaped = self._shaped
        if target is not self._target_model:
            shaped = replace(shaped, temperature=0.0, dynatemp_range=0.0)
        path, context = Path(source), options.draft_context

        def load() -> DraftModel:
            rest = (context, shaped, drafting, options.generation, self._breakers)
            copy = self._copies.of(path, context)
            try:
                return DraftModel(path, target, *rest, copy)
            except ModelFileError:
                if copy is None:
                    raise
                self._copies.discard(path)
                return DraftModel(path, target, *rest)

        draft = load()
        with contextlib.ExitStack() as on_error:
            on_error.callback(draft.close)
            compared = self._copies.compare(draft.model, self.context_options(path), TEXT)
            if compared is not None:
                self.compared.append(compared)
            if compared is not None and compared.is_taken:
                draft.close()
                draft = load()
            on_error.pop_all()
        with contextlib.ExitStack() as on_error:
            on_error.callback(draft.close)
            if len(sources) > 1:
                is_model = isinstance(sources[1], Path)
                draft.helper = self._stage(sources[1:], draft.model) if is_model else "ngram"
            on_error.pop_all()
        return draft

    def change_drafting(self, drafting: DraftOptions) -> None:
        """Draft by other options from now on. The draft is opened anew; there must be no context
        of it. Raises `ModelFileError` or `PairError`; there is then no draft."""
        if drafting != self._options.drafting:
            self._options = replace(self._options, drafting=drafting)
            self.change_draft(self._draft_source)

    def let_ngrams_draft(self, wanted: bool | None) -> None:
        """Let n-grams draft beside a draft model, or not; None is as the policy has it."""
        drafting = replace(self._options.drafting, ngrams=wanted)
        self._options = replace(self._options, drafting=drafting)

    def _close_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()
        self._draft, self._draft_source = None, "none"

    @property
    def target_model(self) -> LlamaModel:
        return self._target_model

    @property
    def clock(self) -> Callable[[], float]:
        return self._clock

    @property
    def copied(self) -> list[Comparison]:
        """Those of `compared` that draft from their copy, the last one of each model."""
        last = {compared.model: compared for compared in self.compared}
        return [compared for compared in last.values() if compared.is_taken]

    @property
    def options(self) -> SessionOptions:
        return self._options

    @property
    def sampler(self) -> Sampler:
        """The target's samplers."""
        return self._sampler

    @property
    def n_rows_max(self) -> int:
        """The most rows of a round's batch: the draft, and the token before it."""
        return 1 + self._options.drafting.n_max

    @property
    def n_branches_max(self) -> int:
        """The most branches of a draft: 1 where drafts are chains."""
        is_chain = self._target_model.has_recurrent_state or self._draft_source == "none"
        if is_chain or not self._options.drafting.grows_trees:
            return 1
        if self._draft is not None and not (
            self._draft.branches or self._options.drafting.adds_ngrams
        ):
            return 1
        return max(1, self._options.drafting.n_max)

    @property
    def n_sequences_max(self) -> int:
        """The most sequences of a context that one answer needs."""
        n_draft = self.n_rows_max + 1 if self._draft is not None and self._draft.branches else 1
        return max(self.n_branches_max, n_draft)

    @property
    def _why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        target, draft = self._target_model, self._draft
        if target.has_recurrent_state:
            return f"{target.name} has a recurrent state, which branches cannot share"
        if draft is None or draft.branches:
            return None
        if draft.model.has_recurrent_state:
            return f"{draft.model.name} has a recurrent state, which branches cannot share"
        if draft.has_own_vocabulary:
            return f"what {draft.model.name} drafts is translated, a chain at a time"
        return f"{draft.model.name} has a draft of its own, which drafts chains"

    @property
    def is_translated(self) -> bool:
        """Whether the draft model has another vocabulary than the target."""
        return self._draft is not None and self._draft.has_own_vocabulary

    @property
    def draft_name(self) -> str:
        return self._draft.model.name if self._draft else str(self._draft_source)

    def prompt(
        self,
        text: str,
        *,
        chat: bool | None = None,
        system: str | None = None,
        now: datetime.datetime | None = None,
    ) -> Prompt:
        """What an answer to `text` begins after.

        With `chat`, the text is a user's turn in the target's own template, and in that of a
        draft with another vocabulary; without, it is continued as it is; None takes the
        template if there is one. Some templates write the date: `now`, by default the present
        time. Names of control tokens in the text are read as these, as llama.cpp does.

        Raises `UsageError` if there is no template for `chat` or `system`, `PromptError` if the
        prompt is empty or the template does not accept it.
        """
        model = self._target_model
        messages = messages_of(text, system)
        now = now or datetime.datetime.now().astimezone()
        whole = chat_text(model, messages, now) if chat is not False else None
        if whole is None and (chat or system is not None):
            wanted = "--chat" if chat else "--system"
            raise UsageError(
                f"{model.name} has no chat template, which {wanted} needs",
                hint=f"leave {wanted} out: the prompt is then continued as it is",
            )
        shown = text if whole is None else whole
        tokens = tokenize(model.vocabulary, shown, parse_special=True)
        if not tokens:
            raise PromptError("the prompt is empty", hint="give some text to continue")
        draft_tokens, head = None, range(0)
        if whole is not None:
            head = head_of(model.vocabulary, whole, tokens, messages)
        if whole is not None and self._draft is not None and self._draft.has_own_vocabulary:
            draft_tokens = draft_chat_tokens(self._draft.model, messages, now)
        return Prompt(shown, tuple(tokens), draft_tokens, head)

    def generate(
        self,
        prompt: Prompt,
        *,
        interrupted: Callable[[], bool] = lambda: False,
        estimate_gain: bool = True,
    ) -> Iterator[Event]:
        """Generate an answer to a prompt, as events; the last one is a `FinishedEvent`.

        `interrupted` is asked between decodes; a yes ends the answer with what there is.
        `estimate_gain` allows a few extra decodes at the end to learn what plain decoding
        costs. Raises `PromptError` if the prompt does not fit the context, `MemoryLimitError`
        if the context does not fit the memory, `BackendError` if the session is closed.
        """
        options = self._options
        n_ctx = self.context_size(len(prompt.tokens))
        seed = options.sampler.seed if options.sampler.seed >= 0 else secrets.randbits(32)
        with self.contexts(n_ctx) as (target, draft), self.helper_contexts(n_ctx) as helpers:
            loop = Loop(target, self._clock, interrupted)
            measured_s = self.measure_if_costs_decide(target, draft)
            generation = self.generation(prompt, n_ctx, draft, seed, helpers=helpers)
            yield self.prompt_event(prompt, generation, loop.now_s, n_ctx=n_ctx, seed=seed)
            for message in self._notices(n_ctx):
                yield NoticeEvent(sequence=0, time_s=loop.now_s, message=message)
            if measured_s:
                message = f"measured what drafting costs and promises here, in {measured_s:.1f} s"
                if self.was_busy:
                    message += (
                        "; the machine had other work to do, so it is measured anew the next time"
                    )
                yield NoticeEvent(sequence=0, time_s=loop.now_s, message=message)
            yield from loop.run(generation)
            self.keep_text(generation.tokens)
            yield from loop.finish(generation, estimate_gain=estimate_gain)

    def prompt_event(
        self, prompt: Prompt, generation: Generation, now_s: float, *, n_ctx: int, seed: int
    ) -> PromptEvent:
        """The event that says what is going to run, in a context of n_ctx tokens."""
        options = self._options
        return PromptEvent(
            sequence=generation.index,
            time_s=now_s,
            text=prompt.text,
            n_prompt_tokens=len(prompt.tokens),
            target=self._target_model.name,
            draft=self.draft_name,
            translation=self._draft.translated if self._draft else None,
            draft_weights=self._draft_weights,
            kernels=self._target_model.kernels,
            n_ctx=n_ctx,
            sampler=_settings(replace(options.sampler, seed=seed)),
            verifier=self.verifier_name,
            grammar=options.generation.grammar,
        )

    def keep_text(self, tokens: Sequence[int]) -> None:
        """Keep a finished text for later answers to draft from, if the options ask for that."""
        if self._store is not None:
            self._store.add(tokens)

    def context_size(self, n_prompt: int) -> int:
        """The target's context in tokens. Raises `PromptError` if the prompt is longer."""
        n_train = self._target_model.n_ctx_train
        wanted = self._options.target_context.n_ctx
        if wanted is None:
            n_answer = self._options.generation.max_tokens
            n_ctx = n_prompt + (n_answer if n_answer >= 0 else _ANSWER_ROOM)
            n_ctx += self._options.drafting.n_max
            n_ctx = -(-n_ctx // _CONTEXT_STEP) * _CONTEXT_STEP
            n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
            hint = f"{self._target_model.name} was trained with a context of {n_train}"
        else:
            n_ctx = wanted or n_train or _ANSWER_ROOM
            hint = f"take --ctx-size {n_prompt + 1} or more, or a shorter prompt"
        if n_prompt > n_ctx:
            raise PromptError(f"the prompt has {n_prompt} tokens, the context {n_ctx}", hint)
        return n_ctx

    @contextlib.contextmanager
    def contexts(
        self, n_ctx: int, *, drafts: bool = True, n_parts: int = 1
    ) -> Iterator[tuple[LlamaBackend, LlamaBackend | None]]:
        """Contexts of the target and, if there is one and `drafts` asks for it, of the draft model,
        in which `n_parts` answers may be made at once, of n_ctx tokens each with their prompts. They
        are closed at the end of the `with`, by nobody else. Raises `MemoryLimitError`."""
        with contextlib.ExitStack() as stack:
            target = LlamaBackend(
                self._target_model,
                self.context_options(),
                n_ctx=n_ctx * n_parts,
                clock=self._clock,
                n_sequences=self.n_branches_max * n_parts,
                n_outputs=self.n_rows_max * n_parts,
                n_rollback=self.n_rows_max - 1,
            )
            stack.callback(target.close)
            draft = None
            if drafts and self._draft is not None:
                draft = self._draft_context(self._draft, n_ctx, n_parts)
                stack.callback(draft.close)
            yield target, draft

    @contextlib.contextmanager
    def helper_contexts(
        self, n_ctx: int, *, n_parts: int = 1
    ) -> Iterator[tuple[LlamaBackend, ...]]:
        """Contexts of the models that draft for the draft model, for such a context of the target.
        Raises `MemoryLimitError`."""
        helper = self._draft.helper if self._draft is not None else None
        with contextlib.ExitStack() as stack:
            backends = []
            while isinstance(helper, DraftModel):
                backends.append(self._draft_context(helper, n_ctx, n_parts))
                stack.callback(backends[-1].close)
                helper = helper.helper
            yield tuple(backends)

    def _draft_context(self, draft: DraftModel, n_ctx: int, n_parts: int) -> LlamaBackend:
        """A context of a draft model, for `n_parts` answers of n_ctx tokens in the target's. A draft
        whose context is too small for a text sees the latest part of it."""
        if draft.has_own_vocabulary:  # it may need more tokens for the same text
            n_ctx = -(-n_ctx * 3 // 2 // _CONTEXT_STEP) * _CONTEXT_STEP
        n_train = draft.model.n_ctx_train
        n_ctx = min(n_ctx, n_train) if n_train > 0 else n_ctx
        n_outputs = 1 if draft.helper is None else 1 + _LONGEST_GUESS
        if draft.branches:
            n_outputs = min(self.n_rows_max, _WIDEST)
        return LlamaBackend(
            draft.model,
            self.context_options(draft.model.path),
            n_ctx=n_ctx * n_parts,
            clock=self._clock,
            n_sequences=(self.n_rows_max + 1 if draft.branches else 1) * n_parts,
            n_outputs=n_outputs * n_parts,
            n_rollback=n_outputs - 1,
        )

    def text(self, prompt: Sequence[int]) -> TextState:
        """A text that begins with `prompt`, and its grammar at the start."""
        return TextState(prompt, self._grammar)

    def shaper(self, text: TextState) -> Shaper:
        """The target's samplers over a text."""
        return Shaper(self._sampler, text)

    def generation(
        self,
        prompt: Prompt,
        n_ctx: int,
        draft: Backend | None,
        seed: int,
        *,
        helpers: Sequence[Backend] = (),
        plain: bool = False,
        make_shaper: MakeShaper = Shaper,
        options: GenerationOptions | None = None,
        part: Part = WHOLE,
        index: int = 0,
    ) -> Generation:
        """An answer of its `index` to begin after `prompt`; `draft` is the draft model's context, if
        there is one, and `helpers` are those of what drafts for it. With `plain`, nothing drafts.
        `options` are the answer's own, by default the session's, and `part` is the answer's part of
        all contexts."""
        drafting = self._options.drafting
        # The draft draws from a stream of its own: what it draws must not move the target's.
        target_seed, draft_seed = np.random.SeedSequence(seed).spawn(2)
        state = self.text(prompt.tokens)
        drafter: Drafter | None = None
        if plain:
            pass
        elif self._draft is not None and draft is not None:
            rng = np.random.default_rng(draft_seed)
            known = _Known(self, len(prompt.tokens))
            backends = (draft, *helpers)
            drafter = self._draft.drafter(
                prompt, backends, state, rng, make_shaper, known, part=part
            )
            if drafting.adds_ngrams:
                ngrams = self._ngrams_within(state)
                drafter = CombinedDrafter(ngrams, drafter, merges=self._draft.merges)
        elif self._draft_source == "ngram":
            drafter = self._ngrams_within(state)
        return Generation(
            vocabulary=self._target_model.vocabulary,
            options=options or self._options.generation,
            n_ctx=n_ctx,
            drafter=drafter,
            policy=self._policy(len(prompt.tokens)),
            verifier=make_verifier(self.verifier_name),
            shaper=make_shaper(self._sampler, state),
            state=state,
            rng=np.random.default_rng(target_seed),
            slot=Slot(part.number * self.n_branches_max, self.n_branches_max),
            index=index,
        )

    @property
    def verifier_name(self) -> VerifierName:
        """How drafts are judged. A seed that was asked for gives the same text every time, also
        where the lengths of drafts depend on how long decodes take: drafts are then matched."""
        drafting = self._options.drafting
        is_timed = drafting.is_by_cost and self._options.sampler.seed >= 0
        return "match" if drafting.verifier == "auto" and is_timed else drafting.verifier

    def ngrams(self) -> Drafter:
        """N-grams of the text, and of the texts that are looked up."""
        drafting = self._options.drafting
        n_children, n_deepest = 1, None
        if self.n_branches_max > 1:
            n_children, n_deepest = _NGRAM_BRANCHES, drafting.tree_depth
            if drafting.tree.is_fixed:
                n_children, n_deepest = max(drafting.tree.numbers), drafting.tree.n_levels
        return SuffixDrafter(
            *drafting.ngrams_of, self._corpora, n_children=n_children, n_deepest=n_deepest
        )

    def _ngrams_within(self, state: TextState) -> Drafter:
        """N-grams that propose what the grammar allows."""
        ngrams = self.ngrams()
        return ConstrainedDrafter(ngrams, state) if state.has_grammar else ngrams

    def _open_lookups(self, vocabulary: LlamaVocabulary) -> None:
        """Read the texts that are looked up, as the options say. Raises `UsageError`."""
        drafting, cache = self._options.drafting, self._options.cache
        self._store: EarlierTexts | None = None
        corpora: list[SuffixArray] = []
        self._corpora: tuple[SuffixArray, ...] = ()
        if not drafting.lookup_files and not drafting.lookup_store:
            return
        kind = vocabulary.digest()
        if drafting.lookup_files:
            folder = cache / "lookup" if cache is not None else None
            corpora.append(load_corpus(drafting.lookup_files, vocabulary, kind, folder))
        if drafting.lookup_store and cache is not None:
            self._store = EarlierTexts(cache / "texts", kind)
            corpora += self._store.arrays()
        self._corpora = tuple(corpora)

    def _policy(self, n_past: int) -> Policy:
        drafting = self._options.drafting
        if drafting.tree.is_fixed and self._why_chains:
            shape = drafting.tree
            drafting = replace(
                drafting, tree=TreeShape("off"), max_tokens=shape.n_levels, p_min=0.0
            )
            return FixedPolicy(drafting)
        if drafting.policy == "fixed" or drafting.tree.is_fixed:
            return FixedPolicy(drafting)
        if drafting.policy == "threshold":
            return ThresholdPolicy(drafting)
        return CostAwarePolicy(drafting, self.table(n_past=n_past), self.chances())

    def chances(self) -> MutableMapping[str, Chances]:
        """What is known of the present draft's chances with these samplers, by origin."""
        sampler = self._options.sampler
        mode = f"temp {sampler.temperature:.1f}, {self.verifier_name}"
        draft = self._draft.model.path if self._draft else str(self._draft_source)
        target = self._options.target
        return self._memory.chances(target, draft, "greedy" if sampler.greedy else mode)

    def context_options(self, draft: Path | None = None) -> ContextOptions:
        """Those of contexts of the target, or of a draft model, with as many threads as were
        found to be best where the user named no number."""
        options = self._options
        if draft is None:
            context = options.target_context
            return with_threads(context, self._memory.threads(options.target, context))
        context = options.draft_context
        if self._copies.of(draft, context) is not None:
            context = replace(context, weights=COPY_TYPE)
        return with_threads(context, self._memory.threads(draft, context))

    def table(self, draft: Path | None = None, n_past: int = 0) -> CostTable:
        """What is known of the costs of the target, or of a draft model, in contexts with so
        many tokens in them."""
        model, context = draft or self._options.target, self.context_options(draft)
        return self._memory.costs(model, context, n_past, default_threads())

    def forget_costs(self, draft: Path | None = None) -> None:
        """Let the costs of the target, or of a draft model, be measured anew. Nothing may be
        generating."""
        model, context = draft or self._options.target, self.context_options(draft)
        self._memory.forget_costs(model, context, default_threads())

    def forget_weights(self, draft: Path) -> None:
        """Let a draft model be compared with a copy anew, when it is the session's the next time."""
        self._copies.forget(draft, self._options.draft_context)

    @property
    def memory(self) -> Memory:
        """What was learnt."""
        return self._memory

    def is_measured(self, draft: Path | None) -> bool:
        """Whether the costs of the target, up to the largest batch of a round, and of a draft
        model are known."""
        own = is_measured(self.table(), self.n_rows_max)
        return own and (draft is None or is_measured(self.table(draft)))

    def measure_if_new(self, target: Backend, draft: Backend | None) -> float:
        """Measure what decodes cost and, where costs decide how much is drafted, how often a draft
        model agrees with the target, unless that is known, in contexts that are empty; returns
        how many seconds that took, 0 for none.

        What other programs slow down holds for now and is not kept (`was_busy`): a table of a
        busy machine may say that no draft pays, and then nothing is decoded that would correct
        it."""
        started, path = self._clock(), self._draft_path
        is_known = self.is_measured(path)
        if not is_known:
            before = core_time()
            sizes = batch_sizes(max(MIN_SIZES, self.n_rows_max))
            complete(self.table(), target, sizes, self.n_rows_max)
            if draft is not None and path is not None:
                complete(self.table(path), draft, _DRAFT_SIZES)
            share = share_of_others(before, core_time())
            self.was_busy = share is not None and share > BUSY_SHARE
            if self.was_busy:
                self._keep_no_costs()
        is_sampled = draft is not None and self._sample_agreement(target, draft)
        return self._clock() - started if is_sampled or not is_known else 0.0

    def measure_if_costs_decide(self, target: Backend, draft: Backend | None) -> float:
        """The same where there is a draft and costs decide how much is drafted."""
        if not self._options.drafting.is_by_cost or self._draft_source == "none":
            return 0.0
        return self.measure_if_new(target, draft)

    def _keep_no_costs(self) -> None:
        """Let what was just measured be measured anew the next time."""
        options, path = self._options, self._draft_path
        models = [(options.target, self.context_options())]
        if path is not None:
            models.append((path, self.context_options(path)))
        for model, context in models:
            self._memory.keep_no_costs(model, context, default_threads())

    def _sample_agreement(self, target: Backend, draft: Backend) -> bool:
        """See how often the draft model says what the target does, unless that is known or could
        not matter; returns whether that was seen."""
        path, chances = self._draft_path, self.chances()
        is_known = "model" in chances and chances["model"].n_judged >= N_KNOWN
        if path is None or is_known or not self._options.drafting.is_by_cost:
            return False
        if not can_pay(self.table(), self.table(path), self._options.drafting.n_max):
            return False
        tokens = tokenize(self._target_model.vocabulary, TEXT, parse_special=False)[:N_TOKENS]
        walk = self.walk(Prompt(TEXT, tuple(tokens[:1])), draft)
        try:
            return sample_agreement(target, walk, tokens).n_places > 0
        finally:
            draft.remove(0)

    def walk(self, prompt: Prompt, draft: Backend) -> Walk:
        """A walk through a text that begins with `prompt`, with the draft model in an empty
        context, to see how often it agrees with what the target says. The user's samplers do not
        matter: the most likely tokens are compared."""
        assert self._draft is not None, "a draft model, whose context this is"
        state = TextState(())
        known, rng = _Known(self, len(prompt.tokens)), np.random.default_rng(0)
        drafter = self._draft.drafter(
            prompt, (draft,), state, rng, _most_likely, known, branches=False
        )
        return Walk(drafter, state, self.chances(), is_translated=self._draft.has_own_vocabulary)

    @property
    def _draft_weights(self) -> WeightType | None:
        path = self._draft_path
        return self.context_options(path).weights if path is not None else None

    @property
    def _draft_path(self) -> Path | None:
        return self._draft.model.path if self._draft is not None else None

    def _make_sampler(self) -> None:
        """The target's chain of samplers."""
        options, vocabulary = self._options, self._target_model.vocabulary
        sampler = options.sampler
        for token, _ in sampler.logit_bias:
            if not 0 <= token < vocabulary.n_tokens:
                raise UsageError(
                    f"--logit-bias: there is no token {token}: "
                    f"{self._target_model.name} has {vocabulary.n_tokens}"
                )
        if options.generation.ignore_eos:
            never = tuple((token, -math.inf) for token in vocabulary.end_tokens())
            sampler = replace(sampler, logit_bias=sampler.logit_bias + never)
        self._breakers: DryBreakers | None = None
        if sampler.dry_multiplier > 0.0:
            self._breakers = DryBreakers.of(vocabulary, sampler.dry_breakers)
        self._shaped = sampler
        self._sampler = Sampler(sampler, self._breakers)

    def _notices(self, n_ctx: int) -> Iterator[str]:
        for copied in self.copied[self._n_told :]:
            yield copied.note
        self._n_told = len(self.copied)
        shape = self._options.drafting.tree
        if shape.is_fixed and self._draft_source != "none" and (why := self._why_chains):
            yield f"--tree {shape}: {why}: drafting chains of {shape.n_levels} tokens"
        target, n_train = self._target_model, self._target_model.n_ctx_train
        if 0 < n_train < n_ctx:
            yield (
                f"{target.name} was trained with {n_train} tokens of context, "
                f"{n_ctx} are asked for: expect poor text"
            )
        draft = self._draft.model if self._draft else None
        if draft is not None and 0 < draft.n_ctx_train < n_ctx:
            yield (
                f"{draft.name} was trained with {draft.n_ctx_train} tokens of context, "
                f"{n_ctx} are asked for: of a longer text it sees the latest part"
            )


class _Known:
    """What a session knows of its models, for one answer after so many tokens."""

    def __init__(self, session: Session, n_past: int) -> None:
        self._session = session
        self._n_past = n_past

    def costs(self, model: Path) -> CostTable:
        return self._session.table(model, self._n_past)

    def policy(self, model: Path, draft: Path | str) -> Policy:
        options = DraftOptions(max_tokens=_LONGEST_GUESS)
        chances = self._session.memory.chances(model, draft, "guesses")
        return CostAwarePolicy(options, self.costs(model), chances)

    def ngrams(self, vocabulary: Vocabulary) -> Drafter:
        shortest, longest = DraftOptions().ngrams_of
        return SuffixDrafter(shortest, longest)


def _most_likely(_sampler: Sampler, state: TextState) -> Shaper:
    """A shaper that leaves the most likely token only."""
    return Shaper(Sampler(SamplerOptions()), state)


def _settings(options: SamplerOptions) -> dict[str, Any]:
    """The samplers' options as JSON can have them."""
    settings = dataclasses.asdict(options)
    # JSON has no infinity.
    settings["logit_bias"] = [
        [token, bias if math.isfinite(bias) else str(bias)] for token, bias in options.logit_bias
    ]
    return settings
