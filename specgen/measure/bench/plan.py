"""What `specgen bench` compares: targets, drafts and settings named on the command line, and their measurement."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specgen import __version__
from specgen.errors import SpecgenError, UsageError
from specgen.measure.bench.runs import Lineup, Runs, SessionContender, run_lineups
from specgen.options import (
    ContextOptions,
    DraftOptions,
    DraftSource,
    PolicyName,
    SessionOptions,
    TreeShape,
    staged,
)
from specgen.session.files import find_models
from specgen.system.json_lines import as_json

if TYPE_CHECKING:
    from specgen.measure.prompts import BenchPrompt
    from specgen.session.memory import Memory
    from specgen.session.session import Session
    from specgen.system.progress import Progress

#: The name of plain decoding.
PLAIN = "plain"
NGRAM: Literal["ngram"] = "ngram"
#: The usual number of characters in a token.
_CHARACTERS = 4

#: The target's draft, the draft's own draft, and so on.
Stages: TypeAlias = tuple[DraftSource, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A target and its drafts, each by its name in tables."""

    name: str
    target: Path
    drafts: Mapping[str, Stages]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender: its name, what drafts, with its name, and how."""

    name: str
    draft: str
    stages: Stages
    drafting: DraftOptions

    @property
    def drafters(self) -> list[str]:
        """The names of its drafters: n-grams may draft beside a model."""
        if self.name == PLAIN:
            return []
        adds_ngrams = self.drafting.adds_ngrams and self.draft != NGRAM
        return [self.draft, NGRAM] if adds_ngrams else [self.draft]


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings to compare, and in `base` those that are the same for all contenders."""

    base: SessionOptions
    policies: tuple[PolicyName, ...]
    trees: tuple[TreeShape, ...]
    temperatures: tuple[float, ...] = (0.0,)
    chat: bool | None = None
    #: Memory of earlier measurements: the number of threads at which a model was fastest.
    known: Memory | None = None

    def options(self, field: Field, entry: Entry, temperature: float = 0.0) -> SessionOptions:
        """Return the session options of a contender."""
        draft, *helpers = entry.stages
        return replace(
            self.base,
            target=field.target,
            draft=draft,
            helpers=tuple(helpers),
            sampler=replace(self.base.sampler, temperature=temperature),
            drafting=entry.drafting,
            target_context=self._context(field.target, self.base.target_context),
            draft_context=self._context(draft, self.base.draft_context),
        )

    def _context(self, model: DraftSource, context: ContextOptions) -> ContextOptions:
        """Return a model's context options, with the threads that `specgen run` would use."""
        from specgen.session.memory import with_threads

        if self.known is None or not isinstance(model, Path):
            return context
        return with_threads(context, self.known.threads(model, context))

    @property
    def ways(self) -> list[DraftOptions]:
        """Every policy with every shape of drafts; a fixed shape needs no policy."""
        return [
            replace(self.base.drafting, policy=policy, tree=tree)
            for tree in self.trees
            for policy in self.policies
            if not tree.is_fixed or policy == self.policies[0]
        ]

    @property
    def plain(self) -> Entry:
        return Entry(PLAIN, "none", ("none",), replace(self.base.drafting, policy="fixed"))

    def entries(self, field: Field) -> list[Entry]:
        """Return the contenders of a target: every draft in every way."""
        return [
            Entry(self._name(draft, way), draft, stages, way)
            for draft, stages in field.drafts.items()
            for way in self.ways
        ]

    def _name(self, draft: str, way: DraftOptions) -> str:
        parts = [draft]
        if len(self.policies) > 1 and not way.tree.is_fixed:
            parts.append(way.policy)
        if len(self.trees) > 1:
            parts.append(f"tree {way.tree}")
        return ", ".join(parts)


# --- targets and drafts ----------------------------------------------------------------------------


def find_fields(
    targets: Sequence[str], pairs: Sequence[str], drafts: Sequence[str], *, quiet: bool
) -> list[Field]:
    """Find targets and pairs with their drafts; fetch them if need be.

    `drafts` are for every target; a plus sign in one separates a draft from its own draft. Without `drafts`
    a pair has its own, and a target has the one that `specgen run` would pick, and n-grams. Without a
    target or a pair, the default pair is used. Raise `UsageError`, `UnknownModelError`, `FetchError`.
    """
    found: dict[Path, list[Stages]] = {}
    named: list[tuple[str | None, str | None]] = [(target, None) for target in targets]
    named += [(None, pair) for pair in pairs]
    wanted = [_stages(draft) for draft in drafts] or [()]
    for target, pair in named or [(None, None)]:
        for draft in wanted:
            sources = find_models(staged(target, draft, pair), quiet=quiet)
            own = found.setdefault(sources.target, [])
            own.append((sources.draft, *sources.helpers))
            if not drafts and pair is None:
                own.append((NGRAM,))
    targets_by_name = named_apart(list(found))
    return [Field(name, target, _drafts(found[target])) for name, target in targets_by_name.items()]


def _stages(draft: str) -> tuple[str, ...]:
    """Split a draft's name at plus signs, unless it is the name of a file. Raise `UsageError`."""
    if Path(draft).expanduser().exists():
        return (draft,)
    stages = tuple(draft.split("+"))
    if not all(stages):
        raise UsageError(f"--draft {draft}: something is missing beside the plus sign")
    return stages


def _drafts(found: Sequence[Stages]) -> dict[str, Stages]:
    """Return drafts by name, each once, without "none", which plain decoding covers."""
    kept = [stages for stages in dict.fromkeys(found) if stages != ("none",)]
    files = dict.fromkeys(each for stages in kept for each in stages if isinstance(each, Path))
    names: dict[DraftSource, str] = {path: name for name, path in named_apart(list(files)).items()}
    return {"+".join(names.get(each, str(each)) for each in stages): stages for stages in kept}


def named_apart(paths: Sequence[Path]) -> dict[str, Path]:
    """Return paths by their file names, or by the whole path if two files have the same name."""
    names = [path.name for path in paths]
    return {path.name if names.count(path.name) == 1 else str(path): path for path in paths}


# --- measuring -------------------------------------------------------------------------------------


@contextlib.contextmanager
def lineups(
    field: Field, plan: Plan, interrupted: Callable[[], bool], progress: Progress
) -> Iterator[list[Lineup]]:
    """Yield a lineup for each temperature, with its models loaded until the end.

    Each contender has models of its own, and learns its own costs and acceptance rates: none gains or loses by
    the others. Raises `ModelFileError`, `PairError`, `MemoryLimitError`.
    """
    from specgen.session.session import Session

    entries = [plan.plain, *plan.entries(field)]
    n_all = len(entries) * len(plan.temperatures)
    with contextlib.ExitStack() as stack:
        found: list[Lineup] = []
        for temperature in plan.temperatures:
            contenders: list[SessionContender] = []
            for entry in entries:
                n_done = len(found) * len(entries) + len(contenders)
                progress(f"loading {field.name}", n_done, n_all)
                options = plan.options(field, entry, temperature)
                loaded = stack.enter_context(Session(options, time.perf_counter))
                contenders.append(SessionContender(entry.name, loaded, plan.chat, interrupted))
            plain, *others = contenders
            found.append(Lineup(field.name, temperature, plain, tuple(others)))
        yield found


@dataclass(slots=True)
class Measured:
    """What was measured: the answers, whose code computed each target, and the error that ended it."""

    runs: Runs = dataclasses.field(default_factory=Runs)
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    error: SpecgenError | None = None


def measure(
    fields: Sequence[Field],
    plan: Plan,
    prompts: Sequence[BenchPrompt],
    *,
    n_rounds: int = 1,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
    announce: Callable[[Field, str, float], None] = lambda _field, _kernels, _seconds: None,
) -> Measured:
    """Measure all contenders of one target after the other. `announce` hears of each target, what computes it, and
    the seconds if no contender is faster than plain decoding. An error after some results ends the measurements."""
    measured = Measured()
    for field in fields:
        if interrupted() or measured.error is not None:
            break
        try:
            with lineups(field, plan, interrupted, progress) as opened:
                plain = opened[0].plain
                assert isinstance(plain, SessionContender), "as `lineups` makes it"
                measured.kernels[field.name] = plain.loaded.target.kernels
                n_answers = n_rounds * sum(1 + len(lineup.others) for lineup in opened)
                seconds = n_answers * _plain_s(plain.loaded, prompts, interrupted)
                announce(field, plain.loaded.target.kernels, seconds)
                run_lineups(
                    opened,
                    prompts,
                    measured.runs,
                    n_rounds=n_rounds,
                    interrupted=interrupted,
                    progress=lambda done, total, name=field.name: progress(name, done, total),  # type: ignore[misc]
                )
        except SpecgenError as error:
            if not measured.runs.results:
                raise
            measured.error = error
    return measured


def _plain_s(
    loaded: Session, prompts: Sequence[BenchPrompt], interrupted: Callable[[], bool]
) -> float:
    """Return about how many seconds plain decoding of all answers takes, by measured costs."""
    from specgen.session.calibration import target_costs

    costs = target_costs(loaded, interrupted)
    n_rows = max(costs.known)
    n_read = sum(len(prompt.text) for prompt in prompts) / _CHARACTERS
    n_said = len(prompts) * loaded.options.generation.max_tokens
    return n_read * costs.seconds(n_rows) / n_rows + n_said * costs.seconds(1)


def about(
    plan: Plan, fields: Sequence[Field], command: str, kernels: Mapping[str, str]
) -> dict[str, Any]:
    """Return the machine, the versions, the files and all settings as JSON values."""
    from specgen.llama import build
    from specgen.system.machine import look_at_machine

    made, base = build(), plan.base
    files = [file for field in fields for file in (field.target, *sum(field.drafts.values(), ()))]
    return {
        "specgen": __version__,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "machine": as_json(look_at_machine()),
        "llama_cpp": {
            "python_package": made.version,
            "version": made.llama_version,
            "features": {part: list(names) for part, names in made.features.items()},
            "devices": [device.description or device.name for device in made.devices],
        },
        "kernels": dict(kernels),
        "files": {
            str(file): file.stat().st_size
            for file in dict.fromkeys(files)
            if isinstance(file, Path) and file.exists()
        },
        "settings": {
            "temperatures": plan.temperatures,
            "policies": plan.policies,
            "trees": [str(tree) for tree in plan.trees],
            "chat": plan.chat,
            "generation": as_json(base.generation),
            "drafting": as_json(base.drafting),
            "sampling": as_json(base.sampler),
            "target_context": {
                field.name: as_json(plan.options(field, plan.plain).target_context)
                for field in fields
            },
            "draft_context": as_json(base.draft_context),
        },
    }


def contender_entries(fields: Sequence[Field], plan: Plan) -> list[dict[str, Any]]:
    """Describe the contenders as JSON values."""
    return [
        {
            "target": field.name,
            "temperature": temperature,
            "name": entry.name,
            "policy": None if entry.name == PLAIN else entry.drafting.policy,
            "tree": None if entry.name == PLAIN else str(entry.drafting.tree),
            "drafters": entry.drafters,
        }
        for field in fields
        for temperature in plan.temperatures
        for entry in (plan.plain, *plan.entries(field))
    ]
