"""What `specgen bench` compares: targets, drafts and settings named on the command line, and their measurement."""

from __future__ import annotations

import contextlib
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
class Entry:
    """A contender: its target and itself by their names in tables, the names of what drafts, and its options.
    N-grams may draft beside a model."""

    target: str
    name: str
    drafters: tuple[str, ...]
    options: SessionOptions

    @property
    def temperature(self) -> float:
        return self.options.sampler.temperature

    def to_json_object(self) -> dict[str, Any]:
        """Describe the contender as JSON values."""
        drafting = self.options.drafting
        return {
            "target": self.target,
            "temperature": self.temperature,
            "name": self.name,
            "policy": drafting.policy if self.drafters else None,
            "tree": str(drafting.tree) if self.drafters else None,
            "drafters": list(self.drafters),
            "target_context": as_json(self.options.target_context),
        }


def ways_of(
    drafting: DraftOptions, policies: Sequence[PolicyName], trees: Sequence[TreeShape]
) -> list[DraftOptions]:
    """Return every policy with every shape of drafts; a fixed shape needs no policy."""
    return [
        replace(drafting, policy=policy, tree=tree)
        for tree in trees
        for policy in policies
        if not tree.is_fixed or policy == policies[0]
    ]


def entries_of(
    base: SessionOptions,
    drafts: Mapping[Path, Sequence[Stages]],
    ways: Sequence[DraftOptions],
    temperatures: Sequence[float] = (0.0,),
    known: Memory | None = None,
) -> list[Entry]:
    """Return the contenders: for each target, at each temperature, plain decoding and every draft in every way.
    `base` has the options that all share; `known` has the numbers of threads that `specgen run` would use."""
    from specgen.session.memory import with_threads

    def in_context(options: SessionOptions, model: DraftSource, which: str) -> SessionOptions:
        context = getattr(options, which)
        if known is not None and isinstance(model, Path):
            context = with_threads(context, known.threads(model, context))
        changed: dict[str, Any] = {which: context}
        return replace(options, **changed)

    entries: list[Entry] = []
    for name, target in named_apart(list(drafts)).items():
        options = in_context(replace(base, target=target), target, "target_context")
        plain = replace(options, drafting=replace(base.drafting, policy="fixed"))
        own = [Entry(name, PLAIN, (), replace(plain, draft="none", helpers=()))]
        for draft_name, (draft, *helpers) in _by_name(drafts[target]).items():
            drafted = replace(options, draft=draft, helpers=tuple(helpers))
            drafted = in_context(drafted, draft, "draft_context")
            for way in ways:
                beside = (NGRAM,) if way.adds_ngrams and draft_name != NGRAM else ()
                parts = [draft_name]
                if len({each.policy for each in ways}) > 1 and not way.tree.is_fixed:
                    parts.append(way.policy)
                if len({each.tree for each in ways}) > 1:
                    parts.append(f"tree {way.tree}")
                in_this_way = replace(drafted, drafting=way)
                own.append(Entry(name, ", ".join(parts), (draft_name, *beside), in_this_way))
        for temperature in temperatures:
            sampler = replace(base.sampler, temperature=temperature)
            entries += (
                replace(each, options=replace(each.options, sampler=sampler)) for each in own
            )
    return entries


# --- targets and drafts ----------------------------------------------------------------------------


def find_drafts(
    targets: Sequence[str], pairs: Sequence[str], drafts: Sequence[str], *, quiet: bool
) -> dict[Path, list[Stages]]:
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
    return found


def _stages(draft: str) -> tuple[str, ...]:
    """Split a draft's name at plus signs, unless it is the name of a file. Raise `UsageError`."""
    if Path(draft).expanduser().exists():
        return (draft,)
    stages = tuple(draft.split("+"))
    if not all(stages):
        raise UsageError(f"--draft {draft}: something is missing beside the plus sign")
    return stages


def _by_name(found: Sequence[Stages]) -> dict[str, Stages]:
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
def _lineups(
    entries: Sequence[Entry],
    chat: bool | None,
    interrupted: Callable[[], bool],
    progress: Progress,
) -> Iterator[list[Lineup]]:
    """Yield a lineup of a target's contenders for each temperature, with their models loaded until the end. Each
    contender has models of its own, and learns its own costs and acceptance rates: none gains or loses by the
    others. Raises `ModelFileError`, `PairError`, `MemoryLimitError`."""
    from specgen.session.session import Session

    with contextlib.ExitStack() as stack:
        found: dict[float, list[SessionContender]] = {}
        for n_done, entry in enumerate(entries):
            progress(f"loading {entry.target}", n_done, len(entries))
            loaded = stack.enter_context(Session(entry.options, time.perf_counter))
            contender = SessionContender(entry.name, loaded, chat, interrupted)
            found.setdefault(entry.temperature, []).append(contender)
        yield [
            Lineup(entries[0].target, temperature, plain, tuple(others))
            for temperature, (plain, *others) in found.items()
        ]


def measure(
    entries: Sequence[Entry],
    prompts: Sequence[BenchPrompt],
    *,
    chat: bool | None = None,
    n_rounds: int = 1,
    progress: Progress = lambda _what, _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
    announce: Callable[[Sequence[Entry], str, float], None] = lambda _own, _kernels, _seconds: None,
) -> Runs:
    """Measure all contenders of one target after the other. `announce` hears of the contenders of each target, what
    computes it, and the seconds if none is faster than plain decoding. An error after some results ends the
    measurements."""
    runs = Runs()
    for target in dict.fromkeys(entry.target for entry in entries):
        own = [entry for entry in entries if entry.target == target]
        if interrupted() or runs.error is not None:
            break
        try:
            with _lineups(own, chat, interrupted, progress) as lineups:
                plain = lineups[0].plain
                assert isinstance(plain, SessionContender), "as `_lineups` makes it"
                runs.kernels[target] = plain.session.target.kernels
                seconds = n_rounds * len(own) * _plain_s(plain.session, prompts, interrupted)
                announce(own, runs.kernels[target], seconds)
                run_lineups(
                    lineups,
                    prompts,
                    runs,
                    n_rounds=n_rounds,
                    interrupted=interrupted,
                    progress=lambda done, total, name=target: progress(name, done, total),  # type: ignore[misc]
                )
        except SpecgenError as error:
            if not runs.results:
                raise
            runs.error = error
    return runs


def _plain_s(
    session: Session, prompts: Sequence[BenchPrompt], interrupted: Callable[[], bool]
) -> float:
    """Return about how many seconds plain decoding of all answers takes, by measured costs."""
    from specgen.session.calibration import target_costs

    costs = target_costs(session, interrupted)
    n_rows = max(costs.known)
    n_read = sum(len(prompt.text) for prompt in prompts) / _CHARACTERS
    n_said = len(prompts) * session.options.generation.max_tokens
    return n_read * costs.seconds(n_rows) / n_rows + n_said * costs.seconds(1)


def about(
    base: SessionOptions, entries: Sequence[Entry], chat: bool | None, command: str
) -> dict[str, Any]:
    """Return the machine, the versions, the files and the settings that all share as JSON values."""
    from specgen.llama import build
    from specgen.system.machine import look_at_machine

    made, options = build(), [entry.options for entry in entries]
    files = dict.fromkeys(file for own in options for file in (own.target, own.draft, *own.helpers))
    shared = ("generation", "drafting", "sampler", "target_context", "draft_context")
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
        "files": {
            str(file): file.stat().st_size
            for file in files
            if isinstance(file, Path) and file.exists()
        },
        "settings": {"chat": chat, **{name: as_json(getattr(base, name)) for name in shared}},
    }
