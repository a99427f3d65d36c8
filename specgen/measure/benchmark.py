"""`specgen bench`: contenders answer the same prompts in turn, and the figures of each.

A contender is plain decoding or a way to draft.
"""

from __future__ import annotations

import contextlib
import datetime
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from specgen import __version__
from specgen.errors import PromptError, SpecgenError, UsageError
from specgen.events import CommittedEvent, Event, FinishedEvent, NoticeEvent
from specgen.measure.prompts import NOW, BenchPrompt
from specgen.method.drafter import never
from specgen.options import DraftSource, PolicyName, SessionOptions, TreeShape, staged
from specgen.session.choose_models import find_models
from specgen.system.files import as_json
from specgen.system.quantities import measured_gain

if TYPE_CHECKING:
    from specgen.session.measurement_store import MeasurementStore
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: The name of plain decoding.
PLAIN = "plain"
#: A prompt that fits in every context, and how many tokens of its answer warm up.
_WARM_UP = "Count from one to twenty."
_N_WARM_UP = 8

#: The target's draft, the draft's own draft, and so on.
Stages: TypeAlias = tuple[DraftSource, ...]


# --- what is compared


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender's name in tables, and its options."""

    name: str
    options: SessionOptions


def find_drafts(
    target: str | None,
    drafts: Sequence[str],
    *,
    quiet: bool,
) -> tuple[Path, list[Stages]]:
    """Find a target and its drafts.

    Args:
        target: as `specgen run` finds it.
        drafts: one or several drafts joined by plus signs, each of which drafts for the one before
            it; none stands for the draft that `specgen run` uses, and for n-grams.
        quiet: whether to leave out notices.
    """
    choices = [staged(target, _stages(draft), None) for draft in drafts or [""]]
    found = [find_models(choice, quiet=quiet) for choice in choices]
    stages = [(models.draft, *models.helpers) for models in found]
    if not drafts:
        stages.append(("ngram",))
    return found[0].target, stages


def _stages(draft: str) -> tuple[str, ...]:
    if not draft:
        return ()
    if Path(draft).expanduser().exists():  # a file's name may have a plus sign
        return (draft,)
    stages = tuple(draft.split("+"))
    if not all(stages):
        raise UsageError(f"--draft {draft}: a draft is missing before or after a plus sign")
    return stages


def entries_of(
    base: SessionOptions,
    drafts: Sequence[Stages],
    policies: Sequence[PolicyName],
    trees: Sequence[TreeShape],
    temperatures: Sequence[float],
    known: MeasurementStore,
) -> list[Entry]:
    """Return plain decoding and every draft with every policy and tree, for each temperature.

    Args:
        base: the options that all of them share.
        drafts: the drafts.
        policies: the policies; a tree of fixed shape does not need one.
        trees: the shapes of drafts.
        temperatures: the temperatures.
        known: has the numbers of threads that `specgen run` would use.
    """
    plain = replace(base, drafting=replace(base.drafting, policy="fixed"), draft="none", helpers=())
    entries = [Entry(PLAIN, _with_threads(plain, known))]
    for name, (draft, *helpers) in _by_name(drafts).items():
        options = _with_threads(replace(base, draft=draft, helpers=tuple(helpers)), known)
        for tree in trees:
            for policy in policies[:1] if tree.is_fixed else policies:
                parts = [name]
                if len(policies) > 1 and not tree.is_fixed:
                    parts.append(policy)
                if len(trees) > 1:
                    parts.append(f"tree {tree}")
                drafting = replace(base.drafting, policy=policy, tree=tree)
                entries.append(Entry(", ".join(parts), replace(options, drafting=drafting)))
    samplers = [replace(base.sampler, temperature=temperature) for temperature in temperatures]
    return [
        replace(entry, options=replace(entry.options, sampler=sampler))
        for sampler in samplers
        for entry in entries
    ]


def _with_threads(options: SessionOptions, known: MeasurementStore) -> SessionOptions:
    """Return options with the numbers of threads that were measured to be best."""
    from specgen.session.measurement_store import SessionCosts

    costs = SessionCosts(options, known)
    options = replace(options, target_context=costs.context_options())
    if isinstance(options.draft, Path):
        options = replace(options, draft_context=costs.context_options(options.draft))
    return options


def _by_name(found: Sequence[Stages]) -> dict[str, Stages]:
    """Return drafts by name, each once, without "none".

    The name of a file is its path if another one has the same name.
    """
    kept = [stages for stages in dict.fromkeys(found) if stages != ("none",)]
    files = {source for stages in kept for source in stages if isinstance(source, Path)}
    n_files = Counter(path.name for path in files)

    def name_of(source: DraftSource) -> str:
        if isinstance(source, Path) and n_files[source.name] == 1:
            return source.name
        return str(source)

    return {"+".join(map(name_of, stages)): stages for stages in kept}


# --- answers in turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one answer, named as in `FinishedEvent`; None if not reported."""

    text: str
    n_tokens: int
    finish_reason: str | None
    #: After the first token.
    tokens_per_s: float | None
    time_to_first_token_s: float | None
    token_ids: tuple[int, ...] | None = None
    n_rounds: int | None = None
    n_drafted: int | None = None
    n_accepted: int | None = None
    drafted_by_depth: tuple[int, ...] = ()
    mean_accepted_length: float | None = None
    rounds_by_tokens: tuple[int, ...] = ()
    #: Notices for the user, for example that drafting failed.
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that answers prompts."""

    temperature: float
    name: str
    #: Answers a prompt, as typed. Raises `PromptError` if it does not fit, or another error if the
    #: contender cannot continue.
    answer: Callable[[str], Outcome]
    warm_up: Callable[[], object] = lambda: None


def contender_of(
    name: str,
    session: Session,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = never,
) -> Contender:
    """Return a session as a contender."""
    from specgen.session.engine import generate

    def events_of(text: str) -> Iterator[Event]:
        prompt = session.prompts.of_text(text, chat=chat, now=NOW)
        # Closing the generator frees the contexts.
        with contextlib.closing(generate(session, prompt, interrupted=interrupted)) as events:
            yield from events

    def answer(text: str) -> Outcome:
        *others, finished = events_of(text)
        assert isinstance(finished, FinishedEvent), "the last event of a generation"
        notices = tuple(event.message for event in others if isinstance(event, NoticeEvent))
        names = [each.name for each in fields(Outcome) if each.name != "notices"]
        values: dict[str, Any] = {name: getattr(finished, name) for name in names}
        return Outcome(**values, notices=notices)

    def warm_up() -> None:
        for event in events_of(_WARM_UP):
            if isinstance(event, CommittedEvent) and event.n_tokens >= _N_WARM_UP:
                break

    return Contender(session.options.sampler.temperature, name, answer, warm_up)


@dataclass(frozen=True, slots=True)
class Result:
    """One answer of a contender."""

    temperature: float
    contender: str
    #: The prompt's number in the file.
    prompt: int
    category: str
    #: Which pass through all prompts this is, from 1.
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a contender was left out afterwards; plain decoding only leaves out the prompt."""

    temperature: float
    contender: str
    #: The number of the prompt that it could not answer; None if it failed to warm up.
    prompt: int | None
    message: str


@dataclass(slots=True)
class Runs:
    """What was measured so far."""

    results: list[Result] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    #: What computed: specgen's kernels or llama.cpp's.
    kernels: str = ""
    #: What ended the measurement early.
    error: SpecgenError | None = None
    is_interrupted: bool = False
    #: The share of the cores that other programs took.
    others_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    contender: Contender
    #: None to warm up.
    prompt: BenchPrompt | None
    round: int


def take_turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    *,
    n_rounds: int = 1,
    interrupted: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Let all contenders answer all prompts.

    Each prompt is answered by all in turn, by plain decoding first. So a slow moment of the machine
    slows all of them.

    Args:
        contenders: the contenders.
        prompts: the prompts.
        runs: where to add results and failures.
        n_rounds: how often all prompts are answered.
        interrupted: whether to stop.
        progress: receives how many turns are done, and how many there are.

    Raises:
        PromptError: no prompt could be answered.
        SpecgenError: plain decoding failed otherwise.
    """
    turns = _turns(contenders, prompts, n_rounds)
    failed: set[Contender] = set()
    #: The numbers of prompts that plain decoding cannot answer.
    skipped: set[int] = set()
    for n_done, turn in enumerate(turns):
        progress(n_done, len(turns))
        if interrupted():
            return
        contender = turn.contender
        number = None if turn.prompt is None else turn.prompt.number
        if contender in failed or number in skipped:
            continue
        try:
            result = _take(turn)
        except SpecgenError as error:
            if contender.name != PLAIN:
                failed.add(contender)
            elif number is not None and isinstance(error, PromptError):
                skipped.add(number)
            else:
                raise
            failure = Failure(contender.temperature, contender.name, number, error.message)
            runs.failures.append(failure)
            continue
        if result is None:
            continue
        if result.outcome.finish_reason == "interrupted" or interrupted():
            return
        runs.results.append(result)
    progress(len(turns), len(turns))
    if prompts and len(skipped) == len(prompts):
        last = runs.failures[-1]
        raise PromptError(f"no prompt can be answered; prompt {last.prompt}: {last.message}")


def _take(turn: _Turn) -> Result | None:
    """Take a turn; None if it only warms up."""
    contender = turn.contender
    prompt = turn.prompt
    if prompt is None:
        contender.warm_up()
        return None
    return Result(
        temperature=contender.temperature,
        contender=contender.name,
        prompt=prompt.number,
        category=prompt.category,
        round=turn.round,
        outcome=contender.answer(prompt.text),
    )


def _turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    n_rounds: int,
) -> list[_Turn]:
    turns = [_Turn(contender, prompt=None, round=0) for contender in contenders]
    n_asked = 0
    for round_number in range(1, n_rounds + 1):
        for prompt in prompts:
            order = _in_turn(contenders, n_asked)
            turns += [_Turn(contender, prompt, round_number) for contender in order]
            n_asked += 1
    return turns


def _in_turn(contenders: Sequence[Contender], n_asked: int) -> Iterator[Contender]:
    """Yield, for each temperature, plain decoding and then the others.

    They are rotated by the number of prompts asked before, so that none always follows the same.
    """
    for temperature in dict.fromkeys(each.temperature for each in contenders):
        plain, *others = (each for each in contenders if each.temperature == temperature)
        start = n_asked % len(others) if others else 0
        yield from (plain, *others[start:], *others[:start])


def measure(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    n_rounds: int = 1,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = never,
) -> Runs:
    """Measure all entries, each with models of its own: none gains by what others learn.

    An error after the first result ends the measurement, and is in what is returned.

    Raises:
        SpecgenError: an error before the first result.
    """
    from specgen.session.session import Session
    from specgen.system.machine import LoadOfOthers

    runs = Runs()
    load = LoadOfOthers()
    contenders: list[Contender] = []
    try:
        with contextlib.ExitStack() as stack:
            for n_done, entry in enumerate(entries):
                progress("loading", n_done, len(entries))
                session = stack.enter_context(Session(entry.options, time.perf_counter))
                contenders.append(contender_of(entry.name, session, chat, interrupted))
                runs.kernels = session.target.kernels
            take_turns(
                contenders,
                prompts,
                runs,
                n_rounds=n_rounds,
                interrupted=interrupted,
                progress=partial(progress, entry.options.target.name),
            )
    except SpecgenError as error:
        if not runs.results:
            raise
        runs.error = error
    runs.is_interrupted = interrupted()
    runs.others_share = load.share
    return runs


# --- figures


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a contender, for all prompts or a category; None if they are not known."""

    temperature: float
    contender: str
    category: str
    n_answers: int
    #: The geometric mean of the speed-ups over plain decoding.
    speedup: float | None
    quartiles: tuple[float, float] | None
    #: The speed-ups of the worst and of the best prompt.
    worst_speedup: float | None
    best_speedup: float | None
    #: The median.
    tokens_per_s: float | None
    acceptance_rate: float | None
    mean_accepted_length: float | None
    #: The median time to the first token, relative to plain decoding.
    first_token: float | None
    #: The figures of each category; empty for a category.
    categories: tuple[Figures, ...]


#: A temperature, the number of a prompt, and a round.
_TurnKey: TypeAlias = tuple[float, int, int]


def figures_of(results: Sequence[Result]) -> tuple[Figures, ...]:
    """Return the figures of each contender at each temperature."""
    plain = {_turn_key(result): result.outcome for result in results if result.contender == PLAIN}
    by_contender: dict[tuple[float, str], list[Result]] = defaultdict(list)
    for result in results:
        by_contender[result.temperature, result.contender].append(result)
    return tuple(_contender_figures(answers, plain) for answers in by_contender.values())


def _turn_key(result: Result) -> _TurnKey:
    return result.temperature, result.prompt, result.round


def _contender_figures(results: Sequence[Result], plain: Mapping[_TurnKey, Outcome]) -> Figures:
    by_category: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_category[result.category].append(result)
    categories = tuple(_figures(part, plain, name) for name, part in by_category.items())
    # Categories count alike, however many answers they have.
    speedups = [each.speedup for each in categories if each.speedup is not None]
    overall = _figures(results, plain, "overall")
    return replace(overall, speedup=_geometric_mean(speedups), categories=categories)


def _figures(
    results: Sequence[Result],
    plain: Mapping[_TurnKey, Outcome],
    category: str,
) -> Figures:
    outcomes = [result.outcome for result in results]

    # Relative to plain decoding of the same prompt in the same round.
    speedups_by_prompt: dict[int, list[float]] = defaultdict(list)
    first_tokens: list[float] = []
    for result in results:
        drafted = result.outcome
        other = plain.get(_turn_key(result))
        if other is None:
            continue
        if drafted.tokens_per_s and other.tokens_per_s:
            speedups_by_prompt[result.prompt].append(drafted.tokens_per_s / other.tokens_per_s)
        if drafted.time_to_first_token_s is not None and other.time_to_first_token_s:
            first_tokens.append(drafted.time_to_first_token_s / other.time_to_first_token_s)
    speedups = [ratio for ratios in speedups_by_prompt.values() for ratio in ratios]
    of_prompts = [statistics.geometric_mean(ratios) for ratios in speedups_by_prompt.values()]

    # Over all answers.
    speeds = [outcome.tokens_per_s for outcome in outcomes if outcome.tokens_per_s]
    n_rounds = sum(outcome.n_rounds or 0 for outcome in outcomes)
    n_tokens = sum((each.mean_accepted_length or 0.0) * (each.n_rounds or 0) for each in outcomes)
    n_positions = sum(sum(outcome.drafted_by_depth) for outcome in outcomes)
    n_accepted = sum(outcome.n_accepted or 0 for outcome in outcomes)
    return Figures(
        temperature=results[0].temperature,
        contender=results[0].contender,
        category=category,
        n_answers=len(results),
        speedup=_geometric_mean(speedups),
        quartiles=_quartiles(speedups),
        worst_speedup=min(of_prompts, default=None),
        best_speedup=max(of_prompts, default=None),
        tokens_per_s=_median(speeds),
        acceptance_rate=n_accepted / n_positions if n_positions else None,
        mean_accepted_length=n_tokens / n_rounds if n_rounds else None,
        first_token=_median(first_tokens),
        categories=(),
    )


def _geometric_mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def gains(figures: Sequence[Figures]) -> Iterator[str]:
    """Yield the speed-up of each way to draft in words."""
    for each in figures:
        if each.contender == PLAIN:
            continue
        worst = each.worst_speedup
        best = each.best_speedup
        if each.speedup and worst and best:
            gain = measured_gain(each.speedup, worst, best, each.n_answers)
            at = f" at temperature {each.temperature:g}" if each.temperature else ""
            yield f"{each.contender}{at}: {gain}"


# --- the report


def to_json_object(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    command: str,
) -> dict[str, Any]:
    """Return everything that was measured, as `--json` writes it."""
    from specgen.llama import build
    from specgen.system.machine import look_at_machine

    return {
        "specgen": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "machine": as_json(look_at_machine()),
        "llama_cpp": as_json(build()),
        "kernels": runs.kernels,
        "is_interrupted": runs.is_interrupted,
        "others_share": runs.others_share,
        "contenders": as_json(entries),
        "prompts": as_json(prompts),
        "figures": as_json(figures_of(runs.results)),
        "failures": as_json(runs.failures),
        "results": as_json(runs.results),
    }
