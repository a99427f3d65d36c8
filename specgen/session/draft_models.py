"""The models that draft for a target, loaded once: a draft model with its helpers, or decoder heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from specgen.drafters.translated import Translation
from specgen.errors import ModelFileError, PairError, UsageError
from specgen.llama import LlamaModel, default_threads
from specgen.llama.decoder_heads import DecoderHeads, is_heads_file
from specgen.llama.dflash import DflashModel
from specgen.llama.draft_kind import TrainedKind, draft_kind
from specgen.llama.eagle import EagleModel
from specgen.llama.gemma4_assistant import AssistantModel
from specgen.llama.mtp import MtpModel
from specgen.method.cost_table import CostTable
from specgen.method.verify import make_verifier
from specgen.options import ContextOptions, DraftOptions, DraftSource, TranslateMode, TreeShape
from specgen.session.draft_mask import lacks_mask, mask_token
from specgen.session.kept_answers import learnt_weights
from specgen.session.pairing import check_pair
from specgen.session.request import RequestSettings

#: The numbers of states whose looks are timed, and how often each is.
_LOOKS = (1, 2, 4, 8)
_N_REPEATS = 5
_TRAINED_MODELS: dict[TrainedKind, type[EagleModel]] = {
    "eagle3": EagleModel,
    "dflash": DflashModel,
    "gemma4-assistant": AssistantModel,
}


class LoadedDraft:
    """What draft models and decoder heads have in common: how they draft for a request."""

    def __init__(self, drafting: DraftOptions, *, branches: bool) -> None:
        self.drafting = drafting
        #: Whether its drafts may be trees if the samplers allow that.
        self.branches = branches

    def draws(self, settings: RequestSettings) -> bool:
        """Return whether drafts for a request with these settings are sampled."""
        return settings.sampler.is_random and make_verifier(settings.verifier).wants_draws

    def grows_trees(self, settings: RequestSettings) -> bool:
        """Return whether drafts for a request with these settings may be trees."""
        return self.branches and (self.drafting.tree.is_fixed or not self.draws(settings))

    def merges(self, settings: RequestSettings) -> bool:
        """Return whether proposals of n-grams may become branches of drafts for a request with these
        settings."""
        return self.grows_trees(settings) and not self.drafting.tree.is_fixed


class DraftModel(LoadedDraft):
    """A loaded draft model for a target. `weights` is a file to load instead of the model's own:
    weights that it learnt.

    Raises `ModelFileError` if the file cannot be used, `PairError` if the vocabularies differ and
    `translate` forbids translation, and `UsageError` if it has no such mask token as the options name.
    """

    def __init__(
        self,
        path: Path,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
        weights: Path | None = None,
    ) -> None:
        #: The model or n-grams that draft for this model.
        self.helper: DraftModel | Literal["ngram"] | None = None
        self.model = LlamaModel(path, weights=weights, n_gpu_layers=context.n_gpu_layers)
        #: The translation between the vocabularies; None if they are the same.
        self.translation: Translation | None = None
        #: The number of tokens that both vocabularies have, from 0 on, if they are the same.
        self.n_shared_tokens = 0
        try:
            self._pair(target, drafting.translate)
            self._mask = mask_token(self.model, drafting.mask)
        except (PairError, UsageError):
            self.model.close()
            raise
        # A parallel draft decodes no node of a tree, so that its own state does not matter.
        is_recurrent = self.model.has_recurrent_state and self.mask is None
        is_recurrent = is_recurrent or target.has_recurrent_state
        branches = drafting.grows_trees and not is_recurrent and self.translation is None
        super().__init__(drafting, branches=branches)

    @property
    def mask(self) -> int | None:
        """The mask token, if the model predicts several tokens in one decode. Translated drafts are made one
        token after the other: what a token may be depends on how the one before it is spelled."""
        return self._mask if self.translation is None else None

    @property
    def decodes_branches(self) -> bool:
        """Whether its own cache holds branches, as that of a model does which decodes the nodes of trees."""
        return self.branches and self.mask is None

    @property
    def lacks_mask(self) -> bool:
        """Whether it is a parallel draft by its name, and nothing says which its mask token is."""
        return self.drafting.mask == "auto" and self.mask is None and lacks_mask(self.model)

    def close(self) -> None:
        """Free the model and its helper. May be called twice."""
        self.model.close()
        if isinstance(self.helper, DraftModel):
            self.helper.close()

    def draws(self, settings: RequestSettings) -> bool:
        return super().draws(settings) and self.translation is None

    def _pair(self, target: LlamaModel, translate: TranslateMode) -> None:
        """Compare the vocabularies, and prepare the translation if they differ."""
        try:
            self.n_shared_tokens = check_pair(
                target.vocabulary, self.model.vocabulary, target.name, self.model.name
            )
        except PairError:
            if translate == "off":
                raise
            self.translation = Translation(target.vocabulary, self.model.vocabulary)
            self.translation.draft_lexicon.load()  # now, not in the middle of an answer


class HeadsDraft(LoadedDraft):
    """Loaded decoder heads for a target. Raises `ModelFileError` if the file is damaged, and `PairError`
    if the heads were made for another model, or the target has a recurrent state."""

    def __init__(
        self,
        path: Path,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
        clock: Callable[[], float],
    ) -> None:
        if target.has_recurrent_state:
            raise PairError(
                f"{target.name} has a recurrent state; decoder heads cannot draft for it",
                hint="use a draft model, or --draft ngram",
            )
        super().__init__(drafting, branches=drafting.grows_trees)
        self.heads = DecoderHeads(path, clock, context.n_threads or default_threads())
        weights, vocabulary = self.heads.weights, target.vocabulary
        made_for = (weights.n_vocab, weights.vocabulary, weights.n_embd)
        if made_for != (vocabulary.n_tokens, vocabulary.digest(), target.n_embd):
            self.heads.close()
            raise PairError(
                f"{path.name}: made for {weights.target}, not for {target.name}",
                hint=f"`specgen draft make -m {target.path}` makes heads for this target",
            )
        #: The cost table of looks, the same for all answers.
        self.costs = self._timed(clock)

    def _timed(self, clock: Callable[[], float]) -> CostTable:
        """Time looks beyond one and several nodes, which takes some milliseconds."""
        heads = self.heads
        states = heads.begin(np.zeros(heads.weights.n_embd, np.float32), 0)
        seconds: dict[int, float] = {}
        for n in _LOOKS:
            behind = np.repeat(states, n, axis=0)
            for _ in range(_N_REPEATS):
                started = clock()
                heads.logits(heads.advance(behind, [0] * n))
                took_s = clock() - started
                seconds[n] = min(took_s, seconds.get(n, took_s))
        return CostTable(seconds)


class StatesDraft(LoadedDraft):
    """What drafts from the target's hidden states, in a context of its own."""

    #: The name of its tokens in events and statistics.
    origin = "mtp"

    def __init__(self, target: LlamaModel, drafting: DraftOptions) -> None:
        super().__init__(drafting, branches=drafting.grows_trees and not target.has_recurrent_state)


class MtpDraft(StatesDraft):
    """The MTP layers of a loaded target, or those in a file of their own (`path`). Raises `PairError` if the target
    has none that can draft, or the file does not fit it, `ModelFileError` if the file is damaged."""

    def __init__(
        self,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
        path: Path | None = None,
    ) -> None:
        super().__init__(target, drafting)
        #: The model that has the layers, and whether it is the target.
        self.model, self.is_target = target, path is None
        if path is not None:
            self.model = MtpModel(path, target, n_gpu_layers=context.n_gpu_layers)
            self._check_tokens(target)
        elif target.why_no_mtp:
            raise PairError(
                f"--draft mtp: {target.name}: {target.why_no_mtp}",
                hint="use a file with its MTP (NextN) layers, or another draft",
            )
        self.branches = self.branches and self.model.n_mtp_layers == 1

    def _check_tokens(self, target: LlamaModel) -> None:
        own, others = self.model.vocabulary, target.vocabulary
        try:
            if check_pair(others, own, target.name, self.model.name) < others.n_tokens:
                raise PairError(
                    f"{self.model.name} cannot draft for {target.name}: it has {own.n_tokens} tokens, the target "
                    f"{others.n_tokens}"
                )
        except PairError:
            self.model.close()
            raise


class EagleDraft(StatesDraft):
    """A loaded EAGLE-3, DFlash or DSpark draft, or a Gemma 4 assistant, for a target. Raises `ModelFileError` if
    the file is damaged, `PairError` if it does not fit the target, or the target decodes elsewhere."""

    def __init__(
        self,
        path: Path,
        kind: TrainedKind,
        target: LlamaModel,
        context: ContextOptions,
        drafting: DraftOptions,
    ) -> None:
        super().__init__(target, drafting)
        make = _TRAINED_MODELS[kind]
        self.model = make(path, target, n_gpu_layers=context.n_gpu_layers)
        self.origin = self.model.architecture
        #: Whether its drafts may branch.
        self.is_tree_draft = type(self.model) is EagleModel
        self.branches = self.branches and self.is_tree_draft
        try:
            #: The number of tokens that both vocabularies have, from 0 on.
            self.n_shared_tokens = check_pair(
                target.vocabulary, self.model.vocabulary, target.name, self.model.name
            )
        except PairError:
            self.model.close()
            raise


class DraftModels:
    """What drafts for a target.

    `helpers` draft for the draft model; they are opened and closed with it. The draft model uses learnt weights if the folder `learning` has some.
    """

    def __init__(
        self,
        target: LlamaModel,
        helpers: Sequence[DraftSource],
        context: ContextOptions,
        clock: Callable[[], float],
        learning: Path | None = None,
    ) -> None:
        self._target = target
        self._helpers = helpers
        self._context = context
        self._clock = clock
        self._learning = learning
        #: What drafts for the target.
        self.source: DraftSource = "none"
        #: The draft model, if it is one, the decoder heads, if these draft, and the MTP layers.
        self.main: DraftModel | None = None
        self.heads: HeadsDraft | None = None
        self.mtp: MtpDraft | None = None
        #: The draft that reads layers or the cache of the target, if it is one.
        self.eagle: EagleDraft | None = None
        #: The file of learnt weights, if the draft model uses them.
        self.learnt: Path | None = None

    def change(self, source: DraftSource, drafting: DraftOptions) -> None:
        """Replace the present draft, which is closed and must have no open context. Raise `ModelFileError`,
        `PairError`, or `UsageError` if what is no model is given a helper; there is then no draft."""
        self.close()
        if source == "mtp":
            self._check_no_helpers("--draft mtp takes no draft of its own")
            self.mtp = MtpDraft(self._target, self._context, drafting)
        elif isinstance(source, Path) and is_heads_file(source):
            self._check_no_helpers(f"{source.name}: decoder heads take no draft of their own")
            self.heads = HeadsDraft(source, self._target, self._context, drafting, self._clock)
        elif isinstance(source, Path):
            kind = draft_kind(source)
            if kind is not None:
                self._check_no_helpers(
                    f"{source.name}: a draft that reads the target takes no draft of its own"
                )
            if kind is None:
                self.main = self._open((source, *self._helpers), self._target, drafting)
            elif kind == "mtp":
                self.mtp = MtpDraft(self._target, self._context, drafting, source)
            else:
                self.eagle = EagleDraft(source, kind, self._target, self._context, drafting)
        self.source = source

    def _check_no_helpers(self, what: str) -> None:
        if self._helpers:
            raise UsageError(f"{what}; leave out the next --draft")

    def close(self) -> None:
        """Close the models. May be called twice."""
        if self.main is not None:
            self.main.close()
        if self.heads is not None:
            self.heads.heads.close()
        if (model := self._states_model) is not None:
            model.close()
        self.main, self.heads, self.mtp, self.eagle = None, None, None, None
        self.source, self.learnt = "none", None

    @property
    def model(self) -> LlamaModel | None:
        """The draft model; None if none is loaded."""
        return self.main.model if self.main is not None else None

    @property
    def own_vocabulary(self) -> LlamaModel | None:
        """The draft model if it has another vocabulary than the target; else None."""
        has_own = self.main is not None and self.main.translation is not None
        return self.model if has_own else None

    def stack(self) -> Iterator[DraftModel]:
        """Yield the draft model, the model that drafts for it, and so on."""
        draft: DraftModel | str | None = self.main
        while isinstance(draft, DraftModel):
            yield draft
            draft = draft.helper

    @property
    def path(self) -> Path | None:
        """The draft model's file; None if no draft model is loaded."""
        return self.main.model.path if self.main is not None else None

    @property
    def from_states(self) -> MtpDraft | EagleDraft | None:
        """What drafts from the target's hidden states in a context of its own; None if nothing does."""
        return self.mtp or self.eagle

    @property
    def _states_model(self) -> LlamaModel | None:
        """The model of what drafts from the target's hidden states; None if nothing does, or it is the target."""
        if self.mtp is not None and self.mtp.is_target:
            return None
        return self.from_states.model if self.from_states is not None else None

    @property
    def reads_cache(self) -> bool:
        """Whether the draft reads the cache of its target: it drafts only where the target is."""
        return self.eagle is not None and isinstance(self.eagle.model, AssistantModel)

    @property
    def timed(self) -> Path | Literal["mtp"] | None:
        """What decodes in a context of its own to draft, by its name in `ModelCosts`; None if nothing does."""
        if (model := self._states_model) is not None:
            return model.path
        return "mtp" if self.mtp is not None else self.path

    @property
    def key(self) -> Path | str:
        """The key of the present draft in the memory: a file, or a word such as "ngram". A model with
        learnt weights is a draft of its own."""
        if self.learnt is not None:
            return self.learnt
        if (model := self._states_model) is not None:
            return model.path
        return self.path or (self.heads.heads.path if self.heads is not None else str(self.source))

    @property
    def name(self) -> str:
        if self.heads is not None:
            return self.heads.heads.name
        if (model := self._states_model) is not None:
            return model.name
        return self.main.model.name if self.main is not None else str(self.source)

    @property
    def why_chains(self) -> str | None:
        """Why drafts cannot branch here, whatever their shape; None if they can."""
        target, draft = self._target, self.main
        if target.has_recurrent_state:
            return f"{target.name} has a recurrent state, which branches cannot share"
        if self.eagle is not None and not self.eagle.is_tree_draft:
            return f"{self.eagle.model.name} drafts chains"
        if self.mtp is not None and (layers := self.mtp.model).n_mtp_layers > 1:
            return f"each of the {layers.n_mtp_layers} MTP layers of {layers.name} drafts one token"
        if draft is None or draft.branches:
            return None
        if draft.model.has_recurrent_state:
            return f"{draft.model.name} has a recurrent state, which branches cannot share"
        if draft.translation is not None:
            return f"what {draft.model.name} drafts is translated, a chain at a time"
        return f"{draft.model.name} has a draft of its own, which drafts chains"

    @property
    def why_one_sequence(self) -> str | None:
        """Why one of the models, or the target, cannot decode several sequences at once; None if all can."""
        models = [self._target, *(draft.model for draft in self.stack())]
        return next((why for model in models if (why := model.why_one_sequence)), None)

    def _open(
        self, sources: Sequence[DraftSource], target: LlamaModel, drafting: DraftOptions
    ) -> DraftModel:
        """Open the first of the sources, which drafts for `target`, and the others as its helpers."""
        if len(sources) > 1 or target is not self._target:  # in a stack, models draft only chains
            drafting = replace(drafting, tree=TreeShape("off"))
        if target is not self._target:  # the mask is that of the first draft
            drafting = replace(drafting, mask="off")
        path = Path(sources[0])
        draft = self._load_learnt(path, drafting) if target is self._target else None
        if draft is None:
            draft = DraftModel(path, target, self._context, drafting)
        with contextlib.ExitStack() as on_error:
            on_error.callback(draft.close)
            if len(sources) > 1 and draft.mask is not None:
                raise UsageError(
                    f"{path.name}: a parallel draft takes no draft of its own; leave out the next --draft",
                    hint="--draft-mask off drafts one token after the other",
                )
            if len(sources) > 1:
                is_model = isinstance(sources[1], Path)
                rest = sources[1:]
                draft.helper = self._open(rest, draft.model, drafting) if is_model else "ngram"
            on_error.pop_all()
        return draft

    def _load_learnt(self, path: Path, drafting: DraftOptions) -> DraftModel | None:
        """Load a draft model with its learnt weights; None if there are none that work."""
        learnt = learnt_weights(self._learning, path)
        if learnt is None:
            return None
        try:
            draft = DraftModel(path, self._target, self._context, drafting, learnt)
        except ModelFileError:
            return None
        if draft.mask is not None:  # what it learnt, it learnt without masks
            draft.close()
            return None
        self.learnt = learnt
        return draft
