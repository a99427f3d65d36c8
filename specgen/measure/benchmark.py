"""`specgen bench`: compare the speed of contenders that answer the same prompts in turn.

A contender is plain decoding, or a draft with its options.
"""

from __future__ import annotations

import contextlib
import datetime
import math
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
from specgen.measure.prompts import FIXED_NOW, BenchPrompt
from specgen.method.drafter import never
from specgen.options import DraftSource, PolicyName, SessionOptions, TreeShape, staged
from specgen.session.choose_models import find_models
from specgen.system.files import as_json, named_path
from specgen.system.quantities import measured_speedup

if TYPE_CHECKING:
    from specgen.session.measurement_store import MeasurementStore
    from specgen.session.prompts import Prompt
    from specgen.session.session import Session
    from specgen.session.weights_memory import WeightsBudget
    from specgen.system.progress import Progress

#: The name of plain decoding in tables.
PLAIN = "plain"
#: The prompt of the warm-up, short enough for every context.
_WARM_UP_PROMPT = "Count from one to twenty."
#: The warm-up ends after this many tokens of its answer.
_N_WARM_UP_TOKENS = 8

#: A chain of drafts: the target's draft, the draft that drafts for it, and so on.
Stages: TypeAlias = tuple[DraftSource, ...]


# --- what is compared


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender whose models are not loaded yet: its name in tables, and its options."""

    #: The name of the contender in tables.
    name: str
    #: The options of its session.
    options: SessionOptions


def find_drafts(
    target: str | None,
    drafts: Sequence[str],
    *,
    quiet: bool,
) -> tuple[Path, list[Stages]]:
    """Find the files of a target and of the drafts to compare.

    Args:
        target: The target as the user named it; None for the default of `specgen run`.
        drafts: What the user gave with `--draft`, each a draft or several joined by plus signs.
            If empty, the draft that `specgen run` would use is compared with n-grams.
        quiet: Whether to suppress notices.

    Returns:
        The target's file, and the chain of drafts for each of `drafts`.

    Raises:
        UsageError: If a draft is missing before or after a plus sign.
    """
    # The empty string stands for the draft that `specgen run` would use.
    choices = [staged(target, _split_stages(draft), None) for draft in drafts or [""]]
    models_of_choices = [find_models(choice, quiet=quiet) for choice in choices]
    stages = [(models.draft, *models.further_drafts) for models in models_of_choices]
    if not drafts:
        stages.append(("ngram",))
    return models_of_choices[0].target, stages


def _split_stages(draft: str) -> tuple[str, ...]:
    """Split what the user gave with `--draft` at plus signs; an empty text has no stages."""
    if not draft:
        return ()
    if named_path(draft):  # a plus sign may be part of a file's name
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
    measurements: MeasurementStore,
) -> list[Entry]:
    """Return plain decoding and every draft with every policy and tree, for each temperature.

    Args:
        base: The options that all entries share.
        drafts: The chains of drafts; repetitions and "none" are left out.
        policies: The policies. A tree of fixed shape is only combined with the first of them.
        trees: The tree shapes.
        temperatures: The temperatures.
        measurements: The stored measurements, with the thread counts of `specgen run`.
    """
    entries = [Entry(PLAIN, _with_threads(without_drafts(base), measurements))]
    for name, (draft, *further) in _by_name(drafts).items():
        options = replace(base, draft=draft, further_drafts=tuple(further))
        options = _with_threads(options, measurements)
        entries += _entries_of_draft(name, options, policies, trees)
    samplers = [replace(base.sampler, temperature=temperature) for temperature in temperatures]
    return [
        replace(entry, options=replace(entry.options, sampler=sampler))
        for sampler in samplers
        for entry in entries
    ]


def _entries_of_draft(
    name: str,
    options: SessionOptions,
    policies: Sequence[PolicyName],
    trees: Sequence[TreeShape],
) -> Iterator[Entry]:
    """Yield a draft with every policy and tree; the names have only what differs between them."""
    for tree in trees:
        # A tree of fixed shape needs no policy, so all of them would do the same.
        policies_of_tree = policies[:1] if tree.is_fixed else policies
        for policy in policies_of_tree:
            name_parts = [name]
            if len(policies) > 1 and not tree.is_fixed:
                name_parts.append(policy)
            if len(trees) > 1:
                name_parts.append(f"tree {tree}")
            drafting = replace(options.drafting, policy=policy, tree=tree)
            yield Entry(", ".join(name_parts), replace(options, drafting=drafting))


def without_drafts(options: SessionOptions) -> SessionOptions:
    """Return the options of plain decoding with the same target."""
    return replace(
        options,
        drafting=replace(options.drafting, policy="fixed"),
        draft="none",
        further_drafts=(),
    )


def _with_threads(options: SessionOptions, measurements: MeasurementStore) -> SessionOptions:
    """Return the options with the thread counts that were measured to be fastest."""
    from specgen.session.measurement_store import SessionCosts

    costs = SessionCosts(options, measurements)
    options = replace(options, target_context=costs.context_options())
    if isinstance(options.draft, Path):
        options = replace(options, draft_context=costs.context_options(options.draft))
    return options


def _by_name(drafts: Sequence[Stages]) -> dict[str, Stages]:
    """Return the chains of drafts by name, without repetitions and without "none".

    A file is named by its full path if another file has the same name.
    """
    distinct = [stages for stages in dict.fromkeys(drafts) if stages != ("none",)]
    files = {source for stages in distinct for source in stages if isinstance(source, Path)}
    n_files_by_name = Counter(path.name for path in files)

    def unique_name(source: DraftSource) -> str:
        if isinstance(source, Path) and n_files_by_name[source.name] == 1:
            return source.name
        return str(source)

    return {"+".join(map(unique_name, stages)): stages for stages in distinct}


# --- answers in turn


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one answer, named as in `FinishedEvent`.

    A measurement is None if the contender does not report it.
    """

    #: The answer.
    text: str
    #: The number of its tokens.
    n_tokens: int
    #: Why it ended.
    finish_reason: str | None
    #: Tokens per second after the first token.
    tokens_per_s: float | None
    #: The seconds from the start of the prefill to the first token.
    time_to_first_token_s: float | None
    #: The answer's tokens.
    token_ids: tuple[int, ...] | None = None
    #: The number of rounds.
    n_rounds: int | None = None
    #: The number of drafted tokens.
    n_drafted: int | None = None
    #: The number of drafted tokens that were accepted.
    n_accepted: int | None = None
    #: The number of drafts that reached each depth.
    drafted_by_depth: tuple[int, ...] = ()
    #: The mean number of tokens per round.
    mean_accepted_length: float | None = None
    #: The number of rounds that added n + 1 tokens, without forced ones, at index n.
    rounds_by_tokens: tuple[int, ...] = ()
    #: Notices for the user, for example that drafting failed.
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that answers prompts: a session of specgen, or another program."""

    #: The temperature at which it answers.
    temperature: float
    #: Its name in tables.
    name: str
    #: Answers a prompt, given as the user typed it. It raises `PromptError` if the prompt does not
    #: fit in the context, and any other `SpecgenError` if the contender cannot continue.
    answer: Callable[[str], Outcome]
    #: Called once, before the first prompt.
    warm_up: Callable[[], object] = lambda: None


def contender_of(
    name: str,
    session: Session,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = never,
) -> Contender:
    """Return a contender that answers with a session.

    Args:
        name: The contender's name.
        session: The session, which stays open.
        chat: Whether to use the chat template; None to use it if the model has one.
        interrupted: Whether to stop an answer early.
    """

    def answer(text: str) -> Outcome:
        prompt = session.prompts.of_text(text, chat=chat, now=FIXED_NOW)
        *earlier_events, finished = answer_events(session, prompt, interrupted)
        assert isinstance(finished, FinishedEvent), "the last event of a generation"
        notices = [event.message for event in earlier_events if isinstance(event, NoticeEvent)]
        if prompt.notice:
            notices.append(prompt.notice)
        # All other fields of `Outcome` have the same names as the event's.
        names = [each.name for each in fields(Outcome) if each.name != "notices"]
        values: dict[str, Any] = {name: getattr(finished, name) for name in names}
        return Outcome(**values, notices=tuple(notices))

    return Contender(
        session.options.sampler.temperature,
        name,
        answer,
        partial(warm_up, session, chat, interrupted),
    )


def answer_events(
    session: Session,
    prompt: Prompt,
    interrupted: Callable[[], bool] = never,
) -> Iterator[Event]:
    """Generate an answer in new contexts, which are freed at its end, and yield its events."""
    from specgen.session.engine import generate

    # Closing the generator frees the contexts.
    with contextlib.closing(generate(session, prompt, interrupted=interrupted)) as events:
        yield from events


def warm_up(
    session: Session,
    chat: bool | None = None,
    interrupted: Callable[[], bool] = never,
) -> None:
    """Generate the first tokens of an answer, so that the next one finds everything loaded."""
    prompt = session.prompts.of_text(_WARM_UP_PROMPT, chat=chat, now=FIXED_NOW)
    for event in answer_events(session, prompt, interrupted):
        if isinstance(event, CommittedEvent) and event.n_tokens >= _N_WARM_UP_TOKENS:
            break


@dataclass(frozen=True, slots=True)
class Result:
    """A contender's answer to one prompt."""

    #: The temperature of the answer.
    temperature: float
    #: The contender's name.
    contender: str
    #: The prompt's number in the file, from 1.
    prompt: int
    #: The prompt's category.
    category: str
    #: The number of the pass through all prompts, from 1; not a round of decoding.
    round: int
    #: The measurements of the answer.
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a contender, which got no more prompts after it.

    If plain decoding fails, only that prompt is dropped, for all contenders.
    """

    #: The temperature of the contender.
    temperature: float
    #: The contender's name.
    contender: str
    #: The number of the prompt that it could not answer; None if the warm-up failed.
    prompt: int | None
    #: The message of the error.
    message: str


@dataclass(slots=True)
class Runs:
    """All measurements so far."""

    #: The answers.
    results: list[Result] = field(default_factory=list)
    #: The errors of contenders.
    failures: list[Failure] = field(default_factory=list)
    #: The kernels that were used: specgen's or llama.cpp's.
    kernels: str = ""
    #: The error that ended the measurement early, if any.
    error: SpecgenError | None = None
    #: Whether the user interrupted the measurement.
    is_interrupted: bool = False
    #: The share of the cores that other programs used; None if unknown.
    others_share: float | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One prompt, or the warm-up, that one contender has to answer."""

    #: Who answers.
    contender: Contender
    #: The prompt to answer; None for the warm-up.
    prompt: BenchPrompt | None
    #: The number of the pass through all prompts, from 1; 0 for the warm-up.
    pass_number: int


def take_turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    *,
    n_passes: int = 1,
    interrupted: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Let all contenders answer all prompts.

    All contenders answer a prompt before any goes on to the next, so that a slow moment of the
    machine slows all of them. Plain decoding is always first.

    Args:
        contenders: The contenders; at each temperature plain decoding is the first of them.
        prompts: The prompts.
        runs: Receives the results and failures, so that they are kept after an error.
        n_passes: The number of passes through all prompts.
        interrupted: Whether to stop.
        progress: Receives the number of finished turns, and of all turns.

    Raises:
        PromptError: If plain decoding can answer none of the prompts.
        SpecgenError: If plain decoding fails for another reason.
    """
    turns = _turns(contenders, prompts, n_passes)
    failed_contenders: set[Contender] = set()
    # The numbers of prompts that plain decoding cannot answer.
    skipped_prompts: set[int] = set()
    for n_done, turn in enumerate(turns):
        progress(n_done, len(turns))
        if interrupted():
            return
        contender = turn.contender
        prompt_number = None if turn.prompt is None else turn.prompt.number
        if contender in failed_contenders or prompt_number in skipped_prompts:
            continue
        try:
            result = _take_turn(turn)
        except SpecgenError as error:
            # A contender that fails is out, and a prompt that plain decoding cannot answer is
            # dropped. Other errors of plain decoding end the measurement.
            if contender.name != PLAIN:
                failed_contenders.add(contender)
            elif prompt_number is not None and isinstance(error, PromptError):
                skipped_prompts.add(prompt_number)
            else:
                raise
            runs.failures.append(
                Failure(contender.temperature, contender.name, prompt_number, error.message)
            )
            continue
        if result is None:
            continue
        if result.outcome.finish_reason == "interrupted" or interrupted():
            return
        runs.results.append(result)
    progress(len(turns), len(turns))
    if prompts and len(skipped_prompts) == len(prompts):
        last = runs.failures[-1]
        raise PromptError(f"no prompt can be answered; prompt {last.prompt}: {last.message}")


def _take_turn(turn: _Turn) -> Result | None:
    """Return the answer of a turn; None if the turn is a warm-up."""
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
        round=turn.pass_number,
        outcome=contender.answer(prompt.text),
    )


def _turns(
    contenders: Sequence[Contender],
    prompts: Sequence[BenchPrompt],
    n_passes: int,
) -> list[_Turn]:
    """Return all turns in order: every contender's warm-up, and then the prompts."""
    turns = [_Turn(contender, prompt=None, pass_number=0) for contender in contenders]
    n_earlier_prompts = 0
    for pass_number in range(1, n_passes + 1):
        for prompt in prompts:
            order = _rotated(contenders, n_earlier_prompts)
            turns += [_Turn(contender, prompt, pass_number) for contender in order]
            n_earlier_prompts += 1
    return turns


def _rotated(contenders: Sequence[Contender], n_steps: int) -> Iterator[Contender]:
    """Yield, for each temperature, plain decoding and then the others, rotated by `n_steps`.

    The rotation ensures that no contender always comes right after plain decoding.
    """
    for temperature in dict.fromkeys(each.temperature for each in contenders):
        plain, *others = (each for each in contenders if each.temperature == temperature)
        start = n_steps % len(others) if others else 0
        yield from (plain, *others[start:], *others[:start])


def measure(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    n_passes: int = 1,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = never,
) -> Runs:
    """Load the models of all entries, and let them answer all prompts in turn.

    Every entry has its own models, so that none benefits from what another has learned.

    Args:
        entries: The entries; at each temperature plain decoding is the first of them.
        prompts: The prompts.
        chat: Whether to use the chat template; None to use it if the model has one.
        n_passes: The number of passes through all prompts.
        progress: Receives the name of the current step, how much of it is done, and the total.
        interrupted: Whether to stop.

    Returns:
        The results. If an error ended the measurement after the first of them, it is in `error`.

    Raises:
        SpecgenError: If the measurement fails before the first result.
    """
    from specgen.session.session import Session
    from specgen.system.machine import LoadOfOthers

    runs = Runs()
    load = LoadOfOthers()
    contenders: list[Contender] = []
    try:
        with contextlib.ExitStack() as stack:
            budget = shared_budget(entries)
            for n_done, entry in enumerate(entries):
                progress("loading", n_done, len(entries))
                session = stack.enter_context(
                    Session(entry.options, time.perf_counter, budget=budget)
                )
                contenders.append(contender_of(entry.name, session, chat, interrupted))
                runs.kernels = session.target.kernels
            # The target is the same for all entries, so the last one can name it.
            take_turns(
                contenders,
                prompts,
                runs,
                n_passes=n_passes,
                interrupted=interrupted,
                progress=partial(progress, entry.options.target.name),
            )
    except SpecgenError as error:
        if not runs.results:
            raise
        runs.error = error
    except KeyboardInterrupt:  # while costs were measured, or for the second time
        runs.is_interrupted = True
    runs.is_interrupted |= interrupted()
    runs.others_share = load.share
    return runs


def shared_budget(entries: Sequence[Entry]) -> WeightsBudget:
    """Decide how much memory the target's weights may use while the models of all entries are open.

    A file that several entries use is loaded once. Contexts are freed after each answer, so only
    those of one entry are open at a time.

    Args:
        entries: The entries, all with the same target.

    Raises:
        MemoryLimitError: If the weights do not fit, and `weights_memory` is ``all``.
        ModelFileError: If a draft's file cannot be read.
        UsageError: If `weights_memory` does not suit the other options.
    """
    from specgen.session.weights_memory import weights_budget, weights_bytes
    from specgen.system.machine import available_memory_bytes

    available_bytes = available_memory_bytes()
    all_files = {file for entry in entries for file in _draft_files(entry)}
    budgets: list[WeightsBudget] = []
    for entry in entries:
        files_of_others = all_files.difference(_draft_files(entry))
        max_bytes = available_bytes - sum(map(weights_bytes, files_of_others))
        drafts = [entry.options.draft]
        budgets.append(weights_budget(entry.options, drafts, max_bytes=max_bytes))
    return min(budgets, key=lambda each: math.inf if each.max_bytes is None else each.max_bytes)


def _draft_files(entry: Entry) -> list[Path]:
    """Return the files of an entry's draft and of its further drafts."""
    drafts = (entry.options.draft, *entry.options.further_drafts)
    return [draft for draft in drafts if isinstance(draft, Path)]


# --- figures


@dataclass(frozen=True, slots=True)
class Figures:
    """A contender's figures for all prompts or for one category; unknown figures are None."""

    #: The temperature of the answers.
    temperature: float
    #: The contender's name.
    contender: str
    #: The name of the category, or "overall".
    category: str
    #: The number of answers.
    n_answers: int
    #: The geometric mean of the speed-ups over plain decoding.
    speedup: float | None
    #: The first and the third quartile of the speed-ups.
    quartiles: tuple[float, float] | None
    #: The speed-up on the prompt where it is lowest, a geometric mean over the passes.
    worst_speedup: float | None
    #: The speed-up on the prompt where it is highest, a geometric mean over the passes.
    best_speedup: float | None
    #: The median over the answers.
    tokens_per_s: float | None
    #: Accepted tokens per drafted position; the branches of a tree share their positions.
    acceptance_rate: float | None
    #: Tokens per round.
    mean_accepted_length: float | None
    #: The median time to the first token, relative to plain decoding.
    first_token: float | None
    #: The figures of each category, if these are the overall ones; otherwise empty.
    categories: tuple[Figures, ...]

    @property
    def drafted_nothing(self) -> bool:
        """Whether the contender reports its rounds, and none of them had a draft."""
        return self.mean_accepted_length is not None and self.acceptance_rate is None


#: What a contender's answer and plain decoding's have in common: temperature, prompt and pass.
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
    """Return the overall figures of one contender at one temperature, and of each category."""
    by_category: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_category[result.category].append(result)
    categories = tuple(_figures(part, plain, name) for name, part in by_category.items())
    # All categories have the same weight, however many answers they have.
    speedups = [each.speedup for each in categories if each.speedup is not None]
    overall = _figures(results, plain, "overall")
    return replace(overall, speedup=_geometric_mean(speedups), categories=categories)


def _figures(
    results: Sequence[Result],
    plain: Mapping[_TurnKey, Outcome],
    category: str,
) -> Figures:
    """Return the figures of one contender's results, which all have the same weight."""
    outcomes = [result.outcome for result in results]

    # Ratios to plain decoding of the same prompt in the same pass.
    speedups_by_prompt: dict[int, list[float]] = defaultdict(list)
    first_token_ratios: list[float] = []
    for result in results:
        drafted = result.outcome
        baseline = plain.get(_turn_key(result))
        if baseline is None:
            continue
        if drafted.tokens_per_s and baseline.tokens_per_s:
            speedups_by_prompt[result.prompt].append(drafted.tokens_per_s / baseline.tokens_per_s)
        if drafted.time_to_first_token_s is not None and baseline.time_to_first_token_s:
            ratio = drafted.time_to_first_token_s / baseline.time_to_first_token_s
            first_token_ratios.append(ratio)
    speedups = [ratio for ratios in speedups_by_prompt.values() for ratio in ratios]
    prompt_speedups = [statistics.geometric_mean(ratios) for ratios in speedups_by_prompt.values()]

    # Sums over all answers.
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
        worst_speedup=min(prompt_speedups, default=None),
        best_speedup=max(prompt_speedups, default=None),
        tokens_per_s=_median(speeds),
        acceptance_rate=n_accepted / n_positions if n_positions else None,
        mean_accepted_length=n_tokens / n_rounds if n_rounds else None,
        first_token=_median(first_token_ratios),
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


def speedup_sentences(figures: Sequence[Figures]) -> Iterator[str]:
    """Yield a sentence with the speed-up of each contender that drafts."""
    for each in figures:
        if each.contender == PLAIN:
            continue
        at = f" at temperature {each.temperature:g}" if each.temperature else ""
        name = f"{each.contender}{at}"
        if each.drafted_nothing:
            yield f"{name}: nothing was drafted, so there is no speed-up"
            continue
        worst = each.worst_speedup
        best = each.best_speedup
        if each.speedup and worst and best:
            yield f"{name}: {measured_speedup(each.speedup, worst, best, each.n_answers)}"


# --- the report


def to_json_object(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    command: str,
) -> dict[str, Any]:
    """Return all measurements and their circumstances, as `--json` writes them.

    Args:
        entries: The contenders.
        prompts: The prompts.
        runs: The measurements.
        command: The command line that was run.
    """
    from specgen.llama import build
    from specgen.system.machine import describe_machine

    return {
        "specgen": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "machine": as_json(describe_machine()),
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
