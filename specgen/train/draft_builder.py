"""Builds drafts for a target in a given time: first the target's own text, then a draft of each
kind.
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
from specgen.train.training_loop import LEAST_TEXT, Budget, TextOptions

if TYPE_CHECKING:
    from specgen.method.cost_table import CostTable
    from specgen.models.files import FileIdentity
    from specgen.session.session import Session
    from specgen.train.distillation import Distilled
    from specgen.train.head_training import TrainedHeads
    from specgen.train.layer_skip import Pruned
    from specgen.train.target_text import TargetText

Kind: TypeAlias = Literal["heads", "distilled", "pruned"]

#: The prompts that come with specgen.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
#: The share of the time that is spent on the text, once drafts are compared, if no more is needed
#: for the least text; the least seconds of training a draft; and by how much the text may take
#: longer than it is estimated.
_SHARE_OF_TEXT, _TRAINING_S, _SLACK = 0.6, 20.0, 1.3
#: The number of prompts on which drafts are compared, and of tokens of their answers.
N_JUDGED, _LEAST_JUDGED, JUDGED_TOKENS = 8, 2, 96
#: The share of the time for comparing drafts; seconds to open one; the share of the target's time
#: to replay an answer.
_SHARE_OF_JUDGING, _OPENING_S, _TRIAL_SHARE = 0.4, 3.0, 0.5


def text_folder(cache: Path, target: FileIdentity) -> Path:
    return cache / "made" / target.key / "text"


def distilled_file(cache: Path, target: FileIdentity, draft: Path) -> Path:
    return cache / "made" / target.key / f"{draft.stem}-distilled.gguf"


def pruned_file(cache: Path, target: FileIdentity) -> Path:
    return cache / "made" / target.key / f"{Path(target.name).stem}-pruned.gguf"


def least_text(kinds: Sequence[Kind]) -> int:
    # A tenth is for judging, and the last tokens of an answer have nothing to learn from.
    least = (LEAST_TEXT[kind] for kind in kinds)
    return max(max(int(1.2 * learnt + judged), 10 * judged) for learnt, judged in least)


@dataclass(frozen=True, slots=True)
class TimePlan:
    """How the time, at least `needed_s`, is divided, and the tokens of text and judged prompts that
    fit into it.
    """

    text_s: float
    training_s: float
    judging_s: float
    n_tokens: int
    n_judged: int
    needed_s: float


def plan_time(
    left_s: float,
    costs: CostTable,
    n_drafts: int,
    text: TextOptions,
    n_least: int,
    n_kinds: int = 1,
) -> TimePlan:
    """Divide the time; `n_drafts` are compared, and `n_kinds` made, of a text that lacks at least
    `n_least` tokens.
    """
    prompt_s = JUDGED_TOKENS * costs.seconds(1) * (1.0 + _TRIAL_SHARE * n_drafts)
    # A token is written in a batch, and read again with its prompt, in larger ones.
    token_s = 3 * costs.seconds(text.n_parallel) / text.n_parallel
    least_s, training_s, opening_s = n_least * token_s, n_kinds * _TRAINING_S, _OPENING_S * n_drafts
    judging_s = min(_SHARE_OF_JUDGING * left_s, left_s - _SLACK * least_s - training_s)
    n_judged = max(_LEAST_JUDGED, min(N_JUDGED, int((judging_s - opening_s) / prompt_s)))
    judging_s = opening_s + n_judged * prompt_s
    making_s = max(0.0, left_s - judging_s)
    text_s = max(_SHARE_OF_TEXT * making_s, min(_SLACK * least_s, making_s - training_s))
    needed_s = least_s + training_s + opening_s + _LEAST_JUDGED * prompt_s
    return TimePlan(text_s, making_s - text_s, judging_s, int(text_s / token_s), n_judged, needed_s)


@dataclass(frozen=True)
class DraftBuilder:
    """Builds drafts for a target, in a cache folder. `tell` gets a sentence about each result."""

    session: Session
    text_options: TextOptions
    cache: Path
    clock: Callable[[], float]
    progress: Progress
    tell: Callable[[str], None]
    interrupted: Callable[[], bool]

    @cached_property
    def _identity(self) -> FileIdentity:
        return identity_of(self.session.options.target)

    @property
    def folder(self) -> Path:
        return text_folder(self.cache, self._identity)

    def n_lacking(self, kinds: Sequence[Kind]) -> int:
        from specgen.train.target_text import TargetText

        answers = TargetText(self.folder, self.text_options.prompts).answers
        return max(0, least_text(kinds) - sum(len(answer.tokens) for answer in answers))

    def make(self, kinds: Sequence[Kind], small: Path | None, plan: TimePlan) -> list[Path] | None:
        """Make drafts as planned; return their files, or None if interrupted. `small` is what is
        distilled.
        """
        if "pruned" in kinds:
            from specgen.train.layer_skip import check_prunable

            check_prunable(self.session.target)  # before minutes are spent on the text
        started_s = self.clock()
        ends_s = started_s + plan.text_s + plan.training_s
        latest_s = ends_s - _TRAINING_S * len(kinds)
        n_have = self.write_text(started_s + plan.text_s, self.n_lacking(kinds), latest_s)
        if n_have < self.text_options.n_tokens and not self.interrupted():
            self.tell(f"{n_have} tokens to learn from; more time or more --prompts would give more")
        made: list[Path] = []
        for number, kind in enumerate(kinds):
            if self.interrupted():
                return None
            now_s = self.clock()
            until_s = now_s + (ends_s - now_s) / (len(kinds) - number)
            file = self._make(kind, small, until_s)
            if file is None:
                return None
            made.append(file)
        return made

    def write_text(self, until_s: float = math.inf, n_least: int = 0, latest_s: float = 0.0) -> int:
        """Let the target write text until the clock reaches `until_s`; return how many tokens there
        are. If they are less than `n_least` more by then, it goes on until `latest_s`, and keeps
        the beginnings of answers.
        """
        from specgen.train.target_text import N_TOP, write_text

        options, session = self.text_options, self.session
        a_token = 2 * session.target.n_embd + 6 * N_TOP + 8
        size = human_bytes(options.n_tokens * a_token)
        self.tell(f"up to {options.n_tokens} tokens of text, {size}, in {self.folder}")
        budget = self._budget(until_s, f"{session.options.target.name} writes")
        return write_text(session, options, self.folder, budget, n_least, latest_s)

    def _budget(self, until_s: float, label: str) -> Budget:
        return Budget(self.clock, until_s, self.interrupted, partial(self.progress, label))

    def _make(self, kind: Kind, small: Path | None, until_s: float) -> Path | None:
        from specgen.train.target_text import TargetText

        target, identity = self.session.target, self._identity
        text = TargetText(self.folder, self.text_options.prompts)
        made: TrainedHeads | Pruned | Distilled | None
        if kind == "heads":
            from specgen.train.head_training import train_heads

            output, budget = (
                heads_file(self.cache, identity),
                self._budget(until_s, "training heads"),
            )
            made = train_heads(text, self.session.options.target, target, output, budget)
        elif kind == "pruned":
            from specgen.train.layer_skip import prune

            output = pruned_file(self.cache, identity)
            budget = self._budget(until_s, "judging sets of layers")
            made = prune(self.session, text, output, budget)
        else:
            assert small is not None, "a distilled draft is made from a model"
            output = distilled_file(self.cache, identity, small)
            made = self._distil(small, text, output, until_s)
        if made is None:
            return None
        self.tell(f"{output.name}: {made.text}")
        return output

    def _distil(
        self, draft: Path, text: TargetText, output: Path, until_s: float
    ) -> Distilled | None:
        from specgen.drafters.kinds import refuse_draft
        from specgen.llama import LlamaModel
        from specgen.train.distillation import distil
        from specgen.train.target_text import training_texts

        refuse_draft(draft)
        with contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small:
            now = datetime.datetime.now().astimezone()
            texts = training_texts(text, self.session.target, small, now)
        return distil(draft, texts, output, self._budget(until_s, f"fitting {draft.name}"))
