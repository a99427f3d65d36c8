"""The options of prompts to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specgen.cli.flags.groups import group
from specgen.sampler_options import option

_trial = partial(option, panel="Trials")


@dataclass(frozen=True, slots=True)
class Trials:
    """Prompts to measure with, and how many tokens of each answer count."""

    prompts: Path | None = _trial(
        None,
        "--prompts",
        'Prompts to try with: JSON Lines with "prompt" or "turns".',
        show_default="a few of our own",
    )
    n_prompts: int = _trial(
        4, "--count -N", "How many prompts to use, spread evenly over the file.", min=1
    )
    max_tokens: int = _trial(
        64, "--max-tokens --predict --n-predict -n", "How many tokens of each answer to use.", min=2
    )

    def numbered(self) -> list[tuple[int, str]]:
        """Return the prompts with their numbers in the file, from 1. Raise `PromptError`."""
        from specgen.measure.prompts import evenly_chosen, read_prompts, trial_prompts

        every = trial_prompts() if self.prompts is None else read_prompts(self.prompts)
        return evenly_chosen(enumerate(every, 1), self.n_prompts)

    def texts(self) -> list[str]:
        """Return the prompts. Raise `PromptError`."""
        return [text for _, text in self.numbered()]


TRIALS = group(Trials)(Trials)
