"""Run a benchmark: all contenders answer each prompt, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specgen.errors import PromptError, SpecgenError
from specgen.measure.bench.contenders import Contender, Outcome
from specgen.measure.bench.prompts import BenchPrompt

#: A prompt that fits every context.
_WARM_UP = "Count from one to twenty."

#: Called with the number of answers that are done and of all answers.
PromptsDone = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Lineup:
    """Plain decoding and the contenders that are compared with it, for a target at a temperature."""

    target: str
    temperature: float
    plain: Contender
    others: tuple[Contender, ...]

    def turn(self, number: int) -> tuple[Contender, ...]:
        """Return the order for one prompt: plain decoding first, the others rotated, so that none always
        follows the same one."""
        start = number % len(self.others) if self.others else 0
        return (self.plain, *self.others[start:], *self.others[:start])


@dataclass(frozen=True, slots=True)
class Result:
    """An answer. `prompt` is its number in the file; `round` counts passes through all prompts, from 1."""

    target: str
    temperature: float
    contender: str
    is_plain: bool
    prompt: int
    category: str
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """A contender that could not go on, and the prompt at which it failed; None means in the warm-up."""

    target: str
    temperature: float
    contender: str
    prompt: int | None
    message: str


@dataclass(frozen=True, slots=True)
class SkippedPrompt:
    """A prompt that plain decoding could not answer, and the reason."""

    target: str
    prompt: int
    reason: str


@dataclass(slots=True)
class Runs:
    """The results so far. A contender that failed has no further results."""

    results: list[Result] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[SkippedPrompt] = field(default_factory=list)


def run_lineups(
    lineups: Sequence[Lineup],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    *,
    n_rounds: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
    progress: PromptsDone = lambda _done, _total: None,
) -> None:
    """Let all contenders answer all prompts, `n_rounds` times, after a warm-up; add the results to `runs`.

    For each prompt the contenders answer one after the other, so that a machine that is slow for a while
    slows all of them. An interrupted answer is not a result. Raise the `SpecgenError` of a plain contender,
    and `PromptError` if no prompt could be answered.
    """
    _Job(lineups, prompts, runs, n_rounds, interrupted, progress).run()


class _Job:
    def __init__(
        self,
        lineups: Sequence[Lineup],
        prompts: Sequence[BenchPrompt],
        runs: Runs,
        n_rounds: int,
        interrupted: Callable[[], bool],
        progress: PromptsDone,
    ) -> None:
        self._lineups = lineups
        self._prompts = prompts
        self._n_rounds = n_rounds
        self._interrupted = interrupted
        self._progress = progress
        self._runs = runs
        #: Lineup and name of contenders that failed; target and number of prompts that cannot be answered.
        self._out: set[tuple[int, str]] = set()
        self._unfit: set[tuple[str, int]] = set()
        self._n_contenders = sum(1 + len(lineup.others) for lineup in lineups)
        self._n_done = 0
        self._has_answers = False

    def run(self) -> None:
        self._tell(0)
        for index, lineup in enumerate(self._lineups):
            for contender in lineup.turn(0):
                if self._interrupted():
                    return
                self._warm_up(index, contender)
        for number, (round_number, prompt) in enumerate(self._turns()):
            for index, lineup in enumerate(self._lineups):
                self._n_done = number * self._n_contenders
                if not self._answers(index, lineup.turn(number), prompt, round_number):
                    return
        self._n_done = self._n_contenders * len(self._prompts) * self._n_rounds
        self._tell(0)
        if not self._has_answers and self._unfit:
            last = self._runs.skipped[-1]
            raise PromptError(f"no prompt can be answered; prompt {last.prompt}: {last.reason}")

    def _turns(self) -> Iterator[tuple[int, BenchPrompt]]:
        for round_number in range(1, self._n_rounds + 1):
            for prompt in self._prompts:
                yield round_number, prompt

    def _warm_up(self, index: int, contender: Contender) -> None:
        try:
            contender.warm_up(_WARM_UP)
        except SpecgenError as error:
            self._fail(index, contender, None, error)

    def _answers(
        self, index: int, turn: Sequence[Contender], prompt: BenchPrompt, round_number: int
    ) -> bool:
        """Let a lineup answer a prompt; return False if interrupted."""
        lineup = self._lineups[index]
        n_before = sum(1 + len(earlier.others) for earlier in self._lineups[:index])
        for place, contender in enumerate(turn):
            self._tell(n_before + place)
            if self._interrupted():
                return False
            if (index, contender.name) in self._out:
                continue
            if (lineup.target, prompt.number) in self._unfit:
                break
            outcome = self._answer(index, contender, prompt)
            if outcome is None:
                continue
            if outcome.is_interrupted or self._interrupted():
                return False
            result = Result(
                target=lineup.target,
                temperature=lineup.temperature,
                contender=contender.name,
                is_plain=contender is lineup.plain,
                prompt=prompt.number,
                category=prompt.category,
                round=round_number,
                outcome=outcome,
            )
            self._runs.results.append(result)
            self._has_answers = True
        return True

    def _answer(self, index: int, contender: Contender, prompt: BenchPrompt) -> Outcome | None:
        lineup = self._lineups[index]
        try:
            return contender.answer(prompt.text)
        except PromptError as error:
            if contender is not lineup.plain:
                self._fail(index, contender, prompt.number, error)
                return None
            self._unfit.add((lineup.target, prompt.number))
            skipped = SkippedPrompt(lineup.target, prompt.number, error.message)
            self._runs.skipped.append(skipped)
            return None
        except SpecgenError as error:
            self._fail(index, contender, prompt.number, error)
            return None

    def _fail(
        self, index: int, contender: Contender, prompt: int | None, error: SpecgenError
    ) -> None:
        lineup = self._lineups[index]
        if contender is lineup.plain:  # there is nothing to compare with
            raise error
        self._out.add((index, contender.name))
        self._runs.failures.append(
            Failure(lineup.target, lineup.temperature, contender.name, prompt, error.message)
        )

    def _tell(self, n_more: int) -> None:
        total = self._n_contenders * len(self._prompts) * self._n_rounds
        self._progress(self._n_done + n_more, total)
