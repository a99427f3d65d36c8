"""Makes drafts for a target within a given time.

First the target writes text, then a draft of each kind is made from this text.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from specgen.models.files import FileIdentity, heads_file, identity_of
from specgen.system.progress import Progress
from specgen.system.quantities import human_bytes
from specgen.train.training_loop import MIN_TEXT, Budget, TextOptions

if TYPE_CHECKING:
    from specgen.method.cost_table import CostTable
    from specgen.session.session import Session
    from specgen.train.distillation import Distilled
    from specgen.train.head_training import TrainedHeads
    from specgen.train.pruning import Pruned
    from specgen.train.target_text import TargetText

#: A kind of draft that can be made for a target.
MadeKind: TypeAlias = Literal["heads", "distilled", "pruned"]

#: The prompts that come with specgen.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
#: The target writes text for this share of the time that comparing drafts leaves.
_TEXT_SHARE = 0.6
#: The minimum time for training one draft.
_MIN_TRAINING_S = 20.0
#: Writing text may take this many times as long as estimated.
_TEXT_TIME_MARGIN = 1.3
#: The maximum number of prompts on which drafts are compared.
N_JUDGED = 8
#: The minimum number of prompts on which drafts are compared.
_MIN_JUDGED = 2
#: The number of tokens in an answer to such a prompt.
JUDGED_TOKENS = 96
#: The maximum share of the time for comparing drafts.
_MAX_JUDGING_SHARE = 0.4
#: The estimated time to open a draft.
_OPENING_S = 3.0
#: The estimated time to replay an answer with a draft, relative to the time in which the target
#: wrote it.
_TRIAL_SHARE = 0.5


def text_folder(cache: Path, target: FileIdentity) -> Path:
    """Return the folder in which a target's text is stored."""
    return cache / "made" / target.key / "text"


def distilled_file(
    cache: Path,
    target: FileIdentity,
    draft: Path,
) -> Path:
    """Return the file of a draft that was distilled for a target."""
    return cache / "made" / target.key / f"{draft.stem}-distilled.gguf"


def pruned_file(cache: Path, target: FileIdentity) -> Path:
    """Return the file of a target's pruned draft."""
    return cache / "made" / target.key / f"{Path(target.name).stem}-pruned.gguf"


def least_text(kinds: Sequence[MadeKind]) -> int:
    """Return the minimum number of tokens of text for making these kinds of drafts."""
    n_tokens = 0
    for kind in kinds:
        n_learnt, n_judged = MIN_TEXT[kind]
        # The last few tokens of each answer cannot be learnt from, hence the factor 1.2.
        n_for_learning = int(1.2 * n_learnt + n_judged)
        # One tenth of the text is held back for judging.
        n_for_judging = 10 * n_judged
        n_tokens = max(n_tokens, n_for_learning, n_for_judging)
    return n_tokens


@dataclass(frozen=True, slots=True)
class TimePlan:
    """How the time for making drafts is divided."""

    #: The time in which the target writes text.
    text_s: float
    #: The time for training all drafts.
    training_s: float
    #: The time for comparing the drafts.
    judging_s: float
    #: The estimated number of tokens that the target writes in `text_s`.
    n_tokens: int
    #: The number of prompts on which the drafts are compared.
    n_judged: int
    #: The minimum time for everything; the plan is not feasible if there is less.
    needed_s: float


def plan_time(
    left_s: float,
    costs: CostTable,
    n_drafts: int,
    text: TextOptions,
    n_min: int,
    n_kinds: int = 1,
) -> TimePlan:
    """Divide the time that is left between writing text, training, and comparing drafts.

    Args:
        left_s: The time that is left.
        costs: The target's decoding times.
        n_drafts: The number of drafts to compare.
        text: The options for the target's text.
        n_min: The minimum number of tokens still to be written.
        n_kinds: The number of drafts to make.
    """
    # The target writes a token in a batch with other answers' tokens, and decodes it again with its
    # prompt. In all, this takes about three times as long as the writing.
    token_s = 3 * costs.seconds(text.n_parallel) / text.n_parallel
    min_text_s = n_min * token_s
    min_training_s = n_kinds * _MIN_TRAINING_S
    # More than `min_text_s`, which is only an estimate.
    safe_text_s = _TEXT_TIME_MARGIN * min_text_s

    # Comparing drafts gets what the minimum text and training leave, up to a share of all time.
    opening_s = _OPENING_S * n_drafts
    prompt_s = JUDGED_TOKENS * costs.seconds(1) * (1.0 + _TRIAL_SHARE * n_drafts)
    judging_s = min(_MAX_JUDGING_SHARE * left_s, left_s - safe_text_s - min_training_s)
    n_judged = max(_MIN_JUDGED, min(N_JUDGED, int((judging_s - opening_s) / prompt_s)))
    judging_s = opening_s + n_judged * prompt_s

    # The text gets its share of the rest, or more if it needs more and training can spare it.
    making_s = max(0.0, left_s - judging_s)
    text_s = max(_TEXT_SHARE * making_s, min(safe_text_s, making_s - min_training_s))
    return TimePlan(
        text_s,
        making_s - text_s,
        judging_s,
        n_tokens=int(text_s / token_s),
        n_judged=n_judged,
        needed_s=min_text_s + min_training_s + opening_s + _MIN_JUDGED * prompt_s,
    )


@dataclass(frozen=True)
class DraftBuilder:
    """Makes drafts for a target: lets it write text, and makes each kind of draft from the text."""

    #: The target.
    session: Session
    #: The prompts, and the number of tokens to write.
    text_options: TextOptions
    #: The cache folder for text and drafts.
    cache: Path
    #: Returns the time in seconds.
    clock: Callable[[], float]
    #: Shows the progress of each step.
    progress: Progress
    #: Called with a sentence about each result.
    note: Callable[[str], None]
    #: Returns whether the user has asked to stop.
    interrupted: Callable[[], bool]

    @cached_property
    def _identity(self) -> FileIdentity:
        return identity_of(self.session.options.target)

    @property
    def folder(self) -> Path:
        """The folder in which the target's text is stored."""
        return text_folder(self.cache, self._identity)

    @property
    def _text(self) -> TargetText:
        """The text written so far, read again from the folder each time."""
        from specgen.train.target_text import TargetText

        return TargetText(self.folder, self.text_options.prompts)

    def n_lacking(self, kinds: Sequence[MadeKind]) -> int:
        """Return the number of tokens still to be written before these drafts can be made."""
        n_written = sum(len(answer.tokens) for answer in self._text.answers)
        return max(0, least_text(kinds) - n_written)

    def make(
        self,
        kinds: Sequence[MadeKind],
        small: Path | None,
        plan: TimePlan,
    ) -> list[Path] | None:
        """Make drafts as planned.

        Args:
            kinds: The kinds of drafts to make.
            small: The model to train for a distilled draft; None if there is no such draft.
            plan: The division of the time.

        Returns:
            The files of the drafts, or None if interrupted.

        Raises:
            SpecgenError: If the text cannot be written, or a draft cannot be made from it.
        """
        if "pruned" in kinds:
            from specgen.train.pruning import check_prunable

            check_prunable(self.session.target)  # before minutes are spent on the text
        started_s = self.clock()
        text_until_s = started_s + plan.text_s
        ends_s = text_until_s + plan.training_s
        # If there is too little text by then, it may take all but the minimum training time.
        latest_s = ends_s - _MIN_TRAINING_S * len(kinds)
        n_written = self.write_text(text_until_s, self.n_lacking(kinds), latest_s)
        if n_written < self.text_options.n_tokens and not self.interrupted():
            self.note(
                f"{n_written} tokens to learn from; more time or more --prompts would give more"
            )
        files: list[Path] = []
        for index, kind in enumerate(kinds):
            if self.interrupted():
                return None
            # The remaining drafts share the remaining time equally.
            now_s = self.clock()
            until_s = now_s + (ends_s - now_s) / (len(kinds) - index)
            file = self._make_draft(kind, small, until_s)
            if file is None:
                return None
            files.append(file)
        return files

    def write_text(
        self,
        until_s: float = math.inf,
        n_min: int = 0,
        latest_s: float = 0.0,
    ) -> int:
        """Let the target write text until the clock reaches `until_s`.

        If there are fewer than `n_min` new tokens by then, it goes on until `latest_s`, and then
        stores unfinished answers as well.

        Returns:
            The number of tokens in the folder, including earlier ones.

        Raises:
            SpecgenError: As `write_text` of `specgen.train.target_text`.
        """
        from specgen.train.target_text import N_TOP, write_text

        session = self.session
        options = self.text_options
        # For each token: a float16 hidden state, the likeliest tokens (int32) with their
        # probabilities (float16), and a few bytes for the token itself and its prompt.
        token_bytes = 2 * session.target.n_embd + (4 + 2) * N_TOP + 8
        size = human_bytes(options.n_tokens * token_bytes)
        self.note(f"up to {options.n_tokens} tokens of text, {size}, in {self.folder}")
        budget = self._budget(until_s, f"{session.options.target.name} writes")
        return write_text(session, options, self.folder, budget, n_min, latest_s)

    def _budget(self, until_s: float, label: str) -> Budget:
        return Budget(self.clock, until_s, self.interrupted, partial(self.progress, label))

    def _make_draft(
        self,
        kind: MadeKind,
        small: Path | None,
        until_s: float,
    ) -> Path | None:
        """Make a draft of a kind, and return its file, or None if interrupted.

        Args:
            kind: The kind of draft.
            small: The model to train, which only a distilled draft needs.
            until_s: The time by which the draft should be finished.
        """
        session = self.session
        target = session.options.target
        text = self._text
        result: TrainedHeads | Pruned | Distilled | None
        if kind == "heads":
            from specgen.train.head_training import train_heads

            output = heads_file(self.cache, self._identity)
            budget = self._budget(until_s, "training heads")
            result = train_heads(text, target, session.target, output, budget)
        elif kind == "pruned":
            from specgen.train.pruning import prune

            output = pruned_file(self.cache, self._identity)
            budget = self._budget(until_s, "judging sets of layers")
            result = prune(session, text, output, budget)
        else:
            assert small is not None, "a distilled draft is made from a model"
            output = distilled_file(self.cache, self._identity, small)
            result = self._distil(small, text, output, until_s)
        if result is None:
            return None
        self.note(f"{output.name}: {result.text}")
        return output

    def _distil(
        self,
        draft: Path,
        text: TargetText,
        output: Path,
        until_s: float,
    ) -> Distilled | None:
        """Train a copy of a small model on the target's text; return None if interrupted."""
        from specgen.drafters.kinds import refuse_draft
        from specgen.llama import LlamaModel
        from specgen.train.distillation import distil
        from specgen.train.target_text import training_texts

        refuse_draft(draft)
        with contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small:
            now = datetime.datetime.now().astimezone()
            texts = training_texts(text, self.session.target, small, now)
        return distil(draft, texts, output, self._budget(until_s, f"fitting {draft.name}"))
