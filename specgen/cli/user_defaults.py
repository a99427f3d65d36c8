"""The user's defaults of options, from `config.toml` in the configuration folder.

A key is the long name of an option, without its dashes. Keys at the top are for every target; a
table `[targets."NAME"]` is for one. Environment variables and the command line take precedence.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer

from specgen.cli.typer_messages import in_words
from specgen.errors import UsageError
from specgen.system.files import read_toml

#: The commands that answer prompts take all defaults.
_ANSWERING = ("run", "chat", "fim", "batch", "serve", "config")
#: The others, which measure or make drafts, take only the defaults under these headings: those
#: that name models and describe the machine.
_PANELS = ("Models", "Machine")
#: Options that say what is asked for, not how, have no default in the file.
_NO_DEFAULTS = ("prompt", "file", "stop", "logprobs", "json", "verbose", "help")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value in the file."""

    #: The file and the key, for messages.
    where: str
    value: Any


def config_file() -> Path:
    """Return the path of the file, which need not exist."""
    from specgen.system.folders import config_folder

    return config_folder() / "config.toml"


def option_keys(parameter: Any) -> list[str]:
    """Return the keys of an option in the file, its readable spelling first.

    There are none if it has no default there.
    """
    if parameter.param_type_name != "option" or parameter.is_eager:
        return []
    if parameter.rich_help_panel == "Constrained answers":
        return []
    names = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
    return [] if names[0] in _NO_DEFAULTS else names


def user_defaults(context: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's defaults for a command, by its parameters.

    Args:
        context: Typer's context of the command.
        given: What the command line has, by the command's parameters.

    Raises:
        UsageError: Something in the file is wrong, even if it is not for this command.
    """
    path = config_file()
    document = read_toml(path) if path.exists() else {}
    if not document:
        return {}
    command = context.command
    known = _known_options(context)
    own = _by_key(command)
    entries, by_target = _read(document, path, known)
    target = given.get(own["target"].name) if "target" in own else None
    pair = given.get(own["pair"].name) if "pair" in own else None
    entries = _for_models(entries, by_target, target, pair)
    # All are checked, not only those that concern the command.
    takes_all = command.name in _ANSWERING
    defaults = {}
    for key, entry in entries.items():
        option = own.get(key, known[key])
        value = checked(entry.where, entry.value, option, context)
        if key in own and (takes_all or option.rich_help_panel in _PANELS):
            defaults[option.name] = value
    return defaults


def checked(where: str, value: Any, option: Any, context: Any) -> Any:
    """Return a value from a file as the value of an option, like one on the command line.

    Args:
        where: What names the value in messages.
        value: A value as TOML has it.
        option: Typer's option.
        context: The context of its command.

    Raises:
        UsageError: The option has no such value.
    """
    values = value if isinstance(value, list) else [value]
    # Typer takes texts; true and false are lower case in TOML.
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    try:
        if option.multiple:
            return option.process_value(context, texts)
        if len(texts) != 1:
            raise typer.BadParameter("give one value")
        return option.process_value(context, texts[0])
    except typer.BadParameter as error:
        raise UsageError(f"{where} = {', '.join(texts)}: {in_words(error.message)}") from None


def _known_options(context: Any) -> dict[str, Any]:
    """Return the options of all commands that have defaults, by their keys."""
    root = context.find_root().command
    root.load(*_ANSWERING)
    known: dict[str, Any] = {}
    for name in reversed(_ANSWERING):  # the first commands' options count
        known |= _by_key(root.commands[name])
    return known


def _by_key(command: Any) -> dict[str, Any]:
    return {key: option for option in command.params for key in option_keys(option)}


#: The values in a table, by the options' readable spellings.
_Entries: TypeAlias = dict[str, _Entry]


def _read(
    document: Mapping[str, Any], path: Path, known: Mapping[str, Any]
) -> tuple[_Entries, dict[str, _Entries]]:
    """Return the values at the top of the file, and those of the tables for targets, by name."""
    top = dict(document)
    tables = top.pop("targets", {})
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise UsageError(f'{path}: targets: give tables, as in [targets."NAME"]')
    by_target = {
        name: _entries(f'{path}: targets."{name}".', table, known) for name, table in tables.items()
    }
    return _entries(f"{path}: ", top, known), by_target


def _entries(where: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> _Entries:
    """Return the values in a table. `where` names it in messages."""
    entries = {}
    for key, value in table.items():
        spelling = key.replace("_", "-")
        if spelling not in known:
            near = difflib.get_close_matches(spelling, [*known, "targets"], n=1)
            hint = f"the nearest one is {near[0]}" if near else "`specgen config` lists the keys"
            raise UsageError(f"{where}{key}: there is no such key", hint=hint)
        readable = option_keys(known[spelling])[0]
        entries[readable] = _Entry(f"{where}{key}", value)
    return entries


def _for_models(
    entries: _Entries, by_target: Mapping[str, _Entries], target: str | None, pair: str | None
) -> _Entries:
    """Return the entries of the file for the models that the command line names, or the file."""
    if not target and not pair:
        target = _value(entries, "target")
        pair = _value(entries, "pair")
    elif "target" in entries or "pair" in entries:
        # The file's draft is for the file's target.
        entries = {
            key: entry for key, entry in entries.items() if key not in ("target", "pair", "draft")
        }
    if not by_target:
        return entries
    if target is None:
        from specgen.models.registry import load_registry

        registry = load_registry()
        known = registry.pairs.get(pair or registry.default_pair)
        target = "" if known is None else known.target
    # A table may have the name that was given, or the file's, with or without its suffix.
    path = Path(str(target))
    for name, table in by_target.items():
        if name in (str(target), path.name, path.stem):
            return entries | table
    return entries


def _value(entries: _Entries, key: str) -> Any:
    return entries[key].value if key in entries else None
