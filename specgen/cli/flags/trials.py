"""The options of prompts to measure with, and of a comparison of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli import flags
from specgen.cli.flags.typer_groups import group
from specgen.cli.output import Output
from specgen.errors import UsageError
from specgen.option_fields import option
from specgen.options import Contexts, DraftOptions, GenerationOptions, SamplerOptions

if TYPE_CHECKING:
    from specgen.measure.prompts import BenchPrompt
    from specgen.options import SessionOptions
    from specgen.session.choose_models import DraftChoice, Sources

_trial = partial(option, panel="Trials")


@dataclass(frozen=True, slots=True)
class Trials:
    """The prompts to measure with, and how many tokens of each answer to use."""

    prompts: Path | None = _trial(
        None,
        "--prompts",
        'Prompts to try with: JSON Lines with "prompt" or "turns".',
        show_default="a few built-in prompts",
    )
    n_prompts: int = _trial(
        4,
        "--count -N",
        "How many prompts to use, spread evenly over the file.",
        min=1,
    )
    max_tokens: int = _trial(
        64,
        "--max-tokens --predict --n-predict -n",
        "How many tokens of each answer to use.",
        min=2,
    )

    def chosen(self) -> list[BenchPrompt]:
        """Return the prompts to use: `n_prompts` of the file, or of the built-in ones."""
        from specgen.measure.prompts import evenly_chosen, read_bench_prompts, trial_prompts

        prompts = trial_prompts() if self.prompts is None else read_bench_prompts(self.prompts)
        return evenly_chosen(prompts, self.n_prompts)


TRIALS = group(Trials)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The options of commands that compare drafts and print a ranking."""

    #: The prompts, and how long answers to them are.
    trials: Trials
    chat: bool | None = flags.chat_option()
    #: How much is drafted, and how drafts are verified.
    drafting: DraftOptions
    #: The contexts of target and draft, and what computes on the CPU.
    machine: Contexts
    #: Where notes and results are printed.
    output: Output
    as_json: bool = flags.JSON_REPORT

    def options(self, sources: Sources) -> SessionOptions:
        """Return the options of the session in which drafts for these models are compared."""
        return trial_options(sources, self.trials.max_tokens, self.machine, self.drafting)


COMPARISON = group(
    Comparison,
    trials=TRIALS,
    drafting=flags.drafting,
    machine=flags.machine,
    output=flags.loudness,
)


def alone(target: Path) -> Sources:
    """Return the models of a session with this target and no draft."""
    from specgen.session.choose_models import DraftChoice, Sources

    return Sources(target, (DraftChoice("none"),))


def check_drafts(
    drafting: DraftOptions,
    purpose: str,
    draft: str | None = None,
) -> None:
    """Check that something is drafted at all.

    Args:
        drafting: The options of drafting.
        purpose: What the command does with drafts, as a verb for the message.
        draft: The draft that the user named, if the command takes one that has to draft.

    Raises:
        UsageError: If --draft-max is 0, or the draft is "none".
    """
    without = ""
    if draft == "none":
        without = "--draft none"
    elif drafting.n_max == 0:
        without = "--draft-max 0"
    if without:
        raise UsageError(f"{without} drafts nothing, so there is nothing to {purpose}")


def check_choice(choice: DraftChoice, purpose: str) -> None:
    """Check that the first draft to try for a target drafts at all.

    Args:
        choice: The draft; its reason is why it was chosen.
        purpose: What the command does with drafts, as a verb for the message.

    Raises:
        UsageError: If it was saved for the target that no draft pays.
    """
    if choice.draft == "none":
        hint = "name a draft with --draft"
        raise UsageError(f"{choice.why}: there is nothing to {purpose}", hint)


def trial_options(
    sources: Sources,
    max_tokens: int,
    machine: Contexts,
    drafting: DraftOptions = DraftOptions(),
) -> SessionOptions:
    """Return the options of a session that measures drafts on greedy answers of the target.

    Args:
        sources: The models.
        max_tokens: The maximum number of tokens of each answer.
        machine: The contexts of the models, and the kernels.
        drafting: The options of drafting.
    """
    from specgen.session.open import WantedSession

    wanted = WantedSession.of(
        sources,
        sampling=SamplerOptions(),
        drafting=drafting,
        generation=GenerationOptions(max_tokens=max_tokens),
        contexts=machine,
    )
    return wanted.options
