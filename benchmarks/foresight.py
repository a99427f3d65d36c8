"""The speed that the same drafts could reach if acceptance were known in advance, and what is reached of it.

    python benchmarks/foresight.py -m 1.5b.gguf --draft 135m.gguf --draft ngram --prompts p.jsonl --json out.json

With this knowledge, each round would use the drafter that pays most there, and draft exactly the tokens that
will be accepted, or none. The fastest way through an answer is a shortest path, which `best_schedule` finds.
A real policy is compared with it: the difference is what the policy loses by not knowing. This is for answers
at temperature 0, where acceptance does not depend on chance.

The drafts are measured as by `specgen bench`, by turns with plain decoding. Then the target answers every
prompt once more, its batches are timed, and each drafter drafts at every place of the answers. Prints a line
for each way to draft: its name, its speed-up and the share of the best speed that it reached. `--json` has the
report of `specgen bench` with `foresight`, the costs and best ways, and `foresight_reached` of each figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import statistics
import sys
import time
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.answers import bench_prompts, write_json
from specgen.llama.kernels.admission import choose_kernels, wanted_in
from specgen.measure.bench import (
    NGRAM,
    Entry,
    Figures,
    Result,
    Runs,
    entries_of,
    figures_of,
    find_drafts,
    measure,
    speedup_of,
    to_json_object,
)
from specgen.measure.prompts import NOW, BenchPrompt
from specgen.measure.trial import Baseline, TargetAnswer, agreeing_path, measure_target
from specgen.method.draft import ROOT, Draft
from specgen.method.drafter import draft_alone
from specgen.method.policy import draft_up_to
from specgen.models.files import cache_folder
from specgen.options import (
    AUTO_TREE,
    DraftOptions,
    GenerationOptions,
    SessionOptions,
)
from specgen.session.drafter_factory import DrafterFactory
from specgen.session.open import open_memory
from specgen.session.session import Session
from specgen.text.sequence import Sequence

if TYPE_CHECKING:
    from specgen.options import DraftSource
    from specgen.system.progress import Progress

#: Every fourth look also times a draft of a single token.
_EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--target", required=True)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--draft-max", type=int, default=DraftOptions().max_tokens)
    parser.add_argument("--prompts", type=Path, help="default: those of `specgen bench`")
    parser.add_argument("-N", "--count", type=int, help="prompts of each category")
    parser.add_argument("-n", "--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(choose_kernels(wanted_in(os.environ), cache_folder()).label, file=sys.stderr)
    prompts = bench_prompts(asked.prompts, asked.count)
    base = SessionOptions(
        target=asked.target,
        draft="none",
        drafting=DraftOptions(max_tokens=asked.draft_max),
        generation=GenerationOptions(max_tokens=asked.max_tokens),
        cache=cache_folder(),
    )
    drafts = find_drafts([asked.target], asked.draft, quiet=True)
    entries = entries_of(base, drafts, [asked.policy], [AUTO_TREE], known=open_memory())
    runs = measure(entries, prompts, progress=_tell)
    found = foresee_entries(entries, prompts, runs)
    for each in figures_of(runs.results):
        share = share_reached(entries, runs, found, each)
        print(
            each.contender, f"{each.speedup:.2f}", "" if share is None else f"{share:.2f}", sep="\t"
        )
    write_json(asked.json, to_json(entries, prompts, runs, found))


def _tell(what: str, done: int, total: int) -> None:
    print(f"{what}: {done} of {total}", file=sys.stderr)


# --- the fastest way -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrafterForesight:
    """The possible drafts of one drafter for an answer of n tokens.

    `accepted[i]` is the number of tokens that would be accepted of a draft after the first i tokens. The
    seconds are for the first token of a draft, and for each further one.
    """

    accepted: tuple[int, ...]
    first_s: float
    next_s: float

    def seconds(self, n_drafted: int) -> float:
        return self.first_s + (n_drafted - 1) * self.next_s if n_drafted else 0.0


@dataclass(frozen=True, slots=True)
class ScheduledRound:
    """A round: the number of its drafter (None: none), and its number of drafted tokens, all of them
    accepted; the target adds one more."""

    drafter: int | None
    n_drafted: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds that make an answer, and the seconds that they take."""

    seconds: float
    steps: tuple[ScheduledRound, ...]


def best_schedule(
    n_tokens: int, batch_s: Callable[[int], float], drafters: abc.Sequence[DrafterForesight]
) -> Schedule:
    """Return the fastest way to make `n_tokens` tokens with these drafters.

    `batch_s` gives the target's seconds for a batch with a number of rows. A round with k drafted tokens has
    k + 1 rows and makes k + 1 tokens. Among equally fast ways it is the one with the shortest drafts.
    """
    longest = max((max(drafter.accepted, default=0) for drafter in drafters), default=0)
    rows_s = [batch_s(k + 1) for k in range(min(longest, max(0, n_tokens - 1)) + 1)]
    # Seconds from each place to the end, computed backwards.
    rest_s = [math.inf] * n_tokens + [0.0]
    steps = [ScheduledRound(None, 0)] * n_tokens
    for place in reversed(range(n_tokens)):
        rest_s[place] = rows_s[0] + rest_s[place + 1]
        for index, drafter in enumerate(drafters):
            for k in range(1, min(drafter.accepted[place], n_tokens - place - 1) + 1):
                seconds = drafter.seconds(k) + rows_s[k] + rest_s[place + k + 1]
                if seconds < rest_s[place]:
                    rest_s[place], steps[place] = seconds, ScheduledRound(index, k)
    way: list[ScheduledRound] = []
    place = 0
    while place < n_tokens:
        way.append(steps[place])
        place += steps[place].n_drafted + 1
    return Schedule(rest_s[0], tuple(way))


def run_lengths(
    n_tokens: int, n_max: int, look: Callable[[int], tuple[int, int]]
) -> tuple[int, ...]:
    """Return how many tokens a draft model would predict correctly after each place, at most `n_max`.

    `look(place)` drafts after the first `place` tokens and returns the number of drafted tokens and of
    correct ones. Whether a token is predicted does not depend on where its draft began, so `look` is called
    only after an error or the end of a draft.
    """
    is_right = [False] * n_tokens
    place = 0
    while place < n_tokens:
        n_drafted, n_right = look(place)
        is_right[place : place + n_right] = [True] * n_right
        # A wrong token after the correct ones shows that this place is wrong: it is skipped.
        place += n_right + 1 if n_right < n_drafted or not n_right else n_right
    lengths = [0] * (n_tokens + 1)
    for place in reversed(range(n_tokens)):
        lengths[place] = min(n_max, lengths[place + 1] + 1) if is_right[place] else 0
    return tuple(lengths[:n_tokens])


# --- real drafters ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The best way for one prompt with the drafts of `drafters`, by name.

    `plain_s` and `best_s` are seconds after the first token, by the measured costs: of plain decoding, and of
    the best way."""

    prompt: int
    drafters: tuple[str, ...]
    n_tokens: int
    n_rounds: int
    plain_s: float
    best_s: float

    @property
    def speedup(self) -> float:
        """The speed-up over plain decoding: the limit for these drafts and costs."""
        return self.plain_s / self.best_s


@dataclass(frozen=True, slots=True)
class Foresight:
    """The best ways for a target at temperature 0, and the costs behind them: `batch_s` has the seconds of a
    batch by its rows."""

    target: str
    batch_s: Mapping[int, float]
    #: Seconds for the first token of a draft and for each further one, by the drafter's name; medians over
    #: the answers.
    draft_s: Mapping[str, tuple[float, float]]
    foreseen: tuple[Foreseen, ...]

    def speedups(self, drafters: abc.Sequence[str]) -> dict[int, float]:
        """Return the best speed-up with exactly these drafters, by the prompt's number."""
        names = set(drafters)
        return {one.prompt: one.speedup for one in self.foreseen if set(one.drafters) == names}


def foresight_options(options: SessionOptions, n_max: int) -> SessionOptions:
    """Return session options in which drafters always draft up to `n_max` tokens, however unsure they are, at
    temperature 0."""
    drafting = replace(
        options.drafting, policy="fixed", max_tokens=n_max, min_tokens=0, p_min=0.0, ngrams=False
    )
    sampler = replace(options.sampler, temperature=0.0, xtc_probability=0.0, dynatemp_range=0.0)
    return replace(options, draft="none", drafting=drafting, sampler=sampler)


def foresee(
    session: Session,
    target: str,
    drafts: Mapping[str, DraftSource],
    groups: abc.Sequence[tuple[str, ...]],
    prompts: abc.Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Progress = lambda _what, _done, _total: None,
) -> Foresight | None:
    """Find the best way for these prompts with each group of drafts; groups name the drafts.

    The models have `foresight_options`; their draft is changed. Prompts that do not fit the context are left
    out. None if interrupted. Raises `PromptError` if no prompt fits; `ModelFileError`, `PairError`,
    `MemoryLimitError`, `BackendError`.
    """
    baseline = measure_target(
        session,
        [prompt.text for prompt in prompts],
        chat=chat,
        interrupted=interrupted,
        progress=lambda done, total: progress("foresight: the target", done, total),
    )
    if baseline is None:
        return None
    numbers = [
        prompt.number for place, prompt in enumerate(prompts, 1) if place not in baseline.skipped
    ]
    by_draft: dict[str, list[DrafterForesight]] = {}
    for name, source in drafts.items():
        found: list[DrafterForesight] = []
        session.change_draft(source)
        with session.contexts(baseline.n_ctx) as (_, opened):
            for answer in baseline.answers:
                progress(f"foresight: {name}", len(found), len(baseline.answers))
                if interrupted():
                    return None
                for draft in opened:
                    draft.remove(0)
                prompt = session.prompts.of_text(answer.prompt, chat=chat, now=NOW)
                generation = DrafterFactory(session).sequence(prompt, baseline.n_ctx, opened, 0)
                found.append(
                    foresee_drafter(generation, answer, session.n_rows_max - 1, session.clock)
                )
        by_draft[name] = found
    return _of_all(target, baseline, numbers, by_draft, groups)


def _of_all(
    target: str,
    baseline: Baseline,
    numbers: abc.Sequence[int],
    by_draft: Mapping[str, abc.Sequence[DrafterForesight]],
    groups: abc.Sequence[tuple[str, ...]],
) -> Foresight:
    costs = {
        name: (
            statistics.median(drafting.first_s for drafting in found),
            statistics.median(drafting.next_s for drafting in found),
        )
        for name, found in by_draft.items()
    }
    foreseen: list[Foreseen] = []
    for index, (number, answer) in enumerate(zip(numbers, baseline.answers, strict=True)):
        n_tokens = len(answer.tokens) - 1
        if n_tokens < 1:
            continue
        for names in groups:
            # One answer gives few times, so the costs are those over all answers.
            drafters = [DrafterForesight(by_draft[n][index].accepted, *costs[n]) for n in names]
            way = best_schedule(n_tokens, baseline.costs.rows_s, drafters)
            foreseen.append(_foreseen(number, names, n_tokens, baseline, way))
    return Foresight(target, dict(baseline.batch_s), costs, tuple(foreseen))


def _foreseen(
    number: int, names: tuple[str, ...], n_tokens: int, baseline: Baseline, way: Schedule
) -> Foreseen:
    plain_s = n_tokens * baseline.token_s
    return Foreseen(number, names, n_tokens, len(way.steps), plain_s, way.seconds)


def foresee_drafter(
    generation: Sequence, answer: TargetAnswer, n_max: int, clock: Callable[[], float]
) -> DrafterForesight:
    """Return the possible drafts of the generation's drafter for a known answer, with up to `n_max` tokens a
    round, at the places after its first token.

    `generation` is at the end of the prompt; `clock` gives seconds and is read around each proposal.
    """
    drafts = _Drafts(generation, answer.tokens, n_max, clock)
    n_tokens = len(answer.tokens) - 1
    if drafts.begin():
        accepted = run_lengths(n_tokens, n_max, drafts.look)
    else:
        # Without a model a draft costs nothing, and its errors depend on where it began.
        accepted = tuple(drafts.look(place)[1] for place in range(n_tokens))
    return DrafterForesight(accepted, *drafts.prices())


class _Drafts:
    """A drafter's drafts at the places of an answer, asked for in order."""

    def __init__(
        self,
        generation: Sequence,
        tokens: abc.Sequence[int],
        n_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._tokens = tokens
        self._n_max = n_max
        self._clock = clock
        self._n_looks = 0
        #: The seconds of drafts of a single token; the lengths and seconds of longer drafts.
        self._single_s: list[float] = []
        self._longer_s: list[tuple[int, float]] = []

    def begin(self) -> bool:
        """Let the drafter read the prompt, which is not in the costs; return whether it has a model."""
        drafters = self._generation.drafters
        if drafters is None:
            return False
        self._propose(1)
        self._generation.commit(self._tokens[0])
        return drafters.model is not None

    def look(self, place: int) -> tuple[int, int]:
        """Draft after the first token and `place` others. Return the number of correct tokens plus one if a
        wrong one follows, and the number of correct tokens."""
        generation = self._generation
        n_done = len(generation.tokens) - generation.n_prompt
        for token in self._tokens[n_done : 1 + place]:
            generation.commit(token)
        n_max = min(self._n_max, generation.n_draftable)
        if n_max < 1 or generation.drafters is None:
            return 0, 0
        self._n_looks += 1
        if self._n_looks % _EVERY == 1:
            single, seconds = self._propose(1)
            if len(single):
                self._single_s.append(seconds)
        draft, seconds = self._propose(n_max)
        if len(draft) > 1:
            self._longer_s.append((len(draft), seconds))
        path = agreeing_path(draft, self._tokens[1 + place :])
        is_wrong = bool(draft.children(path[-1] if path else ROOT))
        return len(path) + is_wrong, len(path)

    def prices(self) -> tuple[float, float]:
        """Return the median seconds for the first token of a draft, and for each further one."""
        first_s = statistics.median(self._single_s) if self._single_s else 0.0
        further = [(seconds - first_s) / (n - 1) for n, seconds in self._longer_s]
        return first_s, max(0.0, statistics.median(further)) if further else 0.0

    def _propose(self, n_max: int) -> tuple[Draft, float]:
        generation = self._generation
        drafters = generation.drafters
        assert drafters is not None, "what drafts"
        started = self._clock()
        found = drafters.look_up(generation.tokens, n_max)
        draft = draft_alone(drafters.propose(generation.tokens, draft_up_to(n_max)))
        return draft if len(draft) else found, self._clock() - started


# --- what a contender reached ----------------------------------------------------------------------


def foresee_entries(
    entries: abc.Sequence[Entry], prompts: abc.Sequence[BenchPrompt], runs: Runs
) -> Foresight:
    """Find the best ways for the drafts and the prompts of a benchmark of one target."""
    plain, groups = entries[0], groups_of(entries)
    drafts = {each.drafters[0]: each.options.draft for each in _drafting(entries)}
    if any(NGRAM in group for group in groups):
        drafts[NGRAM] = NGRAM
    skipped = {skip.prompt for skip in runs.skipped}
    prompts = [prompt for prompt in prompts if prompt.number not in skipped]
    n_max = max(entry.options.drafting.n_max for entry in entries)
    with Session(foresight_options(plain.options, n_max), time.perf_counter) as loaded:
        found = foresee(loaded, plain.target, drafts, groups, prompts, progress=_tell)
    assert found is not None, "it is not interrupted"
    return found


def groups_of(entries: abc.Sequence[Entry]) -> list[tuple[str, ...]]:
    """Return the groups of drafts that draft together, and the group of all of them. Drafts with a draft of
    their own are left out."""
    together = [entry.drafters for entry in _drafting(entries)]
    named = tuple(dict.fromkeys(name for group in together for name in group))
    return list(dict.fromkeys((*together, named))) if named else []


def _drafting(entries: abc.Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.drafters and not entry.options.helpers]


def share_reached(
    entries: abc.Sequence[Entry], runs: Runs, foresight: Foresight, figures: Figures
) -> float | None:
    """Return the share that is reached of perfect foresight's speed with the same drafts.

    It is the geometric mean over the answers; None if it is not known. A share is the seconds of foresight
    over the contender's own, both relative to plain decoding measured at about the same time, since a
    machine's speed changes.
    """
    drafters = next(each.drafters for each in entries if each.name == figures.contender)
    if figures.temperature > 0.0 or not drafters or figures.target != foresight.target:
        return None
    best = foresight.speedups(drafters)
    shares = [
        speedup / best[prompt] for prompt, speedup in _speedups(runs, figures) if prompt in best
    ]
    return statistics.geometric_mean(shares) if shares else None


def _speedups(runs: Runs, figures: Figures) -> list[tuple[int, float]]:
    lineup = (figures.target, figures.temperature)
    plain: dict[tuple[int, int], Result] = {}
    own: list[Result] = []
    for result in runs.results:
        if (result.target, result.temperature) != lineup:
            continue
        if result.is_plain:
            plain[result.prompt, result.round] = result
        if result.contender == figures.contender:
            own.append(result)
    with_plain = [(r, plain[r.prompt, r.round]) for r in own if (r.prompt, r.round) in plain]
    found = [(r.prompt, speedup_of(r, by)) for r, by in with_plain]
    return [(prompt, speedup) for prompt, speedup in found if speedup is not None]


def to_json(
    entries: abc.Sequence[Entry],
    prompts: abc.Sequence[BenchPrompt],
    runs: Runs,
    foresight: Foresight,
) -> dict[str, Any]:
    """Return the benchmark and its foresight as JSON values, with times in seconds."""
    found = to_json_object(entries, prompts, runs, shlex.join(sys.argv))
    for record, figures in zip(found["figures"], figures_of(runs.results), strict=True):
        record["foresight_reached"] = share_reached(entries, runs, foresight, figures)
    found["foresight"] = [
        {
            "target": foresight.target,
            "batch_s": {str(size): seconds for size, seconds in sorted(foresight.batch_s.items())},
            "drafters": {
                name: {"first_s": first_s, "next_s": next_s}
                for name, (first_s, next_s) in foresight.draft_s.items()
            },
            "best": [
                {**dataclasses.asdict(one), "speedup": one.speedup} for one in foresight.foreseen
            ],
        }
    ]
    return found


if __name__ == "__main__":
    main()
