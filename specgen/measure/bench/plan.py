"""What `specgen bench` compares: the targets, drafts and settings named on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from specgen.errors import UsageError
from specgen.options import (
    ContextOptions,
    Contexts,
    DraftOptions,
    DraftSource,
    GenerationOptions,
    PolicyName,
    SamplerOptions,
    TreeShape,
    staged,
)
from specgen.session.files import find_models

if TYPE_CHECKING:
    from specgen.measure.bench.contenders import Against
    from specgen.options import SessionOptions
    from specgen.session.calibration.memory import Memory

#: The name of plain decoding.
PLAIN = "plain"
NGRAM: Literal["ngram"] = "ngram"

#: The target's draft, the draft's own draft, and so on.
Stages: TypeAlias = tuple[DraftSource, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A target and its drafts, each by its name in tables."""

    name: str
    target: Path
    drafts: Mapping[str, Stages]


class DraftingSettings(NamedTuple):
    """The policy and the shape of drafts."""

    policy: PolicyName
    tree: TreeShape


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings to compare, and those that are the same for all contenders."""

    policies: tuple[PolicyName, ...]
    trees: tuple[TreeShape, ...]
    temperatures: tuple[float, ...]
    sampling: SamplerOptions
    drafting: DraftOptions
    answer: GenerationOptions
    machine: Contexts
    chat: bool | None
    #: Other programs to compare with, and the folder of llama.cpp's.
    against: tuple[Against, ...] = ()
    peers: Path | None = None
    #: Memory of earlier measurements: the number of threads at which a model was fastest.
    known: Memory | None = None

    def options(self, field: Field, draft: Stages = ("none",)) -> SessionOptions:
        """Return the session options with the first policy and temperature."""
        from specgen.models import cache_folder
        from specgen.options import SessionOptions

        return SessionOptions(
            target=field.target,
            draft=draft[0],
            helpers=draft[1:],
            sampler=replace(self.sampling, temperature=self.temperatures[0]),
            drafting=self.drafting_of(self.ways[0]),
            generation=self.answer,
            target_context=self._context(field.target, self.machine.target),
            draft_context=self._context(draft[0], self.machine.draft),
            cache=cache_folder(),
        )

    def _context(self, model: DraftSource, context: ContextOptions) -> ContextOptions:
        """Return a model's context options, with the threads that `specgen run` would use."""
        from specgen.session.calibration.threads import with_threads

        if self.known is None or not isinstance(model, Path):
            return context
        return with_threads(context, self.known.threads(model, context))

    @property
    def ways(self) -> list[DraftingSettings]:
        """Every policy with every shape of drafts; a fixed shape needs no policy."""
        found = [DraftingSettings(policy, tree) for tree in self.trees for policy in self.policies]
        return [way for way in found if not way.tree.is_fixed or way.policy == self.policies[0]]

    def drafting_of(self, way: DraftingSettings) -> DraftOptions:
        return replace(self.drafting, policy=way.policy, tree=way.tree)

    @property
    def n_max(self) -> int:
        """The length of the longest draft of any way."""
        return max(self.drafting_of(way).n_max for way in self.ways)

    def drafters(self, draft: str, way: DraftingSettings) -> list[str]:
        """Return the names of the drafters for a named draft: n-grams may draft beside a model."""
        adds_ngrams = self.drafting_of(way).adds_ngrams
        return [draft, NGRAM] if adds_ngrams and draft != NGRAM else [draft]

    def name(self, draft: str, way: DraftingSettings) -> str:
        """Return the name of a contender."""
        parts = [draft]
        if len(self.policies) > 1 and not way.tree.is_fixed:
            parts.append(way.policy)
        if len(self.trees) > 1:
            parts.append(f"tree {way.tree}")
        return ", ".join(parts)


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


def contender_entries(field: Field, plan: Plan, others: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Describe the contenders as JSON values; `others` are other programs."""
    found: list[dict[str, Any]] = []
    for temperature in plan.temperatures:
        where = {"target": field.name, "temperature": temperature}
        found.append({**where, "name": PLAIN, "policy": None, "tree": None, "drafters": []})
        for draft in field.drafts:
            for way in plan.ways:
                about = {"name": plan.name(draft, way), "policy": way.policy}
                drafters = plan.drafters(draft, way)
                found.append({**where, **about, "tree": str(way.tree), "drafters": drafters})
        alone = {**where, "policy": None, "tree": None, "drafters": []}
        found += [{**alone, "name": name} for name in others]
    return found
