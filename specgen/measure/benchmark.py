"""`specgen bench`: ways to draft and plain decoding answer the same prompts in turns, and the
figures of each.
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
#: A prompt that fits every context, and how many tokens of an answer warm up.
_WARM_UP, _N_WARM_UP = "Count from one to twenty.", 8

#: The target's draft, the draft's own draft, and so on.
Stages: TypeAlias = tuple[DraftSource, ...]


# --- what is compared


@dataclass(frozen=True, slots=True)
class Entry:
    """A way to draft by its name in tables, and the options."""

    name: str
    options: SessionOptions


def find_drafts(
    target: str | None, drafts: Sequence[str], *, quiet: bool
) -> tuple[Path, list[Stages]]:
    """Find a target and its drafts, each with its own behind plus signs; by default `specgen
    run`'s, and n-grams.
    """
    named = map(_stages, drafts or [""])
    found = [find_models(staged(target, draft, None), quiet=quiet) for draft in named]
    stages = [(each.draft, *each.helpers) for each in found]
    return found[0].target, stages if drafts else [*stages, ("ngram",)]


def _stages(draft: str) -> tuple[str, ...]:
    if not draft or Path(draft).expanduser().exists():
        return (draft,) if draft else ()
    stages = tuple(draft.split("+"))
    if not all(stages):
        raise UsageError(f"--draft {draft}: something is missing beside the plus sign")
    return stages


def entries_of(
    base: SessionOptions,
    drafts: Sequence[Stages],
    policies: Sequence[PolicyName],
    trees: Sequence[TreeShape],
    temperatures: Sequence[float],
    known: MeasurementStore,
) -> list[Entry]:
    """Return for each temperature plain decoding and every draft with every policy and tree. `base`
    has the options that all share; `known` has the numbers of threads that `specgen run` would use.
    """
    from specgen.session.measurement_store import SessionCosts

    def with_threads(options: SessionOptions) -> SessionOptions:
        costs, draft, context = SessionCosts(options, known), options.draft, options.draft_context
        context = costs.context_options(draft) if isinstance(draft, Path) else context
        return replace(options, target_context=costs.context_options(), draft_context=context)

    # A fixed shape of drafts needs no policy.
    ways = [
        replace(base.drafting, policy=policy, tree=tree)
        for tree in trees
        for policy in (policies[:1] if tree.is_fixed else policies)
    ]
    plain = replace(base, drafting=replace(base.drafting, policy="fixed"), draft="none", helpers=())
    entries = [Entry(PLAIN, with_threads(plain))]
    for name, (draft, *helpers) in _by_name(drafts).items():
        drafted = with_threads(replace(base, draft=draft, helpers=tuple(helpers)))
        for way in ways:
            parts = [name]
            if len(policies) > 1 and not way.tree.is_fixed:
                parts.append(way.policy)
            if len(trees) > 1:
                parts.append(f"tree {way.tree}")
            entries.append(Entry(", ".join(parts), replace(drafted, drafting=way)))
    samplers = [replace(base.sampler, temperature=temperature) for temperature in temperatures]
    return [
        replace(entry, options=replace(entry.options, sampler=sampler))
        for sampler in samplers
        for entry in entries
    ]


def _by_name(found: Sequence[Stages]) -> dict[str, Stages]:
    """Return drafts by name (files of one name by their paths), each once, without "none"."""
    kept = [stages for stages in dict.fromkeys(found) if stages != ("none",)]
    files = {each for stages in kept for each in stages if isinstance(each, Path)}
    names = Counter(path.name for path in files)

    def name_of(each: DraftSource) -> str:
        return each.name if isinstance(each, Path) and names[each.name] == 1 else str(each)

    return {"+".join(map(name_of, stages)): stages for stages in kept}


# --- answers in turns


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one answer; None means not reported. `tokens_per_s` is after the first
    token.
    """

    text: str
    n_tokens: int
    finish_reason: str | None
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
    """What answers prompts as typed. `answer` raises `PromptError` if one does not fit, or another
    error at the end.
    """

    temperature: float
    name: str
    answer: Callable[[str], Outcome]
    warm_up: Callable[[], object] = lambda: None


def contender_of(
    name: str,
    session: Session,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Contender:
    from specgen.session.engine import generate

    def events(text: str) -> Iterator[Event]:
        prompt = session.prompts.of_text(text, chat=chat, now=NOW)
        # Closing the generator frees the contexts.
        with contextlib.closing(generate(session, prompt, interrupted=interrupted)) as found:
            yield from found

    def answer(text: str) -> Outcome:
        *others, finished = events(text)
        assert isinstance(finished, FinishedEvent), "the last event of a generation"
        same = {each.name for each in fields(Outcome)} & {each.name for each in fields(finished)}
        values: dict[str, Any] = {name: getattr(finished, name) for name in same}
        notices = tuple(event.message for event in others if isinstance(event, NoticeEvent))
        return Outcome(**values, notices=notices)

    def warm_up() -> None:
        for event in events(_WARM_UP):
            if isinstance(event, CommittedEvent) and event.n_tokens >= _N_WARM_UP:
                break

    return Contender(session.options.sampler.temperature, name, answer, warm_up)


@dataclass(frozen=True, slots=True)
class Result:
    """An answer. `prompt` is its number in the file; `round` counts passes through all prompts,
    from 1.
    """

    temperature: float
    contender: str
    prompt: int
    category: str
    round: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a contender has no more turns (a prompt, if it is plain): it could not answer `prompt`
    (None: warm up).
    """

    temperature: float
    contender: str
    prompt: int | None
    message: str


@dataclass(slots=True)
class Runs:
    """The results and failures so far, what ended the measurement, and the share of the cores that
    others took.
    """

    results: list[Result] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    kernels: str = ""
    error: SpecgenError | None = None
    is_interrupted: bool = False
    others_share: float | None = None


def take_turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    *,
    n_rounds: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Add all contenders' answers to all prompts to `runs`, each prompt by all in turn, plain
    decoding first: a slow moment slows all. Raise the error of plain decoding, and `PromptError` if
    no prompt could be answered.
    """
    turns: list[tuple[int, BenchPrompt | None, Contender]] = [
        (0, None, each) for each in contenders
    ]
    rounds = [(number, prompt) for number in range(1, n_rounds + 1) for prompt in prompts]
    for turn, (number, prompt) in enumerate(rounds):
        turns += ((number, prompt, contender) for contender in _in_turn(contenders, turn))
    failed, skipped = set[Contender](), set[int]()
    for n_done, (number, asked, contender) in enumerate(turns):
        progress(n_done, len(turns))
        if interrupted():
            return
        who = contender.temperature, contender.name
        if contender in failed or (asked is not None and asked.number in skipped):
            continue
        try:
            if asked is None:
                contender.warm_up()
                continue
            outcome = contender.answer(asked.text)
        except SpecgenError as error:
            if contender.name != PLAIN:
                failed.add(contender)
            elif asked is not None and isinstance(error, PromptError):
                skipped.add(asked.number)
            else:
                raise
            number_of = None if asked is None else asked.number
            runs.failures.append(Failure(*who, number_of, error.message))
            continue
        if outcome.finish_reason == "interrupted" or interrupted():
            return
        runs.results.append(Result(*who, asked.number, asked.category, number, outcome))
    progress(len(turns), len(turns))
    if prompts and len(skipped) == len(prompts):
        last = runs.failures[-1]
        raise PromptError(f"no prompt can be answered; prompt {last.prompt}: {last.message}")


def _in_turn(contenders: Sequence[Contender], turn: int) -> Iterator[Contender]:
    """Yield plain decoding of each temperature, and the others rotated: none always follows the
    same one.
    """
    for temperature in dict.fromkeys(each.temperature for each in contenders):
        plain, *others = (each for each in contenders if each.temperature == temperature)
        start = turn % len(others) if others else 0
        yield from (plain, *others[start:], *others[:start])


def measure(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    n_rounds: int = 1,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Runs:
    """Measure all entries, each with its own models: none gains by what others learn. An error ends
    it early.
    """
    from specgen.session.session import Session
    from specgen.system.machine import LoadOfOthers

    runs, load = Runs(), LoadOfOthers()
    contenders: list[Contender] = []
    try:
        with contextlib.ExitStack() as stack:
            for n_done, entry in enumerate(entries):
                progress("loading", n_done, len(entries))
                session = stack.enter_context(Session(entry.options, time.perf_counter))
                contenders.append(contender_of(entry.name, session, chat, interrupted))
                runs.kernels = session.target.kernels
            shown = partial(progress, entry.options.target.name)
            take_turns(
                contenders,
                prompts,
                runs,
                n_rounds=n_rounds,
                interrupted=interrupted,
                progress=shown,
            )
    except SpecgenError as error:
        if not runs.results:
            raise
        runs.error = error
    runs.is_interrupted, runs.others_share = interrupted(), load.share
    return runs


# --- figures


@dataclass(frozen=True, slots=True)
class Figures:
    """A contender's figures, of all prompts or of a category; None means unknown. `speedup` over
    plain decoding is a geometric mean, `worst_speedup` that of the worst prompt; `tokens_per_s` and
    `first_token` are medians.
    """

    temperature: float
    contender: str
    category: str
    n_answers: int
    speedup: float | None
    quartiles: tuple[float, float] | None
    worst_speedup: float | None
    best_speedup: float | None
    tokens_per_s: float | None
    acceptance_rate: float | None
    mean_accepted_length: float | None
    first_token: float | None
    categories: tuple[Figures, ...]


def figures_of(results: Sequence[Result]) -> tuple[Figures, ...]:
    plain = {_place(each): each for each in results if each.contender == PLAIN}
    answers: dict[tuple[float, str], list[Result]] = defaultdict(list)
    for result in results:
        answers[result.temperature, result.contender].append(result)
    return tuple(_figures(own, plain) for own in answers.values())


def _place(result: Result) -> tuple[float, int, int]:
    return result.temperature, result.prompt, result.round


def _figures(
    results: Sequence[Result],
    plain: Mapping[tuple[float, int, int], Result],
    category: str | None = None,
) -> Figures:
    parts: list[Figures] = []
    if category is None:
        for name in dict.fromkeys(result.category for result in results):
            own = [result for result in results if result.category == name]
            parts.append(_figures(own, plain, name))
    by_prompt: dict[int, list[float]] = defaultdict(list)
    firsts: list[float] = []
    for result in results:
        if (other := plain.get(_place(result))) is None:
            continue
        fast, slow = result.outcome.tokens_per_s, other.outcome.tokens_per_s
        if fast and slow:
            by_prompt[result.prompt].append(fast / slow)
        own_s, other_s = (each.outcome.time_to_first_token_s for each in (result, other))
        firsts += [own_s / other_s] if own_s is not None and other_s else []
    speedups = [ratio for ratios in by_prompt.values() for ratio in ratios]
    of_prompts = [statistics.geometric_mean(ratios) for ratios in by_prompt.values()]
    shares = [each.speedup for each in parts if each.speedup is not None] or speedups
    outcomes = [result.outcome for result in results]
    speeds = [each.tokens_per_s for each in outcomes if each.tokens_per_s]
    rounds = [(each.mean_accepted_length or 0.0, each.n_rounds or 0) for each in outcomes]
    n_rounds = sum(n for _, n in rounds)
    n_positions = sum(sum(outcome.drafted_by_depth) for outcome in outcomes)
    n_accepted = sum(outcome.n_accepted or 0 for outcome in outcomes)
    first = results[0]
    return Figures(
        temperature=first.temperature,
        contender=first.contender,
        category=category or "overall",
        n_answers=len(results),
        speedup=statistics.geometric_mean(shares) if shares else None,
        quartiles=_quartiles(speedups),
        worst_speedup=min(of_prompts, default=None),
        best_speedup=max(of_prompts, default=None),
        tokens_per_s=statistics.median(speeds) if speeds else None,
        acceptance_rate=n_accepted / n_positions if n_positions else None,
        mean_accepted_length=sum(mean * n for mean, n in rounds) / n_rounds if n_rounds else None,
        first_token=statistics.median(firsts) if firsts else None,
        categories=tuple(parts),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    if len(values) < 2:
        return (values[0], values[0]) if values else None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def gains(figures: Sequence[Figures]) -> Iterator[str]:
    for of in figures:
        if of.contender != PLAIN and of.speedup and of.worst_speedup and of.best_speedup:
            said = measured_gain(of.speedup, of.worst_speedup, of.best_speedup, of.n_answers)
            heat = f" at temperature {of.temperature:g}" if of.temperature else ""
            yield f"{of.contender}{heat}: {said}"


# --- the report


def to_json_object(
    entries: Sequence[Entry], prompts: Sequence[BenchPrompt], runs: Runs, command: str
) -> dict[str, Any]:
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
