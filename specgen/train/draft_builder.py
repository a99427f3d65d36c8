"""Builds drafts for a target in a given time.

First the target writes text, then a draft of each kind is made from it.
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
    from specgen.train.layer_skip import Pruned
    from specgen.train.target_text import TargetText

Kind: TypeAlias = Literal["heads", "distilled", "pruned"]

#: The prompts that come with specgen.
OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
#: The share of the time, less that for comparing drafts, in which the target writes text.
_TEXT_SHARE = 0.6
#: The least time for training a draft.
_TRAINING_S = 20.0
#: The text may take longer than estimated by this factor.
_SLACK = 1.3
#: The most prompts on which drafts are compared.
N_JUDGED = 8
#: The fewest prompts on which drafts are compared.
_LEAST_JUDGED = 2
#: The tokens of an answer to such a prompt.
JUDGED_TOKENS = 96
#: The largest share of the time for comparing drafts.
_JUDGING_SHARE = 0.4
#: The time to open a draft.
_OPENING_S = 3.0
#: A trial of a draft replays an answer in this share of the time that the target took for it.
_TRIAL_SHARE = 0.5


def text_folder(cache: Path, target: FileIdentity) -> Path:
    """Return the folder of a target's text."""
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


def least_text(kinds: Sequence[Kind]) -> int:
    """Return how many tokens of text it takes to make these kinds of drafts."""
    # A tenth is for judging, and the last tokens of an answer have nothing to learn from.
    least = (MIN_TEXT[kind] for kind in kinds)
    return max(max(int(1.2 * learnt + judged), 10 * judged) for learnt, judged in least)


@dataclass(frozen=True, slots=True)
class TimePlan:
    """How the time is divided."""

    #: The time in which the target writes text.
    text_s: float
    #: The time for training.
    training_s: float
    #: The time for comparing the drafts.
    judging_s: float
    #: The tokens of text that fit into `text_s`.
    n_tokens: int
    #: The prompts that the drafts are compared on.
    n_judged: int
    #: The least time that all of this takes.
    needed_s: float


def plan_time(
    left_s: float,
    costs: CostTable,
    n_drafts: int,
    text: TextOptions,
    n_least: int,
    n_kinds: int = 1,
) -> TimePlan:
    """Divide the time.

    Args:
        left_s: The time that is left.
        costs: What decoding costs the target.
        n_drafts: How many drafts are compared.
        text: How the target writes.
        n_least: The tokens that the text lacks at least.
        n_kinds: How many drafts are made.
    """
    # A token is written in a batch, and read again with its prompt, in larger ones.
    token_s = 3 * costs.seconds(text.n_parallel) / text.n_parallel
    least_text_s = n_least * token_s
    least_training_s = n_kinds * _TRAINING_S

    # Comparing drafts gets what the least text and training leave, but no more than a share.
    opening_s = _OPENING_S * n_drafts
    prompt_s = JUDGED_TOKENS * costs.seconds(1) * (1.0 + _TRIAL_SHARE * n_drafts)
    judging_s = min(_JUDGING_SHARE * left_s, left_s - _SLACK * least_text_s - least_training_s)
    n_judged = max(_LEAST_JUDGED, min(N_JUDGED, int((judging_s - opening_s) / prompt_s)))
    judging_s = opening_s + n_judged * prompt_s

    # The text gets its share of the rest, or more if it needs more and training can spare it.
    making_s = max(0.0, left_s - judging_s)
    text_s = max(_TEXT_SHARE * making_s, min(_SLACK * least_text_s, making_s - least_training_s))
    return TimePlan(
        text_s,
        making_s - text_s,
        judging_s,
        n_tokens=int(text_s / token_s),
        n_judged=n_judged,
        needed_s=least_text_s + least_training_s + opening_s + _LEAST_JUDGED * prompt_s,
    )


@dataclass(frozen=True)
class DraftBuilder:
    """Builds drafts for a target."""

    session: Session
    #: The prompts, and how much text is written.
    text_options: TextOptions
    #: The folder in which text and drafts are kept.
    cache: Path
    clock: Callable[[], float]
    progress: Progress
    #: Gets a sentence about each result.
    tell: Callable[[str], None]
    interrupted: Callable[[], bool]

    @cached_property
    def _identity(self) -> FileIdentity:
        return identity_of(self.session.options.target)

    @property
    def folder(self) -> Path:
        """The folder of the target's text."""
        return text_folder(self.cache, self._identity)

    @property
    def _text(self) -> TargetText:
        from specgen.train.target_text import TargetText

        return TargetText(self.folder, self.text_options.prompts)

    def n_lacking(self, kinds: Sequence[Kind]) -> int:
        """Return how many more tokens of text it takes to make these kinds of drafts."""
        n_have = sum(len(answer.tokens) for answer in self._text.answers)
        return max(0, least_text(kinds) - n_have)

    def make(
        self,
        kinds: Sequence[Kind],
        small: Path | None,
        plan: TimePlan,
    ) -> list[Path] | None:
        """Make drafts as planned.

        Args:
            kinds: The kinds of drafts to make.
            small: The model that is distilled, if one is.
            plan: The time.

        Returns:
            The files of the drafts, or None if interrupted.
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
            # The drafts that are left share the time that is left.
            now_s = self.clock()
            until_s = now_s + (ends_s - now_s) / (len(kinds) - number)
            file = self._make(kind, small, until_s)
            if file is None:
                return None
            made.append(file)
        return made

    def write_text(
        self,
        until_s: float = math.inf,
        n_least: int = 0,
        latest_s: float = 0.0,
    ) -> int:
        """Let the target write text until the clock reaches `until_s`.

        If there are fewer than `n_least` new tokens by then, it goes on until `latest_s`, and keeps
        the beginnings of answers.

        Returns:
            How many tokens there are.
        """
        from specgen.train.target_text import N_TOP, write_text

        session = self.session
        options = self.text_options
        # A float16 hidden state, the likeliest tokens with their probabilities, and the token.
        token_bytes = 2 * session.target.n_embd + 6 * N_TOP + 8
        size = human_bytes(options.n_tokens * token_bytes)
        self.tell(f"up to {options.n_tokens} tokens of text, {size}, in {self.folder}")
        budget = self._budget(until_s, f"{session.options.target.name} writes")
        return write_text(session, options, self.folder, budget, n_least, latest_s)

    def _budget(self, until_s: float, label: str) -> Budget:
        return Budget(self.clock, until_s, self.interrupted, partial(self.progress, label))

    def _make(
        self,
        kind: Kind,
        small: Path | None,
        until_s: float,
    ) -> Path | None:
        session = self.session
        target = session.options.target
        text = self._text
        made: TrainedHeads | Pruned | Distilled | None
        if kind == "heads":
            from specgen.train.head_training import train_heads

            output = heads_file(self.cache, self._identity)
            budget = self._budget(until_s, "training heads")
            made = train_heads(text, target, session.target, output, budget)
        elif kind == "pruned":
            from specgen.train.layer_skip import prune

            output = pruned_file(self.cache, self._identity)
            budget = self._budget(until_s, "judging sets of layers")
            made = prune(session, text, output, budget)
        else:
            assert small is not None, "a distilled draft is made from a model"
            output = distilled_file(self.cache, self._identity, small)
            made = self._distil(small, text, output, until_s)
        if made is None:
            return None
        self.tell(f"{output.name}: {made.text}")
        return output

    def _distil(
        self,
        draft: Path,
        text: TargetText,
        output: Path,
        until_s: float,
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
