"""Makes drafts for a target in a given time: first the target's own text, then a draft of each kind."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from specgen.errors import ModelFileError
from specgen.models import FileIdentity, human_bytes, identify
from specgen.system.atomic_files import new_beside
from specgen.system.json_lines import write_errors
from specgen.system.progress import Progress
from specgen.training.made_files import distilled_file, heads_file, pruned_file, text_folder

if TYPE_CHECKING:
    from specgen.engine.loaded_models import Models
    from specgen.training.texts import TargetText

Kind: TypeAlias = Literal["heads", "distilled", "pruned"]

#: Tokens of the target's own text for making drafts; with twice as many, heads agree only a little more.
N_TOKENS = 40_000
#: The most tokens of an answer, and the number of answers that are generated at once.
N_ANSWER_TOKENS = 256
N_PARALLEL = 16
#: The largest share of the time that is spent on the text.
_SHARE_OF_TEXT = 0.6


@dataclass(frozen=True, slots=True)
class TextWanted:
    """The text to make drafts from: answers to `prompts`, `n_tokens` tokens in all, `n_parallel` answers at
    once, each with at most `max_tokens` tokens."""

    prompts: Sequence[str]
    n_tokens: int = N_TOKENS
    max_tokens: int = N_ANSWER_TOKENS
    n_parallel: int = N_PARALLEL


def own_prompts() -> list[str]:
    """Return the prompts that come with specgen."""
    text = resources.files("specgen.training").joinpath("prompts.jsonl").read_text("utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


class Workshop:
    """Makes drafts for a target, in a cache folder.

    `clock` gives seconds. `tell` gets a sentence about each result; `interrupted` returns whether to stop.
    """

    def __init__(
        self,
        loaded: Models,
        wanted: TextWanted,
        cache: Path,
        *,
        clock: Callable[[], float],
        progress: Progress,
        tell: Callable[[str], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._loaded = loaded
        self._wanted = wanted
        self._cache = cache
        self._clock = clock
        self._progress = progress
        self._tell = tell
        self._interrupted = interrupted
        self._target = loaded.options.target
        self._identity = _identity(self._target)
        #: The folder of the text.
        self.folder = text_folder(cache, self._identity)

    def make(self, kinds: Sequence[Kind], small: Path | None, minutes: float) -> list[Path] | None:
        """Make drafts of these kinds in about `minutes` and return their files; None if interrupted.

        After an interruption the text is kept. `small` is the model that a distilled draft is made from.
        Raise what making each kind raises: `UsageError`, `PairError`, `ModelFileError`, `MemoryLimitError`,
        `OutputError`.
        """
        if "pruned" in kinds:
            from specgen.training.pruned.files import check_prunable

            check_prunable(self._loaded.target)  # before minutes are spent on the text
        started_s = self._clock()
        until_s = started_s + 60.0 * minutes
        n_have = self.write_text(until_s=started_s + _SHARE_OF_TEXT * 60.0 * minutes)
        if n_have < self._wanted.n_tokens and not self._interrupted():
            self._tell(
                f"{n_have} tokens to learn from; more time or more --prompts would give more"
            )
        made: list[Path] = []
        for number, kind in enumerate(kinds):
            if self._interrupted():
                return None
            share_s = (until_s - self._clock()) / (len(kinds) - number)
            if kind == "heads":
                file = self._train_heads(share_s)
            elif kind == "pruned":
                file = self._prune(share_s)
            else:
                assert small is not None, "a distilled draft is made from a model"
                file = self._distil(small, share_s)
            if file is None:
                return None
            made.append(file)
        return made

    def write_text(self, until_s: float = float("inf")) -> int:
        """Let the target write text until the clock reaches `until_s`; return the number of tokens there are.

        Raise what `specgen.training.texts.write_text` raises."""
        from specgen.training.texts import bytes_of, write_text

        wanted = self._wanted
        size = human_bytes(bytes_of(wanted.n_tokens, self._loaded.target.n_embd))
        self._tell(f"up to {wanted.n_tokens} tokens of text, {size}, in {self.folder}")
        return write_text(
            self._loaded,
            wanted.prompts,
            self.folder,
            n_tokens=wanted.n_tokens,
            n_parallel=wanted.n_parallel,
            max_tokens=wanted.max_tokens,
            interrupted=lambda: self._interrupted() or self._clock() > until_s,
            progress=lambda done, total: self._progress(f"{self._target.name} writes", done, total),
        )

    def _text(self) -> TargetText:
        from specgen.training.texts import TargetText

        n_embd = self._loaded.target.n_embd
        return TargetText(self.folder, n_embd, self._wanted.prompts)

    def _train_heads(self, seconds: float) -> Path | None:
        from specgen.llama.decoder_heads import write_heads
        from specgen.training.heads import train_heads

        model = self._loaded.target
        trained = train_heads(
            self._text(),
            self._target,
            name=model.name,
            n_vocab=model.vocabulary.n_tokens,
            vocabulary=model.vocabulary.digest(),
            clock=self._clock,
            until_s=self._clock() + seconds,
            interrupted=self._interrupted,
            progress=lambda done, total: self._progress("training heads", done, total),
        )
        if trained is None:
            return None
        heads = heads_file(self._cache, self._identity)
        with write_errors(heads), new_beside(heads) as new:
            write_heads(new, trained.weights)
            new.replace(heads)
        first = ", ".join(f"{share:.2f}" for share in trained.after.top_1)
        among = ", ".join(f"{share:.2f}" for share in trained.after.top_4)
        self._tell(
            f"on held-back answers the heads' first guess is right for {first} of the tokens one, two "
            f"and three ahead, one of their first four for {among} ({trained.n_places} places learnt "
            f"from, {trained.n_steps} steps)"
        )
        return heads

    def _distil(self, draft: Path, seconds: float) -> Path | None:
        from specgen.llama import LlamaModel
        from specgen.training.distil.distillation import distil
        from specgen.training.distil.training_texts import training_texts

        with contextlib.closing(LlamaModel(draft, vocabulary_only=True)) as small:
            now = datetime.datetime.now().astimezone()
            texts = training_texts(self._text(), self._loaded.target, small, now)
        output = distilled_file(self._cache, self._identity, draft)
        fitted = distil(
            draft,
            texts,
            output,
            minutes=seconds / 60.0,
            clock=self._clock,
            progress=lambda done, total, _: self._progress(f"fitting {draft.name}", done, total),
            interrupted=self._interrupted,
        )
        if fitted is None:
            return None
        self._tell(
            f"{draft.name} says what the target says at {fitted.agreement_after:.3f} of the places of "
            f"held-back answers; before it was fitted, at {fitted.agreement_before:.3f} "
            f"({fitted.n_steps} steps)"
        )
        return output

    def _prune(self, seconds: float) -> Path | None:
        from specgen.training.pruned.making import make_pruned

        output = pruned_file(self._cache, self._identity)
        made = make_pruned(
            self._loaded,
            self._text(),
            output,
            until_s=self._clock() + seconds,
            clock=self._clock,
            interrupted=self._interrupted,
            progress=self._progress,
        )
        if made is None:
            return None
        blocks = ", ".join(map(str, made.left_out))
        self._tell(
            f"{len(made.left_out)} of {made.n_layer} layers left out ({blocks}): it says what the "
            f"target says at {made.agreement:.3f} of the places of held-back answers, a token takes "
            f"{made.cost:.2f} of the target's, the expected speed-up is {made.speedup:.2f} "
            f"({made.n_judged} sets were judged)"
        )
        return output


def _identity(path: Path) -> FileIdentity:
    identity = identify(path)
    if identity is None:
        raise ModelFileError(f"{path}: no such file")
    return identity


__all__ = [
    "N_ANSWER_TOKENS",
    "N_PARALLEL",
    "N_TOKENS",
    "Kind",
    "TextWanted",
    "Workshop",
    "own_prompts",
]
